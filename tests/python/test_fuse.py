"""Activations and norms that are spelled out become one operator, whatever way they are written; other functions stay."""
import json
import math

import pytest
import torch
from torch import nn

import twobp
from twobp.capture import capture

ROOT = math.sqrt(2 / math.pi)
GELU_TANH = [lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3)))),
             lambda x: x * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x))),
             lambda x: x * torch.sigmoid(2 * ROOT * (x + 0.044715 * x ** 3))]
GELU = [lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), lambda x: (x / 2) * (torch.erf(x * 0.7071067811865476) + 1),
        lambda x: 0.5 * (x + x * torch.erf(x / 2 ** 0.5)) * 1.0]
SILU = [lambda x: x * torch.sigmoid(x), lambda x: x / (1 + torch.exp(-x)), lambda x: 0.5 * x * (1 + torch.tanh(x / 2))]
OTHERS = [lambda x: x * torch.sigmoid(1.702 * x), lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x ** 3))), lambda x: x * torch.tanh(x)]


class OneActivation(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.outer, self.function = nn.Linear(6, 5), nn.Linear(5, 6), function

    def forward(self, x):
        return self.outer(self.function(self.inner(x)))


def captured(functions, part, *sizes):
    """The program of a chain of modules, one for each function. Capture compares loss and gradients with those of the modules as they are written."""
    torch.manual_seed(1)
    batch = {"input": 3 * torch.randn(*sizes, dtype=torch.float64), "wanted": torch.randn(*sizes, dtype=torch.float64)}
    made = capture(nn.Sequential(*map(part, functions)).double(), batch,
                   loss_fn=lambda output, batch: nn.functional.mse_loss(output, batch["wanted"]))
    return json.dumps(made.graph)


@pytest.mark.parametrize("operator, functions", [("gelu", GELU_TANH), ("gelu", GELU), ("silu", SILU)], ids=["gelu-tanh", "gelu", "silu"])
def test_spelled_out_activations_are_one_operator(operator, functions):
    graph = captured(functions, OneActivation, 4, 6)
    assert f'"aten::{operator}"' in graph and f'"aten::{operator}_backward"' in graph
    assert not any(f'"aten::{part}"' in graph for part in ("tanh", "sigmoid", "erf", "exp"))


def test_other_functions_stay():
    graph = captured(OTHERS, OneActivation, 4, 6)
    assert '"aten::gelu"' not in graph and '"aten::silu"' not in graph


NORMS = [lambda x, gain: gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
         lambda x, gain: x / torch.sqrt((x * x).mean(dim=2, keepdim=True) + 1e-6) * gain,
         lambda x, gain: (x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5) * (1 + gain)]
NO_NORMS = [lambda x, gain: gain * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
            lambda x, gain: gain * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6)),
            lambda x, gain: gain * ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))]


class OneNorm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.outer, self.function = nn.Linear(6, 5), nn.Linear(5, 6), function
        self.gain = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.outer(self.function(self.inner(x), self.gain))


def test_spelled_out_norms_are_one_operator():
    graph = captured(NORMS, OneNorm, 4, 7, 6)
    assert '"twobp::rms_norm"' in graph and '"twobp::rms_norm_backward"' in graph and '"aten::rsqrt"' not in graph
    assert '"aten::sqrt"' not in graph and '"aten::pow"' not in graph


def test_other_norms_stay():
    assert '"twobp::rms_norm"' not in captured(NO_NORMS, OneNorm, 4, 7, 6)


def test_the_runtime_s_norm_is_autograd_s():
    torch.manual_seed(3)
    module = OneNorm(NORMS[0])
    batch = {"x": torch.randn(4, 7, 6), "wanted": torch.randn(4, 7, 6)}
    trainer = twobp.Trainer(module, batch, loss_fn=lambda output, batch: nn.functional.mse_loss(output, batch["wanted"]), ranks=1, micro_batches=1)
    result = trainer.step(batch)
    loss = nn.functional.mse_loss(module(batch["x"]), batch["wanted"])
    loss.backward()
    norm = torch.cat([one.grad.flatten() for one in module.parameters()]).norm()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
