// Tests `twobp bench`, `twobp plan`, `twobp profile`, --help and --version.
#include <set>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::read_file;
using test::TempFolder;

class Bench : public test::InAFolder {
 protected:
  // The report of a run of the tiny configuration, with one step for each row and round.
  json report(std::vector<std::string> arguments, int rounds = 1) {
    const std::string file = path("rows.json");
    arguments.insert(arguments.begin(), {"bench", config(test::tiny_config())});
    arguments.insert(arguments.end(), {"--repeat", std::to_string(rounds), "--steps", "1", "--json", file});
    out_ = expect_success(arguments).out;
    return json::parse(read_file(file));
  }
  json rows(const std::vector<std::string>& arguments, int rounds = 1) { return report(arguments, rounds).at("rows"); }

  std::string out_;  // of the last run
};

TEST_F(Bench, RowsHaveAllKeys) {
  const json all =
      report({"--schedules", "1f1b,gpipe", "--p2", "off,end,fill", "--micro-batches", "2,3"}, /*rounds=*/2);
  EXPECT_TRUE(all.contains("machine"));
  EXPECT_TRUE(all.contains("config"));
  const json& rows = all.at("rows");
  ASSERT_EQ(rows.size(), 2U * 3U * 2U);
  std::set<std::string> combinations;
  for (const json& row : rows) {
    combinations.insert(concat(row.at("schedule"), row.at("p2"), row.at("micro_batches")));
    EXPECT_EQ(row.at("p2_batching"), "loop");
    EXPECT_EQ(row.at("stages"), 2);
    const double seconds = row.at("step_seconds").get<double>();
    EXPECT_GT(seconds, 0);
    const double tokens = row.at("micro_batches").get<double>() * 2 * 8;
    EXPECT_NEAR(row.at("tokens_per_second").get<double>() * seconds, tokens, 1e-6 * tokens);
    for (const char* key : {"idle_fraction", "idle_predicted", "peak_bytes"}) EXPECT_EQ(row.at(key).size(), 2U) << key;
    EXPECT_GT(row.at("product_share").get<double>(), 0);
    EXPECT_LT(row.at("product_share").get<double>(), 1);
    EXPECT_GT(row.at("product_gflops").get<double>(), 0);
    EXPECT_GT(row.at("p2_gflops").get<double>(), 0);
    for (const auto& idle : row.at("idle_fraction")) {
      EXPECT_GE(idle.get<double>(), 0);
      EXPECT_LE(idle.get<double>(), 1);
    }
    for (const auto& idle : row.at("idle_predicted")) {
      EXPECT_GE(idle.get<double>(), 0);
      EXPECT_LE(idle.get<double>(), 1);
    }
  }
  EXPECT_EQ(combinations.size(), rows.size()) << "each combination once";
}

TEST_F(Bench, TakesTheConfiguredSchedule) {
  EXPECT_EQ(rows({"--set", "pipeline.schedule=gpipe", "--p2", "off"}).at(0).at("schedule"), "gpipe");
}

// Training leaves out a batch without a counted label.
TEST_F(Bench, LeavesOutABatchWithoutACountedLabel) {
  json content = test::tiny_config();
  content["data"] = {{"arrays", path(".")}, {"sequence", 8}, {"held_out", 0}, {"shuffle", false}};
  std::vector<int64_t> labels(size_t{16} * 8, 5);
  folder_.write("input_ids.npy", test::npy_file<int64_t>("<i8", "(16, 8)", labels));
  std::fill_n(labels.begin(), 8 * 8, -100);
  folder_.write("labels.npy", test::npy_file<int64_t>("<i8", "(16, 8)", labels));
  expect_success({"bench", config(content), "--micro-batches", "1,2", "--steps", "1"});
}

