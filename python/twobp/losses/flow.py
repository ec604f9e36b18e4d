"""The three ways in which compute_loss runs besides its own.

`Real` runs it as it is, and records the numbers that Python takes out of tensors and what modules return. `Walk` runs
only the Python between the calls of modules, which return tensors without their values, and gives Python the numbers
that it is told. It records the course: which functions of torch were called, with what. `Tracing` runs it for
torch.export: the numbers are those of a walk, and their tensors become outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from twobp.capture.errors import CaptureError, current_line

from .numbers import AS_BOOL, COMPARISONS, MODES, TAKES, Number, as_python, digest, plain
from .ragged import Ragged

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


class OtherCourse(Exception):
    """Python took another course than the one that is known."""


class Unseen(Exception):
    """A number is taken whose value is not known."""


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


class Keys:
    """Names each take by its line and how often that line took before."""

    def __init__(self):
        self._count: dict[str, int] = {}

    def next(self) -> str:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(SKIPPED):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        number = self._count[place] = self._count.get(place, 0) + 1
        return place if number == 1 else f"{place} ({number})"


@contextlib.contextmanager
def module_calls(parts: Callable[[nn.Module], bool], around: Callable[[nn.Module, Callable, tuple, dict], Any]):
    """Lets `around(module, call, args, kwargs)` make the outermost calls of the modules that `parts` chooses."""
    original, thread, depth = nn.Module.__call__, threading.get_ident(), [0]

    def call(module, *args, **kwargs):
        if threading.get_ident() != thread or depth[0] or not parts(module):
            return original(module, *args, **kwargs)

        def inner(*args, **kwargs):
            depth[0] += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth[0] -= 1

        return around(module, inner, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield depth
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


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
            return self.take(T.tolist, tensor, ()) if here else self._tolist(tensor)

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

    def call(self, function, args, kwargs):
        return function(*args, **kwargs)

    def take(self, function, tensor, arguments, made_by=None):
        raise NotImplementedError

    def compared(self, condition: T | None, value: bool, how: str) -> bool:
        return value


class Real(Mode):
    def __init__(self):
        super().__init__()
        self.values: dict[str, Any] = {}

    def take(self, function, tensor, arguments, made_by=None):
        value = self.values[self.keys.next()] = tensor.tolist()
        return as_python(function, value, arguments)


def name_of(function) -> str:
    owner: Any = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__" and hasattr(owner, "__name__"):
        return f"{owner.__name__}.get"
    return getattr(function, "__name__", type(function).__name__)


def writes(name: str, kwargs: Mapping) -> bool:
    return (
        name == "__setitem__" or name.endswith("_") and not name.endswith("__") or name in IN_PLACE or "out" in kwargs
    )


IN_PLACE = {f"__i{op}__" for op in "add sub mul div truediv floordiv mod pow and or xor lshift rshift".split()}


def is_sized(function, args: tuple) -> bool:
    return function in SIZED or function is torch.where and len(args) == 1


def storage_of(tensor: T) -> int:
    return tensor.untyped_storage()._cdata


class Walk(Mode):
    """`names` are those of tensors by id. `values` are the numbers of takes that do not depend on the fields alone.
    `forced` are outcomes of comparisons by key."""

    def __init__(
        self, names: Mapping[int, str], values: Callable[[str, T], Any], forced: Mapping[str, bool] | None = None
    ):
        super().__init__()
        self.names, self.values, self.forced = names, values, forced or {}
        self.takes: dict[str, Take] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.sized: dict[str, Any] = {}
        self._course = hashlib.sha256()
        self._how: dict[int, tuple[T, str]] = {}
        self._unknown: dict[int, T] = {}
        self.constants: dict[int, T] = {}  # tensors that were neither given nor made here
        self._written: dict[int, tuple[T, str]] = {}

    @property
    def course(self) -> str:
        return self._course.hexdigest()

    def note(self, *parts: object) -> None:
        self._course.update(digest(*parts).encode())

    def is_unknown(self, tensor: T) -> bool:
        return storage_of(tensor) in self._unknown

    def how_of(self, tensor: T) -> str:
        known = self._how.get(id(tensor))
        if known is not None:
            how = known[1]
        elif id(tensor) in self.names:
            how = self.names[id(tensor)]
        elif tensor.numel() <= MOST_ELEMENTS and tensor.layout is torch.strided and not self.is_unknown(tensor):
            how = digest(tensor.dtype, tuple(tensor.shape), tensor.detach().flatten().tolist())
        else:
            how = digest(tensor.dtype, tuple(tensor.shape), id(tensor), tensor._version)
        if known is None and id(tensor) not in self.names:
            self.constants[id(tensor)] = tensor
        written = self._written.get(storage_of(tensor))
        return how if written is None else digest(how, written[1])

    def text(self, value: Any, exact: bool) -> str:
        """Describes an argument. Numbers that are computed with are described by how they were made."""
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

    def made(self, results: Any, how: str, unknown: bool) -> None:
        for number, one in enumerate(pytree.tree_leaves(results)):
            if isinstance(one, T):
                self._how[id(one)] = (one, f"{how}.{number}")
                if unknown:
                    self._unknown.setdefault(storage_of(one), one)

    def answered(self, module_name: str, state: str, args: tuple, kwargs: dict, results: Any) -> None:
        how = digest(
            "call", module_name, state, self.text(args, True), self.text(kwargs, True), torch.is_grad_enabled()
        )
        self.note(how)
        self.made(results, how, True)

    def call(self, function, args, kwargs):
        name = name_of(function)
        if (
            name == "set.get"
            or name.endswith(".get")
            and name not in ("data.get", "T.get", "mT.get", "H.get", "real.get")
        ):
            return function(*args, **kwargs)
        exact = name not in ARITHMETIC
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, T)]
        unknown = any(map(self.is_unknown, tensors)) or name.startswith(RANDOM)
        how = digest(name, self.text(args, exact), self.text(kwargs, exact), torch.is_grad_enabled())
        result = function(*args, **kwargs)
        target = kwargs.get("out", args[0] if args else None) if writes(name, kwargs) else None
        if isinstance(target, T):
            place = storage_of(target)
            self._written[place] = (target, digest(how, self._written.get(place, (None, ""))[1]))
            if unknown:
                self._unknown.setdefault(place, target)
            self.note(how)
            return result
        leaves = [one for one in pytree.tree_leaves(result) if isinstance(one, T)]
        if not leaves:
            return result
        self.note(how)
        if is_sized(function, args):
            key = self.sized_keys.next()
            if not unknown:
                self.sized[key] = result
        self.made([one for one in leaves if not any(one is other for other in tensors)], how, unknown)
        return result

    def take(self, function, tensor, arguments, made_by=None):
        key, unknown = self.keys.next(), self.is_unknown(tensor)
        if made_by is not None:
            used, args, kwargs = made_by
            unknown = any(isinstance(o, T) and self.is_unknown(o) for o in pytree.tree_leaves((args, kwargs)))
            how = digest(name_of(used), self.text(args, False), self.text(kwargs, False))
        else:
            how = self.how_of(tensor)
        how = ("?" if unknown else "") + how
        value = self.values(key, tensor) if unknown else tensor.tolist()
        if function in AS_BOOL or isinstance(value, bool):
            self.takes[key] = Take(not unknown, how, (), torch.bool, bool(value))
            return self._decided(key, bool(value), how)
        self.note("take", how, name_of(function))
        self.takes[key] = Take(not unknown, how, tuple(map(int, tensor.shape)), tensor.dtype, value)
        if function is T.item:
            return Number.of(value, None, how)
        return as_python(function, value, arguments)

    def compared(self, condition, value, how):
        return self._decided(self.keys.next(), value, how)

    def _decided(self, key: str, value: bool, how: str) -> bool:
        value = self.forced.get(key, value)
        self.outcomes[key] = Outcome(value, how)
        self.note("outcome", how, value)
        return value


class Tracing(Mode):
    """`plan` has the takes, outcomes and guards of a walk. `sized` are the fields that hold the results of functions
    whose sizes depend on values."""

    def __init__(self, takes: Mapping[str, Take], outcomes: Mapping[str, Outcome], guarded: list[str], sized: dict):
        super().__init__()
        self._takes, self._outcomes, self._guarded, self._sized = takes, outcomes, guarded, sized
        self.tensors: dict[str, T] = {}
        self.guards: dict[str, T] = {}
        self._ragged = Ragged()

    def take(self, function, tensor, arguments, made_by=None):
        key = self.keys.next()
        if key not in self._takes:
            raise OtherCourse(f"{key} takes a number that was not taken before")
        if self._ragged.mask_of(tensor) is not None:
            self._ragged.call(function, self._ragged.mask_of(tensor), (tensor, None), {})  # raises
        take, tensor = self._takes[key], tensor.detach()
        if key in self._outcomes:
            self._guard(key, tensor.reshape(()) != 0)
            return self._outcomes[key].value
        self.tensors[key] = tensor
        if function is T.item:
            return Number.of(take.value, tensor, take.how)
        return as_python(function, take.value, arguments)

    def compared(self, condition, value, how):
        key = self.keys.next()
        if key not in self._outcomes:
            raise OtherCourse(f"{key} compares a number that was not compared before")
        if condition is not None:
            self._guard(key, condition)
        return self._outcomes[key].value

    def _guard(self, key: str, condition: T) -> None:
        if key in self._guarded:
            self.guards[key] = condition.reshape(()) == self._outcomes[key].value

    def call(self, function, args, kwargs):
        if is_sized(function, args) and (key := self.sized_keys.next()) in self._sized:
            return self._sized[key]
        args, kwargs = self._with_tensors(function, args, kwargs)
        mask = self._ragged.mask_of((args, kwargs))
        if mask is None and function is T.__getitem__ and isinstance(args[1], T) and args[1].dtype == torch.bool:
            return self._ragged.choose(*args)
        return function(*args, **kwargs) if mask is None else self._ragged.call(function, mask, args, kwargs)

    def _with_tensors(self, function, args, kwargs):
        leaves, tree = pytree.tree_flatten((args, kwargs))
        numbers = [one for one in leaves if isinstance(one, Number)]
        if not numbers:
            return args, kwargs
        name = name_of(function)
        if name in ("tensor", "as_tensor") and isinstance(args[0], Number):
            dtype = kwargs.get("dtype") or (torch.int64 if isinstance(args[0], int) else torch.get_default_dtype())
            return (args[0].tensor.to(dtype).reshape(()),), {}
        if name not in ARITHMETIC:
            if any(one.how.startswith("?") for one in numbers):
                raise CaptureError(
                    f"compute_loss gives {name} a number that it took out of a tensor{current_line()}. Give it the "
                    "tensor, and leave out .item()"
                )
            return pytree.tree_unflatten([plain(one) for one in leaves], tree)
        wide = any(isinstance(one, T) and one.dtype == torch.float64 for one in leaves)
        dtype = torch.float64 if wide else torch.float32
        new = [
            one if not isinstance(one, Number) else one.tensor.to(dtype if isinstance(one, float) else torch.int64)
            for one in leaves
        ]
        return pytree.tree_unflatten(new, tree)
