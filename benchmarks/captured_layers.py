#!/usr/bin/env python3
"""Trains a small module for each common class and function of torch.nn by twobp.Trainer, on 1 and 2 ranks, and prints a
table: the worst relative error of loss, gradients and buffers after one step against autograd, or the reason why the
module is refused. Dropout is compared by the dry run of capture alone, since the runtime draws other masks.

    PYTHONPATH=build/release/python benchmarks/captured_layers.py [NAME ...]
"""

import argparse
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import twobp

SAMPLES = 4  # of a micro-batch


class Do(nn.Module):
    """A module of a function of x."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class First(nn.Module):
    """The first of the results of a module, which takes x `times` times."""

    def __init__(self, inner, times=1, **options):
        super().__init__()
        self.inner, self.times, self.options = inner, times, options

    def forward(self, x):
        return self.inner(*[x] * self.times, **self.options)[0]


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


class Whole(nn.Module):
    """A linear layer on both sides of the inner module, whose input has the shape `shape` for a sample."""

    def __init__(self, inner, shape):
        super().__init__()
        self.first, self.shape, self.inner = nn.Linear(6, torch.Size(shape).numel()), shape, inner
        with torch.random.fork_rng(), torch.no_grad():
            width = inner.train()(torch.randn(SAMPLES, *shape)).flatten(1).shape[1]
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        return self.last(self.inner(self.first(x).unflatten(1, self.shape)).flatten(1))


def mse(output, batch):
    return F.mse_loss(output, batch["y"])


def rows(n=8):
    return (n,)


TEXT, IMAGE, VOLUME, LINE = (5, 8), (4, 6, 6), (2, 4, 4, 4), (4, 8)


def function(f, shape=TEXT):
    return lambda: Whole(Do(f), shape)


def layer(make, shape=TEXT):
    return lambda: Whole(make(), shape)


def ids(x, n=5):
    """Whole numbers that depend on x in shape alone."""
    return torch.arange(x.shape[-1]).expand(x.shape) % n


def mask(x):
    return (torch.arange(x.shape[-1]) % 3 == 0).expand(x.shape)


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(11, 6, mode=mode), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.bag((x.abs() * 3).long().clamp(max=10)))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, 5)

    def forward(self, x):
        return self.bilinear(x, torch.tanh(x))


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(8)), "b": nn.Parameter(torch.randn(8))})

    def forward(self, x):
        return x * self.table["a"] + self.table["b"]


def transformer():
    whole = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
    return Whole(Both(whole), TEXT)


class Both(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(
            x, x.flip(1), tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), tgt_is_causal=True
        )


def padding(x):
    return (torch.arange(x.shape[1]) > 3).expand(x.shape[:2])


class Padded(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x, x, key_padding_mask=padding(x))[0]


class Weights(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        output, weights = self.inner(x, x, x, need_weights=True, average_attn_weights=False)
        return torch.cat([output.flatten(1), weights.flatten(1)], 1)


def write_index(x):
    y = torch.zeros_like(x)
    y[:, [0, 2]] = x[:, [1, 1]]
    y[..., 0] += 1
    return y.index_put((torch.tensor([0, 1]), torch.tensor([1, 1])), x[:2, 0], accumulate=True)


def index_add(x):
    return x.index_add(1, torch.tensor([0, 0, 2]), x[:, 1:4])


def complex_numbers(x):
    return torch.fft.rfft(x).abs()


def loss_module(loss):
    """A module of a loss, whose target is batch["y"]."""

    def make():
        return Whole(nn.Identity(), rows(3)), loss

    return make


def classes(b):
    return (b["y"].sum(1) > 0).long()


def norm2(make):
    return lambda: Whole(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), make()), IMAGE)


LAYERS = {
    "Linear": layer(lambda: nn.Linear(8, 5)),
    "Bilinear": layer(TwoInputs),
    "Identity": layer(nn.Identity),
    "ParameterDict": layer(Parameters),
    "Embedding": function(lambda x: F.embedding(ids(x), torch.eye(5, 4)) + x.mean()),
    "EmbeddingBag mean": lambda: Bags("mean"),
    "EmbeddingBag sum": lambda: Bags("sum"),
    "EmbeddingBag max": lambda: Bags("max"),
    **{
        kind.__name__: layer(lambda kind=kind: kind(4, 3, 3, padding=1), shape)
        for kind, shape in (
            (nn.Conv1d, LINE),
            (nn.Conv2d, IMAGE),
            (nn.ConvTranspose1d, LINE),
            (nn.ConvTranspose2d, IMAGE),
        )
    },
    "Conv3d": layer(lambda: nn.Conv3d(2, 3, 3), VOLUME),
    "ConvTranspose3d": layer(lambda: nn.ConvTranspose3d(2, 3, 3, stride=2), VOLUME),
    "Conv2d groups, dilation, stride": layer(
        lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2, stride=2, padding=2), IMAGE
    ),
    "Conv2d circular, same": layer(lambda: nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular"), IMAGE),
    "Conv2d reflect": layer(lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
    **{
        f"{kind.__name__}": layer(lambda kind=kind: kind(2), shape)
        for kind, shape in (
            (nn.MaxPool1d, LINE),
            (nn.MaxPool2d, IMAGE),
            (nn.MaxPool3d, VOLUME),
            (nn.AvgPool1d, LINE),
            (nn.AvgPool2d, IMAGE),
            (nn.AvgPool3d, VOLUME),
            (nn.AdaptiveAvgPool1d, LINE),
            (nn.AdaptiveAvgPool2d, IMAGE),
            (nn.AdaptiveAvgPool3d, VOLUME),
            (nn.AdaptiveMaxPool1d, LINE),
            (nn.AdaptiveMaxPool2d, IMAGE),
            (nn.AdaptiveMaxPool3d, VOLUME),
        )
    },
    "LPPool1d": layer(lambda: nn.LPPool1d(2, 2), LINE),
    "LPPool2d": layer(lambda: nn.LPPool2d(2, 2), IMAGE),
    "FractionalMaxPool2d": layer(lambda: nn.FractionalMaxPool2d(2, output_size=3), IMAGE),
    "MaxUnpool2d": function(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), IMAGE),
    "BatchNorm1d": layer(lambda: nn.BatchNorm1d(8), rows()),
    "BatchNorm2d": norm2(lambda: nn.BatchNorm2d(4)),
    "BatchNorm3d": layer(lambda: nn.BatchNorm3d(2), VOLUME),
    "BatchNorm without statistics": norm2(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "BatchNorm cumulative": norm2(lambda: nn.BatchNorm2d(4, momentum=None)),
    "BatchNorm twice": layer(lambda: Twice(nn.BatchNorm1d(8)), rows()),
    "BatchNorm far apart": lambda: Whole(
        nn.Sequential(norm := nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), norm), rows()
    ),
    "InstanceNorm1d": layer(lambda: nn.InstanceNorm1d(4), LINE),
    "InstanceNorm2d": norm2(lambda: nn.InstanceNorm2d(4, affine=True)),
    "InstanceNorm2d with statistics": norm2(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "GroupNorm": norm2(lambda: nn.GroupNorm(2, 4)),
    "LayerNorm": layer(lambda: nn.LayerNorm(8)),
    "LayerNorm of 2 dimensions": layer(lambda: nn.LayerNorm([5, 8])),
    "RMSNorm": layer(lambda: nn.RMSNorm(8)),
    "LocalResponseNorm": layer(lambda: nn.LocalResponseNorm(3), IMAGE),
    "SyncBatchNorm": norm2(lambda: nn.SyncBatchNorm(4)),
    "Dropout": layer(lambda: nn.Dropout(0.3)),
    "Dropout inplace": layer(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True))),
    "Dropout(0)": layer(lambda: nn.Dropout(0.0)),
    "Dropout(1)": layer(lambda: nn.Sequential(nn.Dropout(1.0), nn.Linear(8, 8))),
    "Dropout1d": layer(lambda: nn.Dropout1d(0.3), LINE),
    "Dropout2d": layer(lambda: nn.Dropout2d(0.3), IMAGE),
    "Dropout3d": layer(lambda: nn.Dropout3d(0.3), VOLUME),
    "AlphaDropout": layer(lambda: nn.AlphaDropout(0.3)),
    "FeatureAlphaDropout": layer(lambda: nn.FeatureAlphaDropout(0.3), IMAGE),
    "dropout in evaluation too": function(lambda x: F.dropout(x, 0.3)),
    "spectral_norm": layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
    "spectral_norm, old": layer(lambda: nn.utils.spectral_norm(nn.Linear(8, 8))),
    "weight_norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    "weight_norm, old": layer(lambda: nn.utils.weight_norm(nn.Linear(8, 8))),
    "orthogonal": layer(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))),
    "MultiheadAttention": layer(lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3)),
    "MultiheadAttention, no weights": layer(
        lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3, need_weights=False)
    ),
    "MultiheadAttention, dropout": layer(
        lambda: First(nn.MultiheadAttention(8, 2, 0.2, batch_first=True), 3, need_weights=False)
    ),
    "MultiheadAttention, weights": layer(lambda: Weights(nn.MultiheadAttention(8, 2, batch_first=True))),
    "MultiheadAttention, padding": layer(lambda: Padded(nn.MultiheadAttention(8, 2, batch_first=True))),
    "MultiheadAttention, bias_kv": layer(
        lambda: Padded(nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True))
    ),
    "MultiheadAttention, causal": layer(
        lambda: First(
            nn.MultiheadAttention(8, 2, batch_first=True),
            3,
            need_weights=False,
            is_causal=True,
            attn_mask=nn.Transformer.generate_square_subsequent_mask(5),
        )
    ),
    "TransformerEncoderLayer": layer(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)),
    "TransformerEncoder": layer(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    ),
    "TransformerEncoder, norm first": layer(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=True), 2, enable_nested_tensor=False
        )
    ),
    "Transformer": transformer,
    "attention, dropout": function(
        lambda x: F.scaled_dot_product_attention(
            *[x.unflatten(2, (2, 4)).transpose(1, 2)] * 3, dropout_p=0.2, is_causal=True
        )
    ),
    "RNN": layer(lambda: First(nn.RNN(8, 6, batch_first=True))),
    "LSTM": layer(lambda: First(nn.LSTM(8, 6, 2, batch_first=True))),
    "LSTM, dropout": layer(lambda: First(nn.LSTM(8, 6, 2, dropout=0.2, batch_first=True))),
    "LSTM, projection": layer(lambda: First(nn.LSTM(8, 6, proj_size=3, batch_first=True))),
    "GRU": layer(lambda: First(nn.GRU(8, 6, bidirectional=True, batch_first=True))),
    "LSTMCell": layer(lambda: First(nn.LSTMCell(8, 8)), rows()),
    "GRUCell": layer(lambda: nn.GRUCell(8, 8), rows()),
    "RNNCell": layer(lambda: nn.RNNCell(8, 8), rows()),
    **{
        f"{kind.__name__}": layer(lambda kind=kind: kind())
        for kind in (
            nn.ReLU,
            nn.ReLU6,
            nn.LeakyReLU,
            nn.PReLU,
            nn.ELU,
            nn.SELU,
            nn.CELU,
            nn.GELU,
            nn.SiLU,
            nn.Mish,
            nn.Softplus,
            nn.Softsign,
            nn.Softshrink,
            nn.Hardshrink,
            nn.Hardtanh,
            nn.Hardsigmoid,
            nn.Hardswish,
            nn.Sigmoid,
            nn.LogSigmoid,
            nn.Tanh,
            nn.Tanhshrink,
        )
    },
    "RReLU": layer(nn.RReLU),
    "Threshold": layer(lambda: nn.Threshold(0.1, 0.2)),
    "GLU": layer(nn.GLU),
    "Softmax": layer(lambda: nn.Softmax(-1)),
    "Softmax2d": layer(nn.Softmax2d, IMAGE),
    "LogSoftmax": layer(lambda: nn.LogSoftmax(-1)),
    "Softmin": layer(lambda: nn.Softmin(-1)),
    "gumbel_softmax": function(lambda x: F.gumbel_softmax(x, hard=True)),
    "ReLU inplace": layer(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))),
    **{
        f"Upsample {mode}": layer(lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), shape)
        for mode, shape in (
            ("nearest", IMAGE),
            ("bilinear", IMAGE),
            ("bicubic", IMAGE),
            ("linear", LINE),
            ("trilinear", VOLUME),
        )
    },
    "interpolate to a size": function(
        lambda x: F.interpolate(x, (3, 4), mode="bilinear", align_corners=True, antialias=True), IMAGE
    ),
    "interpolate nearest-exact": function(lambda x: F.interpolate(x, (3, 4), mode="nearest-exact"), IMAGE),
    "interpolate of a volume": function(lambda x: F.interpolate(x, scale_factor=2), VOLUME),
    "interpolate area": function(lambda x: F.interpolate(x, 3, mode="area"), IMAGE),
    "PixelShuffle": layer(lambda: nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": layer(lambda: nn.PixelUnshuffle(2), IMAGE),
    "ChannelShuffle": layer(lambda: nn.ChannelShuffle(2), IMAGE),
    "Fold": layer(lambda: nn.Fold((3, 3), 2), (8, 4)),
    "Unfold": layer(lambda: nn.Unfold(2), IMAGE),
    "Flatten": layer(nn.Flatten),
    "Unflatten": layer(lambda: nn.Unflatten(2, (2, 4))),
    "pad": function(
        lambda x: F.pad(F.pad(F.pad(x, (1, 1), mode="reflect"), (1, 1), mode="replicate"), (1, 2), value=0.5)
    ),
    "ReflectionPad3d": layer(lambda: nn.ReflectionPad3d(1), VOLUME),
    "ReplicationPad3d": layer(lambda: nn.ReplicationPad3d(1), VOLUME),
    "CircularPad2d": layer(lambda: nn.CircularPad2d(1), IMAGE),
    "ZeroPad2d": layer(lambda: nn.ZeroPad2d(1), IMAGE),
    "grid_sample": function(
        lambda x: F.grid_sample(
            x, F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3) * 0.9, list(x.shape), False), align_corners=False
        ),
        IMAGE,
    ),
    "grid_sample of a volume": function(
        lambda x: F.grid_sample(
            x, F.affine_grid(torch.eye(3, 4).expand(len(x), 3, 4) * 0.9, list(x.shape), False), align_corners=False
        ),
        VOLUME,
    ),
    "einsum": function(lambda x: torch.einsum("bij,bkj->bik", x, x)),
    "baddbmm": function(lambda x: torch.baddbmm(x, x, x[:, :1].expand(-1, 8, -1))),
    "tensordot": function(lambda x: torch.tensordot(x, torch.ones(8, 3), 1)),
    "kron": function(lambda x: torch.kron(x, torch.ones(1, 1, 2))),
    "cumsum": function(lambda x: x.cumsum(1)),
    "cumprod": function(lambda x: x.cumprod(1)),
    "cummax": function(lambda x: x.cummax(1)[0]),
    "logcumsumexp": function(lambda x: x.logcumsumexp(1)),
    "sort": function(lambda x: x.sort(-1)[0]),
    "argsort": function(lambda x: x.gather(-1, x.argsort(-1))),
    "topk": function(lambda x: x.topk(3)[0]),
    "kthvalue": function(lambda x: x.kthvalue(2)[0]),
    "median": function(lambda x: x.median(-1)[0]),
    "mode": function(lambda x: x.mode(-1)[0]),
    "max of a dimension": function(lambda x: x.max(-1)[0]),
    "amax": function(lambda x: x.amax(-1)),
    "max of all": function(lambda x: x.max() + x),
    "quantile": function(lambda x: x.quantile(0.3, -1)),
    "gather": function(lambda x: x.gather(1, ids(x))),
    "take": function(lambda x: x.take(torch.arange(7)).sum() + x),
    "take_along_dim": function(lambda x: x.take_along_dim(ids(x), 1)),
    "scatter": function(lambda x: torch.zeros_like(x).scatter(1, ids(x), x)),
    "scatter_add": function(lambda x: torch.zeros_like(x).scatter_add(1, ids(x), x)),
    "scatter_reduce": function(lambda x: torch.zeros_like(x).scatter_reduce(1, ids(x), x, "mean")),
    "index_put": function(write_index),
    "index_add": function(index_add),
    "index_select": function(lambda x: x.index_select(1, torch.tensor([2, 0]))),
    "index_fill": function(lambda x: x.index_fill(1, torch.tensor([1]), 0.5)),
    "index of a mask": function(lambda x: x[mask(x)].sum() + x),
    "nonzero": function(lambda x: x[(x > 0).nonzero(as_tuple=True)].sum() + x),
    "bool mask of values": function(lambda x: x[x > 0].mean() + x),
    "where": function(lambda x: torch.where(x > 0, x, x * 2)),
    "masked_fill": function(lambda x: x.masked_fill(mask(x), -1)),
    "masked_scatter": function(lambda x: x.masked_scatter(mask(x), x * 2)),
    "masked_select": function(lambda x: x.masked_select(mask(x)).sum() + x),
    "roll": function(lambda x: x.roll(1, 1)),
    "flip": function(lambda x: x.flip(1)),
    "rot90": function(lambda x: x.rot90(1, (1, 2))),
    "unfold of a dimension": function(lambda x: x.unfold(1, 2, 1)),
    "cdist": function(lambda x: torch.cdist(x, x[:, :3] + 0.5)),
    "cdist of short rows": function(lambda x: torch.cdist(x, x[:, :3] + 0.5, p=1)),
    "pdist": function(lambda x: F.pdist(x.flatten(1)).sum() + x),
    "cosine_similarity": function(lambda x: F.cosine_similarity(x, x.flip(1), -1)),
    "pairwise_distance": function(lambda x: F.pairwise_distance(x, x.flip(1))),
    "normalize": function(lambda x: F.normalize(x, dim=-1)),
    "logsumexp": function(lambda x: x.logsumexp(-1)),
    "norm": function(lambda x: x.norm(dim=-1)),
    "vector_norm of 1": function(lambda x: torch.linalg.vector_norm(x, 1, -1)),
    "std and var": function(lambda x: x.std(-1) + x.var(-1)),
    "var_mean": function(lambda x: sum(torch.var_mean(x, -1))),
    "prod": function(lambda x: x.prod(-1)),
    "renorm": function(lambda x: x.renorm(2, 1, 0.5)),
    "clamp, clip": function(lambda x: x.clamp(-0.5, 0.5) + x.clip(min=0)),
    "lerp": function(lambda x: torch.lerp(x, x * 2, 0.3)),
    "addcmul": function(lambda x: torch.addcmul(x, x, x, value=0.5)),
    "powers": function(
        lambda x: x.abs().pow(1.5) + x.exp().log1p() + x.square().sqrt() + torch.rsqrt(x * x + 1) + x.expm1()
    ),
    "trigonometry": function(lambda x: x.sin() + x.cos().tan() + x.atan() + x.sinh() + torch.atan2(x, x + 3)),
    "special": function(
        lambda x: (
            x.erf() + torch.special.expit(x) + torch.sinc(x) + torch.lgamma(x.abs() + 1) + torch.digamma(x.abs() + 1)
        )
    ),
    "i0": function(lambda x: torch.special.i0(x)),
    "xlogy, entr": function(lambda x: torch.xlogy(x, x.abs() + 1) + torch.special.entr(x.abs() + 0.1)),
    "logit": function(lambda x: torch.logit(torch.sigmoid(x))),
    "hypot": function(lambda x: torch.hypot(x, x + 3)),
    "round, straight through": function(lambda x: x + (x.round() - x).detach()),
    "floor and remainder": function(lambda x: x.remainder(0.7) + x.floor() * 0 + torch.fmod(x, 0.5)),
    "sign": function(lambda x: x.sign() * x),
    "maximum": function(lambda x: torch.maximum(x, x.flip(1)) + torch.minimum(x, x * 2) + torch.fmax(x, x * 3)),
    "tril": function(lambda x: x.tril() + x.triu(1)),
    "diagonal": function(lambda x: x.diagonal(dim1=1, dim2=2)),
    "diag_embed": function(lambda x: torch.diag_embed(x)),
    "trace": function(lambda x: torch.einsum("bii->b", x[:, :, :5])[:, None] + x[:, 0]),
    "cross": function(lambda x: torch.linalg.cross(x[..., :3], x[..., 3:6])),
    "outer": function(lambda x: torch.outer(x[0, 0], x[0, 1]).sum() + x),
    "repeat_interleave": function(lambda x: x.repeat_interleave(2, 1)),
    "tile and repeat": function(lambda x: x.tile(2) + x.repeat(1, 1, 2)),
    "meshgrid": function(lambda x: sum(torch.meshgrid(x[0, 0], x[0, 1], indexing="ij")).sum() + x),
    "stack, chunk, cat": function(
        lambda x: torch.cat(x.chunk(2, -1), 1) + torch.stack(x.unbind(1), 2).flatten(1, 2)[:, :10, None] * 0
    ),
    "movedim, swapaxes": function(lambda x: x.movedim(1, 2).swapaxes(1, 2)),
    "one_hot": function(lambda x: F.one_hot(ids(x), 5) * x[..., None]),
    "bucketize": function(lambda x: x * torch.bucketize(x, torch.linspace(-1, 1, 5))),
    "searchsorted": function(lambda x: x * torch.searchsorted(torch.linspace(-1, 1, 5), x)),
    "histc": function(lambda x: torch.histc(x, 5).sum() * x),
    "linalg.inv": function(lambda x: torch.linalg.inv(x[:, :4, :4] + 5 * torch.eye(4))),
    "linalg.solve": function(lambda x: torch.linalg.solve(x[:, :4, :4] + 5 * torch.eye(4), x[:, :4, 4:])),
    "linalg.det": function(lambda x: torch.linalg.det(x[:, :4, :4] + 5 * torch.eye(4))[:, None] + x[:, 0]),
    "linalg.svd": function(lambda x: torch.linalg.svdvals(x)),
    "linalg.cholesky": function(lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(5))),
    "linalg.qr": function(lambda x: torch.linalg.qr(x.mT)[1]),
    "linalg.eigh": function(lambda x: torch.linalg.eigh(x @ x.mT)[0]),
    "matrix_exp": function(lambda x: torch.matrix_exp(x[:, :4, :4])),
    "complex numbers": function(complex_numbers),
    "stft": function(lambda x: torch.stft(x.flatten(1), 8, window=torch.hann_window(8), return_complex=True).abs()),
    "sparse": function(lambda x: torch.sparse.mm(torch.eye(5).to_sparse(), x[0]) + x),
    "noise": function(lambda x: x + 0.1 * torch.randn_like(x)),
    "bernoulli": function(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "float16 inside": function(lambda x: x.half().float()),
    "bfloat16 inside": function(lambda x: (x.bfloat16() * 2).float()),
    "autocast": function(lambda x: torch.autocast("cpu", torch.bfloat16)(torch.matmul)(x, x.mT).float()),
    "checkpoint": function(lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)),
    "lambdas in Sequential": layer(lambda: nn.Sequential(Do(lambda x: x * 2), nn.Linear(8, 8), Do(torch.tanh))),
    "channels_last": function(
        lambda x: F.conv2d(x.to(memory_format=torch.channels_last), torch.ones(4, 4, 3, 3)), IMAGE
    ),
    "vmap": function(lambda x: torch.vmap(lambda row: row * row.sum())(x)),
    "a loop": function(lambda x: sum(torch.tanh(x[:, i]) * 0.5**i for i in range(5))),
    "cosine_embedding_loss": loss_module(lambda o, b: F.cosine_embedding_loss(o, b["y"], torch.ones(len(o)))),
    "mse_loss": loss_module(mse),
    "l1_loss": loss_module(lambda o, b: F.l1_loss(o, b["y"])),
    "smooth_l1_loss": loss_module(lambda o, b: F.smooth_l1_loss(o, b["y"])),
    "huber_loss": loss_module(lambda o, b: F.huber_loss(o, b["y"])),
    "kl_div batchmean": loss_module(
        lambda o, b: F.kl_div(o.log_softmax(-1), b["y"].softmax(-1), reduction="batchmean")
    ),
    "kl_div mean": loss_module(lambda o, b: F.kl_div(o.log_softmax(-1), b["y"].softmax(-1))),
    "bce": loss_module(lambda o, b: F.binary_cross_entropy(o.sigmoid(), b["y"].sigmoid())),
    "bce with logits": loss_module(lambda o, b: F.binary_cross_entropy_with_logits(o, b["y"].sigmoid())),
    "nll_loss": loss_module(lambda o, b: F.nll_loss(o.log_softmax(-1), classes(b))),
    "cross_entropy": loss_module(lambda o, b: F.cross_entropy(o, classes(b))),
    "cross_entropy, smoothing": loss_module(lambda o, b: F.cross_entropy(o, classes(b), label_smoothing=0.1)),
    "cross_entropy, weights": loss_module(
        lambda o, b: F.cross_entropy(o, classes(b), weight=torch.tensor([1.0, 2.0, 3.0]))
    ),
    "cross_entropy, probabilities": loss_module(lambda o, b: F.cross_entropy(o, b["y"].softmax(-1))),
    "poisson_nll": loss_module(lambda o, b: F.poisson_nll_loss(o, b["y"].abs())),
    "gaussian_nll": loss_module(lambda o, b: F.gaussian_nll_loss(o, b["y"], torch.ones_like(o))),
    "soft_margin_loss": loss_module(lambda o, b: F.soft_margin_loss(o, b["y"].sign())),
    "hinge_embedding_loss": loss_module(lambda o, b: F.hinge_embedding_loss(o, b["y"].sign())),
    "margin_ranking_loss": loss_module(lambda o, b: F.margin_ranking_loss(o, b["y"], torch.ones(len(o), 3))),
    "triplet_margin_loss": loss_module(lambda o, b: F.triplet_margin_loss(o, b["y"], b["y"].flip(1))),
    "multi_margin_loss": loss_module(lambda o, b: F.multi_margin_loss(o, classes(b))),
    "multilabel_soft_margin_loss": loss_module(lambda o, b: F.multilabel_soft_margin_loss(o, b["y"].gt(0).float())),
    "ctc_loss": loss_module(
        lambda o, b: F.ctc_loss(
            o.log_softmax(-1)[:, None].expand(-1, 1, -1), torch.ones(1, 2, dtype=torch.long), (4,), (2,)
        )
    ),
    "mean of squares": loss_module(lambda o, b: (o - b["y"]).pow(2).mean()),
    "root of the mean": loss_module(lambda o, b: F.mse_loss(o, b["y"]).sqrt()),
    "float64": lambda: Whole(nn.Linear(8, 5), TEXT).double(),
}


def batch(dtype):
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(2 * SAMPLES, width, generator=generator).to(dtype) for name, width in (("x", 6), ("y", 3))
    }


def difference(found, wanted, least=0.0):
    return ((found.double() - wanted.double()).norm() / max(wanted.double().norm().item(), least, 1e-12)).item()


def error_of(make) -> float:
    """The worst relative error against autograd, of 1 and 2 ranks; they must have the same bits. Raises twobp.Error if
    the module is refused."""
    torch.manual_seed(0)
    made = make()
    module, loss = made if isinstance(made, tuple) else (made, mse)
    module.train()
    dtype = next(module.parameters()).dtype
    fields = batch(dtype)
    example = {name: tensor[:SAMPLES] for name, tensor in fields.items()}
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    results = []
    for ranks in (1, 2):
        trainer = twobp.Trainer(
            module,
            example,
            loss_fn=loss,
            ranks=ranks,
            micro_batches=2,
            threads=1,
            optimizer=twobp.SGD(lr=1.0),
            cache=False,
        )
        results.append((trainer.step(fields).loss, trainer.state_dict()))
        captured = trainer._captured
    assert results[0][0] == results[1][0] and all(
        torch.equal(one, results[1][1][name]) for name, one in results[0][1].items()
    ), "1 and 2 ranks differ in bits"
    dry = captured.dry_runs[0]
    worst = max(dry.loss, dry.gradients, dry.buffers, dry.evaluation)
    if any(
        "random" in argument
        for shape in captured.graph["shapes"]
        for program in shape["programs"]
        for step in program["forward"]
        for argument in step["args"]
        if isinstance(argument, dict)
    ):
        return worst
    expected = 0.0
    for start in (0, SAMPLES):
        part = {name: tensor[start : start + SAMPLES] for name, tensor in fields.items()}
        one = loss(module(part["x"]), part) / 2
        one.backward()
        expected += one.item()
    largest = max((p.grad.norm().item() for p in module.parameters() if p.grad is not None), default=0.0)
    parameters = dict(module.named_parameters())
    worst = max(worst, abs(results[0][0] - expected) / abs(expected))
    for name, tensor in results[0][1].items():
        if name not in parameters:
            worst = max(worst, difference(tensor, module.state_dict()[name]))
        elif parameters[name].grad is not None:  # a difference of weights has the weight's rounding
            worst = max(
                worst,
                difference(
                    before[name] - tensor, parameters[name].grad, before[name].norm().item() * 1e-1 + largest * 1e-3
                ),
            )
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = {name: make for name, make in LAYERS.items() if not options.names or name in options.names}
    counts = {"trained": 0, "refused": 0, "failed": 0}
    for name, make in chosen.items():
        start = time.time()
        try:
            error = error_of(make)
            kind, text = ("trained", f"{error:.1e}") if error < 1e-5 else ("failed", f"wrong: {error:.1e}")
        except twobp.Error as reason:
            kind, text = "refused", f"refused: {' '.join(str(reason).split())}"
        except Exception as reason:  # a table of all, whatever happens to one
            kind, text = "failed", f"{type(reason).__name__}: {' '.join(str(reason).split())}"
        counts[kind] += 1
        print(f"| {name:<32} | {time.time() - start:4.1f} | {text}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    main()
