"""Muon, and what it needs of a module, against PyTorch's own optimizers."""
import copy
import itertools
import json

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
    ours = [trainer.step(batch).loss for batch in data]
    assert ours[-1] < 0.7 * ours[0]
    assert apart(ours, exact) < 1e-5
    assert apart(ours, rounded) < 3 * max(apart(other, rounded) for other in others)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(trainer.state_dict()[name], parameter.detach(), rtol=1e-4, atol=1e-4 * parameter.abs().max().item())


class Uses(torch.nn.Module):
    """Weights of two dimensions in many uses. `matrices` are those that multiply, apart from the head."""
    matrices = {"attention.in_proj_weight", "attention.out_proj.weight", "latents.in_proj_weight", "latents.out_proj.weight", "up.weight", "down.weight",
                "heads.weight", "low", "high", "mix", "normed.parametrizations.weight.original1", "lstm.weight_ih_l0", "lstm.weight_hh_l0"}

    def __init__(self):
        super().__init__()
        weight = lambda *sizes: torch.nn.Parameter(torch.randn(*sizes) * 0.1)  # noqa: E731
        self.by_frequency = torch.nn.Embedding(VOCAB, 12, scale_grad_by_freq=True)
        self.scaled, self.indexed, self.gathered, self.tied = (weight(VOCAB, 12) for _ in range(4))
        self.added, self.learned = weight(SEQUENCE, 12), weight(5, 12)
        self.relative = weight(2 * SEQUENCE - 1, 2)
        places = torch.arange(SEQUENCE)
        self.register_buffer("distance", places[:, None] - places + SEQUENCE - 1)
        self.attention, self.latents = (torch.nn.MultiheadAttention(12, 2, batch_first=True) for _ in range(2))
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(12, 12))
        self.up, self.down, self.heads = torch.nn.Linear(12, 40), torch.nn.Linear(20, 12), torch.nn.Linear(12, 12)
        self.low, self.high, self.mix = weight(12, 3), weight(3, 12), weight(SEQUENCE, SEQUENCE)
        self.lstm = torch.nn.LSTM(12, 12, batch_first=True)
        self.head = torch.nn.Linear(12, VOCAB)

    def forward(self, input_ids, labels):
        of = torch.nn.functional
        x = self.by_frequency(input_ids) + of.embedding(input_ids, self.scaled * 2.0) + self.indexed[input_ids] + self.added
        x = x + self.gathered.gather(0, input_ids.flatten()[:, None].expand(-1, 12)).view_as(x) + of.embedding(input_ids, self.tied)
        x = x + of.linear(x, self.tied)[..., :12]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        memory = self.learned.expand(len(x), -1, -1)
        x = x + self.latents(x, memory, memory, need_weights=False)[0] + self.normed(x)
        gate, up = self.up(x).chunk(2, -1)
        x = x + self.down(of.silu(gate) * up)
        y = self.heads(x).unflatten(2, (2, 6))
        bias = self.relative[self.distance].permute(2, 0, 1)
        x = x + torch.cat([torch.softmax(y[:, :, i] @ y[:, :, i].mT + bias[i], -1) @ y[:, :, i] for i in range(2)], -1)
        x = x + of.linear(x, self.low @ self.high) + torch.softmax(self.mix, -1) @ x
        x = x + self.lstm(x)[0]
        return of.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.slow
def test_muon_updates_what_multiplies_as_a_matrix(tmp_path):
    trainer, _ = pair(Uses, optimizer=twobp.Muon(lr=LR), clip_norm=0)
    by_muon = lambda one: {name for name, state in one.optimizer_state().items() if "momentum" in state}  # noqa: E731
    assert by_muon(trainer) == Uses.matrices
    trainer.save(tmp_path / "bundle")
    example = {name: tensor[:2] for name, tensor in next(batches()).items()}
    again = lambda: twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example=example, optimizer=twobp.Muon(lr=LR))  # noqa: E731
    assert by_muon(again()) == Uses.matrices
    path = tmp_path / "bundle/graph.json"
    graph = json.loads(path.read_text())
    for parameter in graph["parameters"].values():
        parameter.pop("product", None)
    path.write_text(json.dumps(graph))
    with pytest.raises(twobp.Error, match="no parameter of the model is a matrix .* capture it again"):
        again()


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQUENCE, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def neox():
    transformers = pytest.importorskip("transformers")
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=SEQUENCE))


