#include "python/native/unlocked.h"

#include <atomic>
#include <cstdint>

namespace twobp::python {
namespace {

std::atomic<bool> interrupt_seen{false};
std::atomic<void (*)(int)> python_handler{nullptr};

void on_interrupt(int signal) {
  interrupt_seen = true;
  if (auto* handler = python_handler.load(); handler != nullptr) handler(signal);
}

}  // namespace

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
