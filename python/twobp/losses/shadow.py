"""compute_loss runs several times while it is captured. A shadow takes the trainer's place then: it has the same
attributes, copied when they are read, so that neither lists of metrics nor counters of the trainer change."""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import random
import sys
import types
import warnings
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from twobp import Error
from twobp.capture.errors import current_line
from twobp.capture.export.draws import refusing_draws_of_python
from twobp.capture.state.fingerprint import is_installed, is_installed_module

CONTAINERS = (list, dict, set, collections.deque, tuple)
SILENT = ("log", "save_metrics", "log_metrics", "save_state", "save_model")


def is_copied(value: Any) -> bool:
    """Whether compute_loss may change a value that belongs to the trainer: a container, or an object of the user."""
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    return isinstance(value, CONTAINERS) or not is_installed_module(type(value).__module__)


def copied(value: Any, *kept: Any) -> Any:
    """Copies a value deeply, but not the tensors and modules in it, nor what is `kept`."""
    kept = (*kept, *(one for one in pytree.tree_leaves(value) if isinstance(one, (torch.Tensor, nn.Module))))
    try:
        return copy.deepcopy(value, {id(one): one for one in kept})
    except Exception:
        return copy.copy(value)


def shadow_of(trainer: Any) -> Any:
    own = vars(trainer)
    done: set[str] = set()

    def __getattribute__(self, name):
        if name in own and name not in done and name in object.__getattribute__(self, "__dict__"):
            done.add(name)
            value = own[name]
            if isinstance(value, types.MethodType) and value.__self__ is trainer:
                vars(self)[name] = types.MethodType(value.__func__, self)
            elif is_copied(value):
                modules = [one for one in own.values() if isinstance(one, nn.Module)]
                vars(self)[name] = copied(value, trainer, *modules)
        return object.__getattribute__(self, name)

    kind = type(type(trainer).__name__, (type(trainer),), {"__getattribute__": __getattribute__})
    kind.__qualname__, kind.__module__ = type(trainer).__qualname__, type(trainer).__module__
    new: Any = object.__new__(kind)
    new.__dict__.update(own)
    new.__dict__.update(dict.fromkeys(SILENT, lambda *args, **keywords: None))
    return new


def changed(new: Any, trainer: Any) -> dict[str, Any]:
    """Returns the attributes of a shadow that are no longer the trainer's own objects."""
    own = vars(trainer)
    return {n: one for n, one in vars(new).items() if n not in SILENT and one is not own.get(n, changed)}


def functions_of(trainer: Any) -> list[types.FunctionType]:
    """Returns the functions of the user that compute_loss may run."""
    functions = [vars(kind) for kind in type(trainer).__mro__ if not is_installed_module(kind.__module__)]
    found = [one for table in functions for one in table.values() if isinstance(one, types.FunctionType)]
    for one in (vars(trainer).get("compute_loss"), vars(trainer).get("compute_loss_func")):
        one = getattr(one, "__func__", one)
        if isinstance(one, types.FunctionType) and not is_installed(one.__code__.co_filename):
            found.append(one)
    return found


class Kept:
    """As a context, puts back what compute_loss changes in globals and closures of its file, and what it draws (torch's
    numbers not in a `trace`). It prints nothing, and writes no files."""

    def __init__(self, trainer: Any, trace: bool = False):
        self._trainer, self._trace = trainer, trace

    def __enter__(self):
        self._tables: list[tuple[dict, str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        for function in functions_of(self._trainer):
            space = function.__globals__
            for name in {*function.__code__.co_names} & space.keys():
                self._tables.append((space, name, space[name]))
                self._keep(space[name])
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):
                    self._cells.append((cell, cell.cell_contents))
                    self._keep(cell.cell_contents)
        self._drawn = random.getstate(), numpy.random.get_state()
        self._stack = contextlib.ExitStack()
        if not self._trace:
            self._stack.enter_context(torch.random.fork_rng(devices=[]))
        self._stack.enter_context(quiet())
        self._stack.enter_context(refusing_draws_of_python("compute_loss"))
        return self

    def _keep(self, value: Any) -> None:
        if isinstance(value, (list, dict, set, collections.deque)):
            self._containers.append((value, copied(value)))

    def __exit__(self, *error):
        try:
            self._stack.__exit__(*error)
        finally:
            self._put_back()

    def _put_back(self) -> None:
        random.setstate(self._drawn[0])
        numpy.random.set_state(self._drawn[1])
        for space, name, value in self._tables:
            space[name] = value
        for cell, value in self._cells:
            cell.cell_contents = value
        for value, before in self._containers:
            if value != before:
                value.clear()
                value.update(before) if isinstance(value, (dict, set)) else value.extend(before)


@contextlib.contextmanager
def quiet():
    print_, open_ = builtins.print, builtins.open

    def reading(file, mode="r", *args, **keywords):
        if any(one in str(mode) for one in "wax+") and not is_installed(sys._getframe(1).f_code.co_filename):
            raise Error(
                f"compute_loss writes a file{current_line()}, but it runs several times while it is captured. Keep "
                "what you write in a list of the trainer, and write it in a callback"
            )
        return open_(file, mode, *args, **keywords)

    builtins.print, builtins.open = lambda *args, **keywords: None, reading
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        builtins.print, builtins.open = print_, open_
