"""Numbers of targets of a micro-batch. Programs over its fields compute them, and check what capture took from the
example."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx

from .. import interpret, ops, symbols
from ..emit import Emitter
from ..errors import CaptureError, where
from ..export.forward import MOST_TEXT, Check, Forward
from ..own_operators import aten
from .losses import NLL

# The same for each batch of a shape, or of a tensor's elements that are not the int (None: their sum).
Count = int | torch.SymInt | tuple[fx.Node, int | None]
ADVICE = 'Say how it is reduced: loss_reduction="mean" (over the samples of a micro-batch) or "sum" (over its samples)'
FOLDER = re.compile(r"/\S*/(?=[^/\s]+:\d+)")  # of a line of code: a bundle does not have it
SAME_IDS = {
    *ops.VIEWS - {operator.getitem},
    aten.clone.default,
    aten.pad.default,
    aten.constant_pad_nd.default,
    aten.contiguous.default,
    aten._to_copy.default,
}
SAME_ELEMENTS = {
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.contiguous.default,
}


@dataclasses.dataclass
class Equal:
    """A check that two numbers of targets are equal."""

    one: Count
    other: Count
    says: str


@dataclasses.dataclass
class InRange:
    """A check that ids are from 0 to `size` - 1, or `ignore`."""

    ids: fx.Node
    size: int
    ignore: int | None
    says: str


class Counts:
    """Decides whether means are over the same numbers of targets, in the example and in every micro-batch that passes
    `checks`. `ratios` are those of numbers that are the same for each micro-batch of a shape. Other shapes must have
    the same ratios."""

    def __init__(self, forward: Forward, fields: Mapping[str, torch.Tensor]):
        self.forward, self.fields = forward, fields
        self.checks: list[Equal] = []
        self.ratios: list[str] = []

    def combined(self, counts: list[Count], node: fx.Node) -> tuple[Count, list[float]] | None:
        """Returns the number of targets of a sum of means over `counts`, and the factor of the sum behind each. Returns
        None if they have none."""
        self.ratios += ["1"] * (len(counts) - 1)
        if len({self._key(count) for count in counts}) == 1:
            return counts[0], [1.0] * len(counts)
        values = [self._value(count) for count in counts]
        if len(set(values)) == 1 and all(isinstance(count, tuple) for count in counts):
            self.checks += [
                Equal(
                    counts[0],
                    count,
                    f"the loss adds means over the same number of targets{where(node)}, which are not the same in this "
                    "micro-batch",
                )
                for count in counts[1:]
            ]
            return counts[0], [1.0] * len(counts)
        whole = [count[0].meta["val"].numel() if isinstance(count, tuple) else count for count in counts]
        if values != symbols.hint(whole) or None in (ratios := [ratio(whole[0], number) for number in whole]):
            return None
        self.checks += [
            Equal(
                count,
                number,
                f"the loss adds means over all targets{where(node)}, but some targets of this micro-batch do not count",
            )
            for count, number in zip(counts, whole)
            if isinstance(count, tuple)
        ]
        self.ratios[len(self.ratios) - len(counts) + 1 :] = map(str, ratios[1:])
        return whole[0], [float(one) for one in ratios if one is not None]

    def _key(self, count: Count):
        if not isinstance(count, tuple):
            return str(symbols.plain(count))
        node, ignore = count
        while node.target in SAME_ELEMENTS:
            node = node.args[0]
        return _structure(node, {}), ignore

    def _value(self, count: Count) -> int:
        if not isinstance(count, tuple):
            return symbols.hint(count)
        return interpret.count(program(self.forward, count, []), self.fields)


def ratio(one: int | torch.SymInt, other: int | torch.SymInt) -> Fraction | None:
    """Returns one / other, or None if it differs between batches."""
    if not symbols.sized((one, other)):
        return Fraction(int(one), int(other))
    a, b = (symbols.expr_of(n) if symbols.is_size(n) else sympy.Integer(n) for n in (one, other))
    found = sympy.simplify(a / b)
    return Fraction(int(found.p), int(found.q)) if found.is_Rational else None


def _structure(node: fx.Node, known: dict) -> tuple | fx.Node:
    """Returns equal values for nodes that compute the same from the same inputs."""
    if node.op != "call_function" or ops.is_random(node):
        return node
    if node not in known:
        known[node] = (
            node.target,
            str(
                fx.node.map_arg(
                    (node.args, node.kwargs),
                    lambda one: known.setdefault(("number", _structure(one, known)), len(known)),
                )
            ),
        )
    return known[node]


def ids_in_range(forward: Forward) -> list[InRange]:
    """Returns a check for each use of a field as ids: of rows of a table, or of classes. Ids that are computed are not
    checked before the step."""
    found: dict[tuple, InRange] = {}
    for node in forward.graph.nodes:
        if node.target is aten.embedding.default:
            ids, size, ignore = node.args[1], node.args[0].meta["val"].shape[0], None
        elif node.target in NLL and not node.args[1].meta["val"].is_floating_point():
            ids, ignore = node.args[1], ops.named_argument(node, NLL[node.target][1])
            size = node.args[0].meta["val"].shape[-1 if node.args[0].meta["val"].dim() == 1 else 1]
        else:
            continue
        if symbols.is_size(size := symbols.plain(size)):
            continue  # classes that the batch decides
        field = ids
        while field.target in SAME_IDS:
            field = field.args[0]
        if field.op == "placeholder" and forward.inputs[field].source == "field":
            name = forward.inputs[field].name
            rest = "" if ignore is None or 0 <= ignore < size else f", or {ignore}"
            found.setdefault(
                (name, size, ignore),
                InRange(
                    ids,
                    size,
                    ignore,
                    f"'{name}' must be from 0 to {size - 1}{rest}, as {ops.short_name(node)} takes it{where(node)}",
                ),
            )
    return list(found.values())


def program(forward: Forward, count: Count, checks: list[Check | Equal | InRange]) -> dict:
    """Returns TARGETS of a bundle."""
    if not isinstance(count, tuple) and not checks:
        return {"count": symbols.argument(count)}
    emitter = Emitter("the targets")
    counts = [count, *(one for check in checks if isinstance(check, Equal) for one in (check.one, check.other))]
    read = [one[0] for one in counts if isinstance(one, tuple)] + [
        check.condition if isinstance(check, Check) else check.ids for check in checks if not isinstance(check, Equal)
    ]
    inputs, code = _values(forward, read, emitter)

    def call(*arguments) -> dict:
        instruction, slot = emitter.call(*arguments)
        code.append(instruction)
        return {"v": slot}

    def number(one: Any) -> dict:
        value = {"v": emitter.slot[one[0]]}
        return call("aten::sum", value if one[1] is None else call("aten::ne.Scalar", value, one[1]), None)

    def holds(check: Check | Equal | InRange) -> dict:
        if isinstance(check, Check):
            return call("aten::all", {"v": emitter.slot[check.condition]})
        if isinstance(check, InRange):
            ids = {"v": emitter.slot[check.ids]}
            right = call("aten::logical_and", call("aten::ge.Scalar", ids, 0), call("aten::lt.Scalar", ids, check.size))
            return call(
                "aten::all",
                right
                if check.ignore is None
                else call("aten::logical_or", right, call("aten::eq.Scalar", ids, check.ignore)),
            )
        if not isinstance(check.other, tuple):
            return call("aten::eq.Scalar", number(check.one), symbols.argument(check.other))
        return call("aten::eq.Tensor", number(check.one), number(check.other))

    described = {"slot": number(count)["v"]} if isinstance(count, tuple) else {"count": symbols.argument(count)}
    if checks:
        described["checks"] = [
            {"slot": holds(check)["v"], "says": FOLDER.sub("", check.says).encode()[:MOST_TEXT].decode(errors="ignore")}
            for check in checks
        ]
    return {"slots": emitter.slots, "inputs": inputs, "code": code, **described}


def _values(forward: Forward, read: list[fx.Node], emitter: Emitter) -> tuple[list[dict], list[dict]]:
    """Returns the fields from which the nodes are computed, and the code."""
    needed = ops.ancestors(read)
    wanted = {*read, *(one for node in needed for one in ops.inputs_of(node))}
    inputs, code = [], []
    for node in forward.graph.nodes:
        if node.op == "placeholder" and node in wanted:
            source, name = forward.inputs[node]
            if source != "field":
                raise CaptureError(
                    f"the targets depend on the {source} '{name}', so they cannot be counted before the forward "
                    f"pass{where(read[0])}. {ADVICE}"
                )
            emitter.slot[node] = emitter.new_slot()
            inputs.append({"from": "field", "name": name, "slot": emitter.slot[node]})
        elif node in needed and (instruction := emitter.instruction(node)):
            code.append(instruction)
    return inputs, code
