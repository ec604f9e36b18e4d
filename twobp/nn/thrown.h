// Messages of exceptions of any type.
#pragma once

#include <string>

namespace twobp {

// The message of the exception that is being handled. The message of another library's exception is put on one line,
// without LibTorch's backtrace.
std::string message_of_thrown();

}  // namespace twobp
