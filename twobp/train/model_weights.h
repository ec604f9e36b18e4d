// The tensors of a Hugging Face directory: model.safetensors, or several files with
// model.safetensors.index.json, which says which tensor is where.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "twobp/train/safetensors.h"

namespace twobp {

class ModelWeights {
 public:
  // Opens all files and reads their headers; the weights themselves are read when they are touched. The
  // folder is untrusted. Throws Error: no weights there, a damaged file, an index that does not fit the files
  // or names one outside the folder.
  explicit ModelWeights(std::string directory);

  const std::string& directory() const { return directory_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return file_of_.contains(name); }
  // See SafetensorsFile. Throws Error: no such tensor, a dtype that is not supported.
  at::Tensor tensor(const std::string& name) const { return file(name).tensor(name); }
  const std::vector<int64_t>& shape(const std::string& name) const { return file(name).shape(name); }

 private:
  void read_index(const std::string& path);
  const SafetensorsFile& file(const std::string& name) const;

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> file_of_;
};

}  // namespace twobp
