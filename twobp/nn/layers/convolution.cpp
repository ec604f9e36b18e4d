#include "twobp/nn/layers/convolution.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp {
namespace {

// Measured with AVX-512. From this number of output pixels on, oneDNN is faster than products of gathered windows,
// because the cost of reordering the weight no longer matters.
constexpr int64_t kOneDnnPixels = 512;

// Windows are gathered for samples with this many output pixels at once. That is enough for a fast product.
constexpr int64_t kPixelsAtOnce = 512;

at::Tensor as_pixels(const at::Tensor& image) {
  return image.view({-1, image.size(3)});
}

at::Tensor channels_second(const at::Tensor& image) {
  return image.permute({0, 3, 1, 2});
}

at::Tensor channels_last(const at::Tensor& image) {
  return image.permute({0, 2, 3, 1}).contiguous();
}

}  // namespace

Convolution::Convolution(const std::string& name, const ConvolutionOptions& o, at::ScalarType dtype)
    : weight_({{name, o.out}}, {o.out, o.in, o.kernel, o.kernel}, dtype,
              std::sqrt(2.0 / static_cast<double>(o.kernel * o.kernel * o.out))),
      options_(o) {
  TWOBP_CHECK(o.in > 0 && o.out > 0 && o.kernel > 0 && o.stride > 0 && o.padding >= 0, "convolution ", name,
              " needs channels, kernel and stride of at least 1, and padding of at least 0");
  weight_.store_channels_last();  // a matrix of rows for products over windows
}

WindowShape Convolution::window(at::IntArrayRef x) const {
  return {x[1], x[2], x[3], options_.kernel, options_.stride, options_.padding};
}

std::vector<int64_t> Convolution::output_sizes(at::IntArrayRef x) const {
  const WindowShape shape = window(x);
  return {x[0], shape.out_height(), shape.out_width(), options_.out};
}

bool Convolution::by_library(const at::Tensor& image, at::IntArrayRef x_sizes, int64_t pixels) const {
  if (is_product() || (image.is_cpu() && !window(x_sizes).every_tap_meets())) return false;
  const at::ScalarType type = weight_.value.scalar_type();
  if (by_operators(image) && (!image.is_cpu() || type == compute_type(type))) return true;
  if (type == at::kFloat) return pixels >= kOneDnnPixels;
  return type == at::kBFloat16 && has_instructions_for(type);
}

at::Tensor Convolution::read_pixels(const at::Tensor& x) const {
  const int64_t step = options_.stride;
  if (step == 1) return as_pixels(x);
  return as_pixels(x.slice(1, 0, x.size(1), step).slice(2, 0, x.size(2), step).contiguous());
}

int64_t Convolution::samples_at_once(at::IntArrayRef x_sizes) const {
  const WindowShape shape = window(x_sizes);
  return std::max<int64_t>(1, kPixelsAtOnce / (shape.out_height() * shape.out_width()));
}

at::Tensor Convolution::windows(const at::Tensor& x, int64_t first, int64_t samples) const {
  const WindowShape shape = window(x.sizes());
  const int64_t pixels = shape.out_height() * shape.out_width();
  const int64_t cols = shape.kernel * shape.kernel * shape.channels;
  at::Tensor rows = at::empty({samples * pixels, cols}, x.options());
  dispatch_float(x.scalar_type(), "Convolution", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x) + first * shape.height * shape.width * shape.channels;
    S* to = mutable_numbers<S>(rows);
    at::parallel_for(0, samples, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        image_kernels<S>().gather_windows(from + i * shape.height * shape.width * shape.channels, shape,
                                          to + i * pixels * cols);
      }
    });
  });
  return rows;
}

