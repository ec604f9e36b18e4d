#include "twobp/pipeline/pipeline.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/nn/layers/attention_inputs.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/executor/step_graph.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/report_exchange.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/transport/subgroup.h"

namespace twobp {
namespace {

int ranks_of(const PipelineOptions& options) {
  const auto& ranks = options.rank_of_stage;
  return ranks.empty() ? options.stages : *std::max_element(ranks.begin(), ranks.end()) + 1;
}

// The cuts of each micro-batch, in proportion to its length.
std::vector<Cuts> cuts_of(const std::vector<Fields>& micro_batches, const Cuts& measured) {
  std::vector<Cuts> cuts;
  for (const Fields& fields : micro_batches) cuts.push_back(scaled_cuts(measured, sequence_length(fields)));
  return cuts;
}

// The fields of each slice of the micro-batches.
std::vector<Fields> in_slices(const std::vector<Fields>& micro_batches, const std::vector<Cuts>& cuts) {
  std::vector<Fields> slices;
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    for (size_t s = 0; s + 1 < cuts[m].size(); ++s) {
      slices.push_back(slice_of(micro_batches[m], cuts[m][s], cuts[m][s + 1] - cuts[m][s]));
    }
  }
  return slices;
}

// Makes every layer once, which allocates nothing.
std::vector<std::pair<int, ExpertTokens>> layers_with_experts(const ModelSpec& model) {
  std::vector<std::pair<int, ExpertTokens>> layers;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerSpec& spec = model.layers[i];
    const std::unique_ptr<Layer> layer = spec.make();
    for (const Parameter* parameter : parameters_of(*layer)) {
      if (parameter->experts() == 0) continue;
      const auto experts = static_cast<size_t>(parameter->experts() * parameter->share().of);
      layers.emplace_back(static_cast<int>(i), ExpertTokens{spec.name, std::vector<int64_t>(experts)});
      break;
    }
  }
  return layers;
}

}  // namespace

struct Pipeline::KeptGraph {
  StepKey last_trained;
  std::unique_ptr<StepGraph> graph;  // of this step; null: not recorded
};

struct Pipeline::UnderWay {
  std::shared_ptr<const StepPlan> plan;
  StepRequest request;
  StepBatch batch;
  std::vector<RankResult> results;  // by rank
  double begin = 0;
  bool begun_early = false;  // the previous step was under way
  std::shared_ptr<RankThreads::Job> job;
};

std::vector<World> make_thread_worlds(int replicas, int ranks, const ThreadOptions& threads,
                                      const std::vector<Device>& devices) {
  const double spin = RankThreads::spin_seconds(replicas * ranks, threads.threads_per_rank);
  return make_in_process_worlds(replicas, ranks, spin, devices);
}

Pipeline::Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options)
    : Pipeline(model, profile, options, std::move(make_thread_worlds(1, ranks_of(options), options.threads).front())) {}

