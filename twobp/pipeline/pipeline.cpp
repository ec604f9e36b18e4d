#include "twobp/pipeline/pipeline.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/transport/in_process.h"

namespace twobp {
namespace {

// With a core per rank, a wait spins this long before it sleeps: longer than a wake-up takes, shorter than a
// layer.
constexpr double kSpinSeconds = 200e-6;

bool has_backward(const Schedule& schedule) {
  return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [](const auto& list) {
    return std::any_of(list.begin(), list.end(), [](const Instruction& i) { return i.op == Op::kBackward; });
  });
}

}  // namespace

Pipeline::Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options)
    : model_(model), split_(options.split), rank_of_stage_(options.rank_of_stage) {
  const std::vector<LayerCost> costs = layer_costs(model, profile);
  if (rank_of_stage_.empty())
    rank_of_stage_ = place_stages(Placement::kLinear, options.stages, options.stages);
  if (split_.empty()) {
    std::vector<double> seconds;
    for (const LayerCost& cost : costs) seconds.push_back(cost.seconds());
    split_ = balanced_split(seconds, rank_of_stage_);
  }
  check_split(split_, static_cast<int>(costs.size()), options.stages);
  TWOBP_CHECK(rank_of_stage_.size() == split_.size(), "a placement of ", rank_of_stage_.size(),
              " stages for ", split_.size());
  const int ranks = *std::max_element(rank_of_stage_.begin(), rank_of_stage_.end()) + 1;
  std::vector<int> first_layer;
  for (int first = 0; const int count : split_) {
    first_layer.push_back(first);
    stage_costs_.emplace_back(costs.begin() + first, costs.begin() + first + count);
    first += count;
  }

  meter_ = std::make_unique<MemoryMeter>(rank_of_stage_);
  const bool own_cores = RankThreads::enough_cores(ranks, options.threads.threads_per_rank);
  transports_ = make_in_process_transports(ranks, own_cores ? kSpinSeconds : 0);
  threads_ = std::make_unique<RankThreads>(ranks, options.threads, *meter_);
  executors_.resize(ranks);
  on_ranks([&](int rank) {
    std::vector<std::unique_ptr<Stage>> stages;
    for (size_t s = 0; s < split_.size(); ++s) {
      if (rank_of_stage_[s] != rank) continue;
      stages.push_back(std::make_unique<Stage>(static_cast<int>(s), model_, first_layer[s], split_[s],
                                               options.seed, stage_costs_[s]));
    }
    executors_[rank] = std::make_unique<RankExecutor>(rank, std::move(stages), *transports_[rank], *meter_);
  });
}

Pipeline::~Pipeline() {
  // Tensors are released where they were counted.
  if (threads_) {
    threads_->run([&](int rank) { executors_[rank].reset(); }, [](const std::string&) {});
  }
}

void Pipeline::on_ranks(const std::function<void(int)>& body) {
  TWOBP_CHECK(!failed_, "this pipeline has failed in an earlier step and can't run any more");
  try {
    threads_->run(body, [&](const std::string& reason) { transports_[0]->abort(reason); });
  } catch (...) {
    failed_ = true;
    throw;
  }
}

Stage& Pipeline::stage(int s) {
  for (const auto& stage : executors_[rank_of_stage_.at(s)]->stages()) {
    if (stage->index() == s) return *stage;
  }
  fail("no stage ", s);
}

Plan Pipeline::plan(const ScheduleSource& schedule, int micro_batches, P2Policy policy, P2Batching batching,
                    int64_t memory_cap) const {
  Plan plan;
  plan.schedule = schedule.make(stages(), ranks(), micro_batches, policy);
  TWOBP_CHECK(plan.schedule.replicas == 1, "schedule '", schedule.name(), "' holds ", plan.schedule.replicas,
              " copies of the model: it can be simulated, not run");
  plan.batching = batching;
  plan.memory_cap = memory_cap;
  const Schedule standard = schedule.make(stages(), ranks(), micro_batches, P2Policy::kOff);
  TWOBP_CHECK(has_backward(standard), "schedule '", schedule.name(),
              "' has no backward, so it trains nothing: use another");
  plan.standard_peaks = standard_peaks(standard, stage_costs_);
  // Slots go round with the micro-batches only while those are in order.
  const bool all_slots = memory_cap == 0 || standard.allow_reorder;
  plan.slab_slots = all_slots ? micro_batches : standard_in_flight(standard);
  return plan;
}

Plan Pipeline::forward_plan(int micro_batches) const {
  Plan plan;
  plan.schedule = make_forward_schedule(rank_of_stage_, micro_batches);
  plan.memory_cap = 0;
  return plan;
}

std::vector<int64_t> Pipeline::caps(const Plan& plan) const {
  if (plan.memory_cap >= 0) return std::vector<int64_t>(ranks(), plan.memory_cap);
  std::vector<int64_t> fixed;
  for (int r = 0; r < ranks(); ++r) {
    const MemoryUse use = meter_->rank_use(r);
    fixed.push_back(use.total() - use.held());
  }
  return auto_caps(plan.standard_peaks, fixed);
}

StepReport Pipeline::run(const Plan& plan, const std::vector<Fields>& micro_batches,
                         const StepOptions& options) {
  const Schedule& schedule = plan.schedule;
  TWOBP_CHECK(static_cast<int>(micro_batches.size()) == schedule.micro_batches, "the schedule is for ",
              schedule.micro_batches, " micro-batches, the batch has ", micro_batches.size());
  TWOBP_CHECK(schedule.rank_of_stage == rank_of_stage_,
              "the schedule places its stages differently from the pipeline");
  StepInput input;
  input.schedule = &schedule;
  input.micro_batches = &micro_batches;
  input.input_field = model_.input_field;
  input.seed = options.seed;
  input.step = options.step;
  input.training = options.training;
  input.loss_scale = options.loss_scale;
  input.gradient_scale = options.gradient_scale;
  input.batching = plan.batching;
  input.cap_per_rank = caps(plan);
  input.slab_slots = plan.slab_slots;
  input.timeout = options.timeout;
  input.want_events = options.want_events;
  input.finish = options.finish;

  StepReport report;
  report.step = options.step;
  std::vector<RankResult> results(ranks());
  report.begin = now_seconds();
  try {
    on_ranks([&](int rank) { results[rank] = executors_[rank]->run(input); });
  } catch (...) {
    // While the batch is still there: a rank's thread should not be the one to free what it did not allocate.
    threads_->run([&](int rank) { executors_[rank]->clear(); }, [](const std::string&) {});
    throw;
  }
  report.end = now_seconds();

  report.stages.resize(stages());
  for (int r = 0; r < ranks(); ++r) {
    RankResult& result = results[r];
    result.times.idle[static_cast<int>(IdleCause::kStartUp)] += result.times.begin - report.begin;
    result.times.idle[static_cast<int>(IdleCause::kTail)] += report.end - result.times.end;
    report.loss += result.loss;
    if (result.right) report.right = result.right;  // the loss is on one rank
    report.ranks.push_back(result.times);
    report.rank_memory.push_back(meter_->rank_use(r));
    if (options.want_events) {
      stretch_to_step(result.events, report.begin, result.times.end, report.end);
      report.events.push_back(std::move(result.events));
    }
    for (size_t s = 0; s < executors_[r]->stages().size(); ++s) {
      report.stages[executors_[r]->stages()[s]->index()] = executors_[r]->stage_times()[s];
    }
  }
  for (int s = 0; s < stages(); ++s) report.stage_memory.push_back(meter_->stage_use(s));
  return report;
}

}  // namespace twobp
