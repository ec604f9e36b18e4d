// Tests failures on demand. They happen only where they are requested, and wrapped layers change no bit until then.
#include "twobp/train/fault_injection.h"

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::random_batch;
using test::tiny_config;

// The variable is in the environment while this object lives.
class Asked {
 public:
  explicit Asked(const std::string& fault) : variable_("TWOBP_FAIL", fault) {}

 private:
  test::Environment variable_;
};

Config two_stages() {
  Config config = tiny_config();
  config.pipeline.stages = 2;
  config.pipeline.split = {3, 5};
  return config;
}

TEST(ParseFault, ReadsEveryKey) {
  const Fault fault = parse_fault("W:step=3:rank=1:replica=2:micro_batch=4:layer=5:seconds=0.5:kill=1");
  EXPECT_EQ(fault.where, Fault::Where::kBackwardP2);
  EXPECT_EQ(fault.step, 3);
  EXPECT_EQ(fault.rank, 1);
  EXPECT_EQ(fault.replica, 2);
  EXPECT_EQ(fault.micro_batch, 4);
  EXPECT_EQ(fault.layer, 5);
  EXPECT_EQ(fault.kill, 1);
  EXPECT_EQ(fault.seconds, 0.5);
  EXPECT_EQ(parse_fault("loader").where, Fault::Where::kLoader);
}

TEST(ParseFault, RefusesUnknownKeys) {
  for (const char* text : {"", "B", "F:step", "F:step=", "F:step=x", "F:step=-1", "F:step=1 ", "F:stage=1", "F:=1",
                           "F:step=1:", "F:step=1e300"}) {
    SCOPED_TRACE(text);
    expect_error([&] { parse_fault(text); }, {concat("TWOBP_FAIL=", text)});
  }
}

TEST(FaultInjection, FailsWhereRequested) {
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
    for (const int rank : {0, 1}) {
      for (const std::string where : {"F", "I", "W", "optimizer"}) {
        SCOPED_TRACE(concat(where, ", rank ", rank, ", ", policy_name(policy)));
        const Asked asked(concat(where, ":step=2:rank=", rank));
        Trainer trainer(two_stages());
        trainer.step(random_batch(3, 2, 2, 1), {"1f1b", policy});
        expect_error(
            [&] {
              trainer.step(random_batch(3, 2, 2, 2), {"1f1b", policy});
            },
            {concat("rank ", rank, ", step 2, "), "a failure on demand", where});
      }
    }
  }
}

TEST(FaultInjection, FailsInTheChosenMicroBatch) {
  const Asked asked("F:step=1:rank=1:micro_batch=2");
  Trainer trainer(two_stages());
  expect_error([&] { trainer.step(random_batch(3, 2, 2, 1), {"gpipe"}); }, {"rank 1, step 1, 1F2: "});
}

TEST(FaultInjection, FailsInTheChosenLayer) {
  const Asked asked("W:step=1:rank=1:layer=4");
  Trainer trainer(two_stages());
  expect_error(
      [&] {
        trainer.step(random_batch(3, 2, 2, 1), {"gpipe", P2Policy::kFill});
      },
      {"rank 1, step 1, ", "layer model.layers.1.mlp", "a failure on demand"});
}

TEST(FaultInjection, FailsInTheLoader) {
  const Asked asked("loader:step=2");
  Trainer trainer(two_stages());
  trainer.step();
  expect_error(
      [&] {
        for (int i = 0; i < 20; ++i) trainer.step();  // batches that were read ahead come first
      },
      {"a failure on demand", "loader:step=2"});
}

TEST(FaultInjection, ChangesNoBitBeforeTheFailure) {
  const auto losses_of = [](const Config& config) {
    Trainer trainer(config);
    std::vector<double> losses;
    for (int i = 0; i < 3; ++i) losses.push_back(trainer.step().loss);
    return losses;
  };
  for (const char* batching : {"loop", "concat"}) {
    Config config = two_stages();
    config.pipeline.p2_batching = batching;
    config.pipeline.p2 = "end";  // under fill, the concatenated micro-batches depend on the time
    const std::vector<double> expected = losses_of(config);
    const Asked asked("W:step=1000");
    EXPECT_EQ(losses_of(config), expected) << batching;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
