"""Activations and norms that a module spells out, such as 0.5 * x * (1 + tanh(...)), become one operator. Autograd
would keep the results of all their parts and pass over memory ten times. One operator needs one pass. All operators of
such a part must be smooth functions, of the lists below. It is then recognised by its values at small and large
numbers, however it is written."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx
from torch.nn import functional

from .. import ops, symbols
from ..own_operators import aten, rms_norm

ELEMENTWISE = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.square.default,
    aten.reciprocal.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.erf.default,
    aten.exp.default,
}
WITHIN_ROWS = ELEMENTWISE | {aten.mean.dim, aten.var.correction, aten.var.dim, aten.rsqrt.default, aten.sqrt.default}
LAST = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor}  # operators that end the functions below
ACTIVATIONS: list[tuple[Callable, Callable, dict]] = [
    (lambda x: functional.gelu(x, approximate="tanh"), aten.gelu.default, {"approximate": "tanh"}),
    (functional.gelu, aten.gelu.default, {}),
    (functional.silu, aten.silu.default, {}),
]
MOST_PARTS = 16  # operators of an activation; longer ones are not searched
FAR = torch.tensor([10.0, 20, 50, 80, 200, 1e3, 1e4], dtype=torch.float64)  # exp(-x) of float32 is finite up to 88
POINTS = torch.cat([torch.linspace(-8, 8, 257, dtype=torch.float64), FAR, -FAR])


def fuse(graph: fx.Graph, casts: bool = False) -> None:
    """Replaces activations and norms in place. Numbers change only by rounding: by 1e-7 if the module computes in
    float32 or less (constants are often written with 8 digits), and by 1e-12 in float64. With `casts` of autocast,
    activations in 16 bits stay as they are, with the roundings of their parts."""
    fuse_activations(graph, casts)
    fuse_norms(graph)
    graph.eliminate_dead_code()


def fuse_activations(graph: fx.Graph, casts: bool = False) -> None:
    for node in reversed(list(graph.nodes)):
        found = activation(node) if node.op == "call_function" and node.target in LAST and node.users else None
        if casts and found is not None and node.meta["val"].element_size() == 2:
            continue
        if found is None:
            continue
        x, target, options = found
        with graph.inserting_before(node):
            fused = graph.call_function(target, (x,), options)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)


def activation(last: fx.Node) -> tuple[fx.Node, Callable, dict] | None:
    """Returns (x, operator, options) if `last` is an activation of one tensor x."""
    value = last.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    tolerance = 1e-12 if value.dtype == torch.float64 else 1e-7
    for x in arguments_of(last):
        if not is_like(x, value):
            continue
        values = evaluate(last, x, POINTS, ELEMENTWISE)
        if values is None:
            continue
        for function, target, options in ACTIVATIONS:
            if torch.allclose(values, function(POINTS), rtol=tolerance, atol=tolerance):
                return x, target, options
    return None


def fuse_norms(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        found = (
            norm(node)
            if node.op == "call_function" and node.target in (aten.mul.Tensor, aten.add.Tensor) and node.users
            else None
        )
        if found is None:
            continue
        x, gain, bias, centred, eps = found
        with graph.inserting_before(node):
            if centred:
                fused = graph.call_function(aten.layer_norm.default, (x, [x.meta["val"].shape[-1]], gain, bias, eps))
            else:
                both = graph.call_function(rms_norm, (x, gain, eps))
                both.meta = {key: value for key, value in node.meta.items() if key != "val"}
                both.meta["val"] = (node.meta["val"], x.meta["val"].new_empty(math.prod(x.meta["val"].shape[:-1])))
                fused = graph.call_function(operator.getitem, (both, 0))
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)


def norm(last: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool, float] | None:
    """Returns (x, gain, bias, centred, eps) if `last` is a norm of x: x / sqrt(mean(x^2) + eps) * gain or, if centred,
    the same of x - mean(x), plus a bias."""
    value = last.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64) or value.dim() < 2:
        return None
    pairs = with_weights(last, aten.mul.Tensor, value)
    for bias, scaled in with_weights(last, aten.add.Tensor, value):
        pairs += [(gain, normal, bias) for gain, normal in with_weights(scaled, aten.mul.Tensor, value)]
    for gain, normal, *bias in pairs:
        for x in arguments_of(normal, WITHIN_ROWS) if is_like(normal, value) else ():
            kind = kind_of(normal, x) if is_like(x, value) else None
            if kind is not None and (kind[0] or not bias):
                return x, gain, bias[0] if bias else None, *kind
    return None


def with_weights(node: fx.Node, target: object, value: torch.Tensor) -> list[tuple]:
    """Returns the arguments of a sum or product as (weights of a row, rows like `value`)."""
    if node.target is not target or not all(isinstance(one, fx.Node) for one in node.args) or node.kwargs:
        return []
    return [
        (weights, other)
        for weights, other in (node.args, node.args[::-1])
        if isinstance(own := weights.meta.get("val"), torch.Tensor)
        and own.dtype == value.dtype
        and symbols.same(own.shape, value.shape[-1:])
    ]


def kind_of(normal: fx.Node, x: fx.Node) -> tuple[bool, float] | None:
    """Returns (centred, eps) if `normal` is (x - c) / sqrt(mean((x - c)^2) + eps). c is mean(x) if centred, and 0
    otherwise."""
    value = x.meta["val"]
    points = 1 + torch.randn(
        [4] * (value.dim() - 1) + [symbols.hint(value.shape[-1])],
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )
    points *= torch.tensor([1, 1e-3, 1e-8, 1e6], dtype=torch.float64)[:, None]  # eps matters at the small ones
    constants: list[float] = []
    values = evaluate(normal, x, points, WITHIN_ROWS, constants)
    if values is None:
        return None
    tolerance = 1e-12 if value.dtype == torch.float64 else 1e-7
    for centred, rows in ((False, points), (True, points - points.mean(-1, keepdim=True))):
        for eps in constants:
            if 0 < eps < 0.1 and torch.allclose(
                values, rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps), rtol=tolerance, atol=tolerance
            ):
                return centred, eps
    return None


def arguments_of(last: fx.Node, within: set = ELEMENTWISE) -> list[fx.Node]:
    """Returns the nodes of which `last` may be a function by operators of `within`, the farthest first."""
    found, waiting = [last], [last]
    while waiting and len(found) <= 2 * MOST_PARTS:
        node = waiting.pop(0)
        if node.op != "call_function" or node.target not in within:
            continue
        for one in node.all_input_nodes:
            if one not in found:
                found.append(one)
                waiting.append(one)
    return found[:0:-1]


def is_like(node: fx.Node, value: torch.Tensor) -> bool:
    own = node.meta.get("val")
    return isinstance(own, torch.Tensor) and symbols.same(own.shape, value.shape) and own.dtype == value.dtype


def evaluate(
    last: fx.Node, x: fx.Node, points: torch.Tensor, within: set, constants: list[float] | None = None
) -> torch.Tensor | None:
    """Evaluates `last` as a function of x at `points`. Returns None if it depends on something else, has other
    operators, or is too long. Its constants are added to `constants`."""
    values = {x: points}

    def of(node: fx.Node) -> torch.Tensor | None:
        if node not in values:
            if node.op != "call_function" or node.target not in within or len(values) > MOST_PARTS:
                return None
            inputs = [of(one) for one in node.all_input_nodes]
            if not inputs or any(one is None for one in inputs):
                return None
            if constants is not None:
                constants.extend(float(one) for one in node.args if isinstance(one, (int, float)))
            values[node] = ops.computed(node, values)
        return values[node]

    return of(last)
