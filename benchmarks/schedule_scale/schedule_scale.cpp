// Measures how long a schedule takes to generate, validate and simulate on one core, and its memory:
//   schedule_scale RANKS MICRO_BATCHES [SCHEDULE [POLICY]]
// Prints one line of JSON. growth.py runs the program for many sizes and draws the growth.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <string>
#include <sys/resource.h>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

// CPU seconds of this thread. Other programs on the machine do not count.
double now() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

// Of this program only. The value from getrusage starts with that of the shell or script before exec.
double peak_gibibytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stod(line.substr(6)) / (1 << 20);  // KiB
  }
  return 0;
}

int number(const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  TWOBP_CHECK(*end == '\0' && value >= 1 && value <= 1000000, "'", text, "' must be a number from 1 to 1000000");
  return static_cast<int>(value);
}

void run(int ranks, int micro_batches, const std::string& name, P2Policy policy) {
  const NamedSchedule& named = named_schedule(name);
  const int stages = ranks * usual_stages_per_rank(named.placement);
  const double begin = now();
  Schedule schedule = named.generate(stages, ranks, micro_batches, 1);
  schedule.name = name;
  schedule = add_communication(apply_p2_policy(std::move(schedule), policy));
  const double generated = now();
  validate(schedule);
  const double validated = now();
  SimulationOptions options;
  options.check = false;
  options.timeline = false;
  const Simulation simulation = simulate(schedule, std::vector<StageCost>(stages), options);
  const double simulated = now();
  long compute = 0;
  long messages = 0;
  for (const auto& list : schedule.ranks) {
    for (const Instruction& instruction : list) {
      (is_compute(instruction.op) ? compute : messages) += instruction.count;
    }
  }
  std::printf(
      "{\"schedule\": \"%s\", \"p2\": \"%s\", \"ranks\": %d, \"micro_batches\": %d, \"compute\": %ld, "
      "\"messages\": %ld, \"generate_seconds\": %.3f, \"validate_seconds\": %.3f, \"simulate_seconds\": "
      "%.3f, "
      "\"peak_gib\": %.3f, \"step\": %.1f, \"bubble\": %.5f}\n",
      name.c_str(), std::string(policy_name(policy)).c_str(), ranks, micro_batches, compute, messages,
      generated - begin, validated - generated, simulated - validated, peak_gibibytes(), simulation.step_seconds,
      simulation.bubble_ratio());
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  try {
    TWOBP_CHECK(argc >= 3 && argc <= 5, "usage: schedule_scale RANKS MICRO_BATCHES [SCHEDULE [POLICY]]");
    const std::string name = argc > 3 ? argv[3] : "1f1b";
    twobp::run(twobp::number(argv[1]), twobp::number(argv[2]), name,
               argc > 4 ? twobp::parse_policy(argv[4]) : twobp::policies_of(name).back());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
