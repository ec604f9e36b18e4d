// How long calls run: without the GIL, and so that Ctrl-C is seen during them.
#pragma once

#include <csignal>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "python/native/module.h"

namespace twobp::python {

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
  const py::gil_scoped_release free;
  const KeepThreads keep;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// Whether Ctrl-C came since the last WatchInterrupt was made. Any thread may call it.
bool interrupted();

// While it lives, Ctrl-C is seen at once, and then by Python, which cannot run its handler during a step.
// Does nothing on other threads than Python's first, or if the process ignores Ctrl-C.
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

// Calls `once` until it gives a result. It gives none after Ctrl-C, and is then called again, unless a
// handler in Python raises.
template <typename Once>
auto until_done(const Once& once) {
  while (true) {
    const WatchInterrupt watch;
    {
      const Unlocked unlocked;
      if (auto result = once()) return *result;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

}  // namespace twobp::python
