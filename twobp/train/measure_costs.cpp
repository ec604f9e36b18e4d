#include <algorithm>
#include <set>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/data/balance.h"
#include "twobp/models/recompute/recompute_rules.h"
#include "twobp/nn/device/gpu.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/profile/slices.h"
#include "twobp/pipeline/rank_threads.h"
#include "twobp/train/build_model.h"
#include "twobp/train/check_config.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp {
namespace {

constexpr int kOptimizerSteps = 5;

double bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<double>(tensor.nbytes()) : 0;
}

// Of a master that is not the value itself.
double master_bytes(const Parameter& parameter) {
  return parameter.master.is_same(parameter.value) ? 0 : bytes_of(parameter.master);
}

// Weights, gradients and optimizer state of one layer, and the time of its update. `last`: the name of the model's last
// matrix. `uses`: how often the model uses each weight, by name.
KindCosts measure_update(const LayerSpec& spec, const OptimizerConfig& config, const std::string& last,
                         const std::map<std::string, int>& uses, const Device& device) {
  const OnStream here(device.compute());
  const auto layer = spec.make();
  KindCosts costs;
  std::vector<Optimizer::Item> items;
  std::set<std::string> counted;  // tied weights count once
  for (Parameter* parameter : parameters_of(*layer)) {
    parameter->allocate_value(0);
    parameter->move_to(device.where());
    parameter->allocate_grad();
    const double values = bytes_of(parameter->value) + master_bytes(*parameter);
    costs.parameter_bytes += values;
    costs.gradient_bytes += static_cast<double>(parameter->grad_bytes());
    if (parameter->is_buffer()) continue;
    const int count = uses.at(parameter->name());
    // Of two uses in a host's memory, the first adds its gradient to the other's (Parameter::share_grad).
    const bool shares = count == 2 && parameter->trainable() && !device.asynchronous();
    if (count > 1) costs.tied[parameter->name()] = {values, shares ? static_cast<double>(parameter->grad_bytes()) : 0};
    if (counted.insert(parameter->name()).second) costs.parameters += static_cast<double>(parameter->numel());
    if (parameter->trainable()) items.push_back({parameter, 0, in_hidden_layer(*parameter, last)});
  }
  if (items.empty()) return costs;
  Optimizer optimizer(config, items);
  std::map<std::string, double> states;  // by the name of the parameter
  for (const auto& state : optimizer.state()) states[state.item.parameter->name()] += bytes_of(state.tensor);
  for (const auto& item : items) {
    const Parameter& parameter = *item.parameter;
    double& state = states[parameter.name()];
    if (config.average > 0) state += bytes_of(parameter.master);
    costs.optimizer_bytes += state;
    const bool sharded = config.shard && parameter.share().of <= 1;
    if (sharded) costs.sharded_bytes += state + master_bytes(parameter);
    if (const auto one = costs.tied.find(parameter.name()); one != costs.tied.end())
      one->second.weight += sharded ? -master_bytes(parameter) : state;
  }
  const MemoryMeter meter({0});
  const MemoryMeter::Watch watch(meter);
  std::vector<double> seconds;
  for (int i = 0; i < kOptimizerSteps; ++i) {
    for (const auto& item : items) item.parameter->grad_to_add();
    device.compute().wait_on_host();
    const double begin = now_seconds();
    optimizer.step(config.lr, 1);
    device.compute().wait_on_host();
    seconds.push_back(now_seconds() - begin);
  }
  costs.optimizer_seconds = median(std::move(seconds));
  costs.update_bytes = static_cast<double>(meter.rank_use(0).peak);
  return costs;
}

// The sizes in rising order, none above the number of samples.
std::vector<int> sizes_of(const MeasureOptions& options, const Config& config, int64_t samples) {
  std::vector<int> sizes = options.micro_batch_sizes;
  const bool one_size = !config.model.input().fields.empty();  // a captured model
  if (sizes.empty() || (one_size && options.only_what_fits))
    sizes = {static_cast<int>(config.pipeline.micro_batch_size)};
  std::sort(sizes.begin(), sizes.end());
  if (options.only_what_fits) {
    std::erase_if(sizes, [&](int size) { return size > samples; });
    // Training takes them the same way.
    if (sizes.empty() && samples > 0) sizes = {static_cast<int>(samples)};
  }
  for (const int size : sizes) {
    TWOBP_CHECK(size <= samples, "a micro-batch of ", size, " samples cannot be measured, the data has ", samples,
                ": give smaller sizes");
  }
  TWOBP_CHECK(!sizes.empty(), "the data has no samples: nothing can be measured");
  return sizes;
}

// Recomputes all layers but the first and the last, as with_recompute does.
ModelSpec recomputing(ModelSpec model, const std::string& mode) {
  std::vector<Recompute> modes(model.layers.size(), parse_recompute(mode));
  modes.front() = modes.back() = Recompute::kNone;
  recompute(model, modes);
  return model;
}

