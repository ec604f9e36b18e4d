"""Checks of arguments, whose errors name the argument. A value may be any object, also one whose own methods fail."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from twobp._native import Error

MOST = 2**31 - 1  # of a C++ int
MOST_STEPS = 2**53  # beyond, a float does not count


def shown(value: object) -> str:
    """Returns a value as an error shows it."""
    try:
        text = repr(value) if not isinstance(value, torch.Tensor) else f"a tensor of {value.dtype}, {value.layout}"
    except Exception:
        text = f"a {type(value).__name__}"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def whole(value: Any, name: str, least: int = 0, most: int = MOST) -> int:
    """Returns a whole number of Python or numpy as an int. Raises Error for any other value, and for one out of
    range."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return operator.index(value)
    raise Error(
        f"{name} is {shown(value)}, but must be a whole number, at least {least}"
        + ("" if most > MOST else f" and at most {most}")
    )


def number(value: Any, name: str, least: float = 0) -> float:
    """Returns a finite number as a float. Raises Error for any other value, and for one below `least`."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(value) and float(value) >= least:
                return float(value)
    raise Error(f"{name} is {shown(value)}, but must be a finite number, at least {least:g}")


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise Error(f"{name} is {shown(value)}, but must be True or False")
    return value


def text(value: Any, name: str) -> str:
    """Returns a text. Raises Error for any other value, and for text that no file or message could hold."""
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(value, str) and "\0" not in value and value.encode() is not None:
            return value
    raise Error(f"{name} is {shown(value)}, but must be a text")


def path(value: Any, name: str) -> str:
    """Returns the path of a file or folder as text. Raises Error for any other value, and for an empty path."""
    with contextlib.suppress(Exception):  # of an object's own __fspath__
        found = os.fspath(value)
        if isinstance(found, str) and found and text(found, name):
            return found
    raise Error(f"{name} is {shown(value)}, but must be the path of a file or folder")


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """What an object's own methods raise becomes an Error."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise Error(f"{what} cannot be read: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def files(what: str) -> Iterator[None]:
    """An error of the system becomes an Error with its text, which names the file."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise Error(f"{what}: {error}") from error


def mapping(value: object, what: str) -> dict:
    if not isinstance(value, Mapping):
        raise Error(f"{what} is a {type(value).__name__}, but must be a dict")
    with readable(what):
        return dict(value)


def several(value: Any, name: str) -> list:
    """Returns one value or several as a list; None is none."""
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    with readable(name):
        return list(value)


def check_dense(tensor: torch.Tensor, what: str) -> None:
    """Raises Error unless the tensor is dense, has values and is in the CPU's memory."""
    has_own_operators = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_quantized
        or tensor.is_nested
        or has_own_operators
    ):
        kind = (
            type(tensor).__name__
            if has_own_operators
            else "quantized"
            if tensor.is_quantized
            else "nested"
            if tensor.is_nested
            else str(tensor.layout)
        )
        raise Error(f"{what} is on {tensor.device}, {kind}: give a dense tensor on the CPU")
