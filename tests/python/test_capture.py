"""Capture against autograd: each feature, and each refusal."""
import json

import pytest
import torch
from torch import nn

from twobp.capture import CaptureError, capture, read
from twobp.capture.interpret import Chain, Random

TIGHT = 1e-10  # the modules here compute in float64


def mse(output, batch):
    return nn.functional.mse_loss(output, batch["y"])


def batch_of(*shape, out=4):
    torch.manual_seed(3)
    return {"x": torch.randn(*shape, dtype=torch.float64), "y": torch.randn(*shape[:-1], out, dtype=torch.float64)}


def exact(captured):
    run = captured.dry_runs[-1]
    assert max(run.loss, run.gradients, run.buffers, run.evaluation) < TIGHT, run
    return captured


def gradients(captured, fields, seed=7):
    chain = Chain(captured.graph, 0, {n: t.detach() for n, t in {**captured.parameters, **captured.buffers}.items()}, captured.constants)
    with torch.no_grad():
        loss, slots, _ = chain.forward(fields, 1.0, Random(seed))  # loss_weight is a float32, and 1 / 24 is none
        count = chain.count(fields)
        return loss / count, {name: g / count for name, g in chain.backward(slots, Random(seed)).items()}


class Block(nn.Module):
    def __init__(self, dim, p=0.0):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def stack(blocks=3, p=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(Block(8, p) for _ in range(blocks)), nn.Linear(8, 4)).double()


def test_equal_blocks_are_one_kind():
    captured = exact(capture(stack(3), fields(), loss_fn=mse))
    kinds = [layer["kind"] for layer in captured.graph["layers"]]
    assert kinds == [0, 1, 1, 1, 2]
    assert [unit["name"] for unit in captured.graph["shapes"][0]["programs"][1]["backward_p2"]] == ["down.weight", "up.weight"]


def fields():
    made = batch_of(6, 8)
    return {"input": made["x"], "y": made["y"]}


def test_a_wrong_gradient_is_seen():
    captured = capture(stack(1), fields(), loss_fn=mse)
    program = captured.graph["shapes"][0]["programs"][1]
    program["backward_p2"][0]["code"].append(dict(program["backward_p2"][0]["code"][-1]))  # one product is added twice
    with pytest.raises(CaptureError, match="gradient of"):
        captured._dry_run(fields())


class NormOfTransformers(nn.Module):
    """Computes in float32, whatever the dtype of x."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        numbers = x.to(torch.float32)
        return self.weight * (numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_a_model_in_float64_may_have_parts_in_float32():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), *(part for _ in range(4) for part in (NormOfTransformers(8), nn.Linear(8, 8))), nn.Linear(8, 4)).double()
    run, = capture(module, fields(), loss_fn=mse).dry_runs
    assert 1e-9 < run.gradients < 1e-5  # twobp's norm computes in float64


def test_gradients_equal_autograd():
    module = stack(2)
    captured = capture(module, fields(), loss_fn=mse)
    loss, found = gradients(captured, fields())
    expected = mse(module(fields()["input"]), fields())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TIGHT)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_dropout_is_seeded_and_left_out_in_evaluation():
    captured = exact(capture(stack(2, 0.3), fields(), loss_fn=mse))
    a, b, c = (gradients(captured, fields(), seed)[0] for seed in (1, 1, 2))
    assert a == b != c
    program = captured.graph["shapes"][0]["programs"][1]
    assert any(i["op"] == "twobp::dropout" for i in program["forward"])
    assert not any(i["op"] == "twobp::dropout" for i in program["evaluate"])


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x):
        shifted = self.a(x)[torch.randperm(len(x))]
        return shifted + torch.randint(1, 4, (4,)) + torch.randint(3, (4,)) * torch.randn(4, dtype=x.dtype)


def test_random_numbers_of_every_kind_are_those_of_the_programs():
    exact(capture(Draws().double(), batch_of(6, 8), loss_fn=mse))


class Balances(nn.Module):
    """A mixture's loss for the balance of its experts, on top of its own."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x, y):
        probabilities = torch.softmax(self.a(x), -1)
        share = probabilities.sum(0) / 6.0
        return nn.functional.mse_loss(probabilities, y) + 0.02 * (share * share.detach()).sum() * 4


def test_numbers_do_not_change_the_dtype_of_a_scalar():
    batch = {name: t.float() for name, t in batch_of(6, 8).items()}
    run = capture(Balances(), batch, loss_reduction="mean").dry_runs[-1]
    assert max(run.loss, run.gradients) < 1e-5, run


