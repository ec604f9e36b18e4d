// safetensors files: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, place), the
// tensors' bytes. The format is described at https://github.com/huggingface/safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/files/mapped_file.h"
#include "twobp/files/new_file.h"

namespace twobp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// A file opened for reading. It is untrusted: lengths, offsets and shapes are checked when it is opened.
class SafetensorsFile {
 public:
  // Maps the file and reads its header. Throws Error naming the file and what is wrong with it.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return entries_.contains(name); }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // The tensor on the mapped memory, which it keeps alive: for reading only, and read from the disk when
  // touched. Copied if the file has it at an address its type cannot have, and BOOL always. Throws Error: no
  // such tensor, or a dtype other than F64, F32, F16, BF16, I64, I32, I16, I8, U8 and BOOL.
  at::Tensor tensor(const std::string& name) const;
  // Without touching the tensor's bytes. Throws Error: no such tensor.
  const std::vector<int64_t>& shape(const std::string& name) const { return entry(name).shape; }

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  // in the data
    uint64_t end = 0;
  };

  void read_header();
  // No gaps, no overlaps, nothing behind: the data is what the entries describe.
  void check_places() const;
  const Entry& entry(const std::string& name) const;

  std::string path_;
  std::shared_ptr<const MappedFile> file_;
  uint64_t data_begin_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

// Writes the floating point tensors as `dtype` if one is given, all others as they are, tensor by tensor:
// what must be converted or made contiguous is copied one at a time. The file appears when all of it is on
// the disk. Throws Error: disk full, two tensors of one name, a dtype that the reader does not know.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata,
                       std::optional<at::ScalarType> dtype = std::nullopt);
// The same into a new file that the caller commits.
void write_safetensors(NewFile& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata,
                       std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace twobp
