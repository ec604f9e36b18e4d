"""Walks over everything on which a module's forward pass depends: code, attributes, configuration, versions. One walk
gives the hash that is the key of the cache, and the places that guards watch (guards.py), so that the two cannot
differ."""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import ctypes
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import pathlib
import platform
import sys
import sysconfig
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # the package of captures
# For code below these folders, the version of its package stands for it.
INSTALLED = tuple(
    {
        os.path.join(os.path.realpath(path), "")
        for path in (
            *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            os.path.dirname(os.path.dirname(torch.__file__)),
            os.path.dirname(HERE),
        )
    }
)
# Not their subclasses, which may have attributes and code.
PLAIN = {type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice}
PLAIN_OF_TORCH = (
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
DATA = (list, dict, set, frozenset, tuple, int, float, complex, str, bytes)
ANY_NAME = set(
    """
    globals vars getattr eval exec __dict__
""".split()
)  # code with these may read names that it does not contain
AROUND = {"__getattribute__", "getattr_static"}  # code with these may read attributes that are not recorded
HEAP_TYPE = 1 << 9  # of a class's __flags__: Python made it
TORCH = os.path.join(os.path.dirname(os.path.realpath(torch.__file__)), "")
# These attributes of modules and classes do not change the forward pass, or are checked elsewhere.
UNUSED_OF_MODULES = set(
    """
    _parameters _buffers _modules _backward_hooks _backward_pre_hooks _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks generation_config
""".split()
)  # generation_config of transformers is only for generate(), and holds a hash of the process
UNUSED_OF_CLASSES = set(
    """
    __module__ __doc__ __dict__ __weakref__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__
    __abstractmethods__ _abc_impl __firstlineno__ __static_attributes__ __dataclass_fields__ __parameters__
    __orig_bases__ __match_args__ __slotnames__
""".split()
)


VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))


@dataclasses.dataclass
class Node:
    """A value that may change. `edges` are the numbers of the values that it leads to, and `guards` are calls of
    Guards. Both come with the attribute that leads there, or None if they always count. `attributes` is the dict of an
    object whose reads are recorded."""

    value: object
    name: str
    edges: list[tuple[str | None, int]] = dataclasses.field(default_factory=list)
    guards: list[tuple] = dataclasses.field(default_factory=list)
    attributes: dict | None = None


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


def module_of(kind: type) -> str:
    """Returns the name of the module of a class, also where an attribute of the class hides it."""
    name = kind.__module__
    return name if isinstance(name, str) else "__main__"


