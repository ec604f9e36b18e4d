"""With precision="bf16" or "fp16", a module in float32 is trained as under torch.autocast."""
import copy

import pytest
import torch
from torch import nn

import twobp
from twobp.capture import capture

VOCABULARY, DIM, STEPS = 13, 16, 12


class Words(nn.Module):
    """A tied table, which is looked up in float32 and multiplies in 16 bits; norms; an activation of several operators; dropout."""
    def __init__(self, p=0.0):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(p)
        self.inner = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for one in self.inner:
            y = one(self.norm(x))
            x = x + self.drop(y * 0.5 * (1 + torch.tanh(0.8 * (y + 0.04 * y ** 3))))
            with torch.autocast("cpu", enabled=False):
                x = x + 0.1 * nn.functional.linear(x, one.weight.detach())
        return self.head(self.norm(x))


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.fixture
def batch():
    ids = torch.randint(0, VOCABULARY, (8, 5), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.flip(1)}


def words(p=0.0):
    torch.manual_seed(2)
    return Words(p)


def part(batch, i=0):
    return {name: tensor[2 * i:2 * i + 2] for name, tensor in batch.items()}


def trainer_of(module, batch, precision="bf16", **settings):
    settings = {"ranks": 2, "optimizer": twobp.AdamW(lr=1e-2, weight_decay=0), **settings}
    return twobp.Trainer(module, part(batch), loss_fn=loss_fn, micro_batches=4, precision=precision, **settings)


