#include "twobp/pipeline/profile/profile.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/core/median.h"
#include "twobp/pipeline/layer_error.h"
#include "twobp/pipeline/memory/block_cache.h"
#include "twobp/pipeline/memory/memory_meter.h"

namespace twobp {
namespace {

int64_t bytes_of(const Values& values) {
  int64_t bytes = 0;
  for (const auto& value : values) bytes += static_cast<int64_t>(value.nbytes());
  return bytes;
}

// One layer of a kind, with its measurements.
struct Specimen {
  std::string kind;
  std::string name;
  std::unique_ptr<Layer> layer;
  bool backward = true;  // whether some layer of the kind has a backward pass
  std::vector<Parameter*> parameters;
  Saved saved;
  LayerProfile cost;
  std::vector<double> forward, backward_p1, backward_p2;
};

class Measurement {
 public:
  Measurement(MemoryMeter& meter, const Device& device)
      : meter_(meter), device_(device), begin_held_(meter.held(0)), begin_total_(meter.rank_use(0).total()) {
    meter_.take_high_water(0);
    begin_ = now_seconds();
  }
  double seconds() const {
    device_.compute().wait_on_host();
    return now_seconds() - begin_;
  }
  int64_t peak() { return meter_.take_high_water(0) - begin_total_; }
  int64_t held() const { return meter_.held(0) - begin_held_; }

 private:
  MemoryMeter& meter_;
  const Device& device_;
  int64_t begin_held_;
  int64_t begin_total_;  // the high water includes parameters and gradients
  double begin_ = 0;
};

std::string measured(const Specimen& specimen, const char* op) {
  return concat("layer ", specimen.name, ", ", op, " of the measurement before the first step");
}

void run_once(std::vector<Specimen>& specimens, const std::string& input_field, const Fields& fields,
              MemoryMeter& meter, const Device& device, bool count) {
  Context context;
  context.fields = &fields;
  Values x;
  // A copy, so that it is held and released like the output of a previous layer.
  if (!input_field.empty())
    x.push_back(context.field(input_field).to(device.where(), /*non_blocking=*/false, /*copy=*/true));
  for (auto& s : specimens) {
    Measurement measurement(meter, device);
    context.backward = s.backward;
    x = naming_layer([&] { return measured(s, "F"); },
                     [&] { return s.layer->forward(std::move(x), context, s.saved); });
    const double seconds = measurement.seconds();
    if (!count) continue;
    s.forward.push_back(seconds);
    s.cost.forward_peak = measurement.peak();
    s.cost.forward_held = measurement.held();
    s.cost.output = bytes_of(x);
  }
  x.clear();
  Values dy;
  for (auto s = specimens.rbegin(); s != specimens.rend(); ++s) {
    if (!s->backward) continue;
    Measurement p1(meter, device);
    dy = naming_layer([&] { return measured(*s, "I"); },
                      [&] { return s->layer->backward_p1(std::move(dy), context, s->saved); });
    s->saved.release_p1();
    const double p1_seconds = p1.seconds();
    if (count) {
      s->backward_p1.push_back(p1_seconds);
      s->cost.p1_peak = p1.peak();
      s->cost.p1_held = p1.held();
      s->cost.input_gradient = bytes_of(dy);
    }
    std::vector<P2Unit> units;
    s->layer->collect_p2(s->saved, units);
    Measurement p2(meter, device);
    for (auto& unit : units) {
      naming_layer([&] { return measured(*s, "W"); }, [&] { unit.layer->backward_p2({&unit.saved, 1}); });
      unit.saved->release_p2();
    }
    if (count) {
      s->backward_p2.push_back(p2.seconds());
      s->cost.stash = -p2.held();
      s->cost.p2_peak = p2.peak();
      s->cost.p2_units = static_cast<int>(units.size());
    }
    for (Parameter* parameter : s->parameters) parameter->forget_grad();
  }
}

}  // namespace

Profile measure_profile(const ModelSpec& model, const Fields& fields, double seconds, const Device& device) {
  TWOBP_CHECK(!model.layers.empty(), "a model needs layers");
  const OnStream here(device.compute());
  BlockCache::install();
  const BlockCache::Use blocks;  // as on the ranks
  MemoryMeter meter({0});
  const MemoryMeter::Watch watch(meter);
  std::vector<Specimen> specimens;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerSpec& spec = model.layers[i];
    const bool backward = static_cast<int>(i) >= model.first_trainable;
    const auto known =
        std::find_if(specimens.begin(), specimens.end(), [&](const auto& s) { return s.kind == spec.kind; });
    if (known != specimens.end()) {
      known->backward |= backward;
      continue;
    }
    const MemoryMeter::Scope scope(0, MemoryCategory::kParameters);
    Specimen s;
    s.kind = spec.kind;
    s.name = spec.name;
    s.backward = backward;
    s.layer = spec.make();
    s.layer->collect_parameters(s.parameters);
    for (Parameter* parameter : s.parameters) {
      parameter->allocate_value(0);
      parameter->move_to(device.where());
      parameter->allocate_grad();
    }
    specimens.push_back(std::move(s));
  }
  const MemoryMeter::Scope scope(0, MemoryCategory::kActivations);
  run_once(specimens, model.input_field, fields, meter, device, /*count=*/false);
  const double end = now_seconds() + seconds;
  for (int i = 0; i < 3 || (i < 25 && now_seconds() < end); ++i) {
    run_once(specimens, model.input_field, fields, meter, device, /*count=*/true);
  }
  Profile profile;
  for (auto& s : specimens) {
    s.cost.forward = median(s.forward);
    if (s.backward) s.cost.backward_p1 = median(s.backward_p1);
    if (s.backward) s.cost.backward_p2 = median(s.backward_p2);
    profile[s.kind] = s.cost;
  }
  return profile;
}

std::vector<LayerProfile> layer_profiles(const ModelSpec& model, const Profile& profile) {
  std::vector<LayerProfile> costs;
  for (const auto& spec : model.layers) {
    const auto found = profile.find(spec.kind);
    TWOBP_CHECK(found != profile.end(), "the profile has no layer of kind '", spec.kind, "'");
    costs.push_back(found->second);
    if (static_cast<int>(costs.size()) > model.first_trainable) continue;
    // Without a backward pass nothing is saved, and the output replaces the input.
    LayerProfile& cost = costs.back();
    cost.backward_p1 = cost.backward_p2 = 0;
    cost.p2_units = 0;
    cost.forward_held = cost.output - (costs.size() > 1 ? costs[costs.size() - 2].output : 0);
    cost.p1_peak = cost.p1_held = cost.stash = cost.p2_peak = cost.input_gradient = 0;
  }
  return costs;
}

}  // namespace twobp
