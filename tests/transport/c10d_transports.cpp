// Runs ranks as processes that torch.distributed connected. This is a library, because only Python makes Gloo's groups.
// c10d_transport_test.py loads it in each process and calls run_c10d_tests.
#include <exception>
#include <map>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "tests/transport/transports.h"
#include "twobp/transport/c10d/c10d_transport.h"

namespace twobp::test {
namespace {

// The groups by their sizes. A group is null if this process is not a member.
std::map<int, c10::intrusive_ptr<c10d::ProcessGroup>> groups;

// Every test has a transport of its own, since an abort is final.
void run_on_processes(int ranks, double idle_seconds, const RankBody& body) {
  static int channel = 0;
  ++channel;
  if (!groups.contains(ranks)) GTEST_SKIP() << "needs " << ranks << " processes, there are " << groups.size();
  const auto& group = groups.at(ranks);
  if (!group) return;
  std::exception_ptr error;
  {
    const auto end = make_c10d_transport(group, {.channel = channel, .idle_seconds = idle_seconds});
    try {
      body(*end);
    } catch (...) {
      error = std::current_exception();
      end->abort("another rank of the test failed");
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

std::vector<World> worlds() {
  const auto with = [](double idle_seconds) {
    return [idle_seconds](int ranks, const RankBody& body) { run_on_processes(ranks, idle_seconds, body); };
  };
  const auto most = static_cast<int>(groups.size());
  return {{"C10d", with(60), most}, {"C10dIdle", with(0.01), most}};
}

}  // namespace twobp::test

// `names` are those of the groups of 1, 2, ... processes. A name is empty if this process is not a member. Further
// arguments are GoogleTest's. Returns 0 if all tests pass.
extern "C" int run_c10d_tests(int groups, const char** names, int count, char** arguments) {
  for (int i = 0; i < groups; ++i) {
    const std::string name = names[i];
    twobp::test::groups[i + 1] = name.empty() ? nullptr : c10d::resolve_process_group(name);
  }
  ::testing::InitGoogleTest(&count, arguments);
  return RUN_ALL_TESTS();
}
