"""Turns graphs into programs of instructions, as a bundle has them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from twobp import _native

from . import ops, symbols
from .cut import Layer
from .differentiate.joint import Joint
from .differentiate.split import Split
from .errors import CaptureError, where
from .ops import aten

MEMORY_FORMATS = {
    torch.contiguous_format: "contiguous",
    torch.preserve_format: "preserve",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
}
RENAMED = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,  # real strides may differ from those of tracing
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}

GROUPS = "twobp::grouped_mm_weight"
OTHER_WAY = "Write this part of the module with other operators of torch"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Instruction(dict):
    """An instruction of a program. `source` says for errors which operator of the module it comes from. Files do not
    have it."""

    source = ""

    def of(self, source: str) -> Instruction:
        self.source = source
        return self


class Emitter:
    """Numbers slots and writes instructions. `where_` names the layer in errors."""

    def __init__(self, where_: str):
        self.where = where_
        self.slots = 0
        self.random = 0
        self.slot: dict[fx.Node, int] = {}
        self.parts: dict[fx.Node, list[int]] = {}

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def argument(self, value: Any, kind: str) -> Any:
        if isinstance(value, fx.Node):
            return {"v": self.slot[value]}
        if value is None or isinstance(value, torch.layout):
            return None
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": 0}
        if isinstance(value, torch.memory_format):
            return {"memory_format": MEMORY_FORMATS[value]}
        if symbols.is_size(value := symbols.plain(value)):
            size = symbols.argument(value)
            return {"number": size} if "Tensor" in kind else size
        if isinstance(value, (bool, int, float)):
            number = {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value
            return (
                {"number": number}
                if "Tensor" in kind
                else float(value)
                if kind == "float" and not isinstance(number, dict)
                else number
            )
        if isinstance(value, str):
            return value
        if isinstance(value, (list, tuple)):
            return [self.argument(x, "" if "Tensor" in kind else "float" if "float" in kind else "") for x in value]
        raise ValueError(f"a program cannot hold the argument {value!r}")

    def refuse(self, node: fx.Node, what: str) -> CaptureError:
        return CaptureError(f"{self.where}: {what}{where(node)}")

    def instruction(self, node: fx.Node) -> dict | None:
        """Returns the instruction of a call, or None if the call only names a part of a result."""
        if node.target is operator.getitem:
            source, index = node.args
            self.slot[node] = self.parts[source][index]
            return None
        target = RENAMED.get(node.target, node.target)
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "twobp"):
            raise self.refuse(node, f"programs have no operator {target}. {OTHER_WAY}")
        if ops.is_random(node) and not any(a.name in ("generator", "random") for a in target._schema.arguments):
            packet, seeded = target.overloadpacket, "_".join(filter(None, (target._schema.overload_name, "generator")))
            if seeded not in packet.overloads():
                raise self.refuse(
                    node,
                    f"{target} draws random numbers, and takes no generator. Use torch.bernoulli, torch.rand or "
                    "dropout",
                )
            target = getattr(packet, seeded)
        schema = target._schema
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        try:
            _native.check_operator(name)
        except _native.Error as error:
            raise self.refuse(node, f"{error}. {OTHER_WAY}") from None
        arguments = []
        for i, parameter in enumerate(schema.arguments):
            if i < len(node.args) and not parameter.kwarg_only:
                value = node.args[i]
            else:
                value = node.kwargs.get(parameter.name, parameter.default_value)
            if parameter.name == "dtype" and isinstance(value, int):
                value = node.meta["val"].dtype  # the default of randint and randperm is a number
            if parameter.name in ("generator", "random") and ops.is_random(node):
                arguments.append({"random": self.random})
                self.random += 1
            else:
                try:
                    arguments.append(self.argument(value, str(parameter.type)))
                except ValueError as error:
                    raise self.refuse(node, f"{name}: {error}. {OTHER_WAY}") from None
        result = node.meta.get("val")
        if isinstance(result, (tuple, list)):
            read = {u.args[1] for u in node.users if u.target is operator.getitem}
            self.parts[node] = [self.new_slot() if i in read else -1 for i in range(len(result))]
            out = [None if s < 0 else s for s in self.parts[node]]
        else:
            self.slot[node] = self.new_slot()
            out = [self.slot[node]]
        instruction = Instruction({"op": name, "args": arguments, "out": out}).of(where(node))
        if isinstance(result, list) or len(schema.returns) == 1 and str(schema.returns[0].type).startswith("List"):
            instruction["list"] = True
        return instruction

    def call(self, op: str, *arguments) -> tuple[dict, int]:
        slot = self.new_slot()
        return {"op": op, "args": list(arguments), "out": [slot]}, slot


def source_of(instruction: dict) -> str:
    """Returns " (part 'blocks.0', file:line, ...)", or '' for an instruction that came from a file, or from capture
    itself."""
    return instruction.source if isinstance(instruction, Instruction) else ""


def reads(instruction: dict) -> list[int]:
    found = []
    for argument in instruction["args"]:
        for value in argument if isinstance(argument, list) else [argument]:
            if isinstance(value, dict) and "v" in value:
                found.append(value["v"])
    return found


def add_gradient(
    emitter: Emitter, parameter: int, node: fx.Node, code: list[dict], shape: torch.Size, rounds: bool = False
) -> None:
    """Appends code that adds `node` to the parameter's gradient. If no other node reads a product or an embedding's
    gradient, it is added as it is computed, unless that `rounds` a product, as under autocast."""
    slot = emitter.slot[node]
    made = {s: i for i in code if "out" in i for s in i["out"] if s is not None}
    count: dict[int, int] = {}
    for instruction in code:
        for s in reads(instruction):
            count[s] = count.get(s, 0) + 1
    last = made.get(slot, {})
    alone = last and not count.get(slot) and len(node.users) == 1 and not rounds
    if alone and last["op"] == "aten::mm":
        code.remove(last)
        code.append({"add_to": parameter, "how": "product", "args": last["args"]})
    elif (
        alone
        and last["op"] == "aten::t"
        and made.get(last["args"][0]["v"], {}).get("op") == "aten::mm"
        and count[last["args"][0]["v"]] == 1
    ):
        product = made[last["args"][0]["v"]]
        code.remove(last)
        code.remove(product)
        left, a = emitter.call("aten::t", product["args"][1])
        right, b = emitter.call("aten::t", product["args"][0])
        code += [left, right, {"add_to": parameter, "how": "product", "args": [{"v": a}, {"v": b}]}]
    elif alone and last["op"] == GROUPS:
        code.remove(last)
        code.append({"add_to": parameter, "how": "groups", "args": last["args"]})
    elif (
        alone
        and last["op"] == "aten::transpose.int"
        and {last["args"][1] % 3, last["args"][2] % 3} == {1, 2}
        and made.get(last["args"][0]["v"], {}).get("op") == GROUPS
        and count[last["args"][0]["v"]] == 1
    ):
        products = made[last["args"][0]["v"]]
        code.remove(last)
        code.remove(products)
        a, b, ends = products["args"]
        code.append({"add_to": parameter, "how": "groups", "args": [b, a, ends]})
    elif alone and last["op"] == "aten::embedding_dense_backward" and not last["args"][4]:
        code.remove(last)
        code.append(
            {"add_to": parameter, "how": "embedding", "args": [last["args"][0], last["args"][1], last["args"][3]]}
        )
    else:
        if not symbols.same(node.meta["val"].shape, shape):
            raise emitter.refuse(
                node,
                f"the gradient of a parameter has shape {list(node.meta['val'].shape)}, but the parameter has "
                f"{list(shape)}. {OTHER_WAY}",
            )
        code.append({"add_to": parameter, "how": "sum", "args": [{"v": slot}]})


def emit(layer: Layer, joint: Joint, parts: Split) -> tuple[dict, list[torch.Tensor]]:
    """Returns the PROGRAM of a kind, and constants that tracing made. Their indices follow the layer's own."""
    emitter = Emitter(f"layer '{layer.name}'")
    graph = joint.graph_module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    index_of: list[int] = []
    counters: dict[str, int] = {}
    program: dict[str, Any] = {"slots": 0, "inputs": []}
    for node, (source, name) in zip(placeholders, layer.inputs):
        index = counters.get(source, 0)
        counters[source] = index + 1
        index_of.append(index)
        emitter.slot[node] = slot = emitter.new_slot()
        entry = {"from": "field" if source == "whole" else source, "slot": slot}
        if source in ("field", "whole"):
            entry.update({"name": name, **({"whole": True} if source == "whole" else {})})
        elif source != "loss_weight":
            entry["index"] = index
        program["inputs"].append(entry)
    made_constants: list[torch.Tensor] = []
    for node in graph.nodes:
        if node.op == "get_attr":
            emitter.slot[node] = emitter.new_slot()
            program["inputs"].append(
                {
                    "from": "constant",
                    "index": counters.get("constant", 0) + len(made_constants),
                    "slot": emitter.slot[node],
                }
            )
            made_constants.append(getattr(joint.graph_module, node.target))
    gradient_slot = {}
    for i, node in zip(joint.arriving, placeholders[len(layer.inputs) :]):
        emitter.slot[node] = gradient_slot[i] = emitter.new_slot()
    code: dict[str | int, list[dict]] = {"F": [], "I": [], **{k: [] for k in range(len(parts.units))}}
    early: dict[fx.Node, list[int]] = {}
    for i, node in parts.light:
        early.setdefault(node, []).append(i)

    def light(node):
        for i in early.get(node, ()):
            code["I"].append({"add_to": index_of[i], "how": "sum", "args": [{"v": emitter.slot[node]}]})

    for node in graph.nodes:
        if node.op == "call_function" and node in parts.where:
            instruction = emitter.instruction(node)
            if instruction:
                code[parts.where[node]].append(instruction)
            if parts.where[node] != "F":
                light(node)
    for node in early:
        if node.op != "call_function" or parts.where.get(node) == "F":
            light(node)
    for k, (i, node) in enumerate(parts.units):
        rounds = layer.casts and node.meta["val"].element_size() == 2
        add_gradient(emitter, index_of[i], node, code[k], layer.examples[i].shape, rounds)
    given = {i for i, _ in (*parts.light, *parts.units)}
    for i, (one, trained) in enumerate(zip(layer.inputs, joint.trained)):
        if one.source == "parameter" and trained and i not in given:  # the gradient comes from another layer
            code["I"].append({"add_to": index_of[i], "how": "nothing", "args": []})
    program["outputs"] = [
        {"slot": emitter.slot[node], **({"gradient": gradient_slot[i]} if i in gradient_slot else {})}
        for i, ((kind, _), node) in enumerate(zip(layer.outputs, parts.outputs))
        if kind != "buffer"
    ]
    buffers = layer.names("buffer")
    program["new_buffers"] = sorted(
        (
            {"index": buffers.index(name), "slot": emitter.slot[node]}
            for (kind, name), node in zip(layer.outputs, parts.outputs)
            if kind == "buffer"
        ),
        key=lambda one: one["index"],
    )
    program["input_gradients"] = []
    for i, node in parts.value_gradients:
        if node is None:  # the layer reads the value, but without a derivative
            zeros, slot = emitter.call(
                "aten::zeros_like", {"v": emitter.slot[placeholders[i]]}, None, None, None, None, None
            )
            code["I"].append(zeros)
        else:
            slot = emitter.slot[node]
        program["input_gradients"].append({"index": index_of[i], "slot": slot})
    program["forward"], program["backward_p1"] = code["F"], code["I"]
    names = layer.names("parameter")
    # All uses of a parameter in a layer are one unit, so that the batching of units does not change the order
    # of the sum.
    units: dict[int, list[dict]] = {}
    for k, (i, _) in enumerate(parts.units):
        units[i] = units.pop(i, []) + code[k]  # moves to the end, because the unit needs the inputs of its last use
    program["backward_p2"] = [{"name": short(names, index_of[i]), "code": of_all} for i, of_all in units.items()]
    evaluate = evaluation(program, emitter)
    if evaluate is not None:
        program["evaluate"] = evaluate
    program["slots"] = emitter.slots
    return program, made_constants


