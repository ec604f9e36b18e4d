// Tests the ping-pong on a link whose latency and bandwidth are known.
#include <chrono>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "tests/transport/transports.h"
#include "twobp/core/check.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

// Delays each message by a time that depends on its bytes.
class SlowTransport : public Transport {
 public:
  SlowTransport(Transport& inner, double latency, double bytes_per_second)
      : inner_(inner), latency_(latency), bytes_per_second_(bytes_per_second) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void isend(int to, const Tag& tag, Values values) override {
    double bytes = 0;
    for (const auto& value : values) bytes += static_cast<double>(value.nbytes());
    std::this_thread::sleep_for(std::chrono::duration<double>(latency_ + bytes / bytes_per_second_));
    inner_.isend(to, tag, std::move(values));
  }
  bool try_receive(int from, const Tag& tag, Values& values) override { return inner_.try_receive(from, tag, values); }
  Values receive(int from, const Tag& tag, double timeout) override { return inner_.receive(from, tag, timeout); }
  void abort(const std::string& reason) override { inner_.abort(reason); }

 private:
  Transport& inner_;
  double latency_;
  double bytes_per_second_;
};

// A busy machine can make the link slower, so one of several measurements must be right.
TEST(MeasureLink, FindsLatencyAndBandwidth) {
  LinkSpeed speed;
  for (int attempt = 0; attempt < 5; ++attempt) {
    const auto ends = make_in_process_transports(2, 0);
    SlowTransport first(*ends[0], 5e-3, 1e9), second(*ends[1], 5e-3, 1e9);
    speed = measure_link(first, second, 0.3);
    ASSERT_GE(speed.latency, 5e-3);
    if (speed.latency < 15e-3 && speed.bytes_per_second > 0.5e9 && speed.bytes_per_second < 2e9) return;
  }
  ADD_FAILURE() << speed.latency << " s, " << speed.bytes_per_second << " B/s";
}

// Threads hand tensors over, whatever their size.
TEST(MeasureLink, InProcessIsFast) {
  const auto ends = make_in_process_transports(2, 0);
  const LinkSpeed speed = measure_link(*ends[0], *ends[1], 0.1);
  EXPECT_GT(speed.latency, 0);
  EXPECT_LT(speed.latency, 10e-3);
}

TEST(MeasureLink, RefusesOtherRanksAndReportsFailures) {
  const auto ends = make_in_process_transports(3, 0);
  EXPECT_THROW(measure_link(*ends[1], *ends[2]), Error);
  ends[2]->abort("the test says so");
  EXPECT_THROW(measure_link(*ends[0], *ends[1]), Aborted);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
