// Starts the script with posix_spawn. One loop around poll moves bytes in all three directions, so that the two sides
// cannot wait for each other with full pipes.
#include "twobp/data/text/python.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"

extern char** environ;

namespace twobp {
namespace {

constexpr size_t kKeptErrors = 1 << 14;
constexpr size_t kLongestMessage = 500;

std::string reason(int error) {
  return std::generic_category().message(error);
}

void close_and_forget(int& fd) {
  if (fd >= 0) ::close(std::exchange(fd, -1));
}

void make_nonblocking(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

// The last non-empty line, shortened for a message. A traceback ends with the error.
std::string last_line(const std::string& text) {
  std::string last;
  for (const auto& line : split(text, '\n')) {
    if (line.find_first_not_of(" \t\r") != std::string::npos) last = line;
  }
  std::replace_if(
      last.begin(), last.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  if (last.size() > kLongestMessage) last.replace(kLongestMessage, std::string::npos, "...");
  return last;
}

// A pair of file descriptors, closed on exec and on destruction.
struct Ends {
  std::array<int, 2> fds = {-1, -1};
  ~Ends() {
    for (int& fd : fds) close_and_forget(fd);
  }
};

}  // namespace

std::string find_python() {
  const char* given = std::getenv("TWOBP_PYTHON");
  if (given != nullptr && *given != '\0') return given;
  std::vector<std::string> known;
  const char* active = std::getenv("VIRTUAL_ENV");
  if (active != nullptr && *active == '/') known.push_back(concat(active, "/bin/python"));
  known.emplace_back(TWOBP_BUILD_PYTHON);  // beside the sources; never under the folder one happens to be in
  for (const std::string& python : known) {
    if (::access(python.c_str(), X_OK) == 0) return python;
  }
  return "python3";
}

PythonProcess::PythonProcess(std::string name, const std::string& script, const std::vector<std::string>& arguments,
                             double timeout)
    : name_(std::move(name)), python_(find_python()), timeout_(timeout) {
  // stdin is a socket. Unlike a pipe, it can be written without SIGPIPE if the other end is closed.
  Ends in;
  Ends out;
  Ends err;
  TWOBP_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in.fds.data()) == 0 &&
                  ::pipe2(out.fds.data(), O_CLOEXEC) == 0 && ::pipe2(err.fds.data(), O_CLOEXEC) == 0,
              name_, ": cannot make pipes: ", reason(errno), ".");

  std::vector<std::string> words = {python_, "-c", script};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_adddup2(&actions, in.fds[1], STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, out.fds[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, err.fds[1], STDERR_FILENO);
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);  // our own mask may block some signals
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int status = ::posix_spawnp(&pid_, python_.c_str(), &actions, &attributes, argv.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  TWOBP_CHECK(status == 0, name_, ": cannot start ", python_, ": ", reason(status),
              ": install Python 3, or name one in the environment variable TWOBP_PYTHON.");
  in_ = std::exchange(in.fds[0], -1);
  out_ = std::exchange(out.fds[0], -1);
  err_ = std::exchange(err.fds[0], -1);
  for (const int fd : {in_, out_, err_}) make_nonblocking(fd);
}

PythonProcess::~PythonProcess() {
  for (int* fd : {&in_, &out_, &err_}) close_and_forget(*fd);
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void PythonProcess::write(std::string_view bytes) {
  while (!bytes.empty()) exchange(bytes);
}

std::string PythonProcess::read_line() {
  std::string_view nothing;
  size_t searched = 0;
  size_t end = 0;
  while ((end = unread_.find('\n', searched)) == std::string::npos) {
    searched = unread_.size();
    exchange(nothing);
  }
  std::string line = unread_.substr(0, end);
  unread_.erase(0, end + 1);
  return line;
}

std::string PythonProcess::read(size_t bytes) {
  std::string_view nothing;
  while (unread_.size() < bytes) exchange(nothing);
  std::string out = unread_.substr(0, bytes);
  unread_.erase(0, bytes);
  return out;
}

void PythonProcess::exchange(std::string_view& to_write) {
  const double deadline = awake_seconds() + timeout_;
  for (;;) {
    std::array<pollfd, 3> files = {{{to_write.empty() ? -1 : in_, POLLOUT, 0}, {out_, POLLIN, 0}, {err_, POLLIN, 0}}};
    const double left = deadline - awake_seconds();
    TWOBP_CHECK(left > 0, name_, ": ", python_, " did nothing for ", format_seconds(timeout_),
                errors_.empty() ? "" : "; the last line of its stderr: ", last_line(errors_), ".");
    if (::poll(files.data(), files.size(), static_cast<int>(std::min(left, kLongestSleep) * 1000) + 1) <= 0) continue;

    std::array<char, 1 << 16> buffer;
    if (files[2].revents != 0) {
      const ssize_t got = ::read(err_, buffer.data(), buffer.size());
      if (got == 0) close_and_forget(err_);
      if (got > 0) errors_.append(buffer.data(), static_cast<size_t>(got));
      if (errors_.size() > 2 * kKeptErrors) errors_.erase(0, errors_.size() - kKeptErrors);
    }
    if (files[1].revents != 0) {
      const ssize_t got = ::read(out_, buffer.data(), buffer.size());
      if (got > 0) {
        unread_.append(buffer.data(), static_cast<size_t>(got));
        return;
      }
      if (got == 0 || (errno != EAGAIN && errno != EINTR)) ended();
    }
    if (files[0].revents != 0) {
      const ssize_t sent = ::send(in_, to_write.data(), to_write.size(), MSG_NOSIGNAL);
      if (sent > 0) {
        to_write.remove_prefix(static_cast<size_t>(sent));
        return;
      }
      if (sent < 0 && errno != EAGAIN && errno != EINTR) ended();
    }
  }
}

void PythonProcess::ended() {
  // The script closed its end, so it should be ending.
  int status = 0;
  pid_t waited = 0;
  for (const double deadline = awake_seconds() + 5; awake_seconds() < deadline;) {
    waited = ::waitpid(pid_, &status, WNOHANG);
    if (waited == pid_) break;
    ::usleep(5000);
  }
  std::array<char, 1 << 14> buffer;
  ssize_t got = 0;
  while (err_ >= 0 && (got = ::read(err_, buffer.data(), buffer.size())) > 0) {
    errors_.append(buffer.data(), static_cast<size_t>(got));
  }
  std::string how = "closed its output";
  if (waited == pid_) {
    pid_ = -1;
    if (WIFSIGNALED(status)) {
      how = concat("was killed by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
      if (WTERMSIG(status) == SIGKILL) how += ", perhaps for lack of memory";
    } else {
      how = concat("ended too early with exit code ", WEXITSTATUS(status));
    }
  }
  const std::string why = last_line(errors_);
  fail(name_, ": ", python_, " ", how, why.empty() ? "" : ": ", why, ".");
}

}  // namespace twobp
