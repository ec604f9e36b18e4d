"""The cache of captures: a module that was captured before is not traced again, unless its course has changed."""

import importlib.util
import json
import os
import sys
import threading
import types

import pytest
import torch
from torch import nn

import twobp
from twobp.capture import capture
from twobp.capture.state import fingerprint
from twobp.capture.state.cache import Cache
from twobp.capture.export.forward import WithLoss

SOURCE = """
import torch
from torch import nn

SCALE = 0.5

def half(x):
    return x * SCALE

class Net(nn.Module):
    def __init__(self, width=8, factor=2.0, power=1):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4)
        self.factor, self.options = factor, {"power": power}
        self.register_buffer("offset", torch.linspace(0, 1, width))
        self.register_buffer("folded", torch.tensor(1.0))
        self.table = torch.arange(4.0)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.up(x))) + self.offset + (self.folded + 1).exp()
        return half(self.down(hidden) ** self.options["power"]) * self.factor + self.table
"""


def load(path, source):
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("net_of_the_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make(tmp_path):
    """The net, changed by `change`."""

    def make(change=lambda net: None, source=SOURCE):
        torch.manual_seed(1)
        net = load(tmp_path / "net.py", source).Net()
        change(net.train())
        return net

    return make


@pytest.fixture
def entry(make, tmp_path):
    """Returns the net and its entry in the cache, without tracing."""

    def entry(change=lambda net: None, source=SOURCE, samples=6, loss_fn=None, loss_reduction=None, check=True):
        whole = WithLoss(make(change, source), loss_fn or mse)
        return whole, Cache(tmp_path / "cache").entry(
            fingerprint.walk_over(whole), batch(samples), loss_reduction, check, True
        )

    return entry


@pytest.fixture
def key(entry):
    return lambda *changes, **settings: entry(*changes, **settings)[1].key


@pytest.fixture
def run(make, tmp_path):
    """Captures the net and returns the answer of the cache, such as "hit"."""

    def run(change=lambda net: None, source=SOURCE, samples=6, loss_fn=None, **settings):
        net = make(change, source)
        captured = capture(net, batch(samples), loss_fn=loss_fn or mse, cache=tmp_path / "cache", **settings)
        run.captured = captured
        return captured.cached[-1]

    return run


def batch(samples=6):
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(samples, 4, generator=generator), "y": torch.randn(samples, 4, generator=generator)}


def mse(output, batch):
    return nn.functional.mse_loss(output, batch["y"])


def other_loss(output, batch):
    return nn.functional.l1_loss(output, batch["y"])


def test_what_was_met_before_has_the_same_programs(run):
    assert run() == "kept"
    first = run.captured
    assert run() == "hit"
    again = run.captured
    assert json.dumps(again.graph) == json.dumps(first.graph) and again.dry_runs == first.dry_runs
    assert again.constants.keys() == first.constants.keys() >= {"offset", "table"}
    assert all(torch.equal(again.constants[name], tensor) for name, tensor in first.constants.items())
    again._dry_run(batch())  # raises unless they compute what the module does


def test_training_has_the_same_bits(tmp_path):
    def losses():
        torch.manual_seed(1)
        net = load(tmp_path / "net.py", SOURCE).Net().train()
        trainer = twobp.Trainer(
            net,
            {name: tensor[:3] for name, tensor in batch().items()},
            loss_fn=mse,
            cache=tmp_path / "cache",
            ranks=2,
            micro_batches=2,
            optimizer=twobp.AdamW(lr=1e-2),
        )
        results = [trainer.step(batch()).loss for _ in range(3)] + [trainer.step(batch(5)).loss]
        return results, trainer.state_dict(), trainer._captured.cached

    first, again = losses(), losses()
    assert first[2] == ["kept", "kept"] and again[2] == ["hit", "hit"]
    assert first[0] == again[0] and all(torch.equal(tensor, again[1][name]) for name, tensor in first[1].items())


def freeze(net):
    net.up.weight.requires_grad_(False)


def tie(net):
    net.register_parameter("spare", net.down.bias)


def hook(net):
    net.up.register_forward_hook(lambda module, inputs, output: output * 2)


def patch(net):
    net.norm.forward = lambda x: x * 2


def test_a_changed_module_is_traced_again(run):
    assert run() == "kept"
    for change in (
        lambda net: setattr(net, "factor", 3.0),
        lambda net: net.offset.add_(1),
        lambda net: net.folded.add_(1),
    ):
        assert [run(change), run(change)] == ["kept", "hit"]


def test_each_change_of_a_module_has_its_key(key):
    changes = (
        lambda net: None,
        lambda net: setattr(net, "factor", 3.0),
        lambda net: net.options.update(power=2),
        lambda net: setattr(net, "table", torch.ones(4)),
        lambda net: setattr(net.norm, "eps", 1e-3),
        lambda net: setattr(net, "up", nn.Linear(4, 8, bias=False)),
        lambda net: setattr(net, "norm", nn.LayerNorm(8)),
        lambda net: net.norm.eval(),
        freeze,
        tie,
        hook,
        patch,
    )
    keys = [key(change) for change in changes]
    assert len(set(keys)) == len(changes) and keys == [key(change) for change in changes]


