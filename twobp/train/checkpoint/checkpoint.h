// A checkpoint's folder opened for reading: its tensors by name, whichever process wrote them. What lies in
// it is said in checkpoint_format.h.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp {

// The folder is untrusted: files that are missing, truncated or changed are found before anything in them is
// used.
class Checkpoint {
 public:
  using File = CheckpointFile;
  enum class Verify : uint8_t {
    kAll,        // every file is read once when it is opened
    kWhatIsRead  // sizes when it is opened; a file is read once by check_tensors, if it has one of them
  };

  // Throws Error naming the file and what is wrong with it.
  explicit Checkpoint(std::filesystem::path folder, Verify verify = Verify::kAll);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::filesystem::path& folder() const { return folder_; }
  const CheckpointState& state() const { return state_; }
  const FileList& files() const { return files_; }
  int format() const { return format_; }
  // The most processes that may have written it: those its files are named after.
  int processes() const;

  std::vector<std::string> names(File file) const;  // sorted
  bool contains(File file, const std::string& name) const { return where_.contains({file, name}); }
  const std::string& file_with(File file, const std::string& name) const;

  // The named tensors must be there, with these shapes and dtypes; Error names the first that is not. Call
  // before `read`.
  void check_tensors(File file, const NamedTensors& expected) const;
  // There must be none but these.
  void check_no_others(File file, const std::set<std::string>& known) const;
  // Mapped memory that lives as long as this object. Any thread.
  at::Tensor read(File file, const std::string& name) const;

 private:
  struct Part;
  const Part& part_with(File file, const std::string& name) const;
  void verify(const Part& part) const;
  // For messages.
  std::string place_of(File file) const;

  std::filesystem::path folder_;
  CheckpointState state_;
  FileList files_;
  int format_ = 0;
  std::vector<std::unique_ptr<Part>> parts_;
  std::map<std::pair<File, std::string>, const Part*> where_;
};

// Reads every file of a checkpoint's folder, and returns what is wrong, a line a file; nothing if it is
// whole.
std::vector<std::string> problems_of(const std::filesystem::path& folder);

}  // namespace twobp
