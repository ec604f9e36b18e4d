"""Numbers that Python takes out of tensors. Python computes with them as usual. Beside each, the same is computed with
the tensor, so that a number may come back into the loss."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import numpy
import torch

from twobp.capture import symbols

T = torch.Tensor
AS_BOOL = {T.__bool__, torch.is_nonzero, T.is_nonzero}
AS_FLOAT, AS_INT = {T.__float__}, {T.__int__, T.__index__}
AS_ARRAY: set[Callable] = {T.numpy, T.__array__}
AS_TEXT: set[Callable] = {T.__repr__, T.__str__, T.__format__}
TAKES = {T.item, T.tolist, *AS_BOOL, *AS_FLOAT, *AS_INT, *AS_ARRAY, *AS_TEXT}
# These return a bool, which is whether all elements of a tensor are true.
COMPARISONS = {
    torch.equal: lambda a, b: a == b,
    T.equal: lambda a, b: a == b,
    torch.allclose: torch.isclose,
    T.allclose: torch.isclose,
}
MOST_WHOLE = 1 << 53  # a float64 has all whole numbers up to this
TOO_LARGE = "a number of compute_loss is 2^53 or more ({}): divide it, such as by a million"
MODES: list = []  # those that run; the last one decides comparisons


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def is_too_large(numbers: torch.Tensor) -> bool:
    return not bool((numbers.to(torch.float64).abs() < MOST_WHOLE).all())


class Number:
    """A float or int with the tensor that it is (while a loss is traced) and a digest of how it was computed."""

    tensor: torch.Tensor | None
    how: str

    @staticmethod
    def of(value: Any, tensor: torch.Tensor | None, how: str) -> Any:
        if type(value) not in KINDS:
            return value
        new = KINDS[type(value)](value)
        new.tensor, new.how = tensor, how
        return new


def _how(op: str, values: tuple) -> str:
    """Numbers that do not depend on the fields alone begin with a question mark."""
    mode = MODES[-1] if MODES else None
    parts = [one.how if isinstance(one, Number) else (mode.text(one, True) if mode else repr(one)) for one in values]
    return ("?" if any(one.startswith("?") for one in parts) else "") + (mode.digest if mode else digest)(op, *parts)


def plain(value: Any) -> Any:
    kind: Callable[[Any], Any] = int if isinstance(value, int) else float
    return kind(value) if isinstance(value, Number) else value


def in_example(value: Any) -> Any:
    """Returns the number that a size has in the example of a trace, or the number itself."""
    return symbols.hint(plain(value))


def unrecorded() -> contextlib.AbstractContextManager:
    return MODES[-1].unrecorded() if MODES else contextlib.nullcontext()


def _computing(base: type, op: str):
    def compute(self, *others):
        if any(not isinstance(one, (int, float, *symbols.SYMBOLIC)) for one in others):
            return NotImplemented
        value = getattr(base, op)(plain(self), *map(in_example, others))
        if value is NotImplemented and base is int:
            value = getattr(float, op)(float(self), *(float(in_example(one)) for one in others))
        tensor = None
        if self.tensor is not None and all(one.tensor is not None for one in others if isinstance(one, Number)):
            with torch.no_grad(), unrecorded():
                values = [one.tensor.double() if isinstance(one, Number) else one for one in (self, *others)]
                tensor = getattr(values[0], op)(*values[1:])
        return Number.of(value, tensor, _how(op, (self, *others)))

    return compute


def _comparing(base: type, op: str):
    def compare(self, other):
        value = getattr(base, op)(plain(self), in_example(other))
        if value is NotImplemented and isinstance(other, (int, float, *symbols.SYMBOLIC)):
            value = getattr(float, op)(float(self), float(in_example(other)))
        if not MODES or not isinstance(value, bool):
            return value
        condition = None
        if self.tensor is not None:
            with torch.no_grad(), unrecorded():
                right = other.tensor.double() if isinstance(other, Number) else other
                condition = getattr(self.tensor.double(), op)(right)
        return MODES[-1].compared(condition, value, _how(op, (self, other)))

    return compare


def _body(base: type) -> dict:
    body: dict = {"__hash__": base.__hash__, "__bool__": lambda self: self != 0}
    for name in "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs".split():
        body[f"__{name}__"] = _computing(base, f"__{name}__")
    for name in "lt le gt ge eq ne".split():
        body[f"__{name}__"] = _comparing(base, f"__{name}__")
    return body


Float = type("Float", (float, Number), _body(float))
Int = type("Int", (int, Number), _body(int))
KINDS = {float: Float, int: Int}


def as_python(function, value: Any, arguments: tuple = ()) -> Any:
    """Returns what `function` gives for a tensor whose tolist() is `value`."""
    if function in AS_BOOL:
        return bool(value)
    if function in AS_FLOAT:
        return float(value)
    if function in AS_INT:
        return int(value)
    if function in AS_ARRAY:
        return numpy.array(value)
    if function in AS_TEXT:
        return format(value, *arguments) if function is T.__format__ and arguments else repr(torch.tensor(value))
    return value


def nested(numbers: torch.Tensor, shape: tuple, dtype: torch.dtype) -> Any:
    """Returns tolist() of a tensor of this shape and dtype, from its elements as float64."""
    return numbers.reshape(shape).to(dtype if not dtype.is_floating_point else torch.float64).tolist()
