// Training with ranks that take W off each other at the end of a step.
#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::expect_same_run;
using test::RunOutcome;

constexpr int64_t kSteps = 4;

Config config_of(const std::string& schedule) {
  Config config = test::world_config(schedule, 2);
  config.train.steps = kSteps;
  return config;
}

RunOutcome run(Config config, bool stealing) {
  config.pipeline.p2_stealing = stealing;
  return test::run_in(make_in_process_worlds(1, config.pipeline.ranks, 0), config, kSteps);
}

TEST(P2Stealing, KeepsEveryBit) {
  const auto expect_same = [](const std::string& what, const std::string& schedule,
                              const std::function<void(Config&)>& change) {
    Config config = config_of(schedule);
    change(config);
    expect_same_run(run(config, false), run(config, true), concat(schedule, ", ", what));
  };
  for (const std::string schedule : {"gpipe", "1f1b", "zb-h2", "zb-v"}) {
    expect_same("tied, clipped", schedule, [](Config&) {});
    expect_same("no clipping", schedule, [](Config& config) { config.train.clip_norm = 0; });
    expect_same("layers that compute again", schedule,
                [](Config& config) { config.pipeline.recompute = {"both"}; });
  }
  expect_same("BatchNorm", "1f1b", [](Config& config) {
    test::llama_of(config).tied = false;
    test::make_tiny_resnet(config);
  });
  expect_same("fp16", "zb-v", [](Config& config) {
    config.train.precision = "fp16";
    config.train.loss_scale = 1e9;  // some steps are skipped
  });
  expect_same("one rank", "1f1b", [](Config& config) { config.pipeline.ranks = 1; });
}

TEST(P2Stealing, SaysWhatItCannotGoWith) {
  const auto expect_refused = [](const char* key, const std::function<void(Config&)>& change) {
    Config config = config_of("1f1b");
    config.pipeline.p2_stealing = true;
    check_config(config);
    change(config);
    expect_error([&] { check_config(config); }, {"pipeline.p2_stealing", key, "set one of them"});
  };
  expect_refused("pipeline.run_ahead", [](Config& config) { config.pipeline.run_ahead = "on"; });
  expect_refused("pipeline.data_parallel", [](Config& config) { config.pipeline.data_parallel = 2; });
  expect_refused("pipeline.device", [](Config& config) { config.pipeline.device = "cuda"; });
  expect_refused("pipeline.p2_batching", [](Config& config) { config.pipeline.p2_batching = "concat"; });
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