def test_changed_code_has_another_key(key):
    changes = (("SCALE = 0.5", "SCALE = 0.25"), ("return x * SCALE", "return x + SCALE"), ("torch.relu", "torch.tanh"))
    assert len({key(), *(key(source=SOURCE.replace(*change)) for change in changes)}) == 4
    assert key(source=SOURCE + "\nUNUSED = 3\n") == key()


def test_another_loss_or_batch_or_version_is_traced_again(run, key, monkeypatch):
    weight = 2.0

    def weighed(output, batch):
        return mse(output, batch) * weight

    others = (
        {},
        {"loss_fn": other_loss},
        {"samples": 5},
        {"loss_reduction": "mean"},
        {"check": False},
        {"loss_fn": weighed},
    )
    keys = [key(**settings) for settings in others]
    assert len(set(keys)) == len(others) and keys == [key(**settings) for settings in others]
    weight = 3.0
    assert key(loss_fn=weighed) not in keys
    assert [run(), run(samples=5), run(samples=5)] == ["kept", "kept", "hit"]
    monkeypatch.setattr(torch, "__version__", "2.13.99")
    assert key() not in keys


def test_statistics_that_forward_changes_are_no_part_of_a_module(run):
    assert run() == "kept"
    assert run(lambda net: net.norm.running_mean.add_(1)) == "hit"


def test_a_function_of_torch_that_was_replaced_is_seen(run, monkeypatch):
    assert run() == "kept"
    monkeypatch.setattr(nn.functional, "mse_loss", lambda a, b: nn.functional.l1_loss(a, b))
    assert run() == "kept"


def test_code_without_a_file_is_followed():
    """As in a notebook."""

    def key(source):
        module = types.ModuleType("__notebook__")
        exec(source, module.__dict__)
        module.Net.__module__ = module.__name__
        return fingerprint.walk_over(WithLoss(module.Net(), None))[1]

    source = """
import functools, torch
@functools.lru_cache(None)
def factor(n): return 2 * n
class Net(torch.nn.Module):
    powers = [1, 2]
    def forward(self, x): return (x ** self.powers[1] * factor(1)).sum()
"""
    assert key(source) == key(source)
    assert (
        len(
            {
                key(source),
                *(
                    key(source.replace(*change))
                    for change in (("[1, 2]", "[1, 3]"), ("2 * n", "3 * n"), ("factor(1)", "factor(2)"))
                ),
            }
        )
        == 4
    )


def test_what_cannot_be_told_is_not_kept(run):
    lock = threading.Lock()
    assert run(lambda net: setattr(net, "lock", lock)).startswith("not kept: a _thread.lock")
    assert run(loss_fn=lambda output, batch: mse(output, batch) if lock else None).startswith(
        "not kept: a _thread.lock"
    )


DAMAGES = (
    lambda data: b"",
    lambda data: data[:100],
    lambda data: data[:-1],
    lambda data: data.replace(b"aten::addmm", b"aten::addmv"),
    lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    lambda data: data + b"x",
)


def test_a_damaged_entry_is_made_again(run, entry, tmp_path):
    run()
    graph = run.captured.graph
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    whole = path.read_bytes()
    net, kept = entry()
    assert kept.paths[0] == path and kept.read(net) is not None
    for damage in DAMAGES:
        path.write_bytes(damage(whole))
        assert path.read_bytes() != whole and kept.read(net) is None
    assert run() == "kept" and run.captured.graph == graph
    assert path.read_bytes() == whole and run() == "hit"


def test_an_entry_of_another_name_is_not_used(run, entry, tmp_path):
    run()
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    net, other = entry(lambda net: setattr(net, "factor", 3.0))
    path.replace(other.paths[0])
    assert other.read(net) is None


def test_the_cache_can_be_off(make, tmp_path, monkeypatch):
    net = make()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert capture(net, batch(), loss_fn=mse, cache=False).cached == ["off"]
    monkeypatch.setenv("TWOBP_CACHE", "off")
    assert capture(net, batch(), loss_fn=mse).cached == ["off"]
    assert not (tmp_path / "user").exists()
    monkeypatch.delenv("TWOBP_CACHE")
    assert capture(net, batch(), loss_fn=mse).cached == ["kept"]
    assert list((tmp_path / "user/twobp/captures").glob("*.safetensors"))


def test_a_folder_that_cannot_be_written_costs_only_time(run, tmp_path):
    (tmp_path / "cache").write_text("a file is in the way")
    assert run().startswith("not kept: ")


def test_old_entries_go(run, tmp_path, monkeypatch):
    run()
    (old,) = (tmp_path / "cache").glob("*.safetensors")
    os.utime(old, (1, 1))
    left = tmp_path / "cache/.new-died"
    left.mkdir()
    (left / "entry").write_bytes(b"half")
    os.utime(left, (1, 1))
    monkeypatch.setattr("twobp.capture.state.cache.MOST_BYTES", old.stat().st_size + 100)
    assert run(samples=5) == "kept"
    assert not old.exists() and not left.exists() and len(list((tmp_path / "cache").iterdir())) == 1
