"""A forward pass may leave values behind: a table for its next call, a count of calls, its last output. In a trace,
such tensors have no numbers. All that the walk of fingerprint.py has met is put back, so that neither the module nor
the programs depend on how often capture calls the module."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

from torch import nn

from ..errors import CaptureError
from .fingerprint import Fingerprint

TABLES = ("_parameters", "_buffers", "_modules")
DICTS, LISTS = (dict, OrderedDict, defaultdict), (list, deque)
NOTHING = object()


class AsBefore:
    """What the objects of a walk hold now. As a context, puts it back at the end."""

    def __init__(self, walk: Fingerprint):
        self._walk = walk
        self._tables: list[tuple[str, dict, dict]] = []
        self._lists: list[tuple[str, list | deque | set, list]] = []
        self._globals: list[tuple[str, dict, str, object]] = []
        self._cells: list[tuple[str, Any, object]] = []
        for node in walk.nodes:
            value: Any = node.value
            tables = [
                node.attributes,
                *(
                    [vars(value)[one] for one in TABLES]
                    if isinstance(value, nn.Module)
                    else [value]
                    if type(value) in DICTS
                    else []
                ),
            ]
            self._tables += [(node.name, table, dict(table)) for table in tables if table is not None]
            if type(value) in (*LISTS, set):
                self._lists.append((node.name, value, list(value)))
            for label, kind, arguments, name in node.guards:
                if (
                    kind == "items" and label is not None and label.endswith("hooks")
                ):  # which forward may have registered, beside a flag that it did
                    self._tables.append((name, arguments[0], dict(arguments[0])))
                elif kind == "entry":
                    space, key = arguments
                    self._globals.append((name, space, key, space.get(key, NOTHING)))
                elif kind == "cell":
                    self._cells.append((name, *arguments, content(*arguments)))

    def __enter__(self) -> AsBefore:
        return self

    def __exit__(self, *_) -> None:
        self.put_back()

    def changed(self) -> list[str]:
        """Returns the names of what is no longer what it was."""
        return sorted(
            {named(name, key) for name, _, key, _ in self._entries()}
            | {named(name) for name, one, before in self._lists if not same(one, before)}
            | {named(name) for name, cell, before in self._cells if content(cell) is not before}
        )

    def put_back(self) -> None:
        for _, table, key, before in self._entries():
            if before is NOTHING:
                table.pop(key, None)
            else:
                table[key] = before
        for _, one, before in self._lists:
            if not same(one, before):
                one.clear()
                one.update(before) if isinstance(one, set) else one.extend(before)
        for _, cell, before in self._cells:
            if content(cell) is not before:
                if before is NOTHING:
                    del cell.cell_contents
                else:
                    cell.cell_contents = before

    def check(self) -> None:
        """Raises CaptureError for parameters that the forward pass has made: nothing would train them."""
        owned = {
            id(vars(node.value)[one])
            for node in self._walk.nodes
            if isinstance(node.value, nn.Module)
            for one in ("_parameters", "_modules")
        }
        for name, table, key, _ in self._entries():
            one = table.get(key) if id(table) in owned else None
            made = one.parameters() if isinstance(one, nn.Module) else [one] if one is not None else []
            if any(self._walk.number_of(parameter) is None for parameter in made):
                raise CaptureError(
                    f"the module's forward pass makes '{named(name, key)}', whose parameters are then no part of the "
                    "module that is trained. Make it in __init__, or call the module once on an example before"
                )

    def _entries(self) -> list[tuple[str, dict, str, object]]:
        """Returns (name, dict, key, what it held) of what has changed in dicts and in the modules of Python."""
        found = [
            (name, table, key, before.get(key, NOTHING))
            for name, table, before in self._tables
            for key in {*before, *table}
            if table.get(key, NOTHING) is not before.get(key, NOTHING)
        ]
        return found + [one for one in self._globals if one[1].get(one[2], NOTHING) is not one[3]]


def same(one: list | deque | set, before: list) -> bool:
    return len(one) == len(before) and all(a is b for a, b in zip(one, before))


def content(cell) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def named(name: str, key: object = "") -> str:
    return f"{name}.{key}".removeprefix("module.").removeprefix(".").removesuffix(".")
