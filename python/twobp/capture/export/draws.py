"""Finds which random numbers of a forward pass the loss depends on. A program draws no others, but the module itself
does: the comparison with it must know which of its calls have no counterpart."""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import NamedTuple

import numpy
from torch import fx

from .. import ops
from ..errors import CaptureError
from ..own_operators import aten

DROPOUTS = {aten.dropout.default: (1, 2), aten.native_dropout.default: (1, 2)}  # the positions of p and train
KEY = "draw"  # torch keeps the "custom" data of a node in those to which it is decomposed


class Draw(NamedTuple):
    """A call that draws random numbers. `drops`: it is a dropout, which does not draw in evaluation mode. `read`: the
    loss depends on it."""

    drops: bool
    read: bool


@contextlib.contextmanager
def refusing_draws_of_python(who: str):
    """Raises CaptureError if Python's or NumPy's generator draws. Programs would repeat what it drew at capture."""

    def state() -> tuple:
        return random.getstate(), pickle.dumps(numpy.random.get_state())

    before = state()
    yield
    if state() != before:
        raise CaptureError(
            f"{who} draws by Python's random or NumPy's, and programs would repeat what it drew at capture. Draw by "
            "torch, and choose by torch.where: torch.where(torch.rand(()) < p, a, b)"
        )


def number_draws(graph: fx.Graph) -> list[bool]:
    """Numbers the calls that draw, in a graph that still has those that nothing reads. Returns for each whether it is a
    dropout."""
    found: list[bool] = []
    for node in graph.nodes:
        drops = is_dropout(node)
        if drops or drops is None and draws(node):
            node.meta["custom"] = {**node.meta.get("custom", {}), KEY: len(found)}
            found.append(bool(drops))
    return found


def is_dropout(node: fx.Node) -> bool | None:
    """Returns whether a dropout drops, or None for other calls."""
    if node.target in DROPOUTS:
        p, train = (ops.named_argument(node, i) for i in DROPOUTS[node.target])
        return bool(train) and p > 0
    if node.target is aten.scaled_dot_product_attention.default:
        return ops.named_argument(node, 4) > 0
    return None


def draws(node: fx.Node) -> bool:
    return ops.is_random(node) and ops.short_name(node) not in ops.RECURRENT


def draws_of(graph: fx.Graph, results: list[fx.Node], drops: list[bool]) -> list[Draw]:
    """Returns the numbered calls. `results` are what programs compute. If the calls of the graph are not those that
    were numbered, all count as read."""
    left = [node for node in ops.ancestors(results) if draws(node)]
    numbers = {node.meta.get("custom", {}).get(KEY) for node in left}
    if None in numbers or len(numbers) < len(left):
        return []
    return [Draw(one, i in numbers) for i, one in enumerate(drops)]
