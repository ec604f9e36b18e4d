"""Activations that a module spells out, such as 0.5 * x * (1 + tanh(...)), become one operator. What autograd of the parts would keep
and walk through ten times is then one pass. A part of the graph is recognised by its values, whatever way it is written."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.nn import functional

from .ops import aten

ELEMENTWISE = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
               aten.div.Scalar, aten.neg.default, aten.pow.Tensor_Scalar, aten.square.default, aten.reciprocal.default, aten.tanh.default,
               aten.sigmoid.default, aten.erf.default, aten.exp.default}
LAST = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor}  # the operators that end the functions below
ACTIVATIONS: list[tuple[Callable, object, dict]] = [
    (lambda x: functional.gelu(x, approximate="tanh"), aten.gelu.default, {"approximate": "tanh"}),
    (functional.gelu, aten.gelu.default, {}),
    (functional.silu, aten.silu.default, {}),
]
MOST_PARTS = 16  # operators of an activation; a longer one is not looked for
POINTS = torch.linspace(-8, 8, 257, dtype=torch.float64)


def fuse_activations(graph: fx.Graph) -> None:
    """Replaces activations in place. Numbers change by rounding alone: by 1e-7 where the module computes in float32 or less (constants
    are often written with 8 digits), and by 1e-12 in float64."""
    for node in reversed(list(graph.nodes)):
        found = activation(node) if node.op == "call_function" and node.target in LAST and node.users else None
        if found is None:
            continue
        x, target, options = found
        with graph.inserting_before(node):
            fused = graph.call_function(target, (x,), options)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
    graph.eliminate_dead_code()


def activation(last: fx.Node) -> tuple[fx.Node, object, dict] | None:
    """(x, operator, options) if `last` is an activation of one tensor x."""
    value = last.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    tolerance = 1e-12 if value.dtype == torch.float64 else 1e-7
    for x in arguments_of(last):
        if not is_like(x, value):
            continue
        values = evaluate(last, x)
        if values is None:
            continue
        for function, target, options in ACTIVATIONS:
            if torch.allclose(values, function(POINTS), rtol=tolerance, atol=tolerance):
                return x, target, options
    return None


def arguments_of(last: fx.Node) -> list[fx.Node]:
    """The nodes that `last` may be a function of, the farthest first."""
    found, waiting = [last], [last]
    while waiting and len(found) <= 2 * MOST_PARTS:
        node = waiting.pop(0)
        if node is not last and (node.op != "call_function" or node.target not in ELEMENTWISE):
            continue
        for one in node.all_input_nodes:
            if one not in found:
                found.append(one)
                waiting.append(one)
    return found[:0:-1]


def is_like(node: fx.Node, value: torch.Tensor) -> bool:
    own = node.meta.get("val")
    return isinstance(own, torch.Tensor) and own.shape == value.shape and own.dtype == value.dtype


def evaluate(last: fx.Node, x: fx.Node) -> torch.Tensor | None:
    """The function of x that `last` is, at POINTS. None: it depends on something else, or is too long."""
    values = {x: POINTS}

    def of(node: fx.Node) -> torch.Tensor | None:
        if node not in values:
            if node.op != "call_function" or node.target not in ELEMENTWISE or len(values) > MOST_PARTS:
                return None
            inputs = [of(one) for one in node.all_input_nodes]
            if not inputs or any(one is None for one in inputs):
                return None
            values[node] = node.target(*fx.map_arg(node.args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__))
        return values[node]

    return of(last)
