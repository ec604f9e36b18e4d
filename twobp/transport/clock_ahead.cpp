#include "twobp/transport/clock_ahead.h"

#include <limits>

#include "twobp/core/clock.h"

namespace twobp {
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
