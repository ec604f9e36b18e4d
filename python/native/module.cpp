#include "python/native/module.h"

#include "python/native/without_gil.h"
#include "twobp/core/check.h"

PYBIND11_MODULE(_native, module) {
  namespace py = pybind11;
  py::register_exception<twobp::Error>(module, "Error", PyExc_RuntimeError).attr("__module__") = "twobp";
  twobp::python::watch_exit();
  twobp::python::add_support(module);
  twobp::python::add_schedules(module);
  twobp::python::add_planner(module);
  twobp::python::add_trainer(module);
  twobp::python::add_watch(module);
}
