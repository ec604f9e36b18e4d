// Compares our transport over MPI with plain MPI, alternating in one run. It measures the time of one
// direction by ping-pong, as the OSU micro-benchmarks do. It also measures the latency of a message whose
// sender computes and does not call MPI meanwhile.
//
//   mpirun -n 2 build/release/benchmarks/mpi_ping_pong [seconds per size]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <malloc.h>
#include <mpi.h>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/core/median.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/mpi/mpi.h"

namespace twobp {
namespace {

constexpr double kTimeout = 60;  // seconds
constexpr int64_t kLeastBytes = 1 << 10;
constexpr int64_t kMostBytes = 16 << 20;
constexpr int kTurn = 10;  // round trips in one turn of either side
constexpr int kLeastTurns = 10;
constexpr double kLayer = 30e-3;  // seconds of compute without an MPI call
constexpr int kLateRounds = 15;
// The allowed overhead of the transport over MPI, in seconds and as a fraction.
constexpr double kMoreSeconds = 5e-6;
constexpr double kMorePart = 0.05;

struct Ends {
  Transport& ours;
  MPI_Comm comm;
  int64_t round = 0;

  bool first() const { return ours.rank() == 0; }
};

// Both processes send one buffer and receive into others.
void exchange_raw(Ends& ends, std::vector<char>& sent, std::vector<char>& received,
                  std::vector<double>& seconds) {
  const auto bytes = static_cast<int>(sent.size());
  const int other = ends.first() ? 1 : 0;
  const auto send = [&] {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Isend(sent.data(), bytes, MPI_BYTE, other, 1, ends.comm, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  };
  const auto receive = [&] {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Irecv(received.data(), bytes, MPI_BYTE, other, 1, ends.comm, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  };
  for (int i = 0; i < kTurn; ++i) {
    const double begin = now_seconds();
    if (ends.first()) send();
    receive();
    if (!ends.first()) send();
    seconds.push_back((now_seconds() - begin) / 2);
  }
}

void exchange_ours(Ends& ends, const at::Tensor& sent, std::vector<double>& seconds) {
  const int other = ends.first() ? 1 : 0;
  for (int i = 0; i < kTurn; ++i, ++ends.round) {
    const Tag tag{.step = ends.round};
    const double begin = now_seconds();
    if (ends.first()) ends.ours.isend(other, tag, {sent});
    ends.ours.receive(other, tag, kTimeout);
    if (!ends.first()) ends.ours.isend(other, tag, {sent});
    seconds.push_back((now_seconds() - begin) / 2);
  }
}

// True while the first process has time for another turn. Both processes get the same answer.
bool another(const Ends& ends, int turn, double end) {
  int more = turn < kLeastTurns || now_seconds() < end ? 1 : 0;
  MPI_Bcast(&more, 1, MPI_INT, 0, ends.comm);
  return more != 0;
}

bool ping_pong(Ends& ends, int64_t bytes, double seconds) {
  std::vector<char> sent(bytes, 1), received(bytes, 0);
  const at::Tensor tensor = at::ones({bytes / 4}, at::kFloat);
  std::vector<double> raw, ours;
  exchange_raw(ends, sent, received, raw);
  exchange_ours(ends, tensor, ours);
  raw.clear();
  ours.clear();
  const double end = now_seconds() + seconds;
  for (int turn = 0; another(ends, turn, end); ++turn) {
    exchange_raw(ends, sent, received, raw);
    exchange_ours(ends, tensor, ours);
  }
  const double of_mpi = median(std::move(raw));
  const double of_ours = median(std::move(ours));
  const bool within = of_ours <= std::max(of_mpi + kMoreSeconds, of_mpi * (1 + kMorePart));
  if (ends.first()) {
    std::printf("| %8ld | %9.2f | %9.2f | %+7.2f | %+6.1f %% | %7.2f | %s |\n", static_cast<long>(bytes),
                of_mpi * 1e6, of_ours * 1e6, (of_ours - of_mpi) * 1e6, 100 * (of_ours / of_mpi - 1),
                static_cast<double>(bytes) / of_ours / 1e9, within ? "yes" : "NO");
    std::fflush(stdout);
  }
  return within;
}

void compute(double seconds, const std::function<void()>& between, int layers) {
  for (int i = 0; i < layers; ++i) {
    const double end = now_seconds() + seconds / layers;
    while (now_seconds() < end) {
    }
    between();
  }
}

// Measures the time from the send to the arrival. Both processes use the same clock.
double late(Ends& ends, int64_t bytes, int layers) {
  const at::Tensor tensor = at::ones({bytes / 4}, at::kFloat);
  std::vector<double> seconds;
  for (int i = 0; i < kLateRounds; ++i, ++ends.round) {
    const Tag tag{.step = ends.round};
    barrier(ends.ours, kTimeout);
    if (ends.first()) {
      compute(
          1e-3, [] {}, 1);  // so that the receiver is already waiting
      const double begin = now_seconds();
      ends.ours.isend(1, tag, {tensor});
      compute(
          kLayer, [&] { ends.ours.progress(); }, layers);
      const Values there = ends.ours.receive(1, tag, kTimeout);
      seconds.push_back(there[0].item<double>() - begin);
    } else {
      ends.ours.receive(0, tag, kTimeout);
      ends.ours.isend(0, tag, {at::full({}, now_seconds(), at::kDouble)});
    }
  }
  return ends.first() ? median(std::move(seconds)) : 0;
}

int run(double seconds) {
  const std::unique_ptr<Transport> transport = make_mpi_transport(2);
  if (!transport) return 0;
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  Ends ends{*transport, comm};
  if (ends.first()) {
    std::printf("| bytes | MPI, us | ours, us | more, us | more | ours, GB/s | within %g us or %g %% |\n",
                kMoreSeconds * 1e6, kMorePart * 100);
    std::printf("|---|---|---|---|---|---|---|\n");
  }
  bool within = true;
  for (int64_t bytes = kLeastBytes; bytes <= kMostBytes; bytes *= 4)
    within &= ping_pong(ends, bytes, seconds);
  if (ends.first()) {
    std::printf(
        "\n| bytes | arrives after, ms: sender computes %g ms | calls progress() ten times meanwhile "
        "|\n|---|---|---|\n",
        kLayer * 1e3);
  }
  for (const int64_t bytes : {int64_t{1} << 10, int64_t{64} << 10, int64_t{1} << 20, kMostBytes}) {
    const double alone = late(ends, bytes, 1);
    const double looking = late(ends, bytes, 10);
    if (ends.first())
      std::printf("| %8ld | %.3f | %.3f |\n", static_cast<long>(bytes), alone * 1e3, looking * 1e3);
  }
  transport->flush(kTimeout);
  return within ? 0 : 1;
}

}  // namespace
}  // namespace twobp

int main(int count, char** values) {
  // As in the twobp program, freed memory stays with the process.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  try {
    return twobp::run(count > 1 ? std::atof(values[1]) : 1.0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_ping_pong: %s\n", error.what());
    twobp::end_all(1);
  }
}
