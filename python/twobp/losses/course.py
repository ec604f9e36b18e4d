"""The course of compute_loss: which functions of torch its Python calls, with what. A tensor is described by how it was
made. In a trace for many shapes, descriptions contain sizes of the fields: a Template computes the course for other
sizes, to be compared with the one that Python takes there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from twobp.capture import symbols
from twobp.capture.sizes import numbers_of

from .numbers import COMPARISONS, MODES, TAKES, Number, digest, plain

T = torch.Tensor
SKIPPED = (
    *(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, numpy.__file__, __file__)),
    "<frozen",
    "<string>",
    "<eval_with_key>",
)  # files whose frames do not say which line takes a number
MOST_ELEMENTS = 1 << 16  # of a constant whose values are compared
ARITHMETIC = set(
    "add sub rsub mul div true_divide floor_divide pow clamp clamp_min clamp_max where lt le gt ge eq ne fmod "
    "remainder lerp __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __floordiv__ "
    "__rfloordiv__ __pow__ __rpow__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__ tensor as_tensor".split()
)
# The sizes of their results depend on values.
SIZED = {
    getattr(place, name)
    for place in (torch, T)
    for name in (
        "nonzero",
        "argwhere",
        "unique",
        "unique_consecutive",
        "masked_select",
        "bincount",
        "repeat_interleave",
    )
}
RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential_")
# These may return their argument itself. In a trace they return another object.
SAME = set("to type type_as contiguous float double half bfloat16 int long bool cpu".split())
READS = set("numel nelement size dim ndimension stride element_size is_floating_point is_contiguous".split())
PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}
IN_PLACE = {f"__i{op}__" for op in "add sub mul div truediv floordiv mod pow and or xor lshift rshift".split()}


@dataclasses.dataclass
class Take:
    """A number, or several, that Python takes. `known` says that it depends on the fields alone. `begin` is its place
    in the row of a micro-batch."""

    known: bool
    how: str
    shape: tuple
    dtype: torch.dtype
    value: Any
    begin: int = 0

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclasses.dataclass
class Outcome:
    value: bool
    how: str

    @property
    def known(self) -> bool:
        return not self.how.startswith("?")


def line() -> str:
    """Returns the line of user code that runs now."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(SKIPPED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Keys:
    """Names each take by its line and how often that line took before."""

    def __init__(self):
        self._count: dict[str, int] = {}

    def next(self) -> str:
        place = line()
        number = self._count[place] = self._count.get(place, 0) + 1
        return place if number == 1 else f"{place} ({number})"


class Mode(TorchFunctionMode):
    """`depth` is that of module_calls: what modules do is not for these modes."""

    def __init__(self):
        super().__init__()
        self.depth = [0]
        self.keys, self.sized_keys = Keys(), Keys()

    def __enter__(self):
        MODES.append(self)
        self._tolist, thread = FakeTensor.tolist, threading.get_ident()

        def tolist(tensor):  # it does not ask modes
            here = threading.get_ident() == thread and not self.depth[0]
            if not here:
                return self._tolist(tensor)
            with self.unrecorded():
                return self.take(T.tolist, tensor, ())

        FakeTensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        MODES.remove(self)
        FakeTensor.tolist = self._tolist
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.depth[0]:
            return function(*args, **kwargs)
        if function in COMPARISONS:
            return self.take(T.__bool__, COMPARISONS[function](*args, **kwargs).all(), (), (function, args, kwargs))
        if function is T.__contains__:
            return self.take(T.__bool__, (args[0] == plain(args[1])).any(), (), (function, args, kwargs))
        if function in TAKES:
            return self.take(function, args[0], args[1:])
        return self.call(function, args, kwargs)

    @contextlib.contextmanager
    def unrecorded(self):
        self.depth[0] += 1
        try:
            yield
        finally:
            self.depth[0] -= 1

    def digest(self, *parts: object) -> str:
        return digest(*parts)

    def text(self, value: Any, exact: bool) -> str:
        return repr(value)

    def call(self, function, args, kwargs):
        return function(*args, **kwargs)

    def take(self, function, tensor, arguments, made_by=None):
        raise NotImplementedError

    def compared(self, condition: T | None, value: bool, how: str) -> bool:
        return value


