"""Guards say whether the values that a capture has read are still the same. A value counts if the trace read it: which
attributes of modules and other objects it read is recorded, and all else that the walk of fingerprint.py reaches from
there counts."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping

from torch import nn

from twobp import _native

from ..errors import OWN
from .fingerprint import AROUND, HEAP_TYPE, TORCH, Fingerprint, Node, codes_of, is_plain, module_of, torch_state

IMMUTABLE_TYPE = 1 << 8  # of a class's __flags__
ALL = "__dict__"  # an object whose attributes are read in ways that are not recorded
WHOLE = {"__dict__", "__getstate__", "__reduce__", "__reduce_ex__", "__dir__"}


class Guards:
    """The guards of a walk. `reads` has the attributes that the trace read, by the number of the object. `buffers` are
    those that the programs have as constants."""

    def __init__(self, walk: Fingerprint, reads: Mapping[int, Collection[str]], buffers: Collection[int]):
        self._native = _native.Guards()
        self._names: list[str] = []
        self._shown: list[Callable[[], object] | None] = []
        self._state = torch_state()
        for _, *guard in walk._at.guards:
            self._add(*guard)
        seen, left = set(), [number for _, number in walk._at.edges]
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            node = walk.nodes[number]
            names = reads.get(number, ()) if node.attributes is not None else (ALL,)
            self._attributes(node, names)
            for label, kind, arguments, name in node.guards:
                if label is not None and label not in names and ALL not in names:
                    continue
                if kind != "buffer":
                    self._add(kind, arguments, name)
                elif id(arguments[2]) in buffers:
                    self._add("entry", arguments[:2], name)
                    self._add("tensor", arguments[2:], name)
            left += [child for label, child in node.edges if label is None or label in names or ALL in names]

    def __len__(self) -> int:
        return len(self._names)

    def change(self) -> str | None:
        """Returns the name of a value that is not what it was, with the value. Returns None if there is none."""
        if torch_state() != self._state:
            before, now = next((a, b) for a, b in zip(self._state, torch_state()) if a != b)
            return f"a setting of torch ({now} in place of {before})"
        number = self._native.first_change()
        if number < 0:
            return None
        shown = self._shown[number]
        value = shown() if shown is not None else None
        return f"'{self._names[number]}'" + (f" (now {value!r})" if shown is not None and is_plain(value) else "")

    def _attributes(self, node: Node, names: Collection[str]) -> None:
        if node.attributes is None:
            return
        if ALL in names:
            self._add("items", (node.attributes,), node.name)
            return
        for name in names:
            if not name.startswith("__"):
                self._add("entry", (node.attributes, name), f"{node.name}.{name}")

    def _add(self, kind: str, arguments: tuple, name: str) -> None:
        getattr(self._native, kind)(*arguments)
        new = len(self._native) - len(self._names)  # a function has several
        self._names += [name.removeprefix("module.").removeprefix("module") or "the module"] * new
        self._shown += [functools.partial(arguments[0].get, arguments[1]) if kind == "entry" else None] * new


@contextlib.contextmanager
def recording(walk: Fingerprint):
    """Gives a dict of the attributes that this thread reads, by the number of the object, of all objects that the walk
    has met."""
    thread = threading.get_ident()
    reads: dict[int, set[str]] = {
        number: set() for number, node in enumerate(walk.nodes) if node.attributes is not None
    }
    names = {id(walk.nodes[number].value): read for number, read in reads.items()}
    places = set()
    modules = []
    members: set[types.CodeType] = set()
    for number, read in reads.items():
        value = walk.nodes[number].value
        if type(value) is types.ModuleType:
            modules.append(value)
            continue
        place, codes = last_class(type(value)), codes_around(type(value))
        members |= codes
        if place is None or codes:
            read.add(ALL)
        else:
            places.add(place)
    if walk.around - members:
        for read in reads.values():
            read.add(ALL)

    def recorder(before):
        def __getattribute__(self, name):
            read = names.get(id(self))
            if read is not None and threading.get_ident() == thread:
                if name not in WHOLE:
                    read.add(name)
                elif not isinstance(self, nn.Module) or not sys._getframe(1).f_code.co_filename.startswith(
                    (TORCH, OWN)
                ):
                    read.add(ALL)
            return before(self, name)

        return __getattribute__

    own = {place: place.__dict__.get("__getattribute__") for place in places}
    recorded = type("module", (types.ModuleType,), {"__getattribute__": recorder(types.ModuleType.__getattribute__)})
    try:
        for module in modules:
            module.__class__ = recorded
        for place in places:
            type.__setattr__(place, "__getattribute__", recorder(place.__getattribute__))
        yield reads
    finally:
        for module in modules:
            module.__class__ = types.ModuleType
        for place, before in own.items():
            if before is None:
                type.__delattr__(place, "__getattribute__")
            else:
                type.__setattr__(place, "__getattribute__", before)


def last_class(kind: type) -> type | None:
    """Returns the class whose __getattribute__ every read of an attribute reaches, or None if there is no such
    class."""
    for one in kind.__mro__:
        custom = one.__dict__.get("__getattribute__")
        if (
            custom is not None
            and one is not object
            and (one is kind.__mro__[-2] or "super" not in getattr(getattr(custom, "__code__", None), "co_names", ()))
        ):
            return None
    if len(kind.__mro__) < 2:
        return None
    last = kind.__mro__[-2]
    changes = type(last).__setattr__ is type.__setattr__ and type(last).__delattr__ is type.__delattr__
    return last if changes and last.__flags__ & (HEAP_TYPE | IMMUTABLE_TYPE) == HEAP_TYPE else None


def codes_around(kind: type) -> set[types.CodeType]:
    """Returns the methods of a class that may read attributes in ways that are not recorded. A __getattribute__ that
    calls the one above it is recorded there."""
    found = set()
    for one in kind.__mro__:
        if module_of(one).split(".")[0] in ("builtins", "torch"):
            continue
        for name, value in vars(one).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if not isinstance(value, types.FunctionType) or name == "__getattribute__":
                continue
            if any(AROUND.intersection(code.co_names) for code in codes_of(value.__code__)):
                found.add(value.__code__)
    return found
