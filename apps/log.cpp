#include "apps/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "twobp/core/text.h"

namespace twobp {
namespace {

spdlog::logger& logger() {
  static const auto instance = [] {
    auto made = spdlog::stderr_color_mt("twobp");
    made->set_pattern("twobp: %^%l%$: %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void log_in_color(bool color) {
  const auto sink = std::dynamic_pointer_cast<spdlog::sinks::stderr_color_sink_mt>(logger().sinks().front());
  if (!color && sink) sink->set_color_mode(spdlog::color_mode::never);
}
void log_error(const std::string& message) {
  logger().error("{}", printable(message));
}
void log_warning(const std::string& message) {
  logger().warn("{}", printable(message));
}

}  // namespace twobp