class Recorded(Mode):
    """Records the course. `names` are those of tensors by id."""

    def __init__(self, names: Mapping[int, str]):
        super().__init__()
        self.names = names
        self.notes: list[str] = []
        self.asked: list[tuple] = []  # tensors and arguments of requires_grad_
        self._how: dict[int, tuple[T, str]] = {}
        self._unknown: dict[int, T] = {}
        self.constants: dict[int, T] = {}  # tensors that were neither given nor made here
        self._written: dict[int, tuple[T, str]] = {}
        self.sized: dict[str, Any] = {}

    def note(self, first: object, *others: object) -> None:
        self.notes.append(first if isinstance(first, str) and not others else self.digest(first, *others))

    def gradients(self) -> bool:
        return torch.is_grad_enabled()

    def is_unknown(self, tensor: T) -> bool:
        return storage_of(tensor) in self._unknown

    def how_of(self, tensor: T) -> str:
        known = self._how.get(id(tensor))
        if known is not None:
            how = known[1]
        elif id(tensor) in self.names:
            how = self.names[id(tensor)]
        elif is_constant(tensor) and not self.is_unknown(tensor):
            with _disable_current_modes():
                how = digest(tensor.dtype, tuple(tensor.shape), tensor.detach().flatten().tolist())
        else:
            how = digest(tensor.dtype, tuple(tensor.shape), id(tensor), tensor._version)
        if known is None and id(tensor) not in self.names:
            self.constants[id(tensor)] = tensor
        written = self._written.get(storage_of(tensor)) if self._written else None
        return how if written is None else self.digest(how, written[1])

    def text(self, value: Any, exact: bool) -> str:
        """Describes an argument. Numbers that are computed with are described by how they were made."""
        if type(value) in PLAIN:
            return repr(value)
        if isinstance(value, T):
            return self.how_of(value)
        if isinstance(value, Number):
            return repr(plain(value)) if exact else value.how
        if isinstance(value, (list, tuple)):
            return f"[{','.join(self.text(one, exact) for one in value)}]"
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{key}:{self.text(one, exact)}' for key, one in value.items())}}}"
        if isinstance(value, slice):
            return f"slice{self.text([value.start, value.stop, value.step], exact)}"
        if isinstance(value, numpy.ndarray):
            return digest(value.dtype, value.shape, value.tobytes().hex())
        if callable(value) or isinstance(value, nn.Module):
            return getattr(value, "__qualname__", type(value).__qualname__)
        if type(value).__repr__ is object.__repr__:
            return type(value).__qualname__
        return repr(value)

    def made(self, leaves: list, how: str, unknown: bool) -> None:
        for number, one in enumerate(leaves):
            if isinstance(one, T):
                self._how[id(one)] = (one, f"{how}.{number}")
                if unknown:
                    self._unknown.setdefault(storage_of(one), one)

    def answered(self, module_name: str, state: str, args: tuple, kwargs: dict, results: Any) -> None:
        how = self.digest("call", module_name, state, self.text(args, True), self.text(kwargs, True), self.gradients())
        self.note(how)
        self.made(pytree.tree_leaves(results), how, True)

    def call(self, function, args, kwargs):
        name = name_of(function)
        if is_read(name):
            return self.compute(function, args, kwargs)
        if name == "requires_grad_":  # PEFT calls it for each adapter
            self.note(name, self.how_of(args[0]), args[1:], kwargs)
            self.asked.append((args[0], *args[1:], *kwargs.values()))
            return function(*args, **kwargs)
        exact = name not in ARITHMETIC
        tensors = tensors_of((args, kwargs))
        unknown = any(map(self.is_unknown, tensors)) or name.startswith(RANDOM)
        named = self.text(kwargs, exact) if kwargs else ""
        how = self.digest(name, self.text(args, exact), named, self.gradients())
        key = self.sized_keys.next() if is_sized(function, args) else None
        result = self.compute(function, args, kwargs, key)
        target = kwargs.get("out", args[0] if args else None) if writes(name, kwargs) else None
        if isinstance(target, T):
            place = storage_of(target)
            self._written[place] = (target, self.digest(how, self._written.get(place, (None, ""))[1]))
            if unknown:
                self._unknown.setdefault(place, target)
            self.note(how)
            return result
        leaves = tensors_of(result)
        if not leaves:
            return result
        self.note(how)
        if key is not None and not unknown:
            self.sized[key] = result
        if name in SAME and isinstance(result, T) and isinstance(args[0], T) and result.dtype == args[0].dtype:
            if result is not args[0]:
                self._how[id(result)] = (result, self.how_of(args[0]))
                if unknown:
                    self._unknown.setdefault(storage_of(result), result)
            return result
        self.made([one for one in leaves if not any(one is other for other in tensors)], how, unknown)
        return result

    def compute(self, function, args, kwargs, sized: str | None = None):
        """Calls a function. `sized` is the key of one that is_sized."""
        return function(*args, **kwargs)

    def taken(self, tensor: T, unknown: bool, made_by: tuple | None) -> str:
        """Returns how a number that Python takes was made."""
        if made_by is None:
            return ("?" if unknown else "") + self.how_of(tensor)
        used, args, kwargs = made_by
        return ("?" if unknown else "") + self.digest(name_of(used), self.text(args, False), self.text(kwargs, False))

    def decided(self, value: bool, how: str) -> bool:
        self.note("outcome", how, value)
        return value


