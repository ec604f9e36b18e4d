"""Rewrites of capture hold for all numbers, not only for those of the example. Modules are captured at small weights; loss and gradients are then compared
with autograd at other weights and batches."""
import json
import math
import pathlib
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import twobp
from twobp.capture import capture

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "random"))
import patterns  # noqa: E402

HEADS, WIDTH, POSITIONS = 2, 4, 8
DIM = HEADS * WIDTH
CAUSAL = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()


def mean_loss(output, batch):
    return functional.mse_loss(output, batch["wanted"])


class Attention(nn.Module):
    """Attention of the rows of one projection. `way(q, k, v, keep)` gives it."""

    def __init__(self, way, width=WIDTH):
        super().__init__()
        self.way, self.width = way, width
        dim = HEADS * width
        self.first, self.rows, self.out = nn.Linear(dim, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, 4)

    def forward(self, x, keep):
        q, k, v = (one.unflatten(-1, (HEADS, self.width)).transpose(1, 2) for one in self.rows(self.first(x)).chunk(3, -1))
        return self.out(self.way(q, k, v, keep).transpose(1, 2).flatten(2))


def batch_of(dtype=torch.float64, keep=None, width=WIDTH, scale=1.0, batch=2):
    keep = torch.ones(batch, POSITIONS, dtype=torch.int64) if keep is None else keep
    return {"x": scale * torch.randn(batch, POSITIONS, HEADS * width, dtype=dtype), "keep": keep, "wanted": torch.randn(batch, POSITIONS, 4, dtype=dtype)}


LEFT = torch.tensor([[1] * POSITIONS, [0] * 3 + [1] * (POSITIONS - 3)])  # causal rows of the padding are masked whole
WHOLE = torch.tensor([[1] * POSITIONS, [0] * POSITIONS])


def captured(module, batch, loss_fn=mean_loss):
    torch.manual_seed(1)
    made = capture(module, batch, loss_fn=loss_fn, cache=False, slices=False)
    return made, json.dumps([program["forward"] for program in made.graph["shapes"][0]["programs"]])


def assert_equal_to_autograd(made, *batches, magnitude=1.0):
    for batch in batches:
        assert patterns.differences(made, batch, magnitude) == []


def fused(q, k, v, keep=None):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


LIMITS = {"clamp": lambda x: x.clamp(-2, 2), "hardtanh": lambda x: functional.hardtanh(x, -2, 2), "minimum": lambda x: torch.minimum(x, x.new_full((), 2)),
          "where": lambda x: torch.where(x < 2, x, 2.0), "threshold": lambda x: functional.threshold(x, -2, -2), "detach": lambda x: x.detach(),
          "round": lambda x: x + ((x * 1e6).round() / 1e6 - x).detach(), "softcap": lambda x: 1e5 * torch.tanh(x / 1e5)}


PLACES = [*(("q", limit) for limit in LIMITS), ("k", "detach"), ("k", "clamp"), ("v", "hardtanh"), ("scores", "clamp"), ("scores", "where"), ("scores", "detach"),
          ("result", "minimum"), ("result", "detach")]


@pytest.mark.parametrize("place, limit", PLACES)
def test_operators_between_projection_and_product_stay(place, limit):
    at = lambda name, x: LIMITS[limit](x) if name == place else x  # noqa: E731

    def way(q, k, v, keep):
        q, k, v = at("q", q), at("k", k), at("v", v)
        if place != "scores":
            return at("result", fused(q, k, v))
        return at("scores", q @ k.mT / math.sqrt(WIDTH)).masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v

    module = Attention(way).double()
    patterns.scale(module, 0.1)
    made, _ = captured(module, batch_of(scale=0.1))
    for magnitude in (1, 3):
        patterns.scale(module, magnitude)
        assert_equal_to_autograd(made, batch_of(scale=magnitude), magnitude=magnitude)


