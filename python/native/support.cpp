// The module, and what the Python files need of the runtime besides trainers and plans.
#include <string>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <torch/csrc/utils/pybind.h>

#include "python/native/unlocked.h"
#include "twobp/core/check.h"
#include "twobp/files/safetensors.h"
#include "twobp/graph/operators.h"
#include "twobp/nn/context.h"
#include "twobp/nn/device/device.h"
#include "twobp/train/config.h"
#include "twobp/transport/start.h"

namespace twobp::python {

void add_support(py::module_& module) {
  module.def("config_keys", [] {
    std::vector<std::string> names;
    for_each_key(Config{}, [&](const std::string& name, const Key&, void*) { names.push_back(name); });
    return names;
  });
  module.def("check_operator", [](const std::string& name) { graph::find_operator(name); });
  module.def("check_device", [](const std::string& type) {
    if (type != "cpu") Device::count(type);  // opens none: this process may compute on another one than the first
  });
  module.def("find_launcher", [] {
    const Launcher launcher = find_launcher();
    py::dict out;
    out["rank"] = launcher.rank;
    out["size"] = launcher.size;
    out["local_rank"] = launcher.local_rank;
    out["master_address"] = launcher.master_address;
    out["master_port"] = launcher.master_port;
    return out;
  });
  module.def("release_memory", [] {
#ifdef __GLIBC__
    ::malloc_trim(0);
#endif
  });
  module.def("write_tensors", [](const std::string& path, const Fields& tensors) {
    write_safetensors(path, {tensors.begin(), tensors.end()}, {{"format", "pt"}});
  });
  module.def("read_tensors", [](const std::string& path) {
    const SafetensorsFile file(path);
    Fields tensors;
    for (const std::string& name : file.names()) tensors.emplace(name, file.tensor(name));
    return tensors;
  });
}

}  // namespace twobp::python

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
