// check_bundle BUNDLE [ROUNDS] compares the loss and every gradient of a bundle with BUNDLE/reference.safetensors.
// Python wrote that file. It has the fields of a micro-batch as `field.NAME`, and the results of autograd as `loss` and
// `grad.NAME`. The program prints the errors and the median milliseconds of F, I and W on one thread. The exit status
// is 1 if an error, relative to the norm of the reference, is above 1e-5.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/measure.h"
#include "twobp/files/safetensors.h"
#include "twobp/graph/program_layer.h"
#include "twobp/graph/read_graph.h"
#include "twobp/models/captured.h"
#include "twobp/models/model_weights.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp {
namespace {

constexpr double kTolerance = 1e-5;

double error_of(const at::Tensor& given, const at::Tensor& wanted) {
  const at::Tensor exact = wanted.to(at::kDouble);
  const double difference = (given.to(at::kDouble) - exact).norm().item<double>();
  return difference == 0 ? 0 : difference / exact.norm().item<double>();
}

class Bundle {
 public:
  explicit Bundle(const std::string& folder)
      : graph_(graph::read_graph(folder)), reference_(folder + "/reference.safetensors") {
    for (const LayerSpec& spec : captured(graph_).layers) {
      layers_.push_back(spec.make());
      layers_.back()->collect_parameters(parameters_);
    }
    for (Parameter* parameter : parameters_) {
      parameter->allocate_value(0);
      parameter->allocate_grad();
    }
    load_weights(parameters_, ModelWeights(folder));
    for (const auto& [name, type] : graph_->shape().fields) fields_[name] = reference_.tensor("field." + name);
    context_.fields = &fields_;
    context_.loss_weight = 1.0 / static_cast<double>(graph_->count_targets(fields_));
  }

  void run() {
    std::vector<Saved> saved(layers_.size());
    for (Parameter* parameter : parameters_) parameter->forget_grad();
    const double begin = now_seconds();
    Values x;
    for (size_t i = 0; i < layers_.size(); ++i) x = layers_[i]->forward(std::move(x), context_, saved[i]);
    loss_ = x[0].item<double>();
    const double forward = now_seconds();
    Values dy;
    std::vector<P2Unit> units;
    for (size_t i = layers_.size(); i-- > 0;) {
      dy = layers_[i]->backward_p1(std::move(dy), context_, saved[i]);
      saved[i].release_p1();
      layers_[i]->collect_p2(saved[i], units);
    }
    const double p1 = now_seconds();
    for (const P2Unit& unit : units) {
      unit.layer->backward_p2({&unit.saved, 1});
      unit.saved->release_p2();
    }
    forward_.push_back(forward - begin);
    p1_.push_back(p1 - forward);
    p2_.push_back(now_seconds() - p1);
  }

  // Returns the largest error.
  double compare() const {
    std::map<std::string, at::Tensor> gradients;
    for (const Parameter* parameter : parameters_) {
      if (!parameter->trainable()) continue;
      at::Tensor& sum = gradients[parameter->name()];
      sum = sum.defined() ? sum + parameter->grad : parameter->grad;
    }
    double worst = error_of(at::scalar_tensor(loss_, at::kDouble), reference_.tensor("loss"));
    std::string where = "loss";
    std::printf("loss %.9g, error %.1e\n", loss_, worst);
    for (const auto& [name, gradient] : gradients) {
      const double error = error_of(gradient, reference_.tensor("grad." + name));
      if (!(error <= worst)) {
        worst = error;
        where = name;
      }
    }
    std::printf("%zu layers, %zu gradients, largest error %.1e (%s)\n", layers_.size(), gradients.size(), worst,
                where.c_str());
    return worst;
  }

  void print_times() {
    std::printf("F %.2f ms, I %.2f ms, W %.2f ms\n", 1e3 * median(forward_), 1e3 * median(p1_), 1e3 * median(p2_));
  }

 private:
  std::shared_ptr<graph::Graph> graph_;
  SafetensorsFile reference_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Parameter*> parameters_;
  Fields fields_;
  Context context_;
  double loss_ = 0;
  std::vector<double> forward_, p1_, p2_;
};

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: check_bundle BUNDLE [ROUNDS]\n");
    return 2;
  }
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  try {
    twobp::Bundle bundle(argv[1]);
    bundle.run();
    const double worst = bundle.compare();
    for (int i = 1; i < (argc > 2 ? std::atoi(argv[2]) : 1); ++i) bundle.run();
    bundle.print_times();
    return worst <= twobp::kTolerance ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "check_bundle: %s\n", error.what());
    return 1;
  }
}
