"""Some functions of torch hide from export that they drop numbers or write into a buffer. Programs need to see this.
While a module is exported, the parts of these functions are called instead."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import current_line
from .from_fields import FromFields, NothingKnown


def drop(x: torch.Tensor, p: float, shape: torch.Size) -> torch.Tensor:
    """Returns x with a mask of `shape`, which drops whole channels."""
    return x * functional.dropout(x.new_ones(shape), p, True)


def dropout_in_place(x, p, train):
    return x.copy_(functional.dropout(x, p, True)) if train and p > 0 else x


def feature_dropout(x, p, train):
    return drop(x, p, torch.Size([*x.shape[:2], *[1] * (x.dim() - 2)])) if train and p > 0 else x


def feature_dropout_in_place(x, p, train):
    return x.copy_(feature_dropout(x, p, train)) if train and p > 0 else x


def instance_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    """Computes BatchNorm of a batch of one sample. It has a channel for each channel of each sample."""
    samples, channels = x.shape[:2]
    own = [None if one is None else one.repeat(samples) for one in (running_mean, running_var, weight, bias)]
    y = functional.batch_norm(x.reshape(1, samples * channels, *x.shape[2:]), *own, use_input_stats, momentum, eps)
    if use_input_stats and running_mean is not None:
        for buffer, changed in zip((running_mean, running_var), own):
            buffer.copy_(changed.view(samples, channels).mean(0))
    return y.view_as(x)


def embedding_bag(
    input,
    weight,
    offsets=None,
    max_norm=None,
    norm_type=2,
    scale_grad_by_freq=False,
    mode="mean",
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=None,
):
    """Handles bags of one size, each a row of `input`. Other bags depend on values of tensors."""
    if input.dim() != 2 or max_norm is not None or scale_grad_by_freq or sparse or padding_idx is not None:
        return functional.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    rows = functional.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return {"sum": lambda: rows.sum(1), "mean": lambda: rows.mean(1), "max": lambda: rows.max(1)[0]}[mode]()


def bilinear(x, y, weight, bias=None):
    """Computes a product of the pairs of numbers with a matrix."""
    return functional.linear((x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2), weight.flatten(1), bias)


def recurrent(function, x, state, weights, bias, layers, dropout, train, both_ways, batch_first):
    """Runs layer by layer, with dropout between layers."""
    if not train or dropout == 0 or layers == 1:
        return function(x, state, weights, bias, layers, dropout, train, both_ways, batch_first)
    states, per_layer, ways = (
        state if isinstance(state, (tuple, list)) else (state,),
        len(weights) // layers,
        2 if both_ways else 1,
    )
    if batch_first:  # the order in which torch draws
        x = x.transpose(0, 1)
    last = []
    for i in range(layers):
        own = [one[i * ways : (i + 1) * ways] for one in states]
        x, *after = function(
            x if i == 0 else functional.dropout(x, dropout, True),
            own if isinstance(state, (tuple, list)) else own[0],
            weights[i * per_layer : (i + 1) * per_layer],
            bias,
            1,
            0.0,
            train,
            both_ways,
            False,
        )
        last.append(after)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(one) for one in zip(*last)))


def nansum(x, dim=None, keepdim=False, *, dtype=None):
    kept = torch.where(torch.isnan(x), 0, x)
    return kept.sum(dtype=dtype) if dim is None else kept.sum(dim, keepdim, dtype=dtype)


def nanmean(x, dim=None, keepdim=False, *, dtype=None):
    return nansum(x, dim, keepdim, dtype=dtype) / nansum(torch.isnan(x).logical_not(), dim, keepdim)


def uniform(x, low=0.0, high=1.0, *, generator=None):
    return x.copy_(torch.rand_like(x) * (high - low) + low)


def functional_dropout(whole):
    """Returns torch.nn.functional's form of a dropout that drops single numbers or, with `whole` dimensions of a batch,
    channels."""

    def call(x, p=0.5, training=True, inplace=False):
        if whole is None and not inplace or not 0 <= p <= 1:
            return functional.dropout(x, p, training)
        if whole is None:
            return dropout_in_place(x, p, training)
        y = (
            feature_dropout(x.unsqueeze(0), p, training).squeeze(0)
            if x.dim() < whole
            else feature_dropout(x, p, training)
        )
        return x.copy_(y) if inplace and y is not x else y

    return call


PARTS = {
    functional.dropout: functional_dropout(None),
    functional.dropout1d: functional_dropout(3),
    functional.dropout2d: functional_dropout(3),
    functional.dropout3d: functional_dropout(5),
    torch.dropout_: dropout_in_place,
    torch.feature_dropout: feature_dropout,
    torch.feature_dropout_: feature_dropout_in_place,
    functional.instance_norm: instance_norm,
    functional.embedding_bag: embedding_bag,
    functional.bilinear: bilinear,
    torch.bilinear: bilinear,
    torch.Tensor.uniform_: uniform,
    torch.nansum: nansum,
    torch.Tensor.nansum: nansum,
    torch.nanmean: nanmean,
    torch.Tensor.nanmean: nanmean,
}
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class InParts(TorchFunctionMode):
    """`fixed`: the programs are for one shape, so that values of fields and of sizes may decide sizes and branches."""

    def __init__(self, fields: dict[str, torch.Tensor], fixed: bool = True):
        super().__init__()
        self.known = FromFields(fields) if fixed else NothingKnown()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            function is torch.Tensor.__getitem__
            and isinstance(args[1], torch.Tensor)
            and args[1].dtype == torch.bool
            and (chosen := self.known.chosen(*args)) is not None
        ):
            return chosen
        if (
            function is torch.Tensor.item and (number := self.known.number(args[0])) is not None
        ):  # tolist() calls it, too
            return number
        if function is torch.Tensor.__bool__ and (truth := self.known.truth(args[0])) is not None:
            return truth
        if function in PARTS:
            return PARTS[function](*args, **kwargs)
        if function in RECURRENT and len(args) == 9 and isinstance(args[4], int):  # another form takes packed sequences
            return recurrent(function, *args)
        return function(*args, **kwargs)


@contextlib.contextmanager
def keeping_assertions():
    """torch makes a number of an assertion about a tensor. This keeps the tensor."""
    thread, before = threading.get_ident(), torch._check_tensor_all_with

    def check(error_type, condition, message=None):
        if threading.get_ident() != thread:
            return before(error_type, condition, message)
        return torch.ops.aten._assert_async.msg(
            condition.all(), f"its fields do not pass a check of the module{current_line()}"
        )

    torch._check_tensor_all_with = check
    try:
        yield
    finally:
        torch._check_tensor_all_with = before
