"""softmax(scale q k^T + mask) v that a module spells out becomes scaled_dot_product_attention, which keeps no scores for the
backward pass. The mask is for padding, windows or documents. It is added to the scores or filled into them, before or after
scaling. attend.py then looks for attention without a mask."""
from __future__ import annotations

import math

import torch
from torch import fx

from .. import ops
from ..own_operators import aten

SOFTMAX = {aten.softmax.int, aten._softmax.default}
CASTS = {aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default}
SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarOther}
LEAST = -1e9  # a score of this or less has no weight beside others, and adding it loses other scores to rounding


def fuse_masked_attention(graph: fx.Graph) -> None:
    """Works in place. Numbers change only by rounding."""
    trained = depends_on_parameters(graph)
    for softmax in [node for node in graph.nodes if node.op == "call_function" and node.target in SOFTMAX]:
        found = attention_of(softmax, trained)
        if found is None:
            continue
        last, product, path, scale = found
        with graph.inserting_before(last):
            keys = graph.call_function(aten.transpose.int, (product.args[1], -2, -1))
            keys.meta["val"] = product.args[1].meta["val"].transpose(-2, -1)
            fused = graph.call_function(aten.scaled_dot_product_attention.default, (product.args[0], keys, last.args[1], mask_of(graph, product, path)),
                                        {"scale": scale})
        fused.meta = dict(last.meta)
        last.replace_all_uses_with(fused)
    graph.eliminate_dead_code()


def depends_on_parameters(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad or not found.isdisjoint(ops.inputs_of(node)):
            found.add(node)
    return found


def attention_of(softmax: fx.Node, trained: set[fx.Node]) -> tuple[fx.Node, fx.Node, list[fx.Node], float] | None:
    """Returns (softmax @ v, q @ k^T, the nodes from that to the softmax, scale), if nothing else happens between."""
    value = softmax.meta["val"]
    if value.dim() != 4 or value.dtype not in (torch.float32, torch.float64) or softmax.args[1] not in (-1, 3):
        return None
    last = softmax
    while last is softmax or last.target in CASTS and last.meta["val"].dtype == value.dtype:
        if len(last.users) != 1:
            return None
        before, last = last, next(iter(last.users))
    if last.target is not aten.matmul.default or last.args[0] is not before or last.args[1].meta["val"].dim() != 4 or \
            last.args[1].meta["val"].shape[:3] != (*value.shape[:2], value.shape[3]):
        return None
    path, scale, node = [], 1.0, softmax.args[0]
    while node.op == "call_function" and node.target is not aten.matmul.default:
        step = before_mask(node, trained)
        if step is None or len(node.users) != 1 or node.meta["val"].shape != value.shape or node.meta["val"].dtype != value.dtype:
            return None
        inner, factor = step
        if node.target in FILLS and fill_of(node) * scale > LEAST:
            return None
        path.append(node)
        node, scale = inner, scale * factor
    if node.op != "call_function" or len(node.users) != 1 or any(one.meta["val"].shape[:-2] != value.shape[:2] for one in node.args):
        return None
    return last, node, path[::-1], scale


def before_mask(node: fx.Node, trained: set[fx.Node]) -> tuple[fx.Node, float] | None:
    """Returns the scores that `node` scales, masks or copies, and its factor."""
    first = node.args[0]
    if node.target in CASTS:
        return first, 1.0
    number = node.args[1] if len(node.args) > 1 else None
    if node.target in SCALES and isinstance(number, (int, float)) and number > 0:
        return first, float(number) if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / number
    if node.target is aten.add.Tensor and not node.kwargs and isinstance(number, fx.Node):
        for scores, mask in ((first, number), (number, first)):
            if scores in trained and mask not in trained:
                return scores, 1.0
    if node.target in FILLS and fill_of(node) is not None:
        scores, mask = (node.args[1], first) if node.target in (aten.where.self, aten.where.ScalarOther) else (first, node.args[1])
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


def mask_of(graph: fx.Graph, product: fx.Node, path: list[fx.Node]) -> fx.Node | None:
    """Returns the value that the path gives to a score of 0, in the shape of the masks. It can be added to scaled scores."""
    if all(node.target in CASTS | SCALES for node in path):
        return None
    value = product.meta["val"]
    mask = graph.call_function(aten.zeros.default, ([1, 1, 1, 1],), {"dtype": value.dtype, "device": value.device})
    mask.meta["val"] = value.new_zeros(1, 1, 1, 1)
    copies = {product: mask}
    for node in path:
        copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
        copies[node].meta["val"] = node.target(*fx.map_arg(copies[node].args, lambda one: one.meta["val"]), **copies[node].kwargs)
    return copies[path[-1]]
