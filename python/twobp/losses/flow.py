"""The three ways in which compute_loss runs besides its own.

`Real` runs it as it is, and records the numbers that Python takes out of tensors and what modules return. `Walk` runs
only the Python between the calls of modules, which return tensors without their values, and gives Python the numbers
that it is told. `Tracing` runs it for torch.export: the numbers are those of a walk, and their tensors become outputs.
Both record the course: which functions of torch were called, with what (course.py)."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from twobp import Error
from twobp.capture import symbols
from twobp.capture.errors import CaptureError, current_line

from .course import ARITHMETIC, Mode, Outcome, Recorded, Symbolic, Take, line, name_of
from .numbers import AS_BOOL, TOO_LARGE, Number, as_python, digest, is_too_large, plain
from .ragged import Ragged

T = torch.Tensor


class OtherCourse(Exception):
    """Python took another course than the one that is known."""


class Unseen(Exception):
    """A number is taken whose value is not known."""


@contextlib.contextmanager
def module_calls(
    parts: Callable[[nn.Module], bool],
    around: Callable[[nn.Module, Callable, tuple, dict], Any],
    method: str = "__call__",
):
    """Lets `around(module, call, args, kwargs)` make the outermost calls of the modules that `parts` chooses, which
    call `method`. Python looks at each class of modules when `__call__` is replaced, but not for `_call_impl`."""
    original, thread, depth = getattr(nn.Module, method), threading.get_ident(), [0]

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

    with replaced(nn.Module, method, lambda _: call):
        yield depth


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Callable[[Any], Any]):
    """Gives a module of Python or a class another attribute for a while, new(the usual one), if it has it."""
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    setattr(owner, name, new(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


remembering = functools.cache(functools.cache)  # a function that gives the first answer to each question again


def packages_read_once():
    """accelerate reads files of a package each time it is asked for it, as by TRL in each loss."""
    return replaced(sys.modules.get("accelerate.utils.imports"), "_is_package_available", remembering)


class Real(Mode):
    def __init__(self):
        super().__init__()
        self.values: dict[str, Any] = {}

    def take(self, function, tensor, arguments, made_by=None):
        key = self.keys.next()
        if not tensor.is_floating_point() and is_too_large(tensor):
            raise Error(TOO_LARGE.format(key))
        value = self.values[key] = tensor.tolist()
        return as_python(function, value, arguments)


class Walk(Recorded):
    """`values` are the numbers of takes that do not depend on the fields alone. `forced` are outcomes of comparisons by
    key."""

    def __init__(
        self, names: Mapping[int, str], values: Callable[[str, T], Any], forced: Mapping[str, bool] | None = None
    ):
        super().__init__(names)
        self.values, self.forced = values, forced or {}
        self.takes: dict[str, Take] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.form: Any = None  # of what compute_loss returned beside the loss

    @property
    def course(self) -> str:
        return digest(*self.notes)

    def take(self, function, tensor, arguments, made_by=None):
        key = self.keys.next()
        read = [tensor] if made_by is None else pytree.tree_leaves(made_by[1:])
        unknown = any(isinstance(one, T) and self.is_unknown(one) for one in read)
        how = self.taken(tensor, unknown, made_by)
        value = self.values(key, tensor) if unknown else tensor.tolist()
        if function in AS_BOOL or isinstance(value, bool):
            self.takes[key] = Take(not unknown, how, (), torch.bool, bool(value))
            return self._outcome(key, bool(value), how)
        self.note("take", how, name_of(function))
        self.takes[key] = Take(not unknown, how, tuple(map(int, tensor.shape)), tensor.dtype, value)
        if function is T.item:
            return Number.of(value, None, how)
        return as_python(function, value, arguments)

    def compared(self, condition, value, how):
        return self._outcome(self.keys.next(), value, how)

    def _outcome(self, key: str, value: bool, how: str) -> bool:
        value = self.forced.get(key, value)
        self.outcomes[key] = Outcome(value, how)
        return self.decided(value, how)


class Tracing(Recorded):
    """`takes`, `outcomes` and `guarded` are those of a walk. `given` are the fields that hold the results of functions
    whose sizes depend on values."""

    def __init__(
        self,
        names: Mapping[int, str],
        takes: Mapping[str, Take],
        outcomes: Mapping[str, Outcome],
        guarded: list[str],
        given: dict,
    ):
        super().__init__(names)
        self._takes, self._outcomes, self._guarded, self._given = takes, outcomes, guarded, given
        self.tensors: dict[str, T] = {}
        self.guards: dict[str, T] = {}
        self._ragged = Ragged()
        self.symbolic = Symbolic()

    def digest(self, *parts):
        return self.symbolic.digest(*parts)

    def note(self, first, *others):
        super().note(first, *others)
        self.symbolic.lines.append(line())

    def gradients(self):
        return False  # as in a walk

    def text(self, value, exact):
        return self.symbolic.size(value) if isinstance(value, symbols.SYMBOLIC) else super().text(value, exact)

    def answered(self, module_name, state, args, kwargs, results):
        super().answered(module_name, state, args, kwargs, results)
        self.symbolic.returned(results)

    def take(self, function, tensor, arguments, made_by=None):
        key = self.keys.next()
        if key not in self._takes:
            raise OtherCourse(f"{key} takes a number that was not taken before")
        if self._ragged.mask_of(tensor) is not None:
            self._ragged.call(function, self._ragged.mask_of(tensor), (tensor, None), {})  # raises
        take = self._takes[key]
        how = self.taken(tensor, not take.known, made_by)
        self.tensors[key] = tensor = tensor.detach()
        if key in self._outcomes:
            self._guard(key, tensor.reshape(()) != 0)
            return self.decided(self._outcomes[key].value, how)
        self.note("take", how, name_of(function))
        if function is T.item:
            return Number.of(take.value, tensor, how)
        return as_python(function, take.value, arguments)

    def compared(self, condition, value, how):
        key = self.keys.next()
        if key not in self._outcomes:
            raise OtherCourse(f"{key} compares a number that was not compared before")
        if condition is not None:
            with self.unrecorded():
                self._guard(key, condition)
        return self.decided(self._outcomes[key].value, how)

    def _guard(self, key: str, condition: T) -> None:
        if key in self._guarded:
            self.guards[key] = condition.reshape(()) == self._outcomes[key].value

    def compute(self, function, args, kwargs, sized=None):
        if sized in self._given:
            return self._given[sized]
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
