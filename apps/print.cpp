#include "apps/print.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iostream>
#include <poll.h>
#include <string_view>
#include <unistd.h>

#include "apps/run_guard.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

constexpr int kLookMilliseconds = 100;  // between two looks for a signal

int first_error = 0;  // of a write to standard output

void print_message(const char* level, const char* color, const std::string& message) {
  const char* terminal = std::getenv("TERM");
  const bool colored = is_terminal(STDERR_FILENO) && terminal != nullptr && std::string_view(terminal) != "dumb";
  const std::string shown = colored ? concat(color, level, "\033[m") : level;
  std::fputs(concat("twobp: ", shown, ": ", printable(message), '\n').c_str(), stderr);
}

}  // namespace

void prepare_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // open() takes the lowest free number.
    if (::fcntl(descriptor, F_GETFD) < 0) static_cast<void>(::open("/dev/null", O_RDWR));
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

bool is_terminal(int descriptor) {
  return ::isatty(descriptor) == 1 && find_launcher().kind != Launcher::Kind::kMpi;
}

bool wait_writable(int descriptor) {
  while (true) {
    pollfd file{descriptor, POLLOUT, 0};
    const bool stops = stop_signal() != 0;
    if (::poll(&file, 1, stops ? 0 : kLookMilliseconds) > 0) return true;
    if (stops) return false;
  }
}

void print_as_is(const std::string& text) {
  if (!wait_writable(STDOUT_FILENO)) return;
  errno = 0;
  const size_t written = std::fwrite(text.data(), 1, text.size(), stdout);
  if ((std::fflush(stdout) != 0 || written < text.size()) && first_error == 0) first_error = errno;
}

void print(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  va_end(arguments);
  std::string text(static_cast<size_t>(std::max(0, length)) + 1, '\0');
  std::vsnprintf(text.data(), text.size(), format, again);
  va_end(again);
  text.pop_back();
  print_as_is(printable_lines(text));
}

void log_error(const std::string& message) {
  print_message("error", "\033[31m\033[1m", message);
}
void log_warning(const std::string& message) {
  print_message("warning", "\033[33m\033[1m", message);
}

void print_table(std::vector<std::vector<std::string>> rows) {
  std::vector<size_t> widths;
  for (auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = printable(row[i]);  // a name with a newline would look like a row of its own
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      text += i > 0 ? "  " + space + row[i] : row[i] + space;
    }
    text += '\n';
  }
  print_as_is(text);
}

void check_output() {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0 && std::cout.good();
  if (!flushed && first_error == 0) first_error = errno;
  if ((flushed && std::ferror(stdout) == 0) || stop_signal() != 0) return;
  fail("cannot write to standard output", first_error != 0 ? concat(": ", std::strerror(first_error)) : std::string());
}

}  // namespace twobp
