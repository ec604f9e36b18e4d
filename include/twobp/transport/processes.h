// Communication between the processes of a run, between steps and on the threads that run the program: whether an
// operation succeeded on all of them, and which of them writes what. All processes call every member in the same order,
// except for the members that only return a number.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "twobp/nn/values.h"

namespace twobp {

class Transport;

class Processes {
 public:
  // A run of one process: nothing is sent.
  Processes() = default;
  // `transport` is World::processes and must outlive the calls. Waits end after `timeout` seconds.
  Processes(Transport& transport, double timeout);

  int index() const { return index_; }
  int count() const { return count_; }
  bool is_first() const { return index_ == 0; }
  double timeout() const { return timeout_; }

  // Returns the first process's text.
  std::string from_first(const std::string& text) const;
  // Returns everyone's text by process on the first process, and nothing elsewhere.
  std::vector<std::string> to_first(const std::string& text) const;

  // The same with tensors.
  std::vector<Values> tensors_to_first(const Values& tensors) const;

  // Runs `body` on every process. If it throws on any process, this throws on all: on the first of those its own error,
  // elsewhere Aborted. `body` may take up to 20 time-outs, for example to write files. A working process sends signs of
  // life, so that waiting processes can tell it from a frozen one.
  void together(const std::function<void()>& body) const;

  // Whether this process writes the thing that each name stands for. If several processes hold it, the first of them
  // writes it. A name may occur twice.
  std::vector<bool> writes(const std::vector<std::string>& names) const;

  // Throws Aborted if a process has failed. Processes may call this separately.
  void throw_if_aborted() const;

 private:
  Transport* transport_ = nullptr;
  double timeout_ = 300;
  int index_ = 0;
  int count_ = 1;
};

}  // namespace twobp
