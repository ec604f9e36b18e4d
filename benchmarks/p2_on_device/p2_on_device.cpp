// Compares ways to launch W on a device (the paper's second open question). F and I are the matrix products of one
// rank's layers for all micro-batches. They run in the compute stream. W runs
//   serial        in the same stream, after each layer's I: standard backward
//   stream        product by product in one low-priority stream
//   layer_streams in one low-priority stream per layer
//   graph         in the low-priority stream, one recorded graph per micro-batch
// The executor launches W as `serial` does (docs/distributed.md says why). The methods alternate. The table shows the
// time until the device is done, the time until the host has launched everything, and whether the gradients equal those
// of `serial` bit for bit. A CPU has neither streams nor graphs, so only `serial` runs there.
//
//   build/release/benchmarks/p2_on_device/p2_on_device --device cuda --json table.json
#include <array>
#include <cstdio>
#include <map>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/json_report.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/nn/device/device.h"
#include "twobp/nn/device/gpu.h"
#include "twobp/nn/kernels/products/products.h"

namespace twobp {
namespace {

using nlohmann::json;

struct Options {
  std::string device = "cpu";
  std::string dtype = "float32";
  std::vector<std::string> products = {"512:1536", "512:512", "512:2816", "1408:512"};
  int layers = 4;
  int64_t rows = 1024;
  int micro_batches = 4;
  int steps = 5;
  std::string json_file;
};

// A matrix product with the operands and results of its F, I and W for each micro-batch.
struct Product {
  at::Tensor weight, gradient;  // (out, in)
  at::Tensor y, dx;             // (rows, out), (rows, in): never read
  std::vector<at::Tensor> x, dy;
  int layer = 0;

