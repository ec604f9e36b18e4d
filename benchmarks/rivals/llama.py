"""The benchmark's LLaMa in plain PyTorch, with the layers that pytorch_pipeline.py trains.

The arithmetic is that of twobp's model: RMSNorm, rotary embedding (halves), causal fused attention and SwiGLU, without biases.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from work import Unit, make_embedding
from work import not_tied as tied, random_tokens as batch, tokens_of_sample as items  # noqa: F401

KEYS = {"dim": None, "layers": None, "heads": None, "hidden": None, "vocab": None, "init_std": 0.02}
VARIANTS = ("plain",)
CUTS = ("blocks", "halves")
NORM_EPS = 1e-5
ROPE_THETA = 10000.0


class AttentionHalf(nn.Module):
    """x + attention(norm(x))"""

    def __init__(self, dim, heads, sequence):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.query, self.key = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.value, self.output = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        half = dim // heads // 2
        frequency = ROPE_THETA ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(sequence, dtype=torch.float32)[:, None] * frequency[None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1)

    def forward(self, x):  # (batch, sequence, dim)
        batch, sequence, dim = x.shape
        h = self.norm(x)
        q, k, v = (linear(h).view(batch, sequence, self.heads, -1).transpose(1, 2)
                   for linear in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return x + self.output(a.transpose(1, 2).reshape(batch, sequence, dim))


class MlpHalf(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))"""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def make_block(dim, heads, hidden, sequence):
    return nn.Sequential(AttentionHalf(dim, heads, sequence), MlpHalf(dim, hidden))


def make_head(dim, vocab):
    return nn.Sequential(nn.RMSNorm(dim, eps=NORM_EPS), nn.Linear(dim, vocab, bias=False))


def units(work):
    sizes = work.model
    if work.cut_at == "blocks":
        block = [Unit("block", lambda: make_block(sizes.dim, sizes.heads, sizes.hidden, work.sequence))]
    else:
        block = [Unit("attention", lambda: AttentionHalf(sizes.dim, sizes.heads, work.sequence)),
                 Unit("mlp", lambda: MlpHalf(sizes.dim, sizes.hidden))]
    return [Unit("embedding", lambda: make_embedding(sizes.vocab, sizes.dim, sizes.init_std)), *block * sizes.layers,
            Unit("head", lambda: make_head(sizes.dim, sizes.vocab))]
