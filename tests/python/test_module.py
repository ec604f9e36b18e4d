"""A torch.nn.Module through capture and the trainer: PyTorch's losses on one device, and the same bits under every schedule."""
import copy

import pytest
import torch
from torch import nn

import twobp
from twobp.capture import capture


class Blocks(nn.Module):
    """Residual blocks with LayerNorm, a tied weight, a frozen one and a constant buffer."""

    def __init__(self, width=12, blocks=4):
        super().__init__()
        self.table = nn.Embedding(20, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                     for _ in range(blocks)])
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.table.weight
        self.blocks[1][1].weight.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, ids):
        x = self.table(ids) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.fixture
def batch():
    ids = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "labels": ids.roll(-1, dims=1)}


def make(batch, **settings):
    torch.manual_seed(7)
    module = Blocks()
    settings = {"ranks": 2, "micro_batches": 4, "optimizer": twobp.AdamW(lr=1e-2), "clip_norm": 1.0, **settings}
    return module, twobp.Trainer(module, {name: tensor[:2] for name, tensor in batch.items()}, loss_fn=loss_of, **settings)


@pytest.mark.slow
def test_a_model_of_vision_and_language():
    """LLaVA asserts that the tokens of images are as many as their features."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    module = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **common),
        vision_config=transformers.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=16, **common), image_token_index=60, image_seq_length=4)).train()
    ids = torch.randint(5, 50, (4, 12))
    for row, first in enumerate((1, 3, 0, 8)):
        ids[row, first:first + 4] = 60
    batch = {"input_ids": ids, "pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.where(ids == 60, -100, ids)}
    trainer = twobp.Trainer(module, {name: tensor[:2] for name, tensor in batch.items()}, ranks=2, micro_batches=2, optimizer=twobp.SGD(lr=0.1))
    assert max(run.gradients for run in trainer._captured.dry_runs) < 1e-5
    assert trainer.step(batch).loss == pytest.approx(module(**batch).loss.item(), rel=1e-5)
    ids[2, 6] = 60
    with pytest.raises(twobp.Error, match=r"do not pass a check of the module \(modeling_llava.py:\d+, in get_placeholder_mask"):
        trainer.step(batch)


@pytest.mark.slow
def test_a_model_that_leaves_out_images_by_a_mask():
    """Idefics3 takes x[mask] and mask.sum().tolist(), where the fields decide the mask."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = transformers.Idefics3ForConditionalGeneration(transformers.Idefics3Config(
        text_config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, **common},
        vision_config={"image_size": 16, "patch_size": 4, **common}, image_token_id=60, scale_factor=2, pad_token_id=0)).train()
    ids, pixels = torch.randint(5, 50, (2, 20)), torch.randn(2, 2, 3, 16, 16)
    ids[0, 1:9] = ids[1, 3:7] = 60
    pixels[1, 1] = 0  # the second sample has one image
    batch = {"input_ids": ids, "pixel_values": pixels, "labels": torch.where(ids == 60, -100, ids)}
    trainer = twobp.Trainer(module, batch, ranks=2, micro_batches=2, optimizer=twobp.SGD(lr=0.1))
    assert max(run.gradients for run in trainer._captured.dry_runs) < 1e-4
    assert trainer.step([batch, batch]).loss == pytest.approx(module(**batch).loss.item(), rel=1e-5)
    other = {**batch, "input_ids": ids.flip(0), "pixel_values": pixels.flip(0), "labels": batch["labels"].flip(0)}
    with pytest.raises(twobp.Error, match=r"x\[mask\] has other elements than in the example.*\(modeling_idefics3.py:\d+, in get_image_features: pixel_values = pixel_values\[real"):
        trainer.step([batch, other])


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids, y):
        parts = self.table(ids)[ids > 2].split((ids > 2).sum(1).tolist())
        return torch.stack([part.sum(0) for part in parts]).sub(y).square().mean()


def test_a_cached_capture_is_for_a_mask_of_its_own(tmp_path):
    torch.manual_seed(0)
    module, y = Chooses().train(), torch.randn(3, 4)
    for changed in (8, 1, 8):
        ids = torch.tensor([[1, 5, 3], [7, 1, changed], [2, 2, 4]])
        trainer = twobp.Trainer(module, {"ids": ids, "y": y}, loss_reduction="mean", ranks=1, cache=tmp_path)
        assert trainer.step({"ids": ids, "y": y}).loss == pytest.approx(module(ids, y).item(), rel=1e-6)
        with pytest.raises(twobp.Error, match="other elements than in the example|as in the example"):
            trainer.step({"ids": ids.flip(1), "y": y})