TEST_F(Bench, RowsNameTheirSettings) {
  const json both = rows(
      {"--ways", "pipeline.schedule=zb-v pipeline.p2=placed pipeline.stages=4",
       "pipeline.schedule=1f1b pipeline.p2=fill pipeline.split=[1,5] pipeline.memory_cap=0", "--micro-batches", "4"},
      /*rounds=*/2);
  ASSERT_EQ(both.size(), 2U);
  EXPECT_EQ(both[0].at("schedule"), "zb-v");
  EXPECT_EQ(both[0].at("p2"), "placed");
  EXPECT_EQ(both[0].at("stages"), 4);
  EXPECT_EQ(both[1].at("split"), (std::vector<int>{1, 5}));
  EXPECT_EQ(both[1].at("memory_cap"), "0");
  for (const json& row : both) EXPECT_EQ(row.at("step_seconds_all").size(), 2U);
  // The policy is that of training where none is named.
  const json usual = rows({"--ways", "pipeline.micro_batches=2", "pipeline.slices=2 pipeline.slice_lengths=[3,5]"});
  EXPECT_EQ(usual[0].at("p2"), "fill");
  EXPECT_EQ(usual[0].at("slices"), 1);
  EXPECT_EQ(usual[1].at("slices"), 2);
  const std::string file = config(test::tiny_config());
  expect_one_message({"bench", file, "--ways", "pipeline.shedule=1f1b"}, {"pipeline.shedule", "pipeline.schedule"});
  expect_one_message({"bench", file, "--ways", "x", "--schedules", "1f1b"}, {"--schedules excludes --ways"});
}

// The model is the LLaMa of tiny_config: 2 blocks of dim 16, hidden 24, 2 heads, vocabulary 32, in float32.
TEST(Profile, MeasuresTheCostsOfEveryKind) {
  const TempFolder folder;
  const std::string config = folder.write("config.json", test::tiny_config().dump());
  const std::string file = folder.path("costs.json");
  const auto run = expect_success({"profile", config, "--seconds", "0.01", "--json", file});
  for (const char* kind : {"embedding", "attention", "mlp", "head", "the model"}) {
    EXPECT_NE(run.out.find(kind), std::string::npos) << run.out;
  }
  const json costs = json::parse(read_file(file));
  ASSERT_EQ(costs.at("layers").size(), 6U);
  EXPECT_EQ(costs.at("layers")[1].at("kind"), "attention");
  ASSERT_EQ(costs.at("kinds").size(), 4U);
  const json& kind = costs.at("kinds").at("mlp");
  EXPECT_EQ(kind.at("parameters"), 16 + 2 * 24 * 16 + 16 * 24);
  EXPECT_EQ(kind.at("parameter_bytes"), 4 * kind.at("parameters").get<int64_t>());
  EXPECT_EQ(kind.at("gradient_bytes"), kind.at("parameter_bytes"));
  EXPECT_EQ(kind.at("optimizer_bytes"), 2 * kind.at("parameter_bytes").get<int64_t>()) << "AdamW";
  EXPECT_GT(kind.at("optimizer_seconds").get<double>(), 0);
  EXPECT_GT(costs.at("link").at("latency_seconds").get<double>(), 0);
  const json& mlp = kind.at("costs").at(0);
  EXPECT_GT(mlp.at("forward_seconds").get<double>(), 0);
  EXPECT_GT(mlp.at("backward_p1_seconds").get<double>(), 0);
  EXPECT_GT(mlp.at("backward_p2_seconds").get<double>(), 0);
  const int64_t rows = mlp.at("micro_batch_size").get<int64_t>() * 8;
  EXPECT_EQ(mlp.at("output_bytes"), 4 * rows * 16);
  // Two projections keep their inputs (16 and 24 numbers a row) and their output gradients (2 x 24 and 16).
  EXPECT_EQ(mlp.at("held_bytes_after_p1"), 4 * rows * (16 + 24 + 48 + 16));
}

