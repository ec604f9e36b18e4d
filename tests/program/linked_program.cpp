#include "apps/program.h"
#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

[[maybe_unused]] const bool linked = [] {
  test::linked_program = run_program;
  return true;
}();

}  // namespace
}  // namespace twobp::TWOBP_FILE
