"""An example of other sizes, so that nothing in its graph is specialised to 1, to the user's sizes, or to a size of the
module that happens to be equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

Dimensions = Mapping[str, Collection[int]]  # those of each field that differ between batches

PRIMES = [5, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73]


def generic(module: nn.Module, fields: dict[str, torch.Tensor], which: Dimensions) -> dict[str, torch.Tensor] | None:
    """Returns the fields with primes that are no size in the module, the same for those dimensions that are equal in
    the example. Returns None if there are too many."""
    taken = {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}
    free = iter(prime for prime in PRIMES if prime not in taken)
    size_of: dict[tuple[int, int], int] = {}
    result = {}
    for name, field in fields.items():
        for dim in which.get(name, ()):
            size = field.shape[dim]
            if size == 0:
                return None
            if (dim, size) not in size_of:
                if (prime := next(free, None)) is None:
                    return None
                size_of[dim, size] = prime
            field = field.index_select(dim, torch.arange(size_of[dim, size]) % size)
        result[name] = field
    return result


def dynamic_shapes(fields: Mapping[str, torch.Tensor], which: Dimensions) -> tuple:
    return ({name: dict.fromkeys(which.get(name, ()), torch.export.Dim.AUTO) for name in fields},)