def test_clipped_projections_of_olmo():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.OlmoConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, clip_qkv=4.0,
                                     max_position_embeddings=32, eos_token_id=1, pad_token_id=0)
    model = transformers.OlmoForCausalLM(config)
    ids = torch.randint(0, 50, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    trainer = twobp.Trainer(model, batch, ranks=1, micro_batches=1)
    trainer.load_state_dict({name: 30 * tensor for name, tensor in trainer.state_dict().items()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    loss = model(**batch).loss
    loss.backward()
    norm = torch.cat([one.grad.flatten() for one in model.parameters()]).norm()
    result = trainer.step(batch)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def masked(kind, fill, before=False):
    def way(q, k, v, keep):
        number = torch.finfo(q.dtype).min if fill == "least" else fill
        hidden = ~(CAUSAL & keep[:, None, None].bool())
        scores = q @ k.mT
        if kind == "added":
            scores = scores / math.sqrt(WIDTH) + torch.zeros((), dtype=q.dtype).masked_fill(hidden, number)
        elif before:
            scores = scores.masked_fill(hidden, number) / math.sqrt(WIDTH)
        else:
            scores = (scores / math.sqrt(WIDTH)).masked_fill(hidden, number)
        return scores.softmax(-1) @ v
    return way


MASKS = [("filled", "least", False), ("filled", -1e9, False), ("filled", -1e30, True), ("filled", -1e4, False), ("filled", "least", True), ("added", "least", False),
         ("added", -1e9, False), ("added", -1e4, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_that_are_masked_whole(mask, dtype):
    module = Attention(masked(*mask)).to(dtype)
    made, graph = captured(module, batch_of(dtype))
    for magnitude in (1, 2.5):  # 2.5: scores over 32
        patterns.scale(module, magnitude)
        assert_equal_to_autograd(made, *(batch_of(dtype, keep, scale=magnitude) for keep in (LEFT, WHOLE)), magnitude=magnitude)
    assert ('"aten::_scaled_dot_product_flash' in graph) == (mask[1] != -1e4 or mask[0] == "added")  # a fill of -1e4 may have weight


@pytest.mark.parametrize("mask", [("filled", -math.inf), ("added", -math.inf)])
def test_rows_without_a_number_have_none(mask):
    module = Attention(masked(*mask)).double()
    made, graph = captured(module, batch_of())
    assert '"aten::_scaled_dot_product_flash' in graph
    assert_equal_to_autograd(made, batch_of(keep=1 - torch.eye(2, POSITIONS, dtype=torch.int64).flip(1)))
    assert patterns.Comparison(made, batch_of(keep=LEFT)).programs["loss"].isnan()


@pytest.mark.parametrize("mask", [("filled", "least"), ("added", "least"), ("added", -1e9)])
def test_the_runtime_s_rows_that_are_masked_whole(mask):
    torch.manual_seed(3)
    module = Attention(masked(*mask))
    trainer = twobp.Trainer(module, batch_of(torch.float32), loss_fn=mean_loss, ranks=1, micro_batches=1)
    batch = batch_of(torch.float32, LEFT)
    result, loss = trainer.step(batch), mean_loss(module(batch["x"], batch["keep"]), batch)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(torch.cat([one.grad.flatten() for one in module.parameters()]).norm().item(), rel=1e-4)


def test_masks_that_hide_no_row_whole_cost_nothing():
    """A constant mask is known, so that the program does without the operators for rows that are masked whole."""
    far = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(1) | torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril(-3)
    module = Attention(lambda q, k, v, keep: (q @ k.mT).masked_fill(far, torch.finfo(q.dtype).min).softmax(-1) @ v).double()
    made, graph = captured(module, batch_of())
    assert '"aten::_scaled_dot_product_flash' in graph and '"aten::masked_fill' not in graph and '"aten::all' not in graph
    assert_equal_to_autograd(made, batch_of(scale=10))


def test_attention_with_dropout_and_rows_that_are_masked_whole():
    module = Attention(lambda q, k, v, keep: functional.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL & keep[:, None, None].bool(), dropout_p=0.3)).double()
    with pytest.raises(twobp.Error, match="training"):  # dropout that does not stop in evaluation is refused as before
        captured(module, batch_of())

    class Dropping(Attention):
        def forward(self, x, keep):
            self.way = lambda q, k, v, keep: functional.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL & keep[:, None, None].bool(),
                                                                                     dropout_p=0.3 if self.training else 0.0)
            return super().forward(x, keep)

    made, _ = captured(Dropping(None).double(), batch_of())
    assert_equal_to_autograd(made, batch_of(keep=LEFT))


@pytest.mark.parametrize("way", [masked("added", "least"), masked("filled", -1e9), fused])
def test_heads_of_two_numbers_with_rotary_embedding(way):
    """LibTorch's attention for CPUs needs numbers of a row to be neighbours, which those of cat are not here."""
    angle = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)

    class Rotated(Attention):
        def __init__(self):
            super().__init__(lambda q, k, v, keep: way(self.turned(q), self.turned(k), v, keep), 2)
            self.register_buffer("cos", cos)
            self.register_buffer("sin", sin)

        def turned(self, x):
            return x * self.cos + torch.cat([-x[..., 1:], x[..., :1]], -1) * self.sin

    module = Rotated().double()
    made, _ = captured(module, batch_of(width=2))
    assert_equal_to_autograd(made, batch_of(keep=LEFT, width=2))
    trainer = twobp.Trainer(module, batch_of(width=2), loss_fn=mean_loss, ranks=1, micro_batches=1)
    batch = batch_of(keep=LEFT, width=2)
    assert trainer.step(batch).loss == pytest.approx(mean_loss(module(batch["x"], batch["keep"]), batch).item(), rel=1e-10)


class Function(nn.Module):
    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        self.first, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)

    def forward(self, x):
        return self.out(self.function(self.first(x), *self.parts))


def rows(batch=8):
    torch.manual_seed(2)
    return {"x": torch.randn(batch, POSITIONS, DIM, dtype=torch.float64), "wanted": torch.randn(batch, POSITIONS, 4, dtype=torch.float64)}


def low_rank(x, down, other, *up):
    a, b = down(x), other(x)
    return torch.tanh(up[0](a) * up[1](a)) + up[2](b) * torch.sigmoid(up[3](b))


def test_projections_of_projections_that_share_inputs():
    module = Function(low_rank, *(nn.Linear(DIM, 4, bias=False) for _ in range(2)), *(nn.Linear(4, DIM) for _ in range(4))).double()
    made, _ = captured(module, rows())
    packed = [one for layer in made.graph["layers"] for one in layer["parameters"] if isinstance(one, list)]
    assert [f"parts.{i}.weight" for i in (0, 1)] in packed and [f"parts.{i}.weight" for i in (2, 3)] in packed
    assert_equal_to_autograd(made, rows())


def test_a_product_with_a_vector_is_not_packed():
    module = Function(lambda x, linear: linear(x) * functional.linear(x, module.vector)[..., None], nn.Linear(DIM, DIM, bias=False)).double()
    module.vector = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
    made, _ = captured(module, rows())
    assert_equal_to_autograd(made, rows())


@pytest.mark.parametrize("parts", [lambda x: (x[..., ::2], x[..., 1::2]), lambda x: (x[..., :4], x.split([2, 4, 2], -1)[1]), lambda x: (x[..., 4:], x[..., :4])])
def test_other_parts_than_halves_are_no_gate(parts):
    module = Function(lambda x, up: up(functional.silu(parts(x)[0]) * parts(x)[1]), nn.Linear(4, DIM)).double()
    made, graph = captured(module, rows())
    assert '"twobp::glu"' not in graph
    assert_equal_to_autograd(made, rows())


def test_numbers_that_the_loss_does_not_read():
    class Heads(Function):
        def forward(self, x):
            x = functional.dropout(self.first(x), 0.3, self.training)
            torch.rand(3)
            aside = functional.dropout(self.parts[0](x), 0.2, self.training)
            functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)
            x = x + 0.1 * torch.rand(DIM, dtype=x.dtype)
            return self.out(functional.dropout(x, 0.1, self.training)), aside

    made, _ = captured(Heads(None, nn.Linear(DIM, 4)).double(), rows(), lambda output, batch: functional.mse_loss(output[0], batch["wanted"]))
    assert [(draw.drops, draw.read) for draw in made.draws] == [(True, True), (False, False), (True, False), (True, False), (False, True), (True, True)]
    assert max(made.dry_runs[0].loss, made.dry_runs[0].gradients) < 1e-12


