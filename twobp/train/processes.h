// What the processes of a run tell each other between steps, on the threads that run the program: whether
// all of them managed something, and which of them writes what. Every member but those that ask for a number
// is called by all processes, in the same order.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "twobp/transport/transport.h"

namespace twobp {

class Processes {
 public:
  // A run of one process: nothing is sent.
  Processes() = default;
  // `transport`: World::processes, which outlives the calls. Waits end after `timeout` seconds.
  Processes(Transport& transport, double timeout);

  int index() const { return index_; }
  int count() const { return count_; }
  bool is_first() const { return index_ == 0; }
  double timeout() const { return timeout_; }

  // The first process's text.
  std::string from_first(const std::string& text) const;
  // On the first process everyone's, by process; elsewhere nothing.
  std::vector<std::string> to_first(const std::string& text) const;

  // The same with tensors.
  std::vector<Values> tensors_to_first(const Values& tensors) const;

  // Runs `body` on every process. If it throws on any, it throws on all: on the first of those what it threw,
  // elsewhere Aborted. `body` may take up to 20 time-outs, such as to write files: whoever is at work says so
  // meanwhile, so that those who wait can tell it from one that is frozen.
  void together(const std::function<void()>& body) const;

  // By name: whether it is this process that writes what the name stands for. Of several that hold it, the
  // first does. A name may be there twice.
  std::vector<bool> writes(const std::vector<std::string>& names) const;

  // Throws Aborted if a process has failed. Not a call for all.
  void throw_if_aborted() const;

 private:
  Transport* transport_ = nullptr;
  double timeout_ = 300;
  int index_ = 0;
  int count_ = 1;
};

}  // namespace twobp
