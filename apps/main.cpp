#include <cstdio>
#include <cstdlib>

#include "apps/program.h"
#include "twobp/transport/mpi/mpi.h"

int main(int argc, char** argv) {
  const int code = twobp::run_program(argc, argv);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // the sanitizers report at the end
  // Static objects are not destroyed, because LibTorch's take 0.1 s. But one of them finalizes MPI.
  if (!twobp::mpi_is_running()) {
    std::fflush(nullptr);
    std::_Exit(code);
  }
#endif
  return code;
}