  void forward(int m) { multiply_into(y, x[m], weight.t()); }
  void backward_p1(int m) { multiply_into(dx, dy[m], weight); }
  void backward_p2(int m) { multiply_add(gradient, dy[m].t(), x[m]); }
};

struct Sample {
  double step = 0;
  double host = 0;
};

enum class Method : uint8_t { kSerial, kStream, kLayerStreams, kGraph };
constexpr std::array<const char*, 4> kNames = {"serial", "stream", "layer_streams", "graph"};

class Rank {
 public:
  explicit Rank(const Options& options)
      : options_(options),
        device_(Device::open(options.device, 0)),
        weights_(device_.make_stream(/*high_priority=*/false)) {
    static const std::map<std::string, at::ScalarType> types = {
        {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
    const auto numbers = at::TensorOptions(types.at(options.dtype)).device(device_.where());
    const OnStream here(device_.compute());
    for (int layer = 0; layer < options.layers; ++layer) {
      for (const std::string& shape : options.products) {
        const size_t colon = shape.find(':');
        const int64_t in = std::stoll(shape);
        const int64_t out = std::stoll(shape.substr(colon + 1));
        Product product;
        product.layer = layer;
        product.weight = at::randn({out, in}, numbers);
        product.gradient = at::zeros({out, in}, numbers.dtype(at::kFloat));
        product.y = at::empty({options.rows, out}, numbers);
        product.dx = at::empty({options.rows, in}, numbers);
        for (int m = 0; m < options.micro_batches; ++m) {
          product.x.push_back(at::randn({options.rows, in}, numbers));
          product.dy.push_back(at::randn({options.rows, out}, numbers));
        }
        products_.push_back(std::move(product));
      }
      layer_streams_.push_back(device_.make_stream(/*high_priority=*/false));
    }
    device_.compute().wait_on_host();
  }

  std::vector<Method> methods() {
    if (!device_.asynchronous()) return {Method::kSerial};
    std::vector<Method> methods = {Method::kSerial, Method::kStream, Method::kLayerStreams};
    step(Method::kStream);
    const OnStream here(weights_);
    for (int m = 0; m < options_.micro_batches; ++m) {
      graphs_.push_back(record_graph({device_.where()}, [&] {
        for (auto product = products_.rbegin(); product != products_.rend(); ++product) product->backward_p2(m);
      }));
      if (!graphs_.back()) return methods;
    }
    methods.push_back(Method::kGraph);
    return methods;
  }

  Sample step(Method method) {
    const OnStream here(device_.compute());
    for (Product& product : products_) product.gradient.zero_();
    device_.compute().wait_on_host();
    const double begin = now_seconds();
    for (int m = 0; m < options_.micro_batches; ++m) {
      for (Product& product : products_) product.forward(m);
      for (auto product = products_.rbegin(); product != products_.rend(); ++product) {
        product->backward_p1(m);
        weight_gradient(method, *product, m);
      }
      if (method == Method::kGraph) in_stream(weights_, [&] { graphs_[m]->replay(); });
    }
    for (const DeviceStream& stream : layer_streams_) device_.compute().wait(stream.record());
    device_.compute().wait(weights_.record());
    const double put_in = now_seconds();
    device_.compute().wait_on_host();
    return {now_seconds() - begin, put_in - begin};
  }

  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> copies;
    for (const Product& product : products_) copies.push_back(product.gradient.to(at::kCPU, false, true));
    return copies;
  }

  double products_of_w() const {
    double numbers = 0;
    for (const Product& product : products_) numbers += static_cast<double>(product.weight.numel());
    return 2.0 * static_cast<double>(options_.rows) * options_.micro_batches * numbers;
  }

 private:
  // Runs `work` in `stream`, after what is in the compute stream now.
  template <typename Work>
  void in_stream(const DeviceStream& stream, const Work& work) {
    stream.wait(device_.compute().record());
    const OnStream here(stream);
    work();
  }

  void weight_gradient(Method method, Product& product, int m) {
    switch (method) {
      case Method::kSerial:
        product.backward_p2(m);
        return;
      case Method::kStream:
        return in_stream(weights_, [&] { product.backward_p2(m); });
      case Method::kLayerStreams:
        return in_stream(layer_streams_[product.layer], [&] { product.backward_p2(m); });
      case Method::kGraph:
        return;  // it runs once per micro-batch
    }
  }

  Options options_;
  Device device_;
  DeviceStream weights_;
  std::vector<Product> products_;
  std::vector<DeviceStream> layer_streams_;
  std::vector<std::unique_ptr<WorkGraph>> graphs_;  // by micro-batch
};

void run(const Options& options) {
  Rank rank(options);
  const std::vector<Method> methods = rank.methods();
  std::vector<std::vector<double>> steps(methods.size());
  std::vector<std::vector<double>> hosts(methods.size());
  // Whether the bits equal those of `serial`. A library may use another algorithm in another stream.
  std::vector<bool> same_bits(methods.size(), true);
  std::vector<at::Tensor> serial;
  for (int round = -1; round < options.steps; ++round) {  // the first one warms up
    for (size_t i = 0; i < methods.size(); ++i) {
      const Sample sample = rank.step(methods[i]);
      if (round < 0) {
        const std::vector<at::Tensor> gradients = rank.gradients();
        if (i == 0) serial = gradients;
        for (size_t g = 0; g < gradients.size(); ++g) {
          same_bits[i] = same_bits[i] && at::equal(gradients[g], serial[g]);
        }
      } else {
        steps[i].push_back(sample.step);
        hosts[i].push_back(sample.host);
      }
    }
  }
  json rows = json::array();
  std::printf("%-14s %12s %12s  %s\n", "W", "step, ms", "host, ms", "bits of serial");
  for (size_t i = 0; i < methods.size(); ++i) {
    const char* name = kNames[static_cast<size_t>(methods[i])];
    const bool same = same_bits[i];
    std::printf("%-14s %12.3f %12.3f  %s\n", name, 1e3 * median(steps[i]), 1e3 * median(hosts[i]), same ? "yes" : "no");
    rows.push_back(
        {{"method", name}, {"step_seconds_all", steps[i]}, {"host_seconds_all", hosts[i]}, {"same_bits", same}});
  }
  if (!options.json_file.empty()) {
    write_text(options.json_file, json{{"device", options.device},
                                       {"dtype", options.dtype},
                                       {"machine", machine_to_json()},
                                       {"p2_operations", rank.products_of_w()},
                                       {"rows", rows}}
                                          .dump(1) +
                                      "\n");
  }
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  twobp::Options options;
  CLI::App app{"Compares ways to launch W on a device."};
  app.add_option("--device", options.device, "cpu or cuda")->capture_default_str();
  app.add_option("--dtype", options.dtype, "type of weights and activations; gradients are float32")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}))
      ->capture_default_str();
  const CLI::Validator shape(
      [](const std::string& text) {
        unsigned long long in = 0, out = 0;
        char rest = 0;
        return std::sscanf(text.c_str(), "%llu:%llu%c", &in, &out, &rest) == 2 && in > 0 && out > 0
                   ? std::string()
                   : text + " is not IN:OUT";
      },
      "IN:OUT");
  app.add_option("--products", options.products, "input and output width of each product of a layer")
      ->check(shape)
      ->capture_default_str();
  app.add_option("--layers", options.layers)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rows", options.rows, "rows per micro-batch (tokens)")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--json", options.json_file, "file for the table as JSON");
  CLI11_PARSE(app, argc, argv);
  try {
    twobp::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "p2_on_device: %s\n", error.what());
    return 1;
  }
  return 0;
}