class Template:
    """The course of a trace for many shapes, as a bundle has programs. `entries` are their sizes. Texts, which other
    texts and notes contain by number, are digested for the sizes of a micro-batch."""

    MARK = re.compile("\x01([sd])(\\d+)\x02")

    def __init__(self, described: dict, entries: list[dict]):
        self._described, self._entries = described, entries

    def at(self, fields: Mapping[str, T]) -> At | None:
        """Returns the course for a micro-batch, or None if it has none."""
        try:
            numbers = numbers_of(self._entries, fields)
        except (LookupError, TypeError):
            return None
        return None if numbers is None else At(self._described, numbers)


class At:
    def __init__(self, described: dict, numbers: list):
        self._described, self._numbers = described, numbers

    def notes(self) -> list[str]:
        sizes = [repr(self._numbers[one["size"]]) for one in self._described["sizes"]]
        digests: list[str] = []

        def filled(text: str) -> str:
            return Template.MARK.sub(lambda one: (sizes if one[1] == "s" else digests)[int(one[2])], text)

        for text in self._described["texts"]:
            digests.append(digest(filled(text)))
        return [filled(one) for one in self._described["notes"]]

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Returns the shapes of the tensors that each call of a module returns."""
        return [
            [tuple(self._numbers[n["size"]] if isinstance(n, dict) else n for n in shape) for shape in call]
            for call in self._described["calls"]
        ]

    def difference(self, notes: list[str]) -> str | None:
        """Returns the line where another course differs, or None if it is the same."""
        own = self.notes()
        if own == notes:
            return None
        lines = self._described["lines"]
        return next((line for line, a, b in zip(lines, own, notes) if a != b), lines[-1] if lines else "")


class Symbolic:
    """Descriptions of a trace: what depends on sizes is a mark, until a Template knows them."""

    def __init__(self):
        self._sizes: dict[str, int] = {}
        self._numbers: list = []
        self._texts: list[str] = []
        self.lines: list[str] = []
        self.calls: list[list[list]] = []

    def size(self, value: Any) -> str:
        if not symbols.is_size(value := symbols.plain(value)):
            return repr(value)
        number = self._sizes.setdefault(f"{type(value).__name__} {symbols.expr_of(value)}", len(self._numbers))
        if number == len(self._numbers):
            self._numbers.append(value)
        return f"\x01s{number}\x02"

    def digest(self, *parts: object) -> str:
        text = "\0".join(map(str, parts))
        if "\x01" not in text:
            return digest(text)
        self._texts.append(text)
        return f"\x01d{len(self._texts) - 1}\x02"

    def returned(self, output: Any) -> None:
        """Notes what a module returned."""
        leaves = [one for one in pytree.tree_leaves(output) if isinstance(one, T)]
        self.calls.append([[symbols.argument(size) for size in one.shape] for one in leaves])

    def described(self, notes: list[str]) -> dict:
        return {
            "sizes": [{"size": one} for one in self._numbers],
            "texts": self._texts,
            "notes": notes,
            "lines": self.lines,
            "calls": self.calls,
        }


@functools.lru_cache(4096)
def name_of(function) -> str:
    owner: Any = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__" and hasattr(owner, "__name__"):
        return f"{owner.__name__}.get"
    return getattr(function, "__name__", type(function).__name__)


@functools.lru_cache(4096)
def is_read(name: str) -> bool:
    """Whether a function only reads what is no tensor, such as a shape."""
    if name.endswith(".get"):
        return name not in ("data.get", "T.get", "mT.get", "H.get", "real.get")
    return name in READS


def writes(name: str, kwargs: Mapping) -> bool:
    return (
        name == "__setitem__" or name.endswith("_") and not name.endswith("__") or name in IN_PLACE or "out" in kwargs
    )


def is_sized(function: Callable, args: tuple) -> bool:
    return function in SIZED or function is torch.where and len(args) == 1


def tensors_of(value: Any) -> list[T]:
    """Returns the tensors in arguments or results. Most are plain, for which a tree takes long."""
    if isinstance(value, T):
        return [value]
    if type(value) in PLAIN:
        return []
    if type(value) in (tuple, list):
        return [one for part in value for one in tensors_of(part)]
    if type(value) is dict:
        return [one for part in value.values() for one in tensors_of(part)]
    return [one for one in pytree.tree_leaves(value) if isinstance(one, T)]


def storage_of(tensor: T) -> int:
    if type(tensor) is not T and type(tensor) is not nn.Parameter:
        tensor = getattr(tensor, "elem", tensor)  # of a FunctionalTensor
    return tensor.untyped_storage()._cdata


def is_traced(tensor: T) -> bool:
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(tensor)


def is_constant(tensor: T) -> bool:
    """Whether the values of a tensor can be compared."""
    return not is_traced(tensor) and tensor.layout is torch.strided and tensor.numel() <= MOST_ELEMENTS
