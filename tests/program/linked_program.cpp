#include <cstdlib>
#include <dlfcn.h>
#include <string_view>

#include "apps/program.h"
#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

[[maybe_unused]] const bool linked = [] {
  test::linked_program = [](int argc, char** argv) {
#ifdef TWOBP_STAND_IN_NCCL  // a running process searches the folders that the variable had when it started
    const char* path = std::getenv("LD_LIBRARY_PATH");
    if (path != nullptr && std::string_view(path).starts_with(TWOBP_STAND_IN_NCCL))
      ::dlopen(TWOBP_STAND_IN_NCCL "/libnccl.so.2", RTLD_NOW);
#endif
    return run_program(argc, argv);
  };
  return true;
}();

}  // namespace
}  // namespace twobp::TWOBP_FILE
