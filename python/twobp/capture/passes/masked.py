"""softmax(scale q k^T + mask) v that a module spells out becomes scaled_dot_product_attention, which keeps no scores
for the backward pass. The mask is for padding, windows or documents. It is added to the scores or filled into them,
before or after scaling. attend.py then looks for attention without a mask.

Both forms are equal wherever a row has a score that the mask leaves. Of a row that is masked whole, an added mask
leaves the differences between scores and their gradients, as far as rounding does. A fill leaves neither: the row has
equal weights, and q and k get no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import fx

from .. import ops, symbols
from ..own_operators import aten

SOFTMAX = {aten.softmax.int, aten._softmax.default}
CASTS = {aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default}
SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarOther}
LEAST = -1e9  # a score of this or less has no weight beside others, which are smaller numbers


Values = Callable[[fx.Node, symbols.At], "torch.Tensor | None"]  # of a node that depends on constants and sizes alone


class Found(NamedTuple):
    """softmax(path(q @ k)) @ v. `scale` is the product of the path's factors."""

    last: fx.Node  # the product with v
    product: fx.Node  # of q and k
    path: list[fx.Node]
    scale: float

    def run(self, score: float, values: Values, sizes: symbols.At) -> torch.Tensor | None:
        """Returns what the path makes of a score, in the shape of the masks, or None if a mask has no known value."""
        value = self.product.meta["val"]
        known = {self.product: torch.full([1, 1, 1, 1], score, dtype=value.dtype)}
        for node in self.path:
            for one in ops.inputs_of(node):
                if one not in known:
                    if (other := values(one, sizes)) is None:
                        return None
                    known[one] = other
            known[node] = ops.computed(node, known, sizes)
        return known[self.path[-1]] if self.path else known[self.product]


def fuse_masked_attention(graph: fx.Graph, values: Values, sizes: list[symbols.At]) -> None:
    """Works in place. `values` gives the values of constants, which are looked at for these `sizes`. Numbers change
    only by rounding."""
    trained = depends_on_parameters(graph)
    for softmax in [node for node in graph.nodes if node.op == "call_function" and node.target in SOFTMAX]:
        found = attention_of(softmax, trained)
        if found is None:
            continue
        form = "visible" if all(is_visible(found, values, one) for one in sizes) else form_of(found)
        if form is not None:
            replace(graph, found, form)
    graph.eliminate_dead_code()


