// Tests twobp profile and twobp plan with a configuration: the cost model between them, tables, memory that
// is too small for everything, and errors.
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::read_file;
using test::TempFolder;

class PlanModel : public ::testing::Test {
 protected:
  void SetUp() override { config_ = folder_.write("config.json", test::tiny_config().dump()); }
  // Returns a file of costs, which are measured once.
  std::string costs() {
    const std::string file = folder_.path("costs.json");
    expect_success({"profile", config_, "--seconds", "0.01", "--micro-batch-sizes", "1,2", "--json", file});
    return file;
  }

  TempFolder folder_;
  std::string config_;
};

TEST_F(PlanModel, MeasuresAndRanks) {
  const std::string file = folder_.path("plan.json");
  const auto run =
      expect_success({"plan", config_, "--seconds", "0.01", "--memory", "1GiB", "--json", file, "--top", "5"});
  for (const char* part : {"samples/s", "2BP", "combinations", "bound ms", "--set pipeline.schedule="}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << "no \"" << part << "\" in:\n" << run.out;
  }
  const json plan = json::parse(read_file(file));
  ASSERT_EQ(plan.at("choices").size(), 5U);
  // The fastest comes first, except that the first row may be there because it needs less memory.
  double before = plan.at("choices")[0].at("samples_per_second").get<double>() / 0.99;
  for (const json& choice : plan.at("choices")) {
    EXPECT_EQ(choice.at("ranks"), 2) << "as configured";
    const double speed = choice.at("samples_per_second");
    EXPECT_LE(speed, before);
    EXPECT_NEAR(speed,
                choice.at("micro_batches").get<double>() * choice.at("micro_batch_size").get<double>() /
                    choice.at("step_seconds").get<double>(),
                1e-6 * speed);
    EXPECT_LE(choice.at("peak_bytes").get<double>(), 1073741824.0);
    EXPECT_GT(choice.at("lower_bound_seconds").get<double>(), 0);
    EXPECT_LE(choice.at("lower_bound_seconds").get<double>(), choice.at("step_seconds").get<double>() * 1.000001);
    int layers = 0;
    for (const json& count : choice.at("split")) layers += count.get<int>();
    EXPECT_EQ(layers, 6);
    if (&choice != &plan.at("choices")[0]) before = speed;
  }
  EXPECT_GE(plan.at("gain").at("speed_up").get<double>(), 1);
  EXPECT_GT(plan.at("gain").at("memory_factor").get<double>(), 0);
}

// The peak bytes of each step of a run, by stage.
std::vector<json> peaks_in(const std::string& metrics) {
  std::vector<json> peaks;
  for (const std::string& line : test::lines_of(read_file(metrics))) {
    const json step = json::parse(line);
    if (step.contains("peak_bytes")) peaks.push_back(step.at("peak_bytes"));
  }
  return peaks;
}

// Returns the words that follow "twobp train CONFIG" in the program's output.
std::vector<std::string> command_in(const std::string& out, const std::string& config) {
  const std::string begin = "twobp train " + config + " ";
  const size_t at = out.find(begin);
  EXPECT_NE(at, std::string::npos) << out;
  std::vector<std::string> words = {"train", config};
  std::string word;
  for (const char c : out.substr(at + begin.size(), out.find('\n', at) - at - begin.size()) + " ") {
    if (c == '\'') continue;
    if (c != ' ') {
      word += c;
    } else if (!word.empty()) {
      words.push_back(word);
      word.clear();
    }
  }
  return words;
}

// The command that the program names can train, with the split and the cap that were simulated.
TEST_F(PlanModel, ItsChoiceTrains) {
  const std::string file = folder_.path("plan.json");
  const auto run =
      expect_success({"plan", config_, "--costs", costs(), "--schedule", "zb-v", "--p2", "placed", "--recompute",
                      "both", "--micro-batch-sizes", "2", "--memory", "1GiB", "--json", file});
  std::vector<std::string> arguments = command_in(run.out, config_);
  EXPECT_GE(arguments.size(), 12U) << run.out;
  expect_success(arguments);
  arguments.emplace_back("--print-config");
  const json pipeline = json::parse(expect_success(arguments).out).at("pipeline");
  const json choice = json::parse(read_file(file)).at("choices").at(0);
  EXPECT_EQ(pipeline.at("split"), choice.at("split"));
  EXPECT_EQ(pipeline.at("recompute"), json::array({"both"}));
  const int64_t cap = std::stoll(pipeline.at("memory_cap").get<std::string>());
  EXPECT_EQ(cap, choice.at("memory_cap"));
  EXPECT_LT(cap, int64_t{1} << 30U) << "the weights are not in it";
  EXPECT_GT(cap, int64_t{1} << 29U);
}

