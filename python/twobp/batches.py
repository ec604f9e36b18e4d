"""Batches are dicts of tensors. This module checks them and cuts them into micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twobp import checks
from twobp._native import Error

Batch = Mapping[str, torch.Tensor]
Tensors = torch.Tensor | Sequence[torch.Tensor]  # a positional batch, as from a DataLoader of a TensorDataset


def is_positional(batch: object) -> bool:
    return (
        isinstance(batch, torch.Tensor)
        or isinstance(batch, (tuple, list))
        and len(batch) > 0
        and all(isinstance(one, torch.Tensor) for one in batch)
    )


def named(module: torch.nn.Module, batch: Any, error: type[Error] = Error) -> Any:
    """Returns a positional batch as a dict. Its tensors get the names of the parameters of the module's forward. One
    additional tensor, such as the labels, becomes "target" for loss_fn. Any other batch is returned unchanged."""
    if not is_positional(batch):
        return batch
    tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: len(tensors)]
    if len(tensors) == len(names) + 1:
        names.append("target")
    if len(tensors) != len(names):
        raise error(
            f"the batch has {len(tensors)} tensors, but the module's forward takes {len(names)}. Name them: give the "
            "batch as a dict"
        )
    return dict(zip(names, tensors))


def too_long(module: torch.nn.Module | None, parts: Sequence[Batch]) -> str:
    """Returns what to do about sequences that are longer than the positions of a model, or '' if there are none."""
    modules = list(module.modules()) if module is not None else []
    configs = [getattr(one, "config", None) for one in modules]
    most = next((n for n in (getattr(one, "max_position_embeddings", None) for one in configs) if n), None)
    lengths = [one.shape[1] for part in parts for one in part.values() if one.dim() == 2 and one.dtype == torch.int64]
    if not isinstance(most, int):
        return ""
    tables = [one for one in modules if isinstance(one, torch.nn.Embedding) and one.num_embeddings == most]
    most -= max((1 + one.padding_idx for one in tables if one.padding_idx is not None), default=0)  # as of RoBERTa
    if max(lengths, default=0) <= most:
        return ""
    return (
        f". The batch has sequences of {max(lengths)} positions, and the model takes {most} "
        f"(config.max_position_embeddings): cut them, as a tokenizer does with truncation=True, max_length={most}"
    )


def samples_of(fields: Batch) -> int:
    """Returns the number of samples: that of the first tensor with dimensions."""
    return next((tensor.shape[0] for tensor in fields.values() if tensor.dim()), 0)


def check_fields(batch: Batch, what: str, *, is_cut: bool = True) -> dict[str, torch.Tensor]:
    """Returns the tensors of a batch, contiguous and without autograd. Raises Error unless the first has samples, and
    all have the same number of them. A micro-batch that `is_cut` may have others. Scalars belong to all samples."""
    if not isinstance(batch, Mapping):
        raise Error(f"{what} is a {type(batch).__name__}, but must be a dict of tensors, with at least one")
    with checks.readable(what):
        given = dict(batch)
    if not given:
        raise Error(f"{what} is empty, but must be a dict of tensors, with at least one")
    fields = {}
    for name, tensor in given.items():
        if not isinstance(name, str):
            raise Error(
                f"{what} has the key {name!r}, but its keys must be names: those of forward's arguments, and of what "
                "loss_fn reads"
            )
        if not isinstance(tensor, torch.Tensor):
            raise Error(f"{what}: {name!r} is a {type(tensor).__name__}, but must be a tensor")
        checks.check_dense(tensor, f"{what}: {name!r}")
        fields[name] = tensor.detach().contiguous()
    counts = {name: tensor.shape[0] for name, tensor in fields.items() if tensor.dim()}
    if not counts or samples_of(fields) == 0:
        name = next(iter(counts), next(iter(fields)))
        raise Error(
            f"{what}: {name!r} has shape {list(fields[name].shape)}, but its first dimension must be the samples"
        )
    if not is_cut and len(set(counts.values())) > 1:
        raise Error(
            f"{what} has different numbers of samples: {counts}. Give a list of micro-batches, whose tensors may have "
            "other numbers of rows"
        )
    return fields


def check_like(fields: Batch, example: Batch, what: str, *, any_sizes: bool) -> None:
    """Raises Error unless `fields` has the keys and dtypes of `example` and, unless `any_sizes`, the same sizes of a
    sample."""
    if fields.keys() != example.keys():
        raise Error(f"{what} has the keys {sorted(fields)}, but the trainer was made with {sorted(example)}")
    for name, tensor in fields.items():
        if tensor.dtype != example[name].dtype:
            raise Error(f"{what}: {name!r} is {tensor.dtype}, but the trainer was made with {example[name].dtype}")
        if tensor.dim() == 0 < example[name].dim():
            raise Error(f"{what}: {name!r} has shape [], but its first dimension must be the samples")
        if not any_sizes and tensor.shape[1:] != example[name].shape[1:]:
            raise Error(
                f"{what}: a sample of {name!r} has shape {list(tensor.shape[1:])}, but the trainer was made with "
                f"{list(example[name].shape[1:])}"
            )


def check_tokens(fields: Batch, what: str, most: int | None) -> None:
    """Raises Error unless all fields are (samples, positions), with at most `most` positions."""
    shapes = {name: tuple(tensor.shape) for name, tensor in fields.items()}
    _, *positions = shapes["input_ids"]
    if len(positions) != 1 or positions[0] == 0 or set(shapes.values()) != {shapes["input_ids"]}:
        raise Error(f"{what} has fields of the shapes {shapes}, but all must be (samples, positions), as 'input_ids'")
    if most and positions[0] > most:
        raise Error(f"{what} has sequences of {positions[0]} positions, but the model has {most}: shorten them")


def cut(
    batch: Batch | Sequence[Batch], example: Batch, micro_batches: int, *, any_sizes: bool
) -> list[dict[str, torch.Tensor]]:
    """Returns the micro-batches of a batch. A list is already cut. The last batch of an epoch may have fewer samples
    than `micro_batches` times the example's. Then its last micro-batch is smaller."""
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        with checks.readable("the batch"):
            given = list(batch)
        parts = [check_fields(part, f"micro-batch {i}") for i, part in enumerate(given)]
        if not 1 <= len(parts) <= micro_batches:
            raise Error(f"the batch is a list of {len(parts)} micro-batches, but a step has {micro_batches}")
        for i, part in enumerate(parts):
            check_like(part, example, f"micro-batch {i}", any_sizes=any_sizes)
        return parts
    fields = check_fields(batch, "the batch", is_cut=False)
    check_like(fields, example, "the batch", any_sizes=any_sizes)
    size, samples = samples_of(example), samples_of(fields)
    if samples > size * micro_batches:
        raise Error(
            f"the batch has {samples} samples, but a step has {micro_batches} micro-batches of {size}: give at most "
            f"{size * micro_batches}"
        )
    return [
        {name: tensor[begin : begin + size] if tensor.dim() else tensor for name, tensor in fields.items()}
        for begin in range(0, samples, size)
    ]


def with_a_target(fields: Batch) -> Batch:
    """Returns the fields with other labels if none counts. Their loss would be 0 / 0, and capture compares losses. It
    reads no values."""
    labels = fields.get("labels")
    if labels is None or labels.is_floating_point() or not (labels == -100).all():
        return fields
    return {**fields, "labels": torch.zeros_like(labels)}
