"""Capture recognises projections, gates, attention, rotary embedding and cross-entropy in all their spellings. The dry run compares each program with
the module itself, in float64."""
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import twobp
from twobp.capture import capture

BATCH, POSITIONS, HEADS, KV_HEADS, WIDTH = 2, 6, 4, 2, 8
DIM = HEADS * WIDTH


def tables(positions=POSITIONS, width=WIDTH):
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width))
    return angle.cos(), angle.sin()


def rotate_half(x, cos, sin):
    a, b = x[..., :x.shape[-1] // 2], x[..., x.shape[-1] // 2:]
    return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


def rotate_chunks(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rotate_stacked(x, cos, sin):
    pairs = torch.stack(x.split(x.shape[-1] // 2, -1))
    return torch.cat([pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin], -1)


def rotate_by_single(x, cos, sin):
    """Tables in float32 turn numbers of float64, as OLMo 2's do."""
    return rotate_half(x, cos.float(), sin.float())


def no_rotation(x, cos, sin):
    return x


def neighbours(x, cos, sin):
    """Turns pairs of neighbours. The operator does not compute this embedding."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def fused_attention(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def spelled_attention(q, k, v):
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    future = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def added_mask_attention(q, k, v):
    k, v = (one[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2) for one in (k, v))
    mask = torch.full((POSITIONS, POSITIONS), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
    return functional.softmax(torch.matmul(q, k.mT) * WIDTH ** -0.5 + mask, dim=-1).matmul(v)


def everywhere_attention(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def windowed_attention(q, k, v):
    near = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril().triu(-2)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=near, enable_gqa=True)


def wrongly_scaled_attention(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)


class Attention(nn.Module):
    def __init__(self, attend, rotate, norm=False, one=False):
        super().__init__()
        self.attend, self.rotate, self.one = attend, rotate, one
        rows = [HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH]
        self.projections = nn.ModuleList([nn.Linear(DIM, sum(rows))] if one else [nn.Linear(DIM, n, bias=False) for n in rows])
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6) if norm else nn.Identity()
        self.out = nn.Linear(DIM, 3)
        self.rows = rows
        cos, sin = tables()
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x):
        parts = self.projections[0](x).split(self.rows, -1) if self.one else [one(x) for one in self.projections]
        q, k, v = (one.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for one in parts)
        q, k = (self.rotate(self.norm(one), self.cos, self.sin) for one in (q, k))
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(*x.shape[:2], DIM))


class Behind(nn.Module):
    """A part as it stands within a model: its input is not a field of the batch."""

    def __init__(self, part, dim):
        super().__init__()
        self.first, self.part = nn.Linear(dim, dim), part

    def forward(self, x):
        return self.part(self.first(x))


def captured(module, batch, loss_fn=lambda output, batch: functional.mse_loss(output, batch["wanted"])):
    torch.manual_seed(1)
    made = capture(Behind(module, batch["x"].shape[-1]).double(), batch, loss_fn=loss_fn)
    run = made.dry_runs[0]
    assert max(run.loss, run.gradients) < 1e-12, run
    return json.dumps(made.graph), made


def rows_of_numbers(dim=DIM, out=3):
    torch.manual_seed(2)
    return {"x": torch.randn(BATCH, POSITIONS, dim, dtype=torch.float64), "wanted": torch.randn(BATCH, POSITIONS, out, dtype=torch.float64)}


@pytest.mark.parametrize("attend, rotate, one", [(fused_attention, rotate_half, False), (spelled_attention, rotate_chunks, True),
                                                 (added_mask_attention, rotate_stacked, False), (everywhere_attention, no_rotation, True),
                                                 (fused_attention, no_rotation, True), (everywhere_attention, rotate_half, True), (fused_attention, rotate_by_single, False)])
def test_attention_is_one_operator(attend, rotate, one):
    graph, made = captured(Attention(attend, rotate, one=one), rows_of_numbers())
    assert '"twobp::attention"' in graph and '"twobp::attention_backward"' in graph
    assert '"aten::_scaled_dot' not in graph and '"aten::_softmax"' not in graph and '"aten::cos"' not in graph
    call = next(i for i in made.graph["shapes"][0]["programs"][1]["forward"] if i["op"] == "twobp::attention")
    assert call["args"][3:] == [HEADS, KV_HEADS, attend is not everywhere_attention]


@pytest.mark.parametrize("attend, rotate", [(windowed_attention, rotate_half), (wrongly_scaled_attention, rotate_half), (fused_attention, neighbours)])
def test_other_attention_stays(attend, rotate):
    assert '"twobp::attention"' not in captured(Attention(attend, rotate), rows_of_numbers())[0]


PADDING = torch.tensor([[1] * POSITIONS, [1] * 4 + [0] * (POSITIONS - 4)])[:, None, None]


def padded_fused(q, k, v, mask, bias):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool())


def padded_filled(q, k, v, mask, bias):
    return (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(mask == 0, -torch.inf).softmax(-1) @ v


def padded_filled_before_scaling(q, k, v, mask, bias):
    return functional.softmax(torch.where(mask.bool(), q @ k.mT, -1e30) * WIDTH ** -0.5, dim=-1) @ v


def padded_added(q, k, v, mask, bias):
    added = (1 - mask.to(q.dtype)) * torch.finfo(q.dtype).min
    return torch.matmul(functional.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3 + added, dim=-1), v)


def windowed_and_padded(q, k, v, mask, bias):
    far = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(3)
    return (q @ k.mT).masked_fill(far | mask.eq(0), -torch.inf).softmax(-1) @ v


def little_filled(q, k, v, mask, bias):
    return (q @ k.mT).masked_fill(mask == 0, -3.0).softmax(-1) @ v


def learned(q, k, v, mask, bias):
    return (q @ k.mT + bias).masked_fill(mask == 0, -torch.inf).softmax(-1) @ v


def of_keys_of_others(q, k, v, mask, bias):
    return (q @ k.mT).softmax(-2) @ v


class Padded(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.rows, self.out = attend, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 3)
        self.bias = nn.Parameter(torch.randn(HEADS, POSITIONS, POSITIONS))

    def forward(self, x, mask):
        q, k, v = (one.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for one in self.rows(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, mask, self.bias).transpose(1, 2).flatten(2)) + 0 * self.bias.sum()


class Chain(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.first, self.parts = nn.Linear(DIM, DIM), nn.ModuleList(parts)

    def forward(self, x, mask):
        return sum(part(self.first(x), mask) for part in self.parts)


def padded(*ways):
    torch.manual_seed(1)
    batch = {**rows_of_numbers(), "mask": PADDING}
    made = capture(Chain(*map(Padded, ways)).double(), batch, loss_fn=lambda output, batch: functional.mse_loss(output, batch["wanted"]))
    assert max(made.dry_runs[0].loss, made.dry_runs[0].gradients) < 1e-12, made.dry_runs
    return json.dumps([program["forward"] for program in made.graph["shapes"][0]["programs"]])


def test_attention_with_a_mask_keeps_no_scores():
    ways = (padded_fused, padded_filled, padded_filled_before_scaling, padded_added, windowed_and_padded)
    graph = padded(*ways)
    assert graph.count('"aten::_scaled_dot_product_flash_attention_for_cpu"') == len(ways) and '"aten::_softmax"' not in graph


def test_other_attention_with_a_mask_keeps_its_scores():
    ways = (little_filled, learned, of_keys_of_others)
    graph = padded(*ways)
    assert '"aten::_scaled_dot' not in graph and graph.count('"aten::_softmax"') == len(ways)


@pytest.mark.parametrize("rotate", [rotate_half, rotate_chunks, rotate_stacked, rotate_by_single])
def test_rotary_embedding_behind_a_norm_is_one_operator(rotate):
    graph, _ = captured(Attention(fused_attention, rotate, norm=True), rows_of_numbers())
    assert graph.count('"twobp::rotary"') == 4 and '"twobp::attention"' not in graph and '"aten::cat"' in graph


def test_projections_of_one_input_are_one_parameter():
    _, made = captured(Attention(fused_attention, rotate_half), rows_of_numbers())
    assert [f"part.projections.{i}.weight" for i in range(3)] in made.graph["layers"][1]["parameters"]
    units = [unit["name"] for unit in made.graph["shapes"][0]["programs"][1]["backward_p2"]]
    assert units == ["0+1+2.weight"]


def test_frozen_and_trained_projections_stay_apart():
    module = Attention(fused_attention, rotate_half)
    module.projections[1].requires_grad_(False)
    _, made = captured(module, rows_of_numbers())
    parameters = made.graph["layers"][1]["parameters"]
    assert ["part.projections.0.weight", "part.projections.2.weight"] in parameters and "part.projections.1.weight" in parameters


class Gate(nn.Module):
    def __init__(self, gate, one=False):
        super().__init__()
        self.gate, self.one = gate, one
        self.inner = nn.ModuleList([nn.Linear(6, 10)] if one else [nn.Linear(6, 5), nn.Linear(6, 5)])
        self.outer = nn.Linear(5, 3)

    def forward(self, x):
        g, u = self.inner[0](x).chunk(2, -1) if self.one else (one(x) for one in self.inner)
        return self.outer(self.gate(g, u))


GATES = [("silu", lambda g, u: functional.silu(g) * u), ("silu", lambda g, u: u * (g * torch.sigmoid(g))), ("silu", lambda g, u: g / (1 + torch.exp(-g)) * u),
         ("gelu", lambda g, u: functional.gelu(g) * u), ("gelu", lambda g, u: u * (0.5 * g * (1 + torch.erf(g / math.sqrt(2))))),
         ("gelu_tanh", lambda g, u: functional.gelu(g, approximate="tanh") * u)]


@pytest.mark.parametrize("activation, gate", GATES)
def test_gates_are_one_operator(activation, gate):
    graph, _ = captured(nn.Sequential(Gate(gate), nn.Linear(3, 6), Gate(gate, one=True)), rows_of_numbers(6))
    assert graph.count('"twobp::glu", "args": [{"v": ') == graph.count('"twobp::glu_backward"') == 2
    assert graph.count(f'"{activation}"]') == 4 and '"aten::mul"' not in graph


def test_the_other_half_as_gate_stays():
    assert '"twobp::glu"' not in captured(Gate(lambda g, u: functional.silu(u) * g, one=True), rows_of_numbers(6))[0]


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 7)

    def forward(self, x):
        return self.head(x)


LOSSES = [lambda logits, batch: functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()),
          lambda logits, batch: functional.nll_loss(logits.flatten(0, 1).log_softmax(1), batch["labels"].flatten()),
          lambda logits, batch: functional.nll_loss(functional.log_softmax(logits.view(-1, 7), dim=-1), batch["labels"].view(-1), ignore_index=-100)]


def labelled():
    labels = torch.tensor([[0, 6, 3, -100, 2, 1], [5, -100, -100, 4, 4, 0]])
    return {"x": rows_of_numbers(6)["x"], "labels": labels}


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_cross_entropy_is_one_operator(loss_fn):
    graph, _ = captured(Classes(), labelled(), loss_fn)
    assert '"twobp::cross_entropy"' in graph
    assert not any(f'"aten::{name}' in graph for name in ("log_softmax", "_log_softmax", "nll_loss"))


def test_smoothed_cross_entropy_stays():
    graph, _ = captured(Classes(), {"x": labelled()["x"], "labels": labelled()["labels"].clamp(min=0)},
                        lambda logits, batch: functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1))
    assert '"twobp::cross_entropy"' not in graph


class Whole(nn.Module):
    """All of the operators, in one model with tied weights."""

    def __init__(self, norm, gate):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.attention, self.mlp = Attention(fused_attention, rotate_half, norm=norm), Gate(gate)
        self.attention.out, self.mlp.inner, self.mlp.outer = nn.Linear(DIM, DIM), nn.ModuleList(nn.Linear(DIM, 16) for _ in range(2)), nn.Linear(16, DIM)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.attention(x)
        return self.head(x + self.mlp(x))


@pytest.mark.parametrize("norm, gate", [(False, GATES[0][1]), (True, GATES[3][1]), (False, GATES[5][1])])
def test_the_runtime_computes_them_as_autograd_does(norm, gate):
    torch.manual_seed(4)
    module = Whole(norm, gate).double()
    ids = torch.randint(0, 11, (4, POSITIONS))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    loss_fn = lambda logits, batch: functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())  # noqa: E731
    example = {name: tensor[:2] for name, tensor in batch.items()}
    losses, states = [], []
    for ranks, schedule in ((1, "1f1b"), (2, "zb-v"), (3, "gpipe")):
        trainer = twobp.Trainer(module, example, loss_fn=loss_fn, ranks=ranks, schedule=schedule, micro_batches=2, optimizer=twobp.SGD(lr=0.1))
        losses.append([trainer.step(batch).loss for _ in range(3)])
        states.append(trainer.state_dict())
    assert losses[0] == losses[1] == losses[2]
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in other)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for expected in losses[0]:
        optimizer.zero_grad()
        loss = loss_fn(module(ids), batch)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        loss.backward()
        optimizer.step()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-10, atol=1e-12)


class Experts(nn.Module):
    """Groups of 2, 0 and 7 rows, in a second micro-batch of 3, 4 and 0, and rows without a group."""

    def __init__(self, transposed):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 6) if transposed else torch.randn(3, 6, 4))
        self.transposed = transposed

    def forward(self, x, ends):
        return torch.ops.twobp.grouped_mm(x, self.weight.transpose(1, 2) if self.transposed else self.weight, ends)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_groups_are_those_of_the_runtime(transposed):
    torch.manual_seed(5)
    module = Experts(transposed).double()
    weight = module.weight.detach().clone().requires_grad_()
    parts = [{"x": torch.randn(9, 6, dtype=torch.float64), "wanted": torch.randn(9, 4, dtype=torch.float64), "ends": torch.tensor(ends)}
             for ends in ([2, 2, 9], [3, 7, 7])]
    trainer = twobp.Trainer(module, parts[0], loss_fn=lambda output, batch: functional.mse_loss(output, batch["wanted"]), ranks=1, micro_batches=2,
                            optimizer=twobp.SGD(lr=0.1))
    graph = json.dumps([program["backward_p2"] for program in trainer._captured.graph["shapes"][0]["programs"]])
    assert '"how": "groups"' in graph and "transpose" not in graph and "grouped_mm_weight" not in graph
    result = trainer.step(parts)
    matrices = weight.transpose(1, 2) if transposed else weight
    loss = 0
    for part in parts:
        begins = [0, *part["ends"].tolist()]
        y = torch.cat([part["x"][begin:end] @ matrix for begin, end, matrix in zip(begins, begins[1:], matrices)])
        y = functional.pad(y, (0, 0, 0, 9 - len(y)))
        loss = loss + functional.mse_loss(y, part["wanted"]) / 2
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.grad_norm == pytest.approx(weight.grad.norm().item(), rel=1e-12)
    torch.testing.assert_close(trainer.state_dict()["weight"], (weight - 0.1 * weight.grad).detach(), rtol=1e-12, atol=1e-12)
