"""Defines the operators of the runtime that captured programs call besides ATen's, with their derivatives. These
versions use torch, for tracing and for the dry run. The C++ versions are in twobp/graph/own_operators.cpp, which says
what each throws. docs/bundle.md lists them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

aten = torch.ops.aten

_library = torch.library.Library("twobp", "FRAGMENT")  # registrations last as long as this object


def _operator(
    schema: str,
    compute: Callable,
    shapes: Callable,
    keep: Callable | None = None,
    gradients: Callable | None = None,
    tags=(),
):
    """Registers an operator. `shapes` gives results without numbers. `keep(ctx, inputs, output)` and `gradients(ctx,
    *dy)` are its derivative."""
    name = schema.split("(")[0]
    _library.define(schema, tags=tags)
    torch.library.impl(_library, name, "CompositeExplicitAutograd")(compute)
    torch.library.register_fake(f"twobp::{name}", shapes, lib=_library)
    if gradients is not None:
        torch.library.register_autograd(f"twobp::{name}", gradients, setup_context=keep, lib=_library)
    return getattr(torch.ops.twobp, name).default


def _empty(x: torch.Tensor, *shape: int, **options) -> torch.Tensor:
    return torch.empty(shape or x.shape, **{"dtype": x.dtype, "device": x.device, **options})


# dropout: y = x * mask / (1 - p). It stands for every dropout of a captured graph, so that the runtime can draw the
# mask from the step and the micro-batch, and leave it out in evaluation. mask (bool) keeps a number with probability 1
# - p.
def _dropout(x, p, random=None):
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=random)
    return x * mask * dropout_scale(p), mask


def dropout_scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0  # with p = 1, no number is kept


def _keep_mask(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.scale = dropout_scale(inputs[1])
    ctx.mark_non_differentiable(output[1])


dropout = _operator(
    "dropout(Tensor x, float p, Generator? random=None) -> (Tensor, Tensor)",
    _dropout,
    lambda x, p, random=None: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)),
    _keep_mask,
    lambda ctx, dy, _: (aten.native_dropout_backward(dy, ctx.saved_tensors[0], ctx.scale), None, None),
    tags=(torch.Tag.nondeterministic_seeded,),
)


# rms_norm: y = x * rstd * gain with rstd = 1 / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467, eq. 4).
# x (..., n), gain (n), y like x, rstd (rows).
def _rms_norm(x, gain, eps):
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    return x * rstd.unsqueeze(-1) * gain, rstd.flatten()


def _rms_norm_backward(dy, x, gain, rstd):
    rstd = rstd.view(*x.shape[:-1], 1)
    normal, inner = x * rstd, dy * gain
    dx = rstd * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return dx, (dy * normal).flatten(0, -2).sum(0)


def _keep_norm(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


rms_norm = _operator(
    "rms_norm(Tensor x, Tensor gain, float eps) -> (Tensor, Tensor)",
    _rms_norm,
    lambda x, gain, eps: (_empty(x), _empty(x, math.prod(x.shape[:-1]))),
    _keep_norm,
    lambda ctx, dy, _: (*torch.ops.twobp.rms_norm_backward(dy, *ctx.saved_tensors), None),
)
_operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor gain, Tensor rstd) -> (Tensor, Tensor)",
    _rms_norm_backward,
    lambda dy, x, gain, rstd: (_empty(x), torch.empty_like(gain)),
)

# glu: y = activation(g) * u of x (..., 2 n) = (g | u) (arXiv 2002.05202). activation: silu, gelu, gelu_tanh.
ACTIVATIONS = {
    "silu": (aten.silu, aten.silu_backward, {}),
    "gelu": (aten.gelu, aten.gelu_backward, {"approximate": "none"}),
    "gelu_tanh": (aten.gelu, aten.gelu_backward, {"approximate": "tanh"}),
}


def _glu(x, activation):
    function, _, options = ACTIVATIONS[activation]
    g, u = x.chunk(2, -1)
    return function(g, **options) * u


def _glu_backward(dy, x, activation):
    function, backward, options = ACTIVATIONS[activation]
    g, u = x.chunk(2, -1)
    return torch.cat([backward(dy * u, g, **options), dy * function(g, **options)], -1)


def _keep_glu(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.activation = inputs[1]


glu = _operator(
    "glu(Tensor x, str activation) -> Tensor",
    _glu,
    lambda x, activation: _empty(x, *x.shape[:-1], x.shape[-1] // 2),
    _keep_glu,
    lambda ctx, dy: (torch.ops.twobp.glu_backward(dy, ctx.saved_tensors[0], ctx.activation), None),
)
_operator(
    "glu_backward(Tensor dy, Tensor x, str activation) -> Tensor", _glu_backward, lambda dy, x, activation: _empty(x)
)


# attention: softmax(q k^T / sqrt(n)) v of packed rows. qkv (batch, positions, (heads + 2 kv_heads) n) = (q | k | v);
# cos, sin (positions, n / 2) turn number i of each head of q and k with number i + n / 2 (RoFormer, arXiv 2104.09864);
# out (batch, positions, heads n), rotated like qkv, log_sum_exp (batch, heads, positions).
def turn(x, cos, sin):
    """Returns the rotary embedding of x (..., positions, n)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _heads(x, heads, kv_heads):
    """Returns q (batch, heads, positions, n), and k and v with a copy for each head that shares them."""
    x = x.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = x.split([heads, kv_heads, kv_heads], 1)
    return q, *(one.repeat_interleave(heads // kv_heads, 1) for one in (k, v))


def _rotate(x, cos, sin, heads, kv_heads):
    if cos is None:
        return x.clone()
    parts = x.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    return (
        torch.cat([turn(parts[:, : heads + kv_heads], cos, sin), parts[:, heads + kv_heads :]], 1)
        .transpose(1, 2)
        .flatten(2)
    )


def with_neighbours(*rows):
    """ATen's kernels for CPUs read the numbers of a row of q, k, v, their result and its gradient as neighbours,
    whatever the strides say."""
    return [one if one.stride(-1) == 1 else one.clone(memory_format=torch.contiguous_format) for one in rows]


def _attention(qkv, cos, sin, heads, kv_heads, causal):
    rotated = _rotate(qkv, cos, sin, heads, kv_heads)
    out, log_sum_exp = aten._scaled_dot_product_flash_attention_for_cpu(
        *with_neighbours(*_heads(rotated, heads, kv_heads)), 0.0, causal
    )
    return out.transpose(1, 2).flatten(2), rotated, log_sum_exp.contiguous()


def _attention_backward(dout, rotated, out, log_sum_exp, cos, sin, heads, kv_heads, causal):
    def apart(x):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = _heads(rotated, heads, kv_heads)
    rows = with_neighbours(apart(dout), q, k, v, apart(out))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, log_sum_exp, 0.0, causal)
    shared = [one.unflatten(1, (kv_heads, -1)).sum(2) for one in (dk, dv)]
    dqkv = torch.cat([dq, *shared], 1).transpose(1, 2).flatten(2)
    return _rotate(dqkv, cos, None if sin is None else -sin, heads, kv_heads)


def _attention_shapes(qkv, cos, sin, heads, kv_heads, causal):
    batch, positions, row = qkv.shape
    return (
        _empty(qkv, batch, positions, heads * (row // (heads + 2 * kv_heads))),
        _empty(qkv),
        _empty(qkv, batch, heads, positions),
    )


def _keep_attention(ctx, inputs, output):
    out, rotated, log_sum_exp = output
    ctx.save_for_backward(rotated, out, log_sum_exp, *inputs[1:3])
    ctx.shape = inputs[3:]
    ctx.mark_non_differentiable(rotated, log_sum_exp)


attention = _operator(
    "attention(Tensor qkv, Tensor? cos, Tensor? sin, int heads, int kv_heads, bool causal) -> (Tensor, Tensor, Tensor)",
    _attention,
    _attention_shapes,
    _keep_attention,
    lambda ctx, dout, *_: (torch.ops.twobp.attention_backward(dout, *ctx.saved_tensors, *ctx.shape), *[None] * 5),
)
attention_backward = _operator(
    "attention_backward(Tensor dout, Tensor rotated, Tensor out, Tensor log_sum_exp, Tensor? cos, Tensor? sin, int "
    "heads, int kv_heads, bool causal) -> Tensor",
    _attention_backward,
    lambda dout, rotated, *_: _empty(rotated),
)


# causal_attention: the same of q (batch, heads, positions, n) and k, v (batch, kv_heads, positions, n) that other
# operators have made, with scores times
# `scale`, or 1 / sqrt(n). Only programs that take slices have it.
def _causal_attention(q, k, v, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu(*with_neighbours(q, k, v), 0.0, True, scale=scale)


def _causal_attention_backward(dout, q, k, v, out, log_sum_exp, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *with_neighbours(dout, q, k, v, out), log_sum_exp, 0.0, True, scale=scale
    )


def _keep_causal_attention(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scale = inputs[3]
    ctx.mark_non_differentiable(output[1])


causal_attention = _operator(
    "causal_attention(Tensor q, Tensor k, Tensor v, float? scale) -> (Tensor, Tensor)",
    _causal_attention,
    _causal_attention,
    _keep_causal_attention,
    lambda ctx, dout, _: (*torch.ops.twobp.causal_attention_backward(dout, *ctx.saved_tensors, ctx.scale), None),
)
causal_attention_backward = _operator(
    "causal_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum_exp, float? "
    "scale) -> (Tensor, Tensor, Tensor)",
    _causal_attention_backward,
    _causal_attention_backward,
)


# rotary: rotary embedding of x (batch, heads, positions, n). `back` turns by the opposite angle, as for gradients.
def _keep_tables(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:3])
    ctx.back = inputs[3]


rotary = _operator(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    lambda x, cos, sin, back: turn(x, cos, -sin if back else sin),
    lambda x, cos, sin, back: torch.empty_like(x),
    _keep_tables,
    lambda ctx, dy: (torch.ops.twobp.rotary(dy, *ctx.saved_tensors, not ctx.back), None, None, None),
)


# cross_entropy: the sum of the losses of logits (n, classes) with labels (n). Rows with the label `ignore` do not
# count. The gradient takes the memory of the logits.
def _cross_entropy(logits, labels, ignore):
    logs = torch.log_softmax(logits, -1)
    counts = labels.ne(ignore)
    places = labels.where(counts, 0).unsqueeze(-1)
    gradient = logs.exp().scatter_add(-1, places, -torch.ones_like(places, dtype=logits.dtype)) * counts.unsqueeze(-1)
    return -(logs.gather(-1, places).squeeze(-1) * counts).sum(), gradient


def _keep_gradient(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


cross_entropy = _operator(
    "cross_entropy(Tensor logits, Tensor labels, int ignore) -> (Tensor, Tensor)",
    _cross_entropy,
    lambda logits, labels, ignore: (logits.new_empty(()), _empty(logits)),
    _keep_gradient,
    lambda ctx, dy, _: (ctx.saved_tensors[0] * dy, None, None),
)


# grouped_mm: rows of group g of a (rows, n) @ b[g], b (groups, n, m). ends (groups) is the index after the last row of
# each group. Mixtures of experts use it.
def _groups(ends):
    ends = ends.tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


def _grouped_mm(a, b, ends):
    y = a.new_zeros(a.shape[0], b.shape[2])
    for rows, matrix in zip(_groups(ends), b):
        y[rows] = a[rows] @ matrix
    return y


def _grouped_mm_weight(a, dy, ends):
    return torch.stack([a[rows].t() @ dy[rows] for rows in _groups(ends)])


def _keep_factors(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_mm_gradients(ctx, dy):
    a, b, ends = ctx.saved_tensors
    return torch.ops.twobp.grouped_mm(dy, b.transpose(1, 2), ends), torch.ops.twobp.grouped_mm_weight(a, dy, ends), None


grouped_mm = _operator(
    "grouped_mm(Tensor a, Tensor b, Tensor ends) -> Tensor",
    _grouped_mm,
    lambda a, b, ends: _empty(a, a.shape[0], b.shape[2]),
    _keep_factors,
    _grouped_mm_gradients,
)
grouped_mm_weight = _operator(
    "grouped_mm_weight(Tensor a, Tensor dy, Tensor ends) -> Tensor",
    _grouped_mm_weight,
    lambda a, dy, ends: _empty(a, ends.shape[0], a.shape[1], dy.shape[1]),
)


# linear_4bit: y = x W^T of a weight W (rows, n) in 4 bits, as bitsandbytes keeps it: each byte of `packed` has two
# indices into `code`, the higher bits first, and each `block` of numbers a scale. W is dequantised in x's dtype, and
# for the gradient of x, as there, in `dtype`.
def dequantised(packed, scales, code, sizes, block, dtype):
    packed = packed.flatten()
    numbers = code[torch.stack([packed >> 4, packed & 15], 1).flatten().int()][: math.prod(sizes)]
    return (numbers * scales.repeat_interleave(block)[: numbers.numel()]).to(dtype).view(sizes)


def _linear_4bit(x, packed, scales, code, rows, block, dtype):
    return x @ dequantised(packed, scales, code, (rows, x.shape[-1]), block, x.dtype).t()


def _linear_4bit_backward(dy, packed, scales, code, columns, block, dtype):
    return dy @ dequantised(packed, scales, code, (dy.shape[-1], columns), block, dtype).to(dy.dtype)


def _keep_weight(ctx, inputs, output):
    x, *weight, _, block, dtype = inputs
    ctx.save_for_backward(*weight)
    ctx.rest = x.shape[-1], block, dtype


linear_4bit = _operator(
    "linear_4bit(Tensor x, Tensor packed, Tensor scales, Tensor code, int rows, int block, ScalarType dtype) -> Tensor",
    _linear_4bit,
    lambda x, packed, scales, code, rows, block, dtype: _empty(x, *x.shape[:-1], rows),
    _keep_weight,
    lambda ctx, dy: (torch.ops.twobp.linear_4bit_backward(dy, *ctx.saved_tensors, *ctx.rest), *[None] * 6),
)
_operator(
    "linear_4bit_backward(Tensor dy, Tensor packed, Tensor scales, Tensor code, int columns, int block, ScalarType "
    "dtype) -> Tensor",
    _linear_4bit_backward,
    lambda dy, packed, scales, code, columns, block, dtype: _empty(dy, *dy.shape[:-1], columns),
)
