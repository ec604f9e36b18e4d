"""activation(g) * u becomes one operator (SwiGLU and GeGLU) if g and u are the halves of one tensor."""

from __future__ import annotations

import operator

from torch import fx

from .. import symbols
from ..ops import named_argument
from ..own_operators import aten, glu

SPLITS = {aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default}


def fuse_gates(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        found = gate(node) if node.op == "call_function" and node.target is aten.mul.Tensor else None
        if found is None:
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(glu, found)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
    graph.eliminate_dead_code()


def gate(product: fx.Node) -> tuple[fx.Node, str] | None:
    """Returns (x, activation) if `product` is activation(first half of x) * second half."""
    for act, up in (product.args, product.args[::-1]):
        if not isinstance(act, fx.Node) or not isinstance(up, fx.Node) or len(act.users) != 1:
            continue
        name = activation_of(act)
        if name is None:
            continue
        first, second = half_of(act.args[0]), half_of(up)
        if first and second and first[0] is second[0] and (first[1], second[1]) == (0, 1):
            return first[0], name
    return None


def activation_of(node: fx.Node) -> str | None:
    if node.target is aten.silu.default:
        return "silu"
    if node.target is aten.gelu.default:
        return "gelu_tanh" if (node.args[1:] or (node.kwargs.get("approximate"),))[0] == "tanh" else "gelu"
    return None


def half_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns (x, which) if the node is a half of the last dimension of x."""
    if node.target is operator.getitem and node.args[0].target in SPLITS and len(node.args[0].meta["val"]) == 2:
        x, which = node.args[0].args[0], node.args[1]
    elif node.target is aten.slice.Tensor and named_argument(node, 4) == 1:
        x, start = node.args[0], named_argument(node, 2) or 0
        size = x.meta["val"].shape[-1]
        if symbols.sized((size, start)):
            return None
        which = {0: 0, size // 2: 1, -(size // 2): 1}.get(start, -1)
    else:
        return None
    whole, own = x.meta["val"].shape, node.meta["val"].shape
    halves = symbols.same(whole[:-1], own[:-1]) and symbols.same(whole[-1], 2 * own[-1])
    return (x, which) if halves and which in (0, 1) else None
