// Calls every operator that a bundle may call, as a bundle would: rightly, and with random wrong arguments.
// All memory of LibTorch is guarded (guarded_memory.h). Children make the calls, so that the sweep survives
// what it finds. A call may succeed, be refused, or take too long or too much memory, which nobody can rule
// out. It must not end the process, and its results must not depend on what was in memory before.
//
//   operator_sweep CALLS.jsonl.gz [--each N] [--only OPERATOR] [--from SEED]     N changes of each call
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <new>
#include <set>
#include <sstream>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tests/graph/operator_sweep/changed_call.h"
#include "tests/graph/operator_sweep/guarded_memory.h"
#include "twobp/graph/interpreter.h"
#include "twobp/graph/liveness.h"
#include "twobp/graph/read_code.h"

namespace twobp {
namespace {

using nlohmann::json;
using test::Call;
using test::guard;
using test::Random;

constexpr double kSeconds = 2;  // of a call

enum class Outcome : uint8_t { kSucceeded, kRefused, kDiffers };

struct Options {
  std::string calls;
  std::string only;
  size_t each = 8;
  size_t from = 0;
};

// What a child tells its parent.
struct Progress {
  size_t at = 0;  // the number of the call
  size_t succeeded = 0;
  size_t refused = 0;
  size_t faults = 0;
  bool right = false;  // the call is an unchanged one
  char call[1 << 16] = {};
  char message[1 << 12] = {};
};

std::string bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return "";
  const at::Tensor dense = tensor.contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

// The results of a call, by a bundle's own means: it is read, planned and run as a program of one
// instruction.
std::vector<std::string> run(const Call& call, uint64_t seed) {
  json text = call;
  const size_t slots = 64 + call["tensors"].size();
  text.erase("tensors");
  const json list = json::array({text});
  const graph::Code code = graph::read_code(JsonNode(list, "call", ""), {static_cast<int>(slots), false, true, 0});
  std::vector<graph::Input> inputs;
  std::vector<int> wanted;
  for (const int slot : code[0].out) {
    if (slot >= 0) wanted.push_back(slot);
  }
  const graph::Pass pass = graph::make_pass(inputs, code, wanted);
  graph::Frame frame(static_cast<int>(slots));
  Random random(seed);
  int slot = 0;
  guard.on = true;
  for (const json& tensor : call["tensors"]) frame.put(slot++, test::make_tensor(tensor, random));
  graph::run(pass.code, frame, {{}, seed});
  guard.on = false;
  std::vector<std::string> results;
  for (const int out : wanted) {
    const c10::IValue& value = frame.slots()[static_cast<size_t>(out)];
    results.push_back(value.isTensor() ? bytes_of(value.toTensor()) : "");
  }
  return results;
}

void arm(double seconds) {
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(seconds);
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

// Calls twice, in memory that was filled with other bytes before. The tensors lie at the same places, because
// the rounding of products depends on them.
Outcome try_call(const Call& call, uint64_t seed, std::string& message) {
  std::vector<std::string> results[2];
  bool refused[2] = {};
  guard.at_end = seed % 3 != 0;
  for (const int run_number : {0, 1}) {
    guard.fill = run_number == 0 ? 0x00 : 0x7f;
    arm(kSeconds);
    try {
      results[run_number] = run(call, seed);
    } catch (const std::exception& error) {
      guard.on = false;
      message = error.what();
      refused[run_number] = true;
    }
    arm(0);
  }
  if (refused[0] && refused[1]) return Outcome::kRefused;
  return refused[0] == refused[1] && results[0] == results[1] ? Outcome::kSucceeded : Outcome::kDiffers;
}

// Call number `i`: of each right call, itself and then its changes.
Call call_of(const std::vector<Call>& right, size_t i, size_t each, uint64_t seed) {
  const Call& call = right[i / (each + 1)];
  Random random(seed);
  return i % (each + 1) == 0 ? call : test::changed(call, right, random);
}

uint64_t seed_of(size_t i, size_t from) {
  return (i + from) * 0x9E3779B97F4A7C15U;
}

template <size_t n>
void set_text(char (&to)[n], const std::string& from) {
  std::snprintf(to, n, "%s", from.c_str());
}

[[noreturn]] void child(const std::vector<Call>& right, const Options& options, Progress& progress) {
  const size_t count = right.size() * (options.each + 1);
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  for (; progress.at < count; ++progress.at) {
    const uint64_t seed = seed_of(progress.at, options.from);
    const Call call = call_of(right, progress.at, options.each, seed);
    progress.right = progress.at % (options.each + 1) == 0;
    set_text(progress.call, call.dump());
    std::string message;
    const Outcome outcome = try_call(call, seed, message);
    progress.succeeded += outcome == Outcome::kSucceeded ? 1 : 0;
    progress.refused += outcome == Outcome::kRefused ? 1 : 0;
    const bool false_refusal = progress.right && outcome == Outcome::kRefused;
    if (!false_refusal && outcome != Outcome::kDiffers) continue;
    ++progress.faults;
    std::printf("%s %zu: %s\n  %s\n", false_refusal ? "REFUSED" : "DIFFERS", progress.at, progress.call,
                message.c_str());
    std::fflush(stdout);
  }
  ::_exit(0);
}

// Every overload that a bundle can name has a right call.
size_t count_without_call(const std::vector<Call>& right) {
  std::set<std::string> known;
  for (const Call& call : right) known.insert(call["op"].get<std::string>());
  size_t missing = 0;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string whole = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (known.contains(whole)) continue;
    try {
      const graph::Operator& op = graph::find_operator(whole);
      const bool random =
          op.aten->hasTag(at::Tag::nondeterministic_seeded) && whole.find("generator") == std::string::npos;
      if (random || !op.aten->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;  // GPUs alone have it
    } catch (const std::exception&) {
      continue;
    }
    std::printf("WITHOUT A CALL: %s\n", whole.c_str());
    ++missing;
  }
  return missing;
}

int sweep(const std::vector<Call>& right, const Options& options) {
  auto* memory = ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Progress& progress = *new (memory) Progress;
  const size_t count = right.size() * (options.each + 1);
  size_t slow = 0;
  std::map<std::string, size_t> killed;
  while (progress.at < count) {
    std::fflush(stdout);
    const pid_t pid = ::fork();
    if (pid == 0) child(right, options, progress);
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
    ++progress.at;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
      ++slow;
      continue;
    }
    ++progress.faults;
    const Call call = json::parse(progress.call);
    if (++killed[call["op"].get<std::string>()] <= 3)
      std::printf("KILLED by %s, %zu: %s\n", WIFSIGNALED(status) ? ::strsignal(WTERMSIG(status)) : "exit",
                  progress.at - 1, progress.call);
  }
  for (const auto& [op, times] : killed) std::printf("%s killed the process %zu times\n", op.c_str(), times);
  std::printf("%zu calls: %zu succeeded, %zu refused, %zu too slow, %zu faults\n", count, progress.succeeded,
              progress.refused, slow, progress.faults);
  return progress.faults == 0 ? 0 : 1;
}

std::vector<Call> read_calls(const Options& options) {
  std::stringstream text;
  char part[1 << 16];
  gzFile file = ::gzopen(options.calls.c_str(), "rb");
  for (int size = 0; file != nullptr && (size = ::gzread(file, part, sizeof part)) > 0;) text.write(part, size);
  ::gzclose(file);
  std::vector<Call> calls;
  for (std::string line; std::getline(text, line);) {
    Call call = json::parse(line);
    const std::string op = call["op"];
    if (options.only.empty() || op.find(options.only) != std::string::npos) calls.push_back(std::move(call));
  }
  return calls;
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  using namespace twobp;
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--each" && i + 1 < argc)
      options.each = std::strtoull(argv[++i], nullptr, 10);
    else if (argument == "--from" && i + 1 < argc)
      options.from = std::strtoull(argv[++i], nullptr, 10);
    else if (argument == "--only" && i + 1 < argc)
      options.only = argv[++i];
    else
      options.calls = argument;
  }
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
  at::set_num_threads(1);
  test::guard_tensors();
  const std::vector<Call> right = read_calls(options);
  if (right.empty()) return std::fprintf(stderr, "%s: no calls\n", options.calls.c_str()), 2;
  const size_t missing = options.only.empty() ? count_without_call(right) : 0;
  return sweep(right, options) + (missing > 0 ? 1 : 0);
}
