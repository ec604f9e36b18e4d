"""Runs programs with torch as the C++ side runs them. The dry run against autograd at capture uses this, and so do
tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import symbols
from .emit import OTHER_WAY, source_of
from .errors import CaptureError
from .own_operators import grouped_mm_weight, with_neighbours
from .sequences.over_slices import Sequences, Slice
from .sizes import numbers_if_served

DTYPE = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
}
FORMATS = {
    "contiguous": torch.contiguous_format,
    "preserve": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


class Whole(Slice):
    """All positions. Programs that take no slices do not ask how many."""

    def __init__(self, positions: int = 0):
        super().__init__(Sequences(positions, {}), 0, 0, positions)

    def run(self, instruction: dict, arguments: list, layer: int) -> Any:
        return NotImplemented


WHOLE = Whole()


def resolve(name: str):
    namespace, rest = name.split("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


class Random:
    """Has generators by (layer, call), and the numbers that they drew, in order. `masks` has those of dropout by
    (layer, call)."""

    def __init__(self, seed: int):
        self.seed = seed
        self.drawn: list[tuple[str, tuple]] = []
        self.masks: dict[tuple[int, int], torch.Tensor] = {}

    def generator(self, layer: int, call: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + layer * 1_009 + call)


def value_of(
    argument: Any,
    slots: dict[int, torch.Tensor],
    generator: Callable[[int], torch.Generator],
    part: Slice,
    sizes: Sequence = (),
) -> Any:
    if isinstance(argument, list):
        return [value_of(a, slots, generator, part, sizes) for a in argument]
    if not isinstance(argument, dict):
        return argument
    ((key, value),) = argument.items()
    if key == "v":
        return slots[value]
    if key == "size":
        return sizes[value] if isinstance(value, int) else symbols.hint(value)
    if key == "number":  # a tensor of it would change the dtype of a scalar's result
        return value_of(value, slots, generator, part, sizes)
    return {
        "dtype": lambda: DTYPE[value],
        "memory_format": lambda: FORMATS[value],
        "float": lambda: float(value),
        "device": lambda: torch.device("cpu"),
        "random": lambda: generator(value),
        "positions": lambda: value * part.length,
        "position": lambda: part.begin + (part.length if value == "end" else 0),
    }[key]()


def run(
    code: list[dict],
    slots: dict[int, torch.Tensor],
    gradients: dict[int, torch.Tensor] | None = None,
    shapes=None,
    random: Random | None = None,
    layer: int = 0,
    name: str = "",
    part: Slice = WHOLE,
    sizes: Sequence = (),
) -> None:
    """Runs instructions on `slots`, in place. `gradients` collects the additions of add_to, by the parameter's index.
    `layer` has this `name`. `part` are the positions of the sequences that run, `sizes` the numbers of SIZES."""
    random, gradients = random or Random(0), {} if gradients is None else gradients
    for instruction in code:
        arguments = [
            value_of(a, slots, lambda call: random.generator(layer, call), part, sizes) for a in instruction["args"]
        ]
        if "add_to" in instruction:
            index, how = instruction["add_to"], instruction["how"]
            if how == "product":
                value = arguments[0] @ arguments[1]
            elif how == "sum":
                value = arguments[0]
            elif how == "nothing":
                value = torch.zeros(shapes[index])
            elif how == "groups":
                value = grouped_mm_weight(*arguments)
            else:
                dy, ids, padding = arguments
                value = torch.ops.aten.embedding_dense_backward(dy, ids, shapes[index][0], padding, False)
            gradients[index] = gradients[index] + value if index in gradients else value
            continue
        try:
            result = part.run(instruction, arguments, layer)
            if result is NotImplemented:
                result = call(instruction["op"], arguments)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CaptureError(
                f"layer '{name}': {instruction['op']} cannot run outside autograd{source_of(instruction)}: {reason}. "
                f"{OTHER_WAY}"
            ) from error
        for argument in instruction["args"]:
            if isinstance(argument, dict) and "random" in argument:
                drawn = result if isinstance(result, tuple) else (result,)
                random.drawn.append((instruction["op"], drawn))
                random.masks[layer, argument["random"]] = drawn[-1]
        for slot, one in zip(instruction["out"], result if isinstance(result, (tuple, list)) else [result]):
            if slot is not None:
                slots[slot] = one


def count(targets: dict, fields: Mapping[str, torch.Tensor], sizes: Sequence = ()) -> int:
    """Runs TARGETS of a bundle."""
    number: Any = targets.get("count")
    if isinstance(number, dict):
        number = sizes[number["size"]] if isinstance(number["size"], int) else symbols.hint(number["size"])
    if "code" not in targets:
        return number
    slots = {one["slot"]: fields[one["name"]] for one in targets["inputs"]}
    run(targets["code"], slots, name="the targets", sizes=sizes)
    for check in targets.get("checks", []):
        if not slots[check["slot"]].all():
            raise CaptureError(check["says"])
    return number if "count" in targets else int(slots[targets["slot"]])


# Of the arguments, those whose heads must lie as wholes.
ROWS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}


def passes(targets: dict, fields: dict[str, torch.Tensor], sizes: Sequence = ()) -> bool:
    """Returns whether the fields pass the checks of TARGETS."""
    try:
        count(targets, fields, sizes)
    except CaptureError:
        return False
    return True


def call(name: str, arguments: list) -> Any:
    op = resolve(name)
    if name in ROWS:
        arguments = [*with_neighbours(*arguments[: ROWS[name]]), *arguments[ROWS[name] :]]
    schema = op._schema.arguments
    return op(
        *(a for a, s in zip(arguments, schema) if not s.kwarg_only),
        **{s.name: a for a, s in zip(arguments, schema) if s.kwarg_only},
    )


def as_list(name: str | list[str]) -> list[str]:
    return [name] if isinstance(name, str) else name


class Chain:
    """All layers, for micro-batches that an entry of `shapes` serves. `tensors` has parameters and buffers by name,
    `constants` has constants by name."""

    def __init__(self, graph: dict, shape: int, tensors: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]):
        self.graph, self.shape = graph, graph["shapes"][shape]
        self.tensors, self.constants = tensors, constants
        self.sizes: list = []
        self.tables: list[torch.Tensor] = []

    def prepare(self, fields: dict[str, torch.Tensor]) -> None:
        """Computes the sizes and tables of a micro-batch. Raises CaptureError if the programs do not serve it."""
        if "sizes" not in self.shape:
            return
        numbers, reason = numbers_if_served(self.shape, fields)
        if numbers is None:
            raise CaptureError(f"the programs are for {reason}")
        self.sizes, self.tables = numbers, []
        for table in self.shape["tables"]:
            slots = {one["slot"]: self.constants[one["constant"]] for one in table["inputs"]}
            run(table["code"], slots, name="a table", sizes=self.sizes)
            self.tables.append(slots[table["slot"]])

    def program(self, number: int) -> dict:
        return self.shape["programs"][
            self.shape["kinds"][number] if "kinds" in self.shape else self.graph["layers"][number]["kind"]
        ]

    def parameter(self, layer: dict, index: int) -> torch.Tensor:
        """Returns a parameter of a layer in the dtype in which its program reads it."""
        parts = [self.tensors[one] for one in as_list(layer["parameters"][index])]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.to(DTYPE[layer["dtypes"][index]]) if "dtypes" in layer else whole

    def count(self, fields: dict[str, torch.Tensor]) -> int:
        self.prepare(fields)
        return count(self.shape["targets"], fields, self.sizes)

    def whole(self) -> Slice:
        return Whole(self.shape.get("positions", 0))

    def forward(
        self,
        fields: dict[str, torch.Tensor],
        loss_weight: float,
        random: Random,
        evaluate: bool = False,
        part: Slice | None = None,
    ):
        """Returns the loss, each layer's slots, and the new buffers, for all positions or for a part of them."""
        self.prepare(fields)
        values: list[torch.Tensor] = []
        slots_of, buffers = [], {}
        part = part or self.whole()
        cut = (
            fields
            if isinstance(part, Whole)
            else {name: field.narrow(1, part.begin, part.length) for name, field in fields.items()}
        )
        for number, layer in enumerate(self.graph["layers"]):
            program = self.program(number)
            constants = self.shape["constants"][number] if "constants" in self.shape else layer["constants"]
            slots = {}
            for i in program["inputs"]:
                match i["from"]:
                    case "value":
                        value = values[i["index"]]
                    case "field":
                        value = (fields if i.get("whole") else cut)[i["name"]]
                    case "parameter":
                        value = self.parameter(layer, i["index"])
                    case "buffer":
                        value = self.tensors[layer["buffers"][i["index"]]]
                    case "constant":
                        constant = constants[i["index"]]
                        value = (
                            self.tables[constant["table"]] if isinstance(constant, dict) else self.constants[constant]
                        )
                    case "loss_weight":
                        value = torch.tensor(loss_weight, dtype=torch.float32)
                slots[i["slot"]] = value
            run(
                program.get("evaluate", program["forward"]) if evaluate else program["forward"],
                slots,
                random=random,
                layer=number,
                name=layer["name"],
                part=part,
                sizes=self.sizes,
            )
            values = [slots[o["slot"]] for o in program["outputs"]]
            if not evaluate:
                buffers.update({layer["buffers"][b["index"]]: slots[b["slot"]] for b in program["new_buffers"]})
            slots_of.append(slots)
        return values[0], slots_of, buffers

    def backward(self, slots_of: list[dict], random: Random, part: Slice | None = None) -> dict[str, torch.Tensor]:
        """Returns the gradients of all parameters by name, for all positions or for a part of them. I of all layers
        runs first, then W."""
        part = part or self.whole()
        arriving = None
        gradients: dict[str, torch.Tensor] = {}
        for number in reversed(range(len(slots_of))):
            layer, slots = self.graph["layers"][number], slots_of[number]
            program = self.program(number)
            wanted = [o["gradient"] for o in program["outputs"] if "gradient" in o]
            arriving = (
                [torch.ones_like(slots[program["outputs"][0]["slot"]])]
                if arriving is None and wanted
                else arriving or []
            )
            assert len(arriving) == len(wanted), (layer["name"], len(arriving), len(wanted))
            slots.update(zip(wanted, arriving))
            own: dict[int, torch.Tensor] = {}
            shapes = [self.parameter(layer, i).shape for i in range(len(layer["parameters"]))]
            run(program["backward_p1"], slots, own, shapes, random, number, layer["name"], part, self.sizes)
            for unit in program["backward_p2"]:
                run(unit["code"], dict(slots), own, shapes, random, number, layer["name"], part, self.sizes)
            arriving = [slots[g["slot"]] for g in program["input_gradients"]]
            for index, whole in own.items():
                names = as_list(layer["parameters"][index])
                for name, gradient in zip(
                    names, whole.split([self.tensors[name].shape[0] for name in names]) if len(names) > 1 else [whole]
                ):
                    gradient = gradient.to(self.tensors[name].dtype)
                    gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    def over_slices(
        self,
        fields: dict[str, torch.Tensor],
        loss_weight: float,
        masks: dict[tuple[int, int], torch.Tensor],
        lengths: list[int],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss and the gradients of all parameters, computed over slices of these lengths with the dropout
        masks of a run of the whole."""
        parts = Sequences(self.shape["positions"], masks).cut(lengths)
        ran = [(part, *self.forward(fields, loss_weight, Random(0), part=part)[:2]) for part in parts]
        loss = torch.stack([one for _, one, _ in ran]).sum()
        gradients: dict[str, torch.Tensor] = {}
        while ran:  # the last slice first, since it gives gradients to earlier ones
            part, _, slots = ran.pop()
            for name, gradient in self.backward(slots, Random(0), part).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return loss, gradients
