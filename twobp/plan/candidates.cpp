#include "twobp/plan/candidates.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

struct Shape {
  int stages = 0;
  int ranks = 0;

  // NOLINTNEXTLINE(modernize-use-nullptr): takes the 0 within for a pointer
  auto operator<=>(const Shape&) const = default;
};

bool leaves_out(const std::vector<int>& asked, int own) {
  return !asked.empty() && std::find(asked.begin(), asked.end(), own) == asked.end();
}

// The numbers of stages and ranks that a schedule could have under the request.
std::vector<Shape> shapes_of(const ScheduleSource& schedule, const PlanRequest& request) {
  if (const Schedule* written = schedule.written()) {
    const Shape own = {written->stages, written->rank_count()};
    if (leaves_out(request.stages, own.stages) || leaves_out(request.ranks, own.ranks)) return {};
    return {own};
  }
  const Placement placement = named_schedule(schedule.name()).placement;
  const int usual = usual_stages_per_rank(placement);
  std::vector<Shape> shapes;
  if (request.stages.empty()) {
    for (const int ranks : request.ranks) shapes.push_back({usual * ranks, ranks});
  } else if (request.ranks.empty()) {
    for (const int stages : request.stages) {
      if (stages % usual == 0) shapes.push_back({stages, stages / usual});
    }
  } else {
    for (const int stages : request.stages) {
      for (const int ranks : request.ranks) {
        const bool fits =
            placement == Placement::kLooped ? stages % ranks == 0 && stages > ranks : stages == usual * ranks;
        if (fits) shapes.push_back({stages, ranks});
      }
    }
  }
  return shapes;
}

// Splits are made once for each placement, size and recomputation.
class Splits {
 public:
  struct Split {
    std::vector<int> counts;
    double busiest = 0;  // seconds per micro-batch; a lower bound for all splits
  };

  const Split& of(const std::vector<int>& rank_of_stage, const CostModel& model, size_t recompute, int size,
                  int slices) {
    const auto [at, is_new] = known_.try_emplace({rank_of_stage, recompute, size, slices});
    if (is_new) at->second = make(rank_of_stage, model, size, slices);
    return at->second;
  }

 private:
  static Split make(const std::vector<int>& rank_of_stage, const CostModel& model, int size, int slices) {
    const int ranks = *std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1;
    const std::vector<double> seconds = layer_seconds_at(model, size, slices);
    double sum = 0, longest = 0;
    for (const double layer : seconds) {
      sum += layer;
      longest = std::max(longest, layer);
    }
    Split split{balanced_split(seconds, rank_of_stage), std::max(sum / ranks, longest)};
    const bool linear = ranks == static_cast<int>(rank_of_stage.size()) && std::ranges::is_sorted(rank_of_stage);
    // Only here is the split proven optimal, and stages of frozen layers add no other.
    if (linear && model.first_trainable < ranks) {
      size_t layer = 0;
      for (const int count : split.counts) {
        double stage = 0;
        for (int i = 0; i < count; ++i) stage += seconds[layer++];
        split.busiest = std::max(split.busiest, stage);
      }
    }
    split.busiest *= 1 - 1e-9;  // sums in another order
    return split;
  }

  std::map<std::tuple<std::vector<int>, size_t, int, int>, Split> known_;
};

void check_positive(const std::vector<int>& values, const char* what) {
  for (const int value : values) TWOBP_CHECK(value >= 1, what, " must be at least 1, got ", value);
}

// The numbers of replicas that a pipeline of this many ranks could have under the request.
std::vector<int> replicas_of(int ranks, const PlanRequest& request) {
  const auto& asked = request.data_parallel;
  if (request.devices == 0) return asked.empty() ? std::vector<int>{1} : asked;
  const int replicas = request.devices / ranks;
  const bool fits = replicas >= 1 && replicas * ranks == request.devices &&
                    (asked.empty() || std::find(asked.begin(), asked.end(), replicas) != asked.end());
  return fits ? std::vector<int>{replicas} : std::vector<int>{};
}

// Micro-batch sizes and numbers of replicas whose product gives the batch (0: any).
std::vector<std::pair<int, int>> loads_of(int micro_batches, const std::vector<int>& sizes,
                                          const std::vector<int>& replicas, int batch) {
  std::vector<std::pair<int, int>> loads;
  for (const int copies : replicas) {
    for (const int size : sizes) {
      const double samples = static_cast<double>(micro_batches) * size * copies;
      if (batch == 0 || samples == batch) loads.emplace_back(size, copies);
    }
  }
  return loads;
}

