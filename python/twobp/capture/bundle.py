"""Writes and reads the folder of a captured module: docs say what stands in it."""
from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

import torch

from .errors import CaptureError

if TYPE_CHECKING:
    from .captured import Captured

FORMAT, VERSION = "twobp graph", 1


def write(captured: "Captured", folder: str | pathlib.Path) -> None:
    from safetensors.torch import save_file
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: t.detach().clone().contiguous() for name, t in {**captured.parameters, **captured.buffers}.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: t.detach().clone().contiguous() for name, t in captured.constants.items()}, folder / "constants.safetensors")
    (folder / "graph.json").write_text(json.dumps(captured.graph), encoding="utf-8")
    config = getattr(captured.module, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


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
