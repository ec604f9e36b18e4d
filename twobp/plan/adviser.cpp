#include "twobp/plan/adviser.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/plan/partition/partition.h"

namespace twobp {
namespace {

constexpr double kWorthwhile = 1.01;
constexpr double kUnequal = 1.5;
constexpr double kBubbleThatCounts = 0.02;

std::string times(double factor) {
  return fixed(factor, 2) + "x";
}

// format_seconds shows whole milliseconds.
std::string duration(double seconds) {
  return seconds < 0.1 ? fixed(seconds * 1e3, 2) + " ms" : fixed(seconds, 2) + " s";
}

class Adviser {
 public:
  explicit Adviser(const AdviceRequest& request)
      : request_(request), off_schedule_(schedule(P2Policy::kOff)), schedule_(schedule(request.policy)) {
    options_ = request.options;
    options_.cap_per_rank.clear();
    options_.timeline = false;
    capped_ = options_;
    capped_.cap_per_rank = caps_for(request.memory, schedule_.rank_of_stage, schedule_.rank_count(), costs());
    off_ = simulate(off_schedule_, costs(), capped_);
    with_ = simulate(schedule_, costs(), capped_);
    free_ = request.memory > 0 ? simulate(schedule_, costs(), options_) : with_;
  }

  Advice advise() {
    advice_.speed_up = ratio(off_.step_seconds, with_.step_seconds);
    advice_.memory_factor = ratio(peak_of(with_), peak_of(off_));
    advice_.bubble = with_.bubble_ratio();
    advice_.bubble_off = off_.bubble_ratio();
    advice_.helps = advice_.speed_up >= kWorthwhile && fits(with_);
    find_out_of_memory();
    find_p1_longer_than_idle();
    find_unequal();
    advice_.sentences.insert(advice_.sentences.begin(), verdict());
    return advice_;
  }

 private:
  const std::vector<StageCost>& costs() const { return request_.costs; }

  Schedule schedule(P2Policy policy) const {
    return request_.schedule.make(request_.stages, request_.ranks, request_.micro_batches, policy, request_.slices);
  }

  int stage_of(size_t cost) const { return static_cast<int>(cost % request_.stages); }

  static double ratio(double a, double b) { return b > 0 ? a / b : 1; }

  bool fits(const Simulation& simulation) const { return twobp::fits(simulation, request_.memory); }

  std::string verdict() {
    const std::string in = request_.slices > 1 ? concat(" in ", request_.slices, " slices") : "";
    const std::string with = concat(request_.schedule, in, ", p2 ", policy_name(request_.policy));
    const std::string change =
        concat("bubble ", fixed(advice_.bubble_off, 3), " with p2 off, ", fixed(advice_.bubble, 3), " with it");
    if (!fits(off_) && !fits(with_)) {
      return concat("2BP cannot help: ", with, " needs ", format_bytes(peak_of(with_)),
                    " on its fullest rank, and p2 off ", format_bytes(peak_of(off_)), ", but a rank has ",
                    format_bytes(request_.memory));
    }
    if (advice_.helps) {
      return concat("2BP helps: ", with, " is ", times(advice_.speed_up),
                    " as fast as with p2 off, since W fills waits (", change, "), at ", times(advice_.memory_factor),
                    " the memory of the fullest rank");
    }
    if (!fits(with_)) {
      return concat("2BP does not fit: ", with, " needs ", format_bytes(peak_of(with_)),
                    " on its fullest rank, but a rank has ", format_bytes(request_.memory));
    }
    if (advice_.p1_longer_than_idle) return concat("2BP does not help (", times(advice_.speed_up), "): ", p1_sentence_);
    const std::string no_gain =
        concat("2BP does not help (", with, " is ", times(advice_.speed_up), " as fast as with p2 off): ");
    if (advice_.bubble_off < kBubbleThatCounts) {
      return concat(no_gain, "with p2 off ranks wait only ", fixed(100 * advice_.bubble_off, 1),
                    " % of the step, so there is next to nothing to fill");
    }
    return concat(no_gain, "the waits that W fills do not delay the step (", change, ")");
  }

  void find_out_of_memory() {
    advice_.out_of_memory_in_p2 = fits(off_) && !fits(free_);
    if (!advice_.out_of_memory_in_p2) return;
    const double over = peak_of(free_);
    std::string sentence = concat(
        "failure signature 1, out of memory in p2: with everything that is kept until p2 (such as "
        "intermediate derivatives), a rank needs ",
        format_bytes(over), " of ", format_bytes(request_.memory), " (p2 off: ", format_bytes(peak_of(off_)), ")");
    sentence += fits(with_) ? concat("; with W run early to stay within the memory, ", times(advice_.speed_up),
                                     " in place of ", times(ratio(off_.step_seconds, free_.step_seconds)))
                            : concat("; even with W run as early as it can, it needs ", format_bytes(peak_of(with_)));
    advice_.sentences.push_back(sentence);
  }

