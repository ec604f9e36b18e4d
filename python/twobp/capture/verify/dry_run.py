"""The dry run: the programs run once, in Python, and are compared with the module under autograd."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from twobp import _native

from .. import interpret
from ..errors import CaptureError, some
from ..loss.reported import ROWS
from .reference import reference

if TYPE_CHECKING:
    from ..captured import Captured

# An error beyond this is a wrong program, not rounding.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
FLOAT32_PARTS = 1e-5  # the same, for a module in float64 that computes parts in float32
ROUNDED_PARTS = 0.02  # the same, for a module in float32 that computes parts in 16 bits, by the same operators


@dataclasses.dataclass
class DryRun:
    """The largest relative errors against the module under autograd, and their places. `slices` is that of loss and
    gradients over slices of the sequences, at `worst_of_slices`; 0 if there is no program for these."""

    loss: float
    gradients: float
    worst: str
    buffers: float
    evaluation: float
    predictions: float = 0.0
    slices: float = 0.0
    worst_of_slices: str = ""


class WrongSlices(Exception):
    """Programs over slices do not compute what the module does."""


def limit(captured: Captured) -> float:
    """Returns the largest relative error that is rounding."""
    rounded = any("dtypes" in layer for layer in captured.graph["layers"])
    own = max(TOLERANCE.get(p.dtype, 2e-3) for p in captured.parameters.values())
    return max(own, ROUNDED_PARTS) if rounded else own


def dry_run(
    captured: Captured,
    chain: interpret.Chain,
    fields: dict[str, torch.Tensor],
    beside: Mapping[str, torch.Tensor] | None = None,
) -> DryRun:
    """Compares the programs of a chain with the module under autograd. Raises CaptureError if they differ by more than
    rounding, and WrongSlices if only those over slices do."""
    count = max(chain.count(fields), 1)
    weight = torch.tensor(1 / count, dtype=torch.float32).item()  # loss_weight is a float32
    random = interpret.Random(7)
    with torch.no_grad():
        loss, slots, new_buffers = chain.forward(fields, weight, random)
        predictions = [slots[-1][one["slot"]] for one in chain.program(len(slots) - 1)["outputs"][1:]]
        drawn = list(random.drawn)
        gradients = chain.backward(slots, random)
        del slots
        in_order, evaluated = interpret.Random(7), None
        if not captured.only_trains:
            evaluated = chain.forward(fields, weight, in_order, evaluate=True)[0]
    expected, wanted, changed, in_evaluation, dtypes, predicted = reference(
        captured, {**fields, **(beside or {})}, drawn, list(in_order.drawn)
    )
    if not torch.isfinite(expected):
        raise CaptureError(
            "the module's loss of the example is not finite, so that its programs cannot be compared with it. "
            "Give an example with a target that counts, and with finite numbers"
        )
    _native.release_memory()  # the memory of all values of the micro-batch; later steps do not need it at once
    scale = 1 / weight if captured.loss_reduction == "sum" else 1 / (weight * count)
    worst, where = worst_of(gradients, wanted, scale)
    floor = change_of_loss(captured, wanted)
    for name in gradients.keys() - wanted.keys():
        if gradients[name].count_nonzero() > 0:
            raise CaptureError(
                f"the captured programs train '{name}', which the module itself does not: its gradient is None "
                "there. Freeze it (requires_grad_(False)), or use torch.no_grad() where the gradient is to stop"
            )
    compared = changed.keys() - {ROWS, *getattr(captured.module, "not_compared", ())}
    result = DryRun(
        relative(loss * scale, expected, floor),
        worst,
        where,
        max((relative(new_buffers.get(n, captured.buffers[n]), changed[n]) for n in compared), default=0.0),
        0.0 if evaluated is None else relative(evaluated * scale, in_evaluation, floor),
        max((difference(one, own) for one, own in zip(predictions, predicted, strict=True)), default=0.0),
    )
    limit = max(captured.limit(), TOLERANCE.get(expected.dtype, 2e-3))
    if dtypes & {torch.bfloat16, torch.float16}:
        limit = max(limit, ROUNDED_PARTS)
    if torch.float32 in dtypes:  # as in the norms of transformers, whatever the dtype of the model
        limit = max(limit, FLOAT32_PARTS)
    for what, error in (
        ("the loss", result.loss),
        (f"the gradient of '{where}'", result.gradients),
        ("a buffer", result.buffers),
        ("a prediction", result.predictions),
    ):
        if not error <= limit:
            raise CaptureError(
                f"the captured programs compute {what} with a relative error of {error:.1e} against the module "
                "itself. "
                + (
                    left(captured)
                    or "The module may change its course from call to call, or this is an error of twobp: "
                    "please report it"
                )
            )
    if not result.evaluation <= limit:
        raise CaptureError(
            "in evaluation mode the module's loss is not that of its training graph without dropout, with "
            "BatchNorm's running statistics, and "
            f"with its buffers as they are (relative error {result.evaluation:.1e}). "
            + (
                left(captured)
                or "Only these may depend on self.training: AlphaDropout, RReLU and the like have no programs"
            )
        )
    result.slices, result.worst_of_slices = dry_run_of_slices(
        captured, chain, fields, weight, random.masks, (expected, wanted), scale
    )
    if not result.slices <= limit:
        raise WrongSlices(
            f"over slices, programs compute {result.worst_of_slices} with a relative error of {result.slices:.1e} "
            "against the module itself. This is an error of twobp: please report it"
        )
    return result


def left(captured: Captured) -> str:
    """Says what the calls of the comparison have changed in the module, or ''."""
    names = captured.before.changed() if captured.before else []
    return (
        f"Its forward pass changes {some(names)}, and may compute something else at its next call. Programs do "
        "not: give the module such a value as a field of the batch"
        if names
        else ""
    )


def dry_run_of_slices(
    captured: Captured,
    chain: interpret.Chain,
    fields: dict[str, torch.Tensor],
    weight: float,
    masks: dict,
    expected: tuple,
    scale: float,
):
    """Returns the largest relative error of the programs over three slices, and its place."""
    positions = chain.shape.get("positions", 0)
    if not positions:
        return 0.0, ""
    with torch.no_grad():
        loss, gradients = chain.over_slices(fields, weight, masks, [positions // 2, 1, positions - positions // 2 - 1])
    of_loss = relative(loss * scale, expected[0], change_of_loss(captured, expected[1]))
    error, name = worst_of(gradients, expected[1], scale)
    return (of_loss, "the loss") if not of_loss <= error else (error, f"the gradient of '{name}'")


def change_of_loss(captured: Captured, gradients: dict[str, torch.Tensor]) -> float:
    """Returns by how much the loss changes if a parameter changes by 1e-4 of itself. A loss that is a difference,
    as the sum of advantages in GRPO, may be far smaller, and is then all rounding. Times the tolerance, this is
    what a few roundings of the parameter change."""
    changes = [1e-4 * (one.norm() * captured.parameters[name].norm()).item() for name, one in gradients.items()]
    return max((one for one in changes if math.isfinite(one)), default=0.0)


def worst_of(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], scale: float) -> tuple[float, str]:
    """Returns the largest relative error of a gradient times `scale`, and its name. A module's own gradient that is not
    finite tells nothing."""
    largest = max((g.norm().item() for g in wanted.values()), default=0.0)
    errors = [
        (relative((gradients[name] if name in gradients else torch.zeros_like(one)) * scale, one, largest * 1e-3), name)
        for name, one in wanted.items()
        if torch.isfinite(one).all()
    ]
    return max(errors, key=lambda one: (one[0] != one[0], one[0]), default=(0.0, ""))  # NaN is the largest


def relative(value: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Returns |value - expected| / |expected|, in norms. The denominator is at least `floor`."""
    value, expected = value.double(), expected.double()
    return ((value - expected).norm() / max(expected.norm().item(), floor, 1e-30)).item()


def difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the same of predictions, of which some may be infinite, as logits that a mask excludes."""
    size = expected[expected.isfinite()].double().norm().item()
    here = value != expected
    return relative(torch.where(here, value, 0), torch.where(here, expected, 0), size)
