"""The versions of torch that the package takes. The compiled module works with the torch that it was built with, and
capture with those whose private parts it knows. What differs between these versions is here."""

from __future__ import annotations

import operator
import pathlib
import re

import torch

KNOWN = ("2.12", "2.13", "2.14")


def number(version: str) -> str:
    """Returns a version without what follows its numbers, such as "+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else version


def check_built_with(folder: pathlib.Path) -> None:
    """Raises ImportError if the module in `folder` was built with another torch: loading it could crash."""
    kept = folder / "_native.torch"  # the build writes it
    built = kept.read_text().strip() if kept.exists() else "an unknown version"
    if built != number(torch.__version__):
        raise ImportError(
            f"twobp was built with torch {built}, but this is torch {torch.__version__}. Build it again with this one: "
            "pip install --no-build-isolation . (docs/python.md)",
            name="twobp._native",
        )


def unknown() -> str | None:
    """Returns why capture does not take this torch, or None if it does."""
    if ".".join(torch.__version__.split(".")[:2]) in KNOWN:
        return None
    return (
        f"capture uses parts of torch that other versions than {', '.join(KNOWN[:-1])} and {KNOWN[-1]} may change; "
        f"this is torch {torch.__version__}. Install one of these, and build twobp again"
    )


def complete_size_calls() -> None:
    """torch traces arguments that are computed from sizes by a table of calls. Before 2.14 it has none for a power,
    such as n * n."""
    import sympy
    from torch.fx.experimental.proxy_tensor import _sympy_handlers

    _sympy_handlers().setdefault(sympy.Pow, operator.pow)


check_built_with(pathlib.Path(__file__).parent)
