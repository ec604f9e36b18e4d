"""Computes one hash of everything on which a module's forward pass depends: code, attributes, configuration, versions. It is the key of the cache."""
from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import logging
import os
import pathlib
import platform
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict

import torch
from torch import nn

HERE = os.path.dirname(os.path.realpath(__file__))
# For code below these folders, the version of its package stands for it.
INSTALLED = tuple({os.path.join(os.path.realpath(path), "") for path in (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(os.path.dirname(torch.__file__)),
    os.path.dirname(HERE))})
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice, torch.dtype, torch.device, torch.Size, torch.layout,
         torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# These attributes of modules and classes do not change the forward pass, or are checked elsewhere.
UNUSED_OF_MODULES = {"_parameters", "_buffers", "_modules", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
                     "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
                     "generation_config"}  # of transformers, only for generate(); it holds a hash of the process
UNUSED_OF_CLASSES = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
                     "__abstractmethods__", "_abc_impl", "__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__parameters__",
                     "__orig_bases__", "__match_args__"}


class Unknown(Exception):
    """A value may change the forward pass, and the hash cannot cover it."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns the values of a contiguous tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns a digest of dtype, sizes and values."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(f"{flat.dtype} {tuple(flat.shape)} ".encode() + bytes_of(flat)).hexdigest()


@functools.lru_cache(None)
def capture_digest() -> str:
    """Returns a digest of the code of this package."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(HERE).rglob("*.py")):
        digest.update(str(path.relative_to(HERE)).encode() + path.read_bytes())
    return digest.hexdigest()


@functools.lru_cache(None)
def is_installed(filename: str) -> bool:
    return filename.startswith("<frozen") or os.path.realpath(filename).startswith(INSTALLED)


