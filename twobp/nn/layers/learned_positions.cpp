#include "twobp/nn/layers/learned_positions.h"

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layers/documents.h"

namespace twobp {
namespace {

// The positions within their documents, (B S) int64. Undefined if samples are not packed.
at::Tensor within_documents(const Context& context, const at::Tensor& x) {
  const auto documents = documents_of(context, x.size(0), x.size(1));
  if (!documents) return {};
  const at::Tensor& starts = documents->starts();
  return on_device((at::arange(context.past, context.past + x.size(1), starts.options()) - starts).flatten(),
                   x.device());
}

}  // namespace

LearnedPositions::LearnedPositions(std::string name, int64_t positions, int64_t dim, double init_std,
                                   at::ScalarType dtype)
    : weight_({{std::move(name), positions}}, {positions, dim}, dtype, init_std) {
  weight_.used_as(/*factor=*/false, /*table=*/true);
}

Values LearnedPositions::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = std::move(values[0]);
  TWOBP_CHECK(x.dim() == 3 && x.size(2) == weight_.sizes()[1], "the positions ", weight_.name(),
              " take (batch, sequence, ", weight_.sizes()[1], "), got ", x.sizes());
  const int64_t past = context.past;
  TWOBP_CHECK(past + x.size(1) <= weight_.sizes()[0], "a sequence of ", past + x.size(1), " tokens is longer than the ",
              weight_.sizes()[0], " positions of ", weight_.name());
  at::Tensor rows = weight_.value.narrow(0, past, x.size(1));
  if (context.keeps()) saved.keep_until_p1(rows);  // a view of the weight: it says that forward ran
  if (const at::Tensor own = within_documents(context, x); own.defined()) {
    rows = weight_.value.index_select(0, own).view(x.sizes());
  }
  if (exclusively_owned(x)) {
    x.add_(rows);
    return {std::move(x)};
  }
  return {x + rows};
}

Values LearnedPositions::backward_p1(Values dy, Context& context, Saved& saved) {
  const int64_t positions = saved.take_p1(0).size(0);
  TWOBP_CHECK(dy[0].dim() == 3 && dy[0].size(1) == positions, "the gradient ", dy[0].sizes(),
              " does not fit the output of ", weight_.name(), ", of ", positions, " positions");
  if (weight_.trainable()) {
    const at::Tensor& gradient = dy[0];
    const at::ScalarType type = compute_type(gradient.scalar_type());
    if (const at::Tensor own = within_documents(context, gradient); own.defined()) {
      weight_.grad_to_add().index_add_(0, own, gradient.flatten(0, 1).to(type));
    } else {
      weight_.grad_to_add().narrow(0, context.past, gradient.size(1)).add_(gradient.sum(0, /*keepdim=*/false, type));
    }
  }
  return dy;
}

void LearnedPositions::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
}

}  // namespace twobp
