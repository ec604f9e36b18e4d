"""Compares the programs in use with the module under autograd, with the weights of a trainer, and finds the first layer
that differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from .. import interpret, ops
from ..captured import Captured
from ..cut import Layer, cut
from ..errors import CaptureError
from ..export.forward import export
from ..loss.targets import weigh_loss
from ..own_operators import dropout_scale
from ..passes.fold import fold
from .dry_run import relative


@contextlib.contextmanager
def with_weights(captured: Captured, weights: Mapping[str, torch.Tensor]):
    """Within this context, the module has these parameters and buffers in place of its own."""
    before = captured.parameters, captured.buffers
    new: dict[int, torch.Tensor] = {
        id(one): nn.Parameter(weights[name].to(one.dtype), one.requires_grad)
        for name, one in captured.parameters.items()
        if name in weights
    }
    new.update({id(one): weights[name].to(one.dtype).clone() for name, one in captured.buffers.items()})
    tables: list[tuple[dict, str, Any]] = [
        (table, key, one)
        for part in captured.whole.modules()
        for table in (part._parameters, part._buffers)
        for key, one in table.items()
        if id(one) in new
    ]
    try:
        for table, key, one in tables:
            table[key] = new[id(one)]
        captured.parameters, captured.buffers = (
            {name: new.get(id(one), one) for name, one in of.items()} for of in before
        )
        yield
    finally:
        for table, key, one in tables:
            table[key] = one
        captured.parameters, captured.buffers = before


class Replayed(fx.Interpreter):
    """Runs a layer with the random numbers that its program drew."""

    def __init__(self, layer: Layer, drawn: list):
        super().__init__(layer.graph_module)
        self.drawn = drawn

    def call_function(self, target, args, kwargs):
        if (
            not isinstance(target, torch._ops.OpOverload)
            or torch.Tag.nondeterministic_seeded not in target.tags
            or not self.drawn
        ):
            return super().call_function(target, args, kwargs)
        name, results = self.drawn.pop(0)
        if target is ops.dropout:
            return args[0] * results[1] * dropout_scale(args[1]), results[1]
        return results[0].clone()


def first_difference(
    captured: Captured, chain: interpret.Chain, fields: dict[str, torch.Tensor], weight: float, limit: float
) -> str:
    """Returns the first layer whose values, or else the last whose gradients, are not those of the module's own
    operators, as "layer 'x': ..."."""
    with captured.before:
        forward = export(captured.whole, fields, captured.buffers)
    fold(forward)
    weigh_loss(forward, fields, captured.loss_reduction)
    layers = cut(forward, {name for name, p in captured.parameters.items() if not p.requires_grad})
    names = [layer["name"] for layer in captured.graph["layers"]]
    if [layer.name for layer in layers] != names:
        return "the module has other layers now"
    random = interpret.Random(7)
    with torch.no_grad():
        slots = chain.forward(fields, weight, random)[1]
        gradients = chain.backward(slots, random)
    parameters = {name: one.detach().requires_grad_(one.requires_grad) for name, one in captured.parameters.items()}
    values: list[torch.Tensor] = []
    drawn = list(random.drawn)
    for number, layer in enumerate(layers):
        arriving = iter(values)
        sources: dict[str, Callable] = {
            "field": fields.get,
            "parameter": parameters.get,
            "buffer": captured.buffers.get,
            "loss_weight": lambda _: torch.tensor(weight, dtype=torch.float32),
        }
        inputs = [
            next(arriving)
            if one.source == "value"
            else forward.tensors[one]
            if one.source == "constant"
            else sources[one.source](one.name)
            for one in layer.inputs
        ]
        with torch.enable_grad():
            outputs = Replayed(layer, drawn).run(*inputs)
        values = [one for one, (kind, _) in zip(outputs, layer.outputs) if kind != "buffer"]
        for own, wanted in zip((slots[number][one["slot"]] for one in chain.program(number)["outputs"]), values):
            if own.is_floating_point() and not relative(own, wanted.detach()) <= limit:
                error = relative(own, wanted.detach())
                return f"layer '{names[number]}' computes other values (relative error {error:.1e})"
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    expected = dict(zip(trained, torch.autograd.grad(values[0], list(trained.values()), allow_unused=True)))
    largest = max((one.norm().item() for one in expected.values() if one is not None), default=0.0)
    for layer in reversed(captured.graph["layers"]):
        for name in (one for names in layer["parameters"] for one in interpret.as_list(names)):
            one = expected.get(name)
            if (
                one is not None
                and not (error := relative(gradients.get(name, torch.zeros_like(one)), one, largest * 1e-3)) <= limit
            ):
                return f"layer '{layer['name']}' computes another gradient of '{name}' (relative error {error:.1e})"
    return "no layer differs from the module's operators, but the whole does"


def compare(
    captured: Captured,
    fields: dict[str, torch.Tensor],
    beside: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> tuple[float, int, bool]:
    """Compares the programs for a micro-batch. Returns their loss, the number of its targets, and whether they drew
    random numbers. Raises CaptureError that names the first layer that differs."""
    number = captured.shape_number(fields)
    with (
        with_weights(captured, weights),
        captured._in_modes(captured.variant),
        captured.leaving_as_before(captured.variant.walk),
    ):
        chain = captured._chain(number)
        count = chain.count(fields)
        if count == 0:
            return 0.0, 0, False
        weight = torch.tensor(1 / count, dtype=torch.float32).item()
        random = interpret.Random(7)
        with torch.no_grad():
            loss = chain.forward(fields, weight, random)[0].item()
        try:
            captured._dry_run(fields, beside, number)
        except CaptureError as error:
            where = first_difference(captured, chain, fields, weight, captured.limit())
            raise CaptureError(f"{where}. {error}") from error
    return loss / (weight * count), count, bool(random.drawn)
