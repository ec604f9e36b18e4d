// Tests backward-p2 of several micro-batches in one call: it has one GEMM, and the results of the loop.
#include <ATen/record_function.h>

#include "tests/nn/layer_test_util.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layers/linear.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

constexpr int64_t kIn = 17;
constexpr int64_t kOut = 13;

// Counts the GEMMs of this thread during its lifetime.
class GemmCount {
 public:
  GemmCount() {
    count = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
          const std::string name = f.name();
          if (name == "aten::mm" || name == "aten::addmm" || name == "aten::addmm_") ++count;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~GemmCount() { at::removeCallback(handle_); }
  GemmCount(const GemmCount&) = delete;
  GemmCount& operator=(const GemmCount&) = delete;

  static thread_local int count;

 private:
  at::CallbackHandle handle_;
};

thread_local int GemmCount::count = 0;

struct Sample {
  at::Tensor x;
  at::Tensor dy;
};

Sample sample(int64_t m, int64_t rows) {
  return {random({rows, kIn}, 10 + m, at::kFloat), random({rows, kOut}, 30 + m, at::kFloat)};
}

// The error of |dw| over several samples is at most n u |dy|^T |x|, where n is the length of the sums. This holds for
// any order of addition in a GEMM (Higham, Accuracy and Stability, eq. 3.13), so two results differ by at most twice
// that, elementwise.
void expect_sum(const at::Tensor& dw, const std::vector<Sample>& samples) {
  at::Tensor expected = at::zeros({kOut, kIn}, at::kDouble);
  at::Tensor magnitude = at::zeros({kOut, kIn}, at::kDouble);
  double n = 0;
  for (const auto& [x, dy] : samples) {
    expected += at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble));
    magnitude += at::mm(dy.to(at::kDouble).t().abs(), x.to(at::kDouble).abs());
    n += static_cast<double>(x.size(0));
  }
  const at::Tensor error = (dw.to(at::kDouble) - expected).abs();
  EXPECT_TRUE(error.le(magnitude * (n * unit_roundoff(at::kFloat))).all().item<bool>());
  EXPECT_GT(largest(expected), 0);
}

class ConcatenatedLinear : public testing::Test {
 protected:
  ConcatenatedLinear() : layer_({{"w", kOut}}, kIn, 0.5, at::kFloat), parameters_(make_parameters(layer_)) {}

  // Runs F and I of micro-batch m.
  void run(int64_t m, int64_t rows) {
    samples_.push_back(sample(m, rows));
    micro_batches_.push_back(std::make_unique<MicroBatch>(layer_, Fields{}, m));
    micro_batches_.back()->forward(samples_.back().x);
    micro_batches_.back()->p1(samples_.back().dy);
  }

  // Runs W of all micro-batches together. Returns the number of GEMMs.
  int together() {
    std::vector<MicroBatch*> list;
    for (const auto& micro_batch : micro_batches_) list.push_back(micro_batch.get());
    const GemmCount count;
    p2_together(list);
    return GemmCount::count;
  }

  Linear layer_;
  std::vector<Parameter*> parameters_;
  std::vector<Sample> samples_;
  std::vector<std::unique_ptr<MicroBatch>> micro_batches_;
};

TEST_F(ConcatenatedLinear, SeveralMicroBatchesAreOneGemm) {
  for (int64_t m = 0; m < 3; ++m) run(m, 9);
  EXPECT_EQ(together(), 1);
  expect_sum(parameters_[0]->grad, samples_);
}

TEST_F(ConcatenatedLinear, OfAnySizes) {
  for (const int64_t rows : {5, 9, 4, 9, 1}) run(static_cast<int64_t>(samples_.size()), rows);
  EXPECT_EQ(together(), 1);
  expect_sum(parameters_[0]->grad, samples_);
}

TEST(ConcatenateRows, MakesOneMatrixOfAnything) {
  const at::Tensor memory = random({12, 300}, 1, at::kDouble);
  const std::vector<at::Tensor> parts = {memory.narrow(0, 8, 3), memory.narrow(0, 0, 4),
                                         random({300, 2}, 2, at::kDouble).t()};
  const at::Tensor all = concatenate_rows(parts);
  EXPECT_TRUE(same_bits(all, at::cat(parts, 0)));
  EXPECT_FALSE(all.is_alias_of(memory));
  EXPECT_EQ(row_stride(all), padded_cols(300, all.options()));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
