"""The update rules. Their settings are the keys of the section `optimizer` of the configuration."""
import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    def settings(self) -> dict:
        """The section `optimizer`."""
        rules = [f"{pattern}={decay!r}" for pattern, decay in self.weight_decay_of.items()]
        return {"type": type(self).__name__.lower(), **dataclasses.asdict(self), "weight_decay_of": rules}


@dataclasses.dataclass(frozen=True)
class AdamW(_Optimizer):
    """AdamW, whose weight decay is decoupled. Matrices decay; biases and norm gains do not. `weight_decay_of` has other values for the
    parameters whose names match a pattern (* and ?): {"*.bias": 0.1}. Later patterns override earlier ones.

    `schedule` is "constant", "linear" or "cosine", after `warmup` steps. The last two fall to `min_lr` at the trainer's `steps`."""
    lr: float = 3e-4
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str = "constant"
    warmup: int = 0
    min_lr: float = 0.0
    weight_decay_of: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Adam(AdamW):
    """Adam, whose weight decay is added to the gradient (L2)."""
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class SGD(_Optimizer):
    """Stochastic gradient descent. Weight decay is added to the gradient (L2)."""
    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    min_lr: float = 0.0
    weight_decay_of: Mapping[str, float] = dataclasses.field(default_factory=dict)