SUMS = [lambda x: x + x.sum(0, keepdim=True).max(-1, keepdim=True)[0], lambda x: x + x.sum(0).sort(-1)[0], lambda x: x + x.sum(0).split(4, -1)[0].sum(),
        lambda x: x + torch.var_mean(x.sum(0), -1, keepdim=True)[1], lambda x: x + x.sum((0, 1)).topk(2)[0].sum()]


@pytest.mark.parametrize("function", SUMS)
def test_parts_of_sums_over_samples(function):
    captured(Function(function).double(), rows())
    capture(Function(function).double(), rows(), loss_fn=mean_loss, cache=False)  # with the rules for slices


@pytest.mark.parametrize("number", range(8))
def test_random_operators_in_random_places(number):
    what, wrong = patterns.run("a few", number)
    assert not wrong, what


def attended(q, k, v, scale=0.5):
    return torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v


class Written(nn.Module):
    """`way(module, x, y)` writes into buffers."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer, self.last = way, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))
        self.register_buffer("other", torch.arange(4.0))

    def forward(self, x):
        y = self.layer(x)
        self.way(self, x, y)
        return functional.mse_loss(self.last(y), x)


WRITES = {
    "a constant": lambda m, x, y: m.seen.copy_(torch.arange(4.0) * 2), "a field": lambda m, x, y: m.seen.copy_(x[0]), "zero": lambda m, x, y: m.seen.zero_(),
    "attention": lambda m, x, y: m.seen.copy_(attended(*[y.detach().view(1, 1, -1, 4)] * 3)[0, 0, 1]),
    "a loss": lambda m, x, y: m.seen.copy_(functional.mse_loss(y, x).detach()), "cross-entropy": lambda m, x, y: m.seen.copy_(functional.cross_entropy(y, x.argmax(1)).detach()),
    "another dtype": lambda m, x, y: m.seen.copy_(y.detach().double().mean(0)), "another buffer": lambda m, x, y: m.seen.copy_(m.other),
    "a parameter": lambda m, x, y: m.seen.copy_(m.layer.bias.detach()), "a sum": lambda m, x, y: m.seen.add_(1)}


@pytest.mark.parametrize("what", WRITES)
def test_values_that_forward_writes_into_buffers(what):
    """A pass may replace a call whose value is both read and written, and a value may be none of a call."""
    torch.manual_seed(1)
    module = Written(WRITES[what]).train()
    x = torch.randn(12, 4)
    trainer = twobp.Trainer(module, {"x": x[:6]}, cache=False, optimizer=twobp.SGD(lr=0.1), micro_batches=2, ranks=1)
    losses = [trainer.step({"x": x}).loss for _ in range(3)]
    optimizer, expected = torch.optim.SGD(module.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        parts = [module(part) / 2 for part in x.split(6)]
        for part in parts:
            part.backward()
        optimizer.step()
        expected.append(sum(parts).item())
    assert losses == pytest.approx(expected, rel=1e-5)
    state = trainer.state_dict()
    for name, tensor in module.state_dict().items():
        assert state[name].dtype == tensor.dtype
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
