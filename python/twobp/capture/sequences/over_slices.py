"""The operators that know slices of sequences, as the C++ side runs them (own_attention.cpp, own_operators.cpp):
attention reads keys and values of earlier slices, and gives gradients to them. The dry run of sliced programs at
capture uses this."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import torch

from ..own_operators import _heads, _rotate, dropout_scale


class Sequences:
    """The data that the slices of a micro-batch share. `positions` is the length of the whole sequences. `masks` has
    their dropout masks by (layer, call)."""

    def __init__(self, positions: int, masks: dict[tuple[int, int], torch.Tensor]):
        self.positions, self.masks = positions, masks
        self.keys: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = collections.defaultdict(
            list
        )  # and values, of each slice, by attention
        self.later: dict[Any, dict[int, torch.Tensor]] = collections.defaultdict(
            dict
        )  # gradients of these from later slices

    def cut(self, lengths: list[int]) -> list[Slice]:
        return [Slice(self, number, sum(lengths[:number]), length) for number, length in enumerate(lengths)]


@dataclasses.dataclass
class Slice:
    """The positions [begin, begin + length)."""

    of: Sequences
    number: int
    begin: int
    length: int

    def run(self, instruction: dict, arguments: list, layer: int) -> Any:
        """Returns the results of an operator that knows slices, or NotImplemented for others."""
        method = OPERATORS.get(instruction["op"])
        return NotImplemented if method is None else method(self, instruction, arguments, layer)

    def dropout(self, instruction: dict, arguments: list, layer: int) -> tuple:
        x, p, _ = arguments
        whole = self.of.masks[layer, instruction["args"][2]["random"]]
        rows = whole.reshape(-1, self.of.positions, whole.shape[-1])
        mask = rows[:, self.begin : self.begin + self.length].reshape(x.shape)
        return x * mask * dropout_scale(p), mask

    def packed(self, instruction: dict, arguments: list, layer: int) -> tuple:
        qkv, cos, sin, heads, kv_heads, _ = arguments
        rotated = _rotate(qkv, cos, sin, heads, kv_heads)
        q, k, v = _heads(rotated, heads, kv_heads)
        out, log_sum_exp = self._attend(attention_key(layer, instruction), q, k, v, None)
        return out.transpose(1, 2).flatten(2), rotated, log_sum_exp

    def packed_backward(self, instruction: dict, arguments: list, layer: int) -> torch.Tensor:
        dout, rotated, out, log_sum_exp, cos, sin, heads, kv_heads, _ = arguments
        q, _, _ = _heads(rotated, heads, kv_heads)
        dout, out = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (dout, out))
        dq, dk, dv = self._gradients((layer, instruction["args"][3]["v"]), dout, q, out, log_sum_exp, None, kv_heads)
        return _rotate(
            torch.cat([dq, dk, dv], 1).transpose(1, 2).flatten(2), cos, None if sin is None else -sin, heads, kv_heads
        )

    def apart(self, instruction: dict, arguments: list, layer: int) -> tuple:
        q, k, v, scale = arguments
        shared = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(shared, 1) for one in (k, v))
        return self._attend(attention_key(layer, instruction), q, k, v, scale)

    def apart_backward(self, instruction: dict, arguments: list, layer: int) -> tuple:
        dout, q, k, _, out, log_sum_exp, scale = arguments
        return self._gradients((layer, instruction["args"][5]["v"]), dout, q, out, log_sum_exp, scale, k.shape[1])

    def _weights(self, q: torch.Tensor, keys: torch.Tensor, scale: float | None) -> torch.Tensor:
        scores = q @ keys.transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))
        earlier = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(self.begin)
        return scores.masked_fill(~earlier, -math.inf)

    def _attend(self, key: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> tuple:
        kept = self.of.keys[key]
        kept.append((k, v))
        keys, values = (torch.cat(one, 2) for one in zip(*kept))
        scores = self._weights(q, keys, scale)
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    def _gradients(self, key: Any, dout, q, out, log_sum_exp, scale: float | None, kv_heads: int) -> tuple:
        kept, later = self.of.keys[key][: self.number + 1], self.of.later[key]
        keys, values = (torch.cat(one, 2) for one in zip(*kept))
        weights = (self._weights(q, keys, scale) - log_sum_exp.unsqueeze(-1)).exp()
        inner = (
            weights
            * (dout @ values.transpose(-2, -1) - (dout * out).sum(-1, keepdim=True))
            * (scale or 1 / math.sqrt(q.shape[-1]))
        )
        both = torch.stack([inner.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ dout])
        for number, part in enumerate(both.split([k.shape[2] for k, _ in kept], 3)):
            later[number] = later[number] + part if number in later else part
        dk, dv = (one.unflatten(1, (kv_heads, -1)).sum(2) for one in later.pop(self.number))
        return inner @ keys, dk, dv


def attention_key(layer: int, instruction: dict) -> Any:
    """Returns the key of a call of attention, which its derivative has too: the slot of log_sum_exp."""
    slot = instruction["out"][-1]
    return (layer, id(instruction)) if slot is None else (layer, slot)


OPERATORS = {
    "twobp::dropout": Slice.dropout,
    "twobp::attention": Slice.packed,
    "twobp::attention_backward": Slice.packed_backward,
    "twobp::causal_attention": Slice.apart,
    "twobp::causal_attention_backward": Slice.apart_backward,
}
