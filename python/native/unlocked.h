// How long calls run: without the GIL, also while Python exits, and so that Ctrl-C is seen during them.
#pragma once

#include <csignal>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "python/native/module.h"

namespace twobp::python {

// While it lives, this thread does not hold the GIL. Other threads than the first must not take it any more once Python
// has begun to end: CPython would end them within a destructor. So they sleep then.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Whether Python exits and waits for the calls of other threads, which should be given up. Any thread may call it.
bool exit_waits();

// Raises SystemExit, which ends the thread in silence, on any thread but the one that ends Python.
void throw_if_python_exits();

// Makes Python's exit wait for the calls that other threads have begun.
void watch_exit();

// LibTorch's thread count belongs to the calling thread, which is the user's.
class KeepThreads {
 public:
  KeepThreads() : threads_(at::get_num_threads()) {}
  ~KeepThreads() { at::set_num_threads(threads_); }
  KeepThreads(const KeepThreads&) = delete;
  KeepThreads& operator=(const KeepThreads&) = delete;

 private:
  int threads_;
};

// While it lives, C++ runs without the GIL, below autograd, and with a number of threads of its own.
struct Unlocked {
  const WithoutGil free;
  const KeepThreads keep;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// Whether Ctrl-C came since the last WatchInterrupt was made. Any thread may call it.
bool interrupted();

// While it lives, Ctrl-C is seen at once, and then by Python, which cannot run its handler during a step. Does nothing
// on other threads than Python's first, or if the process ignores Ctrl-C.
class WatchInterrupt {
 public:
  WatchInterrupt();
  ~WatchInterrupt();
  WatchInterrupt(const WatchInterrupt&) = delete;
  WatchInterrupt& operator=(const WatchInterrupt&) = delete;

 private:
  struct sigaction before_ {};
  bool watches_ = false;
};

// Adds to an exception what has happened, unless it says so already. KeyboardInterrupt has no text of its own.
void tell(const py::object& exception, const std::string& what);

// Runs Python's handlers of the signals that came meanwhile. An exception that they raise is told `what`.
void run_handlers(const std::string& what);

// Calls `once` until it gives a result. It gives none after Ctrl-C, and is then called again, unless a handler in
// Python raises. That exception is told `given_up`.
template <typename Once>
auto until_done(const std::string& given_up, const Once& once) {
  try {
    while (true) {
      const WatchInterrupt watch;
      {
        const Unlocked unlocked;
        if (auto result = once()) return *result;
      }
      throw_if_python_exits();
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  } catch (const py::error_already_set& raised) {
    tell(raised.value(), given_up);
    throw;
  }
}

}  // namespace twobp::python
