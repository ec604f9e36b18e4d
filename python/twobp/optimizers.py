"""These are the update rules. Their settings are the keys of the section `optimizer` of the configuration."""

import dataclasses
from collections.abc import Mapping

from twobp import checks

Groups = Mapping[str, Mapping[str, float | str]]  # settings for the parameters whose names match a pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Optimizer:
    """Matrices and convolution kernels decay. Biases and norm gains do not, where torch.optim decays every parameter:
    groups={"*": {"weight_decay": 0.01}} does so, too. `groups` has other values for the parameters whose names match a
    pattern (* and ?): {"*.bias": {"weight_decay": 0.1, "lr_scale": 0.5}}. `lr_scale` multiplies the learning rate.
    Later patterns override earlier ones.

    `schedule` is "constant", "linear", "cosine", "wsd" or "inverse_sqrt", after `warmup` steps. "linear" and "cosine"
    fall to `min_lr` at the trainer's `steps`. "wsd" falls to `min_lr` in the last `decay` steps (0: a tenth of all).

    `average`, such as 0.999, is the decay of a running mean of the weights. Trainer.evaluate and Trainer.save use it
    instead of the weights."""

    lr: float
    weight_decay: float
    schedule: str = "constant"
    warmup: int = 0
    decay: int = 0
    min_lr: float = 0.0
    average: float = 0.0
    groups: Groups = dataclasses.field(default_factory=dict)

    def settings(self) -> dict:
        """Returns the section `optimizer`."""
        groups = []
        for pattern, group in checks.mapping(self.groups, "groups").items():
            values = [f"{key}={value}" for key, value in checks.mapping(group, f"groups[{pattern!r}]").items()]
            groups.append(" ".join([checks.text(pattern, "a pattern of groups"), *values]))
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"type": type(self).__name__.lower(), **own, "groups": groups}


@dataclasses.dataclass(frozen=True)
class AdamW(_Optimizer):
    """AdamW, whose weight decay is decoupled. Unlike torch.optim.AdamW, it does not decay biases and norm gains: see
    `groups`."""

    lr: float = 3e-4
    _: dataclasses.KW_ONLY
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True)
class Adam(AdamW):
    """Adam, whose weight decay is added to the gradient (L2)."""

    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the matrices of hidden layers, and AdamW for the rest: embeddings, the model's last matrix, and
    everything that is not a matrix. Both share the learning rate, as in torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw". In `groups`, "rule" is "adamw" or "muon"."""

    weight_decay: float = 0.1
    muon_momentum: float = 0.95


@dataclasses.dataclass(frozen=True)
class SGD(_Optimizer):
    """Stochastic gradient descent. Weight decay is added to the gradient (L2)."""

    lr: float = 1e-2
    _: dataclasses.KW_ONLY
    momentum: float = 0.0
    weight_decay: float = 0.0