TEST_F(Bench, TriesConcatAndCaps) {
  std::set<std::string> batchings;
  for (const json& row : rows({"--p2", "end", "--p2-batching", "loop,concat", "--memory-cap", "auto,0"}))
    batchings.insert(row.at("p2_batching").get<std::string>());
  EXPECT_EQ(batchings, (std::set<std::string>{"concat", "loop"}));
}

// A V-shaped schedule has two stages a rank, but bytes are per rank.
TEST_F(Bench, TakesAPolicyForOneSchedule) {
  std::vector<std::string> names;
  for (const json& row : rows({"--schedules", "1f1b,zb-v@fill", "--p2", "off,end"})) {
    names.push_back(concat(row.at("schedule").get<std::string>(), ' ', row.at("p2").get<std::string>()));
    EXPECT_EQ(row.at("peak_bytes").size(), 2U);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"1f1b off", "1f1b end", "zb-v fill"}));
  expect_one_message({"bench", config(test::tiny_config()), "--schedules", "auto@off"},
                     {"auto@off", "its own p2 policy"});
}

TEST_F(Bench, MeasuresRecomputation) {
  // Every micro-batch is in flight at once, so the peak is the sum of the tensors that they keep.
  const json all = rows({"--schedules", "gpipe", "--micro-batches", "4", "--p2", "off", "--recompute",
                         "none,activations,both", "--memory-cap", "0"});
  EXPECT_NE(out_.find("recompute"), std::string::npos) << out_;
  ASSERT_EQ(all.size(), 3U);
  std::vector<std::string> modes;
  std::vector<std::vector<int64_t>> held;  // by mode and rank
  for (const json& row : all) {
    modes.push_back(row.at("recompute").get<std::string>());
    held.push_back(row.at("peak_held_bytes").get<std::vector<int64_t>>());
    ASSERT_EQ(held.back().size(), 2U);
    for (int s = 0; s < 2; ++s) {
      EXPECT_GT(held.back()[s], 0);
      EXPECT_LT(held.back()[s], row.at("peak_bytes")[s].get<int64_t>()) << "weights are there, too";
    }
  }
  for (int s = 0; s < 2; ++s) {
    EXPECT_LT(held[1][s], held[0][s]) << "activations are computed again instead of kept, stage " << s;
  }
  EXPECT_EQ(modes, (std::vector<std::string>{"none", "activations", "both"}));
}

TEST_F(Bench, RunsTheScheduleThatItSearched) {
  std::vector<std::string> seen;
  for (const json& row : rows({"--schedules", "1f1b,auto", "--p2", "off,fill", "--micro-batches", "2,4"})) {
    const std::string schedule = row.at("schedule");
    const std::string name = row.at("schedule_name");
    seen.push_back(concat(schedule, ' ', row.at("micro_batches")));
    if (schedule != "auto") {
      EXPECT_EQ(name, schedule);
      continue;
    }
    EXPECT_EQ(name.find("auto ("), 0U) << name;
    EXPECT_NE(out_.find(name), std::string::npos) << out_;
    EXPECT_GT(row.at("step_seconds").get<double>(), 0);
  }
  // The search gives one row for each M, with its own p2 policy.
  EXPECT_EQ(seen, (std::vector<std::string>{"1f1b 2", "1f1b 2", "auto 2", "1f1b 4", "1f1b 4", "auto 4"}));
}

TEST_F(Bench, HelpSaysWhatSpeedIsRelativeTo) {
  EXPECT_NE(expect_success({"bench", "--help"}).out.find("first row of the same M"), std::string::npos);
}

