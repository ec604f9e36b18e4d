"""`twobp::rms_norm(x, gain, eps) -> (y, rstd)` and its backward, operators of the runtime: y = x * rstd * gain with
rstd = 1 / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467, eq. 4). x (..., n), gain (n), y like x, rstd (rows)."""
from __future__ import annotations

import torch

_library = torch.library.Library("twobp", "FRAGMENT")  # registrations last as long as this object
_library.define("rms_norm(Tensor x, Tensor gain, float eps) -> (Tensor, Tensor)")
_library.define("rms_norm_backward(Tensor dy, Tensor x, Tensor gain, Tensor rstd) -> (Tensor, Tensor)")


def _forward(x: torch.Tensor, gain: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    return x * rstd.unsqueeze(-1) * gain, rstd.flatten()


def _backward(dy: torch.Tensor, x: torch.Tensor, gain: torch.Tensor, rstd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = rstd.view(*x.shape[:-1], 1)
    normal, inner = x * rstd, dy * gain
    dx = rstd * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return dx, (dy * normal).flatten(0, -2).sum(0)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, dy, _):
    return (*torch.ops.twobp.rms_norm_backward(dy, *ctx.saved_tensors), None)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


torch.library.impl(_library, "rms_norm", "CompositeExplicitAutograd")(_forward)
torch.library.impl(_library, "rms_norm_backward", "CompositeExplicitAutograd")(_backward)
torch.library.register_fake("twobp::rms_norm", lambda x, gain, eps: (_like(x), x.new_empty(x.shape[:-1].numel())), lib=_library)
torch.library.register_fake("twobp::rms_norm_backward", lambda dy, x, gain, rstd: (_like(x), torch.empty_like(gain)), lib=_library)
torch.library.register_autograd("twobp::rms_norm", _gradients, setup_context=_keep, lib=_library)
rms_norm = torch.ops.twobp.rms_norm.default