// The command has the file of the searched schedule, and the overrides.
TEST_F(PlanModel, CommandAgreesWithTheTable) {
  const std::string file = folder_.path("plan.json");
  const std::string picture = folder_.path("best.svg");
  const std::string csv = folder_.path("best.csv");
  const std::vector<std::string> given = {"plan",     config_,           "--set", "train.seed=7", "--costs",
                                          costs(),    "--micro-batches", "4",     "--recompute",  "none",
                                          "--search", "--json",          file};
  const auto with = [&](std::vector<std::string> all, const std::vector<std::string>& more) {
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto run = expect_success(with(given, {"--svg", picture, "--csv", csv}));
  EXPECT_EQ(read_file(picture).rfind("<svg ", 0), 0U);
  const json best = json::parse(read_file(file)).at("choices").at(0);
  std::vector<std::string> arguments = command_in(run.out, config_);
  expect_success(arguments);
  arguments.emplace_back("--print-config");
  const json config = json::parse(expect_success(arguments).out);
  EXPECT_EQ(config.at("train").at("seed"), 7);
  EXPECT_EQ(config.at("pipeline").at("p2"), best.at("p2"));
  EXPECT_EQ(config.at("pipeline").at("schedule"), best.at("schedule") == "auto" ? json(csv) : best.at("schedule"));
  // Without the file, training searches again.
  const std::vector<std::string> again = command_in(expect_success(given).out, config_);
  EXPECT_EQ(json::parse(expect_success(with(again, {"--print-config"})).out).at("pipeline").at("schedule"),
            best.at("schedule"));
}

TEST_F(PlanModel, TakesFilesAndPolicies) {
  const std::string csv = folder_.path("mine.csv");
  expect_success(
      {"plan", "--schedule", "zb-h1", "--stages", "2", "--micro-batches", "4", "--p2", "placed", "--csv", csv});
  const std::string file = folder_.path("plan.json");
  const std::vector<std::string> common = {"plan", config_,       "--costs", costs(), "--micro-batch-sizes",
                                           "2",    "--recompute", "none"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = common;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  expect_success(with({"--schedule", csv + ",zb-h1@off,1f1b", "--micro-batches", "4", "--all", "--json", file}));
  std::map<std::pair<std::string, std::string>, json> rows;
  const json written = json::parse(read_file(file));
  for (const json& choice : written.at("choices")) rows[{choice.at("schedule"), choice.at("p2")}] = choice;
  EXPECT_EQ(rows.size(), 3U + 1U + 4U) << "the policies of the file, of zb-h1 and of 1f1b";
  for (const char* key : {"step_seconds", "peak_bytes", "split", "ranks"}) {
    EXPECT_EQ(rows.at({csv, "off"}).at(key), rows.at({"zb-h1", "off"}).at(key)) << key;
  }
  // The file gives the numbers that the command line leaves out, and its row can train.
  const auto run = expect_success(with({"--schedule", csv, "--p2", "placed", "--json", file}));
  EXPECT_EQ(json::parse(read_file(file)).at("choices")[0].at("micro_batches"), 4);
  expect_success(with({"--schedule", csv + "@off", "--json", file}));
  const json off = json::parse(read_file(file)).at("choices");
  EXPECT_EQ(off.size(), 1U) << "the file's own policy";
  EXPECT_EQ(off.at(0).at("p2"), "off");
  expect_success(command_in(run.out, config_));
  expect_one_message(with({"--schedule", csv, "--ranks", "3"}), {csv, "2 stages on 2 ranks"});
  expect_one_message(with({"--schedule", csv, "--micro-batches", "8"}), {csv, "4 micro-batches"});
  expect_one_message(with({"--schedule", "1f1b@soon"}), {"'soon'"});
  expect_one_message(with({"--schedule", "1f1b@placed"}), {"'1f1b'", "placed"});
}

// Without a memory limit there was no cap.
TEST_F(PlanModel, ItsChoiceHasNoCapWithoutMemory) {
  const auto run = expect_success({"plan", "--costs", costs(), "--ranks", "2", "--schedule", "1f1b"});
  EXPECT_NE(run.out.find(" pipeline.memory_cap=0"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find(" pipeline.split="), std::string::npos) << run.out;
}

// The cost model names recomputation in the same way as the measurement of layers.
TEST_F(PlanModel, MeasuresEveryRecomputation) {
  const std::string file = folder_.path("costs.json");
  expect_success(
      {"profile", config_, "--seconds", "0.01", "--recompute", "none,activations,derivatives,both", "--json", file});
  const json kinds = json::parse(read_file(file)).at("kinds");
  for (const char* mode : {"activations", "derivatives", "both"}) {
    EXPECT_TRUE(kinds.contains(std::string("mlp+") + mode)) << kinds.dump(1);
  }
  // Layers that the configuration recomputes must not be measured with a second recomputation.
  const std::vector<std::string> twice = {"--set", "pipeline.recompute=both", "--seconds", "0.01"};
  const auto with = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), twice.begin(), twice.end());
    return arguments;
  };
  expect_one_message(with({"profile", config_, "--recompute", "both"}), {"'both'", "pipeline.recompute=[]"});
  expect_one_message(with({"plan", config_, "--recompute", "both"}), {"'both'", "pipeline.recompute=[]"});
  expect_success(with({"plan", config_, "--json", file}));
  const json written = json::parse(read_file(file));
  for (const json& choice : written.at("choices")) {
    EXPECT_EQ(choice.at("recompute"), "none");
  }
}

