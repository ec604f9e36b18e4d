// Sweeps ATen's operators as captured programs call them (Operator::call): small and odd shapes, each tensor in other
// layouts, four dtypes. Results must be those of float64 and contiguous tensors. Fresh memory is NaN, so results that
// were never written show.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include "twobp/core/check.h"
#include "twobp/graph/operators.h"

namespace twobp::TWOBP_FILE {
namespace {

using graph::Stack;

// While this object lives, CPU memory begins as NaN of every floating dtype.
class NanMemory : public c10::Allocator {
 public:
  NanMemory() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~NanMemory() override { c10::SetCPUAllocator(inner_, kPriority); }

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = inner_->allocate(bytes);
    if (bytes > 0) std::memset(data.mutable_get(), 0xFF, bytes);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static constexpr uint8_t kPriority = 255;
  c10::Allocator* inner_;
};

uint64_t seed = 0;

// Numbers that every dtype represents: multiples of 1/16 up to 4.
at::Tensor numbers(at::IntArrayRef sizes) {
  const auto generator = at::detail::createCPUGenerator(++seed);
  return at::randint(-64, 65, sizes, generator, at::TensorOptions().dtype(at::kDouble)).div_(16);
}
at::Tensor above_zero(at::IntArrayRef sizes) {
  return numbers(sizes).abs_().add_(0.5);
}
at::Tensor indices(int64_t below, at::IntArrayRef sizes) {
  return at::randint(below, sizes, at::detail::createCPUGenerator(++seed), at::TensorOptions().dtype(at::kLong));
}

struct Layout {
  const char* name;
  at::Tensor (*of)(const at::Tensor&);
};

at::Tensor channels_last(const at::Tensor& x) {
  if (x.dim() == 4) return x.contiguous(at::MemoryFormat::ChannelsLast).clone(at::MemoryFormat::Preserve);
  return x.dim() == 5 ? x.contiguous(at::MemoryFormat::ChannelsLast3d) : x;
}
// With the strides of the layout channels last where a dimension of 1 leaves a choice, too.
at::Tensor last_by_strides(const at::Tensor& x) {
  return x.dim() == 4 ? x.permute({0, 2, 3, 1}).clone(at::MemoryFormat::Contiguous).permute({0, 3, 1, 2}) : x;
}
at::Tensor transposed(const at::Tensor& x) {
  return x.dim() < 2 ? x : x.transpose(-1, -2).clone(at::MemoryFormat::Contiguous).transpose(-1, -2);
}
at::Tensor spread(const at::Tensor& x) {  // every second number of each dimension
  std::vector<int64_t> sizes;
  for (const int64_t size : x.sizes()) sizes.push_back(2 * size + 1);
  at::Tensor part = at::empty(sizes, x.options());
  for (int64_t dim = 0; dim < x.dim(); ++dim) part = part.slice(dim, 1, 2 * x.size(dim) + 1, 2);
  return part.copy_(x);
}
at::Tensor unaligned(const at::Tensor& x) {
  return at::empty({x.numel() + 1}, x.options()).slice(0, 1).view(x.sizes()).copy_(x);
}

constexpr Layout kLayouts[] = {{"contiguous", [](const at::Tensor& x) { return x.clone(); }},
                               {"channels last", &channels_last},
                               {"channels last by strides", &last_by_strides},
                               {"transposed", &transposed},
                               {"spread", &spread},
                               {"unaligned", &unaligned}};

// Roundings of sums and intermediate results, in units of the largest number of a result. Operators that round to 16
// bits on their way have many.
constexpr double kRoundings = 48;

double unit_of(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return 0x1p-8;
    case at::kHalf:
      return 0x1p-11;
    case at::kFloat:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

std::vector<at::Tensor> results_of(const Stack& stack) {
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) results.push_back(value.toTensor());
  }
  return results;
}

class Sweep {
 public:
  int calls() const { return calls_; }
  int refused() const { return refused_; }  // 16-bit types that ATen has no kernel for

