#include "twobp/nn/thrown.h"

#include <algorithm>
#include <exception>

#include <c10/util/Exception.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

std::string in_one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

std::string message_of_thrown() {
  try {
    throw;
  } catch (const Error& e) {
    return e.what();
  } catch (const c10::Error& e) {
    return in_one_line(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return in_one_line(e.what());
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace twobp
