// `twobp plan` with a configuration or a cost model: finds the best way to run it.

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include <nlohmann/json.hpp>

#include "apps/plan.h"
#include "apps/print.h"
#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/recompute_mode.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/plan/planner.h"
#include "twobp/schedule/w_queue.h"
#include "twobp/train/build_model.h"
#include "twobp/train/check_config.h"
#include "twobp/train/gradients.h"

namespace twobp {
namespace {

// Returns half, once and twice this number of samples.
std::vector<int> sizes_around(int64_t size) {
  const int once = static_cast<int>(size);
  if (once == 1) return {1, 2};
  return {once / 2, once, 2 * once};
}

double parse_size(const std::string& option, const std::string& text) {
  if (text.empty()) return 0;
  const int64_t bytes = parse_bytes(text);
  TWOBP_CHECK(bytes > 0, option, " is '", text, "': write a size above 0, such as 80GiB, 512MiB or 1000000 (bytes)");
  return static_cast<double>(bytes);
}

// Takes the options that are given. The others keep the values of the costs.
Interconnect interconnect_of(const PlanOptions& options, const CostModel& model, const std::optional<Config>& config) {
  Interconnect network;
  if (config) network.bucket_bytes = static_cast<double>(parse_bucket(config->pipeline.bucket));
  const auto link = [](double latency, const std::string& option, const std::string& bandwidth,
                       const LinkSpeed& usual) {
    return LinkSpeed{latency >= 0 ? latency : usual.latency,
                     bandwidth.empty() ? usual.bytes_per_second : parse_size(option, bandwidth)};
  };
  const LinkSpeed measured{model.link_latency, model.link_bytes_per_second};
  const LinkSpeed given = link(options.latency, "--bandwidth", options.bandwidth, measured);
  network.ranks_per_node = options.share_links;
  (options.share_links > 0 ? network.node : network.link) = given;
  network.data = link(options.data_latency, "--data-bandwidth", options.data_bandwidth, given);
  return network;
}

// Whether to plan with streamed gradients; with "auto", both.
std::vector<bool> streams_of(const PlanOptions& options, const std::optional<Config>& config) {
  std::vector<std::string> names = {config ? config->pipeline.gradients : "kept"};
  if (!options.gradients.empty()) names = parse_names("--gradients", options.gradients);
  const std::string why = config ? why_gradients_are_kept(*config) : "";
  if (names == std::vector<std::string>{"auto"}) {
    if (why.empty()) return {false, true};
    std::cout << to_text(StreamedGradients{{}, why}) << '\n';
    return {false};
  }
  std::vector<bool> streams;
  for (const std::string& name : names) {
    TWOBP_CHECK(name == "kept" || name == "streamed", "--gradients has '", name, "': write kept, streamed, or auto");
    TWOBP_CHECK(name == "kept" || why.empty(), "--gradients has 'streamed', but training keeps its gradients: ", why);
    streams.push_back(name == "streamed");
  }
  return streams;
}

PlanRequest request_of(const PlanOptions& options, const std::optional<Config>& config) {
  PlanRequest request;
  if (!options.schedule.empty()) {
    for (const std::string& name : parse_names("--schedule", options.schedule)) {
      request.schedules.emplace_back(name);
    }
  }
  if (!options.ranks.empty()) request.ranks = parse_counts("--ranks", options.ranks);
  if (!options.stages.empty()) request.stages = parse_counts("--stages", options.stages);
  if (request.ranks.empty() && request.stages.empty()) {
    for (const AskedSchedule& asked : request.schedules) {
      if (asked.source.written() != nullptr) request.ranks.push_back(asked.source.written()->rank_count());
    }
  }
  if (request.ranks.empty() && request.stages.empty()) {
    TWOBP_CHECK(config.has_value(), "a plan from costs alone needs --ranks or --stages, such as --ranks 2..8");
    request.ranks = {pipeline_shape(config->pipeline).ranks};
  }
  if (!options.micro_batches.empty()) request.micro_batches = parse_counts("--micro-batches", options.micro_batches);
  if (!options.slices.empty()) request.slices = parse_counts("--slices", options.slices);
  if (!options.micro_batch_sizes.empty()) {
    request.micro_batch_sizes = parse_counts("--micro-batch-sizes", options.micro_batch_sizes);
  }
  if (!options.p2.empty()) {
    for (const auto& name : parse_names("--p2", options.p2)) request.policies.push_back(parse_policy(name));
  }
  if (!options.recompute.empty()) request.recompute = parse_names("--recompute", options.recompute);
  request.streams = streams_of(options, config);
  const bool given_links = options.latency >= 0 || !options.bandwidth.empty() || options.share_links > 0;
  request.one_memory =
      !given_links && (!config || (config->pipeline.device == "cpu" &&
                                   (config->pipeline.transport == "auto" || config->pipeline.transport == "threads")));
  if (!options.data_parallel.empty()) {
    request.data_parallel = parse_counts("--data-parallel", options.data_parallel);
  } else if (config && options.devices == 0) {
    request.data_parallel = {static_cast<int>(config->pipeline.data_parallel)};
  }
  if (config) request.experts = config->pipeline.experts;
  request.devices = options.devices;
  request.batch = options.batch;
  request.memory = parse_size("--memory", options.memory);
  request.top = options.all ? 0 : options.top;
  request.search = options.search;
  return request;
}

// Those of the ways to recompute that training takes. The others need not be measured.
std::vector<std::string> trained(std::vector<std::string> modes, const PlanOptions& options) {
  std::erase_if(modes, [&](const std::string& mode) {
    std::vector<std::string> settings = options.overrides;
    settings.insert(settings.end(),
                    {"pipeline.slices=1", "pipeline.slice_lengths=[]", concat("pipeline.recompute=[\"", mode, "\"]")});
    try {
      load_config(options.config, settings);
    } catch (const Error&) {
      return true;
    }
    return false;
  });
  return modes;
}

CostModel costs_of(const PlanOptions& options, const std::optional<Config>& config, const PlanRequest& request) {
  if (!options.costs.empty()) return read_cost_model(options.costs);
  MeasureOptions measure;
  measure.micro_batch_sizes = request.micro_batch_sizes;
  if (measure.micro_batch_sizes.empty()) {
    measure.micro_batch_sizes = sizes_around(config->pipeline.micro_batch_size);
    measure.only_what_fits = true;
  }
  measure.slices = request.slices;
  measure.recompute = request.recompute;
  // The measured costs already include a configured recomputation.
  if (config->pipeline.recompute.empty())
    measure.recompute = trained(measure.recompute.empty() ? recompute_names() : measure.recompute, options);
  measure.seconds = options.seconds;
  const int experts = config->pipeline.experts;
  std::cout << "measuring one layer of each kind" << (experts > 1 ? concat(", experts on ", experts, " replicas") : "")
            << " (twobp profile can save the costs for --costs) ...\n"
            << std::flush;
  return measure_costs(*config, measure);
}

const char* gradients_of(const PlanChoice& choice) {
  return choice.streams ? "streamed" : "kept";
}

// The plan of one number of replicas that share experts.
struct ModelPlan {
  PlanOptions options;
  std::optional<Config> config;
  PlanRequest request;
  CostModel model;
  PlanResult result;
};

struct Row {
  const ModelPlan* of;
  PlanChoice choice;
  double bound;  // seconds, of a step with its split, placement and memory
};

void print_choices(const std::vector<Row>& choices) {
  const auto any = [&](const auto& holds) {
    return std::ranges::any_of(choices, [&](const Row& row) { return holds(row.choice); });
  };
  const bool replicated = any([](const PlanChoice& choice) { return choice.data_parallel > 1; });
  const bool shared = any([](const PlanChoice& choice) { return choice.experts > 1; });
  const bool sliced = any([](const PlanChoice& choice) { return choice.slices > 1; });
  const bool streamed = any([](const PlanChoice& choice) { return choice.streams; });
  std::vector<std::vector<std::string>> rows = {{"schedule", "p2", "ranks", "stages", "M", "size", "recompute",
                                                 "step ms", "bound ms", "samples/s", "idle", "memory"}};
  // From the right to the left, so that the places stay.
  const auto insert = [&](std::vector<std::string>& row, const std::string& slices, const std::string& experts,
                          const std::string& replicas) {
    if (sliced) row.insert(row.begin() + 6, slices);
    if (shared) row.insert(row.begin() + 2, experts);
    if (replicated) row.insert(row.begin() + 2, replicas);
  };
  insert(rows[0], "slices", "experts", "replicas");
  if (streamed) rows[0].insert(rows[0].end() - 5, "gradients");
  for (const auto& [of, choice, bound] : choices) {
    rows.push_back({printable(choice.schedule.name()), std::string(policy_name(choice.policy)),
                    std::to_string(choice.ranks), std::to_string(choice.stages), std::to_string(choice.micro_batches),
                    std::to_string(choice.micro_batch_size), choice.recompute, fixed(choice.step_seconds * 1e3, 2),
                    fixed(bound * 1e3, 2), fixed(choice.samples_per_second(), 2), percent(choice.bubble),
                    format_bytes(choice.peak_bytes)});
    insert(rows.back(), std::to_string(choice.slices), std::to_string(choice.experts),
           std::to_string(choice.data_parallel));
    if (streamed) rows.back().insert(rows.back().end() - 5, gradients_of(choice));
  }
  print_table(rows);
}

// Returns the bytes that activations and stash may take on each rank: the memory left on the rank with the
// most weights. 0 means no cap, as simulated.
int64_t cap_of(const PlanChoice& choice, const CostModel& model, const PlanRequest& request) {
  const double memory = request.memory;
  if (memory <= 0) return 0;
  const std::vector<int> rank_of_stage = schedule_of(choice).rank_of_stage;
  auto costs = stage_costs(with_recompute(model, choice.recompute), choice.split, choice.micro_batch_size,
                           choice.slices, {rank_of_stage, choice.data_parallel, request.one_memory});
  if (choice.streams) costs = without_gradients(std::move(costs));
  const auto caps = caps_for(memory, rank_of_stage, choice.ranks, costs);
  return std::max<int64_t>(1, static_cast<int64_t>(std::floor(*std::min_element(caps.begin(), caps.end()))));
}

// Returns the word for a shell, in quotes if it needs them.
std::string quoted(const std::string& word) {
  const bool plain = std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("_-=.,/:+@%").find(static_cast<char>(c)) != std::string::npos;
  });
  if (plain && !word.empty()) return word;
  std::string text = "'";
  for (const char c : word) c == '\'' ? text += "'\\''" : text += c;
  return text + "'";
}

