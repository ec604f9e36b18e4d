"""Writes and reads the folder of a captured module (docs/bundle.md)."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from twobp import _native

from .errors import CaptureError

FORMAT, VERSION = "twobp graph", 2  # earlier versions are read, too
GRAPH = "graph.json"


def write(
    folder: str | os.PathLike,
    graph: dict,
    weights: Mapping[str, torch.Tensor] | None,
    constants: Mapping[str, torch.Tensor],
    module: nn.Module | None = None,
) -> None:
    """Writes a bundle. `weights` are parameters and changed buffers; None means that they are elsewhere. If `module` is
    a module of transformers, from_pretrained also loads the folder.

    All files are on disk before any gets its name. graph.json is removed first and written last, so a folder with a
    graph is a whole bundle."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if weights is not None and module is not None:
        weights = {**buffers_beside(weights, module), **weights}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as own:
        new = pathlib.Path(own)
        for part in ("config", "generation_config"):
            settings: Any = getattr(module, part, None)
            if hasattr(settings, "save_pretrained"):
                settings.save_pretrained(new)
        for name, tensors in (("model", weights), ("constants", constants)):
            if tensors is not None:
                _native.write_tensors(
                    str(new / f"{name}.safetensors"), {key: one.detach().contiguous() for key, one in tensors.items()}
                )
        (new / GRAPH).write_text(json.dumps(graph), encoding="utf-8")
        for path in new.iterdir():
            sync(path)
        (folder / GRAPH).unlink(missing_ok=True)
        for path in sorted(new.iterdir(), key=lambda path: path.name == GRAPH):
            os.replace(path, folder / path.name)
    sync(folder)


def buffers_beside(weights: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the module's persistent buffers that training never changes. Programs read them as constants, but the
    module's own loader needs them."""
    buffers = dict(module.named_buffers())
    return {name: buffers[name] for name in module.state_dict() if name in buffers and name not in weights}


def sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_graph(folder: str | os.PathLike) -> dict:
    """Returns what graph.json contains. Raises OSError or ValueError. A pipe of that name would wait for its writer."""
    with open(
        pathlib.Path(folder) / GRAPH, encoding="utf-8", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
    ) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{GRAPH} is not a regular file")
        return json.load(file)


def read(folder: str | pathlib.Path) -> tuple[dict, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns (graph, parameters and buffers, constants) of a bundle."""
    folder = pathlib.Path(folder)
    try:
        graph = read_graph(folder)
    except (OSError, ValueError) as error:
        raise CaptureError(f"'{folder}' is no bundle: {error}") from error
    if graph.get("format") != FORMAT or graph.get("version") not in range(1, VERSION + 1):
        raise CaptureError(
            f"'{folder}/{GRAPH}' is '{graph.get('format')}' version {graph.get('version')}; this program reads "
            f"'{FORMAT}' version 1 to {VERSION}. Capture the module again"
        )
    return (
        graph,
        _native.read_tensors(str(folder / "model.safetensors")),
        _native.read_tensors(str(folder / "constants.safetensors")),
    )