TEST_F(Bench, RefusesBadSettings) {
  const std::string file = config(test::tiny_config());
  expect_one_message({"bench", file, "--schedules", "1f2b"}, {"1f2b", "1f1b"});
  expect_one_message({"bench", file, "--p2", "ofd"}, {"ofd", "off"});
  expect_one_message({"bench", file, "--schedules", "auto,gpipe@end", "--p2", "off"},
                     {"--p2 has no effect", "its own p2 policy"});
  expect_one_message({"bench", file, "--ways", "pipeline.p2=off", "--p2", "fill"}, {"--p2", "--ways"});
  for (const auto& [option, value] : {std::pair("--precision", "bf16"), std::pair("--recompute", "both")})
    expect_one_message({"bench", file, "--ways", "pipeline.p2=off", option, value}, {"--ways excludes", option});
  expect_one_message({"bench", file, "--schedules", "1f1b", "--p2", "placed"}, {"--p2 placed", "places W"});
  expect_one_message({"bench", file, "--micro-batches", "0"}, {"micro-batches"});
  expect_one_message({"bench", file, "--recompute", "all"}, {"pipeline.recompute", "'all'"});
  expect_one_message({"bench", file, "--repeat", "1", "--steps", "1", "--json", path("no/such/file")},
                     {path("no/such/file")});
  expect_one_message({"bench", file, "--kernels", file}, {"--kernels", file});
}

TEST(Plan, DrawsAndTimesASchedule) {
  const std::string out = expect_success({"plan", "--stages", "4", "--schedule", "1f1b", "--p2", "fill"}).out;
  for (const char* part :
       {"4 stages", "bubble ratio", "peak micro-batches", "speed-up over off", "rank 3  .  .  .  F0 I0 F1"}) {
    EXPECT_NE(out.find(part), std::string::npos) << "no \"" << part << "\" in:\n" << out;
  }
  // With equal costs and N = 4, the bubbles are (N - 1) / (2 N - 1) and (N - 1) / (4 N - 1).
  EXPECT_NE(out.find("42.9 %"), std::string::npos) << out;
  EXPECT_NE(out.find("20.0 %"), std::string::npos) << out;
  EXPECT_EQ(out.find('\033'), std::string::npos) << "no colours into a pipe";
}

TEST(Plan, WritesJson) {
  const TempFolder folder;
  const std::string file = folder.path("plan.json");
  expect_success({"plan", "--stages", "2", "--micro-batches", "3", "--p2", "end", "--json", file});
  const json plan = json::parse(read_file(file));
  EXPECT_EQ(plan.at("stages"), 2);
  EXPECT_EQ(plan.at("micro_batches"), 3);
  EXPECT_EQ(plan.at("plans").size(), 2U);
  const json& rank = plan.at("plans").at(0).at("ranks").at(1);
  EXPECT_EQ(rank.at("timeline").size(), 9U);  // F, I and W of three micro-batches
  expect_success({"plan", "--stages", "2", "--micro-batches", "3", "--p2", "end", "--no-ops", "--json", file});
  json brief = json::parse(read_file(file)).at("plans").at(0).at("ranks").at(1);
  for (const char* name : {"timeline", "instructions"}) {
    EXPECT_FALSE(brief.contains(name));
    brief[name] = rank.at(name);
  }
  EXPECT_EQ(brief, rank);
}