// The reasons why combinations were left out, each reason once.
class Reasons {
 public:
  void add(const std::string& reason) {
    if (std::find(all_.begin(), all_.end(), reason) == all_.end()) all_.push_back(reason);
  }
  std::string text() const {
    if (all_.empty()) return "no number of stages fits the placement of a schedule";
    const std::vector<std::string> first(all_.begin(), all_.begin() + std::min<size_t>(all_.size(), 3));
    return join(first, "; ") + (all_.size() > 3 ? concat("; and ", all_.size() - 3, " reasons more") : "");
  }

 private:
  std::vector<std::string> all_;
};

// The numbers of slices to plan. Throws Error for one that was not measured.
std::vector<int> slices_of(const CostModel& model, const PlanRequest& request) {
  for (const int slices : request.slices) slice_lengths(model, slices);
  if (!request.slices.empty()) return request.slices;
  std::vector<int> all = {1};
  for (const auto& lengths : model.slice_lengths) all.push_back(static_cast<int>(lengths.size()));
  return all;
}

// Whether the schedule admits these numbers.
bool admits(const ScheduleSource& source, const Shape& shape, int micro_batches, int slices, Reasons& reasons) {
  const std::string& schedule = source.name();
  if (const Schedule* written = source.written()) {
    if (slices == written->slices) return true;
    reasons.add(concat(schedule, " is a schedule of ", written->slices, " slices, not of ", slices));
    return false;
  }
  if (twobp::admits(schedule, shape.stages, shape.ranks, micro_batches, slices)) return true;
  try {
    TWOBP_CHECK(slices == 1 || named_schedule(schedule).takes_slices, "schedule '", schedule,
                "' has no form with slices");
    check_size(shape.stages, micro_batches, slices);
    named_schedule(schedule).generate(shape.stages, shape.ranks, micro_batches, slices);
  } catch (const Error& error) {  // the error gives the reason
    reasons.add(error.what());
  }
  return false;
}

// Lists the combinations, and notes why others are left out.
class Enumeration {
 public:
  Enumeration(const ModelsByRecompute& models, const PlanRequest& request)
      : models_(models),
        request_(request),
        layers_(static_cast<int>(models.front().second.layers.size())),
        sizes_(request.micro_batch_sizes.empty() ? models.front().second.micro_batch_sizes : request.micro_batch_sizes),
        slices_(slices_of(models.front().second, request)) {}

  void add(const AskedSchedule& asked) {
    const ScheduleSource& schedule = asked.source;
    const std::vector<P2Policy> policies = policies_of(asked);
    const auto shapes = shapes_of(schedule, request_);
    if (shapes.empty() && schedule.written() != nullptr) {
      reasons_.add(concat(schedule, " is a schedule of ", schedule.written()->stages, " stages on ",
                          schedule.written()->rank_count(), " ranks, which are not asked for"));
    }
    for (const Shape& shape : shapes) add(schedule, policies, shape);
  }
  // Throws Error if there are none.
  std::vector<Candidate> take() {
    TWOBP_CHECK(!all_.empty(), "there is no combination to plan: ", reasons_.text());
    return std::move(all_);
  }

 private:
  std::vector<P2Policy> policies_of(const AskedSchedule& asked) {
    const auto admitted = planned_policies(asked.source);
    std::vector<P2Policy> wanted = request_.policies.empty() ? admitted : request_.policies;
    if (asked.policy) wanted = {*asked.policy};
    std::vector<std::string> names;
    for (const P2Policy policy : admitted) names.emplace_back(policy_name(policy));
    std::vector<P2Policy> policies;
    for (const P2Policy policy : wanted) {
      if (std::find(admitted.begin(), admitted.end(), policy) != admitted.end()) {
        policies.push_back(policy);
      } else {
        reasons_.add(concat("schedule '", asked.source, "' is planned with p2 ", join(names), ", not with ",
                            policy_name(policy)));
      }
    }
    return policies;
  }

  void add(const ScheduleSource& schedule, const std::vector<P2Policy>& policies, const Shape& shape) {
    const std::vector<int> rank_of_stage = schedule.rank_of_stage(shape.stages, shape.ranks);
    if (shape.stages > layers_) {
      reasons_.add(concat("the model has ", layers_, " layers, too few for ", shape.stages, " stages"));
      return;
    }
    const auto replicas = replicas_of(shape.ranks, request_);
    if (replicas.empty()) {
      reasons_.add(concat(shape.ranks, " ranks and the replicas asked for do not make ", request_.devices, " devices"));
    }
    for (const int micro_batches : counts_of(schedule, shape)) {
      const auto loads = loads_of(micro_batches, sizes_, replicas, request_.batch);
      if (loads.empty() && !replicas.empty()) {
        reasons_.add(
            concat("no given micro-batch size and number of replicas makes a batch of ", request_.batch, " samples"));
      }
      if (loads.empty() || policies.empty()) continue;
      Candidate candidate;
      candidate.choice.schedule = schedule;
      candidate.choice.ranks = shape.ranks;
      candidate.choice.stages = shape.stages;
      candidate.choice.micro_batches = micro_batches;
      for (const int slices : slices_) {
        if (!admits(schedule, shape, micro_batches, slices, reasons_)) continue;
        candidate.choice.slices = slices;
        add_loads(candidate, loads, policies, rank_of_stage);
      }
    }
  }

