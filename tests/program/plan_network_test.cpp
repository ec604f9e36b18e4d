// Tests twobp plan with messages that take time, and with replicas that sum their gradients.
#include <nlohmann/json.hpp>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::read_file;
using test::TempFolder;

// Returns the schedule's plan from the JSON that it writes.
json drawn(std::vector<std::string> arguments) {
  const TempFolder folder;
  const std::string file = folder.path("plan.json");
  arguments.insert(arguments.begin(), "plan");
  arguments.insert(arguments.end(), {"--json", file});
  expect_success(arguments);
  const json written = json::parse(read_file(file));
  return written.at("plans").at(0);
}

double step_time(const std::vector<std::string>& arguments) {
  return drawn(arguments).at("step_time").get<double>();
}

// For gpipe with p2 off, N = 2 and M = 4, the step takes (M + N - 1) (F + I + W) = 15, plus one message in
// each direction.
TEST(PlanMessages, LinksTakeTime) {
  const std::vector<std::string> gpipe = {"--stages", "2",  "--micro-batches", "4", "--schedule", "gpipe",
                                          "--p2",     "off"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), gpipe.begin(), gpipe.end());
    return step_time(more);
  };
  EXPECT_EQ(with({}), 15);
  EXPECT_NEAR(with({"--latency", "0.5"}), 16, 1e-9);
  EXPECT_NEAR(with({"--message-seconds", "0.5"}), 16, 1e-9);
  EXPECT_NEAR(with({"--message-seconds", "0.5", "--latency", "0.5"}), 17, 1e-9);
  // The link takes 2 units for one F, or one dL/dx. The last F arrives at 1 + 4 x 2.
  EXPECT_NEAR(with({"--message-seconds", "2"}), 1 + 4 * 2 + 1 + 4 * 2 + 2 + 2, 1e-9);
  EXPECT_EQ(with({"--message-seconds", "2", "--share-links", "2"}), 15) << "within a node";
  EXPECT_NEAR(with({"--message-seconds", "0.5", "--memory", "4"}), 16, 1e-9) << "a cap counts no messages";
  expect_one_message({"plan", "--stages", "2", "--share-links", "1"}, {"--share-links", "has no effect"});
  expect_one_message({"plan", "--stages", "2", "--message-seconds", "1,2,3"}, {"--message-seconds", "3 values"});
}

// A ring of four sends 1.5 times a stage's gradients. Rank 0 finishes last and sums after its last W.
TEST(PlanMessages, ReplicasSumGradients) {
  const std::vector<std::string> gpipe = {"--stages", "2",  "--micro-batches", "4", "--schedule", "gpipe",
                                          "--p2",     "off"};
  auto replicated = gpipe;
  replicated.insert(replicated.end(), {"--data-parallel", "4", "--gradient-seconds", "2"});
  EXPECT_NEAR(step_time(replicated), 15 + 3, 1e-9);
  expect_one_message({"plan", "--stages", "2", "--data-parallel", "4"}, {"--gradient-seconds"});
  expect_one_message({"plan", "--stages", "2", "--gradient-seconds", "4"}, {"--data-parallel"});
}

class PlanNetwork : public test::InAFolder {
 protected:
  void SetUp() override {
    costs_ = path("costs.json");
    expect_success(
        {"profile", config(test::tiny_config()), "--seconds", "0.01", "--micro-batch-sizes", "1", "--json", costs_});
  }
  json best(std::vector<std::string> more) {
    const std::string file = folder_.path("plan.json");
    more.insert(more.begin(), {"plan", "--costs", costs_, "--ranks", "2", "--schedule", "gpipe", "--p2", "off",
                               "--recompute", "none", "--micro-batches", "4", "--json", file});
    expect_success(more);
    const json written = json::parse(read_file(file));
    return written.at("choices").at(0);
  }

  std::string costs_;
};

TEST_F(PlanNetwork, PlansForOtherLinksThanMeasured) {
  const double measured = best({}).at("step_seconds");
  EXPECT_NEAR(best({"--latency", "10"}).at("step_seconds").get<double>(), 20 + measured, 0.5);
  // A message is 8 tokens of 16 numbers, 512 bytes. Four of them follow each other in each direction.
  EXPECT_NEAR(best({"--bandwidth", "512"}).at("step_seconds").get<double>(), 8 + measured, 0.5);
  EXPECT_NEAR(best({"--bandwidth", "512", "--share-links", "2"}).at("step_seconds").get<double>(), measured, 0.5);
  EXPECT_NEAR(best({"--bandwidth", "512", "--share-links", "1"}).at("step_seconds").get<double>(), 8 + measured, 0.5);
  expect_one_message({"plan", "--costs", costs_, "--ranks", "2", "--bandwidth", "fast"}, {"--bandwidth", "fast"});
}

TEST_F(PlanNetwork, PlansReplicas) {
  const json two = best({"--data-parallel", "1,2", "--data-latency", "0", "--data-bandwidth", "1TB"});
  EXPECT_EQ(two.at("data_parallel"), 2) << "twice the samples in about the same time";
  EXPECT_NEAR(two.at("samples_per_second").get<double>() * two.at("step_seconds").get<double>(), 8, 1e-6);
  EXPECT_EQ(best({"--devices", "8"}).at("data_parallel"), 4);
  EXPECT_GE(best({"--data-parallel", "2", "--data-latency", "3"}).at("step_seconds").get<double>(), 3);
  const auto run = expect_success({"plan", "--costs", costs_, "--ranks", "2", "--devices", "4"});
  EXPECT_NE(run.out.find("replicas"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find(" pipeline.data_parallel=2"), std::string::npos) << run.out;
  expect_one_message({"plan", "--costs", costs_, "--ranks", "2", "--devices", "3"}, {"2 ranks", "3 devices"});
  expect_one_message({"plan", "--costs", costs_, "--ranks", "2", "--data-latency", "3"},
                     {"--data-latency", "--data-parallel"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
