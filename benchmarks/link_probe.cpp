// Measures the time of a message between two processes over MPI, by size. The time runs from the send until the message
// has been received. It is the median over ping-pongs. Prints one JSON object, {"bytes": seconds}.
//
//   mpirun -n 2 build/release/benchmarks/link_probe 16 1048576
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/mpi/mpi.h"

namespace twobp {
namespace {

constexpr double kTimeout = 60;  // seconds
constexpr int kRounds = 25;
constexpr int kWarm = 5;

double one_way(Transport& transport, int64_t bytes, int64_t& message) {
  const at::Tensor tensor = at::zeros({bytes}, at::kByte);
  const int other = 1 - transport.rank();
  std::vector<double> seconds;
  for (int round = 0; round < kWarm + kRounds; ++round, ++message) {
    const Tag tag{.step = message};
    const double begin = now_seconds();
    if (transport.rank() == 0) transport.isend(other, tag, {tensor});
    transport.receive(other, tag, kTimeout);
    if (transport.rank() == 1) transport.isend(other, tag, {tensor});
    if (round >= kWarm) seconds.push_back((now_seconds() - begin) / 2);
  }
  return median(std::move(seconds));
}

void probe(const std::vector<int64_t>& sizes) {
  TWOBP_CHECK(mpi_size() == 2, "start two processes, not ", mpi_size());
  const auto transport = make_mpi_transport(2);
  std::string text;
  int64_t message = 0;
  for (const int64_t bytes : sizes) {
    barrier(*transport, kTimeout);
    text += concat(text.empty() ? "{" : ", ", '"', bytes, "\": ", one_way(*transport, bytes, message));
  }
  if (transport->rank() == 0) std::printf("%s}\n", text.c_str());
  transport->flush(kTimeout);
  barrier(*transport, kTimeout);
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  try {
    std::vector<int64_t> sizes;
    for (int i = 1; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
    for (const int64_t bytes : sizes) TWOBP_CHECK(bytes > 0 && bytes < (1 << 30), "sizes are 1 B to 1 GiB");
    TWOBP_CHECK(!sizes.empty(), "give sizes in bytes");
    twobp::probe(sizes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "link_probe: %s\n", error.what());
    twobp::end_all(1);
  }
  return 0;
}
