"""Finds where the positions of a sequence lie in the values of a layer, operator by operator. An operator must compute
each position from that position alone, unless it is an attention of ours, which handles slices
(docs/long_sequences.md)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from .. import ops
from ..loss.losses import ELEMENTWISE as LOSSES
from ..loss.losses import MEAN, NLL
from ..loss.losses import SUM as SUMMED
from ..ops import named_argument
from ..own_operators import aten, attention, causal_attention, cross_entropy, dropout, glu, rms_norm, rotary
from .along import SUM, UNREAD, Along, Follower, Mixes, across, argument, dimensions, pointwise, same, several, shape
from .views import VIEWS


def apart(node: fx.Node, of: Follower):
    """Operators that compute along other dimensions than that of the positions, with results of the same rank."""
    place = same(node, of)
    if place.dim in dimensions(node, "dim" if argument(node, "dim") is not None else "dims"):
        raise across(node)
    return several(node, place)


def reduced(node: fx.Node, of: Follower):
    place, dims = same(node, of), dimensions(node)
    if place.dim in dims:
        if ops.short_name(node) == "sum":
            return SUM
        raise across(node)
    return several(
        node,
        place if argument(node, "keepdim") else place._replace(dim=place.dim - sum(one < place.dim for one in dims)),
    )


def joined(node: fx.Node, of: Follower):
    tensors = [one for one in node.args[0] if shape(one) != (0,)]  # one without numbers and dimensions adds nothing
    place = pointwise(node, of, tensors)
    dim, rank = (node.args[1] if len(node.args) > 1 else 0), len(shape(node))
    if node.target is aten.stack.default:
        return place._replace(dim=place.dim + (dim % rank <= place.dim))
    if dim % rank == place.dim and len(tensors) > 1:
        raise Mixes(node, "'cat' makes sequences longer")
    return place


def broadcast(node: fx.Node, of: Follower):
    return [pointwise(node, of, node.args[0])] * len(node.args[0])


def normed(node: fx.Node, of: Follower):
    x = node.args[0]
    place, own = only_first(node, of, x), node.target is rms_norm
    if place.dim >= len(shape(x)) - (1 if own else len(node.args[1])):
        raise across(node)
    return [place, UNREAD] if own else several(node, place)


def only_first(node: fx.Node, of: Follower, first: fx.Node) -> Along:
    place = of.places[first]
    if not isinstance(place, Along) or any(
        of.places[one] is not None for one in ops.inputs_of(node) if one is not first
    ):
        raise across(node)
    return place


def product(node: fx.Node, of: Follower):
    """x @ w, where w is the same for every slice."""
    x = node.args[1 if node.target is aten.addmm.default else 0]
    place = only_first(node, of, x)
    bias = node.args[0] if node.target is aten.addmm.default else None
    if place.dim == len(shape(x)) - 1 or bias is not None and len(shape(bias)) > 1 and shape(bias)[0] != 1:
        raise across(node)
    return place


def spelled_out(node: fx.Node) -> Mixes:
    return Mixes(
        node,
        f"'{ops.short_name(node)}' multiplies positions with positions. Write attention as "
        "scaled_dot_product_attention(q, k, v, is_causal=True); nn.MultiheadAttention does with need_weights=False",
    )


def matrices(node: fx.Node, of: Follower):
    raise spelled_out(node)


def einsum(node: fx.Node, of: Follower):
    """einsum in which one letter stands for the positions, and the result keeps it."""
    inputs, _, output = node.args[0].replace(" ", "").partition("->")
    operands = list(zip(inputs.split(","), node.args[1]))
    found = {
        (labels[of.places[one].dim], of.places[one].outer, of.places[one].inner)
        for labels, one in operands
        if of.places[one] is not None
    }
    (letter, *sizes), *others = found
    if (
        others
        or "." in node.args[0]
        or output.count(letter) != 1
        or any(labels.count(letter) > 1 for labels, _ in operands)
    ):
        raise spelled_out(node)
    for labels, one in operands:
        if of.places[one] is None and letter in labels:
            of.cut(one, Along(labels.index(letter), *sizes))
    return Along(output.index(letter), *sizes)


def batched(node: fx.Node, of: Follower):
    """a @ b for each of the leading dimensions."""
    a, b = node.args[:2]
    rank = len(shape(node))
    if min(len(shape(a)), len(shape(b))) < 2:
        raise across(node)
    if of.places[b] is None and of.places[a].dim == len(shape(a)) - 2:
        return of.places[a]._replace(dim=rank - 2)  # rows of a
    if any(of.places[one] is not None and of.places[one].dim >= len(shape(one)) - 2 for one in (a, b)):
        raise spelled_out(node)
    return pointwise(node, of, (a, b))


def looked_up(node: fx.Node, of: Follower):
    if argument(node, "scale_grad_by_freq"):
        raise Mixes(node, "'embedding' with scale_grad_by_freq counts the ids of all positions")
    return only_first(node, of, node.args[1])


def indexed(node: fx.Node, of: Follower):
    """Indexing: a table that is the same for every slice at indices for each position, or values of each position at
    indices that are the same for every slice."""
    given = [(i, one) for i, one in enumerate(node.args[1]) if one is not None]
    if len(given) != 1:
        raise Mixes(node)
    ((dim, indices),) = given
    if of.places[node.args[0]] is None:
        place = only_first(node, of, indices)
        return place._replace(dim=place.dim + dim)
    place = only_first(node, of, node.args[0])
    if place.dim == dim or indices.meta["val"].dtype == torch.bool:
        raise across(node)
    return place._replace(dim=place.dim + (len(shape(indices)) - 1) * (dim < place.dim))


def aligned(node: fx.Node, of: Follower):
    """gather and scatter, whose tensors all have the positions in the same dimension."""
    place = pointwise(node, of)
    if place.dim in dimensions(node) or any(
        shape(one)[place.dim] != place.size(of.positions) for one in ops.inputs_of(node)
    ):
        raise across(node)
    return place


def lost(node: fx.Node, of: Follower):
    """Losses that have a reduction."""
    position = NLL[node.target][0] if node.target in NLL else LOSSES[node.target]
    reduction = named_argument(node, position)
    if reduction == MEAN:
        raise across(node)
    if node.target in LOSSES:
        place = pointwise(node, of)
    else:
        logits, labels = node.args[:2]
        place, rank = same(node, of), len(shape(logits))
        classes = 0 if rank == 1 else 1
        if place.dim == classes:
            raise across(node)
        own = place if len(shape(labels)) == rank else place._replace(dim=place.dim - (classes < place.dim))
        of.align(node, labels, own)
    result = SUM if reduction == SUMMED else place
    return [result] + [UNREAD] * (len(node.meta["val"]) - 1) if isinstance(node.meta["val"], tuple) else result


def own_cross_entropy(node: fx.Node, of: Follower):
    place = same(node, of)
    if place.dim != 0:
        raise across(node)
    of.align(node, node.args[1], place)
    return [SUM, UNREAD]


def own_attention(node: fx.Node, of: Follower):
    qkv, *tables, _, _, causal = node.args
    if not causal:
        raise Mixes(node, "attention in both directions reads later positions")
    if of.places[qkv] != Along(1):
        raise across(node)
    for one in tables:
        if one is not None:
            of.align(node, one, Along(0))
    return [Along(1), UNREAD, UNREAD]


def own_rotary(node: fx.Node, of: Follower):
    if same(node, of) != Along(2):
        raise across(node)
    for one in node.args[1:3]:
        of.align(node, one, Along(0))
    return Along(2)


def own_glu(node: fx.Node, of: Follower):
    if same(node, of).dim == len(shape(node)) - 1:
        raise across(node)
    return same(node, of)


def own_dropout(node: fx.Node, of: Follower):
    """Dropout, whose mask for a slice is cut out of the mask for the whole sequences. So each row must be a
    position."""
    place, sizes = same(node, of), shape(node.args[0])
    if place.dim == len(sizes) - 1 or place.inner * math.prod(sizes[place.dim + 1 : -1]) != 1:
        raise Mixes(
            node, "dropout would draw another mask over slices, because its input is not (..., positions, numbers)"
        )
    return [place, place]


def other_attention(node: fx.Node, of: Follower):
    def given(position: int, name: str):
        return node.args[position] if len(node.args) > position else node.kwargs.get(name)

    if node.target is ops.attention_with_dropout:
        raise Mixes(node, "attention with dropout has no form for slices. Set its probability to 0")
    if (mask := given(3, "attn_mask")) is not None:
        fields = " and ".join(f"'{name}'" for name in of.fields_behind(mask))
        raise Mixes(
            node,
            f"attention with a mask that depends on {fields} has no form for slices. Leave a mask that hides nothing "
            "out of the batch"
            if fields
            else "attention with another mask than the causal one (of windows, or of numbers that are added) has no "
            "form for slices",
        )
    if not given(5, "is_causal"):
        raise Mixes(node, "attention in both directions reads later positions")
    q, k, v = node.args[:3]
    sizes = [shape(one) for one in (q, k, v)]
    known = (
        all(of.places[one] == Along(2) for one in (q, k, v))
        and all(len(one) == 4 for one in sizes)
        and sizes[1] == sizes[2]
        and sizes[0][::3] == sizes[1][::3]
        and sizes[0][1] % sizes[1][1] == 0
    )
    scale = given(6, "scale")
    if not known or scale is not None and not scale > 0 or q.meta["val"].dtype not in (torch.float32, torch.float64):
        raise Mixes(
            node,
            "this attention has no form for slices. Give it queries, keys and values (batch, heads, positions, "
            "numbers) of float32 or float64, the last number equal for all, and a scale above 0; these are "
            f"{', '.join(str(list(one)) for one in sizes)} of {q.meta['val'].dtype}",
        )
    of.replace(causal_attention, q, k, v, scale)
    return Along(2)


def linear_in_sums(node: fx.Node, of: Follower):
    """Operators on sums over positions: the results for the slices' sums must add up to the result for the whole
    sum."""
    name, tensors = ops.short_name(node), ops.inputs_of(node)
    sums = [one for one in tensors if of.places[one] == SUM]
    if name in ("add", "sub"):
        right = len(sums) == 2
    elif name in ("mul", "div"):
        right = (
            len(sums) == 1
            and all(of.places[one] in (None, SUM) for one in tensors)
            and (name == "mul" or sums[0] is node.args[0])
        )
    else:
        right = name in "neg reshape view clone contiguous _to_copy detach alias sum squeeze unsqueeze".split()
    if not right:
        raise Mixes(node, f"'{name}' of a sum over positions does not add up over slices")
    return SUM


def other_size(node: fx.Node, of: Follower):
    """new_zeros(x, size) uses only the dtype of x."""
    return None


REDUCING = """
    sum mean amax amin max min var var_mean std prod any all argmax argmin logsumexp linalg_vector_norm
