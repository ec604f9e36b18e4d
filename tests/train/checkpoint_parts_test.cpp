// Tests checkpoints that several processes write. Their parts make one checkpoint. A part that is missing, torn or
// foreign is noticed and named. Here, a process is an object with its own folder object, to which it adds its parts.
#include <filesystem>
#include <fstream>
#include <thread>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/checkpoint_runs.h"
#include "twobp/core/measure.h"
#include "twobp/train/checkpoint/checkpoint.h"

namespace twobp::TWOBP_FILE {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::expect_error;
using test::read_file;
using test::step_name;
using test::TempFolder;
using test::visible_names;
using File = CheckpointFile;

// This time in seconds is much longer than the work takes on a busy machine, and much shorter than the time-out of 300
// s.
constexpr double kPromptly = 60;

void write_file(const fs::path& path, const std::string& content) {
  fs::remove(path);  // the old file may be mapped
  std::ofstream(path, std::ios::binary) << content;
}

// Process p has "p.a", "p.b", their state, and "p.frozen".
CheckpointContent content_of(int process, int64_t step) {
  CheckpointContent content;
  content.state.position.step = step;
  content.state.run = {"{}", "data", "kernels"};
  const std::string p = std::to_string(process);
  const double value = static_cast<double>(100 * process + step);
  content.weights = {{p + ".a", at::full({3, 4}, value)}, {p + ".b", at::ones({5})}};
  content.optimizer = {{p + ".a.momentum", at::full({3, 4}, -value)}};
  content.frozen = {{p + ".frozen", at::full({2}, process)}};
  return content;
}

// These are all processes of a run, as checkpoints see them.
class Writers {
 public:
  Writers(std::string path, int processes) : path_(std::move(path)) {
    folders_.push_back(std::make_unique<CheckpointFolder>(path_, 2, processes));
    for (int p = 1; p < processes; ++p) {
      folders_.push_back(
          std::make_unique<CheckpointFolder>(path_, CheckpointPart{p, processes}, folders_[0]->run_id()));
    }
  }

  CheckpointFolder& process(int p) { return *folders_[p]; }
  CheckpointFolder& first() { return *folders_[0]; }
  int size() const { return static_cast<int>(folders_.size()); }
  fs::path aside(int64_t step) { return fs::path(path_) / (step_name(step) + "." + first().run_id() + ".new"); }

  // The first process runs on this thread, the others on threads of their own. They begin at different times.
  void add(int64_t step) {
    std::vector<std::thread> others;
    for (int p = 1; p < size(); ++p) {
      others.emplace_back([this, p, step] {
        std::this_thread::sleep_for(std::chrono::milliseconds(10 * (size() - p)));
        process(p).add(content_of(p, step));
      });
    }
    first().add(content_of(0, step));
    for (std::thread& other : others) other.join();
  }

 private:
  std::string path_;
  std::vector<std::unique_ptr<CheckpointFolder>> folders_;
};

void expect_whole(const fs::path& folder, int processes, int64_t step) {
  const Checkpoint checkpoint(folder);
  EXPECT_EQ(checkpoint.state().position.step, step);
  EXPECT_EQ(checkpoint.names(File::kWeights).size(), 2U * processes);
  for (int p = 0; p < processes; ++p) {
    for (const auto& [name, tensor] : content_of(p, step).weights) {
      EXPECT_TRUE(checkpoint.read(File::kWeights, name).equal(tensor)) << name;
    }
    for (const auto& [name, tensor] : content_of(p, step).optimizer) {
      EXPECT_TRUE(checkpoint.read(File::kOptimizer, name).equal(tensor)) << name;
    }
    for (const auto& [name, tensor] : content_of(p, step).frozen) {
      EXPECT_TRUE(checkpoint.read(File::kFrozen, name).equal(tensor)) << name;
    }
  }
  EXPECT_EQ(problems_of(folder), std::vector<std::string>{});
}

TEST(CheckpointParts, MakeOneCheckpoint) {
  for (const int processes : {1, 2, 5}) {
    const TempFolder folder;
    const std::string path = folder.path("checkpoints");
    Writers run(path, processes);
    for (const int64_t step : {1, 2, 3}) run.add(step);
    EXPECT_EQ(visible_names(path), (std::vector<std::string>{step_name(2), step_name(3)}));
    std::vector<std::string> expected = {"state.json"};
    for (int p = 0; p < processes; ++p) {
      for (const File file : {File::kWeights, File::kOptimizer, File::kFrozen}) {
        expected.push_back(checkpoint_file_name(file, {p, processes}));
      }
    }
    std::sort(expected.begin(), expected.end());
    for (const int64_t step : {2, 3}) {
      EXPECT_EQ(visible_names(path + "/" + step_name(step)), expected);
      expect_whole(path + "/" + step_name(step), processes, step);
    }
    for (int p = 0; p < processes; ++p) {  // two checkpoints are kept
      const std::string frozen = checkpoint_file_name(File::kFrozen, {p, processes});
      EXPECT_EQ(fs::hard_link_count(fs::path(path) / step_name(3) / frozen), 2U) << frozen;
    }
  }
  EXPECT_EQ(checkpoint_file_name(File::kWeights, {1, 4}), "weights-00001-of-00004.safetensors");
  EXPECT_EQ(checkpoint_file_name(File::kOptimizer, {0, 1}), "optimizer.safetensors");
}

// A process that was killed writes no part. The error names it after the time-out, which restarts whenever any process
// writes. No part is left, and the earlier files stay as they were.
TEST(CheckpointParts, NameAMissingPart) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints");
  Writers run(path, 3);
  run.add(1);
  PartsWait wait;
  wait.timeout = 0.3;
  run.process(1).add(content_of(1, 2));
  const double begin = now_seconds();
  expect_error([&] { run.first().add(content_of(0, 2), wait); }, {"no part of process 2", path, "it is stuck"});
  EXPECT_GE(now_seconds() - begin, 0.3);
  EXPECT_LE(now_seconds() - begin, kPromptly);
  EXPECT_EQ(visible_names(path), std::vector<std::string>{step_name(1)});
  expect_whole(path + "/" + step_name(1), 3, 1);

