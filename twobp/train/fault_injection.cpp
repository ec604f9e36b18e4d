#include "twobp/train/fault_injection.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"

namespace twobp {
namespace {

constexpr const char* kVariable = "TWOBP_FAIL";

// Forwards to a layer, and fails when it is due.
class FailingLayer : public Layer {
 public:
  FailingLayer(std::unique_ptr<Layer> layer, int index, FaultInjection* faults)
      : layer_(std::move(layer)), index_(index), faults_(faults) {}

  Values forward(Values x, Context& context, Saved& saved) override {
    if (faults_->is_due(Fault::Where::kForward, index_, context)) faults_->happen();
    return layer_->forward(std::move(x), context, saved.child(0));
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    if (faults_->is_due(Fault::Where::kBackwardP1, index_, context)) faults_->happen();
    due_in_p2_ = faults_->is_due(Fault::Where::kBackwardP2, index_, context);
    dy = layer_->backward_p1(std::move(dy), context, saved.child(0));
    saved.child(0).release_p1();
    return dy;
  }
  void backward_p2(std::span<Saved* const> /*saved*/) override { faults_->happen(); }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override {
    layer_->collect_p2(saved.child(0), units);
    if (std::exchange(due_in_p2_, false)) units.push_back({this, &saved});
  }
  void collect_parameters(std::vector<Parameter*>& parameters) override { layer_->collect_parameters(parameters); }

 private:
  std::unique_ptr<Layer> layer_;
  int index_;
  FaultInjection* faults_;
  bool due_in_p2_ = false;
};

class FailingDataset : public Dataset {
 public:
  FailingDataset(std::shared_ptr<const Dataset> data, const FaultInjection* faults)
      : data_(std::move(data)), faults_(faults) {}

  int64_t size() const override { return data_->size(); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override {
    if (faults_->is_due_in_loader()) faults_->happen();
    return data_->read(indices, epoch);
  }
  int64_t cost(int64_t sample) const override { return data_->cost(sample); }

 private:
  std::shared_ptr<const Dataset> data_;
  const FaultInjection* faults_;
};

Fault::Where parse_where(const std::string& word, const std::string& text) {
  using Where = Fault::Where;
  const std::pair<const char*, Where> all[] = {{"F", Where::kForward},
                                               {"I", Where::kBackwardP1},
                                               {"W", Where::kBackwardP2},
                                               {"optimizer", Where::kOptimizer},
                                               {"loader", Where::kLoader}};
  for (const auto& [name, where] : all) {
    if (word == name) return where;
  }
  fail(kVariable, "=", text, ": begins with '", word, "', but must begin with F, I, W, optimizer or loader");
}

}  // namespace

Fault parse_fault(const std::string& text) {
  Fault fault;
  fault.text = text;
  const std::vector<std::string> parts = split(text, ':');
  fault.where = parse_where(parts.front(), text);
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    const std::string key = parts[i].substr(0, equals);
    const char* begin = equals == std::string::npos ? "" : parts[i].c_str() + equals + 1;
    char* end = nullptr;
    const double value = std::strtod(begin, &end);
    TWOBP_CHECK(*begin != '\0' && *end == '\0' && value >= 0 && value < 1e9, kVariable, "=", text, ": '", parts[i],
                "' is not KEY=NUMBER, such as step=3");
    if (key == "seconds") {
      fault.seconds = value;
      continue;
    }
    int64_t* number = key == "step"          ? &fault.step
                      : key == "rank"        ? &fault.rank
                      : key == "replica"     ? &fault.replica
                      : key == "micro_batch" ? &fault.micro_batch
                      : key == "layer"       ? &fault.layer
                      : key == "kill"        ? &fault.kill
                                             : nullptr;
    TWOBP_CHECK(number != nullptr, kVariable, "=", text, ": '", key,
                "' is none of step, rank, replica, micro_batch, layer, seconds, kill");
    *number = static_cast<int64_t>(value);
  }
  return fault;
}

FaultInjection::FaultInjection(Fault fault) : fault_(std::move(fault)) {}

std::shared_ptr<FaultInjection> FaultInjection::from_environment() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return nullptr;
  return std::make_shared<FaultInjection>(parse_fault(text));
}

void FaultInjection::wrap(ModelSpec& model) {
  layers_ = std::vector<std::atomic<bool>>(model.layers.size());
  for (size_t i = 0; i < model.layers.size(); ++i) {
    auto& make = model.layers[i].make;
    make = [this, i, make] { return std::make_unique<FailingLayer>(make(), static_cast<int>(i), this); };
  }
}

void FaultInjection::wrap(DataSplit& data) {
  data.train = std::make_shared<FailingDataset>(data.train, this);
}

void FaultInjection::choose_layers(const Pipeline& pipeline) {
  here_ = pipeline.world().replica == fault_.replica && fault_.rank < pipeline.ranks() &&
          pipeline.is_local(static_cast<int>(fault_.rank));
  int layer = 0;
  for (int s = 0; s < pipeline.stages(); ++s) {
    for (int i = 0; i < pipeline.split()[s]; ++i, ++layer) {
      layers_[layer] =
          here_ && pipeline.rank_of_stage()[s] == fault_.rank && (fault_.layer < 0 || fault_.layer == layer);
    }
  }
}

bool FaultInjection::is_due(Fault::Where where, int layer, const Context& context) const {
  return where == fault_.where && layers_[layer] && context.training && context.step == fault_.step &&
         (fault_.micro_batch < 0 || fault_.micro_batch == context.micro_batch);
}

void FaultInjection::begin_step(int64_t step) {
  if (here_ && fault_.where == Fault::Where::kLoader && step >= fault_.step) loader_due_ = true;
}

void FaultInjection::in_optimizer(int rank, int64_t step) {
  if (here_ && fault_.where == Fault::Where::kOptimizer && rank == fault_.rank && step == fault_.step) {
    happen();
  }
}

void FaultInjection::happen() const {
  if (fault_.kill != 0) std::raise(SIGKILL);
  if (fault_.seconds == 0) fail("a failure on demand, ", kVariable, "=", fault_.text);
  std::this_thread::sleep_for(std::chrono::duration<double>(fault_.seconds));
}

}  // namespace twobp
