#include <utility>

#include "twobp/core/check.h"
#include "twobp/graph/own_operators.h"
#include "twobp/nn/kernels/products/groups.h"
#include "twobp/nn/parameter.h"

namespace twobp::graph {
namespace {

void check_factors(const at::Tensor& a, const at::Tensor& b) {
  TWOBP_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(0) == b.size(0) && a.scalar_type() == b.scalar_type(),
              "twobp::grouped_mm_weight takes (rows, n) and (rows, m), not ", a.sizes(), " and ", b.sizes());
}

auto rows_of(const at::Tensor& matrix) {
  return [&matrix](int64_t begin, int64_t rows) { return matrix.narrow(0, begin, rows); };
}

// y[rows of group g] = a[rows of group g] @ b[g]; rows of no group become 0.
void run_grouped_mm(Stack& stack) {
  Arguments arguments(stack, 3);
  const at::Tensor a = arguments.tensor(0);
  const at::Tensor b = arguments.tensor(1);
  TWOBP_CHECK(a.dim() == 2 && b.dim() == 3 && a.size(1) == b.size(1) && a.scalar_type() == b.scalar_type(),
              "twobp::grouped_mm takes (rows, n) and (groups, n, m), not ", a.sizes(), " and ", b.sizes());
  at::Tensor y = at::empty({a.size(0), b.size(2)}, a.options());
  const int64_t end = multiply_groups(y, arguments.tensor(2), b, rows_of(a));
  if (end < y.size(0)) y.narrow(0, end, y.size(0) - end).zero_();
  arguments.give(std::move(y));
}

// dL/db of grouped_mm.
void run_grouped_mm_weight(Stack& stack) {
  Arguments arguments(stack, 3);
  const at::Tensor a = arguments.tensor(0);
  const at::Tensor dy = arguments.tensor(1);
  const at::Tensor ends = arguments.tensor(2);
  check_factors(a, dy);
  TWOBP_CHECK(ends.dim() == 1, "the ends of groups are ", ends.sizes(), ", not one for each group");
  at::Tensor db = at::empty({ends.size(0), a.size(1), dy.size(1)}, a.options());
  write_group_products(db, /*adds=*/false, ends, a.size(0), rows_of(a), rows_of(dy));
  arguments.give(std::move(db));
}

constexpr OwnOperator kGroups[] = {
    {"twobp::grouped_mm(Tensor a, Tensor b, Tensor ends) -> Tensor y", &run_grouped_mm},
    {"twobp::grouped_mm_weight(Tensor a, Tensor dy, Tensor ends) -> Tensor db", &run_grouped_mm_weight}};

}  // namespace

std::span<const OwnOperator> group_operators() {
  return kGroups;
}

void add_group_products(Parameter& parameter, const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends) {
  check_factors(a, b);
  const std::vector<int64_t>& sizes = parameter.sizes();
  TWOBP_CHECK(sizes.size() == 3 && a.size(1) == sizes[1] && b.size(1) == sizes[2], "the products of groups of ",
              a.sizes(), " and ", b.sizes(), " do not fit ", parameter.name(), ", ", at::IntArrayRef(sizes));
  TWOBP_CHECK(a.scalar_type() == parameter.value.scalar_type(), "the products for ", parameter.name(), " are of ",
              a.scalar_type(), ", but the parameter is ", parameter.value.scalar_type());
  const auto [gradient, adds] = parameter.grad_to_write();
  write_group_products(gradient, adds, ends, a.size(0), rows_of(a), rows_of(b));
}

}  // namespace twobp::graph