at::Tensor Convolution::forward(const at::Tensor& x) const {
  const at::Tensor& weight = weight_.value;
  TWOBP_CHECK(x.dim() == 4 && x.size(3) == options_.in, "convolution ", weight_.name(),
              " takes (batch, height, width, ", options_.in, "), got ", x.sizes());
  TWOBP_CHECK(x.scalar_type() == weight.scalar_type(), "convolution ", weight_.name(), " has dtype ",
              c10::toString(weight.scalar_type()), ", got ", c10::toString(x.scalar_type()));
  TWOBP_CHECK(std::min(x.size(1), x.size(2)) + 2 * options_.padding >= options_.kernel, "convolution ", weight_.name(),
              " has a kernel of ", options_.kernel, ", which is larger than the image: ", x.sizes());
  const std::vector<int64_t> sizes = output_sizes(x.sizes());
  const int64_t pixels = sizes[0] * sizes[1] * sizes[2];
  if (by_library(x, x.sizes(), pixels)) {
    const int64_t s = options_.stride;
    const int64_t p = options_.padding;
    const ProductTimer timer(pixels, options_.out, weight.numel() / options_.out);
    return channels_last(at::conv2d(channels_second(x), weight, {}, {s, s}, {p, p}));
  }
  at::Tensor y = at::empty(sizes, x.options());
  at::Tensor y_pixels = as_pixels(y);
  const at::Tensor matrix = as_matrix_of_rows(weight).t();
  if (is_product()) {
    multiply_into(y_pixels, read_pixels(x), matrix);
    return y;
  }
  const int64_t at_once = samples_at_once(x.sizes());
  for (int64_t first = 0; first < sizes[0]; first += at_once) {
    const int64_t samples = std::min(at_once, sizes[0] - first);
    at::Tensor rows = as_pixels(y.narrow(0, first, samples));
    multiply_into(rows, windows(x, first, samples), matrix);
  }
  return y;
}

at::Tensor Convolution::input_gradient(const at::Tensor& dy, at::IntArrayRef x_sizes, at::Tensor add_to) const {
  TWOBP_CHECK(dy.sizes() == at::IntArrayRef(output_sizes(x_sizes)), "the gradient ", dy.sizes(),
              " does not fit the output of convolution ", weight_.name(), ", ", at::IntArrayRef(output_sizes(x_sizes)));
  if (is_product()) return gradient_of_product(dy, x_sizes, std::move(add_to));
  const int64_t pixels = dy.size(0) * dy.size(1) * dy.size(2);
  if (!by_library(dy, x_sizes, pixels)) return gradient_of_windows(dy, x_sizes, std::move(add_to));
  const at::Tensor& weight = weight_.value;
  const int64_t s = options_.stride;
  const int64_t p = options_.padding;
  // Only the sizes of x are used.
  const at::Tensor x = at::empty({1}, dy.options()).expand(x_sizes);
  const auto gradients = [&] {
    const ProductTimer timer(pixels, options_.out, weight.numel() / options_.out);
    return at::convolution_backward(channels_second(dy), channels_second(x), weight, {}, {s, s}, {p, p}, {1, 1}, false,
                                    {0, 0}, 1, {true, false, false});
  }();
  at::Tensor dx = channels_last(std::get<0>(gradients));
  return add_to.defined() ? add_to.add_(dx) : dx;
}

at::Tensor Convolution::gradient_of_product(const at::Tensor& dy, at::IntArrayRef x_sizes, at::Tensor add_to) const {
  const at::Tensor matrix = as_matrix_of_rows(weight_.value);
  const int64_t s = options_.stride;
  if (s == 1) {
    at::Tensor dx = add_to.defined() ? add_to : at::empty(x_sizes, dy.options());
    at::Tensor dx_pixels = as_pixels(dx);
    if (add_to.defined()) {
      multiply_add(dx_pixels, as_pixels(dy), matrix);
    } else {
      multiply_into(dx_pixels, as_pixels(dy), matrix);
    }
    return dx;
  }
  at::Tensor read = at::empty({dy.size(0), dy.size(1), dy.size(2), options_.in}, dy.options());
  at::Tensor read_pixels = as_pixels(read);
  multiply_into(read_pixels, as_pixels(dy), matrix);
  at::Tensor dx = add_to.defined() ? add_to : at::zeros(x_sizes, dy.options());
  dx.slice(1, 0, x_sizes[1], s).slice(2, 0, x_sizes[2], s).add_(read);
  return dx;
}