def reference(module, batch, steps):
    """PyTorch on one device."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01},
                                   {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0}], lr=1e-2)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(batch["ids"]), batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def test_losses_are_pytorch_s_and_equal_in_bits(batch):
    runs = []
    for settings in ({"schedule": "1f1b", "p2": "fill"}, {"schedule": "zb-v"}, {"ranks": 1}, {"ranks": 3}, {"schedule": "gpipe", "p2": "off"}):
        module, trainer = make(batch, **settings)
        results = [trainer.step(batch) for _ in range(5)]
        runs.append(([one.loss for one in results], [one.grad_norm for one in results], trainer.state_dict()))
    losses, norms = reference(module, batch, 5)
    assert runs[0][0] == pytest.approx(losses, rel=1e-5)
    assert runs[0][1] == pytest.approx(norms, rel=1e-4)
    for other in runs[1:]:
        assert other[:2] == runs[0][:2]
        assert all(torch.equal(tensor, runs[0][2][name]) for name, tensor in other[2].items())
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(runs[0][2][name], tensor, rtol=1e-3, atol=1e-5)


def test_a_smaller_batch_is_captured_when_it_comes(batch):
    module, trainer = make(batch)
    small = {name: tensor[:5] for name, tensor in batch.items()}
    assert trainer.evaluate([small]).loss == pytest.approx(loss_of(module(small["ids"]), small).item(), rel=1e-5)
    module, trainer = make(batch)
    assert trainer.step(small).loss == pytest.approx(loss_of(module(small["ids"]), small).item(), rel=1e-5)


def test_what_cannot_be_captured_is_one_clear_error(batch):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(twobp.Error):
        twobp.Trainer(Branches(), {"x": torch.zeros(2, 4)}, loss_fn=lambda output, batch: output.mean(), ranks=1)
    with pytest.raises(twobp.Error, match="loss"):
        twobp.Trainer(Blocks(), {"ids": batch["ids"]}, ranks=1)


class Alternates(nn.Module):
    """Its cuts have 8 and 16 numbers a sample by turns, so kinds of layers follow each other in several orders."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)) for _ in range(4)))
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.head(self.blocks(x)), y)


def test_kinds_of_layers_follow_each_other_in_any_order():
    torch.manual_seed(0)
    module = Alternates().train()
    whole = {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}
    expected = module(**whole).item()
    states = []
    for ranks in (1, 2, 3):
        trainer = twobp.Trainer(module, {name: tensor[:2] for name, tensor in whole.items()}, ranks=ranks, micro_batches=3)
        kinds = [layer["kind"] for layer in trainer._captured.graph["layers"]]
        followers = {(kind, after) for kind, after in zip(kinds, kinds[1:])}
        assert (max(kinds) - 1, max(kinds)) not in followers, "the last two kinds are no neighbours"
        assert trainer.step(whole).loss == pytest.approx(expected, rel=1e-6)
        states.append(trainer.state_dict())
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)


def expect_two_steps_of(expected, optimizer, trainer, batch):
    for _ in range(2):
        loss = expected(**batch)
        optimizer.zero_grad()
        loss.backward()
        assert trainer.step(batch).loss == pytest.approx(loss.item(), rel=1e-9)
        optimizer.step()
    for name, one in trainer.state_dict().items():
        assert torch.allclose(one, expected.state_dict()[name], rtol=1e-9, atol=1e-12), name


class Trunk(nn.Module):
    """`how` runs the trunk, whose gradient ends before the head."""
    def __init__(self, how):
        super().__init__()
        self.first, self.trunk, self.beside, self.head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8)
        self.how = how

    def forward(self, x, y):
        return self.head(self.how(self, self.first(x))).sub(y).square().mean()


def without_gradient(m, x):
    with torch.no_grad():
        return m.trunk(x)


def around_one(m, x):
    with torch.no_grad():
        y = m.trunk(x)
        with torch.enable_grad():
            z = m.beside(x)
        return y + z


