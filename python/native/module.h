// The parts of the module twobp._native. The Python files around it are what users see.
#pragma once

#include <pybind11/pybind11.h>

namespace twobp::python {

namespace py = pybind11;

void add_support(py::module_& module);
void add_schedules(py::module_& module);
void add_planner(py::module_& module);
void add_trainer(py::module_& module);
void add_watch(py::module_& module);

}  // namespace twobp::python
