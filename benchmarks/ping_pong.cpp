// Compares our transports over MPI and over a c10d group with plain MPI and the plain group, alternating in one run. It
// measures the time of one direction by ping-pong, as the OSU micro-benchmarks do. It also measures the latency of a
// message whose sender computes and does not look at the transport meanwhile. ping_pong.py loads this library, because
// only Python makes Gloo's groups.
#include <cmath>
#include <cstdio>
#include <functional>
#include <malloc.h>
#include <memory>
#include <mpi.h>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/c10d/c10d_transport.h"
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

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// One way to carry a message between the two processes.
struct Way {
  std::string name;
  std::function<void(const at::Tensor& sent)> send;
  std::function<void(at::Tensor& received)> receive;
};

Way plain_mpi(MPI_Comm comm, int other) {
  const auto wait = [](MPI_Request& request) { MPI_Wait(&request, MPI_STATUS_IGNORE); };
  return {"MPI",
          [=](const at::Tensor& sent) {
            MPI_Request request = MPI_REQUEST_NULL;
            MPI_Isend(sent.const_data_ptr(), static_cast<int>(sent.nbytes()), MPI_BYTE, other, 1, comm, &request);
            wait(request);
          },
          [=](at::Tensor& received) {
            MPI_Request request = MPI_REQUEST_NULL;
            MPI_Irecv(received.mutable_data_ptr(), static_cast<int>(received.nbytes()), MPI_BYTE, other, 1, comm,
                      &request);
            wait(request);
          }};
}

Way plain_group(const Group& group, int other) {
  constexpr int kTag = 1;
  return {"Gloo",
          [=](const at::Tensor& sent) {
            std::vector<at::Tensor> tensors{sent};
            group->send(tensors, other, kTag)->wait();
          },
          [=](at::Tensor& received) {
            std::vector<at::Tensor> tensors{received};
            group->recv(tensors, other, kTag)->wait();
          }};
}

Way through(Transport& transport, const std::string& name, int other) {
  const auto sends = std::make_shared<int64_t>(0);
  const auto receives = std::make_shared<int64_t>(0);
  return {name, [=, &transport](const at::Tensor& sent) { transport.isend(other, {.step = (*sends)++}, {sent}); },
          [=, &transport](at::Tensor& received) {
            received = transport.receive(other, {.step = (*receives)++}, kTimeout)[0];
          }};
}

// Messages as those of F and I: both ends know their form, and the receiver has memory for the next one.
Way expected_through(Transport& transport, const std::string& name, int other) {
  const auto tag_of = [](int64_t step, const at::Tensor& like) {
    return Tag{.step = step, .micro_batch = static_cast<int>(std::log2(like.nbytes()))};
  };
  const auto sends = std::make_shared<int64_t>(0);
  const auto receives = std::make_shared<int64_t>(0);
  return {
      name,
      [=, &transport](const at::Tensor& sent) { transport.isend_expected(other, tag_of((*sends)++, sent), {sent}); },
      [=, &transport](at::Tensor& received) {
        const Forms forms = {{received.scalar_type(), received.sizes().vec(), received.strides().vec()}};
        const int64_t now = (*receives)++;
        transport.expect(other, tag_of(now, received), forms);
        received = transport.receive(other, tag_of(now, received), kTimeout)[0];
        if ((now + 1) % kTurn != 0) transport.expect(other, tag_of(now + 1, received), forms);  // or none may come
      }};
}

// Both processes send one buffer and receive into others.
void exchange(const Way& way, bool first, const at::Tensor& sent, at::Tensor& received, std::vector<double>& seconds) {
  for (int i = 0; i < kTurn; ++i) {
    const double begin = now_seconds();
    if (first) way.send(sent);
    way.receive(received);
    if (!first) way.send(sent);
    seconds.push_back((now_seconds() - begin) / 2);
  }
}

// True while the first process has time for another turn. Both processes get the same answer.
bool another(MPI_Comm comm, int turn, double end) {
  int more = turn < kLeastTurns || now_seconds() < end ? 1 : 0;
  MPI_Bcast(&more, 1, MPI_INT, 0, comm);
  return more != 0;
}

