// Tests steps that a rank takes before the norm of all gradients is known. They stand, or they are undone and repeated,
// with the bits of a rank that waited.
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "tests/train/worlds.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/train/update/update.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::same_bits;

Config config_of(const std::string& optimizer, const std::string& precision) {
  Config config = test::tiny_config();
  config.optimizer.type = optimizer;
  config.optimizer.momentum = 0.9;
  config.optimizer.average = optimizer == "muon" ? 0.5 : 0;
  config.train.precision = precision;
  config.train.clip_norm = 1;
  config.pipeline.stages = 2;
  return config;
}

// These are the times at which the ranks come to the end of a step.
enum class Order { kTogether, kInTurn, kSecondLate };

// This is a trainer whose gradients are made by hand.
class ByHand {
 public:
  explicit ByHand(const Config& config) : trainer_(config), float16_(config.train.precision == "fp16") {
    if (float16_) scale_ = 1024;
    update().make_savepoints(float16_);
    update().use({float16_, scale_, 0});
  }

  // Runs a step in which the gradients of rank 1 have the norm `norm` and those of rank 0 almost none. If the ranks run
  // in turn, rank 0 ends its part before rank 1 begins, so it must presume the norm. With `leave_out`, the first
  // parameter of rank 0 has no gradient.
  void step(double norm, Order order, bool leave_out = false) {
    ++step_;
    const LossScale scale = {float16_, scale_, 0};
    UpdateResult result = update().begin(order != Order::kTogether);
    const auto run = [&](int rank) {
      fill(rank, (rank == 0 ? 0.01 : norm) * scale.value, leave_out && rank == 0);
      update().run(rank, step_, /*lr=*/0.01, result);
    };
    if (order == Order::kInTurn) {
      for (const int turn : {0, 1}) pipeline().on_ranks([&](int rank) { rank == turn ? run(rank) : void(); });
    } else {
      pipeline().on_ranks([&](int rank) {
        if (rank == 1 && order == Order::kSecondLate) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        run(rank);
      });
    }
    stood_.assign(2, true);
    pipeline().on_ranks([&](int rank) {
      const Settled settled = update().settle(rank);
      stood_[rank] = settled.stands;
      if (rank == 0) scale_ = settled.loss_scale;
    });
    update().finish(step_, scale, result);
    norms_.push_back(result.grad_norm);
  }

  Update& update() { return trainer_.update(); }
  Pipeline& pipeline() { return trainer_.pipeline(); }
  bool stood(int rank) const { return stood_[rank] != 0; }
  double scale() const { return scale_; }

  void expect_same_as(ByHand& other, const std::string& what) {
    EXPECT_TRUE(same_bits(norms_, other.norms_)) << what;
    EXPECT_EQ(scale(), other.scale()) << what;
    EXPECT_EQ(update().optimizer_steps(), other.update().optimizer_steps()) << what;
    const auto compare = [&](const std::vector<LiveTensor>& mine, const std::vector<LiveTensor>& its) {
      ASSERT_EQ(mine.size(), its.size()) << what;
      for (size_t i = 0; i < mine.size(); ++i)
        EXPECT_TRUE(same_bits(mine[i].tensor, its[i].tensor)) << what << ": " << mine[i].name;
    };
    compare(update().live_weights(), other.update().live_weights());
    compare(update().live_optimizer_state(), other.update().live_optimizer_state());
    const auto& weights = trainer_.weights();
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(same_bits(weights[i]->value, other.trainer_.weights()[i]->value))
          << what << ": the value that layers compute with, " << weights[i]->name();
    }
  }

 private:
  void fill(int rank, double norm, bool leave_out) {
    int64_t numel = 0;
    std::vector<Parameter*> mine;
    for (const auto& stage : pipeline().rank(rank).stages()) {
      for (int i = 0; i < stage->layer_count(); ++i) {
        for (Parameter* parameter : stage->parameters(i)) {
          mine.push_back(parameter);
          numel += parameter->numel();
        }
      }
    }
    if (leave_out) mine.erase(mine.begin());
    const double each = norm / std::sqrt(static_cast<double>(numel));
    for (Parameter* parameter : mine) {
      at::Tensor& grad = parameter->grad_to_add();
      grad.copy_(at::arange(grad.numel(), grad.options()).remainder(2).mul(2 * each).sub(each).view_as(grad));
    }
  }

  Trainer trainer_;
  bool float16_;
  double scale_ = 1;
  int64_t step_ = 0;
  std::vector<char> stood_;
  std::vector<double> norms_;
};

constexpr double kOverflow = std::numeric_limits<double>::infinity();

// A norm of 0.5 stands. A norm of 2 is clipped.
TEST(PostValidation, LeavesTheBitsOfRanksThatWait) {
  for (const std::string optimizer : {"adamw", "adam", "sgd", "muon"}) {
    for (const std::string precision : {"fp32", "bf16", "fp16"}) {
      for (const std::vector<double>& norms :
           {std::vector<double>{0.5, 0.5, 0.25}, {2}, {0.5, 2}, {0.5, kOverflow}, {kOverflow}}) {
        if (norms.back() == kOverflow && precision != "fp16") continue;  // that ends a run
        for (const bool leave_out : {false, true}) {
          if (leave_out && norms.size() == 1) continue;  // it is the second step that leaves it out
          const Config config = config_of(optimizer, precision);
          ByHand waits(config);
          ByHand presumes(config);
          for (size_t i = 0; i < norms.size(); ++i) {
            waits.step(norms[i], Order::kTogether, leave_out && i == 1);
            presumes.step(norms[i], Order::kInTurn, leave_out && i == 1);
            for (const int rank : {0, 1}) EXPECT_EQ(presumes.stood(rank), norms[i] < 1) << rank;
          }
          EXPECT_EQ(presumes.update().taken_back(), norms.back() > 1 ? 2 : 0);
          EXPECT_EQ(waits.update().taken_back(), 0);
          // The next step starts from these results.
          waits.step(0.75, Order::kTogether);
          presumes.step(0.75, Order::kTogether);
          presumes.expect_same_as(waits,
                                  concat(optimizer, ", ", precision, ", ", ::testing::PrintToString(norms), leave_out));
        }
      }
    }
  }
}

// After a clipped step, the ranks expect that the next one is clipped, too. No rank continues without the norm.
TEST(PostValidation, WaitsAfterAStepThatWasUndone) {
  ByHand ranks(config_of("adamw", "fp32"));
  ranks.step(2, Order::kInTurn);
  EXPECT_EQ(ranks.update().taken_back(), 2);
  ranks.step(2, Order::kSecondLate);
  EXPECT_EQ(ranks.update().taken_back(), 2);
  ranks.step(0.5, Order::kSecondLate);  // the ranks wait for this step too, and it is not clipped
  ranks.step(2, Order::kInTurn);
  EXPECT_EQ(ranks.update().taken_back(), 4);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
