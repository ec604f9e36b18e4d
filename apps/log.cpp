#include "apps/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

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

void log_error(const std::string& message) {
  logger().error("{}", message);
}
void log_warning(const std::string& message) {
  logger().warn("{}", message);
}

}  // namespace twobp
