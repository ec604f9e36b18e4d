#include <exception>
#include <limits>
#include <thread>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/profile/profile.h"

namespace twobp {
namespace {

constexpr int64_t kSmall = 16;       // numbers in a small message
constexpr int64_t kLarge = 4 << 20;  // 16 MiB
constexpr double kTimeout = 30;      // seconds
constexpr int kLeastRounds = 5;
constexpr int kMostRounds = 2000;
constexpr double kDistinct = 2;  // below this multiple of the small messages' time, a difference is noise

// Sends back what it receives, until an empty message comes.
void echo(Transport& transport) {
  for (int64_t round = 0;; ++round) {
    Values values = transport.receive(0, {.step = round}, kTimeout);
    if (values.empty()) return;
    transport.isend(0, {.step = round, .kind = MessageKind::kBackward}, std::move(values));
  }
}

// Seconds of one direction: the median of as many rounds as fit in the time.
double one_way(Transport& transport, int64_t numbers, double seconds, int64_t& round) {
  const at::Tensor tensor = at::ones({numbers}, at::kFloat);
  std::vector<double> taken;
  const double end = now_seconds() + seconds;
  for (int i = 0; i < kLeastRounds || (i < kMostRounds && now_seconds() < end); ++i, ++round) {
    const double begin = now_seconds();
    transport.isend(1, {.step = round}, {tensor});
    transport.receive(1, {.step = round, .kind = MessageKind::kBackward}, kTimeout);
    taken.push_back((now_seconds() - begin) / 2);
  }
  return median(std::move(taken));
}

}  // namespace

LinkSpeed measure_link(Transport& rank0, Transport& rank1, double seconds) {
  TWOBP_CHECK(rank0.rank() == 0 && rank1.rank() == 1, "a link is measured between ranks 0 and 1, not ", rank0.rank(),
              " and ", rank1.rank());
  std::exception_ptr failed;
  std::thread other([&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      echo(rank1);
    } catch (...) {
      failed = std::current_exception();
      rank1.abort("the other end of the measured link failed");
    }
  });
  LinkSpeed speed;
  std::exception_ptr here;
  try {
    int64_t round = 0;
    one_way(rank0, kSmall, seconds / 10, round);  // warms up
    speed.latency = one_way(rank0, kSmall, 0.45 * seconds, round);
    const double large = one_way(rank0, kLarge, 0.45 * seconds, round);
    if (large > kDistinct * speed.latency) {
      speed.bytes_per_second = static_cast<double>(sizeof(float) * (kLarge - kSmall)) / (large - speed.latency);
    }
    rank0.isend(1, {.step = round}, {});
  } catch (...) {
    here = std::current_exception();
    rank0.abort("the measurement of a link failed");
  }
  other.join();
  if (failed) std::rethrow_exception(failed);
  if (here) std::rethrow_exception(here);
  return speed;
}

namespace {

// Polls without the pauses of a wait, which would count as travel time.
Values receive_at_once(Transport& transport, int from, const Tag& tag, double timeout) {
  constexpr double kSpinSeconds = 5e-3;
  Values values;
  for (const double begin = now_seconds(); now_seconds() < begin + kSpinSeconds;) {
    if (transport.try_receive(from, tag, values)) return values;
  }
  return transport.receive(from, tag, timeout);
}

}  // namespace

double clock_ahead(Transport& transport, int peer, double timeout) {
  constexpr int kRounds = 16;
  const auto tag = [](int round, int part) { return Tag{0, part, round, MessageKind::kClock}; };
  double ahead = 0;
  double shortest = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    if (transport.rank() != 0) {
      receive_at_once(transport, 0, tag(round, 0), timeout);
      transport.isend(0, tag(round, 1), {at::full({1}, now_seconds(), at::kDouble)});
      continue;
    }
    const double begin = now_seconds();
    transport.isend(peer, tag(round, 0), {});
    const double there = receive_at_once(transport, peer, tag(round, 1), timeout).at(0).item<double>();
    const double end = now_seconds();
    if (end - begin >= shortest) continue;
    shortest = end - begin;
    ahead = there - (begin + end) / 2;
  }
  return ahead;
}

}  // namespace twobp