def test_frozen_parameters_have_no_backward():
    module = stack(2)
    for parameter in [*module[0].parameters(), *module[1].parameters()]:
        parameter.requires_grad_(False)
    captured = exact(capture(module, fields(), loss_fn=mse))
    layers, programs = captured.graph["layers"], captured.graph["shapes"][0]["programs"]
    assert layers[1]["kind"] != layers[2]["kind"]
    for layer in layers[:2]:
        program = programs[layer["kind"]]
        assert not program["backward_p1"] and not program["backward_p2"] and not program["input_gradients"]
        assert "gradient" not in program["outputs"][0]
    assert programs[layers[2]["kind"]]["input_gradients"] == []


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 8, padding_idx=0), Block(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)))


def test_tied_weights_and_counted_targets():
    module = Tied().double()
    labels = torch.randint(0, 11, (2, 5))
    labels[1, 2:] = -100
    batch = {"ids": torch.randint(0, 11, (2, 5)), "labels": labels}
    captured = exact(capture(module, batch, loss_fn=lambda o, b: nn.functional.cross_entropy(o.flatten(0, 1), b["labels"].flatten())))
    layers = captured.graph["layers"]
    assert sum("embedding.weight" in layer["parameters"] for layer in layers) == 2
    assert Chain(captured.graph, 0, {}, {}).count(batch) == 7


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def test_batch_norm_changes_its_buffers():
    module = Convolutions().double()
    before = {n: b.clone() for n, b in module.named_buffers()}
    captured = exact(capture(module, {"x": torch.randn(5, 3, 6, 6, dtype=torch.float64), "y": torch.randn(5, 4, dtype=torch.float64)}, loss_fn=mse))
    assert set(captured.buffers) == set(before)
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())  # the module stays as it was


def test_another_shape_has_the_same_layers(tmp_path):
    captured = capture(stack(2), fields(), loss_fn=mse)
    smaller = {name: t[:2] for name, t in fields().items()}
    captured.add_shape(smaller)
    exact(captured)
    assert len(captured.graph["shapes"]) == 2
    captured.save(tmp_path)
    graph, tensors, _ = read(tmp_path)
    assert graph == json.loads(json.dumps(captured.graph)) and set(tensors) == set(captured.parameters)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x):
        y = self.a(x)
        return y if y.sum() > 0 else -y


def test_a_branch_on_a_value_is_refused_with_its_line():
    with pytest.raises(CaptureError, match=r"(?s)test_capture.py:\d+, in forward: return y if y.sum.*torch.where"):
        capture(Branch().double(), batch_of(6, 8), loss_fn=mse)


@pytest.mark.parametrize("change, message", [
    (lambda m, b: (m.eval(), b, mse), "training mode"),
    (lambda m, b: (m, b, None), "no loss_fn is given"),
    (lambda m, b: (m, {**b, "n": 3}, mse), "field 'n' is int"),
    (lambda m, b: (m.requires_grad_(False), b, mse), "nothing is trained"),
    (lambda m, b: (m, b, lambda o, f: o), "one floating-point scalar"),
    (lambda m, b: (m, b, lambda o, f: (o.exp().sum()).log()), "loss_reduction"),
    (lambda m, b: (m.register_full_backward_hook(lambda *a: None) and m, b, mse), "backward hook"),
])
def test_refusals(change, message):
    module, batch, loss_fn = change(stack(1), fields() if message != "no loss_fn is given" else {"input": fields()["input"]})
    with pytest.raises(CaptureError, match=message):
        capture(module, batch, loss_fn=loss_fn)


@pytest.mark.slow
def test_random_small_graphs():
    """Modules of random operations: a chain of residual, gated and shared pieces, some frozen."""
    class Random_(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.draw = torch.randint(0, 5, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
            self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in self.draw)
            self.gain = nn.Parameter(torch.ones(6))
            if seed % 3 == 0:
                self.parts[1].weight.requires_grad_(False)

        def forward(self, x):
            for how, part in zip(self.draw, self.parts):
                x = [lambda: x + part(x), lambda: torch.tanh(part(x)) * self.gain, lambda: part(x) * torch.sigmoid(self.parts[0](x)),
                     lambda: torch.cat([part(x)[:, :3], x[:, 3:]], 1), lambda: part(x).softmax(-1) @ self.parts[0].weight][how]()
            return x

    for seed in range(8):
        torch.manual_seed(seed)
        batch = batch_of(4, 6, out=6)
        exact(capture(Random_(seed).double(), batch, loss_fn=mse))
