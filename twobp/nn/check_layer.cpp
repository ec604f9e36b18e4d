#include "twobp/nn/check_layer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include "twobp/core/check.h"
#include "twobp/nn/thrown.h"

namespace twobp {
namespace {

// The sum of two gradients, in another order.
constexpr double kSumTolerance = 1e-10;

double largest(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : tensor.abs().max().item<double>();
}

Values copies(const Values& values) {
  Values out;
  for (const at::Tensor& value : values) out.push_back(value.clone());
  return out;
}

class LayerChecker {
 public:
  LayerChecker(Layer& layer, const Values& x, const LayerCheck& options)
      : layer_(layer), options_(options), x_(copies(x)) {
    for (Parameter* parameter : parameters_of(layer)) make(*parameter);
    for (const at::Tensor& value : x_) expect_float64(value, "the input");
    Saved saved;
    for (const at::Tensor& y : forward(x_, 0, saved)) {
      if (y.is_floating_point() && y.dim() > 0)
        dy_.push_back(at::randn(y.sizes(), at::detail::createCPUGenerator(options.seed + 1), y.options()));
    }
  }

  void check() {
    const Gradients first = run({&x_})[0];
    for (size_t i = 0; i < x_.size(); ++i) {
      if (!x_[i].is_floating_point()) continue;
      TWOBP_CHECK(i < first.dx.size() && first.dx[i].defined(), "backward_p1 gives no gradient for input ", i);
      compare(x_[i], first.dx[i], concat("dL/dx of input ", i));
    }
    for (size_t i = 0; i < trained_.size(); ++i) compare(trained_[i]->value, first.dw[i], gradient_of(i));
    check_two(first);
  }

 private:
  struct Gradients {
    Values dx;
    std::vector<at::Tensor> dw;
  };

  static void expect_float64(const at::Tensor& tensor, const std::string& what) {
    TWOBP_CHECK(!tensor.is_floating_point() || tensor.scalar_type() == at::kDouble, what, " is ", tensor.scalar_type(),
                ": check_layer needs a layer in float64, because differences of other "
                "types are too coarse");
  }

  void make(Parameter& parameter) {
    if (!parameter.value.defined()) {
      parameter.allocate_value(options_.seed);
      at::Tensor& value = parameter.value;
      if (value.dim() == 1 && parameter.trainable())
        value.add_(at::randn(value.sizes(), at::detail::createCPUGenerator(options_.seed), value.options()), 0.3);
    }
    if (!parameter.trainable()) return;
    expect_float64(parameter.value, "parameter " + parameter.name());
    parameter.allocate_grad();
    trained_.push_back(&parameter);
  }

  std::string gradient_of(size_t i) const { return concat("the gradient of parameter ", trained_[i]->name()); }

  Context context(int64_t micro_batch) const {
    Context context;
    context.fields = &options_.fields;
    context.seed = options_.seed;
    context.micro_batch = micro_batch;
    context.loss_weight = options_.loss_weight;
    return context;
  }

  Values forward(const Values& x, int64_t micro_batch, Saved& saved) {
    Context of = context(micro_batch);
    return layer_.forward(copies(x), of, saved);
  }

  // F of all inputs, then I, then W, each a micro-batch, from number `first` on. The gradients of weights are those of
  // all; they are with the last input.
  std::vector<Gradients> run(const std::vector<const Values*>& inputs, int64_t first = 0) {
    for (Parameter* parameter : trained_) parameter->forget_grad();
    std::vector<std::unique_ptr<Saved>> saved;
    for (size_t i = 0; i < inputs.size(); ++i) {
      saved.push_back(std::make_unique<Saved>());
      forward(*inputs[i], first + static_cast<int64_t>(i), *saved[i]);
    }
    std::vector<Gradients> gradients(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      Context of = context(first + static_cast<int64_t>(i));
      gradients[i].dx = layer_.backward_p1(copies(dy_), of, *saved[i]);
      saved[i]->release_p1();
    }
    for (const auto& one : saved) {
      std::vector<P2Unit> units;
      layer_.collect_p2(*one, units);
      for (const P2Unit& unit : units) {
        unit.layer->backward_p2({&unit.saved, 1});
        unit.saved->release_p2();
      }
    }
    for (const Parameter* parameter : trained_) {
      TWOBP_CHECK(parameter->has_grad(), "parameter ", parameter->name(),
                  " got no gradient: add one in backward_p1, or in backward_p2 with a unit from collect_p2");
      gradients.back().dw.push_back(parameter->grad.clone());
    }
    return gradients;
  }

