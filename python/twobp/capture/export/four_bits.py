"""Layers of bitsandbytes in 4 bits. While a module is exported, they call our operator, which keeps no weight in
another form."""

from __future__ import annotations

import contextlib
import sys

import torch

from ..errors import CaptureError
from ..own_operators import linear_4bit


def scales_of(state) -> torch.Tensor:
    """Returns the scale of each block. bitsandbytes may keep them in 8 bits, with scales of their own."""
    if not state.nested:
        return state.absmax
    outer = state.state2
    scales = outer.code[state.absmax.int()] * outer.absmax.repeat_interleave(outer.blocksize)[: state.absmax.numel()]
    return scales + state.offset


def forward(self, x: torch.Tensor) -> torch.Tensor:
    state = self.quant_state  # the weight is one of export here, without a state
    if state is None:
        raise CaptureError("a Linear4bit of bitsandbytes has no weight in 4 bits yet: call model.to('cpu') first")
    if getattr(state, "packing_format_for_cpu", False):
        raise CaptureError(
            "a Linear4bit of bitsandbytes has its weight in a form for inference, as after a call in evaluation mode "
            "on this CPU: load the model again, and call model.train() before the first call"
        )
    if self.weight.dtype is not torch.uint8:
        raise CaptureError(
            f"a Linear4bit of bitsandbytes keeps its weight in {self.weight.dtype}: load the model with "
            "bnb_4bit_quant_storage=torch.uint8"
        )
    y = linear_4bit(
        x.to(self.compute_dtype or x.dtype),
        self.weight,
        scales_of(state),
        state.code,
        state.shape[0],
        state.blocksize,
        state.dtype,
    )
    return (y if self.bias is None else y + self.bias.to(y.dtype)).to(x.dtype)


def keep_form(module: torch.nn.Module) -> None:
    """Keeps the layers from giving their weights a form for inference, as a call in evaluation mode does on CPUs with
    AVX-512 for bfloat16."""
    for part in module.modules():
        if getattr(part, "support_avx512bf16_for_cpu", False):
            part.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


@contextlib.contextmanager
def four_bit_layers():
    layers = sys.modules.get("bitsandbytes.nn")
    if layers is None:
        yield
        return
    original = layers.Linear4bit.forward
    layers.Linear4bit.forward = forward
    try:
        yield
    finally:
        layers.Linear4bit.forward = original