Pipeline::Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options, World world)
    : model_(model),
      split_(options.split),
      rank_of_stage_(options.rank_of_stage),
      frozen_stages_(options.frozen_stages),
      slices_(options.slices),
      world_(std::move(world)),
      timeout_(options.timeout),
      graphs_(options.graphs),
      accounts_(options.accounts),
      by_size_(slices_.profiles.empty() ? std::vector<Profile>{profile} : slices_.profiles, options.measured),
      largest_(options.measured),
      graph_(std::make_unique<KeptGraph>()) {
  const std::vector<LayerCost> costs = twobp::layer_costs(model, profile);
  if (rank_of_stage_.empty()) rank_of_stage_ = place_stages(Placement::kLinear, options.stages, options.stages);
  if (split_.empty()) split_ = measured_split(model, costs, rank_of_stage_);
  check_split(split_, static_cast<int>(costs.size()), options.stages);
  TWOBP_CHECK(rank_of_stage_.size() == split_.size(), "rank_of_stage places ", rank_of_stage_.size(),
              " stages, but the split has ", split_.size());
  const int ranks = *std::max_element(rank_of_stage_.begin(), rank_of_stage_.end()) + 1;
  TWOBP_CHECK(!frozen_stages_ || std::accumulate(split_.begin(), split_.begin() + ranks, 0) <= model.first_trainable,
              "the first ", ranks, " stages have trained layers, but are to be frozen");
  TWOBP_CHECK(ranks == world_.ranks, "the stages are placed on ", ranks, " ranks, but each pipeline of this run has ",
              world_.ranks);
  std::vector<int> first_layer;
  for (int first = 0; const int count : split_) {
    first_layer.push_back(first);
    first += count;
  }
  layer_costs_ = layer_costs(largest_);

  meter_ = std::make_unique<MemoryMeter>(rank_of_stage_);
  const std::vector<int> here = world_.local_ranks();
  const CoreShare share = share_cores(*world_.processes, static_cast<int>(here.size()), timeout_);
  threads_ = std::make_unique<RankThreads>(here, options.threads, share, *meter_);
  clock_ahead_.assign(world_.processes_of_replica(), 0);
  for (int process = 1; world_.replica == 0 && process < world_.processes_of_replica(); ++process) {
    if (const int first = share.clocks[process]; first < process) {
      clock_ahead_[process] = clock_ahead_[first];
    } else if (world_.is_first() || world_.process() == process) {
      clock_ahead_[process] = clock_ahead(*world_.processes, process, timeout_);
    }
  }
  executors_.resize(ranks);
  if (accounts_) expert_layers_ = layers_with_experts(model);
  if (options.experts > 1) {
    TWOBP_CHECK(world_.replicas % options.experts == 0, options.experts,
                " replicas are to share experts, but there are ", world_.replicas, ": these must be a multiple");
    std::vector<int> members(static_cast<size_t>(options.experts));
    std::iota(members.begin(), members.end(), world_.replica / options.experts * options.experts);
    experts_.resize(static_cast<size_t>(ranks));
    for (const int rank : here)
      experts_[static_cast<size_t>(rank)] = std::make_unique<Subgroup>(*world_.data[rank], members, Group::kReplicas);
  }
  on_ranks([&](int rank) {
    world_.device(rank).prepare_libraries();
    std::vector<std::unique_ptr<Stage>> stages;
    for (size_t s = 0; s < split_.size(); ++s) {
      if (rank_of_stage_[s] != rank) continue;
      stages.push_back(std::make_unique<Stage>(static_cast<int>(s), model_, first_layer[s], split_[s], options.seed,
                                               world_.device(rank).where()));
    }
    RankParts parts{.rank = rank,
                    .device = world_.device(rank),
                    .stages = std::move(stages),
                    .transport = *world_.pipeline[rank],
                    .meter = *meter_,
                    .timeout = timeout_,
                    .input_field = model_.input_field,
                    .bf16_stash = model_.bf16_stash,
                    .books_messages = !world_.all_local,
                    .experts = experts_.empty() ? nullptr : experts_[static_cast<size_t>(rank)].get()};
    executors_[rank] = std::make_unique<RankExecutor>(std::move(parts), accounts_);
  });
}

Pipeline::~Pipeline() {
  drain();
  // Tensors must be released on the threads that counted them.
  if (threads_) {
    threads_->run([&](int rank) { executors_[rank].reset(); }, [](const std::string&) {});
  }
}

void Pipeline::on_ranks(const std::function<void(int)>& body) {
  TWOBP_CHECK(!failed_, "this pipeline has failed in an earlier step and can't run any more");
  forget_next();
  wait(*post([&](int rank) {
    body(rank);
    world_.device(rank).compute().wait_on_host();  // any thread may read what it wrote
  }));
}

std::shared_ptr<RankThreads::Job> Pipeline::post(std::function<void(int)> body) {
  return threads_->submit(
      [this, body = std::move(body)](int rank) {
        const OnStream here(world_.device(rank).compute());
        body(rank);
      },
      [this](const std::string& reason) { abort(reason); });
}