def is_installed_module(name: str) -> bool:
    module, top = sys.modules.get(name), name.split(".")[0]
    file = getattr(module, "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    return is_installed(file) if file else top in sys.stdlib_module_names and top != "__main__"


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """Returns a code and those of the functions that are written inside it."""
    return [code, *(inner for one in code.co_consts if isinstance(one, types.CodeType) for inner in codes_of(one))]


@functools.lru_cache(None)
def package_digest(top: str) -> str:
    """Returns a digest of the version of a package, and of the sizes and times of its files: reading thousands of files
    would take too long."""
    module = sys.modules.get(top)
    digest = hashlib.sha256(str(getattr(module, "__version__", None)).encode())
    for folder in getattr(module, "__path__", ()):
        for path, folders, names in os.walk(folder):
            folders[:] = sorted(one for one in folders if one != "__pycache__")
            for name in sorted(names):
                status = os.stat(os.path.join(path, name))
                digest.update(
                    f"{os.path.relpath(path, folder)}/{name} {status.st_size} {status.st_mtime_ns}\n".encode()
                )
    return digest.hexdigest()


def is_plain(value) -> bool:
    return type(value) in PLAIN or isinstance(value, PLAIN_OF_TORCH)


def steps_of(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]


def imports_of(code: types.CodeType, package: str | None) -> dict[str, bool]:
    """Returns the modules that a code imports when it runs, and whether it then uses them as a whole."""
    if dis.opmap["IMPORT_NAME"] not in code.co_code[::2]:
        return {}
    found: dict[str, bool] = {}
    steps, whole = steps_of(code), escaping([code])
    for i, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            name = "." * (steps[i - 2].argval or 0) + step.argval
            name = importlib.util.resolve_name(name, package) if name.startswith(".") else name
            rest = steps[i + 1 :]
            taken = rest[0].opname == "IMPORT_FROM" and rest[1].opname.startswith("STORE_")  # from NAME import ...
            stored = next((one.argval for one in rest if one.opname.startswith("STORE_")), None)
            found[name] = found.get(name, False) or not taken and stored in whole
    return found


def escaping(codes: list[types.CodeType]) -> set[str]:
    """Returns the names whose values the codes use as a whole, and not only for an attribute of theirs."""
    found: set[str] = set()
    for code in codes:
        steps = steps_of(code)
        for i, step in enumerate(steps):
            if step.opname.startswith("LOAD_") and steps[i + 1].opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
                found.update(one for one in names if isinstance(one, str))
            elif step.opname == "IMPORT_FROM" and steps[i + 1].argval != step.argval:
                found.add(step.argval)  # under another name
    return found


class Fingerprint:
    """A hash of everything that was added. It follows references. A value that was added before is replaced by its
    number, so that ties count. `nodes` has the values by number. `unknown` says which value the hash cannot tell from
    others; within this process, its identity is hashed."""

    def __init__(self):
        self._hash = hashlib.sha256()
        self._number: dict[int, int] = {}
        self.nodes: list[Node] = []  # which also keep their values, so that no id is used twice
        self.unknown: str | None = None
        self._at = Node(None, "")
        self._packages: set[str] = set()
        self.around: set[types.CodeType] = set()  # of the user's functions that may read what is not recorded
        self.parts: set[nn.Module] = set()  # of the module that is captured; others' tensors are constants

    def finish(self) -> str:
        self._patched()
        return self._hash.hexdigest()

    def number_of(self, value) -> int | None:
        return self._number.get(id(value))

    def word(self, *words: object) -> None:
        for one in words:
            text = str(one).encode("utf-8", "surrogatepass")
            self._hash.update(f"{len(text)}:".encode() + text)

    def add(self, value, name: str = "", label: str | None = None) -> None:
        """Adds a value that has this name in the one that leads to it. `label` is the attribute of that, if its reads
        are recorded."""
        if is_plain(value):
            self.word(type(value).__name__, repr(value))
            return
        number = self._number.get(id(value))
        if number is not None:
            self.word("again", number)
            self._at.edges.append((label, number))
            return
        number = self._number[id(value)] = len(self.nodes)
        self._at.edges.append((label, number))
        owner, self._at = self._at, Node(value, f"{self._at.name}.{name}".strip(".") if name else self._at.name)
        self.nodes.append(self._at)
        try:
            self._add_new(value)
        finally:
            self._at = owner

    def guard(self, kind: str, *arguments, label: str | None = None, name: str = "") -> None:
        self._at.guards.append(
            (label, kind, arguments, f"{self._at.name}.{name}".strip(".") if name else self._at.name)
        )

    def _opaque(self, reason: str) -> None:
        self.unknown = self.unknown or reason
        self.word("opaque", id(self._at.value))

    def _add_new(self, value) -> None:
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, enum.Enum):
            self.word("enum", type(value).__qualname__, value.name)
            self._each((type(value), value._value_))
            own: Any = attributes_of(value)
            self.guard("items", own)
            for name in sorted(name for name in own if not name.startswith("_")):
                self.word(name)
                self.add(own[name], name)
        elif type(value) in (list, tuple):
            self.word(type(value).__name__, len(value))
            if type(value) is list:
                self.guard("items", value)
            for i, one in enumerate(value):
                self.add(one, str(i))
        elif type(value) in (dict, OrderedDict):
            self.guard("items", value)
            self._dict(value)
        elif type(value) in VIEWS:
            self.word(type(value).__name__)
            self._each(shown := contents_of(value))
            self.guard("call", functools.partial(contents_of, value), shown)
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
            self.guard("call", parts := functools.partial(parts_of, value), parts())
        elif isinstance(value, contextvars.ContextVar):
            self.word("context variable")
            self.add(value.get(None))
            self.guard("call", now := functools.partial(value.get, None), now())
        elif isinstance(
            value,
            (
                types.BuiltinFunctionType,
                types.MethodDescriptorType,
                types.WrapperDescriptorType,
                types.MethodWrapperType,
                types.GetSetDescriptorType,
                types.MemberDescriptorType,
                type(torch._C._get_default_device),
            ),
        ):
            self._builtin(value)
        elif isinstance(value, types.ModuleType):
            self._python_module(value)
        elif isinstance(value, weakref.ref):
            self.word("weakref")
            self.add(value())
        elif isinstance(value, logging.Logger):
            self.word("logger", value.name)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value)

    def _python_module(self, module: types.ModuleType) -> None:
        """Adds a module of Python that is used as a value: of the user's, anything may be read."""
        self.word("module", module.__name__)
        self._package(module.__name__)
        if not is_installed_module(module.__name__):
            self._attributes({name: one for name, one in vars(module).items() if not name.startswith("__")})
            self._at.attributes = vars(module)

    def _each(self, values) -> None:
        for one in values:
            self.add(one)

    def _dict(self, values) -> None:
        self.word("dict", len(values))
        for key, one in values.items():
            self.add(key)
            self.add(one, str(key))

    def _tensor(self, value: torch.Tensor) -> None:
        if (
            value.device.type != "cpu"
            or value.layout is not torch.strided
            or type(value) not in (torch.Tensor, nn.Parameter)
        ):
            self._opaque(f"a {type(value).__name__} on {value.device} cannot be distinguished from others")
            self.word(value._version)
            self.guard("call", now := functools.partial(getattr, value, "_version"), now())
            return
        own = attributes_of(value)
        if any(not name.startswith("_") for name in own or ()):
            self.guard("items", own)
            self._dict(own)
        self.guard("tensor", value)
        self.word("tensor", value.requires_grad, value.stride(), tensor_digest(value))

    def _set(self, values) -> None:
        """Uses an order that does not depend on the process."""
        self.word("set", len(values))
        if isinstance(values, set):
            self.guard("set", values, frozenset(values))
        self._each(sorted(values, key=lambda one: (type(one).__name__, str(one))))

    def _builtin(self, value) -> None:
        owner = getattr(value, "__self__", None)
        self.word("builtin", getattr(value, "__module__", None), getattr(value, "__qualname__", repr(value)))
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.add(owner)

    def _code(self, code: types.CodeType) -> None:
        self.word(
            "code",
            code.co_name,
            code.co_code.hex(),
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_flags,
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            len(code.co_consts),
        )
        self._each(code.co_consts)

    def _function(self, function: types.FunctionType) -> None:
        self.word("function", function.__module__, function.__qualname__)
        self.add(function.__code__)
        if is_installed(function.__code__.co_filename):
            self._package(function.__module__)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                with contextlib.suppress(ValueError):  # an empty cell
                    held = cell.cell_contents  # by a decorator
                    if (
                        isinstance(held, (types.FunctionType, types.MethodType, functools.partial))
                        or name == "registry"
                    ):
                        self.add(held, name)
            return
        self.guard("function", function)
        self._each((function.__defaults__, function.__kwdefaults__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.guard("cell", cell, name=name)
            try:
                self.add(cell.cell_contents, name)
            except ValueError:
                self.word("empty cell")
        if function.__dict__:
            self.word("attributes")
            self._dict(function.__dict__)
        self.guard("items", function.__dict__)
        self._globals(function)

    def _globals(self, function: types.FunctionType) -> None:
        """Adds what a function reads of its module, and the modules that it imports when it runs."""
        codes, space = codes_of(function.__code__), function.__globals__
        names, whole = {name for code in codes for name in code.co_names}, escaping(codes)
        any_name = bool(names & ANY_NAME)
        if names & AROUND:
            self.around.add(function.__code__)
        if names & {"import_module", "__import__"} or names >= {"sys", "modules"}:
            for name, module in sorted(sys.modules.items()):
                if isinstance(module, types.ModuleType) and not is_installed_module(name):
                    self.add(module, name)
        if names & {"globals", "eval", "exec"}:
            self.guard("items", space)
            read = [name for name in space if not name.startswith("__")]
        else:
            read = list(names & space.keys())
        for name in sorted(read):
            self.word("global", name)
            self.guard("entry", space, name, name=name)
            self._global(space[name], name, names, any_name, whole)
        for name in sorted(names & vars(builtins).keys() - space.keys()):
            self.guard("entry", space, name, name=name)  # a global would hide it
            self.guard("entry", vars(builtins), name, name=name)
        for code in codes:
            for name, as_whole in sorted(imports_of(code, space.get("__package__")).items()):
                self.word("import", name)
                if (imported := self._imported(name)) is not None:
                    self.guard("entry", sys.modules, name, name=name)
                    self._global(imported, name, names, any_name, whole, as_whole)

    def _imported(self, name: str) -> types.ModuleType | None:
        """Returns a module that a function imports. Only those of the user are loaded for this: the forward pass would
        load them too."""
        if name in sys.modules:
            return sys.modules[name]
        try:
            found = importlib.util.find_spec(name.split(".")[0])
            if found is not None and not is_installed(found.origin or ""):
                return importlib.import_module(name)
        except Exception as error:
            self._opaque(f"the module {name} cannot be imported ({type(error).__name__}: {error})")
        return None

    def _global(
        self,
        value,
        said: str,
        names: set[str],
        any_name: bool,
        whole: set[str],
        as_whole: bool = False,
        seen: tuple = (),
    ) -> None:
        """Adds a global that a function reads. Of a module, adds only the `names` that the function may take from it,
        unless it uses the module `as_whole`."""
        if not isinstance(value, types.ModuleType) or as_whole or said.rpartition(".")[2] in whole:
            self.add(value, said)
            return
        self.word("module", value.__name__)
        self._package(value.__name__)
        installed, space = is_installed_module(value.__name__), vars(value)
        for name in sorted(space.keys() if any_name and not installed else names & space.keys()):
            inner = space[name]
            if name.startswith("__"):
                continue
            self.guard("entry", space, name, name=f"{said}.{name}")
            if isinstance(inner, types.ModuleType):
                if inner is not value and inner not in seen:
                    self._global(inner, f"{said}.{name}", names, any_name, whole, seen=(*seen, value))
            elif inner is not None and (
                not installed
                or is_plain(inner)
                or isinstance(inner, types.FunctionType)
                and not is_installed(inner.__code__.co_filename)
            ):
                self.word("of module", name)
                self.add(inner, f"{said}.{name}")

    def _class(self, one: type) -> None:
        self.word("class", module_of(one), one.__qualname__)
        if one.__flags__ & HEAP_TYPE:
            self.guard("class_", one, name=one.__qualname__)
            self.guard("call", bases := functools.partial(getattr, one, "__bases__"), bases())
        self._each(base for base in one.__bases__ if base is not object)
        if not is_installed_module(module_of(type(one))):
            self.add(type(one))
        installed = is_installed_module(module_of(one))
        if installed:
            self._package(module_of(one))
        own = module_of(one).split(".")[0] != "torch"
        for name in sorted(one.__dict__):
            value = one.__dict__[name]
            if name in UNUSED_OF_CLASSES:
                continue
            if not installed:
                self.word("member", name)
                self.add(value, name)
                continue
            inner = (
                value.__func__
                if isinstance(value, (staticmethod, classmethod))
                else value.fget
                if isinstance(value, property)
                else value
            )
            if (
                isinstance(inner, types.FunctionType)
                and (own or not inner.__code__.co_filename.startswith(TORCH))
                or is_plain(inner)
                and (own or not name.startswith("__"))
            ):
                self.word("member", name)
                self.add(inner, name)

    def _module(self, module: nn.Module) -> None:
        self.word("nn.Module")
        self.guard("type", module, name="__class__")
        self.guard("items", module._modules)
        self._at.attributes = module.__dict__
        self.add(type(module))
        self._slots(module)
        # Programs take the values of the whole's parameters as inputs. The values of its buffers are compared with the
        # entry's, unless the forward pass changes them.
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                self.word(kind, name)
                if tensor is None:
                    continue
                if id(tensor) in self._number:
                    self.word("again", self._number[id(tensor)])
                elif module in self.parts:
                    self.number_tensor(tensor)
                else:  # a constant of the programs, as of a teacher
                    self.add(tensor, name)
                if module not in self.parts:
                    self.guard("items", table, name=name)
                elif kind == "buffer":
                    self.guard("buffer", table, name, tensor, name=name)
        for name in sorted(module.__dict__.keys() - UNUSED_OF_MODULES):
            value = module.__dict__[name]
            self.word("attribute", name)
            if (name.endswith("_hooks") or name.startswith("_forward_")) and isinstance(
                value, dict
            ):  # the keys are hook numbers, which depend on the process
                self.guard("items", value, label=name, name=name)
                for one in value.values():
                    self.add(one, name, name)
            else:
                self.add(value, name, name)
        for name, child in module._modules.items():
            self.word("child", name)
            self.add(child, name)

    def number_tensor(self, tensor: torch.Tensor) -> None:
        """Adds a tensor of the module without its values."""
        self._number[id(tensor)] = len(self.nodes)
        self.nodes.append(Node(tensor, ""))
        self.word(type(tensor).__qualname__, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)

    def _object(self, value) -> None:
        kind, own = type(value), attributes_of(value)
        self.guard("type", value, name="__class__")
        if module_of(kind).split(".")[0] == "twobp":
            self._opaque(f"a {kind.__qualname__} of twobp is no part of a module")
            return
        try:
            how = value.__reduce_ex__(2)
        except Exception as error:
            self._opaque(f"a {kind.__module__}.{kind.__qualname__} cannot be distinguished from others ({error})")
            self.add(kind)
            self._attributes(own)
            self._slots(value)
            return
        if isinstance(how, str):  # the name identifies it
            self.word("name", how, kind.__module__, kind.__qualname__)
            if hasattr(value, "__wrapped__"):
                self.add(value.__wrapped__)
            elif not is_installed_module(module_of(kind)):
                self._opaque(f"the {kind.__qualname__} {how} cannot be distinguished from others")
                self._attributes(own)
                self._slots(value)
            return
        self.word("object", kind.__qualname__)
        self.add(kind)
        make, arguments, state, items, pairs = (*how, None, None, None)[:5]
        self._each((make, arguments))
        is_own = own is not None and (
            state is None
            and not own
            or type(state) is dict
            and state.keys() == own.keys()
            and all(state[key] is own[key] for key in own)
        )
        self._attributes(own)
        if not is_own:
            self.add(state)
        self._slots(value)
        if isinstance(value, (list, dict)):
            self.guard("items", value)
        elif isinstance(value, set):
            self.guard("set", value, frozenset(value))
        for some in (items, pairs):
            self.word("items")
            self._each(some or ())
        if has_hidden_state(kind, own):
            digest = functools.partial(digest_of, value)
            self.guard("call", digest, digest())

    def _slots(self, value) -> None:
        if slots := slots_of(type(value)):  # type: ignore[arg-type]  # classes are hashable
            self.guard("call", read := functools.partial(values_of, value, slots), held := read())
            self._each(held)

    def _attributes(self, own: dict | None) -> None:
        self._at.attributes = own
        for name, value in sorted((own or {}).items(), key=lambda one: str(one[0])):
            self.word("attribute", name)
            self.add(value, str(name), name)

    def _package(self, module: str) -> None:
        """Adds the version and the files of the package to which a module belongs, and the module's own text."""
        top = module.split(".")[0]
        if top in ("builtins", "torch", "twobp") or module in self._packages:
            return
        self._packages.add(module)
        self.word("package", top)
        if top in sys.stdlib_module_names and is_installed_module(module):
            return
        if is_installed_module(module):
            self.word(package_digest(top))
        path = getattr(sys.modules.get(module), "__file__", None)
        if path and path.endswith(".py"):
            self.word(hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest())

    def _patched(self) -> None:
        """Adds what a user has put in place of functions of the packages, or has added to their tables, and switches of
        the modules that were reached."""
        reached = {
            name
            for name in self._packages
            if name.split(".")[0] not in sys.stdlib_module_names and is_installed_module(name)
        }
        tops = {name.split(".")[0] for name in reached}
        modules = [name for name in sys.modules if name.split(".")[0] in tops]
        spaces: dict[str, Mapping] = {
            name: vars(sys.modules[name]) for name in {*modules, *reached} if sys.modules.get(name) is not None
        }
        spaces |= {"torch": vars(torch), "torch.nn.functional": vars(nn.functional), "torch.Tensor": vars(torch.Tensor)}
        self.guard("class_", torch.Tensor, name="torch.Tensor")
        seen: set[int] = set()  # of the tables: all modules have that of the builtins
        for name, space in sorted(spaces.items()):
            if name in reached or name in ("torch", "torch.nn.functional"):
                self.guard("items", space, name=name)
            for key, value in sorted(space.items()):
                kind = type(value)
                if kind is types.FunctionType:
                    self._patched_function(name, key, value)
                elif kind is dict or has_tables(kind):  # type: ignore[arg-type]  # classes are hashable
                    for table in (value,) if kind is dict else tables_of(value):
                        if kind is not dict and name in reached:
                            self.guard("items", table, name=f"{name}.{key}")
                        if type(table) is not dict or id(table) in seen:
                            continue
                        seen.add(id(table))
                        for inner, one in list(table.items()):
                            if type(one) is types.FunctionType:
                                self._patched_function(name, f"{key}[{inner}]", one)
                elif kind in (bool, int, float) and name in reached and not key.startswith("__"):
                    self.word("switch", name, key, value)
            if name in ("torch", "torch.nn.functional", "torch.Tensor"):
                functions = [
                    (key, one.__module__, one.__qualname__)
                    for key, one in sorted(space.items())
                    if type(one) in (types.FunctionType, types.BuiltinFunctionType)
                ]
                self.word("functions", name, functions)

    def _patched_function(self, module: str, place: str, one: types.FunctionType) -> None:
        if not is_installed(one.__code__.co_filename):
            self.word("patched", module, place)
            self.add(one, f"{module}.{place}")


@functools.lru_cache(None)
def has_tables(kind: type) -> bool:
    """Returns whether objects of a class are like the attention functions of transformers: a table of their own over
    one for all."""
    return hasattr(kind, "_global_mapping")


def tables_of(value) -> list:
    return [vars(value).get("_local_mapping"), type(value)._global_mapping]


def parts_of(value: functools.partial) -> tuple:
    return value.func, value.args, value.keywords


@functools.lru_cache(None)
def slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    return tuple(
        one
        for base in kind.__mro__
        if base.__flags__ & HEAP_TYPE
        for one in vars(base).values()
        if isinstance(one, types.MemberDescriptorType)
    )


def values_of(value, slots: tuple[types.MemberDescriptorType, ...]) -> tuple:
    """Returns the values of an object's slots; None for one that has none."""
    found = []
    for slot in slots:
        try:
            found.append(slot.__get__(value))
        except AttributeError:
            found.append(None)
    return tuple(found)


def attributes_of(value) -> dict | None:
    """Returns the dict of an object's attributes, without its own __getattribute__."""
    if isinstance(value, threading.local):
        return value.__dict__  # this thread's
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def has_hidden_state(kind: type, own: dict | None) -> bool:
    """Returns whether an object may change apart from its attributes, items and elements: in slots, or in memory of
    another language."""
    if slots_of(kind):
        return True
    return (
        own is None
        and not issubclass(kind, DATA)
        or any(not base.__flags__ & HEAP_TYPE and base is not object and base not in DATA for base in kind.__mro__)
    )


def contents_of(view) -> tuple:
    """Returns what a view of a dict shows."""
    return tuple(one for pair in view.items() for one in pair) if type(view) is types.MappingProxyType else tuple(view)


def digest_of(value) -> str:
    """Returns a digest of one object, which is computed anew at each check."""
    one = Fingerprint()
    kind = type(value)
    try:
        how = value.__reduce_ex__(2)
    except Exception:
        return ""
    one.word(kind.__qualname__)
    how = (how, None, None, None, None) if isinstance(how, str) else (*how, None, None, None)[:5]
    one.add(how[:3])
    for some in how[3:]:
        one._each(some or ())
    return one._hash.hexdigest()


def torch_state() -> tuple:
    """Returns the settings of the process that a trace reads. Each step asks."""
    backends, device = torch.backends, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return (
        torch.get_default_dtype(),
        device and device.device,
        torch._C._len_torch_function_stack(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    )


def walk_over(whole: nn.Module) -> tuple[Fingerprint, str]:
    """Returns the walk over a module with its loss, and the hash of its state and of torch's settings."""
    walk = Fingerprint()
    walk.parts.update(whole.modules())
    walk.word(*torch_state())
    for name, tensor in whole.named_parameters():
        walk.word(name)
        walk.number_tensor(tensor)  # before a closure may meet it
    for hooks in (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks):
        walk.guard("items", hooks, name="a hook for all modules")
        for one in hooks.values():
            walk.add(one)
    try:
        walk.add(whole)
        digest = walk.finish()
    except RecursionError:
        walk.unknown, digest = "it is nested too deeply", f"unknown {id(walk)}"
    return walk, digest


def key_of(
    state: str,
    fields: dict[str, torch.Tensor],
    loss_reduction: str | None,
    check: bool,
    which: Mapping[str, Collection[int]] | None = None,
) -> str:
    """Returns the key of a capture for micro-batches with these fields, whose sizes in the dimensions `which` may
    differ."""
    key = Fingerprint()
    key.word(
        state,
        sys.version,
        platform.machine(),
        torch.__version__,
        torch.version.git_version,
        torch.backends.cpu.get_cpu_capability(),
        capture_digest(),
        loss_reduction,
        check,
    )
    for name, tensor in fields.items():
        key.word("field", name, tensor.dtype, tuple(tensor.shape))
    if which is not None:
        key.word("many", sorted((name, list(dims)) for name, dims in which.items()))
    return key._hash.hexdigest()