def depends_on_parameters(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if (
            node.op == "placeholder"
            and isinstance(value, torch.Tensor)
            and value.requires_grad
            or not found.isdisjoint(ops.inputs_of(node))
        ):
            found.add(node)
    return found


def attention_of(softmax: fx.Node, trained: set[fx.Node]) -> Found | None:
    """Returns the attention of this softmax, if nothing happens between its parts but scaling, masks and copies."""
    value = softmax.meta["val"]
    if value.dim() != 4 or value.dtype not in (torch.float32, torch.float64) or softmax.args[1] not in (-1, 3):
        return None
    last = softmax
    while last is softmax or last.target in CASTS and last.meta["val"].dtype == value.dtype:
        if len(last.users) != 1:
            return None
        before, last = last, next(iter(last.users))
    if (
        last.target is not aten.matmul.default
        or last.args[0] is not before
        or last.args[1].meta["val"].dim() != 4
        or not symbols.same(last.args[1].meta["val"].shape[:3], (*value.shape[:2], value.shape[3]))
    ):
        return None
    path, scale, node = [], 1.0, softmax.args[0]
    while node.op == "call_function" and node.target is not aten.matmul.default:
        step = before_mask(node, trained)
        if (
            step is None
            or len(node.users) != 1
            or not symbols.same(node.meta["val"].shape, value.shape)
            or node.meta["val"].dtype != value.dtype
        ):
            return None
        path.append(node)
        node, scale = step[0], scale * step[1]
    if (
        node.op != "call_function"
        or len(node.users) != 1
        or any(not symbols.same(one.meta["val"].shape[:-2], value.shape[:2]) for one in node.args)
        or node.meta["val"].dtype != value.dtype
    ):
        return None
    return Found(last, node, path[::-1], scale)


def before_mask(node: fx.Node, trained: set[fx.Node]) -> tuple[fx.Node, float] | None:
    """Returns the scores that `node` scales, masks or copies, and its factor."""
    first = node.args[0]
    if node.target in CASTS:
        return first, 1.0
    number = node.args[1] if len(node.args) > 1 else None
    if node.target in SCALES and isinstance(number, (int, float)) and 0 < number < math.inf:
        return first, float(number) if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / number
    if node.target is aten.add.Tensor and not node.kwargs and isinstance(number, fx.Node):
        for scores, mask in ((first, number), (number, first)):
            if scores in trained and mask not in trained:
                return scores, 1.0
    if node.target in FILLS and fill_of(node) is not None:
        scores, mask = (
            (node.args[1], first) if node.target in (aten.where.self, aten.where.ScalarOther) else (first, node.args[1])
        )
        if mask not in trained and scores in trained:
            return scores, 1.0
    return None


def fill_of(node: fx.Node) -> float | None:
    """Returns the number that masked scores become."""
    fill = node.args[2]
    while isinstance(fill, fx.Node):
        if fill.target in (aten.full.default, aten.scalar_tensor.default, aten.full_like.default):
            fill = fill.args[0 if fill.target is aten.scalar_tensor.default else 1]
        elif fill.target in CASTS:
            fill = fill.args[0]
        else:
            return None
    return float(fill) if isinstance(fill, (int, float)) and not math.isnan(fill) else None


def is_visible(found: Found, values: Values, sizes: symbols.At) -> bool:
    """Returns whether each row is known to have a score that the mask leaves, and filled scores to have no weight
    beside it."""
    added, probe = found.run(0.0, values, sizes), found.run(math.inf, values, sizes)
    if added is None or probe is None:
        return False
    filled = probe < math.inf  # the others are inf, or NaN where -inf is added
    return bool((~filled & (added > LEAST / 2)).any(-1).all() and (added[filled.expand_as(added)] <= LEAST).all())


def form_of(found: Found) -> str | None:
    """Returns how a mask is made that is right also for rows that are masked whole: "filled" by one finite number, or
    "added" as the module adds it. Returns None if the steps of the path are of several kinds."""
    fills, added, scale = set(), False, 1.0
    for node in reversed(found.path):
        if node.target in FILLS:
            fills.add(cast(float, fill_of(node)) * scale)
        elif node.target is aten.add.Tensor:
            if added or scale != 1:  # sums would be rounded in another order
                return None
            added = True
        elif node.target in SCALES:
            scale *= cast(tuple, before_mask(node, set()))[1]
    if fills <= {-math.inf}:
        widths = (one.meta["val"].shape[-1] for one in (found.last.args[1], found.product.args[0]))
        return "added" if symbols.same(*widths) else None
    return "filled" if len(fills) == 1 and max(fills) <= LEAST and not added else None


def replace(graph: fx.Graph, found: Found, form: str) -> None:
    last, (q, k) = found.last, found.product.args

    def call(target, *arguments):
        node = graph.call_function(target, arguments)
        node.meta["val"] = target(*fx.map_arg(arguments, lambda one: one.meta["val"]))
        return node

    with graph.inserting_before(last):
        mask, keys = mask_of(graph, found), call(aten.transpose.int, k, -2, -1)
        target: Callable = aten.scaled_dot_product_attention.default
        arguments, options = [q, keys, last.args[1], mask], {"scale": found.scale}
        if form == "filled":  # equal scores, without gradients
            hidden = call(aten.all.dim, call(aten.le.Scalar, mask, LEAST), -1, True)
            arguments[0], arguments[3] = (call(aten.masked_fill.Scalar, one, hidden, 0) for one in (q, mask))
        elif form == "added":  # softmax gives NaN to a row of -inf, where the operators give 0
            hidden = call(aten.all.dim, call(aten.eq.Scalar, mask, -math.inf), -1, True)
            target, arguments[3] = ops.attention_with_added_mask, call(aten.masked_fill.Scalar, mask, hidden, math.nan)
        fused = graph.call_function(target, tuple(arguments), {**options})
    fused.meta = dict(last.meta)
    last.replace_all_uses_with(fused)


def mask_of(graph: fx.Graph, found: Found) -> fx.Node | None:
    """Returns the value that the path gives to a score of 0, in the shape of the masks. It can be added to scaled
    scores."""
    if all(node.target in CASTS | SCALES for node in found.path):
        return None
    value = found.product.meta["val"]
    mask = graph.call_function(aten.zeros.default, ([1, 1, 1, 1],), {"dtype": value.dtype, "device": value.device})
    mask.meta["val"] = value.new_zeros(1, 1, 1, 1)
    copies = {found.product: mask}
    for node in found.path:
        copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
        copies[node].meta["val"] = node.target(
            *fx.map_arg(copies[node].args, lambda one: one.meta["val"]), **copies[node].kwargs
        )
    return copies[found.path[-1]]
