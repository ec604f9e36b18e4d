// Measures one layer of each kind on one micro-batch of the configured data, the same measurement that the
// split into stages and the byte cap are made from, and shows where the time and the bytes go.
#include "apps/profile.h"

#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/json_report.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/profile.h"
#include "twobp/train/build_model.h"
#include "twobp/train/data.h"

namespace twobp {
namespace {

using nlohmann::json;

struct ProfileOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::string json_file;
  double seconds = 3;
};

struct Kind {
  std::string name;
  int layers = 0;
  int64_t parameters = 0;  // of one layer
  LayerCost cost;
};

int64_t count(const std::vector<Parameter*>& parameters, std::set<std::string>& counted) {
  int64_t numbers = 0;
  for (const Parameter* parameter : parameters) {
    if (parameter->is_buffer()) continue;
    if (counted.insert(parameter->name()).second) numbers += parameter->numel();
  }
  return numbers;
}

std::vector<Parameter*> parameters_of(Layer& layer) {
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);  // allocates nothing
  return parameters;
}

// In the order in which they first come in the model; the last one stands for the whole model.
std::vector<Kind> kinds_of(const ModelSpec& model, const Profile& profile) {
  std::vector<Kind> kinds;
  std::map<std::string, size_t> known;
  std::set<std::string> of_model;  // tied weights are one
  Kind whole{"the model", 0, 0, {}};
  const std::vector<LayerCost> costs = layer_costs(model, profile);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerSpec& spec = model.layers[i];
    const auto layer = spec.make();
    const auto [at, is_new] = known.try_emplace(spec.kind, kinds.size());
    std::set<std::string> of_layer;
    const auto parameters = parameters_of(*layer);
    if (is_new) kinds.push_back({spec.kind, 0, count(parameters, of_layer), profile.at(spec.kind)});
    ++kinds[at->second].layers;
    ++whole.layers;
    whole.parameters += count(parameters, of_model);
    whole.cost.forward += costs[i].forward;
    whole.cost.backward_p1 += costs[i].backward_p1;
    whole.cost.backward_p2 += costs[i].backward_p2;
    whole.cost.forward_held += costs[i].forward_held;
    whole.cost.stash += costs[i].stash;
  }
  kinds.push_back(whole);
  return kinds;
}

void print_table(const std::vector<Kind>& kinds) {
  std::printf(
      "one layer of each kind, one micro-batch; held after F: what F saved and its output, less an input "
      "that "
      "it let go; held after I: what W needs\n\n");
  std::printf("%-24s %6s %9s %9s %9s %13s %13s %13s\n", "kind", "layers", "F ms", "I ms", "W ms",
              "held after F", "held after I", "parameters");
  for (const Kind& kind : kinds) {
    const LayerCost& cost = kind.cost;
    std::printf("%-24s %6d %9.3f %9.3f %9.3f %13s %13s %13lld\n", kind.name.c_str(), kind.layers,
                cost.forward * 1e3, cost.backward_p1 * 1e3, cost.backward_p2 * 1e3,
                format_bytes(static_cast<double>(cost.forward_held)).c_str(),
                format_bytes(static_cast<double>(cost.stash)).c_str(),
                static_cast<long long>(kind.parameters));
  }
}

json to_json(const Config& config, const ModelSpec& model, const std::vector<Kind>& kinds) {
  json layers = json::array();
  for (const LayerSpec& spec : model.layers) layers.push_back({{"name", spec.name}, {"kind", spec.kind}});
  json costs = json::object();
  for (size_t i = 0; i + 1 < kinds.size(); ++i) {
    costs[kinds[i].name] = {{"forward_seconds", kinds[i].cost.forward},
                            {"backward_p1_seconds", kinds[i].cost.backward_p1},
                            {"backward_p2_seconds", kinds[i].cost.backward_p2},
                            {"held_bytes_after_forward", kinds[i].cost.forward_held},
                            {"held_bytes_after_p1", kinds[i].cost.stash},
                            {"output_bytes", kinds[i].cost.output},
                            {"parameters", kinds[i].parameters}};
  }
  return {{"micro_batch_size", config.pipeline.micro_batch_size},
          {"threads", config.pipeline.threads},
          {"machine", machine_to_json()},
          {"layers", layers},
          {"kinds", costs}};
}

void profile(const ProfileOptions& options) {
  const Config config = load_config(options.config, options.overrides);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(config.pipeline.threads);
  const ModelSpec model = build_model(config.model, compute_dtype(config.train.precision));
  const DataSplit data = open_data(config.data, config.model, config.train.seed);
  std::vector<int64_t> first(std::min(config.pipeline.micro_batch_size, data.train->size()));
  std::iota(first.begin(), first.end(), 0);
  const Profile measured = measure_profile(model, data.train->read(first, 0), options.seconds);
  const std::vector<Kind> kinds = kinds_of(model, measured);
  print_table(kinds);
  if (!options.json_file.empty()) write_text(options.json_file, to_json(config, model, kinds).dump(2) + "\n");
}

}  // namespace

void add_profile_command(CLI::App& app) {
  auto options = std::make_shared<ProfileOptions>();
  CLI::App* command =
      app.add_subcommand("profile", "What each kind of layer costs: seconds of F, I and W, bytes");
  command->add_option("config", options->config, "JSON file, as for train");
  command->add_option("--set", options->overrides, "Override a key: section.key=value")->take_all();
  command->add_option("--seconds", options->seconds, "How long to measure")->capture_default_str();
  command->add_option("--json", options->json_file, "File for the costs as JSON");
  command->callback([options] { profile(*options); });
}

}  // namespace twobp
