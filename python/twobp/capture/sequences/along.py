"""Describes where the positions of a sequence lie in a value. Also has the helpers that the rules of positions.py
share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from .. import ops, symbols
from ..ops import named_argument


class Along(NamedTuple):
    """The value's dimension `dim` is (outer, positions, inner)."""

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, positions: int) -> int:
        return self.outer * positions * self.inner


# Other values: None, the same for every slice, such as a parameter; SUM, a sum over positions, so that those of slices
# add up; a list of places for a list of values; and UNREAD.
SUM, UNREAD = "sum", "unread"


class Follower(Protocol):
    """What the rules ask of the one who follows positions through a graph: `Rewriting` of slices.py writes it for a
    slice, and `Samples` only looks."""

    positions: int
    length: int
    places: dict[fx.Node, Any]

    def cut(self, node: fx.Node, place: Along) -> None: ...

    def align(self, node: fx.Node, read: fx.Node, place: Along) -> None: ...

    def change(self, position: int, argument: Any) -> None: ...

    def resize(self, node: fx.Node, place: Along) -> None: ...

    def replace(self, target: Callable, *arguments: Any) -> None: ...

    def fields_behind(self, node: fx.Node) -> list[str]: ...


class Mixes(Exception):
    """An operator does not compute each position on its own. Has its node, and a message that says what it does."""

    def __init__(self, node: fx.Node, what: str = ""):
        super().__init__(
            what or f"'{ops.short_name(node)}' is not known to compute each position of a sequence on its own"
        )
        self.node = node


def shape(node: fx.Node) -> torch.Size:
    """Returns the shape in the example."""
    return symbols.hint(node.meta["val"].shape)


def argument(node: fx.Node, name: str):
    """Returns the argument of this name in the operator's schema, or None if there is none."""
    position = next((i for i, one in enumerate(node.target._schema.arguments) if one.name == name), None)
    return None if position is None else named_argument(node, position)


def dimensions(node: fx.Node, name: str = "dim") -> set[int]:
    """Returns the dimensions of the first argument that the argument `name` lists, or all of them if it lists none."""
    rank, given = len(shape(node.args[0])), argument(node, name)
    if given is None or given == []:
        return set(range(rank))
    return {one % rank for one in (given if isinstance(given, Sequence) else [given])}


def across(node: fx.Node) -> Mixes:
    return Mixes(node, f"'{ops.short_name(node)}' computes across the positions of a sequence")


def same(node: fx.Node, of: Follower) -> Along:
    """The positions lie where they lie in the first argument."""
    place = of.places[node.args[0]] if isinstance(node.args[0], fx.Node) else None
    if not isinstance(place, Along):
        raise across(node)
    return place


def several(node: fx.Node, place: Along):
    value = node.meta["val"]
    return [place] * len(value) if isinstance(value, (tuple, list)) else place


def pointwise(node: fx.Node, of: Follower, tensors: Sequence[fx.Node] = ()):
    """An elementwise operator, with broadcasting. An argument that is the same for every slice, but has a number for
    each position, is cut."""
    tensors = tensors or ops.inputs_of(node)
    rank = max(len(shape(one)) for one in tensors)
    found = {
        of.places[one]._replace(dim=of.places[one].dim + rank - len(shape(one)))
        for one in tensors
        if of.places[one] is not None
    }
    if len(found) != 1:
        raise Mixes(node, f"'{ops.short_name(node)}' combines each position with others")
    place = found.pop()
    for one in tensors:
        dim = place.dim - (rank - len(shape(one)))
        if of.places[one] is None and dim >= 0 and shape(one)[dim] != 1:
            of.cut(one, place._replace(dim=dim))
    return place
