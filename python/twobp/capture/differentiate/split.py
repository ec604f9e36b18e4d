"""Splits the joint graph into F, I and units of W. A use of a parameter becomes a unit if its gradient is worth
delaying."""

from __future__ import annotations

import dataclasses
import operator

from torch import fx

from .. import ops, symbols
from ..cut import Layer
from ..ops import aten
from ..own_operators import attention_backward, causal_attention_backward
from .joint import Joint


@dataclasses.dataclass
class Split:
    """`where` places each call in "F", "I" or the unit of that number. Gradients are (index of the layer's input,
    node)."""

    where: dict[fx.Node, str | int]
    outputs: list[fx.Node]
    value_gradients: list[tuple[int, fx.Node | None]]
    light: list[tuple[int, fx.Node]]
    units: list[tuple[int, fx.Node]]


def split_convolutions(graph: fx.Graph) -> None:
    """convolution_backward gives the gradients of input, weight and bias in one call. With a call for each, that of the
    weight can wait."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.convolution_backward.default:
            continue
        for user in list(node.users):
            which = user.args[1]
            with graph.inserting_before(user):
                if which == 2:
                    dy = node.args[0]
                    new = graph.call_function(aten.sum.dim_IntList, (dy, [0, *range(2, dy.meta["val"].dim())]))
                else:
                    call = graph.call_function(node.target, (*node.args[:10], [which == 0, which == 1, False]))
                    call.meta = dict(node.meta)
                    new = graph.call_function(operator.getitem, (call, which))
            new.meta = dict(user.meta)
            user.replace_all_uses_with(new)
            graph.erase_node(user)
        graph.erase_node(node)


def uses(gradient: fx.Node) -> list[fx.Node]:
    """Autograd adds the gradients of a parameter's uses. Returns the terms of that sum, in autograd's order."""
    terms, todo = [], [gradient]
    while todo:
        node = todo.pop()
        if (
            node.op == "call_function"
            and node.target is aten.add.Tensor
            and not node.kwargs
            and len(node.users) == 1
            and all(
                isinstance(a, fx.Node) and symbols.same(a.meta["val"].shape, node.meta["val"].shape) for a in node.args
            )
        ):
            todo += reversed(node.args)
        else:
            terms.append(node)
    return terms


def split(joint: Joint, layer: Layer) -> Split:
    graph = joint.graph_module.graph
    split_convolutions(graph)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    flat = list(list(graph.nodes)[-1].args[0])
    outputs, gradients = flat[: len(layer.outputs)], flat[len(layer.outputs) :]
    forward = ops.ancestors(outputs)
    values: list[tuple[int, fx.Node | None]] = []
    sinks: list[tuple[int, fx.Node]] = []  # of parameters, one for each use
    for i, gradient in zip(joint.wanted, gradients):
        if layer.inputs[i].source == "value":
            values.append((i, gradient))
        elif gradient is not None:
            sinks += [(i, term) for term in uses(gradient)]
    # reach[n] lists the results that depend on n: sinks by number, gradients of values as -1.
    reach: dict[fx.Node, set[int]] = {n: set() for n in graph.nodes}
    for number, (_, node) in enumerate(sinks):
        reach[node].add(number)
    for _, gradient in values:
        if gradient is not None:
            reach[gradient].add(-1)
    for node in reversed(calls):
        if node not in forward:
            for user in node.users:
                if user.op == "call_function":
                    reach[node] |= reach[user]
            if node.target in (attention_backward, causal_attention_backward) and reach[node]:
                reach[node].add(-1)  # slices of a sequence pass gradients on in I
    where: dict[fx.Node, str | int] = {}
    late: set[fx.Node] = set()  # products that only one use of a parameter needs, and the nodes after them
    for node in calls:
        alone = len(reach[node]) == 1 and -1 not in reach[node]
        if node in forward:
            where[node] = "F"
        elif not reach[node]:
            continue
        elif alone and (node.target in ops.BACKWARD_HEAVY or any(i in late for i in ops.inputs_of(node))):
            late.add(node)
            where[node] = next(iter(reach[node]))
        else:
            where[node] = "I"
    for node in reversed(calls):  # views cost nothing, so they move to the product that reads them
        readers = {where[u] for u in node.users if u in where}
        if (
            where.get(node) == "I"
            and node.target in ops.VIEWS
            and node.target is not operator.getitem
            and len(readers) == 1
            and len(reach[node]) == 1
            and not isinstance(next(iter(readers)), str)
            and not any(node is s for _, s in sinks)
        ):
            where[node] = next(iter(readers))
    waiting = [s for s, (_, node) in enumerate(sinks) if where.get(node) == s]
    position = {n: i for i, n in enumerate(calls)}
    ready = {
        s: max(
            [position[i] for n in calls if where.get(n) == s for i in ops.inputs_of(n) if where.get(i) == "I"],
            default=-1,
        )
        for s in waiting
    }
    order = sorted(waiting, key=ready.__getitem__)
    unit = {s: k for k, s in enumerate(order)}
    where = {n: w if isinstance(w, str) else unit[w] for n, w in where.items()}
    for node in calls:  # the parts of a tuple belong to the call that makes the tuple
        if node.target is operator.getitem and node in where:
            where[node] = where[node.args[0]]
    return Split(
        where, outputs, values, [sinks[s] for s in range(len(sinks)) if s not in unit], [sinks[s] for s in order]
    )