// "3,2,3"
std::string list_of(const std::vector<int>& values) {
  std::vector<std::string> texts;
  for (const int value : values) texts.push_back(std::to_string(value));
  return join(texts, ",");
}

// The settings of a training.
class TrainingSettings {
 public:
  explicit TrainingSettings(const PlanOptions& options) : all_(options.overrides) {}

  template <typename Value>
  void set(const char* key, const Value& value) {
    const std::string name = concat("pipeline.", key, "=");
    std::erase_if(all_, [&](const std::string& one) { return one.starts_with(name); });
    all_.push_back(concat(name, value));
  }
  const std::vector<std::string>& all() const { return all_; }

 private:
  std::vector<std::string> all_;
};

// What the choice computes, whatever its schedule.
void add_work(const PlanChoice& choice, const CostModel& model, const std::optional<Config>& config,
              TrainingSettings& settings) {
  settings.set("data_parallel", choice.data_parallel);
  settings.set("micro_batch_size", choice.micro_batch_size);
  if (!model.slice_lengths.empty() || (config && config->pipeline.slices > 1)) {
    const auto lengths = slice_lengths(model, choice.slices);
    settings.set("slices", choice.slices);
    settings.set("slice_lengths", lengths.empty() ? "[]" : list_of(lengths));
  }
  // The costs of layers that recompute include the configured recomputation.
  if (choice.recompute != "none") {
    settings.set("recompute", concat("[\"", choice.recompute, "\"]"));
  } else if (!computes_again(model)) {
    settings.set("recompute", "[]");
  }
}

