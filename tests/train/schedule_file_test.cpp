// Tests training with schedules in files: some were written by PyTorch's generators, others by hand. The
// weights are those of one stage, to the bit if a file keeps the order of micro-batches. Otherwise they are
// equal within the rounding of a sum in another order.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <sys/inotify.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/csv.h"
#include "twobp/train/build_model.h"
#include "twobp/train/checkpoint/checkpointer.h"

namespace twobp::TWOBP_FILE {
namespace {

const std::string kGolden = TWOBP_SOURCE_DIR "/tests/golden/pytorch/";

// This is relative to the largest weight, for two steps of float32 gradients whose terms are added in another
// order.
constexpr double kReordered = 1e-5;

Config config_of(const std::string& file) {
  Config config = test::tiny_config();
  config.pipeline.schedule = file;
  config.pipeline.stages = 0;
  config.optimizer.type = "sgd";  // Adam's first steps magnify rounding
  return config;
}

test::Outcome one_stage(const std::vector<Batch>& batches) {
  Config config = config_of("gpipe");
  config.pipeline.stages = 1;
  return test::train(config, batches, {"gpipe", P2Policy::kOff});
}

TEST(ScheduleFile, PytorchsSchedulesTrainHere) {
  int in_order = 0;
  int reordered = 0;
  for (const char* name :
       {"interleaved-zb_2x2_4", "zb-v_2x2_4", "dualpipe-v_2x2_4", "interleaved-1f1b_2x2_4", "looped-bfs_2x2_4"}) {
    const Config config = config_of(kGolden + name + ".csv");
    Trainer trainer(config);
    EXPECT_EQ(trainer.pipeline().ranks(), 2) << name;
    EXPECT_EQ(trainer.pipeline().stages(), 4) << name;
    const int m = trainer.micro_batches();
    const auto batches = test::random_batches(2, m);
    const test::Outcome expected = one_stage(batches);
    const ScheduleSource source(config.pipeline.schedule);
    std::set<P2Policy> policies = {source.default_policy(), P2Policy::kOff, P2Policy::kFill};
    for (const P2Policy policy : policies) {
      Trainer run(config);
      const test::Outcome actual = test::train(run, batches, {source, policy});
      const std::string what = concat(name, ", p2 ", policy_name(policy));
      if (!source.written()->allow_reorder) {
        ++in_order;
        test::expect_same_bits(expected, actual, what);
        continue;
      }
      ++reordered;
      for (size_t i = 0; i < expected.weights.size(); ++i) {
        const double scale = expected.weights[i].abs().max().item<double>();
        const double difference = (expected.weights[i] - actual.weights[i]).abs().max().item<double>();
        EXPECT_LE(difference, kReordered * scale) << what << ", weight " << i;
      }
    }
  }
  EXPECT_EQ(in_order, 11);
  EXPECT_EQ(reordered, 2);  // looped-bfs
}

// The schedule is written by hand. Two stages are on one rank and one is on the other. In the backward pass,
// micro-batch 1 comes before micro-batch 0.
TEST(ScheduleFile, OtherOrdersTrainUpToRounding) {
  const test::TempFolder folder;
  const std::string path = folder.path("reordered.csv");
  std::ofstream(path) << "0F0,0F1,2F0,2F1,2I1,2I0,0I1,2W0,0I0,0W1,2W1,0W0\n1F0,1F1,1I1,1W1,1B0\n";
  const Config config = config_of(path);
  const auto batches = test::random_batches(2, 2);
  const test::Outcome expected = one_stage(batches);
  for (const P2Batching batching : {P2Batching::kLoop, P2Batching::kConcat}) {
    const test::Outcome actual = test::train(config, batches, {path, P2Policy::kPlaced, batching});
    for (size_t i = 0; i < expected.weights.size(); ++i) {
      const double scale = expected.weights[i].abs().max().item<double>();
      EXPECT_LE((expected.weights[i] - actual.weights[i]).abs().max().item<double>(), kReordered * scale) << i;
    }
  }
}

// The rest of an epoch has fewer micro-batches than the file. The other cells are dropped.
TEST(ScheduleFile, DropsCellsForFewerMicroBatches) {
  const Config config = config_of(kGolden + "zb-v_2x2_4.csv");
  std::vector<Batch> batches = test::random_batches(1, 4);
  batches.push_back(test::random_batch(3, 2, 1, 5));
  batches.push_back(test::random_batch(1, 2, 2, 6));
  Trainer trainer(config);
  test::expect_same_bits(one_stage(batches),
                         test::train(trainer, batches, {trainer.variant().schedule, P2Policy::kPlaced}),
                         "fewer micro-batches");
  test::expect_error([&] { trainer.step(test::random_batch(5, 2, 2, 7), trainer.variant()); },
                     {"4 micro-batches, not of 5"});
}

// Counts how often a file is opened. It watches closing, too, because equal events in a row are reported as
// one.
class Opened {
 public:
  explicit Opened(const std::string& path) : events_(::inotify_init1(IN_NONBLOCK)) {
    if (events_ < 0 || ::inotify_add_watch(events_, path.c_str(), IN_OPEN | IN_CLOSE) < 0) {
      throw std::runtime_error("cannot watch " + path);
    }
  }
  ~Opened() { ::close(events_); }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  // Returns the count since the last call. Events of a file have no name after them, unlike those of a
  // folder.
  int times() const {
    std::array<inotify_event, 64> events{};
    const ssize_t bytes = ::read(events_, events.data(), sizeof(events));
    const auto count = bytes <= 0 ? 0 : bytes / static_cast<ssize_t>(sizeof(inotify_event));
    return static_cast<int>(std::count_if(events.begin(), events.begin() + count,
                                          [](const auto& event) { return (event.mask & IN_OPEN) != 0; }));
  }