// If the data has too few samples for a default size, that size is left out.
TEST_F(PlanModel, MeasuresOnlySizesThatTheDataHas) {
  json small = test::tiny_config();
  folder_.write("text.txt", "In the beginning was the word.");
  small["model"]["vocab"] = 256;
  small["data"] = {{"text", folder_.path("text.txt")}, {"sequence", 8}, {"held_out", 0}};
  const std::string config = folder_.write("small.json", small.dump());
  const std::string file = folder_.path("plan.json");
  expect_success({"plan", config, "--seconds", "0.01", "--schedule", "gpipe", "--json", file});
  const json written = json::parse(read_file(file));
  for (const json& choice : written.at("choices")) {
    EXPECT_LE(choice.at("micro_batch_size"), 3) << "the data has three samples";
  }
  expect_one_message({"plan", config, "--seconds", "0.01", "--micro-batch-sizes", "2,4"}, {"4", "3"});
}

// Clipping needs all gradients at once: plan and train say that they are kept, and why.
TEST_F(PlanModel, SaysWhyGradientsAreKept) {
  const std::string kept = "gradients are kept until the end of a step (train.clip_norm needs the norm of all";
  const std::vector<std::string> clipped = {config_, "--set", "train.clip_norm=1", "pipeline.gradients=auto",
                                            "train.steps=1"};
  for (const std::string command : {"plan", "train"}) {
    std::vector<std::string> arguments = {command};
    arguments.insert(arguments.end(), clipped.begin(), clipped.end());
    if (command == "plan")
      arguments.insert(arguments.end(), {"--seconds", "0.01", "--ranks", "1", "--recompute", "none"});
    const std::string out = expect_success(arguments).out;
    EXPECT_NE(out.find(kept), std::string::npos) << out;
  }
  expect_one_message({"plan", config_, "--set", "train.clip_norm=1", "--gradients", "kept,streamed"},
                     {"--gradients has 'streamed'", "train.clip_norm"});
}

// Planned with both, the bytes of each stage that decide, and the first row both ways.
TEST_F(PlanModel, ComparesKeptAndStreamedGradients) {
  const auto out_of = [&](const std::string& gradients) {
    return expect_success({"plan", config_, "--gradients", gradients, "--p2", "fill", "--seconds", "0.01", "--ranks",
                           "2", "--schedule", "1f1b", "--micro-batches", "4", "--recompute", "none"})
        .out;
  };
  const std::string out = out_of("kept,streamed");
  test::expect_contains(out,
                        {"at once if streamed", "stash of 4 micro-batches", "With kept gradients, the first row takes ",
                         "With streamed gradients, the first row takes "});
  EXPECT_EQ(out_of("kept").find("at once if streamed"), std::string::npos);
}