void Pipeline::abort(const std::string& reason) {
  if (world_.abort) {
    world_.abort(reason);
  } else {
    world_.pipeline[world_.local_ranks().front()]->abort(reason);
  }
}

void Pipeline::wait(const RankThreads::Job& job) {
  try {
    threads_->wait(job);
  } catch (...) {
    failed_ = true;
    throw;
  }
}

RankExecutor& Pipeline::rank(int r) {
  TWOBP_CHECK(is_local(r), "rank ", r, " does not run in this process, which is process ", world_.process());
  return *executors_[r];
}

Stage& Pipeline::stage(int s) {
  TWOBP_CHECK(has_stage(s), "stage ", s, " is on rank ", rank_of_stage_[s],
              ", which does not run in this process (process ", world_.process(), ")");
  for (const auto& stage : executors_[rank_of_stage_.at(s)]->stages()) {
    if (stage->index() == s) return *stage;
  }
  fail("rank ", rank_of_stage_[s], " has no stage ", s);
}

StepReport Pipeline::run(const StepPlan& plan, const std::vector<Fields>& micro_batches, const StepRequest& request) {
  TWOBP_CHECK(under_way_.empty(), "an earlier step is still running: call finish() before run()");
  submit(plan, micro_batches, request);
  return finish();
}

void Pipeline::check_step(const StepPlan& plan, const std::vector<Fields>& micro_batches,
                          const StepRequest& request) const {
  const Schedule& schedule = plan.schedule;
  TWOBP_CHECK(!failed_, "this pipeline has failed in an earlier step and can't run any more");
  TWOBP_CHECK(static_cast<int>(micro_batches.size()) * schedule.slices == schedule.micro_batches,
              "the schedule is for ", schedule.micro_batches / schedule.slices, " micro-batches, but the batch has ",
              micro_batches.size());
  TWOBP_CHECK(schedule.rank_of_stage == rank_of_stage_, "the schedule places its stages differently from the pipeline");
  TWOBP_CHECK(schedule.slices == 1 || schedule.slices == slices(), "the schedule has ", schedule.slices,
              " slices for each micro-batch, but this pipeline was measured with ", slices());
  TWOBP_CHECK(under_way_.empty() || (!request.want_events && !under_way_.back()->request.want_events),
              "a step that records events cannot overlap another step: finish the other step first");
}

StepBatch Pipeline::in_parts(const std::vector<Fields>& micro_batches, int slices) {
  std::vector<std::shared_ptr<const StagesOfLayers>> costs;
  for (const Fields& fields : micro_batches) costs.push_back(costs_of(size_of(fields)));
  if (slices == 1) return {micro_batches, {}, {}, std::move(costs)};
  const std::vector<Cuts> cuts = cuts_of(micro_batches, slices_.cuts);
  return {in_slices(micro_batches, cuts), micro_batches, cuts, std::move(costs)};
}

StagesOfLayers Pipeline::layer_costs(const BatchSize& size) const {
  return layer_costs_of_stages(model_, by_size_.at(size), split_);
}

std::shared_ptr<const StagesOfLayers> Pipeline::costs_of(BatchSize size) {
  constexpr size_t kMost = 1024;
  if (by_size_.one_size()) size = {};
  if (costs_.size() >= kMost) costs_.clear();
  auto& costs = costs_[{size.numbers, size.squares}];
  if (!costs) costs = std::make_shared<const StagesOfLayers>(layer_costs(size));
  return costs;
}

