#include "twobp/graph/operators.h"

#include <algorithm>
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

// Names without overloads. Operators that read or write memory through other means than their arguments, or that give
// uninitialised memory, are not here. What others leave unchecked is in argument_checks.cpp.
constexpr std::string_view kAllowed[] = {
    // element by element
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "copysign", "cos",
    "cosh", "digamma", "div", "elu", "elu_backward", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "frac", "ge", "gelu", "gelu_backward", "glu", "glu_backward", "gt",
    "hardsigmoid", "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "hypot",
    "i0", "isfinite", "isinf", "isnan", "le", "leaky_relu", "leaky_relu_backward", "lerp", "lgamma", "log", "log10",
    "log1p", "log2", "log_sigmoid_backward", "log_sigmoid_forward", "logaddexp", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logit", "logit_backward", "lt", "masked_fill", "maximum", "minimum", "mish",
    "mish_backward", "mul", "nan_to_num", "native_dropout_backward", "ne", "neg", "polygamma", "pow", "_prelu_kernel",
    "_prelu_kernel_backward", "reciprocal", "relu", "remainder", "round", "rsqrt", "rsub", "sgn", "sigmoid",
    "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "sinc", "sinh", "softplus", "softplus_backward",
    "special_entr", "special_i0e", "special_i1", "special_i1e", "sqrt", "square", "sub", "tan", "tanh", "tanh_backward",
    "threshold", "threshold_backward", "true_divide", "trunc", "where", "xlogy",
    // sums, norms, softmax and losses
    "all", "amax", "amin", "any", "argmax", "argmin", "binary_cross_entropy", "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits", "_cdist_backward", "_cdist_forward", "count_nonzero", "cummax", "cumprod",
    "cumsum", "_euclidean_dist", "histc", "huber_loss", "huber_loss_backward", "kthvalue", "linalg_vector_norm",
    "_log_softmax", "_log_softmax_backward_data", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "mode",
    "mse_loss", "mse_loss_backward", "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "native_group_norm",
    "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward", "nll_loss2d_backward",
    "nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward", "norm", "_pdist_backward", "_pdist_forward", "prod",
    "renorm", "_safe_softmax", "smooth_l1_loss", "smooth_l1_loss_backward", "soft_margin_loss",
    "soft_margin_loss_backward", "_softmax", "_softmax_backward_data", "sort", "std", "sum", "topk",
    "value_selecting_reduction_backward", "var", "var_mean", "_weight_norm_interface",
    "_weight_norm_interface_backward",
    // products, convolutions, attention and pooling
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward",
    "addbmm", "addmm", "addmv", "affine_grid_generator", "avg_pool1d", "avg_pool2d", "avg_pool2d_backward",
    "avg_pool3d", "avg_pool3d_backward", "baddbmm", "bmm", "convolution", "convolution_backward", "dot",
    "grid_sampler_2d", "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward", "_grouped_mm",
    "linalg_cholesky_ex", "linalg_cross", "_linalg_eigh", "linalg_inv_ex", "linalg_matrix_exp", "linalg_qr",
    "linalg_solve_triangular", "_linalg_svd", "linear", "matmul", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "max_unpool2d",
    "max_unpool3d", "mm", "mv", "outer", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "_upsample_bicubic2d_aa_backward", "upsample_bicubic2d_backward", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward", "upsample_bilinear2d_backward", "upsample_linear1d",
    "upsample_linear1d_backward", "upsample_nearest1d", "upsample_nearest1d_backward", "upsample_nearest2d",
    "upsample_nearest2d_backward", "upsample_nearest3d", "upsample_nearest3d_backward", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d", "_upsample_nearest_exact3d_backward", "upsample_trilinear3d",
    "upsample_trilinear3d_backward", "vdot",
    // shapes and places
    "alias", "as_strided", "as_strided_scatter", "broadcast_to", "cat", "channel_shuffle", "chunk", "clone", "col2im",
    "constant_pad_nd", "contiguous", "copy", "detach", "diag_embed", "diagonal", "diagonal_backward",
    "diagonal_scatter", "embedding", "embedding_dense_backward", "expand", "fill", "flatten", "flip", "gather",
    "im2col", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select", "lift_fresh_copy",
    "masked_scatter", "masked_scatter_backward", "movedim", "narrow", "native_channel_shuffle", "pad", "permute",
    "pixel_shuffle", "pixel_unshuffle", "put", "reflection_pad1d", "reflection_pad1d_backward", "reflection_pad2d",
    "reflection_pad2d_backward", "reflection_pad3d", "reflection_pad3d_backward", "repeat", "replication_pad1d",
    "replication_pad1d_backward", "replication_pad2d", "replication_pad2d_backward", "replication_pad3d",
    "replication_pad3d_backward", "reshape", "roll", "rot90", "scatter", "scatter_add", "scatter_reduce",
    "searchsorted", "select", "select_backward", "select_scatter", "slice", "slice_backward", "slice_scatter", "split",
    "split_with_sizes", "squeeze", "stack", "t", "take", "tile", "to", "_to_copy", "transpose", "tril", "triu",
    "unbind", "unfold", "unfold_backward", "_unsafe_view", "unsqueeze", "view",
    // new tensors and random numbers
    "arange", "bernoulli", "bucketize", "exponential", "eye", "full", "full_like", "linspace", "multinomial",
    "new_full", "new_ones", "new_zeros", "normal_functional", "ones", "ones_like", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "uniform", "zeros", "zeros_like"};

