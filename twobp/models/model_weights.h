// The tensors of a Hugging Face directory: model.safetensors, or several files with
// model.safetensors.index.json, which says which tensor is where.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "twobp/files/safetensors.h"

namespace twobp {

// How the directories of an architecture call its tensors, where that is not as the model does.
struct TensorNames {
  // The model's name of a stored tensor; "": the model has nothing for it. Null: the stored name. A tensor
  // that has the model's name already goes before one that gets it.
  std::string (*rename)(const std::string& stored) = nullptr;
  // Two names for what is one tensor in some models: where a directory has one of them, it is the other too.
  std::vector<std::pair<std::string, std::string>> same;
  // Whether a directory may have a tensor that the model has not. Null: none.
  bool (*may_ignore)(const std::string& name) = nullptr;
  // Whether a directory may lack a parameter, which then starts as in a new model. Null: none.
  bool (*may_lack)(const std::string& parameter) = nullptr;
};

class ModelWeights {
 public:
  // Opens all files and reads their headers; the weights themselves are read when they are touched. The
  // folder is untrusted. Throws Error: no weights there, a damaged file, an index that does not fit the files
  // or names one outside the folder.
  explicit ModelWeights(std::string directory, TensorNames naming = {});

  const std::string& directory() const { return directory_; }
  std::vector<std::string> names() const;  // the model's, sorted
  bool may_lack(const std::string& name) const { return naming_.may_lack && naming_.may_lack(name); }
  bool may_ignore(const std::string& name) const { return naming_.may_ignore && naming_.may_ignore(name); }
  bool contains(const std::string& name) const { return file_of_.contains(name); }
  // See SafetensorsFile. Throws Error: no such tensor, a dtype that is not supported.
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
  std::map<std::string, std::string> stored_;  // of those that are stored under another name
};

}  // namespace twobp
