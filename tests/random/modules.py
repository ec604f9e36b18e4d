"""Random small modules of one's own that read tokens: make(dice, vocab, positions) -> module. Their forward takes a batch of batches.py by name."""
import torch
from torch import nn
from torch.nn import functional as F

ACTIVATIONS = [nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh]


def allowed_pairs(ids, attention_mask, documents):
    """(samples, 1, positions, positions) of bool, or None for plain causal attention. A position sees itself."""
    if attention_mask is None and documents is None:
        return None
    count = ids.shape[1]
    allowed = torch.ones(count, count, dtype=torch.bool).tril()[None]
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, :]
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    return (allowed | torch.eye(count, dtype=torch.bool))[:, None]


class Attention(nn.Module):
    def __init__(self, dice, width):
        super().__init__()
        self.kv_heads = dice.choice([1, 2])
        self.heads = self.kv_heads * dice.choice([1, 2])
        self.size = dice.randint(3, 8)
        bias = dice.random() < 0.5
        self.packed = dice.random() < 0.5
        self.rows = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        sizes = [sum(self.rows)] if self.packed else self.rows
        self.projections = nn.ModuleList(nn.Linear(width, size, bias=bias) for size in sizes)
        self.norm = nn.RMSNorm(self.size, eps=1e-6) if dice.random() < 0.3 else nn.Identity()
        self.spelled = dice.random() < 0.4
        self.out = nn.Linear(self.heads * self.size, width, bias=dice.random() < 0.5)

    def forward(self, x, allowed):
        parts = self.projections[0](x).split(self.rows, -1) if self.packed else [one(x) for one in self.projections]
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in parts)
        q, k = self.norm(q), self.norm(k)
        if self.spelled:
            k, v = (one.repeat_interleave(self.heads // self.kv_heads, 1) for one in (k, v))
            seen = allowed if allowed is not None else torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            y = (q @ k.transpose(-1, -2) * self.size ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dice, width):
        super().__init__()
        hidden, bias = dice.randint(5, 40), dice.random() < 0.5
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if dice.random() < 0.5 else None
        self.activation = dice.choice(ACTIVATIONS)()

    def forward(self, x):
        return self.down(self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dice, width, norm):
        super().__init__()
        self.attention, self.mlp = Attention(dice, width), Mlp(dice, width)
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.order = dice.choice(["before", "after", "parallel"])
        self.scale = nn.Parameter(torch.ones(width)) if dice.random() < 0.3 else None

    def forward(self, x, allowed):
        if self.order == "parallel":
            return x + self.attention(self.norms[0](x), allowed) + self.mlp(self.norms[1](x))
        for part, norm in zip((lambda x: self.attention(x, allowed), self.mlp), self.norms):
            y = part(norm(x)) if self.order == "before" else norm(part(x))
            x = x + (y if self.scale is None else y * self.scale)
        return x


class Model(nn.Module):
    """Returns logits. Positions are numbered as the batch says, or from 0."""

    def __init__(self, dice, vocab, positions):
        super().__init__()
        width = dice.randint(5, 24)
        kinds = [nn.LayerNorm, lambda width: nn.RMSNorm(width, eps=1e-6)]
        norm = dice.choice(kinds)
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(dice, width, norm) for _ in range(dice.randint(1, 3)))
        self.norm, self.head = norm(width), nn.Linear(width, vocab, bias=False)
        if dice.random() < 0.4:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids, position_ids=None, attention_mask=None, documents=None):
        at = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.tokens(input_ids) + self.positions(at)
        allowed = allowed_pairs(input_ids, attention_mask, documents)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))