// The median seconds of each way.
std::vector<double> ping_pong(MPI_Comm comm, bool first, const std::vector<Way>& ways, int64_t bytes, double seconds) {
  const at::Tensor sent = at::ones({bytes / 4}, at::kFloat);
  std::vector<at::Tensor> received;
  std::vector<std::vector<double>> all(ways.size());
  for (size_t i = 0; i < ways.size(); ++i) {
    received.push_back(at::zeros_like(sent));
    exchange(ways[i], first, sent, received[i], all[i]);  // warms up
    all[i].clear();
  }
  const double end = now_seconds() + seconds;
  for (int turn = 0; another(comm, turn, end); ++turn) {
    for (size_t i = 0; i < ways.size(); ++i) exchange(ways[i], first, sent, received[i], all[i]);
  }
  std::vector<double> medians;
  for (auto& of_way : all) medians.push_back(median(std::move(of_way)));
  return medians;
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
double late(Transport& transport, int64_t bytes, int layers) {
  static int64_t round = 1 << 30;
  const bool first = transport.rank() == 0;
  const at::Tensor tensor = at::ones({bytes / 4}, at::kFloat);
  std::vector<double> seconds;
  for (int i = 0; i < kLateRounds; ++i, ++round) {
    const Tag tag{.step = round};
    barrier(transport, kTimeout);
    if (first) {
      compute(
          1e-3, [] {}, 1);  // so that the receiver is already waiting
      const double begin = now_seconds();
      transport.isend(1, tag, {tensor});
      compute(
          kLayer, [&] { transport.progress(); }, layers);
      const Values there = transport.receive(1, tag, kTimeout);
      seconds.push_back(there[0].item<double>() - begin);
    } else {
      transport.receive(0, tag, kTimeout);
      transport.isend(0, tag, {at::full({}, now_seconds(), at::kDouble)});
    }
  }
  return first ? median(std::move(seconds)) : 0;
}

void run(const Group& group, double seconds) {
  const std::unique_ptr<Transport> over_mpi = make_mpi_transport(2);
  const std::unique_ptr<Transport> over_group = make_c10d_transport(group);
  if (!over_mpi) return;
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  const bool first = over_mpi->rank() == 0;
  const int other = first ? 1 : 0;
  const std::vector<Way> ways = {plain_mpi(comm, other),
                                 through(*over_mpi, "twobp over MPI", other),
                                 plain_group(group, other),
                                 through(*over_group, "twobp over Gloo", other),
                                 expected_through(*over_mpi, "F and I over MPI", other),
                                 expected_through(*over_group, "F and I over Gloo", other)};
  if (first) {
    std::printf("| bytes |");
    for (const Way& way : ways) std::printf(" %s, us |", way.name.c_str());
    std::printf(" twobp over MPI, GB/s | over Gloo, GB/s |\n|---|---|---|---|---|---|---|---|---|\n");
  }
  for (int64_t bytes = kLeastBytes; bytes <= kMostBytes; bytes *= 4) {
    const std::vector<double> medians = ping_pong(comm, first, ways, bytes, seconds);
    if (!first) continue;
    std::printf("| %8ld |", static_cast<long>(bytes));
    for (const double one : medians) std::printf(" %9.2f |", one * 1e6);
    std::printf(" %7.2f | %7.2f |\n", static_cast<double>(bytes) / medians[1] / 1e9,
                static_cast<double>(bytes) / medians[3] / 1e9);
    std::fflush(stdout);
  }
  if (first) {
    std::printf(
        "\n| bytes | over MPI, arrives after, ms: sender computes %g ms | calls progress() ten times "
        "meanwhile "
        "| over Gloo | calls progress() |\n|---|---|---|---|---|\n",
        kLayer * 1e3);
  }
  for (const int64_t bytes : {int64_t{1} << 10, int64_t{64} << 10, int64_t{1} << 20, kMostBytes}) {
    const double mpi_alone = late(*over_mpi, bytes, 1);
    const double mpi_looking = late(*over_mpi, bytes, 10);
    const double group_alone = late(*over_group, bytes, 1);
    const double group_looking = late(*over_group, bytes, 10);
    if (first)
      std::printf("| %8ld | %.3f | %.3f | %.3f | %.3f |\n", static_cast<long>(bytes), mpi_alone * 1e3,
                  mpi_looking * 1e3, group_alone * 1e3, group_looking * 1e3);
  }
  over_mpi->flush(kTimeout);
  over_group->flush(kTimeout);
}

}  // namespace
}  // namespace twobp

// `group`: the name of the process group of both processes, which mpirun started. Ends the job on an error.
extern "C" void run_ping_pong(const char* group, double seconds) {
  // As in the twobp program, freed memory stays with the process.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  try {
    twobp::run(c10d::resolve_process_group(group), seconds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ping_pong: %s\n", error.what());
    twobp::end_all(1);
  }
}
