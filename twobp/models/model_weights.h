// The tensors of a Hugging Face directory: model.safetensors, or several files with
// model.safetensors.index.json, which lists the file of each tensor.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "twobp/files/safetensors.h"

namespace twobp {

// An architecture's names for its tensors in a directory, where they differ from the model's.
struct TensorNames {
  // Returns the model's name of a stored tensor, or "" if the model has no such parameter. Null: names are
  // the same. A tensor stored under the model's name takes precedence over a renamed one.
  std::string (*rename)(const std::string& stored) = nullptr;
  // Pairs of names for tensors that are the same in some models. If a directory has one of them, it serves as
  // the other too.
  std::vector<std::pair<std::string, std::string>> same;
  // Whether a directory may have a tensor that the model does not have. Null: no.
  bool (*may_ignore)(const std::string& name) = nullptr;
  // Whether a directory may lack a parameter, which then starts as in a new model. Null: no.
  bool (*may_lack)(const std::string& parameter) = nullptr;
};

class ModelWeights {
 public:
  // Opens all files and reads their headers. The weights themselves are read on access. The folder is
  // untrusted. Throws Error if there are no weights, a file is damaged, or the index does not match the files
  // or names a file outside the folder.
  explicit ModelWeights(std::string directory, TensorNames naming = {});

  const std::string& directory() const { return directory_; }
  std::vector<std::string> names() const;  // the model's names, sorted
  bool may_lack(const std::string& name) const { return naming_.may_lack && naming_.may_lack(name); }
  bool may_ignore(const std::string& name) const { return naming_.may_ignore && naming_.may_ignore(name); }
  bool contains(const std::string& name) const { return file_of_.contains(name); }
  // See SafetensorsFile. Throws Error if the tensor does not exist or its dtype is not supported.
  at::Tensor tensor(const std::string& name) const { return file(name).tensor(stored(name)); }
  const std::vector<int64_t>& shape(const std::string& name) const { return file(name).shape(stored(name)); }

 private:
  void read_index(const std::string& path);
  void rename();
  void copy_name(const std::string& from, const std::string& to);
  const SafetensorsFile& file(const std::string& name) const;
  const std::string& stored(const std::string& name) const;

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  TensorNames naming_;
  std::map<std::string, size_t> file_of_;
  std::map<std::string, std::string> stored_;  // of tensors that are stored under another name
};

}  // namespace twobp
