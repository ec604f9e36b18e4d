"""Where the positions of a sequence lie in the values of a layer, operator by operator. What an operator computes at one position must depend on
that position alone, or be attention of ours, which knows slices (docs/long_sequences.md)."""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

from . import ops
from .own_operators import aten, attention, causal_attention, cross_entropy, dropout, glu, rms_norm, rotary
from .targets import ELEMENTWISE as LOSSES
from .targets import MEAN, NLL, SUM as SUMMED, named_argument

if TYPE_CHECKING:
    from .slices import Rewriting


class Along(NamedTuple):
    """The value's dimension `dim` is (outer, positions, inner)."""
    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, positions: int) -> int:
        return self.outer * positions * self.inner


# Other values: None, the same for every slice, such as a parameter; SUM, a sum over positions, so that those of slices add up; a list of places for
# a list of values; and UNREAD.
SUM, UNREAD = "sum", "unread"


class Mixes(Exception):
    """An operator that does not keep positions apart: the node, and what it does."""

    def __init__(self, node: fx.Node, what: str = ""):
        super().__init__(what or f"'{ops.short_name(node)}' is not known to keep the positions of a sequence apart")
        self.node = node


def shape(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


def argument(node: fx.Node, name: str):
    """An argument by the name in the operator's schema; None if it has none."""
    position = next((i for i, one in enumerate(node.target._schema.arguments) if one.name == name), None)
    return None if position is None else named_argument(node, position)


def dimensions(node: fx.Node, name: str = "dim") -> set[int]:
    """Those of the first argument that `name` lists; all if there is none."""
    rank, given = len(shape(node.args[0])), argument(node, name)
    if given is None or given == []:
        return set(range(rank))
    return {one % rank for one in (given if isinstance(given, Sequence) else [given])}


def across(node: fx.Node) -> Mixes:
    return Mixes(node, f"'{ops.short_name(node)}' computes across the positions of a sequence")


def same(node: fx.Node, of: Rewriting) -> Along:
    """The place in the first argument."""
    place = of.places[node.args[0]] if isinstance(node.args[0], fx.Node) else None
    if not isinstance(place, Along):
        raise across(node)
    return place


def apart(node: fx.Node, of: Rewriting):
    """Operators along dimensions that are not the positions', with results of the same rank."""
    place = same(node, of)
    if place.dim in dimensions(node, "dim" if argument(node, "dim") is not None else "dims"):
        raise across(node)
    return several(node, place)


def several(node: fx.Node, place: Along):
    value = node.meta["val"]
    return [place] * len(value) if isinstance(value, (tuple, list)) else place


def reduced(node: fx.Node, of: Rewriting):
    place, dims = same(node, of), dimensions(node)
    if place.dim in dims:
        if ops.short_name(node) == "sum":
            return SUM
        raise across(node)
    return several(node, place if argument(node, "keepdim") else place._replace(dim=place.dim - sum(one < place.dim for one in dims)))


def pointwise(node: fx.Node, of: Rewriting, tensors: Sequence[fx.Node] = ()):
    """Element by element, with broadcasting. What is the same for every slice, but has a number for each position, is cut."""
    tensors = tensors or ops.inputs_of(node)
    rank = max(len(shape(one)) for one in tensors)
    found = {of.places[one]._replace(dim=of.places[one].dim + rank - len(shape(one))) for one in tensors if of.places[one] is not None}
    if len(found) != 1:
        raise Mixes(node, f"'{ops.short_name(node)}' puts each position beside others")
    place = found.pop()
    for one in tensors:
        dim = place.dim - (rank - len(shape(one)))
        if of.places[one] is None and dim >= 0 and shape(one)[dim] != 1:
            of.cut(one, place._replace(dim=dim))
    return place


def reshaped(node: fx.Node, of: Rewriting):
    place, before, after = same(node, of), shape(node.args[0]), list(shape(node))
    stride, below = place.inner * math.prod(before[place.dim + 1:]), 1
    for dim in reversed(range(len(after))):
        if stride % below == 0 and after[dim] * below % (stride * of.positions) == 0:
            inner = stride // below
            place = Along(dim, after[dim] // (inner * of.positions), inner)
            of.resize(node, place)
            return place
        below *= after[dim]
    raise Mixes(node, f"'{ops.short_name(node)}' splits the positions of a sequence into several dimensions")


def expanded(node: fx.Node, of: Rewriting):
    place = same(node, of)
    place = place._replace(dim=place.dim + len(shape(node)) - len(shape(node.args[0])))
    of.resize(node, place)
    return place


def permuted(node: fx.Node, of: Rewriting):
    place, rank = same(node, of), len(shape(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [one % rank for one in node.args[1]]
    else:
        a, b = (one % rank for one in node.args[1:3]) if node.target is aten.transpose.int else (0, rank - 1)
        order[a], order[b] = order[b], order[a]
    return place._replace(dim=order.index(place.dim))


def unsqueezed(node: fx.Node, of: Rewriting):
    place = same(node, of)
    return place._replace(dim=place.dim + (node.args[1] % len(shape(node)) <= place.dim))


def squeezed(node: fx.Node, of: Rewriting):
    place, before = same(node, of), shape(node.args[0])
    gone = [one for one in dimensions(node) if before[one] == 1]
    if node.target is aten.squeeze.default and gone:  # a slice may have one position
        raise Mixes(node, "'squeeze' without a dimension would take that of the positions in a slice of one. Name the dimension")
    return place._replace(dim=place.dim - sum(one < place.dim for one in gone))


def selected(node: fx.Node, of: Rewriting):
    place, (dim,) = same(node, of), dimensions(node)
    if place.dim == dim:
        raise Mixes(node, f"'{ops.short_name(node)}' takes single positions out of a sequence")
    return several(node, place._replace(dim=place.dim - (dim < place.dim)))


def cut_out(node: fx.Node, of: Rewriting):
    place, (dim,) = same(node, of), dimensions(node)
    if place.dim == dim:
        start, end, step = (argument(node, one) for one in ("start", "end", "step"))
        size = shape(node.args[0])[dim]
        if (start or 0) != 0 or step != 1 or end is not None and end < size:
            raise Mixes(node, "'slice' cuts positions off a sequence. To shift labels, pad these instead: F.pad(labels[:, 1:], (0, 1), value=-100)")
        if end == size:
            of.change(3, place.size(of.length))
    return place


def joined(node: fx.Node, of: Rewriting):
    tensors = [one for one in node.args[0] if shape(one) != (0,)]  # one without numbers and dimensions adds nothing
    place = pointwise(node, of, tensors)
    dim, rank = (node.args[1] if len(node.args) > 1 else 0), len(shape(node))
    if node.target is aten.stack.default:
        return place._replace(dim=place.dim + (dim % rank <= place.dim))
    if dim % rank == place.dim and len(tensors) > 1:
        raise Mixes(node, "'cat' makes sequences longer")
    return place


def broadcast(node: fx.Node, of: Rewriting):
    return [pointwise(node, of, node.args[0])] * len(node.args[0])


def padded(node: fx.Node, of: Rewriting):
    place, pad = same(node, of), node.args[1]
    behind = 2 * (len(shape(node)) - 1 - place.dim)
    if any(pad[behind:behind + 2]):
        raise Mixes(node, f"'{ops.short_name(node)}' shifts or pads the positions of a sequence")
    return place


def normed(node: fx.Node, of: Rewriting):
    place, x = same(node, of), node.args[0]
    own = node.target is rms_norm
    if place.dim >= len(shape(x)) - (1 if own else len(node.args[1])):
        raise across(node)
    return [place, UNREAD] if own else several(node, place)


def only_first(node: fx.Node, of: Rewriting, first: fx.Node) -> Along:
    place = of.places[first]
    if not isinstance(place, Along) or any(of.places[one] is not None for one in ops.inputs_of(node) if one is not first):
        raise across(node)
    return place


def product(node: fx.Node, of: Rewriting):
    """x @ w with a w that is the same for every slice."""
    x = node.args[1 if node.target is aten.addmm.default else 0]
    place = only_first(node, of, x)
    bias = node.args[0] if node.target is aten.addmm.default else None
    if place.dim == len(shape(x)) - 1 or bias is not None and len(shape(bias)) > 1 and shape(bias)[0] != 1:
        raise across(node)
    return place


def batched(node: fx.Node, of: Rewriting):
    """a @ b for each of the leading dimensions."""
    a, b, rank = *node.args[:2], len(shape(node))
    if min(len(shape(a)), len(shape(b))) < 2:
        raise across(node)
    places = [of.places[one] and of.places[one]._replace(dim=of.places[one].dim + rank - len(shape(one))) for one in (a, b)]
    if places[1] is None and places[0].dim == rank - 2:
        return places[0]  # rows of a
    place = places[0] or places[1]
    if place.dim >= rank - 2 or any(one not in (None, place) for one in places):
        raise Mixes(node, f"'{ops.short_name(node)}' multiplies positions with positions")
    for one in (a, b):
        dim = place.dim - (rank - len(shape(one)))
        if of.places[one] is None and dim >= 0 and shape(one)[dim] != 1:
            of.cut(one, place._replace(dim=dim))
    return place


def looked_up(node: fx.Node, of: Rewriting):
    return only_first(node, of, node.args[1])


def indexed(node: fx.Node, of: Rewriting):
    """A table, the same for every slice, at indices of the positions; or values at indices that are the same for every slice."""
    given = [(i, one) for i, one in enumerate(node.args[1]) if one is not None]
    if len(given) != 1:
        raise Mixes(node)
    (dim, indices), = given
    if of.places[node.args[0]] is None:
        place = only_first(node, of, indices)
        return place._replace(dim=place.dim + dim)
    place = only_first(node, of, node.args[0])
    if place.dim == dim or indices.meta["val"].dtype == torch.bool:
        raise across(node)
    return place._replace(dim=place.dim + (len(shape(indices)) - 1) * (dim < place.dim))


def aligned(node: fx.Node, of: Rewriting):
    """gather and scatter: tensors of the same places."""
    place = pointwise(node, of)
    if place.dim in dimensions(node) or any(shape(one)[place.dim] != place.size(of.positions) for one in ops.inputs_of(node)):
        raise across(node)
    return place


def lost(node: fx.Node, of: Rewriting):
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


def own_cross_entropy(node: fx.Node, of: Rewriting):
    place = same(node, of)
    if place.dim != 0:
        raise across(node)
    of.align(node, node.args[1], place)
    return [SUM, UNREAD]


def own_attention(node: fx.Node, of: Rewriting):
    qkv, *tables, _, _, causal = node.args
    if not causal:
        raise Mixes(node, "attention in both directions reads later positions")
    if of.places[qkv] != Along(1):
        raise across(node)
    for one in tables:
        if one is not None:
            of.align(node, one, Along(0))
    return [Along(1), UNREAD, UNREAD]


def own_rotary(node: fx.Node, of: Rewriting):
    if same(node, of) != Along(2):
        raise across(node)
    for one in node.args[1:3]:
        of.align(node, one, Along(0))
    return Along(2)


def own_glu(node: fx.Node, of: Rewriting):
    if same(node, of).dim == len(shape(node)) - 1:
        raise across(node)
    return same(node, of)


def own_dropout(node: fx.Node, of: Rewriting):
    """The runtime finds the rows of a slice in the mask of the whole: each row is a position."""
    place, sizes = same(node, of), shape(node.args[0])
    if place.dim == len(sizes) - 1 or place.inner * math.prod(sizes[place.dim + 1:-1]) != 1:
        raise Mixes(node, "dropout of values that are not (..., positions, numbers) has another mask in slices")
    return [place, place]


def other_attention(node: fx.Node, of: Rewriting):
    def given(position: int, name: str):
        return node.args[position] if len(node.args) > position else node.kwargs.get(name)

    if node.target is ops.attention_with_dropout:
        raise Mixes(node, "attention with dropout has no form for slices. Set its probability to 0")
    if given(3, "attn_mask") is not None:
        raise Mixes(node, "attention with a mask (of padding, windows or documents) has no form for slices")
    if not given(5, "is_causal"):
        raise Mixes(node, "attention in both directions reads later positions")
    q, k, v = node.args[:3]
    sizes = [shape(one) for one in (q, k, v)]
    known = all(of.places[one] == Along(2) for one in (q, k, v)) and all(len(one) == 4 for one in sizes) and sizes[1] == sizes[2] \
        and sizes[0][::3] == sizes[1][::3] and sizes[0][1] % sizes[1][1] == 0
    if not known or q.meta["val"].dtype not in (torch.float32, torch.float64):
        raise Mixes(node, "this form of attention has no form for slices: twobp has it for float32 and float64 (batch, heads, positions, numbers)")
    of.replace(causal_attention, q, k, v, given(6, "scale"))
    return Along(2)


def linear_in_sums(node: fx.Node, of: Rewriting):
    """The sum over slices of what `node` makes of sums must be what it makes of the whole sum."""
    name, tensors = ops.short_name(node), ops.inputs_of(node)
    sums = [one for one in tensors if of.places[one] == SUM]
    if name in ("add", "sub"):
        right = len(sums) == 2
    elif name in ("mul", "div"):
        right = len(sums) == 1 and all(of.places[one] in (None, SUM) for one in tensors) and (name == "mul" or sums[0] is node.args[0])
    else:
        right = name in ("neg", "reshape", "view", "clone", "contiguous", "_to_copy", "detach", "alias", "sum", "squeeze", "unsqueeze")
    if not right:
        raise Mixes(node, f"'{name}' computes with a sum over positions what is no sum over them")
    return SUM


def other_size(node: fx.Node, of: Rewriting):
    """new_zeros(x, size): of x, only the dtype counts."""
    return None


RULES: dict[str, Callable] = {
    **dict.fromkeys(("_to_copy", "type_as", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "zeros_like", "ones_like", "full_like"), same),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), other_size),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "prod", "any", "all", "argmax", "argmin", "logsumexp",
                     "linalg_vector_norm"), reduced),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "flip",
                     "roll", "split", "split_with_sizes", "chunk"), apart),
    **dict.fromkeys(("reshape", "view", "_unsafe_view"), reshaped), "expand": expanded, **dict.fromkeys(("transpose", "permute", "t"), permuted),
    "unsqueeze": unsqueezed, "squeeze": squeezed, "select": selected, "unbind": selected, "slice": cut_out, "cat": joined, "stack": joined,
    "constant_pad_nd": padded, "pad": padded, "broadcast_tensors": broadcast, "layer_norm": normed, "native_layer_norm": normed, "rms_norm": normed,
    **dict.fromkeys(("linear", "mm", "addmm"), product), "matmul": batched, "bmm": batched, "embedding": looked_up, "index": indexed, "gather": aligned,
    "scatter": aligned, "scatter_add": aligned, "scaled_dot_product_attention": other_attention, "attention_with_dropout": other_attention}
OWN = {attention: own_attention, rotary: own_rotary, glu: own_glu, dropout: own_dropout, cross_entropy: own_cross_entropy, **dict.fromkeys((*LOSSES, *NLL), lost)}


def place_of(node: fx.Node, of: Rewriting):
    """Where the positions lie in what `node` computes. Tells `of` which arguments are others for a slice. Raises Mixes."""
    if node.target is operator.getitem:
        return of.places[node.args[0]][node.args[1]]
    places = [of.places[one] for one in ops.inputs_of(node)]
    if UNREAD in places:
        raise Mixes(node)
    if SUM in places:
        return linear_in_sums(node, of)
    rule = OWN.get(node.target) or RULES.get(ops.short_name(node))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()) and not ops.is_random(node):
        rule = pointwise
    if rule is None:
        raise Mixes(node, f"'{ops.short_name(node)}' draws random numbers, which slices would draw anew" if ops.is_random(node) else "")
    return rule(node, of)
