"""Trains in a pipeline with 2-stage backpropagation: schedules, plans and a trainer. Importing the package changes
nothing in the process."""

import torch  # noqa: F401 (loads the libraries to which _native is linked)

from twobp import torch_versions  # noqa: F401 (refuses another torch than that of _native)
from twobp._native import Error
from twobp.optimizers import SGD, Adam, AdamW, Muon
from twobp.planner import Plan, PlanRow, plan
from twobp.processes import init_process_group
from twobp.schedules import Instruction, Schedule, Simulation, schedule, schedules
from twobp.trainer import Evaluation, StepResult, Trainer

__all__ = [
    "Adam",
    "AdamW",
    "Error",
    "Evaluation",
    "Instruction",
    "Muon",
    "Plan",
    "PlanRow",
    "SGD",
    "Schedule",
    "Simulation",
    "StepResult",
    "Trainer",
    "init_process_group",
    "plan",
    "schedule",
    "schedules",
]
__version__ = "0.2.0"
