"""Bad input to the trainer of a module: one clear error each, and the trainer goes on where it can."""
import builtins
import copy
import json
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad as own_grad
from torch.nn import functional as F

import twobp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))) * self.scale)


def mse(output, batch):
    return nn.functional.mse_loss(output, batch["y"])


def make_batch(samples=8):
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(samples, 4, generator=generator), "y": torch.randn(samples, 4, generator=generator)}


def make(module=None, **settings):
    torch.manual_seed(3)
    module = Net().train() if module is None else module
    settings = {"loss_fn": mse, "ranks": 2, "micro_batches": 2, "optimizer": twobp.AdamW(lr=1e-2), **settings}
    return module, twobp.Trainer(module, {name: tensor[:4] for name, tensor in make_batch().items()}, **settings)


class Wraps(Net):
    """A net whose forward does one more thing, on its line 2."""

    def __init__(self, more):
        super().__init__()
        self.more = more

    def forward(self, x):
        return self.more(self, super().forward(x))


def write_weight(self, y):
    self.up.weight.mul_(2)
    return y


def write_weight_without_grad(self, y):
    with torch.no_grad():
        self.up.weight.mul_(2)
    return y


def say(self, y):
    print("a step")
    return y


def branch(self, y):
    if y.sum() > 0:
        return y
    return -y


def loop_over_experts(self, y):
    for expert in y.sum(-1).gt(0).nonzero():
        y = y * self.up.weight[expert].sum()
    return y


@pytest.mark.parametrize("more, message", [
    (loop_over_experts, r"in loop_over_experts: for expert in.*torch\.where.*experts_implementation=.grouped_mm"),
    (write_weight, "up.weight|in-place"), (write_weight_without_grad, r"changes its parameter .*up\.weight.*buffer"),
    (say, r"prints \(.*test_bad_input\.py:\d+, in say\)"), (branch, r"(?s)test_bad_input\.py:\d+, in branch: if y\.sum.*torch\.where"),
    (lambda self, y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)), r"calls 'cond', an operator that takes functions \(.*test_bad_input\.py:\d+, in <lambda>.*torch\.where"),
    (lambda self, y: torch.autograd.grad(y.square().sum(), y, create_graph=True)[0], r"^torch.autograd.grad or backward is called .*test_bad_input\.py:\d+, in <lambda>.*Write this one out"),
    (lambda self, y: (y.sum().backward(), y)[1], r"^torch.autograd.grad or backward is called .*test_bad_input\.py:\d+, in <lambda>"),
    (lambda self, y: own_grad(lambda x: x.square().sum())(y), r"^torch.func.grad or vjp is called .*test_bad_input\.py:\d+, in <lambda>"),
    (lambda self, y: torch.func.jvp(torch.sin, (y,), (y,))[1], r"^torch.func.jvp is called .*test_bad_input\.py:\d+, in <lambda>"),
    (lambda self, y: torch.func.vmap(torch.func.jacrev(torch.sin))(y).sum(-1), r"^torch.func.grad or vjp is called .*test_bad_input\.py:\d+, in <lambda>"),
    (lambda self, y: y if random.random() < 2 else -y, "draws by Python's random or NumPy's.*torch.where"),
    (lambda self, y: y if np.random.uniform() < 2 else -y, "draws by Python's random or NumPy's"),
    (lambda self, y: y * float(y.detach().max()), "values of tensors|value of a tensor"), (lambda self, y: y.detach(), "nothing is trained")])
def test_a_forward_that_has_no_programs(more, message):
    with pytest.raises(twobp.Error, match=message):
        make(Wraps(more).train())
    assert builtins.print is print


@pytest.mark.parametrize("loss_fn, message", [
    (lambda o, b: {"loss": mse(o, b), "z": o}, "loss_fn returned a dict with the keys 'loss', 'z', .*Return one of its values alone"),
    (lambda o, b: (mse(o, b), o), "loss_fn returned a tuple of 2, .*Return the loss alone"), (lambda o, b: None, "loss_fn returned a NoneType"),
    (lambda o, b: 3.0, "loss_fn returned a float"), (lambda o, b: (o - b["y"]).square().mean(1), r"loss_fn returned a tensor of shape \[4\], .*Reduce it"),
    (lambda o, b: mse(o, b) + torch.autograd.grad(o.sum(), b["x"])[0].mean(), "^torch.autograd.grad or backward is called within the forward pass or loss_fn")])