def is_installed_module(name: str) -> bool:
    module, top = sys.modules.get(name), name.split(".")[0]
    file = getattr(module, "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    return is_installed(file) if file else top in sys.stdlib_module_names and top != "__main__"


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """Returns a code and those of the functions that are written inside it."""
    return [code, *(inner for one in code.co_consts if isinstance(one, types.CodeType) for inner in codes_of(one))]


class Fingerprint:
    """A hash of everything that was added. It follows references. A value that was added before is replaced by its number, so that ties count."""

    def __init__(self):
        self._hash = hashlib.sha256()
        self._number: dict[int, int] = {}
        self._kept: list = []  # so that no id is used twice
        self._packages: set[str] = set()

    def hexdigest(self) -> str:
        self._patched()
        return self._hash.hexdigest()

    def word(self, *words: object) -> None:
        for one in words:
            text = str(one).encode("utf-8", "surrogatepass")
            self._hash.update(f"{len(text)}:".encode() + text)

    def add(self, value) -> None:
        """Adds a value. Raises Unknown."""
        if isinstance(value, enum.Enum):
            self.word("enum", type(value).__qualname__, value.name)
        elif isinstance(value, PLAIN):
            self.word(type(value).__name__, repr(value))
        elif id(value) in self._number:
            self.word("again", self._number[id(value)])
        else:
            self._number[id(value)] = len(self._number)
            self._kept.append(value)
            self._add_new(value)

    def _add_new(self, value) -> None:
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout is not torch.strided or type(value) not in (torch.Tensor, nn.Parameter):
                raise Unknown(f"a {type(value).__name__} on {value.device} cannot be distinguished from others")
            self.word("tensor", value.requires_grad, value.stride(), tensor_digest(value))
        elif type(value) in (list, tuple):
            self.word(type(value).__name__, len(value))
            self._each(value)
        elif type(value) in (dict, OrderedDict, types.MappingProxyType):
            self.word("dict", len(value))
            for key, one in value.items():
                self.add(key)
                self.add(one)
        elif type(value) in (set, frozenset):
            self._set(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.word("method")
            self._each((value.__self__, value.__func__))
        elif isinstance(value, (staticmethod, classmethod)):
            self.word(type(value).__name__)
            self.add(value.__func__)
        elif isinstance(value, (property, functools.cached_property)):
            self.word("property")
            self._each((value.fget, value.fset, value.fdel) if isinstance(value, property) else (value.func,))
        elif isinstance(value, functools.partial):
            self.word("partial")
            self._each((value.func, value.args, value.keywords))
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
                                types.GetSetDescriptorType, types.MemberDescriptorType, type(torch._C._get_default_device))):
            self._builtin(value)
        elif isinstance(value, types.ModuleType):
            self.word("module", value.__name__)
            self._package(value.__name__)
        elif isinstance(value, weakref.ref):
            self.word("weakref")
            self.add(value())
        elif isinstance(value, logging.Logger):
            self.word("logger", value.name)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value)

    def _each(self, values) -> None:
        for one in values:
            self.add(one)

    def _set(self, values) -> None:
        """Uses an order that does not depend on the process."""
        self.word("set", len(values))
        self._each(sorted(values, key=lambda one: (type(one).__name__, str(one))))

    def _builtin(self, value) -> None:
        owner = getattr(value, "__self__", None)
        self.word("builtin", getattr(value, "__module__", None), getattr(value, "__qualname__", repr(value)))
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.add(owner)

    def _code(self, code: types.CodeType) -> None:
        self.word("code", code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
                  code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, len(code.co_consts))
        self._each(code.co_consts)

    def _function(self, function: types.FunctionType) -> None:
        self.word("function", function.__module__, function.__qualname__)
        self.add(function.__code__)
        if is_installed(function.__code__.co_filename):
            self._package(function.__module__)
            return
        self._each((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:
                self.word("empty cell")
        names = sorted({name for code in codes_of(function.__code__) for name in code.co_names})
        for name in names:
            if name in function.__globals__:
                self.word("global", name)
                self._global(function.__globals__[name], names)

    def _global(self, value, names: list[str]) -> None:
        """Adds a global that a function reads. Of a module, adds only the names that the function may take from it."""
        if not isinstance(value, types.ModuleType):
            self.add(value)
            return
        self.add(value)
        installed = is_installed_module(value.__name__)
        for name in names:
            inner = value.__dict__.get(name)
            if isinstance(inner, types.ModuleType):
                if inner is not value and id(inner) not in self._number:
                    self._global(inner, names)
            elif inner is not None and (not installed or isinstance(inner, types.FunctionType) and not is_installed(inner.__code__.co_filename)):
                self.word("of module", name)
                self.add(inner)

    def _class(self, one: type) -> None:
        self.word("class", one.__module__, one.__qualname__)
        self._each(base for base in one.__bases__ if base is not object)
        installed = is_installed_module(one.__module__)
        if installed:
            self._package(one.__module__)
        own = not one.__module__.split(".")[0] == "torch"
        for name in sorted(one.__dict__):
            value = one.__dict__[name]
            if name in UNUSED_OF_CLASSES:
                continue
            if not installed:
                self.word("member", name)
                self.add(value)
                continue
            inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value.fget if isinstance(value, property) else value
            if isinstance(inner, types.FunctionType) and (own or not is_installed(inner.__code__.co_filename)) or own and isinstance(inner, PLAIN):
                self.word("member", name)
                self.add(inner)

    def _module(self, module: nn.Module) -> None:
        self.word("nn.Module")
        self.add(type(module))
        # Programs take the values of parameters as inputs. The values of buffers are compared with the
        # entry's, unless the forward pass changes them.
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                self.word(kind, name)
                if tensor is not None and id(tensor) in self._number:
                    self.word("again", self._number[id(tensor)])
                elif tensor is not None:
                    self._number[id(tensor)] = len(self._number)
                    self.word(type(tensor).__qualname__, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        for name in sorted(module.__dict__.keys() - UNUSED_OF_MODULES):
            value = module.__dict__[name]
            self.word("attribute", name)
            if name.endswith("_hooks") or name.startswith("_forward_"):  # the keys are hook numbers, which depend on the process
                self._each(value.values() if isinstance(value, dict) else (value,))
            else:
                self.add(value)
        for name, child in module._modules.items():
            self.word("child", name)
            self.add(child)

    def _object(self, value) -> None:
        try:
            how = value.__reduce_ex__(2)
        except Exception as error:
            raise Unknown(f"a {type(value).__module__}.{type(value).__qualname__} cannot be distinguished from others ({error})") from error
        if isinstance(how, str):  # the name identifies it
            self.word("name", how, type(value).__module__, type(value).__qualname__)
            if hasattr(value, "__wrapped__"):
                self.add(value.__wrapped__)
            elif not is_installed_module(type(value).__module__):
                raise Unknown(f"the {type(value).__qualname__} {how} cannot be distinguished from others")
            return
        self.word("object", type(value).__qualname__)
        self.add(type(value))
        make, arguments, state, items, pairs = (*how, None, None, None)[:5]
        self._each((make, arguments, state))
        for some in (items, pairs):
            self.word("items")
            self._each(some or ())

    def _package(self, module: str) -> None:
        """Adds the version of the package to which a module belongs, and the module's own text."""
        top = module.split(".")[0]
        if top in ("builtins", "torch", "twobp") or module in self._packages:
            return
        self._packages.add(module)
        self.word("package", top, getattr(sys.modules.get(top), "__version__", None))
        path = getattr(sys.modules.get(module), "__file__", None)
        if path and path.endswith(".py") and top not in sys.stdlib_module_names:
            self.word(hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest())

    def _patched(self) -> None:
        """Adds what a user has put in place of functions of the packages, or has added to their tables."""
        tops = {name.split(".")[0] for name in self._packages} - set(sys.stdlib_module_names)
        modules = [name for name in sys.modules if name.split(".")[0] in tops]
        for name in sorted([*modules, "torch", "torch.nn.functional"]):
            for key, value in sorted(vars(sys.modules[name]).items()) if sys.modules[name] is not None else ():
                tables = [value]
                if hasattr(type(value), "_global_mapping"):  # the attention functions of transformers
                    tables = [vars(value).get("_local_mapping"), type(value)._global_mapping]
                for place, one in [(key, value), *((f"{key}[{inner}]", one) for table in tables if type(table) is dict
                                                   for inner, one in list(table.items()))]:
                    if isinstance(one, types.FunctionType) and not is_installed(one.__code__.co_filename):
                        self.word("patched", name, place)
                        self.add(one)


def of(whole: nn.Module, fields: dict[str, torch.Tensor], loss_reduction: str | None, check: bool) -> str:
    """Returns the key of a capture. Raises Unknown if the capture depends on something that the hash cannot cover."""
    print_ = Fingerprint()
    print_.word(sys.version, platform.machine(), torch.__version__, torch.backends.cpu.get_cpu_capability(), capture_digest(), loss_reduction, check)
    print_.word(torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
                torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
                torch.backends.mkldnn.enabled)
    for name, tensor in fields.items():
        print_.word("field", name, tensor.dtype, tuple(tensor.shape))
    for hooks in (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks):
        print_.add(list(hooks.values()))
    print_.add(whole)
    return print_.hexdigest()
