// Messages of exceptions of any type.
#pragma once

#include <string>

namespace twobp {

// The message of the exception that is being handled. Of an exception of other libraries: in one line,
// without LibTorch's backtrace.
std::string message_of_thrown();

}  // namespace twobp
