"""Several losses whose sum is trained, and metrics. Their numbers are rows of a buffer, one for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..export.forward import checked_loss, loss_of

ROWS = "loss_fn.rows"  # the name of the buffer in a captured module
MOST_MICRO_BATCHES = 256


class Reported(nn.Module):
    """A loss_fn: the sum of `losses`, or the module's own loss if there are none. `rows` has the numbers of the last
    micro-batches, in order."""

    rows: torch.Tensor

    def __init__(self, losses: Mapping[str, Callable], metrics: Mapping[str, Callable], micro_batches: int):
        super().__init__()
        self.losses, self.metrics = dict(losses), dict(metrics)
        self.names = [*(losses or ["loss"]), *metrics]
        self.register_buffer("rows", torch.zeros(micro_batches, len(self.names), dtype=torch.float64))

    def forward(self, output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        losses = [checked_loss(one(output, batch)) for one in self.losses.values()] or [loss_of(output)]
        with torch.no_grad():
            numbers = [self._number(name, one(output, batch)) for name, one in self.metrics.items()]
            row = torch.stack([*(one.detach().double() for one in losses), *numbers])
            self.rows.copy_(torch.cat([self.rows[1:], row[None]]))
        return sum(losses[1:], losses[0])

    def _number(self, name: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.dim() > 0:
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise CaptureError(f"the metric '{name}' is {found}, but must be a scalar tensor, such as x.mean()")
        return value.double()


def reported(loss_fn: Any, metrics: Any, micro_batches: Any) -> Any:
    """Returns the loss_fn of a trainer that is given these. Raises CaptureError."""
    if metrics is None and not isinstance(loss_fn, Mapping):
        return loss_fn
    losses = loss_fn if isinstance(loss_fn, Mapping) else {} if loss_fn is None else {"loss": loss_fn}
    metrics = {} if metrics is None else metrics
    for what, functions in (("loss_fn", losses), ("metrics", metrics)):
        if not isinstance(functions, Mapping) or not all(callable(one) for one in functions.values()):
            raise CaptureError(f"{what} must be a dict of functions of (output, batch), each with a name")
    if isinstance(loss_fn, Mapping) and not losses:
        raise CaptureError("loss_fn is an empty dict: give at least one loss")
    if both := losses.keys() & metrics.keys():
        raise CaptureError(f"'{min(both)}' is both a loss and a metric: give it another name")
    count = micro_batches if isinstance(micro_batches, int) and micro_batches > 0 else MOST_MICRO_BATCHES
    return Reported(losses, metrics, count)
