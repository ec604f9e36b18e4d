"""Writes and reads the folder of a captured module (docs/bundle.md)."""
from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping

import torch

from twobp import _native
from .errors import CaptureError

FORMAT, VERSION = "twobp graph", 1


def write(folder: str | os.PathLike, graph: dict, weights: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]) -> None:
    """`weights`: parameters and changed buffers. The graph comes last, so that a folder with a graph is a whole bundle."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in (("model", weights), ("constants", constants)):
        _native.write_tensors(str(folder / f"{name}.safetensors"), {key: tensor.detach().contiguous() for key, tensor in tensors.items()})
    new = folder / "graph.json.new"
    new.write_text(json.dumps(graph), encoding="utf-8")
    os.replace(new, folder / "graph.json")


def read(folder: str | pathlib.Path) -> tuple[dict, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(graph, parameters and buffers, constants) of a bundle."""
    from safetensors.torch import load_file
    folder = pathlib.Path(folder)
    try:
        graph = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaptureError(f"'{folder}' is no bundle: {error}") from error
    if graph.get("format") != FORMAT or graph.get("version") != VERSION:
        raise CaptureError(f"'{folder}/graph.json' is '{graph.get('format')}' version {graph.get('version')}; this program reads '{FORMAT}' version {VERSION}. "
                           "Capture the module again")
    return graph, load_file(folder / "model.safetensors"), load_file(folder / "constants.safetensors")
