"""Activations and norms that are spelled out in operators become one operator each. Other functions stay."""
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


RMS_NORMS = [lambda x, gain, bias: gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) + bias,
             lambda x, gain, bias: x / torch.sqrt((x * x).mean(dim=2, keepdim=True) + 1e-6) * gain,
             lambda x, gain, bias: (x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5) * (1 + gain)]


def layer_norm_of_squares(x, gain, bias):
    x = x - x.mean(-1, keepdim=True)
    return bias + gain * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


LAYER_NORMS = [lambda x, gain, bias: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * gain + bias,
               lambda x, gain, bias: (x - x.mean(2, keepdim=True)) * torch.rsqrt(x.var(2, keepdim=True, correction=0) + 1e-5) * gain,
               layer_norm_of_squares]
NO_NORMS = [lambda x, gain, bias: gain * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
            lambda x, gain, bias: gain * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6)),
            lambda x, gain, bias: gain * ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
            lambda x, gain, bias: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) * gain + bias,
            lambda x, gain, bias: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + 1e-2) * gain + bias]


class OneNorm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.outer, self.function = nn.Linear(6, 5), nn.Linear(5, 6), function
        self.gain, self.bias = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.outer(self.function(self.inner(x), self.gain, self.bias))


@pytest.mark.parametrize("operator, functions", [("twobp::rms_norm", RMS_NORMS), ("aten::native_layer_norm", LAYER_NORMS)])
def test_spelled_out_norms_are_one_operator(operator, functions):
    graph = captured(functions, OneNorm, 4, 7, 6)
    assert f'"{operator}"' in graph and f'"{operator}_backward"' in graph
    assert not any(f'"aten::{part}' in graph for part in ("rsqrt", "sqrt", "var", "pow"))


def test_other_norms_stay():
    graph = captured(NO_NORMS, OneNorm, 4, 7, 6)
    assert '"twobp::rms_norm"' not in graph and '"aten::native_layer_norm"' not in graph


def test_the_runtime_s_norm_is_autograd_s():
    torch.manual_seed(3)
    module = OneNorm(RMS_NORMS[0])
    batch = {"x": torch.randn(4, 7, 6), "wanted": torch.randn(4, 7, 6)}
    trainer = twobp.Trainer(module, batch, loss_fn=lambda output, batch: nn.functional.mse_loss(output, batch["wanted"]), ranks=1, micro_batches=1)
    result = trainer.step(batch)
    loss = nn.functional.mse_loss(module(batch["x"]), batch["wanted"])
    loss.backward()
    norm = torch.cat([one.grad.flatten() for one in module.parameters()]).norm()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