// The numbers of slices without 1, in rising order, each once.
std::vector<int> slices_of(const MeasureOptions& options, const Config& config) {
  std::set<int> counts(options.slices.begin(), options.slices.end());
  if (counts.empty()) counts.insert(config.pipeline.slices);
  TWOBP_CHECK(*counts.begin() >= 1, "a sequence has at least 1 slice, not ", *counts.begin());
  counts.erase(1);
  return {counts.begin(), counts.end()};
}

// The pipeline of the configuration with so many slices.
PipelineConfig in_slices(const Config& config, int slices) {
  PipelineConfig pipeline = config.pipeline;
  if (slices != pipeline.slices) pipeline.slice_lengths.clear();
  pipeline.slices = slices;
  return pipeline;
}

// Adds the costs of slices at the next size, whose micro-batch is `batch`.
void add_slices(const std::vector<ModelSpec>& models, const ProfiledBatch& batch, const Config& config,
                const std::vector<int>& counts, double seconds, const Device& device, CostModel& costs) {
  const bool is_first = costs.slice_lengths.empty();
  for (size_t way = 0; way < counts.size(); ++way) {
    PipelineConfig pipeline = in_slices(config, counts[way]);
    if (!is_first) pipeline.slice_lengths = costs.slice_lengths[way];
    std::set<std::string> measured;
    for (const ModelSpec& model : models) {
      const SliceProfiles slices = measured_slices(model, batch, pipeline, device, seconds);
      pipeline.slice_lengths = slices.lengths();
      for (const auto& [kind, first] : slices.profiles.front()) {
        if (!measured.insert(kind).second) continue;
        auto& ways = costs.kinds.at(kind).in_slices;
        ways.resize(counts.size());
        ways[way].resize(counts[way]);
        for (int slice = 0; slice < counts[way]; ++slice) ways[way][slice].push_back(slices.profiles[slice].at(kind));
      }
    }
    if (is_first) costs.slice_lengths.push_back(pipeline.slice_lengths);
  }
}

}  // namespace

CostModel measure_costs(const Config& config, const MeasureOptions& options) {
  const ModelSpec model = build_model(config, {.of = config.pipeline.experts});
  const DataSplit data = open_data(config.data, config.model.input(), config.train.seed);
  return measure_costs(config, model, *data.train, options);
}

CostModel measure_costs(const Config& config, const ModelSpec& spec, const Dataset& data,
                        const MeasureOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(config.pipeline.threads);
  const Device device = Device::open(config.pipeline.device, options.device);
  device.prepare_libraries();
  std::vector<ModelSpec> models = {spec};
  models.front().bf16_stash = config.pipeline.stash == "bf16";
  std::vector<ModelSpec> sliced = models;
  for (const std::string& mode : options.recompute) {
    if (mode == "none") continue;
    TWOBP_CHECK(config.pipeline.recompute.empty(), "recomputation '", mode,
                "' cannot be measured: the configured layers already recompute, and would do so twice. "
                "Give --set 'pipeline.recompute=[]' together with --recompute");
    models.push_back(recomputing(models.front(), mode));
    if (mode == "activations") sliced.push_back(models.back());
  }
  const std::vector<int> slices = slices_of(options, config);
  for (const int count : slices) check_slices(config, count);

  CostModel model;
  model.micro_batch_sizes = sizes_of(options, config, data.size());
  model.sample_costs = relative_costs(data);
  model.first_trainable = models.front().first_trainable;
  for (const LayerSpec& layer : spec.layers) model.layers.push_back({layer.name, layer.kind});
  const std::string last = last_matrix(spec);
  const std::map<std::string, int> uses = uses_of_weights(spec);
  for (const ModelSpec& one : models) {
    for (const LayerSpec& layer : one.layers) {
      if (!model.kinds.contains(layer.kind))
        model.kinds[layer.kind] = measure_update(layer, config.optimizer, last, uses, device);
    }
  }
  for (const int size : model.micro_batch_sizes) {
    const ProfiledBatch batch = profiled_batch(data, size);
    for (const int count : slices) equal_cuts(sequence_length(batch.fields), count);  // before minutes are spent
    std::set<std::string> measured;  // measure kinds that recomputation does not change only once
    for (const ModelSpec& one : models) {
      for (const auto& [kind, cost] : measure_profile(one, batch, options.seconds, device)) {
        if (measured.insert(kind).second) model.kinds.at(kind).at_size.push_back(cost);
      }
    }
    add_slices(sliced, batch, config, slices, options.seconds, device, model);
  }
  const auto ends = make_in_process_transports(2, RankThreads::spin_seconds(2, config.pipeline.threads));
  const LinkSpeed link = measure_link(*ends[0], *ends[1]);
  model.link_latency = link.latency;
  model.link_bytes_per_second = link.bytes_per_second;
  const std::string facts =
      device.asynchronous() ? device_support(device.where().type()).facts(device.where()).model : "";
  model.made_on = concat(options.machine, options.machine.empty() ? "" : ", ", facts, facts.empty() ? "" : ", ",
                         config.pipeline.threads, " threads on each rank, links within the process");
  check_cost_model(model);
  return model;
}

}  // namespace twobp
