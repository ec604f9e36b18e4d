// Groups of rows, each with a matrix of its own: mixtures of experts multiply them.
#pragma once

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/products.h"

namespace twobp {

// Calls visit(group, first row, rows) for the groups of rows. `ends` (groups) has the index after the last row of each,
// in ascending order. Returns the end of the last one. Throws Error if they do not fit `rows`.
template <typename Visit>
int64_t for_groups(const at::Tensor& ends, int64_t groups, int64_t rows, Visit&& visit) {
  TWOBP_CHECK(
      ends.dim() == 1 && ends.size(0) == groups && (ends.scalar_type() == at::kInt || ends.scalar_type() == at::kLong),
      "a grouped product of ", groups, " matrices takes as many ends of groups, not ", ends.sizes(), " ",
      c10::toString(ends.scalar_type()));
  const at::Tensor all = ends.to(at::kCPU, at::kLong).contiguous();
  int64_t begin = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = all.const_data_ptr<int64_t>()[group];
    TWOBP_CHECK(end >= begin && end <= rows, "group ", group, " of a grouped product ends at row ", end, " of ", rows,
                ", after row ", begin);
    visit(group, begin, end - begin);
    begin = end;
  }
  return begin;
}

// Writes y[rows of group g] = left(first row, rows) @ matrices[g], or adds it. Returns the end of the last group. There
// may be the same groups of several `sources`, one source after the other.
template <typename Left>
int64_t multiply_groups(const at::Tensor& y, const at::Tensor& ends, const at::Tensor& matrices, Left&& left,
                        int64_t sources = 1, bool adds = false) {
  const int64_t count = matrices.size(0);
  return for_groups(ends, sources * count, y.size(0), [&](int64_t group, int64_t begin, int64_t rows) {
    if (rows > 0) write_product(y.narrow(0, begin, rows), left(begin, rows), matrices.select(0, group % count), adds);
  });
}

// Writes matrices[g] = left(first row, rows)^T @ right(first row, rows), or adds it. `rows` counts those of all groups.
template <typename Left, typename Right>
void write_group_products(const at::Tensor& matrices, bool adds, const at::Tensor& ends, int64_t rows, Left&& left,
                          Right&& right) {
  for_groups(ends, matrices.size(0), rows, [&](int64_t group, int64_t begin, int64_t count) {
    if (count > 0) {
      write_product(matrices.select(0, group), left(begin, count).t(), right(begin, count), adds);
    } else if (!adds) {
      matrices.select(0, group).zero_();
    }
  });
}

}  // namespace twobp