@pytest.mark.parametrize("how", [without_gradient, around_one, lambda m, x: m.trunk(x).detach(), lambda m, x: (m.trunk(x) + m.beside(x)).detach(),
                                 lambda m, x: torch.tanh(m.trunk(x.detach())), lambda m, x: m.trunk(x).detach() + m.beside(x)])
def test_what_no_gradient_reaches_is_not_trained(how):
    """As in PyTorch, where decay leaves alone what has no gradient."""
    torch.manual_seed(0)
    module = Trunk(how).double().train()
    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    expected = copy.deepcopy(module)
    trainer = twobp.Trainer(module, batch, ranks=2, micro_batches=1, optimizer=twobp.AdamW(lr=0.1, weight_decay=0.1))
    optimizer = torch.optim.AdamW([{"params": [p for p in expected.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
                                   for decays in (True, False)], lr=0.1)
    expect_two_steps_of(expected, optimizer, trainer, batch)


class Twice(nn.Module):
    """Calls its chain for a gradient, and before and after that without one."""

    def __init__(self, calls=2):
        super().__init__()
        self.chain, self.calls = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]), calls

    def forward(self, x, y):
        with torch.no_grad():
            for _ in range(self.calls - 1):
                y = y + self.chain(2 * x)
        found = self.chain(x)
        with torch.no_grad():
            weight = self.chain(3 * x) if self.calls > 1 else y
        return (weight * (found - y)).square().mean()


def test_a_call_without_gradients_has_no_backward_pass():
    def of_gradients(module):
        captured = capture(module.double(), batch, cache=False)
        programs = [captured.graph["shapes"][0]["programs"][layer["kind"]] for layer in captured.graph["layers"]]
        code = [[*one["backward_p1"], *(step for unit in one["backward_p2"] for step in unit["code"])] for one in programs]
        return sum("mm" in step.get("op", "") for steps in code for step in steps), sum("add_to" in step for steps in code for step in steps)

    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    alone, beside = of_gradients(Twice(calls=1)), of_gradients(Twice())
    assert alone == (3, 2 * 4)  # products for gradients of inputs, of which the first needs none, and gradients of parameters
    assert beside[0] == 3
    module = Twice().double()
    expected = copy.deepcopy(module)
    trainer, optimizer = twobp.Trainer(module, batch, ranks=2, micro_batches=1, optimizer=twobp.SGD(lr=0.1)), torch.optim.SGD(expected.parameters(), 0.1)
    expect_two_steps_of(expected, optimizer, trainer, batch)


def chain_of(*ends):
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(14)], *ends)


class Referred(nn.Module):
    """Compares with a frozen model, which it calls last, like DPO. All layers after a `wide` reference would pass its output on."""

    def __init__(self, wide):
        super().__init__()
        self.policy, self.reference = (chain_of(*([nn.Linear(8, 32)] if wide else [])) for _ in range(2))
        self.reference.requires_grad_(False)
        self.wide = wide

    def forward(self, x, y):
        policy = self.policy(x)
        with torch.no_grad():
            reference = self.reference(x)
        if not self.wide:
            policy, reference = policy.sum(1), reference.sum(1)
        return (policy - reference - y.view(-1, *[1] * (policy.dim() - 1))).square().mean()


@pytest.mark.parametrize("wide", [False, True])
def test_a_reference_model_is_cut_before_the_trained_one(wide):
    batch = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), "y": torch.linspace(-1, 1, 8)}
    expected, runs = [], []
    for settings in (None, {"ranks": 1}, {"ranks": 2}, {"ranks": 2, "p2": "off"}, {"ranks": 3, "schedule": "gpipe"}, {"ranks": 2, "schedule": "zb-v"}):
        torch.manual_seed(4)
        module = Referred(wide).train()
        if settings is None:
            optimizer = torch.optim.SGD(module.policy.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                expected.append(module(**batch))
                expected[-1].backward()
                optimizer.step()
            continue
        trainer = twobp.Trainer(module, {name: tensor[:2] for name, tensor in batch.items()}, micro_batches=4, optimizer=twobp.SGD(lr=0.1),
                                loss_reduction="mean", **settings)
        first, last = ("policy", "reference") if wide else ("reference", "policy")
        assert trainer.layers[0].startswith(first) and trainer.layers[-1].startswith(last), trainer.layers
        assert sum(trainer.split) == len(trainer.layers)
        runs.append([trainer.step(batch).loss for _ in range(3)])
    assert runs[0] == pytest.approx([one.item() for one in expected], rel=1e-5)
    assert all(run == runs[0] for run in runs)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, input, target):
        for layer in self.layers:
            input = torch.relu(layer(input))
        return ((input - target) ** 2).sum(dim=1).mean()


