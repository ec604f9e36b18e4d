#include "twobp/train/checkpoint/checkpoint.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "twobp/core/check.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

std::string shape_of(at::IntArrayRef sizes, at::ScalarType type) {
  return concat(type, " ", sizes);
}

void check_size(const fs::path& path, uint64_t bytes, const FileFacts& listed) {
  TWOBP_CHECK(bytes == listed.bytes, path.string(), " is damaged: ", bytes, " bytes instead of ", listed.bytes);
}

void check_whole(const fs::path& path, const FileFacts& listed) {
  const FileFacts found = facts_of(path);
  check_size(path, found.bytes, listed);
  TWOBP_CHECK(found.crc == listed.crc, path.string(), " is damaged: it does not match its checksum");
}

// Why the tensors of this run may be others.
const char* other_run(CheckpointFile file) {
  return file == CheckpointFile::kOptimizer
             ? "it is a checkpoint of another model, or optimizer.groups gives the parameter another rule"
             : "it is a checkpoint of another model";
}

}  // namespace

struct Checkpoint::Part {
  fs::path path;
  std::string name;
  FileFacts facts;
  CheckpointFile file;
  SafetensorsFile tensors;
  mutable bool verified = false;
};

Checkpoint::Checkpoint(fs::path folder, Verify verify) : folder_(std::move(folder)) {
  StateAndFiles read = read_state(folder_ / kStateFile);
  state_ = std::move(read.state);
  files_ = std::move(read.files);
  format_ = read.format;
  for (const auto& [name, facts] : files_) {
    const fs::path path = folder_ / name;
    if (verify == Verify::kAll) {
      check_whole(path, facts);
    } else {
      std::error_code error;
      const uint64_t bytes = fs::file_size(path, error);
      TWOBP_CHECK(!error, "cannot read ", path.string(), ": ", error.message());
      check_size(path, bytes, facts);
    }
    const CheckpointFile file = *checkpoint_file_of(name);
    parts_.push_back(
        std::make_unique<Part>(Part{path, name, facts, file, SafetensorsFile(path.string()), verify == Verify::kAll}));
    for (const std::string& tensor : parts_.back()->tensors.names()) {
      const auto [at, is_new] = where_.try_emplace({file, tensor}, parts_.back().get());
      TWOBP_CHECK(is_new, path.string(), " is damaged: ", at->second->name, " has ", tensor, " too");
      const PieceName piece = parse_piece(tensor);
      if (!piece.whole()) pieces_[{file, piece.name}].push_back({piece, at->second});
    }
  }
  for (auto& [name, pieces] : pieces_) {
    std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.name.begin; });
  }
  check_pieces();
}

void Checkpoint::check_pieces() const {
  for (const auto& [key, pieces] : pieces_) {
    int64_t begin = 0;
    for (const auto& [name, part] : pieces) {
      const int64_t numbers = c10::multiply_integers(part->tensors.shape(to_string(name)));
      TWOBP_CHECK(name.begin == begin && name.end - name.begin == numbers && !where_.contains(key), part->path.string(),
                  " is damaged: ", to_string(name), " of ", numbers, " numbers does not follow the number ", begin);
      begin = name.end;
    }
  }
}

