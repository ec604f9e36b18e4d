// Our kernels give the same bits for any split of their work over threads. (at::parallel_for splits work only if the
// library is compiled with OpenMP. GEMM depends on the math library and is not tested here.)
#include <ATen/Parallel.h>

#include "tests/nn/layer_test_util.h"
#include "tests/nn/mamba_layers.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/batch_norm.h"
#include "twobp/nn/layers/convolution.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/norms.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

struct ThreadCase {
  const char* name;
  std::function<std::unique_ptr<Layer>()> make;
  std::vector<int64_t> sizes;
  Fields fields;
};

std::vector<ThreadCase> thread_cases() {
  const AttentionShape even{4, 2, 16, 10000};
  const AttentionShape odd{3, 1, 18, 10000};
  const BidirectionalAttentionShape encoder{3, 18};
  return {
      {"RmsNorm", [] { return std::make_unique<RmsNorm>("g", 515, 1e-5, at::kFloat); }, {201, 515}, {}},
      {"SwiGlu", [] { return std::make_unique<GatedUnit>(Gate::kSilu); }, {201, 514}, {}},
      {"CrossEntropy",
       [] { return std::make_unique<CrossEntropy>(); },
       {201, 515},
       {{"labels", random_ids({201}, 515, 3)}}},
      {"Attention", [=] { return std::make_unique<Attention>(even, at::kFloat); }, {3, 67, even.packed()}, {}},
      {"AttentionOddSizes", [=] { return std::make_unique<Attention>(odd, at::kFloat); }, {3, 131, odd.packed()}, {}},
      {"GeluErf", [] { return std::make_unique<Gelu>(GeluForm::kErf); }, {201, 515}, {}},
      {"GeluTanh", [] { return std::make_unique<Gelu>(GeluForm::kTanh); }, {201, 515}, {}},
      {"LayerNorm", [] { return std::make_unique<LayerNorm>("n", 515, 1e-5, at::kFloat); }, {201, 515}, {}},
      {"BidirectionalAttention",
       [=] { return std::make_unique<BidirectionalAttention>(encoder, 0.1, "a", at::kFloat); },
       {2, 131, 3 * encoder.width()},
       {}},
      {"BatchNorm2d", [] { return std::make_unique<BatchNorm2d>("n", 37, true, at::kFloat); }, {3, 29, 31, 37}, {}},
      {"Scan", [] { return std::make_unique<test::PackedScan>(300, 5, at::kFloat); }, {3, 67, 910}, {}},
      {"CausalConv1d", [] { return std::make_unique<CausalConv1d>("conv1d", 300, 4, at::kFloat); }, {3, 67, 300}, {}},
      {"MaxPool2d", [] { return std::make_unique<MaxPool2d>(3, 2, 1); }, {3, 29, 31, 37}, {}},
  };
}

TEST(Threads, HowWorkIsSplitDoesNotChangeABit) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not see the barriers of the OpenMP inside LibTorch";
#endif
  const int threads = at::get_num_threads();
  for (const ThreadCase& c : thread_cases()) {
    std::vector<std::vector<at::Tensor>> results;
    for (const int count : {1, 2, 3}) {
      at::set_num_threads(count);
      const auto layer = c.make();
      const auto parameters = make_parameters(*layer);
      MicroBatch micro_batch(*layer, c.fields);
      auto& out = results.emplace_back();
      out.push_back(micro_batch.forward(random(c.sizes, 1, at::kFloat)).clone());
      out.push_back(micro_batch.p1(out[0].dim() > 0 ? random(out[0].sizes(), 2, at::kFloat) : at::Tensor()));
      for (const Parameter* parameter : parameters) {
        if (parameter->trainable()) out.push_back(parameter->grad.clone());
      }
    }
    at::set_num_threads(threads);
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(same_bits(results[1][i], results[0][i])) << c.name << ", 2 threads, result " << i;
      EXPECT_TRUE(same_bits(results[2][i], results[0][i])) << c.name << ", 3 threads, result " << i;
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
