"""Describes single operators for capture."""

from __future__ import annotations

import operator

import torch
from torch import fx

from . import symbols
from .own_operators import aten, dropout, grouped_mm_weight


def attention_with_dropout(q, k, v, mask=None, p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Computes scaled_dot_product_attention with dropout in the steps of the CPU, so that the mask is one of ours.

    q is (..., heads, queries, dim), k and v are (..., heads, keys, dim). mask is bool (True: attend) or is added to the
    scores."""
    if enable_gqa:
        k = k.repeat_interleave(q.size(-3) // k.size(-3), -3)
        v = v.repeat_interleave(q.size(-3) // v.size(-3), -3)
    scores = torch.matmul(q * (q.size(-1) ** -0.5 if scale is None else scale), k.transpose(-2, -1))
    if is_causal:
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = (
        torch.softmax(scores, -1) if mask is None else aten._safe_softmax(scores, -1)
    )  # 0 for a row that is masked whole
    return torch.matmul(dropout(weights, p)[0], v)


class AddedMask(torch.autograd.Function):
    """Keeps no scores, and computes them again. ATen's derivative is wrong for a row whose scores are all around -1e9
    or less: next to these, the logarithm of the sum of their exponentials loses the number of keys."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)[0]

    @staticmethod
    def backward(ctx, dout):
        q, k, v, mask = ctx.saved_tensors
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * ctx.scale + mask, -1)
        inner = (
            aten._softmax_backward_data(torch.matmul(dout, v.transpose(-2, -1)), weights, -1, weights.dtype) * ctx.scale
        )
        return (
            torch.matmul(inner, k),
            torch.matmul(inner.transpose(-2, -1), q),
            torch.matmul(weights.transpose(-2, -1), dout),
            None,
            None,
        )


def attention_with_added_mask(q, k, v, mask, scale):
    """Computes softmax(scale q k^T + mask) v for q, k, v (batch, heads, positions, n), exactly also where the mask
    leaves no score of a row."""
    return AddedMask.apply(q, k, v, mask, scale)


RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # they have the tag of random operators, for their dropout
# The weight gradient of these operators of a forward graph is a product. They distinguish a layer from small
# changes between layers.
FORWARD_HEAVY = RECURRENT.union(
    """
    linear addmm mm bmm baddbmm matmul einsum bilinear conv1d conv2d conv3d convolution conv_transpose1d
    conv_transpose2d conv_transpose3d scaled_dot_product_attention attention_with_dropout attention_with_added_mask
    _grouped_mm grouped_mm linear_4bit
""".split()
)
# W may wait for these operators of a backward graph.
BACKWARD_HEAVY = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
    aten._grouped_mm.default,
    aten.index_put.default,
    grouped_mm_weight,
}
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.chunk.default,
    operator.getitem,
}

ZEROED = {
    aten.new_empty.default: aten.new_zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.empty.memory_format: aten.zeros.default,
    aten.new_empty_strided.default: aten.new_zeros.default,
    aten.zero.default: aten.zeros_like.default,
    aten.empty_strided.default: aten.zeros.default,
}


def write_zeros(node: fx.Node) -> None:
    """Makes sure that a program reads no memory that was never written."""
    if node.target in (aten.new_empty_strided.default, aten.empty_strided.default):
        node.args = (*node.args[:-2], node.args[-2])  # without strides
    node.target = ZEROED[node.target]
    node.kwargs = {
        key: value
        for key, value in node.kwargs.items()
        if key != "memory_format" or node.target is aten.zeros_like.default
    }


def short_name(node: fx.Node) -> str:
    """Returns 'linear' for aten.linear.default."""
    target = node.target
    return (
        target._schema.name.split("::")[1]
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__name__", str(target))
    )


def is_random(node: fx.Node) -> bool:
    """Returns whether the operator draws random numbers here. Attention has the tag, too, but draws none without
    dropout."""
    target = node.target
    if target is attention_with_dropout:
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return "scaled_dot_product" not in target._schema.name


def nodes_in(arguments) -> list[fx.Node]:
    """Returns the nodes among (nested) arguments, in order."""
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return found


def inputs_of(node: fx.Node) -> list[fx.Node]:
    return nodes_in((node.args, node.kwargs))


def computed(node: fx.Node, values: dict[fx.Node, torch.Tensor], sizes: symbols.At = symbols.EXAMPLE):
    """Returns the result of a call. `values` has its inputs. Sizes are those of the example, or others."""
    args, kwargs = (symbols.at(fx.map_arg(one, values.__getitem__), sizes) for one in (node.args, node.kwargs))
    return node.target(*args, **kwargs)


def ancestors(nodes: list[fx.Node], stop=lambda node: False) -> set[fx.Node]:
    """Returns the calls from which `nodes` are computed, including `nodes`. Does not go past nodes for which `stop`
    holds."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in found or node.op != "call_function" or stop(node):
            continue
        found.add(node)
        stack += inputs_of(node)
    return found


def named_argument(node: fx.Node, position: int):
    parameter = node.target._schema.arguments[position]
    return (
        node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name, parameter.default_value)
    )


def set_argument(node: fx.Node, position: int, value) -> None:
    arguments = [named_argument(node, i) for i in range(max(position + 1, len(node.args)))]
    arguments[position] = value
    names = [a.name for a in node.target._schema.arguments[: len(arguments)]]
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in names}
    node.args = tuple(arguments)
