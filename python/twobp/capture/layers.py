"""Layers and shapes as graph.json has them: what they read, and programs of a trace that fit the layers of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .emit import Instruction, dtype_name
from .errors import OtherLayers, some
from .interpret import Chain
from .sizes import numbers_if_served
from .trace import Traced


def of_many(described: dict, names: list[str]) -> dict:
    """Returns the keys of a shape that serves many. `names` are those of the constants."""
    if not described:
        return {}
    tables = [
        {**table, "inputs": [{**one, "constant": names[one["constant"]]} for one in table["inputs"]]}
        for table in described["tables"]
    ]
    return {**described, "tables": tables}


def of_one(
    shape: dict, fields: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]
) -> tuple[dict, list[torch.Tensor]]:
    """Returns a shape that serves many as one that serves these fields alone, and its tables."""
    chain = Chain({"shapes": [shape]}, 0, {}, constants)
    chain.prepare(fields)

    def plain(code: Any) -> Any:
        if isinstance(code, dict):
            if code.keys() == {"size"}:
                return chain.sizes[code["size"]]
            filled = {key: plain(value) for key, value in code.items()}
            return Instruction(filled).of(code.source) if isinstance(code, Instruction) else filled
        return [plain(one) for one in code] if isinstance(code, list) else code

    kept = {key: plain(value) for key, value in shape.items() if key not in ("fields", "sizes", "guards", "tables")}
    return {"fields": described_fields(fields), **kept}, chain.tables


def without_ones(shape: dict, fields: dict[str, torch.Tensor]) -> dict | None:
    """Returns the shape without those guards against a size of 1 that a batch does not pass. Returns None if it passes
    all of them."""
    numbers = numbers_if_served({**shape, "guards": []}, fields)[0]
    kept = [one for one in shape["guards"] if "assumed" not in one or numbers is None or numbers[one["size"]]]
    return {**shape, "guards": kept} if len(kept) < len(shape["guards"]) else None


def described_fields(fields: dict[str, torch.Tensor]) -> dict[str, dict]:
    return {name: {"dtype": dtype_name(t.dtype), "shape": list(t.shape)} for name, t in fields.items()}


def constants_of(layers: list[dict], shapes: list[dict]) -> set[str]:
    """Returns the names of the constants that the layers and the shapes have."""
    tables = [table for shape in shapes for table in shape.get("tables", [])]
    return {
        name
        for names in [
            *(layer["constants"] for layer in layers),
            *(names for shape in shapes for names in shape.get("constants", [])),
            *([one["constant"] for one in table["inputs"]] for table in tables),
        ]
        for name in names
        if isinstance(name, str)
    }


def fitted(layers: list[dict], traced: Traced) -> Traced:
    """Returns the trace with programs that read the parameters and buffers of `layers`. Raises OtherLayers if these do
    not have what the programs read."""
    before, now = (
        parameter_names(of, lambda layer: [*layer["parameters"], *layer["buffers"]]) for of in (layers, traced.layers)
    )
    places: dict[int, dict[str, list[int]]] = {}
    for layer, own in zip(layers, traced.layers):
        if any(one in own["parameters"] and dtype_in(own, one) != dtype_in(layer, one) for one in layer["parameters"]):
            raise OtherLayers(f"layer '{layer['name']}' reads its parameters in other dtypes then")
        if any(one not in layer[what] for what in ("parameters", "buffers") for one in own[what]):
            break
        place = {what: [layer[what].index(one) for one in own[what]] for what in ("parameters", "buffers")}
        if places.setdefault(own["kind"], place) != place:
            break
    else:
        if len(layers) == len(traced.layers) and len(places) == len(traced.programs) and now <= before:
            return dataclasses.replace(
                traced, programs=[moved(program, places[kind]) for kind, program in enumerate(traced.programs)]
            )
    which = (
        f": {some(before ^ now)} {'are' if len(before ^ now) > 1 else 'is'} read by only one of the two"
        if before != now
        else ""
    )
    raise OtherLayers(f"the module has different layers then{which}")


def dtype_in(layer: dict, parameter: str | list[str]) -> str | None:
    """Returns the dtype in which a layer reads a parameter; None: all of them in their own."""
    return layer["dtypes"][layer["parameters"].index(parameter)] if "dtypes" in layer else None


def moved(program: dict, place: dict[str, list[int]]) -> dict:
    """Returns a program that finds its parameters and buffers at other places in the lists of its layer."""

    def code(steps: list[dict]) -> list[dict]:
        return [
            type(step)(step, add_to=place["parameters"][step["add_to"]]) if "add_to" in step else step for step in steps
        ]

    lists = {"parameter": place["parameters"], "buffer": place["buffers"]}
    return {
        **program,
        "inputs": [
            {**one, "index": lists[one["from"]][one["index"]]} if one["from"] in lists else one
            for one in program["inputs"]
        ],
        "new_buffers": [{**one, "index": place["buffers"][one["index"]]} for one in program["new_buffers"]],
        "backward_p1": code(program["backward_p1"]),
        "backward_p2": [{**unit, "code": code(unit["code"])} for unit in program["backward_p2"]],
    }


def kind_names(layers: list[str], assigned: list[int]) -> list[str]:
    """Names each kind after the last word of its first layer's name."""
    names: list[str] = []
    for layer, kind in zip(layers, assigned):
        if kind == len(names):
            words = [w for w in layer.split("#")[0].split(".") if not w.isdigit()]
            name = words[-1] if words else "layer"
            names.append(name if name not in names else f"{name}{kind}")
    return names


def parameter_names(layers: list, of: Callable[[Any], Iterable] = lambda layer: layer["parameters"]) -> set[str]:
    """Returns the names of those parameters of the layers that `of` chooses. A packed weight has a list of them."""
    return {name for layer in layers for one in of(layer) for name in (one if isinstance(one, list) else [one])}


def trained_names(layers: list[dict], shape: dict) -> set[str]:
    """Returns the parameters for which some program of the shape has a gradient."""

    def trained(numbered: tuple[int, dict]) -> Iterable:
        number, layer = numbered
        program = shape["programs"][shape["kinds"][number] if "kinds" in shape else layer["kind"]]
        code = [*program["backward_p1"], *(step for unit in program["backward_p2"] for step in unit["code"])]
        return (layer["parameters"][step["add_to"]] for step in code if "add_to" in step)

    return parameter_names(list(enumerate(layers)), trained)