  // This process is slower than the time-out, but is never silent for that long.
  std::thread slow([&] {
    fs::create_directory(run.aside(3));
    for (int i = 0; i < 8; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      write_file(run.aside(3) / "weights-00002-of-00003.safetensors.new", std::string(i + 1, ' '));
    }
    fs::remove(run.aside(3) / "weights-00002-of-00003.safetensors.new");
    run.process(1).add(content_of(1, 3));
    run.process(2).add(content_of(2, 3));
  });
  run.first().add(content_of(0, 3), wait);
  slow.join();
  expect_whole(path + "/" + step_name(3), 3, 3);
}

// The end of a failing run does not wait for long.
TEST(CheckpointParts, HurryEndsTheWait) {
  const TempFolder folder;
  Writers run(folder.path("checkpoints"), 2);
  const std::atomic<bool> hurry{true};
  PartsWait wait;
  wait.hurry = &hurry;
  const double begin = now_seconds();
  expect_error([&] { run.first().add(content_of(0, 2), wait); }, {"no part of process 1"});
  EXPECT_LE(now_seconds() - begin, kPromptly);
}

// The first process reports the same reason at once.
TEST(CheckpointParts, ReportAFailedPart) {
  const TempFolder folder;
  Writers run(folder.path("checkpoints"), 2);
  fs::create_directories(run.aside(4) / "weights-00001-of-00002.safetensors");
  expect_error([&] { run.process(1).add(content_of(1, 4)); },
               {"weights-00001-of-00002.safetensors", "a folder of that name"});
  const double begin = now_seconds();
  expect_error([&] { run.first().add(content_of(0, 4)); },
               {"process 1: ", "weights-00001-of-00002.safetensors", "a folder of that name"});
  EXPECT_LE(now_seconds() - begin, kPromptly);
  EXPECT_EQ(visible_names(folder.path("checkpoints")), std::vector<std::string>{});
}

// The parts have wrong contents: they are torn, of another step, of another process, or have other files.
TEST(CheckpointParts, RefuseAWrongPart) {
  const TempFolder folder;
  Writers run(folder.path("checkpoints"), 2);
  int64_t step = 10;
  const auto expect = [&](const std::function<void(const fs::path& aside)>& spoil,
                          const std::vector<std::string>& parts) {
    ++step;
    run.process(1).add(content_of(1, step));
    spoil(run.aside(step));
    expect_error([&] { run.first().add(content_of(0, step)); }, parts);
    EXPECT_EQ(visible_names(folder.path("checkpoints")), std::vector<std::string>{});
  };
  const std::string report = "part-00001-of-00002.json";
  expect([&](const fs::path& aside) { fs::resize_file(aside / report, 60); }, {report, "damaged"});
  expect([&](const fs::path& aside) { write_file(aside / report, ""); }, {report, "damaged"});
  expect(
      [&](const fs::path& aside) {
        std::string text = read_file(aside / report);
        char& digit = text[text.find("\"bytes\": ") + 9];
        digit = digit == '1' ? '2' : '1';
        write_file(aside / report, text);
      },
      {report, "checksum"});
  expect(
      [&](const fs::path& aside) {
        write_part_report(aside / report, {step - 1, {1, 2}, {}, ""});
      },
      {report, concat("of step ", step), concat("not of step ", step + 1)});
  expect(
      [&](const fs::path& aside) {
        write_part_report(aside / report, {step, {1, 3}, {}, ""});
      },
      {report, "process 1 of 3", "process 1 of 2"});
  const std::string others = "weights-00000-of-00002.safetensors";
  expect(
      [&](const fs::path& aside) {
        write_part_report(aside / report, {step, {1, 2}, {{others, {}}}, ""});
      },
      {report, others, "not that process's"});
  const std::string mine = "optimizer-00001-of-00002.safetensors";
  expect([&](const fs::path& aside) { fs::remove(aside / mine); }, {mine, "process 1", "missing"});
  expect([&](const fs::path& aside) { fs::resize_file(aside / mine, 9); }, {mine, "damaged: 9 bytes instead"});
}

