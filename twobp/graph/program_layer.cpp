#include "twobp/graph/program_layer.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/random.h"

namespace twobp::graph {

// Runs one unit of backward-p2, of the plan for the micro-batch at hand.
class ProgramLayer::Unit : public Layer {
 public:
  Unit(ProgramLayer& owner, size_t index, std::vector<int> parameters)
      : owner_(owner), index_(index), of_(std::move(parameters)) {}

  Values forward(Values, Context&, Saved&) override { fail("a unit of backward-p2 has no forward"); }
  Values backward_p1(Values, Context&, Saved&) override { fail("a unit of backward-p2 has no backward-p1"); }
  // One micro-batch after the other, also if they could be concatenated.
  void backward_p2(std::span<Saved* const> saved) override;
  // Those that the unit adds to, so that traces can name it.
  void collect_parameters(std::vector<Parameter*>& parameters) override {
    for (const int one : of_) parameters.push_back(owner_.trained_or_not_[static_cast<size_t>(one)]);
  }
  bool p2_reads_other_weights() const override { return reads_others_; }
  // Takes note of what the unit reads in some plan. Views of parameters are made again from them.
  void note(const std::vector<Input>& inputs) {
    for (const Input& one : inputs) {
      if (one.from != Input::From::kParameter || std::ranges::find(of_, one.index) != of_.end()) continue;
      reads_others_ |= owner_.trained_or_not_[static_cast<size_t>(one.index)]->trainable();
    }
  }

