"""Runs programs with torch as the C++ side runs them. The dry run against autograd at capture uses this, and so do tests."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import CaptureError

DTYPE = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")}
FORMATS = {"contiguous": torch.contiguous_format, "preserve": torch.preserve_format, "channels_last": torch.channels_last,
           "channels_last_3d": torch.channels_last_3d}


def resolve(name: str):
    namespace, rest = name.split("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


class Random:
    """Has generators by (layer, call), and the numbers that they drew, in order."""

    def __init__(self, seed: int):
        self.seed = seed
        self.drawn: list[tuple[str, tuple]] = []

    def generator(self, layer: int, call: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + layer * 1_009 + call)


def value_of(argument: Any, slots: dict[int, torch.Tensor], generator: Callable[[int], torch.Generator], positions: int) -> Any:
    if isinstance(argument, list):
        return [value_of(a, slots, generator, positions) for a in argument]
    if not isinstance(argument, dict):
        return argument
    (key, value), = argument.items()
    if key == "v":
        return slots[value]
    if key == "number":
        return torch.tensor(float(value["float"]) if isinstance(value, dict) else value, dtype=torch.float64 if isinstance(value, (float, dict)) else None)
    return {"dtype": lambda: DTYPE[value], "memory_format": lambda: FORMATS[value], "float": lambda: float(value), "device": lambda: torch.device("cpu"),
            "random": lambda: generator(value), "positions": lambda: value * positions,
            "position": lambda: 0 if value == "begin" else positions}[key]()


def run(code: list[dict], slots: dict[int, torch.Tensor], gradients: dict[int, torch.Tensor] | None = None, shapes=None,
        random: Random | None = None, layer: int = 0, positions: int = 0) -> None:
    """Runs instructions on `slots`, in place. `gradients` collects the additions of add_to, by the parameter's index. `positions` is the
    length of a sequence."""
    random = random or Random(0)
    for instruction in code:
        arguments = [value_of(a, slots, lambda call: random.generator(layer, call), positions) for a in instruction["args"]]
        if "add_to" in instruction:
            index, how = instruction["add_to"], instruction["how"]
            if how == "product":
                value = arguments[0] @ arguments[1]
            elif how == "sum":
                value = arguments[0]
            else:
                dy, ids, padding = arguments
                value = torch.ops.aten.embedding_dense_backward(dy, ids, shapes[index][0], padding, False)
            gradients[index] = gradients[index] + value if index in gradients else value
            continue
        op = resolve(instruction["op"])
        schema = op._schema.arguments
        positional = [a for a, s in zip(arguments, schema) if not s.kwarg_only]
        try:
            result = op(*positional, **{s.name: a for a, s in zip(arguments, schema) if s.kwarg_only})
        except RuntimeError as error:
            raise CaptureError(f"layer {layer}: {instruction['op']} cannot run outside autograd: {str(error).splitlines()[0]}. "
                               "Write this part of the module with other operations") from error
        if any(isinstance(a, dict) and "random" in a for a in instruction["args"]):
            drawn = result if isinstance(result, tuple) else (result,)
            random.drawn.append((instruction["op"], drawn))
        for slot, part in zip(instruction["out"], result if isinstance(result, (tuple, list)) else [result]):
            if slot is not None:
                slots[slot] = part


def as_list(name: str | list[str]) -> list[str]:
    return [name] if isinstance(name, str) else name


class Chain:
    """All layers of one shape. `tensors` has parameters and buffers by name, `constants` has constants by name."""

    def __init__(self, graph: dict, shape: int, tensors: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]):
        self.graph, self.shape = graph, graph["shapes"][shape]
        self.tensors, self.constants = tensors, constants

    def parameter(self, name: str | list[str]) -> torch.Tensor:
        return self.tensors[name] if isinstance(name, str) else torch.cat([self.tensors[one] for one in name])

    def count(self, fields: dict[str, torch.Tensor]) -> int:
        targets = self.shape["targets"]
        if "count" in targets:
            return targets["count"]
        slots = {i["slot"]: fields[i["name"]] for i in targets["inputs"]}
        run(targets["code"], slots)
        return int(slots[targets["slot"]])

    def forward(self, fields: dict[str, torch.Tensor], loss_weight: float, random: Random, evaluate: bool = False):
        """Returns the loss, each layer's slots, and the new buffers."""
        values: list[torch.Tensor] = []
        slots_of, buffers = [], {}
        for number, layer in enumerate(self.graph["layers"]):
            program = self.shape["programs"][layer["kind"]]
            constants = self.shape["constants"][number] if "constants" in self.shape else layer["constants"]
            slots = {}
            for i in program["inputs"]:
                slots[i["slot"]] = {"value": lambda: values[i["index"]], "field": lambda: fields[i["name"]],
                                    "parameter": lambda: self.parameter(layer["parameters"][i["index"]]), "buffer": lambda: self.tensors[layer["buffers"][i["index"]]],
                                    "constant": lambda: self.constants[constants[i["index"]]],
                                    "loss_weight": lambda: torch.tensor(loss_weight, dtype=torch.float32)}[i["from"]]()
            run(program.get("evaluate", program["forward"]) if evaluate else program["forward"], slots, random=random, layer=number,
                positions=self.shape.get("positions", 0))
            values = [slots[o["slot"]] for o in program["outputs"]]
            if not evaluate:
                buffers.update({layer["buffers"][b["index"]]: slots[b["slot"]] for b in program["new_buffers"]})
            slots_of.append(slots)
        return values[0], slots_of, buffers

    def backward(self, slots_of: list[dict], random: Random) -> dict[str, torch.Tensor]:
        """Returns the gradients of all parameters by name. I of all layers runs first, then W."""
        arriving = None
        gradients: dict[str, torch.Tensor] = {}
        for number in reversed(range(len(slots_of))):
            layer, slots = self.graph["layers"][number], slots_of[number]
            program = self.shape["programs"][layer["kind"]]
            wanted = [o["gradient"] for o in program["outputs"] if "gradient" in o]
            arriving = [torch.ones_like(slots[program["outputs"][0]["slot"]])] if arriving is None and wanted else arriving or []
            assert len(arriving) == len(wanted), (layer["name"], len(arriving), len(wanted))
            slots.update(zip(wanted, arriving))
            own: dict[int, torch.Tensor] = {}
            shapes = [self.parameter(name).shape for name in layer["parameters"]]
            positions = self.shape.get("positions", 0)
            run(program["backward_p1"], slots, own, shapes, random, number, positions)
            for unit in program["backward_p2"]:
                run(unit["code"], dict(slots), own, shapes, random, number, positions)
            arriving = [slots[g["slot"]] for g in program["input_gradients"]]
            for index, whole in own.items():
                names = as_list(layer["parameters"][index])
                for name, gradient in zip(names, whole.split([self.tensors[name].shape[0] for name in names]) if len(names) > 1 else [whole]):
                    gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients
