"""The benchmark's BERT in plain PyTorch: a post-norm encoder, a masked-language-model head, and a decoder tied to the embedding.

Layers and parameters are those of transformers' BertForMaskedLM. There are two variants. With `counted` the head sees only the predicted positions, as in twobp. With
`all` it sees every position, as in transformers.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from work import IGNORED, Unit, WantsLabels, make_embedding, random_tokens, tied_weight
from work import tokens_of_sample as items  # noqa: F401

KEYS = {"dim": None, "layers": None, "heads": None, "hidden": None, "vocab": None, "positions": 512, "token_types": 2,
        "activation": "gelu", "dropout": 0.0, "attention_dropout": 0.0, "norm_eps": 1e-5, "tied": False, "init_std": 0.02}
VARIANTS = ("counted", "all")
CUTS = ("blocks", "halves")


class Embeddings(nn.Module):
    def __init__(self, work):
        super().__init__()
        sizes = work.model
        self.tokens = make_embedding(sizes.vocab, sizes.dim, sizes.init_std)
        if sizes.tied:
            self.tokens.weight = nn.Parameter(tied_weight(work))
        self.positions = make_embedding(sizes.positions, sizes.dim, sizes.init_std)
        self.token_types = make_embedding(sizes.token_types, sizes.dim, sizes.init_std)
        self.norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, ids):  # (batch, sequence)
        positions = torch.arange(ids.shape[1])
        h = self.tokens(ids) + self.positions(positions) + self.token_types(torch.zeros_like(ids))
        return self.dropout(self.norm(h))


class AttentionHalf(nn.Module):
    """norm(x + attention(x))"""

    def __init__(self, sizes):
        super().__init__()
        self.heads, self.attention_dropout = sizes.heads, sizes.attention_dropout
        self.query, self.key, self.value, self.output = (nn.Linear(sizes.dim, sizes.dim) for _ in range(4))
        self.norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x):  # (batch, sequence, dim)
        batch, sequence, dim = x.shape
        q, k, v = (linear(x).view(batch, sequence, self.heads, -1).transpose(1, 2)
                   for linear in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout if self.training else 0.0)
        return self.norm(x + self.dropout(self.output(a.transpose(1, 2).reshape(batch, sequence, dim))))


class MlpHalf(nn.Module):
    """norm(x + down(gelu(up(x))))"""

    def __init__(self, sizes):
        super().__init__()
        self.up, self.down = nn.Linear(sizes.dim, sizes.hidden), nn.Linear(sizes.hidden, sizes.dim)
        self.activation = nn.GELU("tanh" if sizes.activation == "gelu_tanh" else "none")
        self.norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x):
        return self.norm(x + self.dropout(self.down(self.activation(self.up(x)))))


class Head(WantsLabels):
    def __init__(self, work):
        super().__init__()
        sizes, self.counted = work.model, work.variant == "counted"
        self.transform = nn.Linear(sizes.dim, sizes.dim)
        self.activation = nn.GELU("tanh" if sizes.activation == "gelu_tanh" else "none")
        self.norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.decoder = nn.Linear(sizes.dim, sizes.vocab)
        if sizes.tied:
            self.decoder.weight = nn.Parameter(tied_weight(work))

    def forward(self, x, labels):
        if self.counted:
            x = x[labels != IGNORED]
        return self.decoder(self.norm(self.activation(self.transform(x))))


def units(work):
    sizes = work.model
    if work.cut_at == "blocks":
        block = [Unit("block", lambda: nn.Sequential(AttentionHalf(sizes), MlpHalf(sizes)))]
    else:
        block = [Unit("attention", lambda: AttentionHalf(sizes)), Unit("mlp", lambda: MlpHalf(sizes))]
    return [Unit("embeddings", lambda: Embeddings(work)), *block * sizes.layers, Unit("head", lambda: Head(work))]


def batch(work, samples, generator):
    """Random tokens. Every sample has the same number of predicted ones, so that all micro-batches have equal weight."""
    tokens, targets = random_tokens(work, samples, generator)
    count = max(1, round(getattr(work.data, "mask_probability", 0.15) * work.sequence))
    masked = torch.rand(tokens.shape, generator=generator).argsort(1) < count
    return tokens, targets.masked_fill(~masked, IGNORED)


def tied(work):
    return ((0, "tokens.weight"), (-1, "decoder.weight")) if work.model.tied else None
