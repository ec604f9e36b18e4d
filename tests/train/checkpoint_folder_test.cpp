// Tests checkpoints on the disk. The last few are kept, leftovers are removed, damage is noticed, and a failed write
// leaves the last good checkpoint.
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/checkpoint_runs.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

namespace fs = std::filesystem;
using test::checkpoint_config;
using test::expect_error;
using test::read_file;
using test::run;
using test::RunResult;
using test::step_name;
using test::TempFolder;
using test::visible_names;

const std::vector<std::string> kFiles = {"weights.safetensors", "optimizer.safetensors", "state.json"};

void write_file(const fs::path& path, const std::string& content) {
  fs::remove(path);  // the old file may be mapped
  std::ofstream(path, std::ios::binary) << content;
}

CheckpointContent small_content(int64_t step) {
  CheckpointContent content;
  content.state.position.step = step;
  content.state.run = {"{}", "data", "kernels"};
  content.weights = {{"a", at::full({3, 4}, static_cast<double>(step))}, {"b", at::ones({5})}};
  content.optimizer = {{"a.momentum", at::ones({3, 4})}};
  return content;
}

void write_checkpoint(const fs::path& folder, const CheckpointContent& content) {
  commit_parts(folder, content.state, 1, write_part(folder, content));
}

TEST(CheckpointFolder, KeepsTheLastFew) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.save.keep = 2;
  run(config);
  EXPECT_EQ(visible_names(config.save.checkpoints), (std::vector<std::string>{step_name(5), step_name(6)}));
  for (const std::string& name : {step_name(5), step_name(6)}) {
    EXPECT_EQ(visible_names(config.save.checkpoints + "/" + name),
              (std::vector<std::string>{"optimizer.safetensors", "state.json", "weights.safetensors"}));
  }
  // From now on, fewer checkpoints are kept. The last step counts although it is not a multiple of save.every.
  config.save.keep = 1;
  config.save.every = 5;
  config.train.steps = 8;
  config.optimizer.schedule = "constant";
  TempFolder other;
  config.save.checkpoints = other.path("checkpoints");
  run(config);
  EXPECT_EQ(visible_names(config.save.checkpoints), std::vector<std::string>{step_name(8)});
}

TEST(CheckpointFolder, RemovesLeftoversOfKilledWriters) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints");
  for (const char* name :
       {"step-00000003.new", "step-00000003.0123456789abcdef.new", "step-00000001.old", "step-00000002", "step-5",
        "mine.new", "step-00000004.0123456789abcde.new", "step-00000004.0123456789abcdeg.new"}) {
    fs::create_directories(path + "/" + name);
    write_file(path + "/" + name + "/weights.safetensors", "half");
  }
  const CheckpointFolder checkpoints(path, 3);
  EXPECT_EQ(visible_names(path),
            (std::vector<std::string>{"mine.new", "step-00000002", "step-00000004.0123456789abcde.new",
                                      "step-00000004.0123456789abcdeg.new", "step-5"}));
  EXPECT_EQ(checkpoints.steps(), std::vector<int64_t>{2});
}

TEST(CheckpointFolder, BelongsToOneRunAtATime) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints/");
  {
    CheckpointFolder first(path, 3);
    expect_error([&] { CheckpointFolder(path, 3, 1, /*patience=*/0.2); },
                 {"save.checkpoints", "in use by another run"});
    first.add(small_content(1));
  }
  EXPECT_EQ(CheckpointFolder(path, 3).steps(), std::vector<int64_t>{1});
}

// A killed process may need a moment to end.
TEST(CheckpointFolder, WaitsForARunThatIsEnding) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints/");
  auto first = std::make_unique<CheckpointFolder>(path, 3);
  std::thread ending([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    first.reset();
  });
  EXPECT_NO_THROW(CheckpointFolder(path, 3));
  ending.join();
}

