"""What a trainer takes into its weights and its optimizer's state, from Python and from files."""

import pytest
import safetensors.torch
import torch

import twobp

DIM = 8


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(DIM, DIM), torch.nn.BatchNorm1d(DIM), torch.nn.Linear(DIM, DIM)
        self.register_buffer("floor", torch.full((DIM,), float("-inf")))

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(torch.maximum(x, self.floor))))).square().mean()


BATCH = {"x": torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))}


def make(module=None, **settings):
    torch.manual_seed(3)
    return twobp.Trainer(Net().train() if module is None else module, BATCH, ranks=1, micro_batches=1, **settings)


@pytest.fixture
def trainer():
    trainer = make(optimizer=twobp.AdamW(average=0.5))
    trainer.step(BATCH)
    return trainer


def one(value, dtype=torch.float32):
    """A tensor with one such number."""
    return lambda shape: torch.zeros(shape).to(dtype).index_fill_(0, torch.tensor([0]), value)


WRONG = [("NaN", one(float("nan")), "numbers that are not finite"), ("infinity", one(float("inf")), "numbers that are not finite"),
         ("overflow", one(1e300, torch.float64), "is Double and has numbers that overflow Float"), ("complex", one(1, torch.cfloat), "is ComplexFloat"),
         ("integer", one(1, torch.int64), "is Long"), ("bool", one(1, torch.bool), "is Bool"), ("shape", lambda shape: torch.zeros(*shape, 1), "has shape"),
         ("sparse", lambda shape: torch.zeros(shape).to_sparse(), "dense"), ("meta", lambda shape: torch.zeros(shape, device="meta"), "on meta"),
         ("float8", lambda shape: torch.zeros(shape).to(torch.float8_e5m2), "is Float8_e5m2")]


@pytest.mark.parametrize("name", ["up.weight", "norm.running_mean", "down.bias"])
@pytest.mark.parametrize("what, tensor, message", WRONG, ids=[what for what, *_ in WRONG])
def test_weights(trainer, name, what, tensor, message):
    state, optimizer = trainer.state_dict(), trainer.optimizer_state()
    with pytest.raises(twobp.Error, match=f"{name}.*{message}"):
        trainer.load_state_dict({**state, name: tensor(state[name].shape)})
    unchanged(trainer, state, optimizer)


@pytest.mark.parametrize("name, part", [("up.weight", "exp_avg"), ("down.bias", "exp_avg_sq"), ("down.bias", "average")])
@pytest.mark.parametrize("what, tensor, message", WRONG, ids=[what for what, *_ in WRONG])
def test_optimizer_state(trainer, name, part, what, tensor, message):
    state, optimizer = trainer.state_dict(), trainer.optimizer_state()
    with pytest.raises(twobp.Error, match=f"{part}.*{message}"):
        trainer.load_optimizer_state({**optimizer, name: {**optimizer[name], part: tensor(optimizer[name][part].shape)}}, 1)
    unchanged(trainer, state, optimizer)


def unchanged(trainer, state, optimizer):
    assert all(torch.equal(tensor, state[name]) for name, tensor in trainer.state_dict().items())
    assert all(torch.equal(tensor, optimizer[name][part]) for name, of in trainer.optimizer_state().items() for part, tensor in of.items())
    assert trainer.step(BATCH).step == 2


def test_variances_are_not_negative(trainer):
    state, optimizer = trainer.state_dict(), trainer.optimizer_state()
    with pytest.raises(twobp.Error, match="norm.running_var has negative numbers, but holds variances"):
        trainer.load_state_dict({**state, "norm.running_var": -state["norm.running_var"]})
    with pytest.raises(twobp.Error, match="up.bias.exp_avg_sq has negative numbers, but holds variances"):
        trainer.load_optimizer_state({**optimizer, "up.bias": {**optimizer["up.bias"], "exp_avg_sq": one(-1e-9)(DIM)}}, 1)
    unchanged(trainer, state, optimizer)


def test_integers_stay_integers(trainer):
    state = trainer.state_dict()
    for wrong in (torch.tensor(1.5), torch.tensor(1, dtype=torch.int32)):
        with pytest.raises(twobp.Error, match="num_batches_tracked is .*, but the trainer's is Long"):
            trainer.load_state_dict({**state, "norm.num_batches_tracked": wrong})


def test_what_a_trainer_gives_it_takes(trainer):
    assert torch.isinf(trainer.state_dict()["floor"]).all()
    trainer.load_state_dict(trainer.state_dict())
    trainer.load_optimizer_state(trainer.optimizer_state(), 1)
    trainer.load_state_dict({name: torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor for name, tensor in trainer.state_dict().items()})
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        trainer.load_state_dict({name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in trainer.state_dict().items()})
    assert trainer.step(BATCH).step == 2


def test_a_view_that_is_negated_when_it_is_read(trainer):
    """torch marks the imaginary part of a conjugate as negative, and negates it later."""
    weight = trainer.state_dict()["up.weight"]
    negated = torch.complex(weight, weight).conj().imag
    assert negated.is_neg()
    trainer.load_state_dict({**trainer.state_dict(), "up.weight": negated})
    assert torch.equal(trainer.state_dict()["up.weight"], -weight)


@pytest.mark.parametrize("change, message", [
    (lambda tensor: tensor * float("nan"), "up.weight"), (lambda tensor: tensor.double() + 1e300, "up.weight"),
    (lambda tensor: tensor.to(torch.int64), "up.weight"), (lambda tensor: tensor.to(torch.cfloat), "up.weight|[Cc]omplex|C64")])
@pytest.mark.parametrize("source", ["bundle", "module"])
def test_weights_from_elsewhere(tmp_path, source, change, message):
    if source == "module":
        module = Net().train()
        module.up.weight = torch.nn.Parameter(change(module.up.weight.detach()), requires_grad=False)
        with pytest.raises(twobp.Error):
            trainer = make(module)
            trainer.step(BATCH)
        return
    make().save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**tensors, "up.weight": change(tensors["up.weight"])}, file)
    with pytest.raises(twobp.Error, match=message):
        twobp.Trainer(model={"from": str(tmp_path)}, example=BATCH, ranks=1, micro_batches=1)


@pytest.mark.parametrize("part, change", [("optimizer", lambda bytes_: bytes_[:-4] + b"\0\0\xc0\x7f"), ("weights", lambda bytes_: bytes_[:-4] + b"\0\0\xc0\x7f")])
def test_a_checkpoint_that_was_changed(trainer, tmp_path, part, change):
    trainer.checkpoint(tmp_path)
    files = [path for path in tmp_path.rglob("*.safetensors") if part in path.name]
    assert files, list(tmp_path.rglob("*"))
    for path in files:
        path.write_bytes(change(path.read_bytes()))
    del trainer
    other = make(optimizer=twobp.AdamW(average=0.5))
    notes = []
    with pytest.raises(twobp.Error) as raised:
        notes = other.resume(tmp_path)
    assert str(tmp_path) in str(raised.value), (raised.value, notes)
