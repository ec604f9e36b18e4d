// Measures one layer of each kind and shows where the time and the bytes go. The split into stages and the
// byte cap use the same measurement. As JSON it is the cost model that `twobp plan` reads.
#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/commands.h"
#include "apps/json_report.h"
#include "apps/plan.h"
#include "apps/print.h"
#include "twobp/core/recompute_mode.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/build_model.h"
#include "twobp/train/trainer.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

struct ProfileOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::string sizes;
  std::string slices;
  std::vector<std::string> recompute;
  std::string json_file;
  double seconds = 3;
};

std::vector<std::string> row_of(const std::string& name, int layers, const LayerCost& costs, double parameters) {
  return {name,
          std::to_string(layers),
          milliseconds(costs.forward),
          milliseconds(costs.backward_p1),
          milliseconds(costs.backward_p2),
          format_bytes(costs.forward_held),
          format_bytes(costs.stash),
          fixed(parameters, 0)};
}

LayerCost sum_of(const std::vector<LayerCost>& layers) {
  LayerCost whole;
  for (const LayerCost& costs : layers) {
    whole.forward += costs.forward;
    whole.backward_p1 += costs.backward_p1;
    whole.backward_p2 += costs.backward_p2;
    whole.forward_held += costs.forward_held;
    whole.stash += costs.stash;
    whole.forward_rise += costs.forward_rise;
    whole.backward_p1_rise += costs.backward_p1_rise;
    whole.backward_p2_rise += costs.backward_p2_rise;
  }
  return whole;
}

// The order is: kinds by their first use in the model, kinds of other recomputations, the whole model.
void print_size(const CostModel& model, size_t size, double parameters) {
  std::cout << "\nmicro-batches of " << model.micro_batch_sizes[size] << ":\n";
  std::vector<std::vector<std::string>> rows = {
      {"kind", "layers", "F", "I", "W", "held after F", "held after I", "parameters"}};
  std::map<std::string, int> layers;
  std::vector<std::string> order;
  for (const ModelLayer& layer : model.layers) {
    if (layers[layer.kind]++ == 0) order.push_back(layer.kind);
  }
  for (const auto& [kind, costs] : model.kinds) {
    if (!layers.contains(kind)) order.push_back(kind);
  }
  for (const std::string& kind : order) {
    const KindCosts& costs = model.kinds.at(kind);
    rows.push_back(row_of(kind, layers[kind], costs.at_size[size], costs.parameters));
  }
  const int layer_count = static_cast<int>(model.layers.size());
  const int samples = model.micro_batch_sizes[size];
  const LayerCost whole = sum_of(layer_costs_at(model, samples));
  rows.push_back(row_of("the model", layer_count, whole, parameters));
  print_table(rows);
  if (!model.sample_costs.empty()) {
    const auto more = [](double rise) { return milliseconds(std::max(0.0, rise)); };  // below 0 only by noise
    std::cout << "These are the times for samples of mean cost. If samples cost twice the mean, the model takes "
              << more(whole.forward_rise) << " more in F, " << more(whole.backward_p1_rise) << " in I and "
              << more(whole.backward_p2_rise)
              << " in W. The cost of a sample is its number of pairs of positions "
                 "within documents, here "
              << fixed(model.sample_costs.front(), 2) << " to " << fixed(model.sample_costs.back(), 2)
              << " times the mean.\n";
  }
  for (const auto& lengths : model.slice_lengths) {
    const int slices = static_cast<int>(lengths.size());
    std::cout << "\nthe model in " << slices << " slices:\n";
    rows = {{"positions", "F", "I", "W", "held after F", "held after I"}};
    const auto costs = slice_costs_at(model, samples, slices);
    for (int slice = 0; slice < slices; ++slice) {
      const LayerCost cost = sum_of(costs[slice]);
      rows.push_back({std::to_string(lengths[slice]), milliseconds(cost.forward), milliseconds(cost.backward_p1),
                      milliseconds(cost.backward_p2), format_bytes(cost.forward_held), format_bytes(cost.stash)});
    }
    print_table(rows);
  }
}

// Tied weights count once.
double parameter_count(const ModelSpec& model) {
  std::map<std::string, int64_t> numbers;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();  // allocates nothing
    for (const Parameter* parameter : parameters_of(*layer)) {
      if (!parameter->is_buffer()) numbers[parameter->name()] = parameter->numel();
    }
  }
  double sum = 0;
  for (const auto& [name, count] : numbers) sum += static_cast<double>(count);
  return sum;
}

void profile(const ProfileOptions& options) {
  check_alone("profile", find_launcher());
  const Config config = load_config(options.config, options.overrides);
  MeasureOptions measure;
  if (!options.sizes.empty()) measure.micro_batch_sizes = parse_counts("--micro-batch-sizes", options.sizes);
  if (!options.slices.empty()) measure.slices = parse_counts("--slices", options.slices);
  measure.only_what_fits = options.sizes.empty();
  measure.recompute = options.recompute;
  measure.seconds = options.seconds;
  measure.machine = machine_to_json().at("cpu").get<std::string>();
  const CostModel model = measure_costs(config, measure);
  std::cout << "one layer of each kind, one micro-batch; held after F: saved tensors and the output, less an "
               "input that was freed; held after I: tensors that W needs\n";
  const double parameters = parameter_count(build_model(config));
  for (size_t size = 0; size < model.micro_batch_sizes.size(); ++size) print_size(model, size, parameters);
  std::cout << "\na message between two ranks takes " << fixed(model.link_latency * 1e6, 1) << " us";
  if (model.link_bytes_per_second > 0) {
    std::cout << ", plus the time of its bytes at " << format_bytes(model.link_bytes_per_second) << " per second\n";
  } else {
    std::cout << ", whatever its size\n";
  }
  if (!options.json_file.empty()) write_text(options.json_file, cost_model_to_json(model));
}

}  // namespace

void add_profile_command(CLI::App& app) {
  auto options = std::make_shared<ProfileOptions>();
  CLI::App* command =
      app.add_subcommand("profile", "Measure the costs of each kind of layer: bytes and seconds of F, I, W");
  command->add_option("config", options->config, "JSON file, as for train");
  command->add_option("--set", options->overrides, "Override a key: section.key=value")->take_all();
  command->add_option("--micro-batch-sizes", options->sizes,
                      "Samples per micro-batch: 1,2,4 or 1..4 (default: as configured)");
  command->add_option("--slices", options->slices,
                      "Also measure sequences cut into this many slices: 2,4,8 or 2..4 (default: as "
                      "configured)");
  command
      ->add_option("--recompute", options->recompute,
                   "Also measure layers that recompute (without pipeline.recompute): " + join(recompute_names()))
      ->delimiter(',')
      ->check(CLI::IsMember(recompute_names()));
  command->add_option("--seconds", options->seconds, "How long to measure each size")
      ->check(number_from(0))
      ->capture_default_str();
  command->add_option("--json", options->json_file, "File for the cost model, which twobp plan --costs reads");
  command->callback([options] { profile(*options); });
}

}  // namespace twobp