  // Calls the operator with each layout of each tensor, in each dtype.
  void run(const std::string& name, const Stack& arguments) {
    Stack expected = arguments;
    graph::find_operator(name).aten->callBoxed(expected);  // contiguous, in float64
    const std::vector<at::Tensor> wanted = results_of(expected);
    for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const Layout& layout : kLayouts) {
        call(name, arguments, wanted, type, layout, -1);
        for (size_t one = 0; one < arguments.size(); ++one) {
          if (arguments[one].isTensor()) call(name, arguments, wanted, type, layout, static_cast<int>(one));
        }
      }
    }
  }

 private:
  // `one` is the argument that has the layout; -1: all have it.
  void call(const std::string& name, const Stack& arguments, const std::vector<at::Tensor>& wanted, at::ScalarType type,
            const Layout& layout, int one) {
    Stack stack = arguments;
    for (size_t i = 0; i < stack.size(); ++i) {
      if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
      at::Tensor x = stack[i].toTensor();
      if (x.is_floating_point()) x = x.to(type);
      stack[i] = one < 0 || one == static_cast<int>(i) ? layout.of(x) : x.clone();
    }
    if (name.ends_with("_backward_data")) stack.back() = static_cast<int64_t>(type);  // the dtype of the input
    const std::string what = concat(name, ", ", c10::toString(type), ", ", layout.name, " argument ", one);
    try {
      graph::find_operator(name).call(stack);
    } catch (const std::exception& error) {
      EXPECT_LE(c10::elementSize(type), 2u) << what << ": " << error.what();
      ++refused_;
      return;
    }
    ++calls_;
    const std::vector<at::Tensor> results = results_of(stack);
    ASSERT_EQ(results.size(), wanted.size()) << what;
    for (size_t i = 0; i < results.size(); ++i) compare(results[i], wanted[i], type, concat(what, ", result ", i));
  }

  static void compare(const at::Tensor& result, const at::Tensor& wanted, at::ScalarType type,
                      const std::string& what) {
    if (!wanted.defined()) return;
    ASSERT_EQ(result.sizes(), wanted.sizes()) << what;
    if (wanted.numel() == 0) return;
    if (!wanted.is_floating_point()) {
      EXPECT_TRUE(at::equal(result, wanted)) << what;
      return;
    }
    const double scale = std::max(1.0, wanted.abs().max().item<double>());
    const double error = (result.to(at::kDouble) - wanted).abs().max().item<double>();
    EXPECT_LE(error, kRoundings * unit_of(type) * scale) << what;  // false for NaN
  }

  int calls_ = 0;
  int refused_ = 0;
};

const c10::IValue kNone;
const std::vector<int64_t> kZero2 = {0, 0};

std::array<bool, 3> only(int output) {
  std::array<bool, 3> mask = {output < 0, output < 0, output < 0};
  if (output >= 0) mask[static_cast<size_t>(output)] = true;
  return mask;
}

class Layouts : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_GT(sweep_.calls(), 50); }

  NanMemory memory_;
  Sweep sweep_;
};

TEST_F(Layouts, Convolution) {
  struct Shape {
    int64_t batch, in, out, height, width, kernel, stride, padding;
  };
  for (const Shape& s : std::vector<Shape>{{1, 8, 16, 1, 1, 3, 2, 1},
                                           {3, 16, 8, 1, 1, 3, 1, 1},
                                           {2, 3, 4, 1, 5, 3, 2, 1},
                                           {2, 1, 1, 2, 2, 3, 2, 1},
                                           {4, 16, 32, 2, 1, 5, 2, 2},
                                           {1, 2, 3, 5, 7, 3, 2, 0},
                                           {2, 8, 8, 4, 4, 1, 2, 0},
                                           {0, 2, 3, 3, 3, 3, 1, 1}}) {
    const at::Tensor x = numbers({s.batch, s.in, s.height, s.width});
    const at::Tensor weight = numbers({s.out, s.in, s.kernel, s.kernel});
    const std::vector<int64_t> stride = {s.stride, s.stride}, padding = {s.padding, s.padding}, one = {1, 1};
    const at::Tensor y = at::conv2d(x, weight, {}, stride, padding);
    sweep_.run("aten::convolution", {x, weight, kNone, stride, padding, one, false, kZero2, 1});
    for (const int output : {-1, 0, 1}) {
      sweep_.run("aten::convolution_backward", {numbers(y.sizes()), x, weight, std::vector<int64_t>{s.out}, stride,
                                                padding, one, false, kZero2, 1, only(output)});
    }
  }
}

TEST_F(Layouts, BatchNormAndGroupNorm) {
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{3, 4}, {2, 4, 3}, {2, 4, 1, 1}, {3, 4, 5, 2}, {2, 4, 3, 1, 2}}) {
    const at::Tensor x = numbers(sizes), dy = numbers(sizes), gain = numbers({4}), bias = numbers({4});
    const at::Tensor mean = numbers({4}), variance = above_zero({4});
    Stack made = {x, gain, bias, kNone, kNone, true, 0.1, 1e-2};
    sweep_.run("aten::native_batch_norm", made);
    graph::find_operator("aten::native_batch_norm").call(made);
    sweep_.run("aten::native_batch_norm_backward", {dy, x, gain, kNone, kNone, made[1], made[2], true, 1e-2, only(-1)});
    sweep_.run("aten::native_batch_norm_backward", {dy, x, gain, mean, variance, kNone, kNone, false, 1e-2, only(-1)});
    sweep_.run("aten::_native_batch_norm_legit_no_training", {x, gain, bias, mean, variance, 0.1, 1e-2});
    const int64_t pixels = x.numel() / (sizes[0] * 4);
    for (const int64_t groups : {1, 2, 4}) {
      if (pixels * 4 / groups < 4) continue;  // gradients of few numbers cancel
      Stack norm = {x, gain, bias, sizes[0], 4, pixels, groups, 1e-2};
      sweep_.run("aten::native_group_norm", norm);
      graph::find_operator("aten::native_group_norm").call(norm);
      sweep_.run("aten::native_group_norm_backward",
                 {dy, x, norm[1], norm[2], gain, sizes[0], 4, pixels, groups, only(-1)});
    }
  }
}

