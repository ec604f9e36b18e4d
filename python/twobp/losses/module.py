"""compute_loss of a trainer as a module that capture takes. Numbers for Python are rows of a buffer."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .script import COURSE, NUMBER, ROW, SCALE, Plan, Script, items_of

# Outside the module, so that neither a capture's guards nor its cache follow the trainer.
SCRIPTS: weakref.WeakKeyDictionary[nn.Module, Script] = weakref.WeakKeyDictionary()
TAKEN = "taken"


class LossModule(nn.Module):
    """forward(**fields) is the loss of a micro-batch. Its children are the modules that compute_loss calls. `taken` has
    a row for each micro-batch of a step: the numbers that Python takes, and then whether each guard holds."""

    taken: torch.Tensor

    def __init__(self, script: Script, plan: Plan, micro_batches: int):
        super().__init__()
        SCRIPTS[self] = script
        for name, module in script.modules.items():
            self.add_module(name, module)
        self.signatures = script.signatures
        self.not_compared, self.only_trains = {TAKEN}, True  # the trainer itself evaluates
        self.not_sized = {COURSE}
        if script.own:
            width = max(ROW, 4 * (sum(one.size for one in plan.in_row) + len(plan.guarded)))
            self.register_buffer(TAKEN, torch.zeros(micro_batches, width, dtype=torch.float64), persistent=False)

    @property
    def python_course(self) -> Script | None:
        """The script of a loss whose Python may take another course for other sizes."""
        return SCRIPTS[self] if SCRIPTS[self].own else None

    def forward(self, **fields: torch.Tensor) -> torch.Tensor:
        script, scale = SCRIPTS[self], fields[SCALE]
        if not script.own:
            plan = script.plan_of(fields)
            loss = script.compute(
                script.trainer, script.inputs(fields, plan.others, plan.tree), items_of(fields, plan.items)
            )
            return loss * scale.to(loss.dtype)
        if not torch.compiler.is_exporting():
            plan = script.plan_of(fields)
            loss = script.eager(fields, plan, items_of(fields, plan.items))
            return loss * scale.to(loss.dtype)
        loss, values, guards, plan = script.traced(fields)
        holds = [guards[key].reshape(()) for key in plan.guarded]
        if holds:
            loss = torch.where(torch.stack(holds).all(), loss, torch.nan)  # the step fails, and no weight changes
        parts = [one.detach().reshape(-1).to(torch.float64) for one in (*values, *holds)]
        row = torch.cat(
            [*parts, torch.zeros(self.taken.shape[1] - sum(one.numel() for one in parts), dtype=torch.float64)]
        )
        here = torch.arange(self.taken.shape[0], dtype=torch.float64) == fields[NUMBER]
        self.taken.copy_(torch.where(here[:, None], row, self.taken))
        return loss * scale.to(loss.dtype)