 private:
  int events_;
};

// The file is read once. It may vanish during the run, and checkpoints do not need it. Evaluation uses the
// file's placement.
TEST(ScheduleFile, IsReadOnceAndUsedInEvaluation) {
  const test::TempFolder folder;
  const std::string path = folder.path("mine.csv");
  std::filesystem::copy_file(kGolden + "zb-v_2x2_4.csv", path);
  Config config = config_of(path);
  config.pipeline.p2 = "placed";
  config.data.held_out = 0.25;
  config.save.checkpoints = folder.path("checkpoints");
  const Opened opened(path);
  check_config(config);
  EXPECT_EQ(opened.times(), 0) << "a configuration may be printed whose file has gone";
  Trainer trainer(config);
  EXPECT_EQ(opened.times(), 1);
  EXPECT_EQ(trainer.pipeline().rank_of_stage(), (std::vector<int>{0, 1, 1, 0}));
  std::filesystem::remove(path);
  Checkpointer checkpointer(config.save, false);
  trainer.step();
  checkpointer.finish(trainer);
  trainer.step(test::random_batch(2, 2, 2, 9), trainer.variant());
  EXPECT_TRUE(trainer.evaluate().has_value());
}

// Without pipeline.p2, W runs where the file has it, and within B if it has B. Named schedules fill their
// waits, including those that place W.
TEST(ScheduleFile, TheDefaultPolicyIsThatOfTheFile) {
  const test::TempFolder folder;
  const std::string whole = folder.path("whole.csv");
  std::ofstream(whole) << "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
  for (const auto& [schedule, policy] : {std::pair{kGolden + "zb-v_2x2_4.csv", P2Policy::kPlaced},
                                         {whole, P2Policy::kOff},
                                         {std::string("zb-v"), P2Policy::kFill},
                                         {std::string("1f1b"), P2Policy::kFill}}) {
    Config config = config_of(schedule);
    config.pipeline.p2 = PipelineConfig{}.p2;
    EXPECT_EQ(Trainer(config).variant().policy, policy) << schedule;
  }
}

// A trainer finds contradictions in the file itself when it reads it. The configuration finds the others.
TEST(ScheduleFile, RefusesConfigurationsThatDisagree) {
  const std::string file = kGolden + "zb-v_2x2_4.csv";
  const auto parse = [](const std::string& json, std::vector<std::string> overrides) {
    overrides.emplace_back("data.synthetic=tokens");
    return parse_config(json, "test", overrides);
  };
  const auto refuse = [&](const std::string& json, const std::vector<std::string>& overrides,
                          const std::vector<std::string>& parts) {
    test::expect_error([&] { Trainer trainer(parse(json, overrides)); }, parts);
  };
  const std::string set = "pipeline.schedule=" + file;
  const std::vector<std::vector<std::string>> agree = {
      {set}, {set, "pipeline.stages=4", "pipeline.ranks=2", "pipeline.micro_batches=4"}};
  for (const auto& agreeing : agree) {
    const PipelineShape shape = pipeline_shape(parse("{}", agreeing).pipeline);
    EXPECT_EQ(shape.stages, 4);
    EXPECT_EQ(shape.ranks, 2);
    EXPECT_EQ(shape.micro_batches, 4);
  }
  refuse("{}", {set, "pipeline.stages=2"}, {"pipeline.stages is 2", "4 stages"});
  refuse("{}", {set, "pipeline.ranks=4"}, {"pipeline.ranks is 4", "2 ranks"});
  refuse("{}", {set, "pipeline.micro_batches=8"}, {"pipeline.micro_batches is 8", "4 micro-batches"});
  refuse("{}", {"pipeline.schedule=none.csv"}, {"none.csv", "No such file"});
  refuse("{}", {"pipeline.schedule=mine.txt"}, {"mine.txt", "ends in .csv"});

  const auto section = [](const std::string& value) { return R"({"pipeline": {"schedule": )" + value + "}}"; };
  EXPECT_EQ(parse(section(R"({"file": ")" + file + R"("})"), {}).pipeline.schedule, file);
  for (const char* wrong : {R"({"file": "mine.txt"})", R"({"file": 3})", R"({"path": "mine.csv"})", "{}",
                            R"({"file": "mine.csv", "more": 1})"}) {
    refuse(section(wrong), {}, {"pipeline.schedule", R"({"file": "NAME.csv"})"});
  }
  refuse(R"({"pipeline": {"p2": {"file": "mine.csv"}}})", {}, {"pipeline.p2", "text"});
}

// A file that gives up the order of micro-batches has its own bits. If a run continues in another order, a
// note says so.
TEST(ScheduleFile, NotesAResumeInAnotherOrder) {
  const test::TempFolder folder;
  Config config = config_of(kGolden + "looped-bfs_2x2_4.csv");
  config.pipeline.p2 = "off";
  config.train.steps = 20;
  config.save.checkpoints = folder.path("checkpoints");
  {
    Trainer trainer(config);
    ASSERT_TRUE(trainer.variant().schedule.written()->allow_reorder);
    for (int step = 0; step < 3; ++step) trainer.step();
    Checkpointer(config.save, false).finish(trainer);
  }
  const auto notes_of = [&](const std::string& schedule, const std::string& p2) {
    Config again = config;
    again.pipeline.schedule = schedule;
    again.pipeline.ranks = 2;
    again.pipeline.stages = 4;
    again.pipeline.micro_batches = 4;
    again.pipeline.p2 = p2;
    Trainer trainer(again);
    return Checkpointer(again.save, true).resume(trainer);
  };
  EXPECT_EQ(notes_of(config.pipeline.schedule, "off"), std::vector<std::string>{});
  for (const auto& [schedule, p2] :
       {std::pair<std::string, std::string>{config.pipeline.schedule, "end"}, {"looped-bfs", "off"}}) {
    const auto notes = notes_of(schedule, p2);
    ASSERT_EQ(notes.size(), 1U) << schedule << ' ' << p2;
    EXPECT_NE(notes[0].find("order"), std::string::npos) << notes[0];
    EXPECT_NE(notes[0].find("not to the bit"), std::string::npos) << notes[0];
  }
}

TEST(ScheduleFile, WithoutABackwardTrainsNothing) {
  const test::TempFolder folder;
  const std::string path = folder.path("forward.csv");
  std::ofstream(path) << "0F0\n1F0\n";
  Trainer trainer(config_of(path));
  test::expect_error([&] { trainer.step(test::random_batch(1, 2, 2, 1), trainer.variant()); }, {"has no backward"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
