"""Slices of sequences need no padding mask. Where attention is causal, no position reads a later one. So padding at the
end of a sequence changes neither loss nor gradients, if its labels do not count."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from twobp._native import Error

MASK, LABELS, IGNORED = "attention_mask", "labels", -100


def is_mask(module: torch.nn.Module | None, fields: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the fields have a mask (samples, positions) of padding as the models of transformers take it,
    also within PEFT."""
    parameter = inspect.signature(module.forward).parameters.get(MASK) if module is not None else None
    packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return (
        MASK in fields
        and fields[MASK].dim() == 2
        and parameter is not None
        and parameter.default is None
        and not packages.isdisjoint({"transformers", "peft"})
    )


def without_mask(fields: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """Returns the fields without the mask. Raises Error if it hides a position that may count."""
    hidden = fields[MASK] == 0
    if hidden.any():
        remedy = (
            "Slices take padding only at the end of sequences, where the labels are -100: set tokenizer.padding_side "
            'to "right", or slices to 1'
        )
        if (hidden[:, :-1] & ~hidden[:, 1:]).any():
            raise Error(f"{what}: '{MASK}' hides positions before others that count. {remedy}")
        if LABELS not in fields or fields[LABELS].shape != hidden.shape:
            raise Error(
                f"{what}: '{MASK}' hides positions, but no field '{LABELS}' of the same sizes says that they do not "
                f"count. {remedy}"
            )
        if (fields[LABELS][hidden] != IGNORED).any():
            raise Error(f"{what}: '{MASK}' hides positions whose '{LABELS}' count. {remedy}")
    return {name: field for name, field in fields.items() if name != MASK}
