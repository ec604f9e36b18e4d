"""Layers of torch.nn that need more of capture than their operators, and refusals with the line of user code. benchmarks/captured_layers.py makes a table of all."""
import pathlib
import sys

import pytest
import torch
from torch import nn

import twobp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
import captured_layers as layers


@pytest.mark.parametrize("name", [
    "GroupNorm",  # behind a convolution, whose result lies in memory in another way than at capture
    "BatchNorm twice", "InstanceNorm2d", "InstanceNorm2d with statistics", "spectral_norm",  # buffers in training and in evaluation
    "Dropout inplace", "Dropout2d", "Dropout(1)", "LSTM, dropout",  # dropout within functions of torch
    "EmbeddingBag max", "Bilinear", "Conv2d circular, same", "cdist", "Upsample trilinear", "noise", "kl_div mean", "triplet_margin_loss"])
def test_a_layer_trains_as_under_autograd(name):
    assert layers.error_of(layers.LAYERS[name]) < 1e-5


def helper(x):
    return torch.special.airy_ai(x)  # a line of a helper


def fields():
    return {"x": torch.randn(2, 8), "y": torch.randn(2, 8)}


def mse(output, batch):
    return nn.functional.mse_loss(output, batch["y"])


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x):
        x = self.function(self.first(x))
        return self.last(x)


def without_gradient(x):
    with torch.no_grad():
        y = torch.special.airy_ai(x)  # a line without gradients
    return x + y


def strange_derivative(x):
    return torch.special.erfcx(x)  # a line that calls it


@pytest.mark.parametrize("function, message", [
    (helper, r"airy_ai.*is not on the list.*other operators.*test_layers\.py:\d+, in helper: return torch\.special\.airy_ai\(x\)"),
    (without_gradient, r"airy_ai.*test_layers\.py:\d+, in without_gradient: y = torch"),
    (strange_derivative, r"erfcx.*test_layers\.py:\d+, in strange_derivative: return"),
    (lambda x: torch.fft.rfft(x).abs()[:, :1] + x, r"complex numbers \(.*test_layers\.py:\d+, in <lambda>"),
    (lambda x: x[x > 0].sum() + x, r"depends on the values of tensors \(.*test_layers\.py:\d+, in <lambda>.*torch\.where"),
    (lambda x: nn.functional.dropout(x, 0.5), r"in evaluation mode .*drops or draws numbers .*test_layers\.py:\d+, in <lambda>.*self\.training")])
def test_a_refusal_names_the_line(function, message):
    with pytest.raises(twobp.Error, match=f"(?s){message}"):
        twobp.Trainer(Net(function), fields(), loss_fn=mse, ranks=1)


def test_a_refusal_names_the_part_where_it_has_no_line_of_its_own():
    module = nn.Sequential(nn.Linear(8, 8), nn.FractionalMaxPool2d(2, output_size=2), nn.Flatten(0))
    with pytest.raises(twobp.Error, match=r"fractional_max_pool2d.*\(part '1'\)"):
        twobp.Trainer(module, {"input": torch.randn(1, 1, 8, 8)}, loss_fn=lambda output, batch: output.mean(), ranks=1)


class Path(nn.Module):
    """Stochastic depth, as libraries write it."""

    def __init__(self, by_dropout):
        super().__init__()
        self.by_dropout = by_dropout

    def forward(self, x):
        if self.by_dropout:
            return x * nn.functional.dropout(x.new_ones(len(x), 1), 0.2, self.training)
        return x * x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8 if self.training else x


def test_stochastic_depth_is_dropout_of_a_factor():
    with pytest.raises(twobp.Error, match=r"in training mode only \(.*test_layers\.py:\d+, in forward: return x \* x\.new_empty.*F\.dropout\("):
        twobp.Trainer(Net(Path(False)), fields(), loss_fn=mse, ranks=1)
    trainer = twobp.Trainer(Net(Path(True)), fields(), loss_fn=mse, ranks=1)
    batch = fields()
    assert trainer.step(batch).loss > 0 and trainer.evaluate([batch]).loss > 0


def test_a_refused_loss_names_its_line():
    def loss(output, batch):
        return mse(output, batch).sqrt()  # the root

    with pytest.raises(twobp.Error, match=r"ends with sqrt \(.*test_layers\.py:\d+, in loss: return mse.*loss_reduction"):
        twobp.Trainer(Net(torch.tanh), fields(), loss_fn=loss, ranks=1)


def test_norms_that_cannot_be_captured_say_why():
    norm = nn.BatchNorm1d(8)
    for module, message in ((nn.Sequential(norm, nn.Linear(8, 8), norm), "'0' and '2' are one BatchNorm1d.*call it twice"),
                            (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), "'1' is a BatchNorm1d with momentum=None")):
        with pytest.raises(twobp.Error, match=message):
            twobp.Trainer(module, {"input": torch.randn(2, 8), "y": torch.randn(2, 8)}, loss_fn=mse, ranks=1)
