// The link that benchmarks use between replicas: no message arrives early or in another order, and none is lost.
#include "benchmarks/data_parallel/slow_link.h"

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/threads/in_process.h"
#include "twobp/transport/world.h"

namespace twobp::TWOBP_FILE {
namespace {

std::vector<std::unique_ptr<SlowLink>> links(int ranks, double latency, double bytes_per_second) {
  std::vector<std::unique_ptr<SlowLink>> ends;
  for (auto& end : make_in_process_transports(ranks, 0))
    ends.push_back(std::make_unique<SlowLink>(std::move(end), latency, bytes_per_second));
  return ends;
}

Tag tag_of(int micro_batch) {
  return {1, 0, micro_batch, MessageKind::kForward};
}

TEST(SlowLink, MessagesFollowEachOtherAtItsSpeed) {
  auto ends = links(2, 0.5, 1e4);  // slow enough for a busy machine
  const double begin = now_seconds();
  for (int m = 0; m < 2; ++m) ends[0]->isend(1, tag_of(m), {at::full({500}, m, at::kFloat)});  // 200 ms each
  Values values;
  EXPECT_FALSE(ends[1]->try_receive(0, tag_of(0), values));
  EXPECT_FALSE(ends[1]->try_receive(0, tag_of(1), values));
  // The later message is received first. The earlier one must be kept.
  values = ends[1]->receive(0, tag_of(1), 5);
  EXPECT_GE(now_seconds() - begin, 0.9);
  ASSERT_EQ(values.size(), 1U);
  EXPECT_EQ(values[0][0].item<float>(), 1);
  EXPECT_TRUE(ends[1]->try_receive(0, tag_of(0), values));
  EXPECT_EQ(values[0][0].item<float>(), 0);
}

TEST(SlowLink, WithoutALimitOnlyTheLatency) {
  auto ends = links(2, 0.02, 0);
  const double begin = now_seconds();
  ends[0]->isend(1, tag_of(0), {at::zeros({1 << 20})});
  ends[1]->receive(0, tag_of(0), 5);
  EXPECT_GE(now_seconds() - begin, 0.02);
  ends[0]->set_speed(0, 0);
  ends[0]->isend(1, tag_of(1), {});
  Values values;
  EXPECT_TRUE(ends[1]->try_receive(0, tag_of(1), values));
  EXPECT_TRUE(values.empty());
}

TEST(SlowLink, TimesOutAsTheTransportBelow) {
  auto ends = links(2, 10, 0);
  test::expect_error([&] { ends[1]->receive(0, tag_of(0), 0.01); }, {"rank 1", "rank 0", "micro-batch 0"});
  ends[0]->isend(1, tag_of(0), {});
  test::expect_error([&] { ends[1]->receive(0, tag_of(0), 0.01); }, {"rank 1", "rank 0", "micro-batch 0"});
  ends[0]->abort("the test says so");
  EXPECT_THROW(ends[1]->receive(0, tag_of(1), 5), Aborted);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