def short(names: list[str], index: int) -> str:
    return ".".join(names[index].split(".")[-2:])


def evaluation(program: dict, emitter: Emitter) -> list[dict] | None:
    """Returns the forward program without dropout, with BatchNorm's running statistics, and with unchanged buffers.
    Returns None if that changes nothing."""
    buffer = {i["index"]: i["slot"] for i in program["inputs"] if i["from"] == "buffer"}
    given = {i["slot"] for i in program["inputs"]}  # a parameter or a field that becomes a buffer's value is itself
    same = {
        b["slot"]: buffer[b["index"]] for b in program["new_buffers"] if b["slot"] not in given
    }  # buffers stay in evaluation
    outputs = {o["slot"] for o in program["outputs"]}
    changed = not same.keys().isdisjoint(outputs.union(*map(reads, program["forward"])))
    code = []

    def renamed(argument):
        if isinstance(argument, list):
            return [renamed(a) for a in argument]
        if isinstance(argument, dict) and "v" in argument:
            slot = argument["v"]
            while slot in same:
                slot = same[slot]
            return {"v": slot}
        return argument

    for instruction in program["forward"]:
        arguments = [renamed(a) for a in instruction["args"]]
        name, out = instruction["op"].split(".")[0], instruction["out"]
        if name == "twobp::dropout":
            changed = True
            if out[0] in outputs:
                code.append({"op": "aten::mul.Scalar", "args": [arguments[0], 1], "out": [out[0]]})
            else:
                same[out[0]] = arguments[0]["v"]
        elif (
            name in ("aten::_native_batch_norm_legit_functional", "aten::native_batch_norm")
            and arguments[5] is True
            and arguments[3] is not None
        ):
            changed = True
            same.update((slot, one["v"]) for slot, one in zip(out[3:], arguments[3:5]) if slot is not None)
            code.append(
                Instruction(
                    {
                        "op": "aten::_native_batch_norm_legit_no_training",
                        "args": [*arguments[:5], *arguments[6:]],
                        "out": [out[0], None, None],
                    }
                ).of(source_of(instruction))
            )
        else:
            code.append(Instruction({**instruction, "args": arguments}).of(source_of(instruction)))
    if not changed:
        return None
    needed, kept = set(outputs), []
    for instruction in reversed(code):
        if any(s in needed for s in instruction["out"] if s is not None):
            needed.update(reads(instruction))
            kept.append(instruction)
    return kept[::-1]
