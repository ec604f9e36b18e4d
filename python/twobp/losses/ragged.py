"""x[mask] in a program. Its size depends on values, so all elements stay, beside the mask, until sum, mean, min or max
reduces them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from twobp.capture import symbols
from twobp.capture.errors import CaptureError, current_line

T = torch.Tensor


def _named(names: str) -> set:
    return {f for name in names.split() for place in (T, torch, functional) if (f := getattr(place, name, None))}


SUMS, MEANS, NANSUMS, NANMEANS = _named("sum"), _named("mean"), _named("nansum"), _named("nanmean")
LEAST = {**dict.fromkeys(_named("max amax"), -torch.inf), **dict.fromkeys(_named("min amin"), torch.inf)}
ELEMENTWISE = _named(
    "abs neg exp log log1p sigmoid relu tanh detach float double long int bool add sub mul div pow square clamp to "
    "sqrt logsigmoid softplus isnan isfinite logical_not __neg__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __pow__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
)
ANY_SIZE = {T.dim, T.dim.__get__ if hasattr(T.dim, "__get__") else None, T.dtype.__get__, T.device.__get__}  # type: ignore[attr-defined]


class Ragged:
    """The tensors that have all elements in place of some."""

    def __init__(self):
        self._masks: dict[int, tuple[T, T]] = {}  # by id of the tensor, which is kept

    def mask_of(self, tree: Any) -> T | None:
        found = [self._masks[id(one)][0] for one in pytree.tree_leaves(tree) if id(one) in self._masks]
        if any(one is not found[0] for one in found):
            raise _refusal("it combines two of them")
        return found[0] if found else None

    def choose(self, x: T, mask: T) -> T:
        """Returns x[mask]."""
        result = x.clone()
        self._masks[id(result)] = (mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim())).expand(x.shape), result)
        return result

    def call(self, function, mask: T, args: tuple, kwargs: dict) -> Any:
        """Calls a function of which some arguments have this mask."""
        if function in ANY_SIZE:
            return function(*args, **kwargs)
        if len(args) == 1 and not kwargs:
            x = args[0]
            if function in LEAST:
                return function(torch.where(mask, x, LEAST[function]))
            counted = mask & ~torch.isnan(x) if function in NANSUMS | NANMEANS else mask
            if function in SUMS | NANSUMS:
                return torch.where(counted, x, 0).sum()
            if function in MEANS | NANMEANS:
                return torch.where(counted, x, 0).sum() / counted.sum()
        if function in ELEMENTWISE:
            result = function(*args, **kwargs)
            if isinstance(result, T) and symbols.same(result.shape, mask.shape):
                self._masks[id(result)] = (mask, result)
                return result
        raise _refusal(f"{getattr(function, '__name__', function)} needs it")


def _refusal(why: str) -> CaptureError:
    return CaptureError(
        f"the number of elements of x[mask] depends on values, and {why}{current_line()}. Keep all elements, and "
        "choose by a mask: (x * mask).sum() / mask.sum()"
    )