// A memory in which gradients cannot be kept: they are streamed, and the run stays within it.
TEST_F(PlanModel, StreamsGradientsWhereTheMemoryNeedsIt) {
  const std::string file = folder_.path("plan.json");
  const std::vector<std::string> given = {"plan",
                                          config_,
                                          "--seconds",
                                          "0.01",
                                          "--ranks",
                                          "1",
                                          "--schedule",
                                          "1f1b",
                                          "--p2",
                                          "fill",
                                          "--micro-batches",
                                          "2",
                                          "--micro-batch-sizes",
                                          "1",
                                          "--recompute",
                                          "none",
                                          "--all",
                                          "--json",
                                          file,
                                          "--set",
                                          "model.dim=128",
                                          "model.hidden=320",
                                          "pipeline.gradients=auto"};
  const auto plan = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = given;
    arguments.insert(arguments.end(), more.begin(), more.end());
    const std::string out = expect_success(arguments).out;
    return std::pair(out, json::parse(read_file(file)).at("choices"));
  };
  std::map<std::string, double> bytes;
  for (const json& choice : plan({}).second) bytes[choice.at("gradients")] = choice.at("peak_bytes");
  ASSERT_LT(1.02 * bytes.at("streamed"), bytes.at("kept"));
  const auto memory = static_cast<int64_t>(1.01 * bytes.at("streamed"));
  const auto [out, choices] = plan({"--memory", std::to_string(memory)});
  ASSERT_EQ(choices.size(), 1U);
  EXPECT_EQ(choices[0].at("gradients"), "streamed");
  std::vector<std::string> train = command_in(out, config_);
  const auto of_gradients = [](const std::string& word) { return word.starts_with("pipeline.gradients="); };
  EXPECT_EQ(std::ranges::count_if(train, of_gradients), 1);
  const std::string metrics = folder_.path("metrics.jsonl");
  train.insert(train.end(), {"train.steps=2", "--metrics", metrics});
  EXPECT_EQ(expect_success(train).out.find("exceeds the cap"), std::string::npos);
  const std::vector<json> peaks = peaks_in(metrics);
  EXPECT_EQ(peaks.size(), 2U);
  for (const json& bytes : peaks) EXPECT_LE(bytes.at(0).get<int64_t>(), memory);
}

// The peak of a run is the planned one, weights and all. (W that fills waits would depend on times.)
TEST_F(PlanModel, KnowsThePeakOfARun) {
  const std::string file = folder_.path("plan.json");
  const std::string metrics = folder_.path("metrics.jsonl");
  const std::vector<std::pair<json, std::vector<std::string>>> cases = {
      {{{"type", "llama"}, {"heads", 2}, {"hidden", 96}, {"tied", true}}, {}},
      {{{"type", "llama"}, {"heads", 2}, {"hidden", 96}, {"tied", true}}, {"train.precision=bf16"}},
      {{{"type", "llama"}, {"heads", 2}, {"hidden", 96}}, {"optimizer.shard=true", "pipeline.data_parallel=2"}},
      {{{"type", "gpt2"}, {"heads", 2}}, {}},
      {{{"type", "mamba"}}, {}}};
  for (const auto& [model, settings] : cases) {
    json config = test::tiny_config();
    config["model"] = model;
    config["model"].update({{"dim", 64}, {"layers", 2}, {"vocab", 256}});
    config["data"]["sequence"] = 32;
    config_ = folder_.write("config.json", config.dump());
    for (const std::string ranks : {"1", "2"}) {
      // Cut inside of a residual block, a gradient is with W of one rank and I of another, and is planned with one.
      if (model["type"] == "mamba" && ranks == "2") continue;
      std::vector<std::string> arguments = split(
          "plan CONFIG --seconds 0.01 --schedule gpipe --p2 end --micro-batches 3 --micro-batch-sizes 2 "
          "--recompute none --json JSON --ranks RANKS --set train.seed=7",
          ' ');
      std::ranges::replace(arguments, "CONFIG", config_);
      std::ranges::replace(arguments, "JSON", file);
      std::ranges::replace(arguments, "RANKS", ranks);
      arguments.insert(arguments.end(), settings.begin(), settings.end());
      const std::string out = expect_success(arguments).out;
      const double planned = json::parse(read_file(file)).at("choices").at(0).at("peak_bytes");
      std::vector<std::string> train = command_in(out, config_);
      train.insert(train.end(), {"train.steps=3", "--metrics", metrics});
      expect_success(train);
      double peak = 0;
      for (const json& of_stages : peaks_in(metrics)) {
        for (const json& bytes : of_stages) peak = std::max(peak, bytes.get<double>());
      }
      EXPECT_NEAR(peak, planned, 0.01 * peak) << model << ", ranks " << ranks;
    }
  }
}