TEST_F(Layouts, LayerNorm) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{1, 2}, {3, 5}, {0, 3}, {2, 3, 33}}) {
    const std::vector<int64_t> inner = {sizes.back()};
    const at::Tensor x = numbers(sizes), gain = numbers(inner), bias = numbers(inner);
    Stack made = {x, inner, gain, bias, 1e-2};
    sweep_.run("aten::native_layer_norm", made);
    graph::find_operator("aten::native_layer_norm").call(made);
    sweep_.run("aten::native_layer_norm_backward", {numbers(sizes), x, inner, made[1], made[2], gain, bias, only(-1)});
  }
}

TEST_F(Layouts, Attention) {
  for (const auto& [queries, keys, dim] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1}, {5, 7, 3}, {33, 33, 16}}) {
    for (const bool masked : {false, true}) {
      const at::Tensor q = numbers({2, 3, queries, dim}), k = numbers({2, 3, keys, dim}),
                       v = numbers({2, 3, keys, dim});
      const c10::IValue mask = masked ? c10::IValue(numbers({2, 1, queries, keys})) : kNone;
      const bool causal = !masked && queries == keys;
      Stack made = {q, k, v, 0.0, causal, mask, 0.25};
      sweep_.run("aten::_scaled_dot_product_flash_attention_for_cpu", made);
      graph::find_operator("aten::_scaled_dot_product_flash_attention_for_cpu").call(made);
      sweep_.run("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                 {numbers(q.sizes()), q, k, v, made[0], made[1], 0.0, causal, mask, 0.25});
    }
  }
}

TEST_F(Layouts, Products) {
  for (const auto& [m, n, k] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1}, {3, 5, 2}, {0, 2, 3}, {2, 3, 0}, {17, 33, 65}}) {
    const at::Tensor a = numbers({m, k}), b = numbers({k, n}), row = numbers({n});
    sweep_.run("aten::mm", {a, b});
    sweep_.run("aten::addmm", {row, a, b, 1, 1});
    sweep_.run("aten::addmm", {numbers({m, n}), a, b, 2, 0.5});
    sweep_.run("aten::bmm", {numbers({3, m, k}), numbers({3, k, n})});
    sweep_.run("aten::baddbmm", {numbers({3, m, n}), numbers({3, m, k}), numbers({3, k, n}), 1, 1});
    sweep_.run("aten::mv", {a, numbers({k})});
    sweep_.run("aten::matmul", {numbers({2, 1, m, k}), b});
  }
}

TEST_F(Layouts, Pooling) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{1, 1, 1, 1}, {2, 3, 5, 2}, {3, 8, 4, 4}}) {
    const at::Tensor x = numbers(sizes);
    const std::vector<int64_t> kernel = {3, 3}, stride = {2, 2}, padding = {1, 1}, one = {1, 1}, two = {2, 1};
    Stack made = {x, kernel, stride, padding, one, false};
    sweep_.run("aten::max_pool2d_with_indices", made);
    graph::find_operator("aten::max_pool2d_with_indices").call(made);
    const at::Tensor dy = numbers(made[0].toTensor().sizes());
    sweep_.run("aten::max_pool2d_with_indices_backward", {dy, x, kernel, stride, padding, one, false, made[1]});
    sweep_.run("aten::avg_pool2d", {x, kernel, stride, padding, false, true, kNone});
    sweep_.run("aten::avg_pool2d_backward", {dy, x, kernel, stride, padding, false, true, kNone});
    sweep_.run("aten::_adaptive_avg_pool2d", {x, two});
    sweep_.run("aten::_adaptive_avg_pool2d_backward", {numbers({sizes[0], sizes[1], 2, 1}), x});
    Stack largest = {x, two};
    graph::find_operator("aten::adaptive_max_pool2d").call(largest);
    sweep_.run("aten::adaptive_max_pool2d_backward", {numbers({sizes[0], sizes[1], 2, 1}), x, largest[1]});
    sweep_.run("aten::upsample_nearest2d_backward",
               {numbers({sizes[0], sizes[1], 2 * sizes[2], 3 * sizes[3]}),
                std::vector<int64_t>{2 * sizes[2], 3 * sizes[3]}, sizes, kNone, kNone});
  }
  const std::vector<int64_t> kernel = {2, 2, 2}, none = {0, 0, 0}, one = {1, 1, 1}, out = {2, 1, 2};
  const at::Tensor x = numbers({2, 3, 4, 2, 4});
  Stack made = {x, kernel, kernel, none, one, false};
  graph::find_operator("aten::max_pool3d_with_indices").call(made);
  sweep_.run("aten::max_pool3d_with_indices_backward",
             {numbers(made[0].toTensor().sizes()), x, kernel, kernel, none, one, false, made[1]});
  Stack largest = {x, out};
  graph::find_operator("aten::adaptive_max_pool3d").call(largest);
  sweep_.run("aten::adaptive_max_pool3d_backward", {numbers({2, 3, 2, 1, 2}), x, largest[1]});
}