  void find_p1_longer_than_idle() {
    if (advice_.speed_up >= kWorthwhile || off_schedule_.rank_count() < 2) return;
    int busiest = 0;
    for (int r = 1; r < off_schedule_.rank_count(); ++r) {
      if (off_.ranks[r].busy > off_.ranks[busiest].busy) busiest = r;
    }
    const RankSimulation& rank = off_.ranks[busiest];
    const double to_fill =
        std::max(0.0, off_.step_seconds - rank.busy - rank.idle[static_cast<size_t>(IdleCause::kStartUp)]);
    double p1 = -1;
    int longest = -1;
    for (size_t i = 0; i < costs().size(); ++i) {
      const int s = stage_of(i);
      if (off_schedule_.rank_of_stage[s] != busiest || costs()[i].backward_p1 <= p1) continue;
      p1 = costs()[i].backward_p1;
      longest = s;
    }
    if (p1 <= to_fill) return;
    advice_.p1_longer_than_idle = true;
    p1_sentence_ =
        concat("p1 of stage ", longest, " (", duration(p1), ") is longer than the idle time to fill on its rank (",
               duration(to_fill), " per step with p2 off): no gain");
    advice_.sentences.push_back("failure signature 2, p1 longer than the idle time: " + p1_sentence_);
  }

  void find_unequal() {
    const int ranks = off_schedule_.rank_count();
    std::vector<double> p1(ranks, 0), p2(ranks, 0), whole(ranks, 0);
    // Of the stages, for each slice: slices stay as unequal as they are.
    std::vector<StageCost> mean(costs().size() / request_.stages);
    for (StageCost& one : mean) one.forward = one.backward_p1 = one.backward_p2 = 0;
    for (size_t i = 0; i < costs().size(); ++i) {
      const StageCost& cost = costs()[i];
      const int rank = off_schedule_.rank_of_stage[stage_of(i)];
      p1[rank] += cost.backward_p1;
      p2[rank] += cost.backward_p2;
      whole[rank] += cost.forward + cost.backward_p1 + cost.backward_p2;
      StageCost& of_slice = mean[i / request_.stages];
      of_slice.forward += cost.forward / request_.stages;
      of_slice.backward_p1 += cost.backward_p1 / request_.stages;
      of_slice.backward_p2 += cost.backward_p2 / request_.stages;
    }
    if (std::max(imbalance(p1), imbalance(p2)) < kUnequal) return;
    // Only time counts here, so no layers and no caps are needed.
    std::vector<StageCost> equal = costs();
    std::vector<StageCost> as_is = costs();
    for (size_t i = 0; i < equal.size(); ++i) {
      const StageCost& of_slice = mean[i / request_.stages];
      equal[i].forward = of_slice.forward;
      equal[i].backward_p1 = of_slice.backward_p1;
      equal[i].backward_p2 = of_slice.backward_p2;
      equal[i].layers.clear();
      as_is[i].layers.clear();
    }
    const double bubble = simulate(schedule_, as_is, options_).bubble_ratio();
    const double bubble_equal = simulate(schedule_, equal, options_).bubble_ratio();
    if (bubble - bubble_equal < kBubbleThatCounts) return;
    advice_.unequal_p1_and_p2 = true;
    const auto fullest = [](const std::vector<double>& of) {
      return std::max_element(of.begin(), of.end()) - of.begin();
    };
    advice_.sentences.push_back(
        concat("failure signature 3, p1 and p2 very unequal across layers: p1 is ", times(imbalance(p1)),
               " its mean on rank ", fullest(p1), ", p2 ", times(imbalance(p2)), " its mean on rank ", fullest(p2),
               ", all together ", times(imbalance(whole)), " on rank ", fullest(whole),
               "; with equal stages the bubble would be ", fixed(bubble_equal, 3), " in place of ", fixed(bubble, 3)));
  }

  const AdviceRequest& request_;
  Schedule off_schedule_, schedule_;
  SimulationOptions options_, capped_;
  Simulation off_, with_, free_;
  std::string p1_sentence_;
  Advice advice_;
};

}  // namespace

std::vector<double> caps_for(double memory, const std::vector<int>& rank_of_stage, int ranks,
                             const std::vector<StageCost>& costs) {
  if (memory <= 0) return {};
  std::vector<double> caps(ranks, memory);
  for (size_t s = 0; s < rank_of_stage.size(); ++s) caps[rank_of_stage[s]] -= costs[s].fixed_bytes;
  for (double& cap : caps) cap = std::max(cap, 1.0);  // 0 would mean no cap
  return caps;
}

double peak_of(const Simulation& simulation) {
  double peak = 0;
  for (const auto& rank : simulation.ranks) peak = std::max(peak, rank.total_peak_bytes());
  return peak;
}

bool fits(const Simulation& simulation, double memory) {
  return fits(peak_of(simulation), memory);
}

bool fits(double bytes, double memory) {
  return memory <= 0 || bytes <= memory * (1 + 1e-9);
}

Advice advise(const AdviceRequest& request) {
  TWOBP_CHECK(request.policy != P2Policy::kOff,
              "advice compares a p2 policy with p2 off: give a policy other than off");
  return Adviser(request).advise();
}

}  // namespace twobp
