// The functions of mpi.h in a build without MPI. They throw Error that says so.
#include <cstdlib>

#include "twobp/core/check.h"
#include "twobp/transport/mpi/mpi.h"

namespace twobp {
namespace {

[[noreturn]] void missing() {
  fail(
      "built without MPI: install one (Debian: libopenmpi-dev, openmpi-bin), configure twobp again with "
      "TWOBP_MPI=ON, or use pipeline.transport = \"threads\"");
}

}  // namespace

bool has_mpi() {
  return false;
}

World make_mpi_world(int, int, const MpiOptions&) {
  missing();
}

std::unique_ptr<Transport> make_mpi_transport(int, const MpiOptions&) {
  missing();
}

int mpi_size() {
  missing();
}

bool mpi_is_running() {
  return false;
}

void end_all(int code) {
  std::_Exit(code);
}

}  // namespace twobp
