"""The trainer on a captured module, whose capture is written by hand."""
import copy

import pytest
import torch

import twobp
from graph_by_hand import WIDTH, HandCaptured, Mlp


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, WIDTH, generator=generator) for name in ("input", "target")}


@pytest.fixture
def make(batch, monkeypatch):
    """Makes a module and a trainer of it."""
    import twobp.trainer

    def make(**settings):
        torch.manual_seed(5)
        module = Mlp()
        monkeypatch.setattr(twobp.trainer, "_capture", lambda module, example, *_: HandCaptured(module, example))
        settings = {"ranks": 2, "micro_batches": 4, "optimizer": twobp.AdamW(lr=1e-2), **settings}
        return module, twobp.Trainer(module, {name: tensor[:2] for name, tensor in batch.items()}, **settings)
    return make


def test_losses_are_pytorch_s_and_equal_in_bits_over_schedules(make, batch):
    module, _ = make()
    optimizer = torch.optim.AdamW([{"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.01},
                                   {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0}], lr=1e-2)
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    runs = []
    for settings in ({"schedule": "1f1b", "p2": "fill"}, {"schedule": "zb-v"}, {"ranks": 1}, {"schedule": "gpipe", "p2_batching": "concat"}):
        _, trainer = make(**settings)
        runs.append(([trainer.step(batch).loss for _ in range(5)], trainer.state_dict()))
    assert runs[0][0] == pytest.approx(expected, rel=1e-5)
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(state[name], runs[0][1][name]) for name in state)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(runs[0][1][name], tensor, rtol=1e-4, atol=1e-6)


def test_rates_of_the_caller_and_groups_by_name_are_pytorch_s(make, batch):
    module, trainer = make(optimizer=twobp.AdamW(weight_decay=0.3, groups={"*.bias": {"weight_decay": 0.2, "lr_scale": 0.5}, "layers.1.*": {"weight_decay": 0}}))
    module = copy.deepcopy(module)  # the trainer's own must not change
    decays = [0 if name.startswith("layers.1.") else 0.2 if name.endswith("bias") else 0.3 for name, _ in module.named_parameters()]
    scales = [0.5 if name.endswith("bias") else 1 for name, _ in module.named_parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], "weight_decay": decay} for p, decay in zip(module.parameters(), decays)])
    for lr in (0.0, 1e-1, 3e-2):
        optimizer.zero_grad()
        module(**batch).backward()
        for group, scale in zip(optimizer.param_groups, scales):
            group["lr"] = lr * scale
        optimizer.step()
        assert trainer.step(batch, lr=lr).lr == lr
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    with pytest.raises(twobp.Error, match="no parameter is called '\\*.gain'"):
        make(optimizer=twobp.AdamW(groups={"*.gain": {"weight_decay": 0}}))


@pytest.mark.parametrize("optimizer", [twobp.AdamW(lr=1e-2), twobp.SGD(lr=1e-2, momentum=0.9)], ids=["adamw", "sgd"])
def test_weights_and_the_optimizer_s_state_take_a_run_to_other_ranks(make, batch, optimizer):
    _, first = make(optimizer=optimizer)
    for _ in range(2):
        first.step(batch)
    _, second = make(optimizer=optimizer, ranks=3, schedule="gpipe")
    state = first.optimizer_state()
    second.load_state_dict(first.state_dict())
    second.load_optimizer_state(state, 2)
    assert second.steps_done == 2
    assert [second.step(batch).loss for _ in range(2)] == [first.step(batch).loss for _ in range(2)]
    del state["layers.0.bias"]
    with pytest.raises(twobp.Error, match="the state has no layers.0.bias"):
        second.load_optimizer_state(state, 2)


def test_the_module_s_own_state_dict_goes_in_and_out(make, batch):
    module, trainer = make()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer.step(batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    module.load_state_dict(trainer.state_dict())
    assert module(**batch).item() == pytest.approx(trainer.evaluate([batch]).loss, rel=1e-6)
    trainer.load_state_dict(before)
    module.load_state_dict(before)
    assert module(**batch).item() == pytest.approx(trainer.evaluate([batch]).loss, rel=1e-6)


def test_a_smaller_batch_is_captured_when_it_comes(make, batch):
    module, trainer = make()
    small = {name: tensor[:5] for name, tensor in batch.items()}
    assert trainer.step(small).loss == pytest.approx(module(**small).item(), rel=1e-6)
    assert trainer.evaluate([small, batch]).loss > 0


def test_a_saved_module_is_a_bundle_that_trains_on(make, batch, tmp_path):
    _, trainer = make(optimizer=twobp.SGD(lr=1e-2))
    trainer.step(batch)
    trainer.save(tmp_path / "bundle")
    example = {name: tensor[:2] for name, tensor in batch.items()}
    again = twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example=example, ranks=3, micro_batches=4, optimizer=twobp.SGD(lr=1e-2))
    assert [again.step(batch).loss for _ in range(2)] == [trainer.step(batch).loss for _ in range(2)]
    again.save(tmp_path / "again")
    assert (tmp_path / "again/graph.json").read_text() == (tmp_path / "bundle/graph.json").read_text()
    with pytest.raises(twobp.Error, match="no program"):
        again.step({name: tensor[:5] for name, tensor in batch.items()})  # no module to capture again
    (tmp_path / "bundle/graph.json").write_text("{}")
    with pytest.raises(twobp.Error, match="graph.json"):
        twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example=example)


def test_a_captured_module_is_planned(make):
    _, trainer = make()
    assert len(twobp.plan(trainer, ranks=[1, 2], seconds=0.05)) > 0
    assert trainer.layers == [f"layers.{i}" for i in range(4)]


def test_positional_batches_are_named_by_forward():
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)

    def loss_fn(output, batch):
        return torch.nn.functional.mse_loss(output, batch["target"])
    losses = []
    for example, given in (((x[:2], y[:2]), list(loader)), ({"input": x[:2], "target": y[:2]}, [{"input": x[i:i + 4], "target": y[i:i + 4]} for i in (0, 4)]),
                           ((x[:2], y[:2]), [[(x[i:i + 2], y[i:i + 2]), (x[i + 2:i + 4], y[i + 2:i + 4])] for i in (0, 4)])):
        trainer = twobp.Trainer(module, example, loss_fn=loss_fn, ranks=1, micro_batches=2, optimizer=twobp.SGD(lr=0.1))
        losses.append([trainer.step(batch).loss for batch in given])
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(twobp.Error, match="4 tensors, but the module's forward takes 1"):
        trainer.step((x, y, x, y))


class Repeated(torch.nn.Module):
    """One weight, used three times within a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        a = torch.tanh(self.again(x))
        b = torch.tanh(self.again(a * x))
        return self.last(x + a * b * torch.tanh(self.again(a + b)))


def test_uses_of_one_weight_are_added_in_one_order():
    torch.manual_seed(4)
    module, batch = Repeated(), {"x": torch.randn(8, 4), "wanted": torch.randn(8, 2)}
    runs = []
    for settings in ({"p2": "fill"}, {"p2": "end", "p2_batching": "concat"}, {"schedule": "gpipe", "p2_batching": "concat"}):
        trainer = twobp.Trainer(module, {name: tensor[:2] for name, tensor in batch.items()}, ranks=1, micro_batches=4, threads=1, optimizer=twobp.SGD(lr=0.1),
                                loss_fn=lambda output, batch: torch.nn.functional.mse_loss(output, batch["wanted"]), **settings)
        for _ in range(4):
            trainer.step(batch)
        runs.append(trainer.state_dict()["again.weight"])
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
