// Whole runs with attention as a GPU computes it, by stand-ins for ATen's fused kernels on a CPU.
#include <gtest/gtest.h>

#include "tests/nn/device/fused_kernels_on_cpus.h"
#include "tests/train/training.h"
#include "twobp/core/text.h"
#include "twobp/nn/kernels/attention/fused_heads.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::Outcome;

struct RunCase {
  const char* name;
  const char* precision;
  bool bert, documents, padding;
};

Config config_of(const RunCase& one, int stages) {
  Config config = test::tiny_config();
  if (one.bert) {
    test::make_bert(config, test::kSequence, 0.2).tied = true;
  } else {
    test::llama_of(config).attention_dropout = 0.2;
  }
  config.pipeline.stages = stages;
  config.train.precision = one.precision;
  config.train.clip_norm = 0.5;
  return config;
}

std::vector<Batch> batches_of(const RunCase& one) {
  std::vector<Batch> batches = test::random_batches(3, 4);
  if (one.padding) batches = test::padded(batches);
  if (!one.documents) return batches;
  for (Batch& batch : batches) {
    for (Fields& fields : batch.micro_batches) {
      const at::Tensor starts = at::arange(test::kSequence, at::kLong).repeat({2, 1});
      starts[0].narrow(0, 0, 9).fill_(0);
      starts[0].narrow(0, 9, 4).fill_(9);  // and three positions of padding
      starts[1].fill_(0);
      fields["document_starts"] = starts;
    }
  }
  return batches;
}

class TrainsWithFusedAttention : public ::testing::TestWithParam<RunCase> {};

// The mask of a micro-batch depends on no other one, on no rank, and on no repeated F.
TEST_P(TrainsWithFusedAttention, ToTheSameBits) {
  const RunCase& one = GetParam();
  const std::vector<Batch> batches = batches_of(one);
  const auto run = [&](const Config& config, const char* schedule, P2Policy policy) {
    return test::train(config, batches, {schedule, policy, P2Batching::kLoop});
  };
  const Outcome by_operators = run(config_of(one, 1), "gpipe", P2Policy::kOff);
  const FusedKernelsOnCpus kernels;
  const Outcome expected = run(config_of(one, 1), "gpipe", P2Policy::kOff);
  EXPECT_NE(expected.losses, by_operators.losses) << "the kernels draw other masks";
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(expected.losses[i], by_operators.losses[i], 0.1 * by_operators.losses[i]);
  for (const auto& [stages, schedule, policy] :
       {std::tuple{2, "1f1b", P2Policy::kFill}, std::tuple{3, "zb-h1", P2Policy::kPlaced}}) {
    for (const char* recompute : {"", "both"}) {
      Config config = config_of(one, stages);
      if (*recompute != 0) config.pipeline.recompute = {recompute};
      test::expect_same_bits(expected, run(config, schedule, policy),
                             concat(stages, " stages, recompute: ", recompute));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, TrainsWithFusedAttention,
                         ::testing::Values(RunCase{"Documents", "bf16", false, true, false},
                                           RunCase{"Padding", "fp32", false, false, true},
                                           RunCase{"Bert", "bf16", true, false, true},
                                           RunCase{"BertInFloat32", "fp32", true, false, false}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace twobp::TWOBP_FILE