def phi3():
    transformers = pytest.importorskip("transformers")
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40,
        max_position_embeddings=SEQUENCE, pad_token_id=None, eos_token_id=0, bos_token_id=0))


def mamba():
    transformers = pytest.importorskip("transformers")
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, state_size=4, use_cache=False))


def falcon():
    transformers = pytest.importorskip("transformers")
    return transformers.FalconForCausalLM(transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True,
        bos_token_id=0, eos_token_id=0, attention_dropout=0.0, hidden_dropout=0.0))


def parts_of(name, weight):
    """The projections in a weight, which Muon makes orthogonal one by one."""
    if name.endswith("attn.c_attn.weight"):
        return weight.split(24, dim=1)
    if name.endswith("attention.query_key_value.weight") and weight.shape[0] == 72:  # GPT-NeoX: of each head
        return [part.flatten(0, 1) for part in weight.view(3, 3, 8, 24).unbind(1)]
    if name.endswith("self_attention.query_key_value.weight"):  # Falcon: two queries, a key and a value in each of two groups
        return [part.flatten(0, 1) for part in weight.view(2, 24, 24).split([12, 6, 6], dim=1)]
    sizes = {"qkv_proj.weight": [24, 12, 12], "gate_up_proj.weight": [40, 40], "in_proj.weight": [48, 48], "x_proj.weight": [2, 4, 4], "in_proj_weight": [12] * 3,
             "up.weight": [20, 20]}
    return next((weight.split(rows) for end, rows in sizes.items() if name.endswith(end)), [weight])


@pytest.mark.parametrize("make", [gpt2, neox, phi3, mamba, falcon, Uses])
def test_projections_in_one_weight_take_torch_s_steps_one_by_one(make, tmp_path, monkeypatch):
    """As captured modules, and as configured models."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # ours iterates in float32
    torch.manual_seed(1)
    module, batch = make(), next(batches())
    example = {name: tensor[:2] for name, tensor in batch.items()}
    settings = {"micro_batches": 4, "optimizer": twobp.Muon(lr=LR, weight_decay=DECAY), "pin": False}
    trainers = [twobp.Trainer(copy.deepcopy(module).train(), example, ranks=2, **settings)]
    if make in (gpt2, neox, phi3, mamba):
        module.save_pretrained(tmp_path)
        trainers.append(twobp.Trainer(model={"from": str(tmp_path)}, example=example, ranks=2, **settings))
    loss = module.train()(**batch)
    (loss if make is Uses else loss.loss).backward()
    for trainer in trainers:
        assert trainer.step(batch).loss == pytest.approx((loss if make is Uses else loss.loss).item(), rel=1e-5)
        state, compared = trainer.state_dict(), 0
        by_muon = {name for name, of in trainer.optimizer_state().items() if "momentum" in of}
        for name, parameter in module.named_parameters():
            if name not in by_muon:
                continue
            parts = [torch.nn.Parameter(part.detach().clone()) for part in parts_of(name, parameter)]
            for part, gradient in zip(parts, parts_of(name, parameter.grad)):
                part.grad = gradient.clone()
            torch.optim.Muon(parts, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw").step()
            for ours, before, part in zip(parts_of(name, state[name]), parts_of(name, parameter.detach()), parts):
                # A key's bias and the like apart, gradients are exact to rounding, which the iteration magnifies where singular values are small.
                torch.testing.assert_close(ours, part.detach(), rtol=0, atol=2e-2 * (part.detach() - before).abs().max().item())
            compared += len(parts) > 1
        assert compared == {gpt2: 2, neox: 2, phi3: 4, mamba: 4, falcon: 2, Uses: 3}[make]


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
