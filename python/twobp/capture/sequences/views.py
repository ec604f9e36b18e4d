"""Finds where the positions lie in the results of views, which only change the shape of a value (positions.py)."""

from __future__ import annotations

import math

from torch import fx

from .. import ops
from ..own_operators import aten
from .along import Along, Follower, Mixes, argument, dimensions, same, several, shape


def reshaped(node: fx.Node, of: Follower):
    place, before, after = same(node, of), shape(node.args[0]), list(shape(node))
    stride, below = place.inner * math.prod(before[place.dim + 1 :]), 1
    for dim in reversed(range(len(after))):
        if stride % below == 0 and after[dim] * below % (stride * of.positions) == 0:
            inner = stride // below
            place = Along(dim, after[dim] // (inner * of.positions), inner)
            of.resize(node, place)
            return place
        below *= after[dim]
    raise Mixes(node, f"'{ops.short_name(node)}' splits the positions of a sequence into several dimensions")


def expanded(node: fx.Node, of: Follower):
    place = same(node, of)
    place = place._replace(dim=place.dim + len(shape(node)) - len(shape(node.args[0])))
    of.resize(node, place)
    return place


def permuted(node: fx.Node, of: Follower):
    place, rank = same(node, of), len(shape(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [one % rank for one in node.args[1]]
    else:
        a, b = (one % rank for one in node.args[1:3]) if node.target is aten.transpose.int else (0, rank - 1)
        order[a], order[b] = order[b], order[a]
    return place._replace(dim=order.index(place.dim))


def unsqueezed(node: fx.Node, of: Follower):
    place = same(node, of)
    return place._replace(dim=place.dim + (node.args[1] % len(shape(node)) <= place.dim))


def squeezed(node: fx.Node, of: Follower):
    place, before = same(node, of), shape(node.args[0])
    gone = [one for one in dimensions(node) if before[one] == 1]
    if node.target is aten.squeeze.default and gone:  # a slice may have one position
        raise Mixes(
            node, "'squeeze' without a dimension would take that of the positions in a slice of one. Name the dimension"
        )
    return place._replace(dim=place.dim - sum(one < place.dim for one in gone))


def selected(node: fx.Node, of: Follower):
    place, (dim,) = same(node, of), dimensions(node)
    if place.dim == dim:
        raise Mixes(node, f"'{ops.short_name(node)}' takes single positions out of a sequence")
    return several(node, place._replace(dim=place.dim - (dim < place.dim)))


def cut_out(node: fx.Node, of: Follower):
    place, (dim,) = same(node, of), dimensions(node)
    if place.dim == dim:
        start, end, step = (argument(node, one) for one in ("start", "end", "step"))
        size = shape(node.args[0])[dim]
        if (start or 0) != 0 or step != 1 or end is not None and end < size:
            raise Mixes(
                node,
                "'slice' cuts positions off a sequence. To shift labels, pad these instead: F.pad(labels[:, 1:], (0, "
                "1), value=-100)",
            )
        if end == size:
            of.change(3, place.size(of.length))
    return place


def padded(node: fx.Node, of: Follower):
    place, pad = same(node, of), node.args[1]
    behind = 2 * (len(shape(node)) - 1 - place.dim)
    if any(pad[behind : behind + 2]):
        raise Mixes(node, f"'{ops.short_name(node)}' shifts or pads the positions of a sequence")
    return place


VIEWS = {
    **dict.fromkeys(("reshape", "view", "_unsafe_view"), reshaped),
    "expand": expanded,
    **dict.fromkeys(("transpose", "permute", "t"), permuted),
    "unsqueeze": unsqueezed,
    "squeeze": squeezed,
    "select": selected,
    "unbind": selected,
    "slice": cut_out,
    "constant_pad_nd": padded,
    "pad": padded,
}