void Pipeline::note_sizes(const std::vector<Fields>& micro_batches) {
  constexpr double kSteps = 16;  // between two powers of two
  if (by_size_.one_size()) return;
  // Devices run W where the simulated step does, the same in all replicas, which have other micro-batches.
  if (world_.replicas > 1 && world_.device(world_.local_ranks().front()).asynchronous()) return;
  const auto rounded = [](double size, double measured) {
    return measured * std::exp2(std::ceil(std::log2(size / measured) * kSteps) / kSteps);
  };
  const auto bytes = [&](const BatchSize& size) {
    double sum = 0;
    for (const auto& layers : *costs_of(size)) {
      for (const LayerCost& layer : layers) sum += layer.forward_held + layer.stash;
    }
    return sum;
  };
  for (const Fields& fields : micro_batches) {
    const BatchSize size = size_of(fields);
    if (slices() == 1 && !by_size_.covers(size)) {
      by_size_.add(measure_bytes(model_, fields, world_.device(world_.local_ranks().front())), size);
      costs_.clear();
      renewed_.clear();
    }
    if (bytes(size) <= bytes(largest_)) continue;
    const BatchSize& first = by_size_.first();
    largest_ = {rounded(size.numbers, first.numbers), rounded(size.squares, first.squares)};
  }
}

std::shared_ptr<const StepPlan> Pipeline::current(const StepPlan& plan) {
  if (!under_way_.empty()) {
    const auto& newest = under_way_.back()->plan;
    if (newest->options == plan.options && newest->schedule == plan.schedule && newest->largest == largest_)
      return newest;
    on_ranks([](int) {});  // what ranks hold is read, so no step may be under way
  }
  // Every process calls this, whatever its own plan. A replica without micro-batches would not ask for a cap.
  if (world_.processes->size() > 1) fixed_bytes();
  return renewed(plan);
}

bool NextBatch::begins(const std::vector<Fields>& batch) const {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.equal(b);
  };
  const auto same_fields = [&](const Fields& a, const Fields& b) {
    return std::ranges::equal(
        a, b, [&](const auto& x, const auto& y) { return x.first == y.first && same(x.second, y.second); });
  };
  return micro_batches.size() <= batch.size() &&
         std::equal(micro_batches.begin(), micro_batches.end(), batch.begin(), same_fields);
}

void Pipeline::look_ahead(UnderWay& step) {
  const StepRequest& request = step.request;
  if (!request.training) return;
  StepBatch& batch = step.batch;
  if (next_ && next_->step == request.step && next_->begins(batch.micro_batches)) batch.foreseen = next_;
  next_.reset();
  const size_t count = std::min(static_cast<size_t>(step.plan->ahead), request.next.size());
  if (count == 0 || !is_local(rank_of_stage_[0])) return;  // in several processes, only the first stage looks ahead
  auto next = std::make_shared<NextBatch>();
  next->step = request.step + 1;
  for (size_t m = 0; m < count; ++m) {
    Fields& copy = next->micro_batches.emplace_back();
    for (const auto& [name, tensor] : request.next[m]) copy[name] = tensor.clone();
    next->costs.push_back(costs_of(size_of(request.next[m])));
  }
  batch.next = next_ = std::move(next);
}

void Pipeline::submit(const StepPlan& plan, const std::vector<Fields>& micro_batches, const StepRequest& request) {
  const MemoryMeter::Watch watch(*meter_);
  check_step(plan, micro_batches, request);
  auto step = std::make_unique<UnderWay>();
  step->begun_early = !under_way_.empty();
  if (request.training) note_sizes(micro_batches);
  step->plan = current(plan);
  step->request = request;
  step->batch = in_parts(micro_batches, plan.schedule.slices);
  look_ahead(*step);
  step->results.resize(ranks());
  step->begin = now_seconds();
  const std::optional<DeviceEvent> graph = launch_graph(*step);
  step->job = post([this, graph, &step = *step](int rank) {
    RankExecutor& executor = *executors_[rank];
    step.results[rank] = graph ? executor.finish_recorded(*step.plan, step.request, *graph)
                               : executor.run(*step.plan, step.request, step.batch, step.begun_early);
  });
  under_way_.push_back(std::move(step));
}

