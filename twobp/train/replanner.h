// Online re-planning: watches how long F, I and W of the stages really take, and when they have drifted from
// what the plan was made for, looks for the schedule and p2 policy that suit them better. The layers stay
// where they are, so a new plan costs nothing and changes no bit of the result; a run whose schedule gives up
// the order of micro-batches is left alone, since another order has other bits.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/simulate/stage_cost.h"
#include "twobp/train/variant.h"

namespace twobp {

struct Replan {
  Variant variant;   // from the next step on
  double drift = 0;  // of the stage that drifted most: measured over planned seconds - 1
  int stage = 0;
  double gain = 0;  // predicted step of the old plan over that of the new one - 1; 0: it stays
};

// "stage 1 takes 23.0 % longer than planned: 1f1b with p2 fill from now on, predicted 4.1 % faster".
std::string to_text(const Replan& replan);

class Replanner {
 public:
  // `threshold`: the drift that calls for a new plan, 0.1 for a tenth. `began`: how the run began. What that
  // plan may hold, by rank, no later one exceeds: its byte cap, or where it is more (or there is no cap) what
  // the simulation says it holds.
  Replanner(double threshold, const Pipeline& pipeline, int micro_batches, Variant began);

  // Told about every training step of all the micro-batches. A plan is looked for when the medians of the
  // last kWindow steps have drifted from the times the plan was made for; those are then the times it is made
  // for. Candidates are the plan that the run began with and the named schedules on the same placement.
  std::optional<Replan> after_step(const StepReport& report, const Variant& now);

  // What another process's replanner made, as text and back. `now` as there.
  static std::string written(const std::optional<Replan>& replan);
  std::optional<Replan> read(const std::string& text, const Variant& now) const;

  static constexpr int kWindow = 5;            // steps
  static constexpr double kLeastGain = 0.005;  // a plan that is predicted to be better by less is left alone

 private:
  std::vector<StageCost> medians() const;
  Replan best_plan(const std::vector<StageCost>& costs, const Variant& now) const;

  double threshold_;
  const Pipeline& pipeline_;
  int micro_batches_;
  Variant began_;                                // with the peaks that its automatic cap is made of
  std::vector<double> planned_;                  // seconds of each stage's F + I + W
  std::deque<std::vector<StageCost>> measured_;  // of the last steps
};

}  // namespace twobp
