"""A torch.nn.Module through capture and the trainer: PyTorch's losses on one device, and the same bits under every schedule."""
import copy

import pytest
import torch
from torch import nn

import twobp


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
    for _ in range(2):
        loss = expected(**batch)
        optimizer.zero_grad()
        loss.backward()
        assert trainer.step(batch).loss == pytest.approx(loss.item(), rel=1e-9)
        optimizer.step()
    for name, one in trainer.state_dict().items():
        assert torch.allclose(one, expected.state_dict()[name], rtol=1e-9, atol=1e-12), name
