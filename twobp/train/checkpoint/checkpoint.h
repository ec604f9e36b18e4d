// Reads a checkpoint's folder: its tensors by name, whichever process wrote them. checkpoint_format.h describes the
// contents.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "twobp/train/checkpoint/checkpoint_format.h"
#include "twobp/train/config.h"
#include "twobp/train/weights/save_model.h"

namespace twobp {

// The folder is untrusted. Missing, truncated or changed files are detected before any of their contents are used.
class Checkpoint {
 public:
  using File = CheckpointFile;
  enum class Verify : uint8_t {
    kAll,        // reads every file once on opening
    kWhatIsRead  // checks sizes on opening; check_tensors reads a file once if it needs one of its tensors
  };

  // Throws Error that names the file and says what is wrong with it.
  explicit Checkpoint(std::filesystem::path folder, Verify verify = Verify::kAll);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::filesystem::path& folder() const { return folder_; }
  const CheckpointState& state() const { return state_; }
  const FileList& files() const { return files_; }
  int format() const { return format_; }
  // The number of processes that wrote it, by its files' names. The largest number if they differ.
  int processes() const;

  std::vector<std::string> names(File file) const;  // sorted
  bool whole(File file, const std::string& name) const { return where_.contains({file, name}); }
  // Also if it is there in pieces.
  bool contains(File file, const std::string& name) const {
    return where_.contains({file, name}) || pieces_.contains({file, name});
  }
  const std::string& file_with(File file, const std::string& name) const;

  // Throws Error that names the first tensor, or piece of one, that does not exist with this shape and dtype. Call this
  // before `read`.
  void check_tensors(File file, const NamedTensors& expected) const;
  // Throws Error if there are tensors other than these.
  void check_no_others(File file, const std::set<std::string>& known) const;
  // Reads the tensor, or the piece. If it is stored in other pieces, it comes flat. May be called from any thread.
  at::Tensor read(File file, const std::string& name) const;

 private:
  struct Part;
  struct Piece {
    PieceName name;
    const Part* part;
  };
  // Throws Error unless the pieces of each tensor follow each other from its begin.
  void check_pieces() const;
  // Where the numbers of a tensor lie, or those of a piece.
  std::vector<Piece> pieces_with(File file, const PieceName& name) const;
  const Part& part_with(File file, const std::string& name) const;
  void verify(const Part& part) const;
  // A name for messages.
  std::string place_of(File file) const;

  std::filesystem::path folder_;
  CheckpointState state_;
  FileList files_;
  int format_ = 0;
  std::vector<std::unique_ptr<Part>> parts_;
  std::map<std::pair<File, std::string>, const Part*> where_;          // by stored name
  std::map<std::pair<File, std::string>, std::vector<Piece>> pieces_;  // by name of the whole, in rising order
};

// Reads every file of a checkpoint's folder and returns the problems, one line per file. Empty if the checkpoint is
// whole.
std::vector<std::string> problems_of(const std::filesystem::path& folder);

// Writes what save_model would write at the end of the checkpoint's run. `config` is the configuration of that run. All
// weights are in memory meanwhile. Throws Error if the checkpoint's weights are not exactly those of the
// configuration's model, the model cannot be saved, or the folder cannot be written to.
void save_model_of(const Checkpoint& checkpoint, const Config& config, const std::string& directory,
                   const SaveModelOptions& options = {});

}  // namespace twobp