// One bit of any byte of any file is flipped. The damage is noticed and the file is named. The other files stay as they
// were.
TEST(CheckpointParts, NoticeEveryFlippedBit) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints");
  Writers run(path, 3);
  run.add(1);
  const fs::path step = fs::path(path) / step_name(1);
  SplitMix64 random(3);
  for (const std::string& name : visible_names(step.string())) {
    const std::string original = read_file(step / name);
    for (size_t at = 0; at < original.size(); ++at) {
      std::string flipped = original;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bounded(random, 8)));
      write_file(step / name, flipped);
      const std::vector<std::string> problems = problems_of(step);
      ASSERT_EQ(problems.size(), 1U) << name << " at " << at;
      EXPECT_NE(problems[0].find(name), std::string::npos) << problems[0];
      EXPECT_THROW(Checkpoint{step}, Error);
    }
    write_file(step / name, original);
  }
  EXPECT_EQ(problems_of(step), std::vector<std::string>{});
}

// A process reads only the files that it needs. It may open a checkpoint whose other files are damaged.
TEST(CheckpointParts, VerifyTheFilesThatAreRead) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints");
  Writers run(path, 2);
  run.add(1);
  const fs::path file = fs::path(path) / step_name(1) / "weights-00001-of-00002.safetensors";
  std::string content = read_file(file);
  content.back() ^= 1;
  write_file(file, content);
  const Checkpoint checkpoint = run.process(1).open(1);
  checkpoint.check_tensors(File::kWeights, content_of(0, 1).weights);
  expect_error([&] { checkpoint.check_tensors(File::kWeights, content_of(1, 1).weights); },
               {file.filename().string(), "damaged", "checksum"});
  write_file(file, content + " ");
  expect_error([&] { run.process(1).open(1); }, {file.filename().string(), "damaged"});
}

// Replicas may each hold some numbers of a tensor.
TEST(CheckpointParts, HoldPieces) {
  const at::Tensor all = at::arange(12, at::kFloat);
  const auto with = [&](const std::vector<std::pair<int64_t, int64_t>>& pieces, const auto& body) {
    const TempFolder folder;
    CheckpointContent content = content_of(0, 1);
    for (const auto& [begin, end] : pieces)
      content.optimizer.emplace_back(concat("0.c.m[", begin, ':', end, ']'), all.narrow(0, begin, end - begin).clone());
    CheckpointFolder(folder.path("checkpoints"), 2).add(content);
    body(fs::path(folder.path("checkpoints")) / step_name(1));
  };
  with({{0, 5}, {5, 11}, {11, 12}}, [&](const fs::path& folder) {
    const Checkpoint checkpoint(folder);
    EXPECT_EQ(checkpoint.names(File::kOptimizer).size(), 4U);
    EXPECT_TRUE(checkpoint.read(File::kOptimizer, "0.c.m").equal(all));
    EXPECT_TRUE(checkpoint.read(File::kOptimizer, "0.c.m[3:12]").equal(all.narrow(0, 3, 9)));
    EXPECT_TRUE(checkpoint.read(File::kOptimizer, "0.c.m[6:8]").equal(all.narrow(0, 6, 2)));
    EXPECT_TRUE(checkpoint.read(File::kOptimizer, "0.a.momentum[1:3]").equal(at::full({2}, -1.0F)));
    checkpoint.check_tensors(File::kOptimizer, {{"0.c.m", all.view({3, 4})}, {"0.c.m[2:7]", all.narrow(0, 2, 5)}});
    checkpoint.check_tensors(File::kOptimizer, {{"0.a.momentum[2:12]", all.narrow(0, 2, 10)}});
    const auto refuse = [&](const std::string& name, const at::Tensor& tensor, const std::string& why) {
      expect_error([&] { checkpoint.check_tensors(File::kOptimizer, {{name, tensor}}); }, {why, "another model"});
    };
    refuse("0.c.m", at::ones({13}), "0.c.m has 12 numbers");
    refuse("0.c.m", at::ones({3}), "0.c.m has 12 numbers");
    refuse("0.c.m[8:13]", at::ones({5}), "0.c.m has 12 numbers, in this run it has at least 13");
    refuse("0.c.m[8:12]", at::ones({4}, at::kDouble), "0.c.m is Float, in this run it is Double");
    refuse("0.d.m[8:12]", at::ones({4}), "has no 0.d.m");
    checkpoint.check_no_others(File::kOptimizer, {"0.a.momentum", "0.c.m[0:9]"});
    expect_error([&] { checkpoint.check_no_others(File::kOptimizer, {"0.a.momentum"}); }, {"has 0.c.m[0:5]"});
  });
  for (const auto& pieces : std::vector<std::vector<std::pair<int64_t, int64_t>>>{
           {{1, 5}}, {{0, 5}, {6, 12}}, {{0, 5}, {4, 12}}, {{0, 5}, {0, 12}}}) {
    with(pieces, [&](const fs::path& folder) {
      expect_error([&] { const Checkpoint checkpoint(folder); }, {"is damaged", "0.c.m[", "does not follow"});
    });
  }
}

