#include "twobp/pipeline/profile/profile.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/data/balance.h"
#include "twobp/nn/expert_group.h"
#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/pipeline/memory/block_cache.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/profile/slices.h"
#include "twobp/pipeline/stage.h"

namespace twobp {
namespace {

double bytes_of(const Values& values) {
  double bytes = 0;
  for (const auto& value : values) bytes += static_cast<double>(value.nbytes());
  return bytes;
}

// The measurements of a layer for one slice, or for the whole sequence.
struct OfSlice {
  Saved saved;
  LayerCost cost;
  std::optional<std::vector<int64_t>> output;  // sizes of F's output, if it is one tensor of numbers
  std::vector<double> forward, backward_p1, backward_p2;

  void take_medians(bool backward) {
    cost.forward = median(forward);
    if (backward) cost.backward_p1 = median(backward_p1);
    if (cost.p2_units > 0) cost.backward_p2 = median(backward_p2);
  }
};

// A layer that is measured.
struct Specimen {
  std::string kind;
  std::string name;
  std::unique_ptr<Layer> layer;
  bool backward = true;  // whether some layer of the kind has a backward pass
  std::vector<Parameter*> parameters;
  std::optional<double> p1_gradient;  // see LayerCost
  std::vector<std::unique_ptr<OfSlice>> slices;
};

// A chain of layers with at least one of each kind, as short as is easy to find. Each takes the output of the one
// before it, so the kinds of two neighbours are neighbours in the model, too: a captured model may have the kinds A B C
// B C B D, where C cannot precede D.
std::vector<size_t> layers_to_measure(const ModelSpec& model) {
  std::vector<size_t> chain(model.layers.size());
  std::iota(chain.begin(), chain.end(), size_t{0});
  std::map<std::string, size_t> left;
  for (const auto& spec : model.layers) ++left[spec.kind];
  const auto kind = [&](size_t i) -> const std::string& { return model.layers[chain[i]].kind; };
  for (size_t i = 0; i < chain.size(); ++i) {
    for (size_t j = chain.size() - 1; j > i; --j) {
      if (kind(i) != kind(j)) continue;  // if they are equal, what follows j may follow i
      std::map<std::string, size_t> between;
      for (size_t k = i + 1; k <= j; ++k) ++between[kind(k)];
      if (!std::all_of(between.begin(), between.end(), [&](const auto& one) { return one.second < left[one.first]; }))
        continue;
      for (const auto& [name, count] : between) left[name] -= count;
      chain.erase(chain.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                  chain.begin() + static_cast<std::ptrdiff_t>(j) + 1);
      break;
    }
  }
  return chain;
}

// What is measured as cost.
enum class Unit : uint8_t { kSeconds, kOperations };

double now_in(Unit unit) {
  return unit == Unit::kSeconds ? now_seconds() : product_time().operations;
}

class Measurement {
 public:
  Measurement(MemoryMeter& meter, const Device& device, Unit unit)
      : meter_(meter),
        device_(device),
        unit_(unit),
        begin_held_(meter.held(0)),
        begin_total_(meter.rank_use(0).total()) {
    meter_.take_high_water(0);
    begin_ = now_in(unit_);
  }
  double cost() const {
    if (unit_ == Unit::kSeconds) device_.compute().wait_on_host();
    return now_in(unit_) - begin_;
  }
  // Bytes. Below 0 only if other work disturbed the measurement.
  double peak() { return static_cast<double>(std::max<int64_t>(0, meter_.take_high_water(0) - begin_total_)); }
  double held() const { return static_cast<double>(meter_.held(0) - begin_held_); }

