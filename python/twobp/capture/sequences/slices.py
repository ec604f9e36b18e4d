"""Writes programs that also run over a slice of the sequences (docs/long_sequences.md). Each layer is written for two
parts of a sequence. A number that differs between the two programs must be a multiple of the number of positions, or
the first or last position."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import ops
from ..cut import Layer
from ..emit import Instruction
from ..errors import where
from ..export.forward import Input
from ..ops import set_argument
from ..own_operators import aten
from .along import SUM, UNREAD, Along, Mixes, shape
from .positions import place_of

LEAST = (
    6  # positions, so that there are two different parts of more than one, that are neither at the begin nor at the end
)


def positions_of(fields: Mapping[str, torch.Tensor]) -> int:
    """Returns the length of the sequences, which is the size of dimension 1 of every field. Raises Refused."""
    for name, field in fields.items():
        if field.dim() < 2:
            raise Refused(f"the field '{name}' of sizes {list(field.shape)} has no positions")
    lengths = {name: field.shape[1] for name, field in fields.items()}
    if len(set(lengths.values())) > 1:
        raise Refused(
            "the fields have different numbers of positions: "
            + ", ".join(f"{name} {length}" for name, length in lengths.items())
        )
    length = next(iter(lengths.values()))
    if length < LEAST:
        raise Refused(f"sequences of {length} positions are too short: pad them to {LEAST} or more")
    return length


class Refused(Exception):
    """The sequences of a module cannot be cut into slices. The message gives the reason."""


class Rewriting:
    """Writes the graph of a layer for the positions [begin, begin + length) of sequences of `positions`. `places` says
    where the positions lie in each value (positions.py)."""

    def __init__(self, layer: Layer, arriving: list, positions: int, begin: int, length: int):
        self.layer, self.positions, self.begin, self.length = layer, positions, begin, length
        self.arriving = iter(arriving)
        self.places: dict[fx.Node, Any] = {}
        self.leaving: list = []
        self.changed = False  # whether there are other operators than before
        self.graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._fields: dict[fx.Node, fx.Node] = {}  # those of whole sequences
        self._whole: dict[fx.Node, fx.Node] = {}  # values of whole sequences in place of slices
        self._parts: dict[tuple[fx.Node, Along], fx.Node] = {}
        self._free: set[fx.Node] = set()  # computed from fields and constants alone
        self._arguments: dict[int, Any] = {}  # of the node at hand
        self._cut: dict[fx.Node, fx.Node] = {}  # its inputs that are parts of whole values
        self._replaced: tuple[Callable, tuple] | None = None  # what takes its place

    def write(self) -> Layer:
        """Returns the layer for these positions. Raises Mixes."""
        old = list(self.layer.graph_module.graph.nodes)
        placeholders = [node for node in old if node.op == "placeholder"]
        inputs = [
            (one, self._placeholder(node, one, example))
            for node, one, example in zip(placeholders, self.layer.inputs, self.layer.examples)
        ]
        for node, one, example in zip(placeholders, self.layer.inputs, self.layer.examples):
            if one.source == "field":
                self._fields[node] = self.graph.placeholder(f"whole_{node.name}")
                inputs.append((Input("whole", one.name), example))
        results = old[-1]
        needed = ops.ancestors(list(results.args[0]))
        for node in old:
            if node in needed:
                self._call(node)
        self._output(results)
        read = [bool(node.users) or one.source != "whole" for node, (one, _) in zip(self._placeholders(), inputs)]
        for node, keep in zip(self._placeholders(), read):
            if not keep:
                self.graph.erase_node(node)
        inputs = [one for one, keep in zip(inputs, read) if keep]
        return Layer(
            self.layer.name,
            fx.GraphModule(torch.nn.Module(), self.graph),
            [one for one, _ in inputs],
            [example for _, example in inputs],
            self.layer.outputs,
        )

    def cut(self, node: fx.Node, place: Along) -> None:
        """Makes the current operator read only the slice's positions of a value that is the same for every slice."""
        self._cut[node] = self._part(node, place)

    def align(self, node: fx.Node, read: fx.Node, place: Along) -> None:
        """Makes the operator `node` read the positions of `read` at this place."""
        if self.places[read] is None:
            self.cut(read, place)
        elif self.places[read] != place:
            raise Mixes(node)

    def change(self, position: int, argument: Any) -> None:
        """Gives the current operator another argument in this position."""
        self._arguments[position] = argument

    def resize(self, node: fx.Node, place: Along) -> None:
        """Corrects argument 1 of the current operator, `node`, which has the sizes of its result."""
        sizes = list(node.args[1])
        if sizes[place.dim] != -1:
            sizes[place.dim] = place.size(self.length)
        self.change(1, sizes)

    def replace(self, target: Callable, *arguments: Any) -> None:
        """Replaces the current operator by another one, whose first result takes the place of its result."""
        self._replaced = target, arguments

    def fields_behind(self, node: fx.Node) -> list[str]:
        """Returns the fields from which a value of the layer is computed."""
        read = {node, *(one for call in ops.ancestors([node]) for one in ops.inputs_of(call))}
        return [
            one.name
            for placeholder, one in zip(self.layer.graph_module.graph.find_nodes(op="placeholder"), self.layer.inputs)
            if one.source == "field" and placeholder in read
        ]

    def _placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def _placeholder(self, node: fx.Node, one: Input, example: torch.Tensor) -> torch.Tensor:
        self._new[node] = self.graph.node_copy(node)
        place = next(self.arriving) if one.source == "value" else Along(1) if one.source == "field" else None
        if one.source == "buffer":
            raise Mixes(node, f"the forward pass uses the buffer '{one.name}', which it changes")
        if one.source in ("field", "constant"):
            self._free.add(node)
        self.places[node] = place
        return (
            example
            if not isinstance(place, Along) or self.length == self.positions
            else resized(example, place.dim, place.size(self.length))
        )

    def _call(self, node: fx.Node) -> None:
        self._arguments, self._cut, self._replaced = {}, {}, None
        sources = ops.inputs_of(node)
        if all(one in self._free for one in sources) and not ops.is_random(node):
            self._free.add(node)
        if all(self.places[one] is None for one in sources):
            if ops.is_random(node):
                raise Mixes(node, f"'{ops.short_name(node)}' draws random numbers that all positions share")
            self._place(node, None, self._copy(node))
            return
        try:
            place = self._place_of(node)
            if place == SUM and node in self._free:
                raise Mixes(node)
        except Mixes:
            if node not in self._free:
                raise
            self._place(node, None, self._of_whole(node))
            return
        if self._replaced is not None:
            self.changed = True
            target, arguments = self._replaced
            both = self.graph.call_function(target, fx.map_arg(arguments, self._new.__getitem__))
            both.meta = {key: value for key, value in node.meta.items() if key != "val"}
            self._place(node, place, self.graph.call_function(operator.getitem, (both, 0)))
            return
        new = self._copy(node)
        for position, argument in self._arguments.items():
            set_argument(new, position, argument)
        self._place(node, place, new)

    def _place_of(self, node: fx.Node) -> Any:
        try:
            return place_of(node, self)
        except (
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ):  # a form of the operator that its rule does not know
            raise Mixes(node) from None

    def _place(self, node: fx.Node, place: Any, new: fx.Node) -> None:
        self.places[node], self._new[node] = place, new

    def _copy(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, lambda one: self._cut.get(one) or self._new[one])

    def _of_whole(self, node: fx.Node) -> fx.Node:
        """Returns a node for whole sequences, if it is computed from fields and constants alone, such as shifted labels
        or counted positions."""
        if self.places.get(node, UNREAD) is None:
            return self._new[node]
        if node in self._fields:
            self.changed = True
            return self._fields[node]
        if node not in self._whole:
            of = {one: self._of_whole(one) for one in ops.inputs_of(node)}
            self._whole[node] = self.graph.node_copy(node, of.__getitem__)
        return self._whole[node]

    def _part(self, node: fx.Node, place: Along) -> fx.Node:
        key = (node, place)
        if key not in self._parts:
            self.changed = True
            self._parts[key] = self._cut_rows(node, place) or self._cut_whole(self._new[node], list(shape(node)), place)
        return self._parts[key]

    def _cut_rows(self, node: fx.Node, place: Along) -> fx.Node | None:
        """Looks up only the slice's rows of a table, by cutting the ids first. So the gradient, too, is that of these
        rows alone."""
        if (
            node.target is not aten.embedding.default
            or self.places[node.args[1]] is not None
            or place.dim >= len(shape(node.args[1]))
        ):
            return None
        ids = self._part(node.args[1], place)
        return self.graph.node_copy(node, lambda one: ids if one is node.args[1] else self._new[one])

    def _cut_whole(self, whole: fx.Node, sizes: list[int], place: Along) -> fx.Node:
        dim = place.dim
        end = self.begin + self.length
        if place.outer == place.inner == 1:
            return self.graph.call_function(aten.slice.Tensor, (whole, dim, self.begin, end))
        before, behind = sizes[:dim], sizes[dim + 1 :]
        apart = self.graph.call_function(
            aten.reshape.default, (whole, [*before, place.outer, self.positions, place.inner, *behind])
        )
        part = self.graph.call_function(aten.slice.Tensor, (apart, dim + 1, self.begin, end))
        return self.graph.call_function(aten.reshape.default, (part, [*before, place.size(self.length), *behind]))

    def _output(self, node: fx.Node) -> None:
        for (kind, name), one in zip(self.layer.outputs, node.args[0]):
            if kind == "buffer":
                raise Mixes(one, f"the forward pass changes the buffer '{name}'")
            if self.places[one] == UNREAD:
                raise Mixes(one)
            if kind == "loss" and self.places[one] != SUM:
                raise Mixes(one, "the loss is no sum over the positions of sequences")
        self.leaving = [self.places[one] for (kind, _), one in zip(self.layer.outputs, node.args[0]) if kind == "value"]
        self.graph.output(tuple(self._new[one] for one in node.args[0]))