TEST(CheckpointParts, RefuseATensorInTwoParts) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints");
  Writers run(path, 2);
  run.process(1).add(content_of(0, 1));
  run.first().add(content_of(0, 1));
  expect_error([&] { Checkpoint{fs::path(path) / step_name(1)}; },
               {"-00001-of-00002.safetensors", "-00000-of-00002.safetensors", "0.", "too"});
  EXPECT_EQ(problems_of(fs::path(path) / step_name(1)).size(), 1U);
}

// Two runs overlap: one is ending while the other has begun. Neither touches the other's files.
TEST(CheckpointParts, IgnoreWritersOfAnEarlierRun) {
  const TempFolder folder;
  const std::string path = folder.path("checkpoints");
  auto before = std::make_unique<Writers>(path, 2);
  CheckpointFolder orphan(path, {1, 2}, before->first().run_id());
  before.reset();
  Writers now(path, 2);
  orphan.add(content_of(3, 1));
  now.add(1);
  expect_whole(path + "/" + step_name(1), 2, 1);
}

TEST(CheckpointParts, ReportAFolderThatIsNotShared) {
  const TempFolder folder;
  Writers run(folder.path("checkpoints"), 2);
  fs::create_directory(folder.path("mine"));
  expect_error(
      [&] {
        CheckpointFolder(folder.path("mine"), {1, 2}, run.first().run_id(), /*patience=*/0.2);
      },
      {"save.checkpoints", folder.path("mine"), "process 1", "process 0", "file system that all processes share"});
}

// The program wrote format 1 when a run was one process.
TEST(CheckpointParts, ReadFormatOne) {
  const TempFolder folder;
  const fs::path step = folder.path("checkpoints/" + step_name(7));
  fs::create_directories(step);
  CheckpointContent content = content_of(0, 7);
  json state = {{"format", 1},
                {"step", 7},
                {"batches", 9},
                {"gradient_scale", 1024.0},
                {"good_steps", 3},
                {"optimizer_steps", 6},
                {"config", json::object()},
                {"data", "d"},
                {"kernels", "k"},
                {"files", json::object()}};
  const std::vector<std::pair<const char*, const NamedTensors*>> files = {{"weights.safetensors", &content.weights},
                                                                          {"optimizer.safetensors", &content.optimizer},
                                                                          {"frozen.safetensors", &content.frozen}};
  for (const auto& [name, tensors] : files) {
    write_safetensors((step / name).string(), *tensors, {});
    const std::string bytes = read_file(step / name);
    state["files"][name] = {{"bytes", bytes.size()}, {"crc32", crc32_of(bytes.data(), bytes.size())}};
  }
  const std::string text = state.dump();
  write_file(step / "state.json", json{{"crc32", crc32_of(text.data(), text.size())}, {"state", state}}.dump(1) + "\n");
  Writers run(folder.path("checkpoints"), 2);
  std::vector<std::string> warnings;
  const std::optional<Checkpoint> checkpoint = run.first().newest(warnings);
  ASSERT_TRUE(checkpoint.has_value());
  EXPECT_EQ(warnings, std::vector<std::string>{});
  EXPECT_EQ(checkpoint->format(), 1);
  EXPECT_EQ(checkpoint->processes(), 1);
  EXPECT_EQ(checkpoint->state().position.batches, 9);
  EXPECT_EQ(checkpoint->state().position.loss_scale, 1024.0);
  EXPECT_EQ(checkpoint->state().optimizer_steps, 6);
  EXPECT_EQ(checkpoint->state().run.order, "");
  EXPECT_TRUE(checkpoint->read(File::kOptimizer, "0.a.momentum").equal(content.optimizer[0].second));
  EXPECT_TRUE(checkpoint->read(File::kFrozen, "0.frozen").equal(content.frozen[0].second));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