 private:
  MemoryMeter& meter_;
  const Device& device_;
  Unit unit_;
  int64_t begin_held_;
  int64_t begin_total_;  // the high water includes parameters and gradients
  double begin_ = 0;
};

std::string measured(const Specimen& specimen, const char* op) {
  return concat("layer ", specimen.name, ", ", op, " of the measurement before the first step");
}

// A group of experts whose other members send what this one sends to them: as much comes as goes.
class Echo : public ExpertGroup {
 public:
  void send(std::vector<Values> messages) override {
    double bytes = 0;
    for (const Values& message : messages) bytes += bytes_of(message);
    sent_.push_back(bytes);
    since_ = now_seconds();
    messages_ = std::move(messages);
  }
  std::vector<Values> receive() override {
    beside_ += now_seconds() - since_;
    return std::exchange(messages_, {});
  }

  // What a layer has exchanged: the last of its messages return from experts.
  struct Exchanged {
    double to = 0;
    double from = 0;
    double beside = 0;  // seconds between sending and waiting
  };
  Exchanged take() {
    Exchanged all{0, 0, std::exchange(beside_, 0)};
    for (const double bytes : std::exchange(sent_, {})) all.to += std::exchange(all.from, bytes);
    return all;
  }

 private:
  std::vector<Values> messages_;
  std::vector<double> sent_;  // bytes
  double since_ = 0;
  double beside_ = 0;
};

// Every Context of a measurement has one.
Echo::Exchanged take_exchanged(const Context& context) {
  return static_cast<Echo&>(*context.experts).take();
}

// F of one slice through all specimens. Nothing is recorded without a unit.
void run_forward(std::vector<Specimen>& specimens, size_t slice, Context context, const std::string& input_field,
                 MemoryMeter& meter, const Device& device, std::optional<Unit> unit) {
  Values x;
  // A copy, so that it is held and released like the output of a previous layer.
  if (!input_field.empty())
    x.push_back(context.field(input_field).to(device.where(), /*non_blocking=*/false, /*copy=*/true));
  for (auto& s : specimens) {
    OfSlice& of = *s.slices[slice];
    Measurement measurement(meter, device, unit.value_or(Unit::kSeconds));
    context.backward = s.backward;
    x = naming_layer([&] { return measured(s, "F"); },
                     [&] { return s.layer->forward(std::move(x), context, of.saved); });
    const double cost = measurement.cost();
    if (x.size() == 1 && x[0].is_floating_point()) of.output = x[0].sizes().vec();
    const Echo::Exchanged exchanged = take_exchanged(context);
    if (!unit) continue;
    of.cost.forward_to_experts = exchanged.to;
    of.cost.forward_from_experts = exchanged.from;
    of.cost.beside_experts = exchanged.beside;
    of.forward.push_back(cost);
    of.cost.forward_peak = measurement.peak();
    of.cost.forward_held = measurement.held();
    of.cost.output = bytes_of(x);
  }
}

// Throws Error unless `dy` fits the output of the layer before, which reads it.
void check_gradient(const Values& dy, const OfSlice& before) {
  if (!before.output) return;
  TWOBP_CHECK(dy.size() == 1 && dy[0].defined(), "backward_p1 returns no gradient of its input");
  TWOBP_CHECK(dy[0].sizes() == *before.output, "backward_p1 returns a gradient of the sizes ", dy[0].sizes(),
              ", but its input has ", at::IntArrayRef(*before.output));
}

// Of the gradients that have been written, apart from those of tied weights.
double written_bytes(const std::vector<Parameter*>& parameters, const std::set<std::string>& tied) {
  double bytes = 0;
  for (const Parameter* one : parameters) {
    if (one->trainable() && one->has_grad() && !tied.contains(one->name()))
      bytes += static_cast<double>(one->grad_bytes());
  }
  return bytes;
}

// I of one slice, then W: what a layer's W still reads, I of the layers before must not count as freed.
void run_backward(std::vector<Specimen>& specimens, size_t slice, Context context, MemoryMeter& meter,
                  const Device& device, const std::set<std::string>& tied, bool bf16_stash, std::optional<Unit> unit) {
  Values dy;
  for (auto s = specimens.rbegin(); s != specimens.rend(); ++s) {
    if (!s->backward) continue;
    OfSlice& of = *s->slices[slice];
    Measurement p1(meter, device, unit.value_or(Unit::kSeconds));
    dy = naming_layer([&] { return measured(*s, "I"); },
                      [&] { return s->layer->backward_p1(std::move(dy), context, of.saved); });
    const auto before = std::next(s);
    if (before != specimens.rend() && before->backward) {
      naming_layer([&] { return measured(*s, "I"); }, [&] { check_gradient(dy, *before->slices[slice]); });
    }
    of.saved.release_p1();
    if (bf16_stash) of.saved.round_p2();
    const double p1_cost = p1.cost();
    const Echo::Exchanged exchanged = take_exchanged(context);
    if (unit) {
      of.cost.p1_to_experts = exchanged.to;
      of.cost.p1_from_experts = exchanged.from;
      of.backward_p1.push_back(p1_cost);
      of.cost.p1_peak = p1.peak();
      of.cost.p1_held = p1.held();
      of.cost.input_gradient = bytes_of(dy);
    }
  }
  for (auto s = specimens.rbegin(); s != specimens.rend(); ++s) {
    if (!s->backward) continue;
    OfSlice& of = *s->slices[slice];
    std::vector<P2Unit> units;
    s->layer->collect_p2(of.saved, units);
    const GradientBytes gradients = gradient_bytes(s->parameters, units, tied);
    of.cost.gradient_bytes = gradients.all;
    of.cost.expert_gradient = gradients.experts;
    of.cost.tied_gradient = gradients.tied;
    of.cost.streamed_gradient = gradients.streamed;
    of.cost.streamed_unit = gradients.unit;
    if (!s->p1_gradient) s->p1_gradient = written_bytes(s->parameters, tied);  // no W has run yet
    of.cost.p1_gradient = *s->p1_gradient;
    Measurement p2(meter, device, unit.value_or(Unit::kSeconds));
    for (size_t i = 0; i < units.size(); ++i) {
      P2Unit& unit = units[i];
      const double before = p2.held();
      unit.saved->widen_p2();
      naming_layer([&] { return measured(*s, "W"); }, [&] { unit.layer->backward_p2({&unit.saved, 1}); });
      unit.saved->release_p2();
      if (i == static_cast<size_t>(gradients.unit)) of.cost.streamed_stash = std::max(0.0, before - p2.held());
    }
    // Without W there is nothing to free, and the time is only that of finding this out.
    if (unit && !units.empty()) {
      of.backward_p2.push_back(p2.cost());
      of.cost.stash = std::max(0.0, -p2.held());
      of.cost.p2_peak = p2.peak();
      of.cost.p2_units = static_cast<int>(units.size());
    }
  }
}

// The contexts of `parts`: the slices of each micro-batch, or whole ones.
std::vector<Context> contexts_of(const std::vector<const Fields*>& batches, const Cuts& cuts,
                                 const std::vector<Fields>& parts) {
  std::vector<Context> contexts;
  const size_t slices = parts.size() / batches.size();
  for (size_t i = 0; i < parts.size(); ++i) {
    Context& context = contexts.emplace_back();
    context.fields = &parts[i];
    if (cuts.empty()) continue;
    const size_t s = i % slices;
    context.slice = {batches[i / slices], cuts.back(), cuts[s + 1] - cuts[s]};
    context.past = cuts[s];
  }
  return contexts;
}

// The cost at the mean of all samples, and how it rises: the line through both measurements.
LayerCost at_mean(LayerCost cost, const LayerCost& costly, const ProfiledBatch& batch) {
  const auto line = [&](double LayerCost::*seconds, double LayerCost::*rise) {
    const double slope = (costly.*seconds - cost.*seconds) / (batch.costly_cost - batch.cost);
    const double mean = cost.*seconds + (1 - batch.cost) * slope;
    if (mean > 0) cost.*seconds = mean;
    // Noise makes no seconds negative, of the cheapest samples or of the costliest.
    cost.*rise = std::clamp(slope, -(cost.*seconds) / (batch.costly_cost - 1), cost.*seconds);
  };
  line(&LayerCost::forward, &LayerCost::forward_rise);
  line(&LayerCost::backward_p1, &LayerCost::backward_p1_rise);
  line(&LayerCost::backward_p2, &LayerCost::backward_p2_rise);
  return cost;
}

// The layers to measure, with the slices of a micro-batch of cheap samples, and of one of costly samples.
class Chain {
 public:
  Chain(const ModelSpec& model, const ProfiledBatch& batch, const Cuts& cuts, const Device& device)
      : model_(model), batch_(batch), cuts_(cuts), device_(device) {
    batches_ = {&batch.fields};
    if (!batch.costly.empty()) batches_.push_back(&batch.costly);
    for (const Fields* fields : batches_) {
      for (size_t s = 0; s + 1 < cuts.size(); ++s) {
        parts_.push_back(slice_of(*fields, cuts[s], cuts[s + 1] - cuts[s]));
      }
      if (cuts.empty()) parts_.push_back(*fields);
    }
    contexts_ = contexts_of(batches_, cuts, parts_);
    for (Context& context : contexts_) context.experts = &echo_;
    add_specimens();
  }

