// The tensors of a Hugging Face directory: model.safetensors, or several files with model.safetensors.index.json, which
// lists the file of each tensor.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "twobp/files/safetensors.h"

namespace twobp {

// A stored tensor that holds the weights of all experts of a layer: (experts, outputs, inputs), or (experts, outputs)
// of their biases. `transposed`: (experts, inputs, outputs).
struct ExpertStack {
  std::vector<std::string> parts;  // the parameters: each projection of the first expert, and so on
  size_t projections = 1;          // of an expert, one after the other in its outputs
  bool transposed = false;
  bool interleaved = false;  // their outputs take turns
  std::string module{};      // the tensor in the module, for the name of its adapters; "": it has none

  // Part i of the stored tensor, a view.
  at::Tensor part(const at::Tensor& whole, size_t i) const;
  at::Tensor whole(const std::vector<at::Tensor>& parts) const;
};

// An architecture's names for its tensors in a directory, where they differ from the model's.
struct TensorNames {
  // Returns the model's name of a stored tensor, or "" if the model has no such parameter. Null: names are the same.
  std::function<std::string(const std::string& stored)> rename;
  // Pairs of names for tensors that are the same in some models. If a directory has one of them, it serves as the other
  // too.
  std::vector<std::pair<std::string, std::string>> same;
  // Further names of parameters (of tied weights), with the parameter's name. A tensor under such a name must equal the
  // parameter.
  std::map<std::string, std::string> copies;
  // Tensors that follow from the model's options, such as the frequencies of a rotary embedding. Returns the values
  // that the named tensor may have; none if there is no such tensor. Null: none.
  std::function<std::vector<at::Tensor>(const std::string& name)> derived;
  // By name. A directory has the stack or its parts.
  std::map<std::string, ExpertStack> stacks;
  bool writes_stacks = false;  // whether a model is saved with them
  // Tensors that files keep in float32, as transformers does.
  std::set<std::string> in_float32;
  // Tensors that the model does not use.
  std::set<std::string> unused;
  // Whether a directory may have further tensors. They are saved as they were read.
  bool has_others = false;
  // Whether a directory may lack a parameter, which then starts as in a new model. Null: no.
  bool (*may_lack)(const std::string& parameter) = nullptr;
};

// Compares values. Numbers of different types are compared in float32.
bool same_values(const at::Tensor& a, const at::Tensor& b);

class ModelWeights {
 public:
  // Opens all files and reads their headers. The weights themselves are read on access. The folder is untrusted. Throws
  // Error if there are no weights, a file is damaged, the index does not match the files or names a file outside the
  // folder, or two stored names of one tensor have different values.
  explicit ModelWeights(std::string directory, TensorNames naming = {});
  ModelWeights(const ModelWeights&) = delete;  // in_stack_ points into naming_
  ModelWeights& operator=(const ModelWeights&) = delete;

  const std::string& directory() const { return directory_; }
  std::vector<std::string> names() const;  // the model's names, sorted
  bool may_lack(const std::string& name) const { return naming_.may_lack && naming_.may_lack(name); }
  const TensorNames& naming() const { return naming_; }
  // The stored names of tensors that the model has no use for (TensorNames::rename gives "").
  const std::vector<std::string>& without_use() const { return without_use_; }
  bool contains(const std::string& name) const { return file_of_.contains(name); }
  // See SafetensorsFile. Throws Error if the tensor does not exist or its dtype is not supported.
  at::Tensor tensor(const std::string& name) const;
  std::vector<int64_t> shape(const std::string& name) const;

 private:
  void read_index(const std::string& path);
  void rename();
  void take_apart(const std::string& name, const ExpertStack& stack);
  void copy_name(const std::string& from, const std::string& to);
  const SafetensorsFile& file(const std::string& name) const;
  const std::string& stored(const std::string& name) const;

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  TensorNames naming_;
  std::vector<std::string> without_use_;
  std::map<std::string, size_t> file_of_;
  std::map<std::string, std::string> stored_;  // of tensors that are stored under another name
  std::map<std::string, std::pair<const ExpertStack*, size_t>> in_stack_;  // parts of stored tensors
};

}  // namespace twobp
