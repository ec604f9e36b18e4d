#include "twobp/graph/operators.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/enum_tag.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/graph/own_operators.h"

namespace twobp::graph {
namespace {

// Names without overloads. Operators that read or write memory through other means than their arguments, that
// give uninitialised memory, or that leave indices unchecked are not here.
constexpr std::string_view kAllowed[] = {
    // element by element
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh",
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min",
    "copysign", "cos", "cosh", "div", "elu", "elu_backward", "eq", "erf", "erfc", "erfinv", "exp", "exp2",
    "expm1", "floor", "floor_divide", "fmod", "frac", "ge", "gelu", "gelu_backward", "glu", "glu_backward",
    "gt", "hardsigmoid", "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh",
    "hardtanh_backward", "isfinite", "isinf", "isnan", "le", "leaky_relu", "leaky_relu_backward", "lerp",
    "log", "log10", "log1p", "log2", "log_sigmoid_backward", "log_sigmoid_forward", "logaddexp",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum",
    "mish", "mish_backward", "mul", "nan_to_num", "ne", "native_dropout_backward", "neg", "pow",
    "_prelu_kernel", "_prelu_kernel_backward", "reciprocal", "relu", "remainder", "round", "rsqrt", "rsub",
    "sgn", "sigmoid", "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "sinh", "softplus",
    "softplus_backward", "sqrt", "square", "sub", "tan", "tanh", "tanh_backward", "threshold",
    "threshold_backward", "true_divide", "trunc", "where", "xlogy",
    // sums, norms, softmax and losses
    "all", "amax", "amin", "any", "argmax", "argmin", "binary_cross_entropy", "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits", "count_nonzero", "cummax", "cumprod", "cumsum", "histc", "huber_loss",
    "huber_loss_backward", "linalg_vector_norm", "_log_softmax", "_log_softmax_backward_data", "logcumsumexp",
    "logsumexp", "max", "mean", "median", "min", "mse_loss", "mse_loss_backward", "native_batch_norm",
    "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional",
    "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward", "native_layer_norm",
    "native_layer_norm_backward", "nll_loss2d_backward", "nll_loss2d_forward", "nll_loss_backward",
    "nll_loss_forward", "norm", "prod", "smooth_l1_loss", "smooth_l1_loss_backward", "_safe_softmax",
    "_softmax", "_softmax_backward_data", "sort", "std", "sum", "topk", "value_selecting_reduction_backward",
    "var", "var_mean", "_weight_norm_interface", "_weight_norm_interface_backward",
    // products, convolutions, attention and pooling
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward", "addbmm", "addmm", "addmv", "avg_pool1d", "avg_pool2d",
    "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward", "baddbmm", "bmm", "convolution",
    "convolution_backward", "dot", "grid_sampler_2d", "grid_sampler_2d_backward", "_grouped_mm", "linear",
    "matmul", "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "mm", "mv", "outer",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "upsample_bicubic2d", "upsample_bicubic2d_backward", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_linear1d", "upsample_linear1d_backward", "upsample_nearest1d",
    "upsample_nearest1d_backward", "upsample_nearest2d", "upsample_nearest2d_backward",
    // shapes and places
    "alias", "as_strided", "as_strided_scatter", "broadcast_to", "cat", "chunk", "clone", "col2im",
    "constant_pad_nd", "contiguous", "copy", "detach", "diag_embed", "diagonal", "diagonal_backward",
    "diagonal_scatter", "embedding", "embedding_dense_backward", "expand", "fill", "flatten", "flip",
    "gather", "im2col", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select",
    "lift_fresh_copy", "masked_scatter", "movedim", "narrow", "pad", "permute", "pixel_shuffle",
    "pixel_unshuffle", "reflection_pad1d", "reflection_pad1d_backward", "reflection_pad2d",
    "reflection_pad2d_backward", "repeat", "replication_pad1d", "replication_pad1d_backward",
    "replication_pad2d", "replication_pad2d_backward", "reshape", "roll", "scatter", "scatter_add",
    "scatter_reduce", "searchsorted", "select", "select_backward", "select_scatter", "slice",
    "slice_backward", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "t", "tile", "to",
    "_to_copy", "transpose", "tril", "triu", "unbind", "unfold", "unfold_backward", "_unsafe_view",
    "unsqueeze", "view",
    // new tensors and random numbers
    "arange", "bernoulli", "bucketize", "eye", "full", "full_like", "linspace", "multinomial", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "rand", "randint", "randn", "randperm", "scalar_tensor",
    "zeros", "zeros_like"};

// Operators with one result of the size and dtype of their first argument, which can take its memory. The
// bits of the result are the same.
constexpr std::string_view kInPlace[] = {
    "abs",       "ceil",     "clamp",      "clamp_max", "clamp_min", "cos",         "div",
    "elu",       "erf",      "exp",        "expm1",     "floor",     "gelu",        "hardsigmoid",
    "hardswish", "hardtanh", "leaky_relu", "log",       "log1p",     "masked_fill", "mish",
    "neg",       "pow",      "reciprocal", "relu",      "round",     "rsqrt",       "sigmoid",
    "silu",      "sin",      "sqrt",       "square",    "sub",       "tanh",        "trunc"};
constexpr std::string_view kInPlaceEither[] = {"add", "mul"};
constexpr std::string_view kInPlaceOut[] = {"gelu_backward", "silu_backward", "sigmoid_backward",
                                            "tanh_backward", "threshold_backward"};

template <size_t n>
bool contains(const std::string_view (&names)[n], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool writes(const c10::FunctionSchema& schema) {
  const auto is_written = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), is_written) ||
         std::any_of(schema.returns().begin(), schema.returns().end(), is_written);
}

// Whether the result shares the first argument's memory, at least if that is contiguous.
bool is_view(const std::string& name, const c10::FunctionSchema& schema) {
  constexpr std::string_view kMayCopy[] = {"contiguous", "to"};
  return !contains(kMayCopy, name) && schema.returns().size() == 1 &&
         schema.returns()[0].alias_info() != nullptr &&
         schema.returns()[0].type()->kind() == c10::TypeKind::TensorType;
}

std::optional<c10::OperatorHandle> lookup(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchema({"aten::" + name, overload});
}

void find_in_place(const std::string& name, const std::string& overload, Operator& op) {
  op.masks = name == "masked_fill";
  if (contains(kInPlaceOut, name)) {
    op.over = lookup(name, "grad_input");
    if (op.over) op.in_place = Operator::InPlace::kOut;
    return;
  }
  const bool either = contains(kInPlaceEither, name);
  if (!either && !contains(kInPlace, name)) return;
  op.over = lookup(name + "_", overload == "Tensor_Scalar" ? "Scalar" : overload);
  if (!op.over || op.over->schema().arguments().size() != op.schema->arguments().size()) return;
  op.in_place = either && overload == "Tensor" ? Operator::InPlace::kEither : Operator::InPlace::kSelf;
}

std::unique_ptr<Operator> make_operator(const std::string& whole) {
  auto op = std::make_unique<Operator>();
  for (const OwnOperator& own : own_operators()) {
    static std::map<const char*, c10::FunctionSchema> schemas;  // guarded by find_operator's lock
    const auto parsed = schemas.try_emplace(own.schema, torch::jit::parseSchema(own.schema)).first;
    if (parsed->second.name() != whole) continue;
    op->schema = &parsed->second;
    op->own = own.run;
    return op;
  }
  constexpr std::string_view kSpace = "aten::";
  const size_t dot = whole.find('.');
  const std::string name =
      whole.starts_with(kSpace) ? whole.substr(kSpace.size(), dot - kSpace.size()) : std::string();
  TWOBP_CHECK(contains(kAllowed, name), "operator \"", whole.substr(0, 100),
              "\" is not on the list of those ", "that a captured model may call");
  const std::string overload = dot == std::string::npos ? "" : whole.substr(dot + 1);
  op->aten = lookup(name, overload);
  TWOBP_CHECK(op->aten.has_value(), "this LibTorch has no operator \"", whole.substr(0, 100), "\"");
  op->schema = &op->aten->schema();
  TWOBP_CHECK(!writes(*op->schema), "operator \"", whole.substr(0, 100), "\" changes its arguments");
  for (const OwnOperator& faster : faster_operators()) {
    if (whole == faster.schema) op->own = faster.run;
  }
  op->view = is_view(name, *op->schema);
  find_in_place(name, overload, *op);
  return op;
}

}  // namespace

const Operator& find_operator(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Operator>> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(name);
  if (found != known.end()) return *found->second;
  return *known.emplace(name, make_operator(name)).first->second;
}

}  // namespace twobp::graph