  // F, I and W of all slices. Without a unit, nothing is recorded.
  void run(std::optional<Unit> unit) {
    const MemoryMeter::Scope scope(0, MemoryCategory::kActivations);
    const size_t slices = this->slices();
    for (size_t first = 0; first < parts_.size(); first += slices) {
      for (size_t slice = first; slice < first + slices; ++slice) {
        run_forward(specimens_, slice, contexts_[slice], model_.input_field, meter_, device_, unit);
      }
      for (size_t slice = first + slices; slice-- > first;) {
        run_backward(specimens_, slice, contexts_[slice], meter_, device_, tied_, model_.bf16_stash, unit);
      }
      // Layers without a backward pass.
      for (Specimen& s : specimens_) {
        for (const auto& of : s.slices) of->saved.forget_slice();
      }
    }
  }

  // The medians of what was recorded.
  SliceProfiles profiles() {
    const size_t slices = this->slices();
    SliceProfiles result{cuts_, std::vector<Profile>(slices)};
    for (Specimen& s : specimens_) {
      for (const auto& of : s.slices) of->take_medians(s.backward);
      for (size_t slice = 0; slice < slices; ++slice) {
        LayerCost cost = s.slices[slice]->cost;
        if (batches_.size() > 1) cost = at_mean(cost, s.slices[slices + slice]->cost, batch_);
        result.profiles[slice].emplace(s.kind, cost);  // the first of its kind
      }
    }
    return result;
  }