def test_a_loss_function_that_returns_no_loss(loss_fn, message):
    with pytest.raises(twobp.Error, match=message):
        make(loss_fn=loss_fn)


class Looks(nn.Module):
    """Looks ids up in a table, and asserts what its batch must have."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x, ids, labels):
        torch._check_tensor_all(x.sum(1, dtype=torch.float64) < 100)
        torch._check_tensor_all(ids[:, 0] > 0, lambda: "the first id")
        return F.cross_entropy(self.head(x + self.table(ids).sum(1)), labels.clamp(max=10), label_smoothing=0.1)


def test_fields_that_fail_a_check_or_are_no_ids_are_named():
    batch = {"x": torch.ones(4, 4), "ids": torch.tensor([[1, 0], [2, 3], [4, 4], [1, 1]]), "labels": torch.tensor([0, 2, -100, 1])}
    module = Looks().train()
    trainer = twobp.Trainer(module, batch, ranks=2, micro_batches=2, optimizer=twobp.SGD(lr=0.1))
    assert trainer.step([batch, batch]).loss == pytest.approx(module(**batch).item(), rel=1e-6)
    for name, place, value, message in (
            ("ids", (1, 1), 5, r"'ids' must be from 0 to 4, as embedding takes it \(part 'table', test_bad_input.py:\d+, in forward"), ("ids", (3, 1), -1, "'ids' must be"),
            ("ids", (2, 0), 0, r"its fields do not pass a check of the module \(test_bad_input.py:\d+, in forward: torch._check_tensor_all\(ids"),
            ("x", (0, 0), 1e3, r"do not pass a check of the module \(test_bad_input.py:\d+, in forward: torch._check_tensor_all\(x")):
        bad = {**batch, name: batch[name].clone()}
        bad[name][place] = value
        with pytest.raises(twobp.Error, match=message):
            trainer.step([batch, bad])
        with pytest.raises(twobp.Error, match=message):
            trainer.evaluate([[bad]])
    assert trainer.steps_done == 1
    trainer.step([batch, batch])
    labelled = lambda output, batch: F.cross_entropy(output, batch["y"])
    given = {"x": torch.ones(4, 4), "y": torch.tensor([0, 2, -100, 1])}
    trainer = twobp.Trainer(nn.Sequential(nn.Linear(4, 3)).train(), {"input": given["x"], "y": given["y"]}, loss_fn=labelled, ranks=1)
    with pytest.raises(twobp.Error, match=r"'y' must be from 0 to 2, or -100, as cross_entropy_loss takes it \(test_bad_input.py"):
        trainer.step({"input": given["x"], "y": torch.tensor([0, 2, 3, 1])})


def test_a_check_of_computed_values_is_refused():
    def checks(self, y):
        torch._check_tensor_all(y < 1e9)
        return y

    with pytest.raises(twobp.Error, match=r"checks a value that does not depend on the fields .*test_bad_input\.py:\d+, in checks.*Leave out the check"):
        make(Wraps(checks).train())


def halve_in_evaluation(self, y):
    if not self.training:
        with torch.no_grad():
            self.up.weight.data.div_(2)
    return y


def gelu_and_dropout(self, y):
    return F.dropout(F.gelu(y), 0.1, self.training)


@pytest.mark.parametrize("failing", ["aten::gelu", "aten::gelu_backward", "twobp::dropout", "aten::native_dropout_backward"])
def test_an_operator_that_fails_outside_autograd_is_named(failing, monkeypatch):
    from twobp.capture import interpret
    call = interpret.call

    def without(name, arguments):
        if name == failing:
            raise RuntimeError("no kernel\nand more")
        return call(name, arguments)
    monkeypatch.setattr(interpret, "call", without)
    with pytest.raises(twobp.Error, match=rf"layer '\w+': {failing} cannot run outside autograd \(.*test_bad_input\.py:\d+, in gelu_and_dropout: .*\): no kernel\. Write"):
        twobp.Trainer(Wraps(gelu_and_dropout).train(), make_batch(), loss_fn=mse, ranks=1, cache=False)


def test_a_parameter_that_evaluation_would_change_stays():
    module = Wraps(halve_in_evaluation).train()
    before = module.up.weight.clone()
    with pytest.raises(twobp.Error, match="in evaluation mode .* changes its parameter 'up.weight'"):
        make(module)
    assert torch.equal(module.up.weight, before) and module.training


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-0.01, 0.01)


def compute_again(self, y):
    return torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=True)


def hook(self, y):
    y.register_hook(lambda dy: dy.clamp(-0.01, 0.01))
    return y


def assign_buffer(self, y):
    self.scale = 0.9 * self.scale
    return y


@pytest.mark.parametrize("more, message", [
    (lambda self, y: Clip.apply(y), "calls Clip, a torch.autograd.Function"), (hook, r"gradient of a tensor \(.*test_bad_input\.py:\d+, in hook: y\.register_hook"),
    (compute_again, r"use_reentrant=True \(.*test_bad_input\.py:\d+, in compute_again.*use_reentrant=False"), (assign_buffer, r"buffer 'scale'.*self\.scale\.copy_")])
def test_what_programs_would_lose(more, message):
    with pytest.raises(twobp.Error, match=message):
        make(Wraps(more).train())
    assert torch.Tensor.register_hook.__name__ == "register_hook" and "apply" in vars(torch.autograd.Function)


class Partly(Net):
    """Its part `down` is computed without gradients, and `unused` not at all."""

    def __init__(self, without_gradient=torch.no_grad):
        super().__init__()
        self.out, self.unused, self.without_gradient = nn.Linear(4, 4), nn.Linear(2, 2), without_gradient

    def forward(self, x):
        y = torch.relu(self.norm(self.up(x)))
        with self.without_gradient():
            factor = self.down(y).sigmoid().clone()
        return self.out(x) * factor + y.sum(-1, keepdim=True) + 0 * torch.rand(3).sum()


def test_parameters_without_a_gradient_stay():
    module, trainer = make(Partly().train(), optimizer=twobp.SGD(lr=0.1), ranks=1, micro_batches=1)
    batch = {name: tensor[:4] for name, tensor in make_batch().items()}
    before = copy.deepcopy(module.state_dict())
    mse(module(batch["x"]), batch).backward()
    trainer.step(batch)
    after = trainer.state_dict()
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            assert torch.equal(after[name], before[name]), name
        else:
            torch.testing.assert_close(after[name], before[name] - 0.1 * parameter.grad, rtol=1e-4, atol=1e-5)
    assert module.down.weight.grad is None and module.unused.weight.grad is None



def test_a_loss_with_parameters():
    loss = nn.Module()
    loss.p = nn.Parameter(torch.ones(4))
    loss.forward = lambda output, batch: (loss.p * (output - batch["y"]) ** 2).mean()
    with pytest.raises(twobp.Error, match="loss_fn has the parameter 'p'"):
        make(loss_fn=loss)


def test_settings_that_are_no_settings():
    for settings, message in (({"optimizer": "adamw"}, "optimizer is a str"), ({"optimizer": twobp.AdamW}, "optimizer is the class AdamW"),
                              ({"ranks": "2"}, '^the settings: "pipeline.ranks" expects an integer'), ({"clip_norm": float("nan")}, "clip_norm is nan"), ({"threads": object()}, "pipeline.threads is <object .*, a object: give a number"), ({"split": {1, 2}}, "pipeline.split is .*, a set"),
                              ({"memory_cap": [float("inf")]}, "memory_cap is .inf.: give finite")):
        with pytest.raises(twobp.Error, match=message):
            make(**settings)
    _, trainer = make(clip_norm=torch.tensor(1.0))
    for lr in (float("nan"), -1, True, 1e300, "a"):
        with pytest.raises(twobp.Error, match="lr is .*, but must be a number"):
            trainer.step(make_batch(), lr=lr)
    assert trainer.step(make_batch(), lr=np.float32(0.5)).lr == 0.5
    with pytest.raises(twobp.Error, match="not finite"):
        trainer.load_state_dict({**trainer.state_dict(), "up.weight": torch.full((8, 4), float("nan"))})
    with pytest.raises(twobp.Error, match="cannot write into /nowhere"):
        trainer.trace("/nowhere/step.json")
    for steps in (-1, 2.5, None):
        with pytest.raises(twobp.Error, match="steps is .*, but must be a whole number"):
            trainer.load_optimizer_state(trainer.optimizer_state(), steps)
    for call in (trainer.load_state_dict, lambda state: trainer.load_optimizer_state(state, 1)):
        with pytest.raises(twobp.Error, match="the state is a list, but must be a dict"):
            call([1])
    with pytest.raises(twobp.Error, match=r"this is one batch: give \[batch\]"):
        trainer.evaluate(make_batch())
    assert trainer.step(make_batch()).step == 2


def test_an_output_that_is_no_loss():
    with pytest.raises(twobp.Error, match=r"takes x, but not the batch's y, and no loss_fn is given"):
        make(loss_fn=None)
    with pytest.raises(twobp.Error, match=r"tensor of shape \[4, 4\], and no loss_fn is given"):
        twobp.Trainer(Net().train(), {"x": make_batch()["x"][:4]})
    with pytest.raises(twobp.Error, match="one floating-point scalar"):
        make(loss_fn=lambda output, batch: output)


@pytest.mark.parametrize("change, message", [
    (lambda b: {"x": b["x"]}, "keys"), (lambda b: {**b, "more": b["x"]}, "keys"), (lambda b: {**b, "x": b["x"].double()}, "float64"),
    (lambda b: {**b, "x": b["x"][:, :3]}, r"sizes \{'x': \[4, 3\], 'y': \[4, 4\]\} needs a capture of its own.*That capture failed"),
    (lambda b: {**b, "x": b["x"][:3]}, "numbers of samples"), (lambda b: {name: torch.cat([t, t]) for name, t in b.items()}, "16 samples")])
def test_another_batch(change, message):
    _, trainer = make()
    before = trainer.evaluate([make_batch()])
    shapes, constants = len(trainer._captured.graph["shapes"]), set(trainer._captured.constants)
    with pytest.raises(twobp.Error, match=message):
        trainer.step(change(make_batch()))
    assert (len(trainer._captured.graph["shapes"]), set(trainer._captured.constants)) == (shapes, constants)
    assert trainer.evaluate([make_batch()]) == before and trainer.step(make_batch()).step == 1


def set_(module, name, tensor):
    with torch.no_grad():
        dict(module.named_parameters())[name].copy_(tensor)


@pytest.mark.parametrize("change, message", [
    (lambda m: set_(m, "up.weight", torch.zeros(8, 4)), "'up.weight' of the module was changed.*load_state_dict"),
    (lambda m: nn.init.ones_(m.down.bias), "'down.bias'"), (lambda m: set_(m, "up.weight", m.up.weight + torch.arange(32).view(8, 4).eq(21)), "'up.weight'"),
    (lambda m: m.up.register_parameter("bias", None), "'up.bias'"), (lambda m: setattr(m.up.weight, "data", torch.zeros(8, 4)), "'up.weight'"),
    (lambda m: setattr(m.up, "weight", nn.Parameter(torch.zeros(8, 4))), "'up.weight'"), (lambda m: m.scale.add_(1), "'scale'"),
    (lambda m: m.up.weight.requires_grad_(False), "'up.weight' of the module was frozen.*new trainer"),
    (lambda m: setattr(m, "down", nn.Linear(8, 4)), "the part 'down' of the module was replaced.*new trainer"),
    (lambda m: nn.utils.parametrizations.weight_norm(m.down), "'down.*of the module was"),
    (lambda m: m.register_full_backward_hook(lambda *_: None), "the module got a hook after"),
    (lambda m: torch.optim.SGD([loss_of(m)[1]], lr=1.0).step(), "'up.weight'"),
    (lambda m: torch.optim.AdamW([loss_of(m)[1]], lr=1.0, fused=True).step(), "'up.weight'"), (lambda m: m.up.weight.data.mul_(2), "'up.weight'")])
def test_a_change_behind_the_trainer_s_back(change, message):
    module, trainer = make()
    trainer.step(make_batch())
    change(module)
    with pytest.raises(twobp.Error, match=message):
        trainer.step(make_batch())
    with pytest.raises(twobp.Error, match=message):
        trainer.evaluate([make_batch()])
    assert trainer.steps_done == 1


def loss_of(module):
    loss = mse(module(make_batch()["x"]), make_batch())
    loss.backward()
    return loss, module.up.weight


def test_states_go_between_module_and_trainer_without_an_error():
    module, trainer = make()
    _, other = make()
    initial = copy.deepcopy(module.state_dict())
    states = []
    for _ in range(3):
        trainer.step(make_batch())
        states.append(trainer.state_dict())
        other.step(make_batch())
    for state in (states[1], states[2], initial, states[0]):  # the best so far, say
        module.load_state_dict(state)
        module.eval()
        loss_of(module)[0].item()
        module.train()
        loss_of(module)  # changes BatchNorm's statistics of the module
        assert trainer.step(make_batch()).loss == other.step(make_batch()).loss
    set_(module, "up.weight", torch.zeros(8, 4))
    trainer.load_state_dict(module.state_dict())
    assert trainer.step(make_batch()).loss != other.step(make_batch()).loss
    with pytest.raises(twobp.Error, match="other values of scale, which is a constant"):
        trainer.load_state_dict({**trainer.state_dict(), "scale": torch.zeros(8)})


def test_forward_hooks_are_captured_and_backward_hooks_refused():
    module = Net().train()
    module.up.register_forward_hook(lambda part, inputs, output: output * 3)
    module.down.register_forward_pre_hook(lambda part, inputs: (inputs[0] + 1,))
    expected = mse(copy.deepcopy(module)(make_batch()["x"][:4]), {"y": make_batch()["y"][:4]}).item()
    _, trainer = make(module)
    assert trainer.step({name: tensor[:4] for name, tensor in make_batch().items()}).loss == pytest.approx(expected, rel=1e-5)
    for hook in (lambda m: m.up.register_full_backward_hook(lambda *a: None), lambda m: m.up.weight.register_hook(lambda g: g),
                 lambda m: m.up.weight.register_post_accumulate_grad_hook(lambda p: None),
                 lambda m: nn.modules.module.register_module_full_backward_hook(lambda *a: None)):
        module = Net().train()
        handle = hook(module)
        with pytest.raises(twobp.Error, match="hook.*would not run"):
            make(module)
        handle.remove()


def test_a_part_in_evaluation_mode_stays_so():
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).train()
    module[1].running_mean.fill_(0.5)
    module[1].eval()
    module[2].eval()
    whole = {name: tensor[:4] for name, tensor in make_batch().items()}
    expected = mse(copy.deepcopy(module)(whole["x"]), whole).item()
    trainer = twobp.Trainer(module, {"input": whole["x"][:2], "y": whole["y"][:2]}, loss_fn=mse, ranks=2, micro_batches=2,
                            optimizer=twobp.SGD(lr=0.1))
    batch = {"input": whole["x"], "y": whole["y"]}
    assert trainer.evaluate([batch]).loss == pytest.approx(expected, rel=1e-5)
    assert trainer.step(batch).loss == pytest.approx(expected, rel=1e-5)
    state = trainer.state_dict()
    assert torch.equal(state["1.running_mean"], torch.full((8,), 0.5)) and set(trainer._captured.constants) >= {"1.running_mean", "1.running_var"}
    module.eval()  # the modes are those of the time when the trainer was made
    trainer.step({name: tensor[:3] for name, tensor in batch.items()})
    assert not module.training
    with pytest.raises(twobp.Error, match="evaluation mode"):
        make(Net().eval())


def test_constants_have_the_names_of_the_module():
    class Reads(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("twin", torch.arange(4.0), persistent=False)
            self.table = torch.arange(4.0)

        def forward(self, x):
            return (super().forward(x) + self.table) * self.twin + torch.tensor([1.0, 2.0, 3.0, 4.0])
    _, trainer = make(Reads().train())
    constants = trainer._captured.constants
    assert set(constants) == {"scale", "twin", "table", "c0"}
    assert constants["twin"].data_ptr() == constants["table"].data_ptr()  # equal ones share their memory


@pytest.fixture
def bundle(tmp_path):
    _, trainer = make()
    trainer.save(tmp_path / "bundle")
    return tmp_path / "bundle"


def load(folder):
    return twobp.Trainer(model={"from": str(folder)}, example={name: tensor[:4] for name, tensor in make_batch().items()}, ranks=2, micro_batches=2)


def replaced(name, old, new):
    def change(folder):
        path = folder / name
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))
    return change


TORCH = ".".join(torch.__version__.split(".")[:2])


def cut_off(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-5])


@pytest.mark.parametrize("change, message", [
    (replaced("graph.json", f'"torch": "{TORCH}"'.encode(), b'"torch": "2.11"'), "captured with torch 2.11"),
    (replaced("graph.json", b'"version": 2', b'"version": 3'), "version"),
    (replaced("graph.json", b"aten::addmm", b"aten::save"), "aten::save"), (replaced("graph.json", b"aten::addmm", b"aten::mul_.Tensor"), "mul_"),
    (replaced("graph.json", b'"v": 1}', b'"v": 99999}'), "99999|slot"), (cut_off("graph.json"), "graph.json"),
    (cut_off("model.safetensors"), "model.safetensors"), (cut_off("constants.safetensors"), "constants.safetensors"),
    (lambda folder: (folder / "constants.safetensors").unlink(), "no constant"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    (lambda folder: (folder / "graph.json").unlink(), "config.json")])
def test_a_foreign_or_damaged_bundle(bundle, change, message):
    assert load(bundle).step(make_batch()).step == 1
    change(bundle)
    with pytest.raises(twobp.Error, match=message):
        load(bundle)


def test_a_save_that_fails_leaves_the_old_bundle(bundle, monkeypatch):
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    _, trainer = make()
    trainer.step(make_batch())

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(twobp.Error, match="the model cannot be saved: .*No space left"):
        trainer.save(bundle)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    trainer.save(bundle)
    assert json.loads((bundle / "graph.json").read_text()) == json.loads(before["graph.json"]) and len(os.listdir(bundle)) == len(before)
    assert (bundle / "model.safetensors").read_bytes() != before["model.safetensors"]


@pytest.mark.parametrize("module, example, message", [
    (lambda: torch.jit.script(Net()), {}, "TorchScript"), (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), {}, "'0' of the module is TorchScript"), (lambda: nn.Sequential(nn.LazyLinear(4)), {}, "'0.weight' of the module has no shape yet"),
    (lambda: Net().to("meta"), {}, r"'up.weight' of the module is on meta.*to_empty"), (lambda: Net(), {0: torch.zeros(4, 4)}, "has the key 0, but its keys must be names"),
    (lambda: Net().double(), {}, r"(?s)the module itself fails on this batch: RuntimeError.*dtype.*test_bad_input\.py:\d+, in forward.*x: float32 \[4, 4\]"),
    (Net, {"x": torch.zeros(4, 7)}, r"(?s)the module itself fails on this batch.*test_bad_input\.py:\d+, in forward.*x: float32 \[4, 7\]")])
def test_a_module_that_fails_without_twobp(module, example, message):
    with pytest.raises(twobp.Error, match=message):
        twobp.Trainer(module().train(), {**{name: tensor[:4] for name, tensor in make_batch().items()}, **example}, loss_fn=mse, ranks=1)


def test_a_folder_of_checkpoints_is_one_trainer_s(tmp_path):
    _, first = make()
    first.step(make_batch())
    first.checkpoint(tmp_path)
    _, second = make()
    assert second.resume(tmp_path / "other") == [f"there is no checkpoint in {tmp_path / 'other'}, so training begins at its start"]
    with pytest.raises(twobp.Error, match="another trainer of this process: end that one first"):
        second.resume(tmp_path)
    expected = first.step(make_batch()).loss
    del first
    second.resume(tmp_path)
    assert second.step(make_batch()).loss == expected


def test_no_library_comes_from_the_current_folder(tmp_path):
    """Somebody else may have put it there."""
    native = pathlib.Path(twobp._native.__file__)
    needed = [line.split()[0] for line in subprocess.run(["ldd", native], capture_output=True, text=True).stdout.splitlines() if "=>" in line]
    assert "libc10.so" in needed
    for name in needed:
        (tmp_path / name).touch()
    environment = {**os.environ, "PYTHONPATH": str(native.parent.parent)}
    done = subprocess.run([sys.executable, "-P", "-c", "import twobp"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_pipe_in_place_of_a_graph_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "graph.json")
    with pytest.raises(twobp.Error, match="graph.json is not a regular file"):
        twobp.plan(tmp_path, ranks=2)