TEST_F(Layouts, LossesAndSums) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{1, 1}, {3, 5}, {2, 33}}) {
    const at::Tensor x = numbers(sizes), dy = numbers(sizes), labels = indices(sizes[1], {sizes[0]});
    const at::Tensor log = at::_log_softmax(x, 1, false), soft = at::_softmax(x, 1, false);
    const auto type = static_cast<int64_t>(at::kDouble);
    sweep_.run("aten::_log_softmax", {x, 1, false});
    sweep_.run("aten::_softmax", {x, 1, false});
    sweep_.run("aten::_log_softmax_backward_data", {dy, log, 1, type});
    sweep_.run("aten::_softmax_backward_data", {dy, soft, 1, type});
    Stack made = {log, labels, kNone, 1, -100};
    sweep_.run("aten::nll_loss_forward", made);
    graph::find_operator("aten::nll_loss_forward").call(made);
    sweep_.run("aten::nll_loss_backward", {numbers({}), log, labels, kNone, 1, -100, made[1]});
    sweep_.run("aten::mse_loss_backward", {numbers({}), x, dy, 1});
    sweep_.run("aten::binary_cross_entropy_with_logits", {x, above_zero(sizes), kNone, kNone, 1});
    sweep_.run("aten::cumsum", {x, 1, kNone});
    sweep_.run("aten::sum.dim_IntList", {x, std::vector<int64_t>{0}, true, kNone});
    sweep_.run("aten::mean.dim", {x, std::vector<int64_t>{1}, false, kNone});
    sweep_.run("aten::amax", {x, std::vector<int64_t>{1}, false});
    sweep_.run("aten::logsumexp", {x, std::vector<int64_t>{1}, false});
    sweep_.run("aten::linalg_vector_norm", {x, 2, std::vector<int64_t>{1}, false, kNone});
    sweep_.run("aten::var_mean.correction", {x, std::vector<int64_t>{0}, 0, false});
    for (const char* name :
         {"aten::gelu_backward", "aten::silu_backward", "aten::sigmoid_backward", "aten::tanh_backward"}) {
      const bool gelu = std::string(name) == "aten::gelu_backward";
      sweep_.run(name, gelu ? Stack{dy, x, "none"} : Stack{dy, x});
    }
  }
}

TEST_F(Layouts, Indices) {
  for (const int64_t rows : {1, 3, 7}) {
    const at::Tensor table = numbers({rows, 5}), ids = indices(rows, {2, 3});
    sweep_.run("aten::embedding", {table, ids, -1, false, false});
    sweep_.run("aten::embedding_dense_backward", {numbers({2, 3, 5}), ids, rows, -1, false});
    const at::Tensor places = indices(rows, {4});
    sweep_.run("aten::index_select", {table, 0, places});
    sweep_.run("aten::index_add", {table, 0, places, numbers({4, 5}), 1});
    sweep_.run("aten::gather", {table, 0, indices(rows, {2, 5}), false});
    sweep_.run("aten::scatter_add", {table, 0, indices(rows, {2, 5}), numbers({2, 5})});
    sweep_.run("aten::constant_pad_nd", {table, std::vector<int64_t>{1, 2, 0, 1}, 3});
    sweep_.run("aten::reflection_pad2d_backward",
               {numbers({2, 3, 5, rows + 2}), numbers({2, 3, 3, rows + 2}), std::vector<int64_t>{0, 0, 1, 1}});
    sweep_.run("aten::tril", {table, 0});
    sweep_.run("aten::flip", {table, std::vector<int64_t>{0}});
    sweep_.run("aten::roll", {table, std::vector<int64_t>{1}, std::vector<int64_t>{0}});
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
