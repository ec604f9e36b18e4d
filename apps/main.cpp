#include <cstdio>
#include <cstdlib>

#include "apps/program.h"
#include "twobp/transport/mpi/mpi.h"

int main(int argc, char** argv) {
  const int code = twobp::run_program(argc, argv);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which report at the end
  // Static objects are left as they are: LibTorch's take 0.1 s to go. But one of them finalizes MPI.
  if (!twobp::mpi_is_running()) {
    std::fflush(nullptr);
    std::_Exit(code);
  }
#endif
  return code;
}
