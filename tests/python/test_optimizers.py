"""Muon, and what it needs of a module, against PyTorch's own optimizers."""
import copy
import itertools

import pytest
import torch

import twobp

STEPS, VOCAB, SEQUENCE, DIM = 50, 64, 16, 32
LR, DECAY = 1e-2, 0.1


class Rotation(torch.nn.Module):
    """A small decoder without rotary embedding, whose three projections capture stores as one weight."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, DIM)
        self.place = torch.nn.Embedding(SEQUENCE, DIM)
        self.norm = torch.nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(DIM, width, bias=False) for width in (DIM, DIM, DIM, DIM))
        self.up, self.down = torch.nn.Linear(DIM, 80), torch.nn.Linear(80, DIM)
        self.head = torch.nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids) + self.place(torch.arange(SEQUENCE))
        y = self.norm(x)
        q, k, v = (one(y).unflatten(2, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return torch.nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=DIM, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        max_position_embeddings=SEQUENCE, use_cache=False))


LLAMA = {"type": "llama", "dim": DIM, "hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "norm_eps": 1e-6}


def batches():
    """Sequences that count up by a step of their own, so that there is something to learn."""
    random = torch.Generator().manual_seed(2)
    while True:
        begin, by = (torch.randint(1, VOCAB, (8, 1), generator=random) for _ in range(2))
        ids = (begin + by % 5 * torch.arange(SEQUENCE)) % VOCAB
        yield {"input_ids": ids, "labels": ids}


def shifted(batch):
    """Returns the batch with the labels of a configured model, which belong to the previous position."""
    return {**batch, "labels": torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def hidden(name, parameter):
    return parameter.dim() == 2 and not any(part in name for part in ("embed", "place", "head"))


def apart(losses, others):
    """The largest relative difference."""
    return max(abs(one - other) / other for one, other in zip(losses, others))


def torch_step(module):
    """Steps of torch.optim.Muon and AdamW, which return the loss."""
    named = list(module.named_parameters())
    muon = torch.optim.Muon([p for name, p in named if hidden(name, p)], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    rest = [(name, p) for name, p in named if not hidden(name, p)]
    adamw = torch.optim.AdamW([{"params": [p for _, p in rest if p.dim() > 1], "weight_decay": DECAY},
                               {"params": [p for _, p in rest if p.dim() == 1], "weight_decay": 0}], lr=LR)

    def step(batch):
        module.zero_grad()
        loss = module(**batch)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        muon.step()
        adamw.step()
        return loss.item()
    return step


def pair(make, **settings):
    """A trainer of ours, and the same module with torch's optimizers."""
    torch.manual_seed(1)
    module = make()
    example = {name: tensor[:2] for name, tensor in next(batches()).items()}
    settings = {"clip_norm": 1.0, "ranks": 2, "micro_batches": 4, "pin": False, **settings}
    if make is llama:
        trainer = twobp.Trainer(model=LLAMA, example=example, **settings)
        trainer.load_state_dict(dict(module.named_parameters()))
    else:
        trainer = twobp.Trainer(copy.deepcopy(module), example, **settings)
    return trainer, module


@pytest.mark.parametrize("make", [llama, Rotation])
def test_fifty_steps_are_those_of_torch_s_muon_and_adamw(make, monkeypatch):
    """Ours iterates in float32. If torch's iteration does too, only the order of sums differs. By itself it rounds to bfloat16. Then its losses
    change as much if the last digit of the first weights changes."""
    trainer, module = pair(make, optimizer=twobp.Muon(lr=LR, weight_decay=DECAY))
    by_muon = {name for name, state in trainer.optimizer_state().items() if "momentum" in state}
    assert by_muon == {name for name, p in module.named_parameters() if hidden(name, p)}
    moved = [copy.deepcopy(module) for _ in range(3)]
    with torch.no_grad():
        for other in moved[1:]:
            for parameter in other.parameters():
                parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    data = list(itertools.islice(batches(), STEPS))
    rounded, *others = ([step(batch) for batch in data] for step in map(torch_step, moved))
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    exact = list(map(torch_step(module), data))
    ours = [trainer.step(shifted(batch) if make is llama else batch).loss for batch in data]
    assert ours[-1] < 0.7 * ours[0]
    assert apart(ours, exact) < 1e-5
    assert apart(ours, rounded) < 3 * max(apart(other, rounded) for other in others)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(trainer.state_dict()[name], parameter.detach(), rtol=1e-4, atol=1e-4 * parameter.abs().max().item())


def test_the_running_mean_is_torch_s(tmp_path):
    trainer, module = pair(Rotation, optimizer=twobp.Muon(lr=LR, weight_decay=DECAY, average=0.8))
    mean = torch.optim.swa_utils.AveragedModel(copy.deepcopy(module), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    data = list(itertools.islice(batches(), 4))
    for batch in data[:3]:
        trainer.step(batch)
        module.load_state_dict(trainer.state_dict())
        mean.update_parameters(module)
    state = trainer.optimizer_state()
    for name, parameter in mean.module.named_parameters():
        torch.testing.assert_close(state[name]["average"], parameter.detach(), rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        expected, of_weights = mean.module(**data[3]).item(), module(**data[3]).item()
    assert trainer.evaluate([data[3]]).loss == pytest.approx(expected, rel=1e-5) != pytest.approx(of_weights, rel=1e-3)
    trainer.save(tmp_path / "bundle")
    example = {name: tensor[:2] for name, tensor in data[0].items()}
    again = twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example=example, ranks=1, micro_batches=4, pin=False)
    assert again.evaluate([data[3]]).loss == trainer.evaluate([data[3]]).loss
    several = [trainer.evaluate([batch]).loss for batch in data]
    assert trainer.evaluate(iter(data)).loss == pytest.approx(sum(several) / len(data), rel=1e-6)

    def breaks():
        yield data[0]
        raise ValueError("no more batches")

    with pytest.raises(ValueError, match="no more batches"):
        trainer.evaluate(breaks())
    with pytest.raises(twobp.Error, match="in use .* by the evaluation that reads this batch"):
        trainer.evaluate(data[0] for _ in range(2) if trainer.state_dict())
    for name, tensor in trainer.state_dict().items():  # training goes on from the weights themselves
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize("groups, torch_s", [({}, False), ({"*": {"weight_decay": DECAY}}, True)])
def test_gains_and_biases_decay_as_in_torch_if_asked(groups, torch_s):
    """With weight decay of everything, the weights are those of torch.optim.AdamW. Without it, those of matrices alone decay."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    torch.nn.init.normal_(module[1].bias)
    batch = {"input": torch.randn(8, 4).double(), "wanted": torch.randn(8, 3).double()}

    def loss(out, batch):
        return torch.nn.functional.mse_loss(out, batch["wanted"])
    trainer = twobp.Trainer(copy.deepcopy(module), {name: one[:4] for name, one in batch.items()}, loss_fn=loss, ranks=1, schedule="1f1b",
                            micro_batches=2, optimizer=twobp.AdamW(lr=LR, weight_decay=DECAY, groups=groups))
    decayed = [one for one in module.parameters() if torch_s or one.dim() > 1]
    others = [one for one in module.parameters() if not torch_s and one.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}] if others else decayed, lr=LR, weight_decay=DECAY)
    for _ in range(10):
        trainer.step(batch)
        optimizer.zero_grad()
        loss(module(batch["input"]), batch).backward()
        optimizer.step()
    for name, weight in trainer.state_dict().items():
        torch.testing.assert_close(weight, module.state_dict()[name], rtol=0, atol=1e-9)