// The file with the choice's schedule, ranks, stages and micro-batches; empty if it has none. A found schedule with
// slices has none, as the text form knows no slices.
std::string file_of(const PlanChoice& choice, const PlanOptions& options) {
  if (choice.found) return choice.slices == 1 ? options.csv : "";
  return choice.schedule.written() != nullptr ? choice.schedule.name() : "";
}

// Returns the command that trains with the choice.
std::string command_of(const PlanChoice& choice, const CostModel& model, const PlanRequest& request,
                       const PlanOptions& options, const std::optional<Config>& config) {
  TrainingSettings settings(options);
  const std::string file = file_of(choice, options);
  const bool named = file.empty();
  const bool again = choice.found && named;  // training searches, and takes the p2 policy that it finds
  settings.set("schedule", named ? choice.schedule.name() : file);
  if (!again) settings.set("p2", policy_name(choice.policy));
  settings.set("ranks", named ? choice.ranks : 0);
  // Training makes stages of frozen layers, and their split, by itself.
  const bool frozen = choice.frozen_stages > 0;
  settings.set("stages", named && !frozen ? choice.stages : 0);
  settings.set("micro_batches", named ? choice.micro_batches : 0);
  add_work(choice, model, config, settings);
  settings.set("split", frozen ? "[]" : list_of(choice.split));
  if (choice.streams || (config && config->pipeline.gradients != "kept"))
    settings.set("gradients", gradients_of(choice));
  settings.set("memory_cap", cap_of(choice, model, request));
  std::string command = concat("twobp train ", options.config.empty() ? "CONFIG" : quoted(options.config), " --set");
  for (const std::string& setting : settings.all()) command += " " + quoted(setting);
  if (again) command += "\nwhich searches again";
  if (again && choice.slices == 1) command += "; with --csv FILE, plan writes the found schedule";
  return command;
}

