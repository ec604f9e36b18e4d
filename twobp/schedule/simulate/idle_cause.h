// The causes of a rank's idle time. The executor and the simulation report the same ones.
#pragma once

#include <string_view>

namespace twobp {

enum class IdleCause : int {
  kStartUp,  // before its first F of the step
  kMessage,  // waiting for a message while W was pending (policies that do not fill)
  kNothing,  // waiting for a message with no W left to fill
  kTail,     // finished, while other ranks were not
};
inline constexpr int kIdleCauses = 4;
std::string_view idle_cause_name(IdleCause cause);  // "start-up", "message", "nothing to fill", "tail"

}  // namespace twobp