 private:
  ProgramLayer& owner_;
  size_t index_;
  std::vector<int> of_;
  bool reads_others_ = false;
};

constexpr size_t kMostShapesOfALayer = 128;  // at more, all are forgotten, and found again when they are used

struct ProgramLayer::ForShape {
  std::shared_ptr<const Shape> shape;
  const Plan* plan = nullptr;
  std::vector<at::Tensor> constants;  // on the layer's device
};

void ProgramLayer::Unit::backward_p2(std::span<Saved* const> saved) {
  for (Saved* one : saved) {
    const ForShape& shape = owner_.shape_of(one->context());
    const Plan::Unit& unit = shape.plan->units[index_];
    Frame frame(shape.plan->program->slots);
    size_t next = 0;
    for (const int slot : unit.from_forward) frame.put(slot, one->p2(next++));
    for (const int slot : unit.from_p1) frame.put(slot, one->p2(next++));
    one->release_p2();  // the frame holds the tensors, and frees each after its last use
    Values none;
    for (const Input& input : unit.pass.inputs) frame.put(input.slot, owner_.input(input, shape, none, {}));
    run(unit.pass.code, frame, owner_.call_context(one->context(), 0, *shape.plan, *one));
  }
}

ProgramLayer::ProgramLayer(std::shared_ptr<const Graph> graph, int layer) : graph_(std::move(graph)), layer_(layer) {
  const GraphDescription& of = graph_->description();
  const GraphLayer& names = of.layers[static_cast<size_t>(layer)];
  for (const LayerParameter& one : names.parameters) {
    std::vector<ParameterPart> parts;
    for (const std::string& name : one.names) {
      const std::vector<int64_t>& sizes = of.parameters.at(name).type.sizes;
      parts.push_back({name, sizes.empty() ? 1 : sizes[0], of.parameters.at(name).projections});
    }
    const TensorType& type = one.type.type;
    parameters_.push_back(std::make_unique<Parameter>(std::move(parts), type.sizes, type.dtype, /*std=*/0));
    if (one.type.frozen) parameters_.back()->freeze();
    if (one.rounded) parameters_.back()->keep_master();
    parameters_.back()->used_as(one.type.factor, one.type.table);
    trained_or_not_.push_back(parameters_.back().get());
  }
  for (const std::string& name : names.buffers) {
    const TensorType& type = of.buffers.at(name);
    buffers_.push_back(std::make_unique<Parameter>(Parameter::buffer(name, type.sizes, type.dtype, 0)));
  }
}

ProgramLayer::~ProgramLayer() = default;

at::Device ProgramLayer::device() const {
  for (const auto* list : {&parameters_, &buffers_}) {
    for (const auto& one : *list) {
      if (one->value.defined()) return one->value.device();
    }
  }
  return device_of_values_;
}

void ProgramLayer::find_device(const Values& x) {
  if (x.empty() || !x[0].defined() || x[0].device() == device_of_values_) return;
  device_of_values_ = x[0].device();
  shapes_.clear();  // whose constants are elsewhere
}

const Plan& ProgramLayer::plan_of(const Shape& shape) const {
  std::vector<bool> trained;
  for (const auto& parameter : parameters_) trained.push_back(parameter->trainable());
  return graph_->plan(shape, layer_, trained);
}

const ProgramLayer::ForShape& ProgramLayer::shape_of(const Context& context) {
  TWOBP_CHECK(context.fields != nullptr, "the batch has no fields, but a captured model reads them");
  const auto shape = graph_->shape_of(context.sliced() ? *context.slice.sequences : *context.fields);
  TWOBP_CHECK(!context.sliced() || shape->positions > 0, "this captured model takes no slices of sequences",
              shape->no_slices.empty() ? "" : ": ", shape->no_slices);
  if (const uint64_t dropped = graph_->dropped(); dropped != dropped_) {
    dropped_ = dropped;
    shapes_.clear();
  }
  if (const auto known = shapes_.find(shape.get()); known != shapes_.end()) return *known->second;
  if (shapes_.size() >= kMostShapesOfALayer) shapes_.clear();
  auto made = std::make_unique<ForShape>();
  made->shape = shape;
  made->plan = &plan_of(*shape);
  for (const at::Tensor& constant : graph_->constants(*shape, layer_))
    made->constants.push_back(on_device(constant, device()));
  return *(shapes_[shape.get()] = std::move(made));
}

// Equal for the same micro-batch of the same step, whatever the schedule and the cuts, and whenever forward runs.
uint64_t ProgramLayer::random_of(const Context& context) const {
  uint64_t random = mix_bits(context.seed, static_cast<uint64_t>(context.step));
  random = mix_bits(random, static_cast<uint64_t>(context.micro_batch));
  return mix_bits(random, static_cast<uint64_t>(layer_));
}

CallContext ProgramLayer::call_context(const Context& context, uint64_t random, const Plan& plan, Saved& saved) const {
  CallContext result{trained_or_not_, random, device()};
  if (!context.sliced()) return result;
  result.slice = {context.past, context.slice.length, context.slice.positions, context.keeps(), &saved};
  result.attentions = plan.units.size();
  return result;
}

at::Tensor ProgramLayer::scalar(const LossFactor& factor) const {
  return factor.scalar(graph_->description().dtype == at::kDouble ? at::kDouble : at::kFloat, device());
}

at::Tensor ProgramLayer::input(const Input& input, const ForShape& shape, Values& x, const Context& context) const {
  const auto index = static_cast<size_t>(input.index);
  switch (input.from) {
    case Input::From::kValue:
      TWOBP_CHECK(index < x.size(), "the layer reads output ", index,
                  " of the previous layer (counted from 0), which has ", x.size(), " outputs");
      // Before the first layer with parameters, values may be on the host.
      return on_device(x[index], device());
    case Input::From::kField:
      if (input.whole && context.sliced()) return on_device(context.slice.sequences->at(input.field), device());
      return on_device(context.field(input.field), device());
    case Input::From::kParameter:
      return parameters_[index]->value;
    case Input::From::kBuffer:
      // Training changes the buffer, but not what this micro-batch has read of it.
      return context.training ? buffers_[index]->value.clone() : buffers_[index]->value;
    case Input::From::kConstant:
      return shape.constants[index];
    case Input::From::kLossWeight:
      return scalar(context.loss_weight);
  }
  fail("unknown input");
}

Values ProgramLayer::forward(Values x, Context& context, Saved& saved) {
  find_device(x);
  const ForShape& shape = shape_of(context);
  const Plan& plan = *shape.plan;
  const Pass& pass = !context.training ? plan.evaluate : context.keeps() ? plan.forward : plan.forward_alone;
  Frame frame(plan.program->slots);
  for (const Input& one : pass.inputs) frame.put(one.slot, input(one, shape, x, context));
  x.clear();
  run(pass.code, frame, call_context(context, random_of(context), plan, saved));
  if (context.training) {
    for (const Program::At& buffer : plan.program->new_buffers) {
      const at::Tensor& changed = frame.tensor(buffer.slot);
      at::Tensor& value = buffers_[static_cast<size_t>(buffer.index)]->value;
      TWOBP_CHECK(changed.sizes() == value.sizes() && changed.scalar_type() == value.scalar_type(),
                  "the new value of buffer ", buffers_[static_cast<size_t>(buffer.index)]->name(), " is ",
                  changed.sizes(), " ", changed.scalar_type(), " instead of ", value.sizes(), " ", value.scalar_type());
      value.copy_(changed);
    }
  }
  if (context.keeps()) {
    saved.keep_context(context);
    for (const int slot : plan.until_p1) saved.keep_until_p1(frame.tensor(slot));
    for (size_t i = 0; i < plan.units.size(); ++i) {
      saved.child(i).keep_context(saved);
      for (const int slot : plan.units[i].from_forward) saved.child(i).keep_until_p2(frame.tensor(slot));
    }
  }
  Values y;
  for (const Program::Output& output : plan.program->outputs) y.push_back(frame.tensor(output.slot));
  return y;
}

Values ProgramLayer::backward_p1(Values dy, Context& context, Saved& saved) {
  const ForShape& shape = shape_of(context);
  const Plan& plan = *shape.plan;
  const bool loss = layer_ + 1 == static_cast<int>(graph_->layers().size());
  if (loss && dy.empty()) dy.push_back(scalar(context.loss_scale));
  TWOBP_CHECK(dy.size() == plan.gradients.size(), "backward-p1 of a captured layer got ", dy.size(), " gradients for ",
              plan.gradients.size(), " outputs");
  Frame frame(plan.program->slots);
  size_t next = 0;
  for (const Program::Output& output : plan.program->outputs) {
    if (output.gradient < 0) continue;
    at::Tensor& gradient = dy[next];
    if (plan.gradients[next++]) frame.put(output.gradient, std::move(gradient));
  }
  dy.clear();
  Values none;
  for (const Input& one : plan.backward_p1.inputs) frame.put(one.slot, input(one, shape, none, context));
  for (size_t i = 0; i < plan.until_p1.size(); ++i) frame.put(plan.until_p1[i], saved.take_p1(i));
  run(plan.backward_p1.code, frame, call_context(context, 0, plan, saved));
  if (context.sliced()) {  // the derivative of attention has done so, if it was needed
    for (int i = 0; i < plan.program->attentions; ++i)
      saved.child(plan.units.size() + static_cast<size_t>(i)).forget_slice();
  }
  for (size_t i = 0; i < plan.units.size(); ++i) {
    for (const int slot : plan.units[i].from_p1) saved.child(i).keep_until_p2(frame.tensor(slot));
  }
  Values dx;
  for (const Program::At& gradient : plan.program->input_gradients) dx.push_back(frame.tensor(gradient.slot));
  return dx;
}

void ProgramLayer::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  // Without a context, before any micro-batch, the question is only whether there are units.
  const Fields* fields = saved.has_context() ? saved.context().fields : nullptr;
  if (fields == nullptr) {
    for (size_t i = 0; i < plan_of(graph_->shape()).units.size(); ++i) units.push_back({this, &saved});
    return;
  }
  const std::vector<Plan::Unit>& planned = shape_of(saved.context()).plan->units;
  for (size_t i = 0; i < planned.size(); ++i) {
    std::vector<int> parameters;
    for (const Instruction& one : planned[i].pass.code) {
      if (one.parameter >= 0) parameters.push_back(one.parameter);
    }
    std::unique_ptr<Unit>& unit = units_[{i, parameters}];
    if (!unit) unit = std::make_unique<Unit>(*this, i, std::move(parameters));
    unit->note(planned[i].pass.inputs);
    units.push_back({unit.get(), &saved.child(i)});
  }
}

void ProgramLayer::collect_parameters(std::vector<Parameter*>& parameters) {
  for (const auto& parameter : parameters_) parameters.push_back(parameter.get());
  for (const auto& buffer : buffers_) parameters.push_back(buffer.get());
}

}  // namespace twobp::graph
