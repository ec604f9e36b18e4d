#include "twobp/nn/kernels/products/product_time.h"

#include "twobp/core/measure.h"

namespace twobp {
namespace {

thread_local ProductTime here;

}  // namespace

ProductTime product_time() {
  return here;
}

void count_operations(double operations) {
  here.operations += operations;
}

ProductTimer::ProductTimer(double operations) : begin_(now_seconds()) {
  count_operations(operations);
}

ProductTimer::~ProductTimer() {
  here.seconds += now_seconds() - begin_;
}

}  // namespace twobp
