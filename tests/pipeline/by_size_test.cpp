// Tests the bytes that are predicted for micro-batches of other sizes than the one that was measured at first.
#include "twobp/pipeline/profile/by_size.h"

#include <cmath>

#include "tests/pipeline/step_bytes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::fixed_bytes;
using test::options_of;
using test::step_request;
using test::take_gradients;

Profile of_bytes(double bytes) {
  return {{"layer", {.forward = 1, .forward_peak = 2 * bytes, .forward_held = bytes}}};
}

double held_at(const ProfilesBySize& profiles, double numbers, double positions) {
  const Profile profile = profiles.at({numbers, numbers * positions}).front();
  EXPECT_DOUBLE_EQ(profile.at("layer").forward_peak, 2 * profile.at("layer").forward_held);
  EXPECT_EQ(profile.at("layer").forward, 1);
  return profile.at("layer").forward_held;
}

TEST(ProfilesBySize, OneSizeGivesBytesInProportion) {
  const ProfilesBySize profiles({of_bytes(100)}, {10, 50});
  EXPECT_EQ(held_at(profiles, 10, 5), 100);
  EXPECT_NEAR(held_at(profiles, 30, 7), 300, 1e-9);
  EXPECT_TRUE(profiles.covers({10, 50}));
  EXPECT_FALSE(profiles.covers({10, 70}));
  EXPECT_FALSE(profiles.covers({11, 50}));
}

TEST(ProfilesBySize, TwoSizesTellSquaresOrAConstant) {
  ProfilesBySize longer({of_bytes(10 * 3 + 50 * 2)}, {10, 50});
  longer.add(of_bytes(40 * 3 + 800 * 2), {40, 800});
  EXPECT_NEAR(held_at(longer, 16, 8), 16 * 3 + 128 * 2, 1e-6);
  EXPECT_TRUE(longer.covers({50, 1100}));
  EXPECT_FALSE(longer.covers({50, 1300}));
  ProfilesBySize more({of_bytes(10 * 3 + 7)}, {10, 50});
  more.add(of_bytes(40 * 3 + 7), {40, 200});
  EXPECT_NEAR(held_at(more, 20, 5), 20 * 3 + 7, 1e-6);
}

TEST(ProfilesBySize, ThreeSizesTellAllTerms) {
  const auto bytes = [](double numbers, double squares) { return of_bytes(3 * numbers + 2 * squares + 70); };
  ProfilesBySize profiles({bytes(10, 50)}, {10, 50});
  profiles.add(bytes(40, 200), {40, 200});
  profiles.add(bytes(40, 800), {40, 800});
  EXPECT_NEAR(held_at(profiles, 25, 11), 3 * 25 + 2 * 275 + 70, 1e-6);
}

// The identity. It keeps (samples, positions, positions) numbers until I.
class Scores : public Layer {
 public:
  Values forward(Values x, Context& context, Saved& saved) override {
    const at::Tensor scores = at::matmul(x[0], x[0].transpose(1, 2));
    if (context.keeps()) saved.keep_until_p1(scores);
    return x;
  }
  Values backward_p1(Values dy, Context&, Saved& saved) override {
    saved.take_p1(0);
    return dy;
  }
};

ModelSpec model_with_scores() {
  ModelSpec model = test::small_llama(2);
  for (const int at : {2, 4}) {
    model.layers.insert(model.layers.begin() + at,
                        {concat("scores ", at), "scores", [] { return std::make_unique<Scores>(); }});
  }
  return model;
}

Fields tokens(int64_t samples, int64_t positions) {
  return {{"input_ids", at::ones({samples, positions}, at::kLong)},
          {"labels", at::ones({samples, positions}, at::kLong)}};
}

Pipeline measured_on(const ModelSpec& model, const Fields& fields) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(1);
  PipelineOptions options = options_of({4, 4});
  options.measured = size_of(fields);
  return Pipeline(model, measure_profile(model, fields, 0.01), options);
}

// Bytes of activations and stash of each rank.
std::vector<int64_t> peaks_of(Pipeline& pipeline, const StepPlan& plan, const Fields& fields) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<Fields> batch(plan.schedule.micro_batches, fields);
  pipeline.run(plan, batch, step_request());
  take_gradients(pipeline);
  const auto fixed = fixed_bytes(pipeline);
  pipeline.meter().reset_peaks();
  const StepReport step = pipeline.run(plan, batch, step_request());
  take_gradients(pipeline);
  std::vector<int64_t> peaks;
  for (int r = 0; r < pipeline.ranks(); ++r) peaks.push_back(step.rank_memory[r].peak - fixed[r]);
  return peaks;
}

TEST(BytesBySize, AreThoseThatAreMeasured) {
  const ModelSpec model = model_with_scores();
  Pipeline pipeline = measured_on(model, tokens(2, 8));
  const StepPlan first = pipeline.plan("1f1b", 4, P2Policy::kEnd);
  for (const auto& [samples, positions] : {std::pair(2, 64), std::pair(5, 16), std::pair(3, 90), std::pair(1, 200)}) {
    SCOPED_TRACE(concat(samples, " samples, ", positions, " positions"));
    const Fields fields = tokens(samples, positions);
    const std::vector<int64_t> peaks = peaks_of(pipeline, first, fields);
    const Pipeline own = measured_on(model, fields);
    const StepPlan standard = pipeline.plan("1f1b", 4, P2Policy::kOff, {P2Batching::kLoop, 0});
    const auto predicted = simulate(standard.schedule, profiled_costs(pipeline.layer_costs(size_of(fields))));
    const auto expected = simulate(standard.schedule, profiled_costs(own.layer_costs()));
    const StepPlan now = pipeline.plan("1f1b", 4, P2Policy::kEnd);
    for (int r = 0; r < 2; ++r) {
      EXPECT_NEAR(predicted.ranks[r].peak_bytes / expected.ranks[r].peak_bytes, 1, 0.03) << "rank " << r;
      const auto message = static_cast<double>(fields.at("labels").numel() * test::kDim * test::kFloat);
      const auto most = static_cast<double>(*std::max_element(now.caps.begin(), now.caps.end()));
      EXPECT_LE(static_cast<double>(peaks[r]), most + 4 * message) << "rank " << r;
    }
  }
  // The caps are those of the largest, rounded up.
  const StepPlan grown = pipeline.plan("1f1b", 4, P2Policy::kEnd);
  const StepPlan one = measured_on(model, tokens(3, 90)).plan("1f1b", 4, P2Policy::kEnd);
  const StepPlan other = measured_on(model, tokens(1, 200)).plan("1f1b", 4, P2Policy::kEnd);
  for (int r = 0; r < 2; ++r) {
    const int64_t most = std::max(one.standard_peaks[r], other.standard_peaks[r]);
    EXPECT_GE(static_cast<double>(grown.standard_peaks[r]), 0.99 * static_cast<double>(most));
    EXPECT_LE(static_cast<double>(grown.standard_peaks[r]), 1.05 * static_cast<double>(most));
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