// A file can be broken in these ways. Each time, the previous checkpoint is taken and the reason is reported.
TEST(CheckpointFolder, TakesThePreviousCheckpointIfTheNewestIsDamaged) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  const RunResult whole = run(config);
  const std::vector<std::pair<std::string, std::function<void(const fs::path&)>>> damages = {
      {"missing", [](const fs::path& path) { fs::remove(path); }},
      {"empty", [](const fs::path& path) { write_file(path, ""); }},
      {"half", [](const fs::path& path) { write_file(path, read_file(path).substr(0, read_file(path).size() / 2)); }},
      {"one byte short", [](const fs::path& path) { write_file(path, read_file(path).substr(1)); }},
      {"longer", [](const fs::path& path) { write_file(path, read_file(path) + "x"); }},
      {"a bit in the middle",
       [](const fs::path& path) {
         std::string content = read_file(path);
         content[content.size() / 2] = static_cast<char>(content[content.size() / 2] ^ 1);
         write_file(path, content);
       }},
      {"a folder", [](const fs::path& path) {
         fs::remove(path);
         fs::create_directory(path);
       }}};
  for (const std::string& file : kFiles) {
    for (const auto& [what, damage] : damages) {
      SCOPED_TRACE(concat(file, ": ", what));
      const TempFolder copy;
      fs::copy(config.save.checkpoints, copy.path("checkpoints"), fs::copy_options::recursive);
      damage(copy.path("checkpoints/" + step_name(6)) + "/" + file);
      CheckpointFolder checkpoints(copy.path("checkpoints"), 3);
      std::vector<std::string> warnings;
      const std::optional<Checkpoint> newest = checkpoints.newest(warnings);
      ASSERT_TRUE(newest.has_value());
      EXPECT_EQ(newest->state().position.step, 5);
      ASSERT_EQ(warnings.size(), 1U);
      EXPECT_NE(warnings[0].find(file), std::string::npos) << warnings[0];
      EXPECT_NE(warnings[0].find(step_name(6)), std::string::npos) << warnings[0];
      EXPECT_NE(warnings[0].find("using the previous checkpoint"), std::string::npos) << warnings[0];
    }
  }
}

TEST(CheckpointFolder, ReportsThatAllAreDamaged) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  run(config, false, 2);
  for (const int step : {1, 2}) fs::remove(config.save.checkpoints + "/" + step_name(step) + "/state.json");
  expect_error([&] { run(config, true); },
               {"none of the 2 checkpoints", config.save.checkpoints, "state.json", "missing"});
}

TEST(CheckpointFolder, NoticesARenamedCheckpoint) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  run(config, false, 2);
  fs::rename(config.save.checkpoints + "/" + step_name(2), config.save.checkpoints + "/" + step_name(9));
  const RunResult resumed = run(config, true, 1);
  EXPECT_EQ(resumed.first_step, 1);
  ASSERT_EQ(resumed.notes.size(), 1U);
  EXPECT_NE(resumed.notes[0].find("holds step 2"), std::string::npos) << resumed.notes[0];
}

TEST(CheckpointFolder, RefusesAHostileState) {
  const TempFolder folder;
  const fs::path path = folder.path("step");
  write_checkpoint(path, small_content(7));
  const auto expect = [&](const std::string& content, const std::vector<std::string>& parts) {
    write_file(path / "state.json", content);
    expect_error([&] { Checkpoint checkpoint(path); }, parts);
  };
  expect(std::string(1 << 20, '['), {"state.json", "nested too deeply"});
  expect(std::string((16 << 20) + 1, ' '), {"state.json", "longer than"});
  expect("[]", {"state.json", "damaged"});
  expect(R"({"crc32": 1, "state": 3})", {"state.json", "damaged"});
  expect(R"({"crc32": 1, "state": {"format": 4}})", {"format 4", "reads formats up to 3"});
  expect(R"({"crc32": 1, "state": {"format": 0}})", {"format 0", "reads formats up to 3"});
  expect(R"({"crc32": 1, "state": {"format": "2"}})", {"format \"2\""});
  expect(R"({"crc32": 1, "state": {"format": 1}})", {"checksum"});
  // An attacker made the file, and its checksum is right.
  for (const char* step : {"-5", "1e300", "2.5", "18446744073709551615", "true"}) {
    const std::string state = concat(R"({"format":1,"step":)", step, "}");
    // The checksum is that of the rewritten file.
    const std::string text = nlohmann::json::parse(state).dump();
    expect(concat(R"({"crc32": )", crc32_of(text.data(), text.size()), R"(, "state": )", state, "}"),
           {"state.json", "damaged: step is not a whole number"});
  }
}

