"""TRL computes the logits of its losses in tiles, and again for their gradients, to save memory. In a program, each
step of each tile would keep its results for I. While a loss is traced, the same numbers come from one softmax."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

from .flow import replaced

T = torch.Tensor


class Whole:
    """Takes the place of a torch.autograd.Function of TRL."""

    @staticmethod
    def apply(
        hidden: T,
        weight: T,
        bias: T | None,
        targets: T,
        temperature: float,
        tile: int,
        cap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[T | None, ...]:
        """Returns the log-probabilities of the targets, and those of `outputs` that are asked for."""
        logits = F.linear(hidden, weight, bias).float() * scale
        logits = (logits if cap is None else torch.tanh(logits / cap) * cap) / temperature
        logs = F.log_softmax(logits, -1)
        others = {
            "entropy": lambda: -(logs.exp() * logs).sum(-1),
            "log_sum_sq_probs": lambda: torch.logsumexp(2 * logs.detach(), -1),
            "mean_logits": lambda: logits.detach().mean(-1),
            "is_top1": lambda: logits.argmax(-1) == targets,
        }
        found = [others[name]() if name in outputs else None for name in others]
        return logs.gather(-1, targets[:, None]).squeeze(-1), *found


def whole_heads():
    return replaced(sys.modules.get("trl.trainer.utils"), "_ChunkedLogProbFunction", lambda _: Whole)
