// Notices changes of a module's tensors in microseconds, so that every step can look.
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "python/native/module.h"

namespace twobp::python {
namespace {

// What is compared of a tensor: where it is, how often an operator has changed it and, since fused optimizers
// and tensor.data leave that count as it is, four of its elements.
struct Look {
  const void* place = nullptr;
  uint32_t version = 0;
  bool trained = false;
  std::array<std::array<char, 8>, 4> elements{};

  bool operator==(const Look&) const = default;
};

Look look_at(const at::Tensor& tensor) {
  Look look;
  look.place = tensor.const_data_ptr();
  look.version = tensor._version();
  look.trained = tensor.requires_grad();
  const auto size = static_cast<int64_t>(tensor.element_size());
  const int64_t count = tensor.numel();
  if (count == 0 || size > 8 || !tensor.is_non_overlapping_and_dense() || !tensor.is_cpu()) return look;
  for (size_t i = 0; i < look.elements.size(); ++i) {
    const int64_t index =
        (count - 1) * static_cast<int64_t>(i) / (static_cast<int64_t>(look.elements.size()) - 1);
    std::memcpy(look.elements[i].data(), static_cast<const char*>(look.place) + index * size, size);
  }
  return look;
}

class Looks {
 public:
  // Of each tensor, the dict that the module has it in, and its key there.
  void add(py::dict table, py::object key) {
    const auto tensor = py::reinterpret_borrow<py::object>(table[key]);
    Look look = look_at(THPVariable_Unpack(tensor.ptr()));
    of_.push_back({std::move(table), std::move(key), tensor, look});
  }

  // The number of the first tensor that is another one or was changed; -1: none.
  int64_t first_change() const {
    for (size_t i = 0; i < of_.size(); ++i) {
      const One& one = of_[i];
      const PyObject* now = PyDict_GetItemWithError(one.table.ptr(), one.key.ptr());
      if (now != one.tensor.ptr() || look_at(THPVariable_Unpack(one.tensor.ptr())) != one.look)
        return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  struct One {
    py::dict table;
    py::object key;
    py::object tensor;
    Look look;
  };
  std::vector<One> of_;
};

}  // namespace

void add_watch(py::module_& module) {
  py::class_<Looks>(module, "Looks")
      .def(py::init<>())
      .def("add", &Looks::add)
      .def("first_change", &Looks::first_change);
}

}  // namespace twobp::python
