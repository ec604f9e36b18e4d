#include "twobp/graph/graph.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/graph/interpreter.h"

namespace twobp::graph {
namespace {

bool fit(const FieldTypes& types, const Fields& fields) {
  return std::all_of(types.begin(), types.end(), [&](const auto& type) {
    const auto field = fields.find(type.first);
    return field != fields.end() && type.second.fits(field->second);
  });
}

std::string text_of(const FieldTypes& types) {
  std::vector<std::string> parts;
  for (const auto& [name, type] : types)
    parts.push_back(concat(name, " ", type.dtype, " ", at::IntArrayRef(type.sizes)));
  return join(parts);
}

std::string text_of(const Fields& fields) {
  FieldTypes types;
  for (const auto& [name, tensor] : fields) types[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  return types.empty() ? "no fields" : text_of(types);
}

}  // namespace

void Graph::add(Shape shape, Tensors constants) {
  const std::lock_guard lock(mutex_);
  constants_.merge(constants);
  shapes_.push_back(std::move(shape));
}

void Graph::use(int variant) {
  const std::lock_guard lock(mutex_);
  variant_ = variant;
}

void Graph::drop(int variant) {
  const std::lock_guard lock(mutex_);
  TWOBP_CHECK(variant != variant_, "variant ", variant, " of the captured module is in use");
  ++dropped_;
  for (auto shape = std::next(shapes_.begin()); shape != shapes_.end();) {
    if (shape->variant != variant) {
      ++shape;
      continue;
    }
    for (const Program& program : shape->programs)
      std::erase_if(plans_, [&](const auto& plan) { return plan.first.first == &program; });
    shape = shapes_.erase(shape);
  }
  std::set<std::string> read;
  const auto add = [&](const std::vector<std::string>& names) { read.insert(names.begin(), names.end()); };
  for (const GraphLayer& layer : layers()) add(layer.constants);
  for (const Shape& shape : shapes_) std::for_each(shape.constants.begin(), shape.constants.end(), add);
  std::erase_if(constants_, [&](const auto& constant) { return !read.contains(constant.first); });
}

uint64_t Graph::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

const Shape& Graph::shape() const {
  const std::lock_guard lock(mutex_);
  return shapes_.front();
}

const Shape& Graph::shape_of(const Fields& fields) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(shapes_.begin(), shapes_.end(), [&](const Shape& shape) {
    return shape.variant == variant_ && fit(shape.fields, fields);
  });
  if (found != shapes_.end()) return *found;
  std::vector<std::string> known;
  for (const Shape& shape : shapes_) {
    if (shape.variant == variant_) known.push_back(text_of(shape.fields));
  }
  fail("the captured model has no program for a micro-batch of ", text_of(fields),
       ". It has programs for: ", join(known, "; or "),
       ". Give such micro-batches (pipeline.micro_batch_size, data.sequence), or capture ",
       "the model for this one too.");
}

bool Graph::knows(const FieldTypes& fields, int variant) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(shapes_.begin(), shapes_.end(),
                     [&](const Shape& shape) { return shape.variant == variant && shape.fields == fields; });
}

const Program& Graph::program(const Shape& shape, int layer) const {
  const auto index = static_cast<size_t>(layer);
  return shape.programs[static_cast<size_t>(shape.kinds.empty() ? layers()[index].kind : shape.kinds[index])];
}

const Plan& Graph::plan(const Shape& shape, int layer, const std::vector<bool>& trained) const {
  const Program* program = &this->program(shape, layer);
  const std::lock_guard lock(mutex_);
  const auto found = plans_.find({program, trained});
  if (found != plans_.end()) return found->second;
  return plans_.emplace(std::pair(program, trained), make_plan(*program, trained)).first->second;
}

std::vector<at::Tensor> Graph::constants(const Shape& shape, int layer) const {
  const auto index = static_cast<size_t>(layer);
  const auto& names = shape.constants.empty() ? layers()[index].constants : shape.constants[index];
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> tensors;
  for (const std::string& name : names) tensors.push_back(constants_.at(name));
  return tensors;
}

bool Graph::has_constant(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return constants_.contains(name);
}

int64_t Graph::count_targets(const Fields& fields) const {
  const Targets& targets = shape_of(fields).targets;
  if (targets.count >= 0 && targets.checks.empty()) return targets.count;
  Frame frame(targets.slots);
  std::vector<int> results;
  if (targets.count < 0) results.push_back(targets.slot);
  for (const Targets::Check& check : targets.checks) results.push_back(check.slot);
  const Pass pass = make_pass(targets.inputs, targets.code, results);
  for (const Input& input : pass.inputs) frame.put(input.slot, fields.at(input.field));
  run(pass.code, frame, {});
  for (const Targets::Check& check : targets.checks) {
    const at::Tensor& holds = frame.tensor(check.slot);
    TWOBP_CHECK(holds.numel() == 1 && holds.scalar_type() == at::kBool, description_.origin,
                ": a check of the targets is a tensor ", holds.sizes(), " of ", holds.scalar_type(), ", not one bool");
    TWOBP_CHECK(holds.item<bool>(), "a micro-batch does not have what capture took from its example: ", check.says);
  }
  if (targets.count >= 0) return targets.count;
  const at::Tensor& count = frame.tensor(targets.slot);
  TWOBP_CHECK(count.numel() == 1 && at::isIntegralType(count.scalar_type(), /*includeBool=*/false), description_.origin,
              ": the number of targets is a tensor ", count.sizes(), " of ", count.scalar_type(),
              ", not one whole number");
  const auto number = count.item<int64_t>();
  TWOBP_CHECK(number >= 0, description_.origin, ": the number of targets is ", number);
  return number;
}

}  // namespace twobp::graph