// Asks training, whatever the schedule, and remembers the answers.
class Refusals {
 public:
  Refusals(const PlanOptions& options, const Config& config, const CostModel& model)
      : options_(options), config_(config), model_(model) {
    if (config.pipeline.experts > 1) data_ = open_data(config.data, config.model.input(), config.train.seed);
  }

  const std::string& of(const PlanChoice& choice) {
    TrainingSettings settings(options_);
    const size_t stages = std::max<size_t>(1, config_->pipeline.split.size());
    settings.set("schedule", "1f1b");  // which all can have
    settings.set("p2", "auto");
    settings.set("ranks", stages);
    settings.set("stages", stages);
    settings.set("micro_batches", choice.micro_batches);
    add_work(choice, model_, config_, settings);
    const auto [why, is_new] = known_.try_emplace(join(settings.all(), "\n"));
    if (!is_new) return why->second;
    try {
      check_whole_batches(load_config(options_.config, settings.all()), choice.micro_batches, data_);
    } catch (const Error& error) {
      why->second = error.what();
    }
    return why->second;
  }

 private:
  const PlanOptions& options_;
  std::optional<Config> config_;
  const CostModel& model_;
  DataSplit data_;
  std::map<std::string, std::string> known_;
};

nlohmann::ordered_json to_json(const PlanChoice& choice, const CostModel& model) {
  return {{"schedule", choice.schedule.name()},
          {"p2", policy_name(choice.policy)},
          {"ranks", choice.ranks},
          {"stages", choice.stages},
          {"frozen_stages", choice.frozen_stages},
          {"micro_batches", choice.micro_batches},
          {"micro_batch_size", choice.micro_batch_size},
          {"slices", choice.slices},
          {"slice_lengths", slice_lengths(model, choice.slices)},
          {"data_parallel", choice.data_parallel},
          {"experts", choice.experts},
          {"recompute", choice.recompute},
          {"gradients", gradients_of(choice)},
          {"split", choice.split},
          {"step_seconds", choice.step_seconds},
          {"samples_per_second", choice.samples_per_second()},
          {"idle_fraction", choice.bubble},
          {"peak_bytes", choice.peak_bytes}};
}