TEST(CheckpointFolder, StoresFrozenWeightsOnce) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.model.freeze = {"*.o_proj.weight"};
  run(config, false, 3);
  const auto frozen = [&](int step) {
    return fs::path(config.save.checkpoints) / step_name(step) / "frozen.safetensors";
  };
  EXPECT_EQ(fs::hard_link_count(frozen(1)), 3U);
  EXPECT_TRUE(fs::equivalent(frozen(1), frozen(3)));
  run(config, true);
  EXPECT_TRUE(fs::equivalent(frozen(1), frozen(6))) << "resumed";
}

// While this object lives, no file can grow beyond `bytes`. For the process, this is like a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(CheckpointFolder, KeepsTheLastGoodCheckpointWhenAWriteFails) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.save.keep = 1;
  const RunResult whole = run(config);
  config.save.checkpoints = folder.path("second");
  run(config, false, 2);
  for (const rlim_t limit : {rlim_t{0}, rlim_t{100}, rlim_t{20'000}}) {
    SCOPED_TRACE(limit);
    const FileSizeLimit full_disk(limit);
    expect_error([&] { run(config, true, 3); }, {config.save.checkpoints, "File too large"});
    EXPECT_EQ(visible_names(config.save.checkpoints), std::vector<std::string>{step_name(2)});
  }
  const RunResult resumed = run(config, true);
  EXPECT_EQ(resumed.first_step, 2);
  test::expect_continues(whole, resumed, "after the disk was full");
}

// The error ends the training, instead of coming only at the end.
TEST(CheckpointFolder, AFailedWriteEndsTraining) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.train.steps = 1000;
  Checkpointer checkpointer(config.save, false);
  Trainer trainer(config);
  const FileSizeLimit full_disk(100);
  expect_error(
      [&] {
        while (trainer.steps_done() < 20) {
          trainer.step();
          checkpointer.after_step(trainer);
        }
      },
      {"File too large"});
  EXPECT_LE(trainer.steps_done(), 2);
  expect_error([&] { checkpointer.finish(trainer); }, {"File too large"});
}

TEST(CheckpointFolder, ReportsAFolderThatVanishes) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  Checkpointer checkpointer(config.save, false);
  Trainer trainer(config);
  fs::remove_all(config.save.checkpoints);
  trainer.step();
  expect_error(
      [&] {
        checkpointer.after_step(trainer);
        checkpointer.finish(trainer);
      },
      {config.save.checkpoints, "No such file"});
}

// The user has no permission to write there. Root may write anywhere.
TEST(CheckpointFolder, ReportsAReadOnlyFolder) {
  constexpr uid_t kNobody = 65534;
  const TempFolder folder;
  const std::string path = folder.path("checkpoints");
  { CheckpointFolder(path, 1).add(small_content(1)); }
  fs::permissions(folder.path(""), fs::perms::owner_all | fs::perms::others_all);
  fs::permissions(path,
                  fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
  const bool root = ::geteuid() == 0;
  if (root) {
    ASSERT_EQ(::seteuid(kNobody), 0);
  }
  expect_error([&] { CheckpointFolder(path, 1); }, {"save.checkpoints", path, "Permission denied"});
  expect_error([&] { CheckpointFolder(path + "/deeper", 1); }, {path + "/deeper", "Permission denied"});
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  fs::permissions(path, fs::perms::owner_all);
  EXPECT_EQ(CheckpointFolder(path, 1).steps(), std::vector<int64_t>{1});
}

TEST(CheckpointFolder, ReportsAFileInThePlaceOfTheFolder) {
  const TempFolder folder;
  const std::string file = folder.write("taken", "mine");
  expect_error([&] { CheckpointFolder(file, 1); }, {"save.checkpoints", file});
  EXPECT_EQ(read_file(file), "mine");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
