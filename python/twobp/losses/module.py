"""compute_loss of a trainer as a module that capture takes. Numbers for Python are rows of a buffer."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .numbers import MOST_WHOLE
from .script import COURSE, NUMBER, ROW, SCALE, Plan, Script, items_of

TRAIN, EVALUATE, PREDICT = "train", "evaluate", "predict"
# By mode. Outside the module, so that neither a capture's guards nor its cache follow the trainer.
SCRIPTS: weakref.WeakKeyDictionary[nn.Module, dict[str, Script]] = weakref.WeakKeyDictionary()
TAKEN = "taken"


class LossModule(nn.Module):
    """forward(**fields) is the loss of a micro-batch. Its children are the modules that compute_loss calls. `taken` has
    a row for each micro-batch of a step: its loss, the numbers that Python takes, and then whether each guard holds.
    In another mode than TRAIN, compute_loss is that of an evaluation, whose course is not that of training. With
    PREDICT, forward returns a tuple of the loss and the tensors that compute_loss returns beside it."""

    taken: torch.Tensor

    def __init__(self, scripts: dict[str, Script], plan: Plan, micro_batches: int):
        super().__init__()
        SCRIPTS[self] = scripts
        for name, module in scripts[TRAIN].modules.items():
            self.add_module(name, module)
        self.use(TRAIN)
        self.not_compared, self.only_trains = {TAKEN}, True  # evaluations have programs of their own
        self.not_sized = {COURSE}
        width = max(ROW, 4 * (plan.guards_begin + len(plan.guarded)))
        self.register_buffer(TAKEN, torch.zeros(micro_batches, width, dtype=torch.float64), persistent=False)

    def use(self, mode: str) -> None:
        self.mode, self.signatures = mode, SCRIPTS[self][mode].signatures

    @property
    def evaluates(self) -> bool:
        return self.mode != TRAIN

    @property
    def predicts(self) -> bool:
        return self.mode == PREDICT

    @property
    def python_course(self) -> Script | None:
        """The script of a loss whose Python may take another course for other sizes."""
        script = SCRIPTS[self][self.mode]
        return script if script.own else None

    def forward(self, **fields: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        script, scale = SCRIPTS[self][self.mode], fields[SCALE]
        values: list[torch.Tensor] = []
        holds: list[torch.Tensor] = []
        if script.own and torch.compiler.is_exporting():
            loss, predictions, values, guards, plan = script.traced(fields)
            holds = [guards[key].reshape(()) for key in plan.guarded]
        else:
            plan = script.plan_of(fields)
            items = items_of(fields, plan.items)
            if script.own:
                loss, predictions, _ = script.eager(fields, plan, items)
            else:
                inputs = script.inputs(fields, plan.others, plan.tree)
                loss, predictions, _ = script.compute(script.trainer, inputs, items)
        if not torch.compiler.is_exporting():
            return self._returned(loss * scale.to(loss.dtype), predictions)
        parts = [one.detach().reshape(-1).to(torch.float64) for one in (loss, *values, *holds)]
        whole = [one.detach().reshape(-1).to(torch.float64) for one in values if not one.is_floating_point()]
        if whole:
            holds.append((torch.cat(whole).abs() < MOST_WHOLE).all())
        if holds:
            # With its gradients, too, the step fails before a weight changes.
            loss = loss * torch.where(torch.stack(holds).all(), 1.0, torch.nan)
        row = torch.cat(
            [*parts, torch.zeros(self.taken.shape[1] - sum(one.numel() for one in parts), dtype=torch.float64)]
        )
        here = torch.arange(self.taken.shape[0], dtype=torch.float64) == fields[NUMBER]
        self.taken.copy_(torch.where(here[:, None], row, self.taken))
        return self._returned(loss * scale.to(loss.dtype), predictions)

    def _returned(self, loss: torch.Tensor, predictions: list[torch.Tensor]):
        return (loss, *predictions) if self.predicts else loss