""".split()
RULES: dict[str, Callable] = {
    **dict.fromkeys(
        """
        _to_copy type_as clone contiguous detach alias lift_fresh_copy zeros_like ones_like full_like
        """.split(),
        same,
    ),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), other_size),
    **dict.fromkeys(REDUCING, reduced),
    **dict.fromkeys(
        """
        softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk flip roll split
        split_with_sizes chunk
        """.split(),
        apart,
    ),
    **VIEWS,
    "cat": joined,
    "stack": joined,
    "broadcast_tensors": broadcast,
    "layer_norm": normed,
    "native_layer_norm": normed,
    "rms_norm": normed,
    **dict.fromkeys(("linear", "mm", "addmm"), product),
    "baddbmm": matrices,
    "einsum": einsum,
    "matmul": batched,
    "bmm": batched,
    "embedding": looked_up,
    "index": indexed,
    "gather": aligned,
    "scatter": aligned,
    "scatter_add": aligned,
    "scaled_dot_product_attention": other_attention,
    "attention_with_dropout": other_attention,
    "attention_with_added_mask": other_attention,
}
OWN = {
    attention: own_attention,
    rotary: own_rotary,
    glu: own_glu,
    dropout: own_dropout,
    cross_entropy: own_cross_entropy,
    **dict.fromkeys((*LOSSES, *NLL), lost),
}


def place_of(node: fx.Node, of: Follower):
    """Returns where the positions lie in the result of `node`. Tells `of` which arguments differ for a slice. Raises
    Mixes."""
    if node.target is operator.getitem:
        place = of.places[node.args[0]]
        return place[node.args[1]] if isinstance(place, list) else place  # a sum over positions, for example
    places = [of.places[one] for one in ops.inputs_of(node)]
    if UNREAD in places:
        raise Mixes(node)
    if SUM in places:
        return linear_in_sums(node, of)
    rule = OWN.get(node.target) or RULES.get(ops.short_name(node))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()) and not ops.is_random(node):
        rule = pointwise
    if rule is None:
        draws = ops.is_random(node) and ops.short_name(node) not in ops.RECURRENT
        raise Mixes(
            node, f"'{ops.short_name(node)}' draws random numbers, and each slice would draw its own" if draws else ""
        )
    return rule(node, of)
