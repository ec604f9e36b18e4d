"""Sizes of a forward pass that only the fields of its batch decide, as in x[mask]. They are those of the example, and
the program asserts that a micro-batch has the same ones. A branch that only the shapes of the fields decide is the same
in every such batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from .. import ops
from ..errors import current_line

MOST_RUNS = 32  # of equal elements of a mask


class FromFields:
    """The values that tensors of an exported graph have for the example."""

    def __init__(self, fields: Mapping[str, torch.Tensor]):
        self.fields = list(fields.values())

    def elements(self, tensor: torch.Tensor, of_fields: bool = True) -> list | None:
        """Returns all elements in order, or None if something else than the fields decides it. Without `of_fields`,
        only the shapes may."""
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
        if slot is None:
            return None
        node = slot.proxy.node
        given = [one for one in node.graph.nodes if one.op == "placeholder"][
            -len(self.fields) :
        ]  # parameters and buffers come first
        values = dict(zip(given, self.fields))
        needed = ops.ancestors([node], stop=values.__contains__)
        read = {node, *(one for call in needed for one in ops.inputs_of(call))}
        if not read <= {*needed, *(values if of_fields else ())} or any(map(ops.is_random, needed)):
            return None
        with _disable_current_modes(), torch.no_grad():
            for one in node.graph.nodes:
                if one in needed:
                    values[one] = ops.computed(one, values)
            return values[node].flatten().tolist()

    def chosen(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Returns x[mask], or None if it is not known."""
        known = self.elements(mask)
        if known is None or mask.dim() == 0:
            return None
        runs, begin = [], 0
        for value, equal in itertools.groupby(known):
            runs.append((value, begin, begin := begin + len(list(equal))))
        if len(runs) > MOST_RUNS:
            return None
        x, mask = x.flatten(0, mask.dim() - 1), mask.flatten()
        for value, begin, end in runs:
            part = mask[begin:end]
            _assert(
                (part if value else part.logical_not()).all(),
                "x[mask] has other elements than in the example, for which the module was captured",
            )
        kept = [x[begin:end] for value, begin, end in runs if value]
        return torch.cat(kept) if len(kept) != 1 or len(runs) != 1 else x

    def truth(self, tensor: torch.Tensor) -> bool | None:
        """Returns bool(tensor), or None if it is not the same in every batch of these shapes."""
        known = self.elements(tensor, of_fields=False) if tensor.numel() == 1 else None
        return None if known is None else bool(known[0])

    def number(self, tensor: torch.Tensor) -> int | None:
        """Returns tensor.item() for a whole number, or None if it is not known."""
        known = (
            None
            if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.numel() != 1
            else self.elements(tensor)
        )
        if known is None:
            return None
        _assert(
            (tensor == known[0]).all(),
            f"item() or tolist() is not {known[0]} as in the example, for which the module was captured",
        )
        return known[0]


class NothingKnown:
    """In place of FromFields where programs are for many shapes."""

    def chosen(self, *_) -> None:
        return None

    truth = number = chosen


def _assert(condition: torch.Tensor, what: str) -> None:
    torch.ops.aten._assert_async.msg(
        condition,
        f"{what}{current_line()}. Let it be the same in every batch, or keep all elements as tensors: (x * "
        "mask).sum() in place of x[mask].sum()",
    )
