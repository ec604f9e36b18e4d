"""Says which operators are linear in the values at hand. Two functions that consist of these and of the same few
products are equal for all numbers if they are equal for random ones; a clamp, a rounding or a place where gradients
stop may show only elsewhere."""

from __future__ import annotations

import operator

from torch import fx

from .. import ops
from ..own_operators import aten

SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}
COPIES = {aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.to.dtype}
SUMS = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.neg.default,
    aten.cat.default,
    aten.stack.default,
}
FACTORS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
GATHERS = {
    aten.index.Tensor,
    aten.index_select.default,
    aten.repeat_interleave.self_int,
    aten.repeat.default,
    aten.flip.default,
    aten.roll.default,
}


def is_moved(node: fx.Node) -> bool:
    """Returns whether the call gives numbers of its first argument, unchanged, at other places in memory."""
    if node.target is operator.getitem:
        return node.args[0].target in SPLITS
    return (
        node.target in ops.VIEWS or node.target in COPIES and node.meta["val"].dtype == node.args[0].meta["val"].dtype
    )


def is_linear(node: fx.Node, dependent: set[fx.Node]) -> bool:
    """Returns whether the call is linear, apart from constants that it adds, in those of its inputs that are
    `dependent`."""
    if is_moved(node) or node.target in SUMS:
        return True
    given = [one in dependent for one in node.args[:2] if isinstance(one, fx.Node)]
    if node.target in FACTORS:
        return given.count(True) == 1 and (node.args[0] in dependent or node.target is aten.mul.Tensor)
    return node.target in GATHERS and node.args[0] in dependent and dependent.isdisjoint(ops.nodes_in(node.args[1:]))


def dependents(nodes: set[fx.Node], source: fx.Node) -> list[fx.Node]:
    """Returns those of `nodes` that depend on `source`, in the order of the graph, which starts with `source`
    itself."""
    found = {source: None}  # in order
    for node in source.graph.nodes:
        if node in nodes and not found.keys().isdisjoint(ops.inputs_of(node)):
            found[node] = None
    return list(found)