@pytest.fixture
def vectors():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 4, generator=generator) for name in ("input", "target")}


def mlp(vectors, **settings):
    torch.manual_seed(5)
    module = Mlp()
    settings = {"ranks": 2, "micro_batches": 4, "optimizer": twobp.AdamW(lr=1e-2), **settings}
    return module, twobp.Trainer(module, {name: tensor[:2] for name, tensor in vectors.items()}, **settings)


def test_rates_of_the_caller_and_groups_by_name_are_pytorch_s(vectors):
    module, trainer = mlp(vectors, optimizer=twobp.AdamW(weight_decay=0.3, groups={"*.bias": {"weight_decay": 0.2, "lr_scale": 0.5}, "layers.1.*": {"weight_decay": 0}}))
    module = copy.deepcopy(module)  # the trainer's own must not change
    decays = [0 if name.startswith("layers.1.") else 0.2 if name.endswith("bias") else 0.3 for name, _ in module.named_parameters()]
    scales = [0.5 if name.endswith("bias") else 1 for name, _ in module.named_parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], "weight_decay": decay} for p, decay in zip(module.parameters(), decays)])
    for lr in (0.0, 1e-1, 3e-2):
        optimizer.zero_grad()
        module(**vectors).backward()
        for group, scale in zip(optimizer.param_groups, scales):
            group["lr"] = lr * scale
        optimizer.step()
        assert trainer.step(vectors, lr=lr).lr == lr
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    with pytest.raises(twobp.Error, match="no parameter is called '\\*.gain'"):
        mlp(vectors, optimizer=twobp.AdamW(groups={"*.gain": {"weight_decay": 0}}))


@pytest.mark.parametrize("optimizer", [twobp.AdamW(lr=1e-2), twobp.SGD(lr=1e-2, momentum=0.9)], ids=["adamw", "sgd"])
def test_weights_and_the_optimizer_s_state_take_a_run_to_other_ranks(vectors, optimizer):
    _, first = mlp(vectors, optimizer=optimizer)
    for _ in range(2):
        first.step(vectors)
    _, second = mlp(vectors, optimizer=optimizer, ranks=3, schedule="gpipe")
    state = first.optimizer_state()
    second.load_state_dict(first.state_dict())
    second.load_optimizer_state(state, 2)
    assert second.steps_done == 2
    assert [second.step(vectors).loss for _ in range(2)] == [first.step(vectors).loss for _ in range(2)]
    del state["layers.0.bias"]
    with pytest.raises(twobp.Error, match="the state has no layers.0.bias"):
        second.load_optimizer_state(state, 2)


def test_the_module_s_own_state_dict_goes_in_and_out(vectors):
    module, trainer = mlp(vectors)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer.step(vectors)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    module.load_state_dict(trainer.state_dict())
    assert module(**vectors).item() == pytest.approx(trainer.evaluate([vectors]).loss, rel=1e-6)
    trainer.load_state_dict(before)
    module.load_state_dict(before)
    assert module(**vectors).item() == pytest.approx(trainer.evaluate([vectors]).loss, rel=1e-6)


def test_a_saved_module_is_a_bundle_that_trains_on(vectors, tmp_path):
    _, trainer = mlp(vectors, optimizer=twobp.SGD(lr=1e-2))
    trainer.step(vectors)
    trainer.save(tmp_path / "bundle")
    example = {name: tensor[:2] for name, tensor in vectors.items()}
    again = twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example=example, ranks=3, micro_batches=4, optimizer=twobp.SGD(lr=1e-2))
    assert [again.step(vectors).loss for _ in range(2)] == [trainer.step(vectors).loss for _ in range(2)]
    again.save(tmp_path / "again")
    assert (tmp_path / "again/graph.json").read_text() == (tmp_path / "bundle/graph.json").read_text()
    with pytest.raises(twobp.Error, match="no program"):
        again.step({name: tensor[:5] for name, tensor in vectors.items()})  # no module to capture again
    (tmp_path / "bundle/graph.json").write_text("{}")
    with pytest.raises(twobp.Error, match="graph.json"):
        twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example=example)


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