  // The derivative of sum(dy * y) by the element, from four values of y. Differences of y are formed before the sum, so
  // that outputs that do not depend on the element add no rounding.
  double difference(double* element) {
    const double start = *element;
    const auto y_at = [&](double steps) {
      *element = start + steps * options_.step;
      Saved saved;
      return forward(x_, 0, saved);
    };
    const Values more = y_at(1), less = y_at(-1), most = y_at(2), least = y_at(-2);
    *element = start;
    double sum = 0;
    size_t used = 0;
    for (size_t i = 0; i < more.size(); ++i) {
      if (!more[i].is_floating_point()) continue;
      const at::Tensor change = 8 * (more[i] - less[i]) - (most[i] - least[i]);
      sum += (change.dim() > 0 ? change * dy_[used++] : change).sum().item<double>();
    }
    return sum / (12 * options_.step);
  }

  void compare(at::Tensor& tensor, const at::Tensor& gradient, const std::string& what) {
    TWOBP_CHECK(gradient.sizes() == tensor.sizes(), what, " has the sizes ", gradient.sizes(), ", not ",
                tensor.sizes());
    const at::Tensor actual = at::empty_like(tensor).copy_(gradient);  // the same order in memory
    const double bound = options_.tolerance * largest(actual);
    const int64_t count = std::min(tensor.numel(), options_.elements);
    // A stride that has no factor in common with the size visits different elements all over the tensor.
    int64_t stride = std::max<int64_t>(1, tensor.numel() / std::max<int64_t>(1, count));
    while (std::gcd(stride, tensor.numel()) != 1) ++stride;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t element = i * stride % tensor.numel();
      const double given = actual.const_data_ptr<double>()[element];
      const double expected = difference(tensor.mutable_data_ptr<double>() + element);
      // The negation also holds for NaN.
      TWOBP_CHECK(std::abs(given - expected) <= bound, what, ", element ", element, ", is ", given,
                  ", but finite differences give ", expected);
    }
  }

  void check_two(const Gradients& first) {
    Values other;
    for (const at::Tensor& value : x_) other.push_back(value.is_floating_point() ? value * 0.9 : value);
    const Gradients second = run({&other}, 1)[0];
    const std::vector<Gradients> both = run({&x_, &other});
    const auto expect = [](const at::Tensor& given, const at::Tensor& wanted, const std::string& what) {
      TWOBP_CHECK(largest(given - wanted) <= kSumTolerance * largest(wanted), what,
                  " changes when two micro-batches are interleaved: keep nothing in the layer between calls, "
                  "and add to gradients by accumulate_product, accumulate or grad_to_add");
    };
    for (size_t i = 0; i < x_.size(); ++i) {
      if (!x_[i].is_floating_point()) continue;
      expect(both[0].dx[i], first.dx[i], concat("dL/dx of input ", i));
      expect(both[1].dx[i], second.dx[i], concat("dL/dx of input ", i));
    }
    for (size_t i = 0; i < trained_.size(); ++i) expect(both[1].dw[i], first.dw[i] + second.dw[i], gradient_of(i));
  }

  Layer& layer_;
  const LayerCheck& options_;
  Values x_;
  Values dy_;
  std::vector<Parameter*> trained_;
};

}  // namespace

void check_layer(Layer& layer, const Values& x, const LayerCheck& options) {
  try {
    LayerChecker(layer, x, options).check();
  } catch (const Error&) {
    throw;
  } catch (...) {
    fail("the layer fails: ", message_of_thrown());
  }
}

}  // namespace twobp