// An option that would change nothing is refused.
TEST_F(PlanModel, RefusesOptionsWithoutEffect) {
  const std::string file = costs();
  const auto refuse = [&](std::vector<std::string> arguments, const std::string& option, const std::string& value,
                          const std::string& why) {
    arguments.insert(arguments.begin(), "plan");
    arguments.push_back(option);
    if (!value.empty()) arguments.push_back(value);
    expect_one_message(arguments, {option, "has no effect", why});
  };
  for (const auto& [option, value] : std::vector<std::pair<std::string, std::string>>{
           {"--forward", "2"}, {"--backward-p2", "2"}, {"--p2-units", "2"}}) {
    refuse({config_}, option, value, "configuration");
    refuse({"--costs", file, "--ranks", "2"}, option, value, "--costs");
  }
  for (const auto& [option, value] : std::vector<std::pair<std::string, std::string>>{{"--set", "train.steps=2"},
                                                                                      {"--recompute", "both"},
                                                                                      {"--micro-batch-sizes", "1"},
                                                                                      {"--top", "3"},
                                                                                      {"--bandwidth", "1GB"},
                                                                                      {"--devices", "4"},
                                                                                      {"--seconds", "1"}}) {
    refuse({"--stages", "2"}, option, value, "configuration");
  }
  refuse({config_, "--costs", file}, "--seconds", "1", "--costs");
  refuse({"--costs", file, "--ranks", "2"}, "--set", "train.steps=2", "configuration");
  refuse({"--stages", "2"}, "--no-ops", "", "--json");
  refuse({"--stages", "2"}, "--svg-end", "3", "--svg");
}