std::vector<Checkpoint::Piece> Checkpoint::pieces_with(File file, const PieceName& name) const {
  if (const auto whole = where_.find({file, name.name}); whole != where_.end()) {
    const int64_t numbers = c10::multiply_integers(whole->second->tensors.shape(name.name));
    return {{{name.name, 0, numbers}, whole->second}};
  }
  const auto found = pieces_.find({file, name.name});
  std::vector<Piece> pieces = found == pieces_.end() ? std::vector<Piece>() : found->second;
  if (!name.whole()) {
    std::erase_if(pieces,
                  [&](const Piece& piece) { return piece.name.end <= name.begin || piece.name.begin >= name.end; });
  }
  return pieces;
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

int Checkpoint::processes() const {
  int most = 1;
  for (const auto& [name, facts] : files_) {
    const size_t at = name.find("-of-");
    if (at != std::string::npos) most = std::max(most, std::atoi(name.c_str() + at + 4));
  }
  return most;
}

std::vector<std::string> Checkpoint::names(File file) const {
  std::vector<std::string> names;
  for (const auto& [key, part] : where_) {
    if (key.first == file) names.push_back(key.second);
  }
  return names;
}

const Checkpoint::Part& Checkpoint::part_with(File file, const std::string& name) const {
  const auto found = where_.find({file, name});
  TWOBP_CHECK(found != where_.end(), place_of(file), " has no ", name);
  return *found->second;
}

const std::string& Checkpoint::file_with(File file, const std::string& name) const {
  return part_with(file, name).name;
}

std::string Checkpoint::place_of(File file) const {
  std::string name = checkpoint_file_name(file, {});
  for (const auto& part : parts_) {
    if (part->file == file && part->name != name) name = folder_.filename().string();
  }
  return (name == folder_.filename().string() ? folder_ : folder_ / name).string();
}

void Checkpoint::verify(const Part& part) const {
  if (part.verified) return;
  check_whole(part.path, part.facts);
  part.verified = true;
}

void Checkpoint::check_tensors(File file, const NamedTensors& expected) const {
  for (const auto& [name, tensor] : expected) {
    const PieceName wanted = parse_piece(name);
    TWOBP_CHECK(contains(file, wanted.name), place_of(file), " has no ", wanted.name,
                ", which this run has: ", other_run(file));
    if (!where_.contains({file, name})) {
      const int64_t end = wanted.whole() ? tensor.numel() : wanted.end;
      int64_t there = 0;
      for (const auto& [piece, part] : pieces_with(file, wanted)) {
        verify(*part);
        const at::ScalarType type =
            part->tensors.type(part->tensors.contains(piece.name) ? piece.name : to_string(piece));
        TWOBP_CHECK(type == tensor.scalar_type(), part->path.string(), ": ", wanted.name, " is ", type,
                    ", in this run it is ", tensor.scalar_type(), ": ", other_run(file));
        there = piece.end;
      }
      TWOBP_CHECK(wanted.whole() ? there == end : there >= end, place_of(file), ": ", wanted.name, " has ", there,
                  " numbers, in this run it has ", wanted.whole() ? "" : "at least ", end, ": ", other_run(file));
      continue;
    }
    const Part& part = part_with(file, name);
    verify(part);
    const at::IntArrayRef sizes = part.tensors.shape(name);
    const at::ScalarType type = part.tensors.type(name);
    TWOBP_CHECK(sizes == tensor.sizes() && type == tensor.scalar_type(), part.path.string(), ": ", name, " is ",
                shape_of(sizes, type), ", in this run it is ", shape_of(tensor.sizes(), tensor.scalar_type()), ": ",
                other_run(file));
  }
}

void Checkpoint::check_no_others(File file, const std::set<std::string>& known) const {
  std::set<std::string> wholes;
  for (const std::string& name : known) wholes.insert(parse_piece(name).name);
  for (const auto& [key, part] : where_) {
    TWOBP_CHECK(key.first != file || wholes.contains(parse_piece(key.second).name), part->path.string(), " has ",
                key.second, ", which this run does not have: ", other_run(file));
  }
}

at::Tensor Checkpoint::read(File file, const std::string& name) const {
  const PieceName wanted = parse_piece(name);
  if (where_.contains({file, name}) || !contains(file, wanted.name)) return part_with(file, name).tensors.tensor(name);
  std::vector<at::Tensor> numbers;
  for (const auto& [piece, part] : pieces_with(file, wanted)) {
    const bool whole = part->tensors.contains(piece.name);
    const at::Tensor flat = part->tensors.tensor(whole ? piece.name : to_string(piece)).view({-1});
    const int64_t begin = wanted.whole() ? piece.begin : std::max(piece.begin, wanted.begin);
    const int64_t end = wanted.whole() ? piece.end : std::min(piece.end, wanted.end);
    numbers.push_back(flat.narrow(0, begin - piece.begin, end - begin));
  }
  return at::cat(numbers);
}

std::vector<std::string> problems_of(const fs::path& folder) {
  std::vector<std::string> problems;
  StateAndFiles read;
  try {
    read = read_state(folder / kStateFile);
  } catch (const Error& e) {
    return {e.what()};
  }
  for (const auto& [name, facts] : read.files) {
    try {
      check_whole(folder / name, facts);
      const SafetensorsFile file((folder / name).string());
      for (const std::string& tensor : file.names()) file.type(tensor);  // checks that the type is known
    } catch (const Error& e) {
      problems.emplace_back(e.what());
    }
  }
  if (!problems.empty()) return problems;
  try {
    const Checkpoint whole(folder, Checkpoint::Verify::kWhatIsRead);  // reads no tensor twice
  } catch (const Error& e) {
    problems.emplace_back(e.what());
  }
  return problems;
}

}  // namespace twobp
