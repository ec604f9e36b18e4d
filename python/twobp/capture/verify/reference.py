"""Runs the module itself under autograd, with the random numbers of its programs, to compare the programs with it. The
module is not changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import DYNAMIC, CaptureError, current_line
from ..export.draws import Draw
from ..own_operators import dropout_scale


class Compared(Protocol):
    """What the comparison reads of a captured module."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    draws: list[Draw]

    @property
    def whole(self) -> nn.Module: ...

    @property
    def only_trains(self) -> bool: ...


class Replay(TorchDispatchMode):
    """Gives the module the random numbers of the programs, call by call. `read` says for each call of the module
    whether the loss depends on it: the programs have no others."""

    supports_higher_order_operators = True

    def __init__(self, drawn: list, read: list[bool]):
        super().__init__()
        self.drawn, self.read = iter(drawn), iter(read)
        self.lines: list[str] = []  # where the module drew
        self.dtypes: set[torch.dtype] = set()  # in which it computed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            not isinstance(function, torch._ops.OpOverload)
            or torch.Tag.nondeterministic_seeded not in function.tags
            or "scaled_dot_product" in function._schema.name
        ):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.dtypes.add(result.dtype)
            return result
        if not next(self.read, True):
            return function(*args, **(kwargs or {}))
        self.lines.append(current_line())
        name, results = next(self.drawn, ("nothing", ()))
        base = function._schema.name.split("::")[1]
        if name == "twobp::dropout" and base == "native_dropout":
            return args[0] * results[1] * dropout_scale(args[1]), results[1]
        drawn = results[1] if name == "twobp::dropout" else results[0] if results else None
        if name == "nothing":
            raise CaptureError(
                f"in evaluation mode the module drops or draws numbers by {base}{current_line()}, but its captured "
                "form does not. Make it depend on "
                "self.training: F.dropout(x, p, self.training), or dropout_p=p if self.training else 0.0"
            )
        if drawn is None or isinstance(args[0], torch.Tensor) and drawn.shape != args[0].shape:
            raise CaptureError(
                f"the module draws random numbers by {base}{current_line()}, but its captured form draws by {name} "
                "there. Draw by torch.rand, torch.bernoulli or dropout"
            )
        if base == "uniform_":
            drawn = drawn * (args[2] - args[1]) + args[1]
        return args[0].copy_(drawn) if base.endswith("_") else drawn.clone()


class KeepParameters(TorchDispatchMode):
    """Refuses an operator before it changes a parameter."""

    supports_higher_order_operators = True

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): name for name, p in parameters.items()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable:
            for argument, value in zip(function._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    name = self.names.get(value.untyped_storage().data_ptr())
                    if name is not None:
                        raise CaptureError(
                            f"in evaluation mode the module's forward changes its parameter '{name}' by "
                            f"{function}{current_line()}. A trainer has the weights of training, so switch that off "
                            "in the module (for RWKV of transformers: config.rescale_every = 0)"
                        )
        return function(*args, **(kwargs or {}))


def reference(captured: Compared, fields: dict[str, torch.Tensor], drawn: list, evaluation_drawn: list):
    """Returns loss, gradients and new buffers of the module itself in training mode, its loss in evaluation mode, the
    dtypes in which it computed in training mode, and what it predicts there. The module is not changed."""
    whole = captured.whole
    state = {name: b.detach().clone() for name, b in whole.named_buffers()}
    bound = [(path, part, key, tensor) for path, part in whole.named_modules() for key, tensor in part._buffers.items()]
    modes = {part: part.training for part in whole.modules()}
    trained = {name: p for name, p in captured.parameters.items() if p.requires_grad}
    with torch.random.fork_rng(devices=[]):
        try:
            training = Replay(drawn, [draw.read for draw in captured.draws])
            evaluation = Replay(evaluation_drawn, [draw.read for draw in captured.draws if not draw.drops])
            with torch.enable_grad(), training:
                output = whole(dict(fields))
            loss, *predictions = output if isinstance(output, tuple) else (output,)
            predictions = [one.detach() for one in predictions]
            for path, part, key, tensor in bound:
                if part._buffers.get(key) is not tensor:
                    advice = (
                        DYNAMIC
                        if "dynamic" in str(getattr(part, "rope_type", ""))
                        else f"Write into it: self.{key}.copy_(...)"
                    )
                    raise CaptureError(
                        "the module's forward pass assigns another tensor to its buffer "
                        f"'{f'{path}.{key}'.removeprefix('module.')}', which programs do not see. {advice}"
                    )
            found = zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True))
            gradients = {name: one for name, one in found if one is not None}
            changed = {name: captured.buffers[name].detach().clone() for name in captured.buffers}
            if captured.only_trains:
                return loss.detach(), gradients, changed, None, training.dtypes, predictions
            restore(whole, state)
            whole.eval()
            with torch.no_grad(), KeepParameters(captured.parameters), evaluation:
                evaluated = whole(dict(fields))
            if rest := list(evaluation.drawn):
                lines = [line for (name, _), line in zip(drawn, training.lines) if name != "twobp::dropout"]
                raise CaptureError(
                    f"the module draws random numbers in training mode only{lines[-len(rest)]}, which captured "
                    "programs do for dropout only. Write "
                    "stochastic depth as dropout of a factor: x * F.dropout(x.new_ones(len(x), 1, 1), p, self.training)"
                )
        finally:
            for _, part, key, tensor in bound:
                part._buffers[key] = tensor
            restore(whole, state)
            for part, mode in modes.items():
                part.training = mode
    return loss.detach(), gradients, changed, evaluated, training.dtypes, predictions


def restore(whole: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in whole.named_buffers():
            if name in state and not torch.equal(buffer, state[name]):  # others are made by the forward pass
                buffer.copy_(state[name])