def by_torch(module, batch, dtype, steps=STEPS):
    """The losses of PyTorch's own loop, with a cast of each weight in every micro-batch."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-2, weight_decay=0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        scale = 1024 if dtype == torch.float16 else 1
        for i in range(4):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_fn(module(part(batch, i)["ids"]), part(batch, i))
            (scale * loss / 4).backward()
            losses[-1] += loss.item() / 4
        for one in module.parameters():
            one.grad = None if one.grad is None else one.grad / scale
        optimizer.step()
    return losses, module


def test_losses_and_weights_are_those_of_autocast(batch):
    module = words()
    trainer = trainer_of(module, batch)
    (errors,) = trainer._captured.dry_runs
    assert max(errors.loss, errors.gradients, errors.evaluation) < 1e-5, "the same operators, with the same roundings"
    assert trainer.layers == trainer_of(words(), batch, "fp32").layers
    got = [trainer.step(batch).loss for _ in range(STEPS)]
    wanted, trained = by_torch(module, batch, torch.bfloat16)
    in_float32, _ = by_torch(module, batch, None)
    assert got == pytest.approx(wanted, abs=2e-4)
    assert in_float32 != pytest.approx(wanted, abs=2e-4), "otherwise this test would show nothing"
    state = trainer.state_dict()
    assert {one.dtype for one in state.values()} == {torch.float32}
    for name, one in trained.state_dict().items():
        assert torch.allclose(state[name], one, atol=5e-3), name
    module.load_state_dict(state)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = loss_fn(module.eval()(batch["ids"]), batch).item()
    assert trainer.evaluate([batch]).loss == pytest.approx(expected, rel=1e-4)


def test_bits_are_those_of_every_schedule_and_policy(batch, tmp_path):
    runs = []
    for settings in ({"ranks": 1}, {"schedule": "zb-v"}, {"ranks": 3, "schedule": "gpipe", "p2": "off"}, {"schedule": "1f1b", "p2": "fill"},
                     {"split": [1, 4]}, {"split": [4, 1], "schedule": "1f1b", "clip_norm": 1e6}):
        trainer = trainer_of(words(0.1), batch, **settings)
        runs.append(([trainer.step(batch).loss for _ in range(4)], trainer.state_dict()))
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(state[name], runs[0][1][name]) for name in state)
    trainer.checkpoint(tmp_path / "checkpoints")
    next_loss = trainer.step(batch).loss
    del trainer
    again = trainer_of(words(0.1), batch, ranks=3)
    again.resume(tmp_path / "checkpoints")
    assert again.step(batch).loss == next_loss


def test_frozen_weights_are_not_rounded_by_training(batch):
    module = words()
    for one in (module.table.weight, *module.inner[1].parameters()):
        one.requires_grad_(False)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    trainer = trainer_of(module, batch)
    got = [trainer.step(batch).loss for _ in range(STEPS)]
    assert got == pytest.approx(by_torch(module, batch, torch.bfloat16)[0], abs=2e-4)
    after = trainer.state_dict()
    for name in ("table.weight", "head.weight", "inner.1.weight", "inner.1.bias"):
        assert torch.equal(after[name], before[name]), name
    assert not torch.equal(after["inner.0.weight"], before["inner.0.weight"])


def test_another_length_and_loaded_weights(batch):
    module, other = words(), {name: one[:, :3].contiguous() for name, one in batch.items()}
    trainer = trainer_of(module, batch)
    trainer.step(batch)
    trainer.load_state_dict(module.state_dict())
    assert trainer.step(other).loss == pytest.approx(by_torch(module, other, torch.bfloat16, 1)[0][0], abs=2e-4)


def test_a_bundle_is_trained_in_the_precision_that_it_was_captured_for(batch, tmp_path):
    trainer = trainer_of(words(), batch)
    trainer.step(batch)
    trainer.save(tmp_path / "bundle")
    settings = {"example": part(batch), "micro_batches": 4, "optimizer": twobp.SGD(lr=0.1)}
    again = twobp.Trainer(model={"from": str(tmp_path / "bundle")}, precision="bf16", ranks=3, **settings)
    same = trainer_of(words(), batch, optimizer=twobp.SGD(lr=0.1))
    same.load_state_dict(trainer.state_dict())
    assert [again.step(batch).loss for _ in range(3)] == [same.step(batch).loss for _ in range(3)]
    with pytest.raises(twobp.Error, match='train.precision is "fp32", but the model was captured for "bf16": set it to that, or capture the model again'):
        twobp.Trainer(model={"from": str(tmp_path / "bundle")}, **settings)


def test_in_fp16_losses_are_scaled_and_steps_that_overflow_are_skipped(batch):
    module = words()
    trainer = trainer_of(module, batch, "fp16", loss_scale=2.0 ** 24)
    results = [trainer.step(batch) for _ in range(24)]
    skipped = [one.skipped for one in results]
    assert any(skipped) and not skipped[-1]
    losses = [one.loss for one in results if not one.skipped]
    assert losses[:8] == pytest.approx(by_torch(module, batch, torch.float16, 8)[0], abs=2e-4)


class Casts(nn.Module):
    """Enters autocast itself, under no_grad as well."""
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, wanted):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                with torch.autocast("cpu", enabled=False):
                    scale = x @ x.T
            y = self.a(scale @ x)
        return (self.b(y.float()) - wanted).square().mean()


def test_a_module_that_enters_autocast_itself():
    torch.manual_seed(3)
    captured = capture(Casts(), {"x": torch.randn(4, DIM), "wanted": torch.randn(4, DIM)}, cache=False)
    (errors,) = captured.dry_runs
    assert max(errors.loss, errors.gradients, errors.evaluation) < 1e-5
    assert "precision" not in captured.graph


@pytest.mark.parametrize("make, precision, message", [
    (lambda: words().double(), "bf16", "precision is 'bf16', but the module has parameters in float64, which autocast leaves as they are.*module.float()"),
    (lambda: words().bfloat16(), "bf16", "parameters in bfloat16, which autocast leaves as they are"),
    (words, "tf32", "precision is 'tf32', but must be 'fp32', 'bf16' or 'fp16'")])
def test_what_cannot_be_cast_is_refused(make, precision, message, batch):
    with pytest.raises(twobp.Error, match=message):
        trainer_of(make(), batch, precision)
