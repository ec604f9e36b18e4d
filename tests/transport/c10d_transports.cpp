// Runs ranks as processes that torch.distributed connected. This is a library, because only Python makes Gloo's groups.
// c10d_transport_test.py loads it in each process and calls run_c10d_tests.
#include <atomic>
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

// Passes everything on to a group, and counts what is sent.
class Counting : public c10d::ProcessGroup {
 public:
  explicit Counting(const c10::intrusive_ptr<c10d::ProcessGroup>& to)
      : c10d::ProcessGroup(to->getRank(), to->getSize()), to_(to) {}
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int rank, int tag) override {
    ++sends;
    return to_->send(tensors, rank, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int rank, int tag) override {
    return to_->recv(tensors, rank, tag);
  }

  std::atomic<int> sends = 0;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> to_;
};

// Another message of this size takes a frame and its tensor.
TEST(C10d, AnExpectedMessageIsOneSend) {
  const auto found = groups.find(2);
  if (found == groups.end()) GTEST_SKIP() << "needs 2 processes";
  if (!found->second) return;
  const auto group = c10::make_intrusive<Counting>(found->second);
  const auto end = make_c10d_transport(group, {.channel = 5000});
  const int other = 1 - end->rank();
  const at::Tensor large = at::ones({100, 100});
  for (int i = 0; i < 5; ++i) {
    const Tag tag{.micro_batch = i};
    EXPECT_TRUE(end->expect(other, tag, {{at::kFloat, {100, 100}, {100, 1}}}));
    const int before = group->sends;
    end->isend_expected(other, tag, {large});
    EXPECT_EQ(group->sends - before, 1);
    EXPECT_TRUE(at::equal(end->receive(other, tag, 60).at(0), large));
  }
  const int before = group->sends;
  end->isend(other, {.step = 1}, {large});
  EXPECT_EQ(group->sends - before, 2);
  end->receive(other, {.step = 1}, 60);
  end->flush(60);
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