void write_json(const std::vector<Row>& rows, int64_t combinations, int64_t simulated, const std::string& path) {
  const ModelPlan& best = *rows.front().of;
  nlohmann::ordered_json json;
  json["memory_bytes"] = best.request.memory;
  json["combinations"] = combinations;
  json["simulated"] = simulated;
  json["choices"] = nlohmann::ordered_json::array();
  for (const auto& [of, choice, bound] : rows) {
    json["choices"].push_back(to_json(choice, of->model));
    json["choices"].back()["lower_bound_seconds"] = bound;
    json["choices"].back()["memory_cap"] = cap_of(choice, of->model, of->request);
  }
  json["gain"] = {{"speed_up", best.result.speed_up}, {"memory_factor", best.result.memory_factor}};
  write_output("--json", path, json.dump(1) + "\n");
}

// Says how long the tokens of shared experts travel, and why the ranks wait for some of them.
void print_exchanges(const PlanChoice& choice, const CostModel& model, const PlanRequest& request) {
  const PlannedRun run = planned_run(model, choice, request);
  const Simulation step = simulate(run.schedule, run.costs, run.options);
  double travel = 0, waited = 0, w = 0;
  for (const RankSimulation& rank : step.ranks) {
    travel += rank.exchanges / choice.ranks;
    waited += rank.idle[static_cast<int>(IdleCause::kExperts)] / choice.ranks;
  }
  if (travel == 0) return;
  for (int m = 0; m < run.schedule.micro_batches; ++m) {
    for (int stage = 0; stage < run.schedule.stages; ++stage)
      w += run.costs[cost_index(run.schedule, run.costs, stage, m)].backward_p2 / choice.ranks;
  }
  std::cout << "Exchanges of experts take " << milliseconds(travel) << " of a step on each rank, of which "
            << milliseconds(waited) << ", " << percent(waited / step.step_seconds) << " of the step, are waited for: ";
  if (!fills_waits(run.schedule, run.costs, run.options)) {
    std::cout << "with p2 " << policy_name(choice.policy) << ", waits run no W.\n";
  } else if (travel > w) {
    const bool turns = takes_turns(run.schedule, /*fills_waits=*/true);
    std::cout << "all W takes " << milliseconds(w) << (turns ? ", and F runs beside F and I.\n" : ".\n");
  } else {
    std::cout << "before its first I, a step has no W to run meanwhile.\n";
  }
}

