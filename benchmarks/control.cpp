// Measures what the control of a run costs. Processes meet at a store, each makes the trainer of one rank, and then
// they exchange the norm and the end of steps, and compute nothing. Prints the requests at the store, and CPU time a
// process and step.
//
//   build/release/benchmarks/control 48
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <ATen/Parallel.h>

#include "tests/free_port.h"
#include "tests/model_options.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/report_exchange.h"
#include "twobp/train/trainer.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/start.h"
#include "twobp/transport/store/store_connection.h"

namespace twobp {
namespace {

constexpr double kTimeout = 60;  // seconds
constexpr int kSteps = 200;
constexpr int64_t kWeights = 300;  // of a model of 32 blocks
constexpr int64_t kReport = 60;    // numbers of a rank's report

double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

Config config_for(int ranks) {
  Config config;
  DecoderOptions& model = test::llama_of(config);
  model.dim = model.hidden = 8;
  model.heads = model.kv_heads = 1;
  model.vocab = 32;
  model.layers = (ranks + 1) / 2;  // of two parts each
  config.data.synthetic = "tokens";
  config.data.sequence = 8;
  config.data.held_out = 0;
  config.pipeline.ranks = ranks;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 2;
  config.pipeline.pin = false;
  config.pipeline.timeout = kTimeout;
  config.train.steps = 2;
  return config;
}

void step(const World& world, int rank) {
  const at::Tensor squares = at::ones({kWeights}, at::kDouble);
  sum_on_the_way(*world.run[rank], squares, kTimeout, WaitCause::kNorm);
  StepReport report;
  exchange_report(world, kTimeout, report, {at::ones({kReport}, at::kDouble)}, {});
}

void run(int port, int rank, int processes) {
  at::set_num_threads(1);
  StorePlace place;
  place.address = "127.0.0.1";
  place.port = port;
  place.rank = rank;
  place.size = processes;
  const auto connection = std::make_shared<StoreConnection>(place, kTimeout);
  Trainer trainer(config_for(processes), make_process_world(make_store_transport(connection), 1, processes));
  const auto at_start = static_cast<double>(connection->requests());
  const World& world = trainer.world();
  for (int warm = 0; warm < 10; ++warm) step(world, rank);
  const int64_t requests = connection->requests();
  const double cpu = cpu_seconds();
  const double begin = now_seconds();
  for (int i = 0; i < kSteps; ++i) step(world, rank);
  const at::Tensor own = at::tensor({(cpu_seconds() - cpu) / kSteps, (now_seconds() - begin) / kSteps,
                                     static_cast<double>(connection->requests() - requests) / kSteps, at_start},
                                    at::kDouble);
  const std::vector<Values> all = gather(*world.processes, {own}, 0, kTimeout);
  if (rank > 0) return;
  const auto number = [](const Values& of, int i) { return of.at(0)[i].item<double>(); };
  double others = 0, most = 0, requests_of_all = number(all[0], 2), at_start_of_all = number(all[0], 3);
  for (size_t process = 1; process < all.size(); ++process) {
    others += number(all[process], 0) / static_cast<double>(all.size() - 1);
    most = std::max(most, number(all[process], 0));
    requests_of_all += number(all[process], 2);
    at_start_of_all += number(all[process], 3);
  }
  std::printf(
      "%d processes: the start takes %.1f requests a process; a step's control takes %.3f ms of CPU a process (at most "
      "%.3f; the one with the store "
      "%.3f), %.1f requests a process, %.1f ms in all\n",
      processes, at_start_of_all / processes, 1e3 * others, 1e3 * most, 1e3 * number(all[0], 0),
      requests_of_all / processes, 1e3 * number(all[0], 1));
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  const int processes = argc == 2 ? std::atoi(argv[1]) : 0;
  if (processes < 2 || processes > 1024) {
    std::fprintf(stderr, "control: give the number of processes, 2 to 1024\n");
    return 2;
  }
  const int port = twobp::test::free_port();
  std::vector<pid_t> children;
  for (int rank = 0; rank < processes; ++rank) {
    const pid_t child = ::fork();
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    try {
      twobp::run(port, rank, processes);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "control: %s\n", error.what());
      std::_Exit(1);
    }
    std::fflush(stdout);
    std::_Exit(0);
  }
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) failed = 1;
  }
  return failed;
}
