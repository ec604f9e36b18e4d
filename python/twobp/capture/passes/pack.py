"""Projections of one input (q, k and v, or gate and up) become one product. Its parameter has the rows of theirs, one
after the other."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from ..cut import Layer
from ..export.forward import Input
from ..own_operators import aten


@dataclasses.dataclass
class Packed:
    """A layer, the inputs of it that need a gradient, the outputs that get one, and for each of its parameters the
    indices among those of the original layer."""

    layer: Layer
    trained: list[bool]
    read: list[bool]
    groups: list[list[int]]

    def names(self, layer: Layer) -> list[str | list[str]]:
        """Returns the parameters of another layer of the same kind, as the bundle has them."""
        before = layer.names("parameter")
        return [before[group[0]] if len(group) == 1 else [before[i] for i in group] for group in self.groups]


def pack(layer: Layer, trained: list[bool], read: list[bool]) -> Packed:
    """Changes the layer's graph, in place."""
    graph = layer.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    place = {node: i for i, node in enumerate(placeholders)}
    together: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.linear.default:
            ours = node.args[1:]
            if is_of_rows(node) and all(
                one in place and layer.inputs[place[one]].source == "parameter" and len(one.users) == 1
                for one in ours
                if one is not None
            ):
                needs = tuple(trained[place[one]] for one in ours if one is not None)
                together.setdefault((node.args[0], needs), []).append(node)
    joined: dict[
        fx.Node, list[fx.Node]
    ] = {}  # from the first placeholder of each packed parameter to all of its placeholders
    for linears in together.values():
        if len(linears) > 1:
            linears.sort(key=is_up)  # gate comes before up, as twobp::glu expects
            join(graph, linears, joined)
    positions = [i for i, one in enumerate(layer.inputs) if one.source == "parameter"]
    rank = {i: k for k, i in enumerate(positions)}
    inputs, examples, flags, groups = [], [], [], []
    gone = {one for parts in joined.values() for one in parts[1:]}
    for i, node in enumerate(placeholders):
        if node in gone:
            graph.erase_node(node)
            continue
        parts = [place[one] for one in joined.get(node, [node])]
        example = layer.examples[i]
        if len(parts) > 1:
            rows = sum(layer.examples[k].shape[0] for k in parts)
            example = torch.empty(rows, *example.shape[1:], dtype=example.dtype, device="meta")
        inputs.append(Input(layer.inputs[i].source, label([layer.inputs[k].name for k in parts])))
        examples.append(example)
        flags.append(trained[i])
        if layer.inputs[i].source == "parameter":
            groups.append([rank[k] for k in parts])
    graph.lint()
    return Packed(dataclasses.replace(layer, inputs=inputs, examples=examples), flags, read, groups)


def label(names: list[str]) -> str:
    """Returns 'attn.q_proj+k_proj.weight' for attn.q_proj.weight and attn.k_proj.weight."""
    words = [name.split(".") for name in names]
    if len({len(one) for one in words}) > 1:
        return "+".join(names)
    return ".".join("+".join(dict.fromkeys(place)) for place in zip(*words))


def is_of_rows(linear: fx.Node) -> bool:
    """Returns whether the parameters have a row for each number of the result."""
    weight = linear.args[1].meta["val"].shape
    bias = linear.args[2] if len(linear.args) > 2 else None
    return len(weight) == 2 and (bias is None or bias.meta["val"].shape == weight[:1])


def is_up(linear: fx.Node) -> bool:
    """Returns whether the product is only multiplied with the activation of another."""
    return [user.target for user in linear.users] == [aten.mul.Tensor]


def join(graph: fx.Graph, linears: list[fx.Node], joined: dict[fx.Node, list[fx.Node]]) -> None:
    x, first = linears[0].args[0], min(linears, key=list(graph.nodes).index)  # x as an earlier call may have left it
    rows = [one.args[1].meta["val"].shape[0] for one in linears]
    biases = [one.args[2] for one in linears if len(one.args) > 2 and one.args[2] is not None]
    for parts in ([one.args[1] for one in linears], biases):
        if parts:
            joined[parts[0]] = parts
            parts[0].meta["val"] = parts[0].meta["val"].new_empty(sum(rows), *parts[0].meta["val"].shape[1:])
    with graph.inserting_before(first):
        product = graph.call_function(aten.linear.default, (x, linears[0].args[1], *biases[:1]))
        product.meta = {**first.meta, "val": x.meta["val"].new_empty(*x.meta["val"].shape[:-1], sum(rows))}
        split = graph.call_function(aten.split_with_sizes.default, (product, rows, -1))
        split.meta = {"val": product.meta["val"].split_with_sizes(rows, -1)}
        for i, one in enumerate(linears):
            part = graph.call_function(operator.getitem, (split, i))
            part.meta = {"val": split.meta["val"][i]}
            one.replace_all_uses_with(part)
    for one in linears:
        graph.erase_node(one)
