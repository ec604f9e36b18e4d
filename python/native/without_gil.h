// C++ without the GIL, also while Python exits.
#pragma once

#include <pybind11/pybind11.h>

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

}  // namespace twobp::python