// Overlapping windows are added, in the dtype of sums.
at::Tensor Convolution::gradient_of_windows(const at::Tensor& dy, at::IntArrayRef x_sizes, at::Tensor add_to) const {
  const at::ScalarType type = compute_type(dy.scalar_type());
  const bool in_place = add_to.defined() && add_to.scalar_type() == type;
  at::Tensor dx = in_place ? add_to : at::zeros(x_sizes, dy.options().dtype(type));
  const WindowShape shape = window(x_sizes);
  const int64_t at_once = samples_at_once(x_sizes);
  const int64_t window_pixels = shape.out_height() * shape.out_width();
  const int64_t cols = shape.kernel * shape.kernel * shape.channels;
  const int64_t image = shape.height * shape.width * shape.channels;
  const at::Tensor widened = as_matrix_of_rows(weight_.value).to(type);
  for (int64_t first = 0; first < dy.size(0); first += at_once) {
    const int64_t samples = std::min(at_once, dy.size(0) - first);
    const at::Tensor gradient = as_pixels(dy.narrow(0, first, samples)).to(type);
    at::Tensor rows = at::empty({gradient.size(0), cols}, gradient.options());
    multiply_into(rows, gradient, widened);
    dispatch_float(type, "Convolution", [&](auto zero) {
      using S = decltype(zero);
      if constexpr (std::is_same_v<S, Compute<S>>) {
        const S* from = numbers<S>(rows);
        S* to = mutable_numbers<S>(dx) + first * image;
        at::parallel_for(0, samples, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            image_kernels<S>().add_windows(from + i * window_pixels * cols, shape, to + i * image);
          }
        });
      }
    });
  }
  if (in_place) return dx;
  return add_to.defined() ? add_to.add_(dx) : dx.to(dy.scalar_type());
}

void Convolution::add_weight_gradient(const at::Tensor& x, const at::Tensor& dy) {
  const int64_t pixels = dy.size(0) * dy.size(1) * dy.size(2);
  if (is_product()) {
    weight_.accumulate_product(as_pixels(dy).t(), read_pixels(x));
    return;
  }
  const int64_t s = options_.stride;
  const int64_t p = options_.padding;
  if (by_library(dy, x.sizes(), pixels)) {
    const auto gradients = [&] {
      const ProductTimer timer(pixels, options_.out, weight_.value.numel() / options_.out);
      return at::convolution_backward(channels_second(dy), channels_second(x), weight_.value, {}, {s, s}, {p, p},
                                      {1, 1}, false, {0, 0}, 1, {false, true, false});
    }();
    weight_.accumulate(std::get<1>(gradients));
    return;
  }
  const int64_t at_once = samples_at_once(x.sizes());
  for (int64_t first = 0; first < x.size(0); first += at_once) {
    const int64_t samples = std::min(at_once, x.size(0) - first);
    weight_.accumulate_product(as_pixels(dy.narrow(0, first, samples)).t(), windows(x, first, samples));
  }
}

Values Conv2d::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  at::Tensor y = convolution_.forward(x);
  if (context.keeps()) {
    if (convolution_.weight().trainable()) {
      saved.keep_until_p2(std::move(x));
    } else {
      saved.keep_until_p1(at::empty({1}, x.options()).expand(x.sizes()));  // keeps only x's sizes
    }
  }
  return {std::move(y)};
}

Values Conv2d::backward_p1(Values dy, Context&, Saved& saved) {
  return backward_p1(as_contiguous(std::move(dy[0])), saved, {});
}

Values Conv2d::backward_p1(at::Tensor dy, Saved& saved, at::Tensor add_to) {
  const bool trainable = convolution_.weight().trainable();
  TWOBP_CHECK(!trainable || saved.p2_count() == 1, "backward-p1 of convolution ", convolution_.weight().name(),
              " does not find exactly one saved tensor, its input: it runs once after each forward");
  const at::Tensor x = trainable ? saved.p2(0) : saved.take_p1(0);
  Values dx;
  if (gives_gradient_) dx.push_back(convolution_.input_gradient(dy, x.sizes(), std::move(add_to)));
  if (trainable) saved.keep_until_p2(std::move(dy));
  return dx;
}

void Conv2d::backward_p2(std::span<Saved* const> saved) {
  for (const Saved* one : saved) convolution_.add_weight_gradient(one->p2(0), one->p2(1));
}

void Conv2d::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (convolution_.weight().trainable()) units.push_back({this, &saved});
}

void Conv2d::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&convolution_.weight());
}

}  // namespace twobp
