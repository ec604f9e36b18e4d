"""Finds which values of a forward pass still have a number for each sample of the micro-batch. A mean over such a value
is a mean over samples. A mean over a value that already combines the samples is not. The rules for positions
(sequences/positions.py) find the dimension of the samples; it is the first one in the results of operators without a
rule, as is usual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from twobp.batches import samples_of

from .. import ops, symbols
from ..export.forward import Forward
from ..sequences.along import SUM, Along, Mixes
from ..sequences.positions import REDUCING, place_of

JOIN = {*REDUCING, "norm", "median", "nanmean", "select", "trace", "dot"}


class Samples:
    """The samples are the first dimension of the first field, and of all others with as many rows. Others, such as
    scalars, belong to all samples."""

    def __init__(self, forward: Forward, fields: Mapping[str, torch.Tensor]):
        self.positions = self.length = samples_of(fields)  # as the rules call the size of the dimension
        self.fields = {node for node, meaning in forward.inputs.items() if meaning.source == "field"}
        self.inputs = forward.inputs
        self.places: dict[fx.Node, Any] = {
            node: (Along(0) if fields[meaning.name].shape[:1] == (self.positions,) else SUM)
            if meaning.source == "field"
            else None
            for node, meaning in forward.inputs.items()
        }
        self._graph = forward.graph

    def kept(self, node: fx.Node) -> bool:
        """Whether a dimension of the value has the samples. True if their number is unknown."""
        return not self.positions or isinstance(self._place(node), Along)

    def changes(self, node: fx.Node) -> bool:
        """Whether the value depends on the samples. A scalar of the batch does not."""
        read = {node, *(one for call in ops.ancestors([node]) for one in ops.inputs_of(call))}
        return any(one.meta["val"].dim() > 0 for one in read & self.fields)

    def from_fields(self, node: fx.Node) -> bool:
        """Whether the value depends on nothing but the samples."""
        read = {one for call in ops.ancestors([node]) for one in ops.inputs_of(call) if one.op == "placeholder"}
        return node in self.fields or bool(read) and read <= self.fields

    def _place(self, last: fx.Node):
        if last not in self.places:
            needed = ops.ancestors([last], stop=self.places.__contains__)
            for node in self._graph.nodes:
                if node in needed:
                    self.places[node] = self._found(node)
        return self.places[last]

    def _found(self, node: fx.Node):
        places = [self.places[one] for one in ops.inputs_of(node)]
        if all(place is None for place in places):
            return None
        try:
            return place_of(node, self)
        except Mixes:
            if SUM in places and not any(isinstance(place, Along) for place in places):
                return SUM
            value = node.meta["val"]
            return (
                [self._guess(node, one) for one in value]
                if isinstance(value, (tuple, list))
                else self._guess(node, value)
            )

    def _guess(self, node: fx.Node, value: Any):
        if (
            not isinstance(value, torch.Tensor)
            or not value.dim()
            or symbols.hint(value.shape[0]) % self.positions
            or ops.short_name(node) in JOIN
        ):
            return SUM
        return Along(0)

    def cut(self, *_) -> None:
        """Does nothing: only slices rewrite arguments (sequences/slices.py)."""

    align = change = resize = replace = cut

    def fields_behind(self, _) -> list[str]:
        return []
