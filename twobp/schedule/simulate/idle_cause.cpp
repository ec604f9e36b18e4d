// The names of the causes.
#include "twobp/schedule/simulate/idle_cause.h"

#include <array>

namespace twobp {

std::string_view idle_cause_name(IdleCause cause) {
  constexpr std::array<std::string_view, kIdleCauses> kNames = {"start-up", "message", "nothing to fill",
                                                                "tail"};
  return kNames.at(static_cast<size_t>(cause));
}

}  // namespace twobp