// What streaming the gradients of this choice frees and takes: the bytes of each stage, and the step both ways.
void print_gradients(const PlanChoice& choice, const CostModel& model, const PlanRequest& request) {
  if (std::ranges::count(request.streams, true) == 0 || choice.found) return;
  const PlannedRun run = planned_run(model, choice, request);
  const Schedule& schedule = run.schedule;
  std::vector<std::vector<std::string>> rows = {
      {"stage", "gradients", "at once if streamed", concat("stash of ", schedule.micro_batches, " micro-batches")}};
  for (int stage = 0; stage < schedule.stages; ++stage) {
    double stash = 0;
    for (int m = 0; m < schedule.micro_batches; ++m) {
      for (const LayerCost& layer : run.costs[cost_index(schedule, run.costs, stage, m)].layers) stash += layer.stash;
    }
    const StreamedBytes bytes = streamed_bytes(run.costs[static_cast<size_t>(stage)].layers);
    rows.push_back({std::to_string(stage), format_bytes(bytes.freed), format_bytes(bytes.most), format_bytes(stash)});
  }
  std::cout << '\n';
  print_table(rows);
  for (const bool streams : {false, true}) {
    PlanChoice way = choice;
    way.streams = streams;
    if (streams && (way.policy == P2Policy::kOff || way.policy == P2Policy::kPlaced)) continue;
    const PlannedRun other = planned_run(model, way, request);
    const Simulation step = simulate(other.schedule, other.costs, other.options);
    std::cout << "With " << gradients_of(way) << " gradients, the first row takes " << milliseconds(step.step_seconds)
              << " and " << format_bytes(peak_of(step)) << ".\n";
  }
}

void draw(const PlanOptions& options, const CostModel& model, const PlanChoice& choice, const PlanRequest& request) {
  if (options.svg.empty() && options.csv.empty()) return;
  PlannedRun run = planned_run(model, choice, request);
  run.options.timeline = true;
  Simulation simulation = simulate(run.schedule, run.costs, run.options);
  write_pictures({std::move(run.schedule), std::move(simulation)}, options);
}

std::unique_ptr<ModelPlan> plan_of(const PlanOptions& options, const std::optional<Config>& config) {
  auto one = std::make_unique<ModelPlan>();
  one->options = options;
  one->config = config;
  one->request = request_of(options, config);
  one->model = costs_of(options, config, one->request);
  one->request.interconnect = interconnect_of(options, one->model, config);
  if (config) {
    one->request.refusal = [refusals = std::make_shared<Refusals>(one->options, *config, one->model)](
                               const PlanChoice& choice) { return refusals->of(choice); };
  }
  one->result = plan(one->model, one->request);
  return one;
}

// The plan of this many replicas that share experts. Throws Error if training takes no such number.
std::unique_ptr<ModelPlan> plan_with(int experts, PlanOptions options, Config config) {
  const std::vector<int> replicas = request_of(options, config).data_parallel;
  TWOBP_CHECK(replicas.empty() || std::ranges::any_of(replicas, [&](int count) { return count % experts == 0; }),
              "pipeline.experts is ", experts, ", but no number of replicas to be planned (", list_of(replicas),
              ") is a multiple of it");
  if (experts != config.pipeline.experts) {
    options.overrides.push_back(concat("pipeline.experts=", experts));
    if (!options.data_parallel.empty() || options.devices > 0)  // which the plan chooses
      options.overrides.push_back(concat("pipeline.data_parallel=", experts));
    config = load_config(options.config, options.overrides);
  }
  if (experts > 1) check_experts_of_model(config, build_model(config, {.of = experts}));
  return plan_of(options, config);
}

// The numbers of replicas that share experts to be tried; in a search, that of the configuration first.
std::vector<int> experts_of(const PlanOptions& options, const Config& config) {
  if (!options.experts.empty()) return parse_counts("--experts", options.experts);
  if (!options.search || !options.costs.empty()) return {config.pipeline.experts};
  const std::vector<int> replicas = request_of(options, config).data_parallel;
  const int most = replicas.empty() ? options.devices : *std::ranges::max_element(replicas);
  std::vector<int> all = {config.pipeline.experts};
  for (int experts = 1; experts <= most; ++experts)
    if (experts != config.pipeline.experts) all.push_back(experts);
  return all;
}

