// Measures one layer of each kind on one micro-batch of the configured data, the same measurement that the
// split into stages and the byte cap are made from, and shows where the time and the bytes go.
#include "apps/profile.h"

#include <cstdio>
#include <map>
#include <memory>
#include <numeric>

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
  int64_t parameter_bytes = 0;  // of one layer
  LayerCost cost;
};

int64_t parameter_bytes(const LayerSpec& spec) {
  std::vector<Parameter*> parameters;
  const auto layer = spec.make();  // allocates nothing
  layer->collect_parameters(parameters);
  int64_t bytes = 0;
  for (const Parameter* parameter : parameters)
    bytes += parameter->numel() * static_cast<int64_t>(sizeof(float));
  return bytes;
}

// In the order in which they first come in the model.
std::vector<Kind> kinds_of(const ModelSpec& model, const Profile& profile) {
  std::vector<Kind> kinds;
  std::map<std::string, size_t> known;
  for (const LayerSpec& spec : model.layers) {
    const auto [at, is_new] = known.try_emplace(spec.kind, kinds.size());
    if (is_new) kinds.push_back({spec.kind, 0, parameter_bytes(spec), profile.at(spec.kind)});
    ++kinds[at->second].layers;
  }
  return kinds;
}

void print_table(const std::vector<Kind>& kinds) {
  std::printf(
      "one micro-batch, one layer of each kind; kept: from its F until its I, from its I until its W\n\n");
  std::printf("%-24s %6s %9s %9s %9s %12s %12s %12s %12s\n", "kind", "layers", "F ms", "I ms", "W ms",
              "kept until I", "until W", "output", "parameters");
  Kind all;
  for (const Kind& kind : kinds) {
    const LayerCost& cost = kind.cost;
    std::printf("%-24s %6d %9.3f %9.3f %9.3f %12s %12s %12s %12s\n", kind.name.c_str(), kind.layers,
                cost.forward * 1e3, cost.backward_p1 * 1e3, cost.backward_p2 * 1e3,
                format_bytes(static_cast<double>(cost.forward_held)).c_str(),
                format_bytes(static_cast<double>(cost.stash)).c_str(),
                format_bytes(static_cast<double>(cost.output)).c_str(),
                format_bytes(static_cast<double>(kind.parameter_bytes)).c_str());
    all.layers += kind.layers;
    all.cost.forward += kind.layers * cost.forward;
    all.cost.backward_p1 += kind.layers * cost.backward_p1;
    all.cost.backward_p2 += kind.layers * cost.backward_p2;
    all.cost.forward_held += kind.layers * cost.forward_held;
    all.cost.stash += kind.layers * cost.stash;
    all.parameter_bytes += kind.layers * kind.parameter_bytes;
  }
  std::printf("%-24s %6d %9.3f %9.3f %9.3f %12s %12s %12s %12s\n", "the model", all.layers,
              all.cost.forward * 1e3, all.cost.backward_p1 * 1e3, all.cost.backward_p2 * 1e3,
              format_bytes(static_cast<double>(all.cost.forward_held)).c_str(),
              format_bytes(static_cast<double>(all.cost.stash)).c_str(), "",
              format_bytes(static_cast<double>(all.parameter_bytes)).c_str());
}

json to_json(const Config& config, const ModelSpec& model, const std::vector<Kind>& kinds) {
  json layers = json::array();
  for (const LayerSpec& spec : model.layers) layers.push_back({{"name", spec.name}, {"kind", spec.kind}});
  json costs = json::object();
  for (const Kind& kind : kinds) {
    costs[kind.name] = {{"forward_seconds", kind.cost.forward},
                        {"backward_p1_seconds", kind.cost.backward_p1},
                        {"backward_p2_seconds", kind.cost.backward_p2},
                        {"bytes_until_p1", kind.cost.forward_held},
                        {"bytes_until_p2", kind.cost.stash},
                        {"output_bytes", kind.cost.output},
                        {"parameter_bytes", kind.parameter_bytes}};
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
