// safetensors files: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, offsets),
// and the tensors' bytes. The format is described at https://github.com/huggingface/safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"

namespace twobp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// A file opened for reading. It is untrusted: lengths, offsets and shapes are checked on opening.
class SafetensorsFile {
 public:
  // Opens the file and reads its header. Throws Error that names the file and says what is wrong with it.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return entries_.contains(name); }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Reads the tensor into memory of its own. Any thread may call it. Throws Error as type() does, or if the
  // file has become shorter.
  at::Tensor tensor(const std::string& name) const;
  // These do not read the tensor's bytes. They throw Error if the tensor does not exist; type() also if its
  // dtype is not F64, F32, F16, BF16, I64, I32, I16, I8, U8 or BOOL.
  const std::vector<int64_t>& shape(const std::string& name) const { return entry(name).shape; }
  at::ScalarType type(const std::string& name) const;

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  // within the data
    uint64_t end = 0;
  };

  void read_header();
  // Checks that there are no gaps, no overlaps and no trailing bytes: the entries describe all of the data.
  void check_places() const;
  const Entry& entry(const std::string& name) const;

  std::string path_;
  InputFile file_;
  uint64_t data_begin_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

// The dtypes of tensors in a file. Those that are not floating-point keep their own.
struct StoredTypes {
  std::optional<at::ScalarType> floats{};  // none: their own
  std::set<std::string> in_float32{};      // names of tensors that are float32, whatever `floats` is

  at::ScalarType of(const std::string& name, const at::Tensor& tensor) const;
  int64_t bytes_of(const std::string& name, const at::Tensor& tensor) const;
};

// Tensors that must be converted or made contiguous are copied one at a time. The file appears when all of it
// is on disk. Throws Error for a full disk, two tensors of one name, a dtype that the reader does not know,
// or a finite number that its type turns into infinity.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata, const StoredTypes& types = {});
// Writes to a new file that the caller commits.
void write_safetensors(NewFile& file, const NamedTensors& tensors, const std::map<std::string, std::string>& metadata,
                       const StoredTypes& types = {});

// Whether a tensor holds numbers only: neither infinity nor NaN.
// One pass, without a copy. Integers are always finite.
bool only_finite(const at::Tensor& tensor);

}  // namespace twobp