// A plan for each number of replicas that share experts and that training takes, with the fastest first row first.
std::vector<std::unique_ptr<ModelPlan>> plans_of(const PlanOptions& options) {
  std::vector<std::unique_ptr<ModelPlan>> plans;
  if (options.config.empty()) {
    plans.push_back(plan_of(options, std::nullopt));
    return plans;
  }
  const Config config = load_config(options.config, options.overrides);
  std::vector<std::string> refusals;
  bool refused_own = false;  // the number of the configuration, which a search tries first
  for (const int experts : experts_of(options, config)) {
    try {
      plans.push_back(plan_with(experts, options, config));
    } catch (const Error& error) {  // data that its groups cannot share, for example
      refused_own = refused_own || experts == config.pipeline.experts;
      if (std::ranges::find(refusals, error.what()) == refusals.end()) refusals.emplace_back(error.what());
    }
  }
  // A search tries numbers that nobody asked for.
  if (options.experts.empty()) refusals.resize(refused_own ? 1 : 0);
  TWOBP_CHECK(!plans.empty(), join(refusals, "; "));
  for (const std::string& why : refusals) std::cout << "left out: " << why << '\n';
  std::ranges::stable_sort(plans, std::greater<>(), [](const auto& one) {
    return one->result.best.empty() ? 0.0 : one->result.best.front().samples_per_second();
  });
  return plans;
}

// The rows of all plans: the first one, then the others by their speed.
std::vector<Row> rows_of(const std::vector<std::unique_ptr<ModelPlan>>& plans, int top) {
  std::vector<Row> rows;
  for (const auto& one : plans) {
    for (const PlanChoice& choice : one->result.best) {
      const PlannedRun run = planned_run(one->model, choice, one->request);
      rows.push_back({one.get(), choice, bound_of(run.schedule, run.costs, run.options)});
    }
  }
  if (rows.empty()) return rows;
  std::stable_sort(rows.begin() + 1, rows.end(), [](const Row& a, const Row& b) {
    return a.choice.samples_per_second() > b.choice.samples_per_second();
  });
  if (top > 0) rows.resize(std::min(rows.size(), static_cast<size_t>(top)), rows.front());
  return rows;
}

[[noreturn]] void fail_to_fit(const std::vector<std::unique_ptr<ModelPlan>>& plans, int64_t combinations) {
  const auto bytes = [](const auto& one) { return one->result.smallest->peak_bytes; };
  const ModelPlan& least = **std::ranges::min_element(plans, {}, bytes);
  const PlanChoice& smallest = *least.result.smallest;
  fail("none of ", combinations, " combinations fits into ", format_bytes(least.request.memory),
       " per rank: the smallest memory that suffices is ", format_bytes(smallest.peak_bytes), " (",
       fixed(std::ceil(smallest.peak_bytes), 0), " bytes), with ", smallest.schedule, ", p2 ",
       policy_name(smallest.policy), ", ", smallest.ranks, " ranks, ", smallest.micro_batches, " micro-batches of ",
       smallest.micro_batch_size, smallest.slices > 1 ? concat(" in ", smallest.slices, " slices") : "",
       ", recomputation ", smallest.recompute);
}

}  // namespace

void plan_model(const PlanOptions& options) {
  const auto plans = plans_of(options);
  int64_t combinations = 0, simulated = 0;
  for (const auto& one : plans) {
    combinations += one->result.combinations;
    simulated += one->result.simulated;
  }
  const std::vector<Row> rows = rows_of(plans, options.all ? 0 : options.top);
  if (rows.empty()) fail_to_fit(plans, combinations);
  std::cout << combinations << " combinations, " << simulated << " simulated; the others cannot be among the best\n\n";
  print_choices(rows);
  const ModelPlan& of = *rows.front().of;
  const PlanChoice& best = rows.front().choice;
  std::cout << '\n' << gain_text(of.result) << ".\n";
  print_exchanges(best, of.model, of.request);
  print_gradients(best, of.model, of.request);
  std::cout << "\nThe first row trains with\n"
            << printable_lines(command_of(best, of.model, of.request, of.options, of.config)) << '\n';
  if (!options.json.empty()) write_json(rows, combinations, simulated, options.json);
  draw(options, of.model, best, of.request);
}

}  // namespace twobp
