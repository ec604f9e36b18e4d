"""The benchmark's Mamba in plain PyTorch. Layers and parameters are those of transformers' MambaForCausalLM.

The selective scan is h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t], y[t] = C[t] . h[t]. It has three variants:
    chunked       a few positions at a time, so that the (batch, position, channel, state) tensors stay in the cache
    loop          first the coefficients of all positions, then position by position, as transformers does without its kernels
    transformers  MambaForCausalLM itself, in one piece (one stage only)
"""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from work import Unit, make_embedding, random_tokens, tied_weight
from work import tokens_of_sample as items  # noqa: F401

KEYS = {"dim": None, "layers": None, "vocab": None, "state": 16, "conv_kernel": 4, "expand": 2, "dt_rank": 0,
        "norm_eps": 1e-5, "tied": False, "init_std": 0.02}
VARIANTS = ("chunked", "loop", "transformers")
CUTS = ("blocks",)
CHUNK = 8  # positions; the fastest value from 4 to 256
DT_MIN, DT_MAX = 1e-3, 0.1


def rank_of_dt(sizes):
    return sizes.dt_rank or math.ceil(sizes.dim / 16)


def scan_loop(x, dt, a, b, c):
    """x, dt (batch, sequence, channels); a (channels, state); b, c (batch, sequence, state)"""
    decay = torch.exp(dt[..., None] * a)
    drive = (dt * x)[..., None] * b[:, :, None]
    state, outputs = torch.zeros_like(decay[:, 0]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + drive[:, t]
        outputs.append((state @ c[:, t, :, None])[..., 0])
    return torch.stack(outputs, 1)


def scan_chunked(x, dt, a, b, c):
    state, outputs = x.new_zeros(x.shape[0], *a.shape), []
    for x_, dt_, b_, c_ in zip(*(t.split(CHUNK, 1) for t in (x, dt, b, c))):
        decay = torch.exp(dt_[..., None] * a)
        drive = (dt_ * x_)[..., None] * b_[:, :, None]
        states = []
        for decay_t, drive_t in zip(decay.unbind(1), drive.unbind(1)):
            state = torch.addcmul(drive_t, decay_t, state)
            states.append(state)
        outputs.append((torch.stack(states, 1) @ c_[..., None])[..., 0])
    return torch.cat(outputs, 1)


class Block(nn.Module):
    """x + mixer(norm(x))"""

    def __init__(self, sizes, scan):
        super().__init__()
        inner, rank = sizes.expand * sizes.dim, rank_of_dt(sizes)
        self.sizes, self.scan = (rank, sizes.state, sizes.state), scan
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.in_proj = nn.Linear(sizes.dim, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, sizes.conv_kernel, groups=inner, padding=sizes.conv_kernel - 1)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, sizes.state + 1).float().log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, sizes.dim, bias=False)
        dt = torch.exp(torch.rand(inner) * math.log(DT_MAX / DT_MIN) + math.log(DT_MIN))
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, h):  # (batch, sequence, dim)
        x, z = self.in_proj(self.norm(h)).chunk(2, -1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :h.shape[1]]).transpose(1, 2)
        dt, b, c = self.x_proj(x).split(self.sizes, -1)
        y = self.scan(x, F.softplus(self.dt_proj(dt)), -torch.exp(self.A_log), b, c) + self.D * x
        return h + self.out_proj(y * F.silu(z))


def make_tokens(work):
    embedding = make_embedding(work.model.vocab, work.model.dim, work.model.init_std)
    if work.model.tied:
        embedding.weight = nn.Parameter(tied_weight(work))
    return embedding


class Head(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.norm = nn.RMSNorm(work.model.dim, eps=work.model.norm_eps)
        self.decoder = nn.Linear(work.model.dim, work.model.vocab, bias=False)
        if work.model.tied:
            self.decoder.weight = nn.Parameter(tied_weight(work))

    def forward(self, h):
        return self.decoder(self.norm(h))


class Transformers(nn.Module):
    """MambaForCausalLM with the same sizes. Without its GPU kernels it falls back to the loop."""

    def __init__(self, sizes):
        super().__init__()
        os.environ["HF_HUB_OFFLINE"] = "1"  # otherwise it would look for kernels
        import transformers
        self.model = transformers.MambaForCausalLM(transformers.MambaConfig(
            vocab_size=sizes.vocab, hidden_size=sizes.dim, num_hidden_layers=sizes.layers, state_size=sizes.state,
            expand=sizes.expand, conv_kernel=sizes.conv_kernel, time_step_rank=rank_of_dt(sizes),
            layer_norm_epsilon=sizes.norm_eps, tie_word_embeddings=sizes.tied, use_cache=False))

    def forward(self, ids):
        return self.model(input_ids=ids).logits


def units(work):
    sizes = work.model
    if work.variant == "transformers":
        return [Unit("model", lambda: Transformers(sizes))]
    scan = scan_loop if work.variant == "loop" else scan_chunked
    return [Unit("embedding", lambda: make_tokens(work)), *[Unit("block", lambda: Block(sizes, scan))] * sizes.layers,
            Unit("head", lambda: Head(work))]


def batch(work, samples, generator):
    return random_tokens(work, samples, generator)


def tied(work):
    own = work.model.tied and work.variant != "transformers"
    return ((0, "weight"), (-1, "decoder.weight")) if own else None
