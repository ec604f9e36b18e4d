"""An example of other sizes, so that nothing in its graph is specialised to 1, to the user's sizes, or to a size of the
module that happens to be equal."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import nn

Dimensions = Mapping[str, Collection[int]]  # those of each field that differ between batches

MOST_SAMPLES = 64  # of an example
PRIMES = [5, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73]


def generic(module: nn.Module, fields: dict[str, torch.Tensor], which: Dimensions) -> dict[str, torch.Tensor] | None:
    """Returns the fields with primes that are no size in the module, the same for those dimensions that are equal in
    the example. Numbers of samples keep their ratios, and whether all are even: a pair may be two rows. Returns None if
    there are too many."""
    taken = {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}
    free = iter(prime for prime in PRIMES if prime not in taken)
    size_of: dict[tuple[int, int], int] = {}
    samples = {fields[name].shape[0] for name in fields if 0 in which.get(name, ())} - {0}
    unit = math.gcd(*samples)
    for base in PRIMES:
        sizes = {one: one // unit * (base if unit % 2 else 2 * base) for one in samples}
        if samples and max(sizes.values()) <= MOST_SAMPLES and not taken & {*sizes.values()}:
            size_of = {(0, one): size for one, size in sizes.items()}
            free = iter(prime for prime in PRIMES if prime not in {*taken, *sizes.values(), base})
            break
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