std::optional<DeviceEvent> Pipeline::launch_graph(const UnderWay& step) {
  if (!graphs_) return std::nullopt;
  std::unique_ptr<StepGraph>& graph = graph_->graph;
  // Other sizes or schedules may replace buffers that layers keep and the graph reads.
  if (!step.request.training) {
    if (!graph_->last_trained.has_sizes_of(step.batch)) graph.reset();
    return std::nullopt;
  }
  // A step must have run once before, so that libraries are set up for it.
  StepKey key(step.plan, step.batch);
  const bool again = std::exchange(graph_->last_trained, std::move(key)) == graph_->last_trained;
  if (!again) graph.reset();
  if (!again || step.request.want_events) return std::nullopt;
  check_graph(step);
  try {
    if (!graph) {
      const auto record = [&](int rank, const StepRequest& request, const StepBatch& batch, const DeviceEvent& begin,
                              std::mutex& turn) {
        return executors_[rank]->record(*step.plan, request, batch, begin, turn);
      };
      const auto on_all_ranks = [&](const std::function<void(int)>& body) { wait(*post(body)); };
      graph = std::make_unique<StepGraph>(world_.devices, step.request, step.batch, record, on_all_ranks);
    }
    return graph->launch(step.request, step.batch);
  } catch (...) {
    failed_ = true;  // parameters may be marked as having gradients that were never computed
    throw;
  }
}

void Pipeline::check_graph(const UnderWay& step) const {
  TWOBP_CHECK(world_.all_local && world_.replicas == 1 && world_.device(0).asynchronous(),
              "pipeline.graphs is set, but the ranks are not all on GPUs of this process, or there are replicas: "
              "set it to false");
  const auto has_documents = [](const Fields& fields) { return fields.contains(kDocumentStarts); };
  TWOBP_CHECK(std::ranges::none_of(step.batch.micro_batches, has_documents),
              "pipeline.graphs is set, but samples hold several documents, whose places the host checks in "
              "every step: set it to false, or give no document_starts.npy");
  TWOBP_CHECK(under_way_.empty(),
              "a step that is launched as a graph cannot overlap another step: finish the other step first");
}

void Pipeline::forget_steps() {
  // While the batch still exists: a rank's thread should not be the one to free memory it did not allocate.
  threads_->run([&](int rank) { executors_[rank]->clear(); }, [](const std::string&) {});
  under_way_.clear();
}

StepReport Pipeline::finish(const std::vector<at::Tensor>& numbers) {
  TWOBP_CHECK(!under_way_.empty(), "no step is running: call submit() before finish()");
  const MemoryMeter::Watch watch(*meter_);  // messages may be allocated or freed while this thread receives
  try {
    wait(*under_way_.front()->job);
  } catch (...) {
    forget_steps();
    throw;
  }
  const std::unique_ptr<UnderWay> step = std::move(under_way_.front());
  under_way_.pop_front();
  StepReport report = report_of(*step);
  if (report.given_up) forget_next();
  try {
    complete(report, *step, numbers);
  } catch (const Aborted&) {
    throw;
  } catch (const Error& e) {
    fail("rank ", world_.local_ranks().front(), ", step ", report.step, ", report of the step: ", e.what());
  }
  return report;
}

StepReport Pipeline::report_of(UnderWay& step) const {
  const bool followed = !under_way_.empty();
  const StepRequest& request = step.request;
  StepReport report;
  report.step = request.step;
  report.begun_early = step.begun_early;
  report.begin = step.begun_early ? last_end_ : step.begin;
  if (!followed) report.end = now_seconds();
  report.stop = request.early_end && request.early_end->asked();
  report.given_up = request.early_end && request.early_end->given_up();
  report.ranks.resize(ranks());
  report.rank_memory.resize(ranks());
  report.stages.resize(stages());
  report.stage_memory.resize(stages());
  if (request.want_events) report.events.resize(ranks());
  for (const auto& [layer, tokens] : expert_layers_) report.experts.push_back(tokens);
  for (const int r : world_.local_ranks()) {
    RankResult& result = step.results[r];
    report.loss += result.loss;
    if (result.right) report.right = result.right;  // only one rank has the loss
    if (!accounts_) {
      report.ranks[r].busy = kUnknown;
      continue;
    }
    RankAccount& account = result.account;
    report.ranks[r] = account.times;
    report.rank_memory[r] = followed ? account.memory : meter_->rank_use(r);
    report.end = std::max(report.end, account.times.end);
    if (request.want_events) report.events[r] = std::move(account.events);
    for (size_t i = 0; i < expert_layers_.size(); ++i) {
      const auto counted = account.experts.find(expert_layers_[i].first);
      if (counted != account.experts.end()) report.experts[i].tokens = counted->second;
    }
    for (size_t s = 0; s < executors_[r]->stages().size(); ++s) {
      const int stage = executors_[r]->stages()[s]->index();
      report.stages[stage] = account.stages[s];
      report.stage_memory[stage] = followed ? account.stage_memory[s] : meter_->stage_use(stage);
    }
  }
  return report;
}

