#include "twobp/graph/graph.h"

#include <algorithm>
#include <set>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/graph/interpreter.h"

namespace twobp::graph {
namespace {

constexpr size_t kMostFound = 128;                       // shapes of recent micro-batches that are kept
constexpr int64_t kMostBytesFound = int64_t{256} << 20;  // of their tables

bool fit(const FieldTypes& types, const FieldTypes& batch) {
  return std::all_of(types.begin(), types.end(), [&](const auto& type) {
    const auto field = batch.find(type.first);
    return field != batch.end() && may_be(type.second, field->second);
  });
}

std::string text_of(const FieldTypes& types) {
  std::vector<std::string> parts;
  for (const auto& [name, type] : types) {
    std::vector<std::string> sizes;
    for (const int64_t size : type.sizes) sizes.push_back(size == kAnySize ? "any" : std::to_string(size));
    parts.push_back(concat(name, " ", type.dtype, " [", join(sizes), "]"));
  }
  return parts.empty() ? "no fields" : join(parts);
}

std::string text_of(const Shape& shape) {
  std::vector<std::string> guards;
  for (const Shape::Guard& guard : shape.guards) guards.push_back(guard.says);
  return concat(text_of(shape.fields), guards.empty() ? "" : ", if ", join(guards, " and "));
}

FieldTypes types_of(const Fields& fields) {
  FieldTypes types;
  for (const auto& [name, tensor] : fields) types[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  return types;
}

int64_t bytes_of_tables(const Shape& shape) {
  int64_t bytes = 0;
  for (const at::Tensor& table : shape.table_values) bytes += static_cast<int64_t>(table.nbytes());
  return bytes;
}

}  // namespace

void Graph::add(Shape shape, Tensors constants) {
  const std::lock_guard lock(mutex_);
  constants_.merge(constants);
  shapes_.push_back(std::make_shared<const Shape>(std::move(shape)));
}

void Graph::use(int variant) {
  const std::lock_guard lock(mutex_);
  variant_ = variant;
}

void Graph::drop(int variant) {
  const std::lock_guard lock(mutex_);
  TWOBP_CHECK(variant != variant_, "variant ", variant, " of the captured module is in use");
  ++dropped_;
  const auto first = shapes_.front();
  std::erase_if(shapes_, [&](const auto& shape) { return shape != first && shape->variant == variant; });
  std::erase_if(found_, [&](const auto& one) { return one.first.first == variant; });
  std::set<std::string> read;
  for (const GraphLayer& layer : layers()) read.insert(layer.constants.begin(), layer.constants.end());
  for (const auto& shape : shapes_) {
    for (const auto& of_layer : shape->constants) {
      for (const Shape::Constant& constant : of_layer) read.insert(constant.name);
    }
    for (const Table& table : shape->tables) {
      for (const Input& input : table.inputs) read.insert(input.field);
    }
  }
  std::erase_if(constants_, [&](const auto& constant) { return !read.contains(constant.first); });
}

uint64_t Graph::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

const Shape& Graph::shape() const {
  const std::lock_guard lock(mutex_);
  return *shapes_.front();
}

std::shared_ptr<const Shape> Graph::shape_of(const Fields& fields) const {
  FieldTypes batch = types_of(fields);
  const std::lock_guard lock(mutex_);
  const std::pair key(variant_, std::move(batch));
  const auto known = found_.find(key);
  if (known != found_.end()) {
    known->second.last_use = ++uses_;
    return known->second.shape;
  }
  std::shared_ptr<const Shape> shape = find(key.second);
  found_[key] = {shape, ++uses_};
  forget_oldest(shape.get());
  return shape;
}

std::shared_ptr<const Shape> Graph::find(const FieldTypes& batch) const {
  std::vector<std::string> known;
  for (const bool of_many : {false, true}) {
    for (const auto& shape : shapes_) {
      if (shape->variant != variant_ || shape->of_many() != of_many) continue;
      known.push_back(text_of(*shape));
      if (!fit(shape->fields, batch)) continue;
      if (!of_many) return shape;
      std::string why;
      if (const auto bound = bind(*shape, batch, constants_, why)) return bound;
    }
  }
  fail("the captured model has no program for a micro-batch of ", text_of(batch),
       ". It has programs for: ", join(known, "; or "),
       ". Give such micro-batches (pipeline.micro_batch_size, data.sequence), or capture ",
       "the model for this one too.");
}

void Graph::forget_oldest(const Shape* but) const {
  int64_t bytes = 0;
  for (const auto& [key, found] : found_) bytes += bytes_of_tables(*found.shape);
  while (found_.size() > kMostFound || bytes > kMostBytesFound) {
    const auto oldest = std::min_element(found_.begin(), found_.end(), [](const auto& a, const auto& b) {
      return a.second.last_use < b.second.last_use;
    });
    if (oldest->second.shape.get() == but) return;
    bytes -= bytes_of_tables(*oldest->second.shape);
    found_.erase(oldest);
  }
}

bool Graph::serves(const FieldTypes& batch) const {
  const std::lock_guard lock(mutex_);
  try {
    find(batch);
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool Graph::of_many() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(shapes_.begin(), shapes_.end(), [](const auto& shape) { return shape->of_many(); });
}

bool Graph::knows(const FieldTypes& fields, int variant) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(shapes_.begin(), shapes_.end(),
                     [&](const auto& shape) { return shape->variant == variant && shape->fields == fields; });
}

const Program& Graph::program(const Shape& shape, int layer) const {
  const auto index = static_cast<size_t>(layer);
  return shape.programs[static_cast<size_t>(shape.kinds.empty() ? layers()[index].kind : shape.kinds[index])];
}

const Plan& Graph::plan(const Shape& shape, int layer, const std::vector<bool>& trained) const {
  const Program* program = &this->program(shape, layer);
  const std::lock_guard lock(mutex_);
  const auto found = shape.plans.find({program, trained});
  if (found != shape.plans.end()) return found->second;
  return shape.plans.emplace(std::pair(program, trained), make_plan(*program, trained)).first->second;
}

std::vector<at::Tensor> Graph::constants(const Shape& shape, int layer) const {
  const auto index = static_cast<size_t>(layer);
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> tensors;
  if (shape.constants.empty()) {
    for (const std::string& name : layers()[index].constants) tensors.push_back(constants_.at(name));
    return tensors;
  }
  for (const Shape::Constant& one : shape.constants[index])
    tensors.push_back(one.table < 0 ? constants_.at(one.name) : shape.table_values[static_cast<size_t>(one.table)]);
  return tensors;
}

bool Graph::has_constant(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return constants_.contains(name);
}

int64_t Graph::count_targets(const Fields& fields) const {
  const std::shared_ptr<const Shape> shape = shape_of(fields);
  const Targets& targets = shape->targets;
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