// Slices are among what is compared, from a configuration and from a file, and the command trains with them.
TEST_F(PlanModel, ComparesSlices) {
  const std::string file = folder_.path("sliced.json");
  const std::string out = folder_.path("plan.json");
  const std::vector<std::string> sequence = {"--set", "data.sequence=64"};
  const auto with = [&](std::vector<std::string> arguments, bool set = true) {
    if (set) arguments.insert(arguments.end(), sequence.begin(), sequence.end());
    return arguments;
  };
  const auto profiled =
      expect_success(with({"profile", config_, "--seconds", "0.01", "--slices", "1,2,4", "--json", file}));
  EXPECT_NE(profiled.out.find("the model in 4 slices"), std::string::npos) << profiled.out;
  const auto numbers = [&] {
    std::set<int> slices;
    const json plan = json::parse(read_file(out));
    for (const json& choice : plan.at("choices")) {
      slices.insert(choice.at("slices").get<int>());
      EXPECT_EQ(choice.at("slice_lengths").size() > 1, choice.at("slices").get<int>() > 1);
      EXPECT_GT(choice.at("lower_bound_seconds").get<double>(), 0);
    }
    return slices;
  };
  expect_success({"plan", "--costs", file, "--ranks", "2", "--all", "--json", out});
  EXPECT_EQ(numbers(), (std::set<int>{1, 2, 4}));
  const auto run = expect_success({"plan", "--costs", file, "--ranks", "2", "--slices", "4", "--micro-batches", "1",
                                   "--micro-batch-sizes", "2", "--json", out});
  EXPECT_EQ(numbers(), (std::set<int>{4}));
  EXPECT_NE(run.out.find("slices"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("pipeline.slices=4 pipeline.slice_lengths="), std::string::npos) << run.out;
  expect_success(with({"plan", config_, "--seconds", "0.01", "--slices", "2..3", "--all", "--json", out}));
  EXPECT_EQ(numbers(), (std::set<int>{2, 3}));
  expect_success(with({"plan", config_, "--seconds", "0.01", "--all", "--json", out, "--set", "pipeline.slices=2"}));
  EXPECT_EQ(numbers(), (std::set<int>{1, 2})) << "the configured number";
  // What the last line says trains.
  const size_t begin = run.out.find("twobp train CONFIG --set ");
  ASSERT_NE(begin, std::string::npos) << run.out;
  std::istringstream settings(run.out.substr(begin + std::string("twobp train CONFIG ").size()));
  std::vector<std::string> train = {"train", config_};
  for (std::string word; settings >> word;) {
    std::erase(word, '\'');
    train.push_back(word);
  }
  train.insert(train.end(), {"data.sequence=64", "train.steps=1"});
  EXPECT_NE(expect_success(train).out.find("in 4 slices"), std::string::npos);

  expect_one_message({"plan", "--costs", file, "--ranks", "2", "--slices", "3"}, {"3 slices", "1, 2, 4"});
  expect_one_message(with({"plan", config_, "--slices", "9"}), {"9", "64 positions", "at most 8 slices"});
  expect_one_message(with({"profile", config_, "--slices", "0"}), {"--slices", "at least 1"});
  expect_one_message({"plan", "--costs", file, "--ranks", "2", "--slices", "4", "--memory", "1kB"},
                     {"smallest memory", "in 4 slices"});
}

// A plan of experts that replicas share simulates their exchanges, and asks training what it refuses.
TEST_F(PlanModel, KnowsExperts) {
  json config = test::tiny_config();
  config["model"] = {{"type", "qwen3_moe"},    {"dim", 16},  {"layers", 2}, {"heads", 2}, {"hidden", 8}, {"experts", 4},
                     {"experts_per_token", 2}, {"vocab", 32}};
  config["data"]["held_out"] = 0;
  config["pipeline"]["data_parallel"] = config["pipeline"]["experts"] = 2;
  const std::string file = folder_.write("experts.json", config.dump());
  const std::string out = folder_.path("plan.json");
  const auto planned = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"plan", file, "--seconds", "0.01", "--ranks", "1,2", "--all", "--json", out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const auto explains = [](const test::Finished& run, const char* why) {
    const size_t at = run.out.find("Exchanges of experts take ");
    ASSERT_NE(at, std::string::npos) << run.out;
    EXPECT_NE(run.out.find(why, at), std::string::npos) << run.out;
  };
  explains(expect_success(planned({"--p2", "off"})), "waits run no W");
  explains(expect_success(planned({"--p2", "fill", "--data-latency", "1e-7", "--data-parallel", "2"})),
           "before its first I");
  const auto run = expect_success(planned({"--p2", "fill", "--data-latency", "0.01", "--data-parallel", "1..4"}));
  explains(run, "all W takes");
  std::set<std::string> recompute;
  std::set<int> replicas;
  const json plan = json::parse(read_file(out));
  for (const json& choice : plan.at("choices")) {
    recompute.insert(choice.at("recompute"));
    replicas.insert(choice.at("data_parallel").get<int>());
    EXPECT_GT(choice.at("step_seconds").get<double>(), 0.01 * 2 * 4) << "exchanges of the first F and the last I";
  }
  EXPECT_EQ(recompute, (std::set<std::string>{"activations", "none"}));
  EXPECT_EQ(replicas, (std::set<int>{2, 4}));
  std::vector<std::string> train = command_in(run.out, file);
  train.emplace_back("--print-config");
  expect_success(train);
  expect_one_message(planned({"--data-parallel", "3"}), {"pipeline.experts is 2", "(3)", "multiple"});
  expect_one_message(planned({"--recompute", "derivatives"}),
                     {"no combination", "pipeline.experts is 2", "derivatives"});
  expect_one_message(planned({"--micro-batches", "5"}), {"no combination", "last batch", "samples"});
  // A search also tries how many replicas share them. Here each exchange takes long.
  const std::vector<std::string> few = {
      "--search", "--schedule",      "1f1b", "--p2",           "fill", "--recompute", "none", "--micro-batches",
      "2",        "--data-parallel", "2",    "--data-latency", "0.01"};
  train = command_in(expect_success(planned(few)).out, file);
  std::set<int> experts;
  const json searched = json::parse(read_file(out)).at("choices");
  for (const json& choice : searched) experts.insert(choice.at("experts").get<int>());
  EXPECT_EQ(experts, (std::set<int>{1, 2}));
  EXPECT_EQ(searched[0].at("experts"), 1);
  train.emplace_back("--print-config");
  EXPECT_EQ(json::parse(expect_success(train).out).at("pipeline").at("experts"), 1);
  expect_one_message({"plan", file, "--seconds", "0.01", "--experts", "3"}, {"pipeline.experts is 3", "multiple"});
  // Of several numbers, those that do not divide are left out, and named.
  const auto left_out = expect_success({"plan", file, "--seconds", "0.01", "--ranks", "1", "--experts", "1..4", "--p2",
                                        "fill", "--recompute", "none", "--all", "--json", out});
  test::expect_contains(left_out.out, {"left out: pipeline.experts is 3", "left out: pipeline.experts is 4"});
  experts.clear();
  const json with_two = json::parse(read_file(out)).at("choices");
  for (const json& choice : with_two) experts.insert(choice.at("experts").get<int>());
  EXPECT_EQ(experts, (std::set<int>{1, 2}));
  expect_one_message({"plan", file, "--ranks", "1", "--data-parallel", "2", "--experts", "3,4"},
                     {"pipeline.experts is 3", "pipeline.experts is 4", "multiple"});
  expect_one_message({"plan", file, "--ranks", "1", "--data-parallel", "8", "--experts", "8"},
                     {"pipeline.experts is 8", "does not divide the 4 experts"});
  // A model without experts.
  expect_one_message({"plan", config_, "--data-parallel", "2", "--experts", "2"},
                     {"pipeline.experts is 2", "no layer of the model has experts"});
  // A search names no number that nobody asked for.
  const auto none = expect_one_message({"plan", config_, "--devices", "8", "--ranks", "3", "--search"}, {"8 devices"});
  EXPECT_EQ(none.err.find("pipeline.experts"), std::string::npos) << none.err;
}

TEST_F(PlanModel, ReadsCostsWithoutAConfiguration) {
  const std::string file = costs();
  const auto run = expect_success({"plan", "--costs", file, "--ranks", "1..3", "--batch", "8", "--micro-batches", "4,8",
                                   "--svg", folder_.path("best.svg")});
  EXPECT_NE(run.out.find("samples/s"), std::string::npos) << run.out;
  EXPECT_NE(read_file(folder_.path("best.svg")).find("<svg"), std::string::npos);
  expect_one_message({"plan", "--costs", file}, {"--ranks"});
}

TEST_F(PlanModel, SaysTheSmallestMemory) {
  const std::string file = costs();
  const auto run = test::run_program({"plan", "--costs", file, "--ranks", "2", "--memory", "1kB"});
  EXPECT_NE(run.exit_code, 0);
  const size_t begin = run.err.find("the smallest memory that suffices is");
  ASSERT_NE(begin, std::string::npos) << run.err;
  const size_t number = run.err.find('(', begin) + 1;
  const std::string bytes = run.err.substr(number, run.err.find(' ', number) - number);
  expect_success({"plan", "--costs", file, "--ranks", "2", "--memory", bytes});
}

TEST_F(PlanModel, RefusesImpossibleProblems) {
  const std::string file = costs();
  expect_one_message({"plan", "--costs", file, "--ranks", "4..2"}, {"--ranks", "4..2", "empty"});
  expect_one_message({"plan", "--costs", file, "--ranks", "2,"}, {"--ranks", "whole number"});
  expect_one_message({"plan", "--costs", file, "--ranks", "2", "--micro-batches", "0"},
                     {"--micro-batches", "at least 1"});
  expect_one_message({"plan", "--costs", file, "--ranks", "2", "--memory", "0"}, {"--memory", "above 0"});
  expect_one_message({"plan", "--costs", file, "--ranks", "2", "--memory", "lots"}, {"--memory", "lots"});
  expect_one_message({"plan", "--costs", file, "--ranks", "2", "--schedule", "1f1b,zb"}, {"zb", "did you mean"});
  expect_one_message({"plan", "--costs", file, "--ranks", "9"}, {"6 layers"});
  expect_one_message({"plan", "--costs", folder_.path("none.json"), "--ranks", "2"}, {"none.json"});
  expect_one_message({"plan", "--costs", folder_.path(""), "--ranks", "2"}, {"folder"});
  expect_one_message({"plan", "--memory", "1GiB"}, {"--memory", "configuration", "micro-batches"});
  json broken = json::parse(read_file(file));
  broken["kinds"]["mlp"]["costs"][0]["forward_seconds"] = -1;
  const std::string bad = folder_.write("bad.json", broken.dump());
  expect_one_message({"plan", "--costs", bad, "--ranks", "2"}, {"bad.json", "mlp", "forward_seconds", "negative"});
  expect_one_message({"profile", config_, "--micro-batch-sizes", "1000000"}, {"1000000", "samples"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
