#include "python/native/unlocked.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unistd.h>

namespace twobp::python {
namespace {

// A call that cannot be given up, such as a step of several processes, does not hold up the exit for longer.
constexpr auto kPatience = std::chrono::seconds(5);
// Nor does a thread that makes no further call, and so does not see that Python exits.
constexpr auto kPatienceForThreads = std::chrono::milliseconds(200);

enum class Stage : uint8_t { kRuns, kWaits, kEnded };

std::mutex mutex;
std::condition_variable changed;
Stage stage = Stage::kRuns;
std::thread::id ends;  // the thread that ends Python
int without = 0;       // threads within C++, without the GIL
int taking = 0;        // of these, those that take the GIL now

bool is_other_thread() {
  return stage != Stage::kRuns && ends != std::this_thread::get_id();
}

// CPython ends a daemon thread where it takes the GIL next, which aborts within torch: a thread that calls C++ again
// and again has time to end by SystemExit.
void wait_for_threads() {
  const auto until = std::chrono::steady_clock::now() + kPatienceForThreads;
  const auto active = pybind11::module_::import("threading").attr("active_count");
  while (active().cast<int>() > 1 && std::chrono::steady_clock::now() < until) {
    const pybind11::gil_scoped_release free;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Called with the GIL, before Python ends other threads that take it.
void wait_for_calls() {
  {
    const std::lock_guard lock(mutex);
    stage = Stage::kWaits;
    ends = std::this_thread::get_id();
  }
  for (auto until = std::chrono::steady_clock::now() + kPatience;;) {
    {
      const pybind11::gil_scoped_release free;
      std::unique_lock lock(mutex);
      changed.wait_until(lock, until, [] { return without == 0; });
      changed.wait(lock, [] { return taking == 0; });
    }
    wait_for_threads();
    const std::lock_guard lock(mutex);
    if (taking > 0) continue;
    stage = Stage::kEnded;
    return;
  }
}

std::atomic<bool> interrupt_seen{false};
std::atomic<void (*)(int)> python_handler{nullptr};

void on_interrupt(int signal) {
  interrupt_seen = true;
  if (auto* handler = python_handler.load(); handler != nullptr) handler(signal);
}

}  // namespace

WithoutGil::WithoutGil() {
  {
    const std::lock_guard lock(mutex);
    ++without;
  }
  state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  {
    std::unique_lock lock(mutex);
    if (stage == Stage::kEnded && is_other_thread()) {
      lock.unlock();
      while (true) ::pause();
    }
    ++taking;
  }
  PyEval_RestoreThread(state_);
  {
    const std::lock_guard lock(mutex);
    --taking;
    --without;
  }
  changed.notify_all();
}

bool exit_waits() {
  const std::lock_guard lock(mutex);
  return stage == Stage::kWaits;
}

void throw_if_python_exits() {
  {
    const std::lock_guard lock(mutex);
    if (!is_other_thread()) return;
  }
  PyErr_SetNone(PyExc_SystemExit);
  throw pybind11::error_already_set();
}

void watch_exit() {
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&wait_for_calls));
}

bool interrupted() {
  return interrupt_seen;
}

WatchInterrupt::WatchInterrupt() {
  interrupt_seen = false;
  const auto main = py::module_::import("threading").attr("main_thread")().attr("ident").cast<uint64_t>();
  if (main != PyThread_get_thread_ident()) return;
  struct sigaction ours {};
  if (::sigaction(SIGINT, nullptr, &before_) != 0 || (before_.sa_flags & SA_SIGINFO) != 0 ||
      before_.sa_handler == SIG_IGN || before_.sa_handler == SIG_DFL)
    return;
  python_handler = before_.sa_handler;
  ours = before_;
  ours.sa_handler = on_interrupt;
  watches_ = ::sigaction(SIGINT, &ours, nullptr) == 0;
}

WatchInterrupt::~WatchInterrupt() {
  if (watches_) ::sigaction(SIGINT, &before_, nullptr);
}

void tell(const py::object& exception, const std::string& what) {
  if (PyErr_GivenExceptionMatches(exception.ptr(), PyExc_KeyboardInterrupt) != 0) {
    if (py::len(exception.attr("args")) == 0) exception.attr("args") = py::make_tuple(what);
  } else if (py::hasattr(exception, "add_note")) {  // not before Python 3.11
    const py::object notes = py::getattr(exception, "__notes__", py::list());
    if (!notes.contains(what)) exception.attr("add_note")(what);
  }
}

void run_handlers(const std::string& what) {
  if (PyErr_CheckSignals() == 0) return;
  const py::error_already_set raised;
  tell(raised.value(), what);
  throw raised;
}

}  // namespace twobp::python