 private:
  size_t slices() const { return parts_.size() / batches_.size(); }

  void add_specimens() {
    std::map<std::string, bool> backward;
    for (size_t i = 0; i < model_.layers.size(); ++i)
      backward[model_.layers[i].kind] |= static_cast<int>(i) >= model_.first_trainable;
    for (const size_t i : layers_to_measure(model_)) {
      const LayerSpec& spec = model_.layers[i];
      const MemoryMeter::Scope scope(0, MemoryCategory::kParameters);
      Specimen s;
      s.kind = spec.kind;
      s.name = spec.name;
      s.backward = backward[spec.kind];
      s.layer = spec.make();
      s.layer->collect_parameters(s.parameters);
      for (Parameter* parameter : s.parameters) {
        parameter->allocate_value(0);
        parameter->move_to(device_.where());
        parameter->allocate_grad();
      }
      for (size_t slice = 0; slice < parts_.size(); ++slice) {
        s.slices.push_back(std::make_unique<OfSlice>());
        if (slice % slices() > 0) s.slices[slice]->saved.follow(&s.slices[slice - 1]->saved);
      }
      specimens_.push_back(std::move(s));
    }
  }

  const ModelSpec& model_;
  const ProfiledBatch& batch_;
  const Cuts& cuts_;
  const Device& device_;
  Echo echo_;
  const std::set<std::string> tied_ = tied_weights(model_);
  BlockCache::Use blocks_;  // as on the ranks
  MemoryMeter meter_{{0}};
  MemoryMeter::Watch watch_{meter_};
  std::vector<const Fields*> batches_;
  std::vector<Fields> parts_;  // slices of each batch
  std::vector<Context> contexts_;
  std::vector<Specimen> specimens_;
};

// While this object lives, products run on the calling thread alone.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace

GradientBytes gradient_bytes(const std::vector<Parameter*>& parameters, const std::vector<P2Unit>& units,
                             const std::set<std::string>& tied) {
  const auto is_tied = [&](const Parameter& parameter) { return tied.contains(parameter.name()); };
  const auto bytes_of = [](const Parameter& parameter) {
    return parameter.trainable() ? static_cast<double>(parameter.grad_bytes()) : 0;
  };
  GradientBytes bytes;
  for (const Parameter* parameter : parameters) {
    bytes.all += bytes_of(*parameter);
    if (parameter->share().of > 1) bytes.experts += bytes_of(*parameter);
    if (is_tied(*parameter)) bytes.tied += bytes_of(*parameter);
  }
  bytes.streamed = bytes.all - bytes.tied;
  const bool whole =
      std::ranges::any_of(units, [](const P2Unit& unit) { return unit.layer->p2_reads_other_weights(); });
  if (whole) bytes.unit = static_cast<int>(units.size()) - 1;  // until then, none is applied
  if (units.empty() || whole) return bytes;
  double largest = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    double leaf = 0;
    for (const Parameter* parameter : parameters_of(*units[i].layer))
      leaf += is_tied(*parameter) ? 0 : bytes_of(*parameter);
    bytes.streamed -= leaf;
    if (leaf <= largest) continue;
    largest = leaf;
    bytes.unit = static_cast<int>(i);
  }
  bytes.streamed = std::max(0.0, bytes.streamed) + largest;
  return bytes;
}

Profile measure_profile(const ModelSpec& model, const ProfiledBatch& batch, double seconds, const Device& device) {
  return measure_slices(model, batch, {}, seconds, device).profiles.front();
}

Profile measure_bytes(const ModelSpec& model, const Fields& batch, const Device& device) {
  const OnStream here(device.compute());
  const ProfiledBatch measured(batch);
  const Cuts whole;
  Chain chain(model, measured, whole, device);
  chain.run(std::nullopt);
  chain.run(Unit::kSeconds);
  return chain.profiles().profiles.front();
}

SliceProfiles measure_slices(const ModelSpec& model, const ProfiledBatch& batch, const Cuts& cuts, double seconds,
                             const Device& device) {
  TWOBP_CHECK(!model.layers.empty(), "a model needs layers");
  const OnStream here(device.compute());
  BlockCache::install();
  Chain chain(model, batch, cuts, device);
  chain.run(std::nullopt);
  const double end = now_seconds() + seconds;
  for (int i = 0; i < 3 || (i < 25 && now_seconds() < end); ++i) chain.run(Unit::kSeconds);
  return chain.profiles();
}

SliceProfiles count_operations_of_slices(const ModelSpec& model, const ProfiledBatch& batch, const Cuts& cuts,
                                         const Device& device) {
  TWOBP_CHECK(!model.layers.empty(), "a model needs layers");
  const OnStream here(device.compute());
  const OneThread alone;  // whose count has all products
  BlockCache::install();
  Chain chain(model, batch, cuts, device);
  chain.run(Unit::kOperations);
  return chain.profiles();
}

std::vector<LayerCost> layer_costs(const ModelSpec& model, const Profile& profile) {
  std::vector<LayerCost> costs;
  for (const auto& spec : model.layers) {
    const auto found = profile.find(spec.kind);
    TWOBP_CHECK(found != profile.end(), "the profile has no layer of kind '", spec.kind, "'");
    costs.push_back(found->second);
  }
  leave_out_backward(costs, model.first_trainable);
  return costs;
}

namespace {

// The numbers of a measured cost, and p2_units. They travel as doubles.
constexpr int64_t kFields = kLayerNumbers.size() + 1;

}  // namespace

at::Tensor pack_profile(const Profile& profile) {
  at::Tensor packed = at::empty({static_cast<int64_t>(profile.size()), kFields}, at::kDouble);
  auto* to = packed.mutable_data_ptr<double>();
  for (const auto& [kind, measured] : profile) {
    for (const auto number : kLayerNumbers) *to++ = measured.*number;
    *to++ = measured.p2_units;
  }
  return packed;
}

void unpack_profile(const at::Tensor& packed, Profile& profile) {
  TWOBP_CHECK(packed.dim() == 2 && packed.size(0) == static_cast<int64_t>(profile.size()) &&
                  packed.size(1) == kFields && packed.scalar_type() == at::kDouble,
              "received a profile of sizes ", packed.sizes(), ", but expected ", profile.size(),
              " kinds of layers with ", kFields, " numbers each: the processes run different models or programs");
  const at::Tensor dense = packed.contiguous();
  const auto* from = dense.const_data_ptr<double>();
  for (auto& [kind, cost] : profile) {
    for (const auto number : kLayerNumbers) cost.*number = *from++;
    cost.p2_units = static_cast<int>(*from++);
  }
}

std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<double>& batch) {
  std::vector<StageCost> costs;
  for (const auto& layers : stages) costs.push_back(stage_of(layers));
  return costs_of_micro_batches(costs, batch);
}

