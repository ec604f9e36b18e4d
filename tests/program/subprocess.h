// Runs the built program as a user does, with a time-out that kills it, and collects its output.
#pragma once

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <iterator>
#include <poll.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/free_port.h"
#include "tests/train/helpers.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"

namespace twobp::test {

struct Finished {
  int exit_code = -1;  // 128 + the signal that ended it
  std::string out;
  std::string err;
  double seconds = 0;
  bool timed_out = false;
};

// Seconds until a program counts as hanging.
#ifdef __SANITIZE_THREAD__
inline constexpr double kHangs = 240;  // the sanitizer makes it slow
#else
inline constexpr double kHangs = 60;
#endif

struct RunOptions {
  std::string program = TWOBP_PROGRAM;        // found on PATH
  std::vector<std::string> environment = {};  // "NAME=VALUE", besides that of the test
  double timeout = kHangs;
  // Sends `signal`, `times` times, as soon as this returns true for the output.
  std::function<bool(const std::string& out)> interrupt_when;
  int signal = SIGINT;
  int times = 1;
  double between = 0.2;                  // seconds between two signals, so that the first one has been handled
  double continue_after = 0;             // seconds from the last signal to SIGCONT; 0: never
  double kill_after = 0;                 // seconds until SIGKILL; 0: never
  std::function<bool()> kill_when = {};  // sends SIGKILL once it returns true
};

// This is the program's main(), if the test links it. A fork runs it, which saves the 0.3 s that LibTorch takes to
// start and to end.
inline int (*linked_program)(int argc, char** argv) = nullptr;

inline Finished run_program(const std::vector<std::string>& arguments, const RunOptions& options = {}) {
  int out[2];
  int err[2];
  // A program that another thread starts must not inherit them.
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  std::fflush(nullptr);  // otherwise a fork prints it, too
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::signal(SIGHUP, SIG_DFL);  // the tests may run under nohup
    for (const std::string& variable : options.environment) ::putenv(const_cast<char*>(variable.c_str()));
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    for (const int fd : {out[0], out[1], err[0], err[1]}) ::close(fd);
    std::vector<char*> argv = {const_cast<char*>(options.program.c_str())};
    for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    if (linked_program != nullptr && options.program == TWOBP_PROGRAM) {
      ::close_range(STDERR_FILENO + 1, ~0U, 0);
      const int code = linked_program(static_cast<int>(arguments.size()) + 1, argv.data());
      std::fflush(nullptr);
      ::_exit(code);
    }
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  Finished result;
  const double begin = now_seconds();
  bool interrupted = false;
  bool killed = false;
  pollfd files[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  std::string* texts[2] = {&result.out, &result.err};
  while (files[0].fd >= 0 || files[1].fd >= 0) {
    if (now_seconds() - begin > options.timeout && !result.timed_out) {
      result.timed_out = true;
      ::kill(pid, SIGKILL);
    }
    double wait = 0.05;
    if (options.kill_after > 0 && !killed) {
      const double left = options.kill_after - (now_seconds() - begin);
      if (left <= 0) {
        killed = true;
        ::kill(pid, SIGKILL);
      } else {
        wait = std::min(wait, left);
      }
    }
    ::poll(files, 2, static_cast<int>(wait * 1000));
    for (int i = 0; i < 2; ++i) {
      if (files[i].fd < 0 || files[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t bytes = ::read(files[i].fd, buffer, sizeof(buffer));
      if (bytes > 0) {
        texts[i]->append(buffer, static_cast<size_t>(bytes));
      } else {
        ::close(files[i].fd);
        files[i].fd = -1;
      }
    }
    if (!killed && options.kill_when && options.kill_when()) {
      killed = true;
      ::kill(pid, SIGKILL);
    }
    if (!interrupted && options.interrupt_when && options.interrupt_when(result.out)) {
      interrupted = true;
      for (int i = 0; i < options.times; ++i) {
        if (i > 0) ::usleep(static_cast<useconds_t>(options.between * 1e6));
        ::kill(pid, options.signal);
      }
      if (options.continue_after > 0) {
        ::usleep(static_cast<useconds_t>(options.continue_after * 1e6));
        ::kill(pid, SIGCONT);
      }
    }
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  result.seconds = now_seconds() - begin;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  EXPECT_FALSE(result.timed_out) << "hangs: " << join(arguments, " ") << "\n" << result.out << result.err;
  return result;
}

// One process of a run.
struct Process {
  std::vector<std::string> environment = {};
  RunOptions options = {};
};

// They have the variables that torchrun sets, without torchrun: nobody ends the others when one has ended. `ended`
// counts those that have.
inline std::vector<Finished> run_processes(const std::vector<Process>& processes,
                                           const std::vector<std::string>& arguments, std::atomic<int>& ended) {
  const int port = free_port();
  std::vector<Finished> finished(processes.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < processes.size(); ++i) {
    threads.emplace_back([&, i] {
      RunOptions options = processes[i].options;
      std::vector<std::string>& all = options.environment;
      for (const char* name : {"RANK", "LOCAL_RANK"}) all.push_back(concat(name, "=", i));
      all.push_back(concat("WORLD_SIZE=", processes.size()));
      all.push_back(concat("MASTER_PORT=", port));
      all.emplace_back("MASTER_ADDR=127.0.0.1");
      all.insert(all.end(), processes[i].environment.begin(), processes[i].environment.end());
      finished[i] = run_program(arguments, options);
      ++ended;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return finished;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines = split(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

// Runs the program in a shell. In `line`, "$0" is the program's path, and "$1" and so on are the `arguments`.
inline Finished run_in_shell(const std::string& line, std::vector<std::string> arguments, RunOptions options = {}) {
  arguments.insert(arguments.begin(), {"-c", line, options.program});
  options.program = "sh";
  return run_program(arguments, options);
}

// The program exits with 0 and prints nothing on stderr.
inline Finished expect_success(const std::vector<std::string>& arguments) {
  Finished result = run_program(arguments);
  EXPECT_EQ(result.exit_code, 0) << join(arguments, " ") << "\n" << result.err;
  EXPECT_EQ(result.err, "") << join(arguments, " ");
  return result;
}

// The program exits with 1 and prints exactly one line on stderr, which contains each of `parts`.
inline Finished expect_one_message(const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
  Finished result = run_program(arguments);
  EXPECT_EQ(result.exit_code, 1) << join(arguments, " ");
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;
  EXPECT_EQ(result.err.rfind("twobp: error: ", 0), 0U) << result.err;
  for (const auto& part : parts) {
    EXPECT_NE(result.err.find(part), std::string::npos) << "no \"" << part << "\" in: " << result.err;
  }
  return result;
}

// Returns a configuration that trains in milliseconds.
inline nlohmann::json tiny_config() {
  return {{"model", {{"type", "llama"}, {"dim", 16}, {"layers", 2}, {"heads", 2}, {"hidden", 24}, {"vocab", 32}}},
          {"data", {{"synthetic", "tokens"}, {"sequence", 8}, {"held_out", 0.01}}},
          {"pipeline", {{"stages", 2}, {"micro_batches", 2}, {"micro_batch_size", 2}, {"pin", false}}},
          {"optimizer", {{"lr", 1e-3}}},
          {"train", {{"steps", 4}}}};
}

// With a folder for a configuration and for what runs write.
class InAFolder : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string config(const nlohmann::json& content) const { return folder_.write("config.json", content.dump()); }
  // What a run with --metrics wrote, step by step.
  std::vector<nlohmann::json> metrics_of(const std::string& name) const {
    std::vector<nlohmann::json> steps;
    for (const auto& line : lines_of(read_file(path(name)))) steps.push_back(nlohmann::json::parse(line));
    return steps;
  }

  TempFolder folder_;
};

}  // namespace twobp::test
