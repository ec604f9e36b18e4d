"""Trainers of TRL that train in a pipeline: `from twobp.trl import DPOTrainer`, and then the arguments of TRL's, with
those of twobp.transformers.Trainer beside them. It is tested with TRL 1.16."""

from __future__ import annotations

import importlib
from typing import Any

from twobp.transformers import pipelined

MODULES = {
    **dict.fromkeys(["SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"], "trl"),
    "ORPOTrainer": "trl.experimental.orpo",
    "CPOTrainer": "trl.experimental.cpo",
}
__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"twobp.trl has no {name}: it has {', '.join(MODULES)}. For another one, call pipelined")
    kind: Any = getattr(importlib.import_module(MODULES[name]), name)
    return pipelined(kind)
