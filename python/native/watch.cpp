// Notices changes of a module's tensors and other values in microseconds, so that every step can look.
#include <array>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "python/native/module.h"

namespace twobp::python {
namespace {

// What is compared of a tensor: where it is, how often an operator has changed it and, since fused optimizers and
// tensor.data leave that count as it is, four of its elements.
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
    const int64_t index = (count - 1) * static_cast<int64_t>(i) / (static_cast<int64_t>(look.elements.size()) - 1);
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

  // Takes the numbers of these tensors, and where they are, for unchanged.
  void again(const std::vector<size_t>& numbers) {
    for (const size_t i : numbers) {
      One& one = of_.at(i);
      const bool trained = one.look.trained;
      one.look = look_at(THPVariable_Unpack(one.tensor.ptr()));
      one.look.trained = trained;
    }
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

// Whether two values are equal, of those types that nothing can change. To the bit: 0.0 is not -0.0.
bool same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (a == nullptr || b == nullptr || Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    const double one = PyFloat_AS_DOUBLE(a);
    const double other = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&one, &other, sizeof one) == 0;
  }
  if (PyTuple_CheckExact(a)) {
    if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i) {
      if (!same(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
    }
    return true;
  }
  if (!PyLong_CheckExact(a) && !PyUnicode_CheckExact(a) && !PyBytes_CheckExact(a)) return false;
  return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

// A number that each change of a dict changes (PEP 509), or 0 if this Python has none.
uint64_t version_of([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

// What a capture has read of Python's values, and where. Pointers are compared first, then plain values;
// those of a dict only if it has changed.
class Guards {
 public:
  // The value of a key, or that there is none.
  void entry(const py::dict& table, const py::object& key) {
    add(Kind::kEntry, table, key, PyDict_GetItemWithError(table.ptr(), key.ptr()));
  }
  // All items of a dict or list, in order.
  void items(const py::object& of) {
    add(Kind::kItems, of, py::none(), nullptr);
    of_.back().items = {static_cast<uint32_t>(items_.size()), count(of.ptr())};
    visit(of.ptr(), [&](PyObject* item) {
      items_.push_back(Py_XNewRef(item));
      return true;
    });
  }
  // The elements of a set, of which `copy` is a copy.
  void set(const py::object& of, const py::object& copy) { add(Kind::kSet, of, copy, nullptr); }
  void cell(const py::object& of) { add(Kind::kCell, of, py::none(), PyCell_GET(of.ptr())); }
  void type(const py::object& of) { add(Kind::kType, of, py::none(), reinterpret_cast<PyObject*>(Py_TYPE(of.ptr()))); }
  // The items of its dict, which Python shows as a proxy.
  void class_(const py::object& of) {
    items(py::reinterpret_borrow<py::object>(reinterpret_cast<PyTypeObject*>(of.ptr())->tp_dict));
  }
  void function(const py::object& of) {
    add(Kind::kCode, of, py::none(), PyFunction_GET_CODE(of.ptr()));
    add(Kind::kDefaults, of, py::none(), PyFunction_GET_DEFAULTS(of.ptr()));
    add(Kind::kKeywordDefaults, of, py::none(), PyFunction_GET_KW_DEFAULTS(of.ptr()));
  }
  void tensor(const py::object& of) {
    add(Kind::kTensor, of, py::none(), nullptr);
    of_.back().items.first = static_cast<uint32_t>(looks_.size());
    looks_.push_back(look_at(THPVariable_Unpack(of.ptr())));
  }
  // What a call returns.
  void call(const py::object& of, const py::object& result) { add(Kind::kCall, of, py::none(), result.ptr()); }

  int64_t size() const { return static_cast<int64_t>(of_.size()); }

  // The number of the first guard that does not hold; -1: none.
  int64_t first_change() {
    for (Table& table : tables_) {
      const uint64_t version = version_of(table.dict);
      if (version != 0 && version == table.version) continue;
      if (const int64_t i = first_of(table.guards); i >= 0) return i;
      table.version = version;
    }
    return first_of(others_);
  }

  int traverse(visitproc visit, void* arg) const {
    for (const One& one : of_) {
      Py_VISIT(one.of);
      Py_VISIT(one.key);
      Py_VISIT(one.value);
    }
    for (PyObject* item : items_) Py_VISIT(item);
    return 0;
  }
  void clear() {
    tables_.clear();
    table_of_.clear();
    others_.clear();
    for (const One& one : std::exchange(of_, {})) {
      Py_XDECREF(one.of);
      Py_XDECREF(one.key);
      Py_XDECREF(one.value);
    }
    for (PyObject* item : std::exchange(items_, {})) Py_XDECREF(item);
  }
  Guards() = default;
  ~Guards() { clear(); }
  Guards(const Guards&) = delete;
  Guards& operator=(const Guards&) = delete;

 private:
  enum class Kind : uint8_t {
    kEntry,
    kItems,
    kSet,
    kCell,
    kType,
    kCode,
    kDefaults,
    kKeywordDefaults,
    kTensor,
    kCall,
  };
  struct One {
    Kind kind;
    PyObject* of;
    PyObject* key;
    PyObject* value;                               // null: there was none
    std::pair<uint32_t, uint32_t> items = {0, 0};  // the first in items_ or looks_, and their number
  };

  // The guards of one dict. They hold it.
  struct Table {
    PyObject* dict;
    uint64_t version;  // for which they held
    std::vector<uint32_t> guards;
  };

  void add(Kind kind, const py::object& of, const py::object& key, PyObject* value) {
    const auto number = static_cast<uint32_t>(of_.size());
    if ((kind == Kind::kEntry || kind == Kind::kItems) && PyDict_Check(of.ptr())) {
      const auto [at, added] = table_of_.try_emplace(of.ptr(), tables_.size());
      if (added) tables_.push_back({of.ptr(), 0, {}});
      tables_[at->second].guards.push_back(number);
    } else {
      others_.push_back(number);
    }
    of_.push_back({kind, Py_NewRef(of.ptr()), Py_NewRef(key.ptr()), Py_XNewRef(value)});
  }

  static uint32_t count(PyObject* of) {
    return static_cast<uint32_t>(PyDict_Check(of) ? 2 * PyDict_GET_SIZE(of) : PyList_GET_SIZE(of));
  }

  // Calls `next` with each key and value, or each element, until it returns false.
  template <typename Next>
  static bool visit(PyObject* of, const Next& next) {
    if (PyDict_Check(of)) {
      Py_ssize_t at = 0;
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      while (PyDict_Next(of, &at, &key, &value) != 0) {
        if (!next(key) || !next(value)) return false;
      }
      return true;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(of); ++i) {
      if (!next(PyList_GET_ITEM(of, i))) return false;
    }
    return true;
  }

  // Remembers an equal value, so that its pointer suffices the next time.
  static bool same_or_equal(PyObject*& before, PyObject* now) {
    if (before == now) return true;
    if (!same(before, now)) return false;
    Py_XDECREF(std::exchange(before, Py_XNewRef(now)));
    return true;
  }

  // The first of these guards that does not hold; -1: none.
  int64_t first_of(const std::vector<uint32_t>& guards) {
    for (const uint32_t i : guards) {
      if (holds(of_[i])) continue;
      PyErr_Clear();  // of a comparison
      return i;
    }
    return -1;
  }

  bool holds(One& one) {
    switch (one.kind) {
      case Kind::kEntry:
        return same_or_equal(one.value, PyDict_GetItemWithError(one.of, one.key));
      case Kind::kItems: {
        if (count(one.of) != one.items.second) return false;
        PyObject** before = items_.data() + one.items.first;
        return visit(one.of, [&](PyObject* item) { return same_or_equal(*before++, item); });
      }
      case Kind::kSet:
        return PySet_GET_SIZE(one.of) == PySet_GET_SIZE(one.key) &&
               (PySet_GET_SIZE(one.of) == 0 || PyObject_RichCompareBool(one.of, one.key, Py_EQ) == 1);
      case Kind::kCell:
        return same_or_equal(one.value, PyCell_GET(one.of));
      case Kind::kType:
        return reinterpret_cast<PyObject*>(Py_TYPE(one.of)) == one.value;
      case Kind::kCode:
        return PyFunction_GET_CODE(one.of) == one.value;
      case Kind::kDefaults:
        return same_or_equal(one.value, PyFunction_GET_DEFAULTS(one.of));
      case Kind::kKeywordDefaults:
        return PyFunction_GET_KW_DEFAULTS(one.of) == one.value;
      case Kind::kTensor:
        return look_at(THPVariable_Unpack(one.of)) == looks_[one.items.first];
      case Kind::kCall: {
        PyObject* now = PyObject_CallNoArgs(one.of);
        const bool equal = now != nullptr && same(one.value, now);
        Py_XDECREF(now);
        return equal;
      }
    }
    return false;
  }

  std::vector<One> of_;
  std::vector<Table> tables_;
  std::unordered_map<PyObject*, size_t> table_of_;
  std::vector<uint32_t> others_;  // guards of anything else
  std::vector<PyObject*> items_;
  std::vector<Look> looks_;
};

// A loss function may refer to the trainer, which holds its guards: Python's garbage collector must see the circle.
void collect_garbage(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<Guards&>(py::handle(self)).traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<Guards&>(py::handle(self)).clear();
    return 0;
  };
}

}  // namespace

void add_watch(py::module_& module) {
  py::class_<Looks>(module, "Looks")
      .def(py::init<>())
      .def("add", &Looks::add)
      .def("again", &Looks::again)
      .def("first_change", &Looks::first_change);
  py::class_<Guards>(module, "Guards", py::custom_type_setup(collect_garbage))
      .def(py::init<>())
      .def("entry", &Guards::entry)
      .def("items", &Guards::items)
      .def("set", &Guards::set)
      .def("cell", &Guards::cell)
      .def("type", &Guards::type)
      .def("class_", &Guards::class_)
      .def("function", &Guards::function)
      .def("tensor", &Guards::tensor)
      .def("call", &Guards::call)
      .def("first_change", &Guards::first_change)
      .def("__len__", &Guards::size);
}

}  // namespace twobp::python