// Operators with one result of the size and dtype of their first argument, which can take its memory. The bits of the
// result are the same.
constexpr std::string_view kInPlace[] = {
    "abs",     "ceil",        "clamp", "clamp_max", "clamp_min",   "cos",        "div",      "elu",        "erf",
    "exp",     "expm1",       "floor", "gelu",      "hardsigmoid", "hardswish",  "hardtanh", "leaky_relu", "log",
    "log1p",   "masked_fill", "mish",  "neg",       "pow",         "reciprocal", "relu",     "round",      "rsqrt",
    "sigmoid", "silu",        "sin",   "sqrt",      "square",      "sub",        "tanh",     "trunc"};
constexpr std::string_view kInPlaceEither[] = {"add", "mul"};
constexpr std::string_view kInPlaceOut[] = {"gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward",
                                            "threshold_backward"};

// Kernels for CPUs that read wrong memory, and say nothing, if one of their tensors is not contiguous. Autograd passes
// them tensors of another operator's making, but a program may lay them out in another way than they were at capture.
// tests/graph/layouts_test.cpp looks for such operators. Those of other norms, of attention and of convolutions are in
// own_operators.cpp and own_attention.cpp.
constexpr std::string_view kTrustsLayout[] = {"adaptive_max_pool3d_backward", "native_layer_norm_backward"};

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
  return !contains(kMayCopy, name) && schema.returns().size() == 1 && schema.returns()[0].alias_info() != nullptr &&
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
    op->of_slice = own.of_slice;
    return op;
  }
  constexpr std::string_view kSpace = "aten::";
  const size_t dot = whole.find('.');
  const std::string name = whole.starts_with(kSpace) ? whole.substr(kSpace.size(), dot - kSpace.size()) : std::string();
  TWOBP_CHECK(contains(kAllowed, name), "operator \"", whole.substr(0, 100), "\" is not on the list of those ",
              "that a captured model may call");
  const std::string overload = dot == std::string::npos ? "" : whole.substr(dot + 1);
  op->aten = lookup(name, overload);
  TWOBP_CHECK(op->aten.has_value(), "this LibTorch has no operator \"", whole.substr(0, 100), "\"");
  op->schema = &op->aten->schema();
  TWOBP_CHECK(!writes(*op->schema), "operator \"", whole.substr(0, 100), "\" changes its arguments");
  for (const OwnOperator& other : replaced_operators()) {
    if (whole == other.schema) op->own = other.run;
  }
  op->trusts_layout = contains(kTrustsLayout, name);
  op->check = find_check(std::string_view(whole).substr(kSpace.size()));
  op->view = is_view(name, *op->schema);
  find_in_place(name, overload, *op);
  return op;
}

}  // namespace

void Operator::call(Stack& stack) const {
  if (check != nullptr) {
    CheckedCall checked(stack, schema->arguments().size());
    check(checked);
  }
  if (own != nullptr) return own(stack);
  if (trusts_layout) make_contiguous(stack, schema->arguments().size());
  aten->callBoxed(stack);
}

const Operator& find_operator(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Operator>> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(name);
  if (found != known.end()) return *found->second;
  return *known.emplace(name, make_operator(name)).first->second;
}

}  // namespace twobp::graph