void Pipeline::complete(StepReport& report, const UnderWay& step, const std::vector<at::Tensor>& numbers) {
  const StepRequest& input = step.request;
  const int of_replica = world_.processes_of_replica();
  const auto parts_of = [&](int process) {
    std::pair<std::vector<int>, std::vector<int>> parts;
    for (int r = 0; r < ranks(); ++r) {
      if (r * of_replica / ranks() == process) parts.first.push_back(r);
    }
    for (int s = 0; s < stages(); ++s) {
      if (rank_of_stage_[s] * of_replica / ranks() == process) parts.second.push_back(s);
    }
    return parts;
  };
  Values packed(input.want_events ? 3 : 1, at::empty({0}, at::kDouble));
  if (input.want_events) packed[2] = at::empty({0}, at::kByte);
  if (world_.replica == 0 && !world_.is_first()) {
    const auto [ranks_here, stages_here] = parts_of(world_.process());
    packed = pack_report(report, ranks_here, stages_here);
  }
  std::vector<at::Tensor> all = numbers;
  for (const ExpertTokens& one : report.experts) all.push_back(at::tensor(one.tokens, at::kDouble));
  const std::vector<Values> reports = exchange_report(world_, timeout_, report, packed, all);
  for (size_t i = 0; i < report.experts.size(); ++i) {
    const at::Tensor sums = all[numbers.size() + i].to(at::kLong);
    report.experts[i].tokens.assign(sums.const_data_ptr<int64_t>(), sums.const_data_ptr<int64_t>() + sums.numel());
  }
  for (int process = 1; world_.is_first() && process < of_replica; ++process) {
    const auto [ranks_there, stages_there] = parts_of(process);
    unpack_report(reports[process], ranks_there, stages_there, clock_ahead_[process], report);
  }
  if (step.begun_early) report.begin = last_end_;
  // A rank that ends its part early goes on with the next step, if that is already submitted.
  const bool followed = !under_way_.empty();
  for (int r = 0; r < ranks(); ++r) {
    if (!is_local(r) && !world_.is_first()) continue;
    RankTimes& times = report.ranks[r];
    const double begin = step.begun_early ? last_ends_[r] : report.begin;
    const double end = followed ? times.end : report.end;
    times.span = end - begin;
    times.idle[static_cast<int>(IdleCause::kStartUp)] += times.begin - begin;
    times.idle[static_cast<int>(IdleCause::kTail)] += end - times.end;
    if (input.want_events) stretch_to_step(report.events[r], report.begin, times.end, report.end);
  }
  last_end_ = report.end;
  last_ends_.clear();
  for (const RankTimes& times : report.ranks) last_ends_.push_back(times.end);
}

std::exception_ptr Pipeline::drain() noexcept {
  std::exception_ptr first;
  for (const auto& step : under_way_) {
    try {
      wait(*step->job);
    } catch (const Aborted&) {
      // The echo of an error on another rank.
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (failed_) {
    forget_steps();
  } else {
    under_way_.clear();
  }
  return first;
}

void Pipeline::abandon(const std::string& reason) noexcept {
  if (under_way_.empty()) return;
  failed_ = true;
  try {
    abort(reason);
  } catch (const std::exception&) {
    // The other processes notice by their time-outs.
  }
  drain();
}

}  // namespace twobp