def resized(example: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Returns a meta tensor like `example` with another size in one dimension and the same order of dimensions in
    memory."""
    order = sorted(range(example.dim()), key=lambda one: -example.stride()[one])
    sizes = [size if one == dim else example.shape[one] for one in range(example.dim())]
    back = [order.index(one) for one in range(example.dim())]
    return torch.empty([sizes[one] for one in order], dtype=example.dtype, device="meta").permute(back)


class Range(NamedTuple):
    """The positions [begin, begin + length)."""

    begin: int
    length: int


@dataclasses.dataclass
class Parts:
    """A layer, written for two parts of a sequence. `arriving` and `leaving` say where the positions lie in its inputs
    and outputs."""

    layers: list[Layer]
    changed: bool
    arriving: list
    leaving: list


def ranges_of(positions: int) -> list[Range]:
    """Returns two parts of a sequence. None of them is the whole, because torch would leave out operators that do
    nothing there."""
    length = max(2, positions // 2 - 1)
    return [Range(1, length), Range(2, length + 1)]


def in_parts(layer: Layer, arriving: list, positions: int) -> Parts:
    """Writes the layer for two parts of a sequence. Raises Refused."""
    try:
        written = [Rewriting(layer, arriving, positions, *one) for one in ranges_of(positions)]
        return Parts([one.write() for one in written], written[0].changed, arriving, written[0].leaving)
    except Mixes as reason:
        raise Refused(f"{reason}{where(reason.node)}") from None


def joined(these: tuple[Any, Any], ranges: list[Range], in_arguments: bool = False) -> Any:
    """Returns the program for any part of a sequence, made from the programs of two parts. Raises Refused if they
    differ in more than numbers of positions."""
    one, other = these
    if isinstance(one, Instruction) and isinstance(other, Instruction) and one["op"] == other["op"]:
        try:
            return Instruction(
                {key: joined((value, other[key]), ranges, key == "args") for key, value in one.items()}
            ).of(one.source)
        except Refused as reason:
            raise Refused(f"in '{one['op']}'{one.source}, {reason}") from None
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: joined((value, other[key]), ranges, key == "args") for key, value in one.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [joined(pair, ranges, in_arguments) for pair in zip(one, other)]
    if type(one) is type(other) and one == other:
        return one
    if in_arguments and type(one) is type(other) is int:
        if these == tuple(part.begin for part in ranges):
            return {"position": "begin"}
        if these == tuple(part.begin + part.length for part in ranges):
            return {"position": "end"}
        if one % ranges[0].length == 0 and other == one // ranges[0].length * ranges[1].length:
            return {"positions": one // ranges[0].length}
    raise Refused(f"its programs for two parts of a sequence differ: one has {one!r}, the other {other!r}")


Made = tuple[dict, list[torch.Tensor]]  # a program, and the constants that tracing made for it


def sliced_programs(
    layers: list[tuple[int, Layer]], positions: int, program_of: Callable[[int, Layer], Made], made: list[Made]
) -> list[dict]:
    """Returns the programs of the kinds in a form that also runs over slices. `layers` has the kind of each layer, and
    the first layer of that kind, whose program is in `made`. `program_of` makes the program of another layer of a kind.
    Raises Refused."""
    known: dict[int, Parts] = {}
    arriving: list = []
    for kind, layer in layers:
        if kind not in known:
            known[kind] = in_parts(layer, arriving, positions)
        elif known[kind].arriving != arriving:
            raise Refused(f"'{layer.name}' and an equal layer have their positions in different dimensions")
        arriving = known[kind].leaving
    result = []
    for kind, whole in enumerate(made):
        parts, ranges = known[kind], ranges_of(positions)
        try:
            two = [program_of(kind, one) for one in parts.layers[: 2 if parts.changed else 1]]
        except Exception as error:
            raise Refused(
                f"the layer '{parts.layers[0].name}' has no program for a part of a sequence: {error}"
            ) from error
        if not parts.changed:  # the whole has the operators of a part
            two, ranges = [whole, *two], [Range(0, positions), ranges[0]]
        if not all(same_tensors(whole[1], one[1]) for one in two):
            raise Refused(f"the layer '{parts.layers[0].name}' has constants that depend on the number of positions")
        result.append(joined((two[0][0], two[1][0]), ranges))
    return result


def same_tensors(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(
        one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(these, those)
    )
