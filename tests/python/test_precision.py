"""A module in bfloat16 computes in it, and its weights are summed up in float32."""
import pytest
import torch
from torch import nn

import twobp


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(13, 16), nn.LayerNorm(16), nn.Linear(16, 13)
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids):
        x = self.embedding(ids)
        for one in self.inner:
            x = x + torch.tanh(one(x))
        return self.head(self.norm(x))


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), batch["labels"].flatten())


@pytest.fixture
def batch():
    ids = torch.randint(0, 13, (8, 5), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.flip(1)}


def trainer_of(batch, **settings):
    torch.manual_seed(2)
    module = Words().to(torch.bfloat16)
    return module, twobp.Trainer(module, {name: tensor[:2] for name, tensor in batch.items()}, loss_fn=loss_fn, micro_batches=4, **settings)


def test_updates_below_the_resolution_of_bfloat16_add_up(batch):
    lr = 1e-5
    module, trainer = trainer_of(batch, ranks=1, optimizer=twobp.AdamW(lr=lr, weight_decay=0))
    before = {name: tensor.float() for name, tensor in module.state_dict().items()}
    trainer.step(batch)
    after = trainer.state_dict()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moved = (after["inner.0.weight"] - before["inner.0.weight"]).abs()
    assert moved.max() == pytest.approx(lr, rel=0.01)  # Adam's first step, where the numbers of bfloat16 are 1e-3 apart


def test_bits_are_those_of_every_schedule_and_near_float32(batch, tmp_path):
    runs = []
    for settings in ({"ranks": 1}, {"ranks": 2, "schedule": "zb-v"}, {"ranks": 3, "schedule": "gpipe"}):
        _, trainer = trainer_of(batch, optimizer=twobp.SGD(lr=0.1), **settings)
        runs.append(([trainer.step(batch).loss for _ in range(4)], trainer.state_dict()))
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(state[name], runs[0][1][name]) for name in state)
    trainer.save(tmp_path / "bundle")
    again = twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example={name: tensor[:2] for name, tensor in batch.items()}, ranks=2, micro_batches=4,
                          optimizer=twobp.SGD(lr=0.1))
    assert [again.step(batch).loss for _ in range(2)] == [trainer.step(batch).loss for _ in range(2)]
    module, _ = trainer_of(batch, ranks=1)
    module = module.float()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for loss in runs[0][0]:
        optimizer.zero_grad()
        expected = loss_fn(module(batch["ids"]), batch)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=0.02)
