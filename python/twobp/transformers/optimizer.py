"""Turns the PyTorch optimizer that transformers makes into an update rule of the pipeline. The optimizer takes no step
itself. It has the learning rate of the schedule and, in checkpoints, the state."""

from __future__ import annotations

import math

import torch

import twobp
from twobp import Error

KINDS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
UNKNOWN = ("amsgrad", "maximize", "nesterov", "dampening")
STATE = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}  # names here and in PyTorch


def update_rule(optimizer, model: torch.nn.Module) -> twobp.AdamW | twobp.Adam | twobp.SGD:
    """Returns the update rule. Raises Error for settings that the pipeline does not support."""
    inner = _inner(optimizer)
    if isinstance(inner, torch.optim.Muon):
        raise Error(
            "the optimizer is torch.optim.Muon, which takes only matrices: use twobp.Trainer with "
            "optimizer=twobp.Muon(), which gives the other parameters to AdamW"
        )
    if type(inner) not in KINDS:
        raise Error(
            f"TrainingArguments.optim gives the optimizer {type(inner).__name__}, which the pipeline does not have: "
            "use adamw_torch or sgd"
        )
    for group in inner.param_groups:
        for name in UNKNOWN:
            if group.get(name):
                raise Error(
                    f"the optimizer has {name}={group[name]}, which the pipeline does not have: leave it out of "
                    "optim_args"
                )
    decays = {id(parameter): group["weight_decay"] for group in inner.param_groups for parameter in group["params"]}
    weight_decay = max(decays.values())
    scales = {
        id(parameter): scale
        for group, scale in zip(inner.param_groups, lr_scales(inner))
        for parameter in group["params"]
    }
    groups: dict[str, dict[str, float]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in decays:
            raise Error(f"the optimizer does not have the parameter {name}: freeze it by requires_grad_(False)")
        if decays[id(parameter)] != (weight_decay if parameter.dim() > 1 else 0):
            groups.setdefault(name, {})["weight_decay"] = decays[id(parameter)]
        if scales[id(parameter)] != 1:
            groups.setdefault(name, {})["lr_scale"] = scales[id(parameter)]
    common = {"weight_decay": weight_decay, "groups": groups}
    if isinstance(inner, torch.optim.SGD):
        return twobp.SGD(momentum=of_all(inner, "momentum"), **common)
    beta1, beta2 = of_all(inner, "betas")
    kind = twobp.AdamW if of_all(inner, "decoupled_weight_decay") else twobp.Adam
    return kind(beta1=beta1, beta2=beta2, eps=of_all(inner, "eps"), **common)


def fixed_settings(optimizer) -> list[dict]:
    """Returns the settings of each group that the update rule has. Only the learning rates may change during
    training."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        for group in _inner(optimizer).param_groups
    ]


def lr_scales(optimizer) -> list[float]:
    """Returns the learning rate of each group, before a schedule changes it, relative to the highest."""
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return [rate / max(rates) if max(rates) > 0 else 1.0 for rate in rates]


def highest_lr(optimizer) -> float:
    """Returns the learning rate of the step. Each group has its share of it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for rate, scale in zip(rates, lr_scales(optimizer)):
        if not math.isclose(rate, scale * max(rates), rel_tol=1e-9):
            raise Error(
                f"the optimizer's groups have the learning rates {rates}, which are no longer in their initial "
                "proportion. The pipeline has one schedule for all groups: scale all learning rates by the same factor"
            )
    return max(rates)


def of_all(optimizer, name: str):
    """Returns the value that all groups of parameters share."""
    values = [group[name] for group in optimizer.param_groups]
    if any(value != values[0] for value in values):
        raise Error(
            f"the optimizer's groups have different {name}: {values}. The pipeline has one value for all parameters: "
            "give all groups the same"
        )
    return values[0]


def fetch_state(optimizer, model: torch.nn.Module, pipeline: twobp.Trainer) -> None:
    """Gives `optimizer` copies of the pipeline's state."""
    state = pipeline.optimizer_state()
    steps = torch.tensor(float(pipeline.steps_done))
    for name, parameter in model.named_parameters():
        if name in state:
            optimizer.state[parameter] = {
                "step": steps.clone(),
                **{STATE[what]: tensor for what, tensor in state[name].items()},
            }


def load_state(optimizer, model: torch.nn.Module, pipeline: twobp.Trainer, steps: int) -> None:
    """Gives a new pipeline the state that `optimizer` has from a checkpoint. `steps` is that of the run, because
    PyTorch's SGD does not count steps."""
    known = optimizer.state
    if not known and not isinstance(_inner(optimizer), torch.optim.SGD):
        return
    state = pipeline.optimizer_state()  # zeros for parameters that had no gradient so far
    for name, parameter in model.named_parameters():
        for what in state.get(name, {}):
            state[name][what] = known.get(parameter, {}).get(STATE[what], state[name][what])
    counts = [int(of["step"]) for of in known.values() if "step" in of]
    pipeline.load_optimizer_state(state, max(counts, default=steps))
    known.clear()


def _inner(optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
