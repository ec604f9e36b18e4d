// Tests schedules in files: `twobp plan` writes, reads and draws them, and `twobp train` runs them.
#include <sstream>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::read_file;
using test::run_program;
using test::TempFolder;

TEST(Csv, PlanWritesTheFileThatItRead) {
  const TempFolder folder;
  const std::string fill = folder.path("fill.csv");
  const std::string placed = folder.path("placed.csv");
  const auto written = expect_success(
      {"plan", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--p2", "fill", "--csv", fill});
  EXPECT_EQ(read_file(fill), "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
  const auto read = expect_success({"plan", "--schedule", fill, "--csv", placed});
  EXPECT_EQ(read_file(placed), read_file(fill));
  EXPECT_NE(read.out.find("2 stages on 2 ranks, 2 micro-batches"), std::string::npos) << read.out;
  EXPECT_NE(read.out.find("p2 placed"), std::string::npos) << read.out;

  // A cap moves W to the place where memory is needed.
  expect_success({"plan", "--schedule", "naive", "--stages", "1", "--micro-batches", "2", "--p2", "end", "--memory",
                  "1", "--csv", placed});
  EXPECT_EQ(read_file(placed), "0F0,0I0,0W0,0F1,0I1,0W1\n");
}

TEST(Csv, TrainRunsAFile) {
  const TempFolder folder;
  json config = test::tiny_config();
  const std::string mine = folder.write("mine.csv", "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
  const auto losses = [&](const std::string& name, json of) {
    of["pipeline"]["micro_batches"] = 2;
    const std::string metrics = folder.path(name + ".jsonl");
    expect_success({"train", folder.write(name + ".json", of.dump()), "--metrics", metrics});
    std::vector<double> all;
    std::istringstream lines(read_file(metrics));
    for (std::string line; std::getline(lines, line);) all.push_back(json::parse(line).at("loss").get<double>());
    return all;
  };
  const auto named = losses("named", config);
  config["pipeline"]["schedule"] = {{"file", mine}};
  config["pipeline"]["p2"] = "placed";
  EXPECT_EQ(losses("file", config), named);
  EXPECT_FALSE(named.empty());
}

// Only the run of a schedule needs its file.
TEST(Csv, OtherCommandsNeedNoFile) {
  const TempFolder folder;
  json config = test::tiny_config();
  config["pipeline"].erase("stages");
  config["pipeline"]["schedule"] = {{"file", folder.path("gone.csv")}};
  config["data"]["held_out"] = 0.1;
  const std::string path = folder.write("config.json", config.dump());
  EXPECT_NE(expect_success({"train", path, "--print-config"}).out.find("gone.csv"), std::string::npos);
  EXPECT_NE(expect_success({"eval", path}).out.find("held-out loss"), std::string::npos);
  expect_one_message({"train", path}, {"gone.csv", "No such file"});
}

TEST(Csv, RefusesABadFileAndNamesTheCell) {
  const TempFolder folder;
  const std::string wrong = folder.write("wrong.csv", "0F0,0B0\n1F0,1Q0\n");
  const auto run = run_program({"plan", "--schedule", wrong});
  EXPECT_NE(run.exit_code, 0);
  for (const char* part : {"wrong.csv", "row 2 (rank 1), column 2", "\"1Q0\"", "unknown op"}) {
    EXPECT_NE(run.err.find(part), std::string::npos) << part << " in: " << run.err;
  }
}

TEST(Plan, DrawsSlices) {
  const TempFolder folder;
  const auto drawn = [&](std::vector<std::string> more) {
    std::vector<std::string> all = {"plan", "--schedule", "1f1b", "--stages", "2", "--micro-batches",
                                    "1",    "--p2",       "off"};
    all.insert(all.end(), more.begin(), more.end());
    return expect_success(all).out;
  };
  EXPECT_NE(drawn({}).find("50.0 %"), std::string::npos) << drawn({});
  const std::string sliced = drawn({"--slices", "4"});  // (N - 1) / (k M + N - 1)
  EXPECT_NE(sliced.find("1 micro-batches of 4 slices"), std::string::npos) << sliced;
  EXPECT_NE(sliced.find("F0.3"), std::string::npos) << sliced;
  EXPECT_NE(sliced.find("20.0 %"), std::string::npos) << sliced;
  expect_one_message({"plan", "--schedule", "1f1b", "--slices", "2", "--csv", folder.path("none.csv")},
                     {"1f1b", "2 slices", "text form"});
  expect_one_message({"plan", "--schedule", "dualpipe-v", "--slices", "2"}, {"dualpipe-v", "slices"});
  expect_one_message({"plan", "--schedule", "1f1b", "--slices", "0"}, {"--slices"});
  expect_one_message({"plan", "--schedule", "1f1b", "--slices", "2,4"}, {"--slices", "several numbers"});
  const std::string searched = drawn({"--slices", "4", "--search"});
  EXPECT_NE(searched.find("auto"), std::string::npos) << searched;
}

TEST(Plan, DrawsAnSvg) {
  const TempFolder folder;
  expect_success({"plan", "--schedule", "1f1b", "--stages", "4", "--svg", folder.path("plan.svg")});
  const std::string picture = read_file(folder.path("plan.svg"));
  EXPECT_EQ(picture.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0), 0U);
  EXPECT_NE(picture.find("1f1b with p2 fill, 4 ranks, 4 stages, 4 micro-batches"), std::string::npos);
  EXPECT_NE(picture.find(">rank 3<"), std::string::npos);
  expect_one_message({"plan", "--svg", folder.path("no/such/file")}, {"--svg", "no/such/file"});
  expect_one_message({"plan", "--stages", "64", "--micro-batches", "2000", "--svg", folder.path("big.svg")},
                     {"too large", "fewer"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