  // The numbers of micro-batches to plan.
  std::vector<int> counts_of(const ScheduleSource& schedule, const Shape& shape) {
    const Schedule* const written = schedule.written();
    if (written != nullptr) {
      if (!leaves_out(request_.micro_batches, written->micro_batches)) return {written->micro_batches};
      reasons_.add(
          concat(schedule, " is a schedule of ", written->micro_batches, " micro-batches, which are not asked for"));
      return {};
    }
    if (!request_.micro_batches.empty()) return request_.micro_batches;
    return {shape.ranks, 2 * shape.ranks, 4 * shape.ranks};
  }

  void add_loads(Candidate candidate, const std::vector<std::pair<int, int>>& loads,
                 const std::vector<P2Policy>& policies, const std::vector<int>& rank_of_stage) {
    const int slices = candidate.choice.slices;
    for (const auto& [size, copies] : loads) {
      candidate.choice.micro_batch_size = size;
      candidate.choice.data_parallel = copies;
      candidate.choice.experts = request_.experts;
      for (size_t mode = 0; mode < models_.size(); ++mode) {
        const auto& [recompute, model] = models_[mode];
        if (!has_slices(model, slices)) {
          reasons_.add(concat("recomputation ", recompute, " has no costs in ", slices,
                              " slices: slices can be planned with none or activations"));
          continue;
        }
        const auto& split = splits_.of(rank_of_stage, model, mode, size, slices);
        candidate.choice.recompute = recompute;
        candidate.choice.split = split.counts;
        if (const std::string why = request_.refusal ? request_.refusal(candidate.choice) : ""; !why.empty()) {
          reasons_.add(why);
          continue;
        }
        candidate.most_samples = size * (copies / split.busiest);
        for (const P2Policy policy : policies) {
          candidate.choice.policy = policy;
          for (const bool streams : request_.streams) {
            candidate.choice.streams = streams;
            if (streams && (policy == P2Policy::kOff || policy == P2Policy::kPlaced)) {
              reasons_.add(concat("with p2 ", policy_name(policy), ", W does not wait, so gradients are not streamed"));
            } else {
              all_.push_back(candidate);
            }
          }
        }
      }
    }
  }

  const ModelsByRecompute& models_;
  const PlanRequest& request_;
  int layers_;
  std::vector<int> sizes_;
  std::vector<int> slices_;
  Splits splits_;
  Reasons reasons_;
  std::vector<Candidate> all_;
};

}  // namespace

std::vector<std::string> planned_schedules() {
  std::vector<std::string> names;
  std::set<Schedule (*)(int, int, int, int)> generators;
  for (const NamedSchedule& schedule : named_schedules()) {
    if (generators.insert(schedule.generate).second) names.emplace_back(schedule.name);
  }
  return names;
}

std::vector<P2Policy> planned_policies(const ScheduleSource& schedule) {
  if (schedule.places_p2()) return {P2Policy::kPlaced, P2Policy::kFill, P2Policy::kOff};
  return {P2Policy::kFill, P2Policy::kCooldown, P2Policy::kEnd, P2Policy::kOff};
}

std::vector<Candidate> candidates(const ModelsByRecompute& models, const PlanRequest& request) {
  check_positive(request.ranks, "a number of ranks");
  check_positive(request.stages, "a number of stages");
  check_positive(request.micro_batches, "a number of micro-batches");
  check_positive(request.micro_batch_sizes, "a micro-batch size");
  check_positive(request.data_parallel, "a number of replicas");
  check_positive(request.slices, "a number of slices");
  TWOBP_CHECK(request.devices >= 0 && request.batch >= 0, "devices and batch must not be negative, got ",
              request.devices, " and ", request.batch);
  std::vector<AskedSchedule> asked = request.schedules;
  if (asked.empty()) {
    for (const std::string& name : planned_schedules()) asked.emplace_back(name);
  }
  const bool all_written =
      std::all_of(asked.begin(), asked.end(), [](const auto& each) { return each.source.written() != nullptr; });
  TWOBP_CHECK(all_written || !request.ranks.empty() || !request.stages.empty(),
              "a plan needs a number of ranks or a number of stages");
  Enumeration enumeration(models, request);
  for (const AskedSchedule& each : asked) enumeration.add(each);
  return enumeration.take();
}

}  // namespace twobp