std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report,
                                      const std::vector<double>& batch) {
  const std::vector<StageCost> profiled = profiled_costs(stages, batch);
  std::vector<StageCost> costs = profiled;
  std::vector<bool> counted(report.ranks.size(), false);
  const size_t stage_count = rank_of_stage.size();
  const double rows = static_cast<double>(costs.size() / stage_count);
  for (size_t s = 0; s < costs.size(); ++s) {
    const StageTimes& times = report.stages.at(s % stage_count);
    const double n = std::max(1, times.micro_batches);
    // A row's part of the time is that of the profile.
    const auto part = [&](double seconds, double StageCost::*of) {
      double all = 0;
      for (size_t i = s % stage_count; i < costs.size(); i += stage_count) all += profiled[i].*of;
      return all > 0 ? seconds / n * rows * profiled[s].*of / all : seconds / n;
    };
    costs[s].forward = part(times.forward, &StageCost::forward);
    costs[s].backward_p1 = part(times.backward_p1, &StageCost::backward_p1);
    const auto& layers = costs[s].layers;
    const bool has_p2 =
        std::any_of(layers.begin(), layers.end(), [](const LayerCost& layer) { return layer.p2_units > 0; });
    costs[s].backward_p2 = has_p2 ? part(times.backward_p2, &StageCost::backward_p2) : 0;
    // A rank's optimizer runs once for all its stages.
    const int rank = rank_of_stage[s % stage_count];
    if (!counted.at(rank)) costs[s].optimizer = report.ranks.at(rank).optimizer;
    counted[rank] = true;
  }
  return costs;
}

ProfiledBatch profiled_batch(const Dataset& data, int64_t size) {
  const std::vector<int64_t> typical = typical_samples(data, size);
  ProfiledBatch batch(data.read(typical, 0));
  const double mean = mean_cost(data);
  if (mean == 0) return batch;
  const auto count = static_cast<int64_t>(typical.size());
  const std::vector<int64_t> costliest(typical.size(), costliest_sample(data));
  batch.cost = batch_costs(data, typical, count, mean).front();
  batch.costly_cost = batch_costs(data, costliest, count, mean).front();
  if (batch.costly_cost > batch.cost) batch.costly = data.read(costliest, 0);
  return batch;
}

}  // namespace twobp