// The schedules share the layers of one model, and one number of micro-batches.
TEST(Plan, ComparesSchedules) {
  const TempFolder folder;
  const std::string file = folder.path("plan.json");
  const std::string csv = folder.write("mine.csv", "0F0,0I0,0F1,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n");
  const auto plans = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "plan");
    arguments.insert(arguments.end(), {"--no-ops", "--json", file});
    expect_success(arguments);
    std::vector<std::string> rows;
    const json written = json::parse(read_file(file));
    for (const json& plan : written.at("plans")) {
      rows.push_back(concat(plan.at("schedule").get<std::string>(), ' ', plan.at("p2").get<std::string>(), ' ',
                            plan.at("stages"), ' ', plan.at("step_time"), ' ', plan.at("lower_bound")));
    }
    return rows;
  };
  // A rank has two parts. 1F1B with fill takes (M + (N - 1) / 3) 3 x 2.
  EXPECT_EQ(plans({"--schedule", "1f1b,zb-v,1f1b@off", "--ranks", "4", "--micro-batches", "8"}),
            (std::vector<std::string>{"zb-v fill 8 51.0 51.0", "1f1b fill 4 54.0 54.0", "1f1b off 4 66.0 54.0"}));
  EXPECT_EQ(plans({"--schedule", "1f1b", "--p2", "off,end", "--ranks", "2", "--micro-batches", "2"}),
            (std::vector<std::string>{"1f1b end 2 8.0 7.0", "1f1b off 2 9.0 7.0"}));
  // A file runs as written. Its rank 0 waits for each micro-batch, so the search finds a faster schedule.
  const auto searched = plans({"--schedule", csv, "--search"});
  ASSERT_EQ(searched.size(), 2U);
  EXPECT_EQ(searched[0], "auto placed 2 7.0 7.0");
  EXPECT_NE(searched[1].find("mine.csv placed 2 "), std::string::npos) << searched[1];
  // Rows that do not fit are left out.
  EXPECT_EQ(plans({"--schedule", "1f1b,gpipe", "--ranks", "2", "--micro-batches", "4", "--p2", "off", "--memory", "2"}),
            (std::vector<std::string>{"1f1b off 2 15.0 13.0"}));
  test::expect_one_message({"plan", "--schedule", "1f1b,"}, {"--schedule", "empty"});
  test::expect_one_message({"plan", "--stages", "1048576", "--micro-batches", "1048576"}, {"too large"});
}

// Sums in another order may give 1e-14 instead of 0.
TEST(Plan, PrintsNoRoundingErrors) {
  const auto run = expect_success({"plan", "--stages", "4", "--forward", "0.1,0.2,0.3,0.7", "--backward-p1", "0.7",
                                   "--backward-p2", "0.3", "--micro-batches", "13"});
  EXPECT_EQ(run.out.find("e-"), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("-0"), std::string::npos) << run.out;
}

TEST(Plan, RefusesBadSettings) {
  test::expect_one_message({"plan", "--schedule", "gpip"}, {"gpip", "'gpipe'"});
  test::expect_one_message({"plan", "--p2", "fil"}, {"fil", "'fill'"});
  test::expect_one_message({"plan", "--stages", "0"}, {"--stages", "at least 1"});
  test::expect_one_message({"plan", "--stages", "2", "--forward", "1,2,3"}, {"--forward", "3 values"});
}

TEST(Help, ExistsForEveryCommand) {
  const std::string all = expect_success({"--help"}).out;
  for (const char* command : {"train", "bench", "eval", "plan"}) {
    EXPECT_NE(all.find(command), std::string::npos) << command;
    const std::string help = expect_success({command, "--help"}).out;
    EXPECT_NE(help.find("--help"), std::string::npos) << help;
  }
  EXPECT_NE(expect_success({"plan", "--help"}).out.find("zb-v              zero bubble on a V"), std::string::npos);
  const std::string train = expect_success({"train", "--help"}).out;
  const std::string config = expect_success({"train", "--print-config", "--set", "data.synthetic=tokens"}).out;
  const json sections = json::parse(config);
  for (const auto& [section, keys] : sections.items()) {
    for (const auto& [key, value] : keys.items()) {
      EXPECT_NE(train.find(section + "." + key + " "), std::string::npos) << section << "." << key << " has no help";
    }
  }
}

TEST(Help, PrintsTheVersion) {
  EXPECT_NE(expect_success({"--version"}).out.find('.'), std::string::npos);
}

TEST(Help, WithoutACommandIsAnError) {
  const test::Finished result = test::run_program({});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE((result.out + result.err).find("subcommand"), std::string::npos);
  EXPECT_NE(test::run_program({"trian"}).exit_code, 0);
  EXPECT_NE(test::run_program({"train", "--no-such-option"}).exit_code, 0);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
