"""What changes behind a capture: attributes, modes, closures, globals, functions, classes. A step computes what the module computes under autograd as it is
at that step, or is refused by name. The cache of captures sees the same changes."""

import collections
import contextvars
import functools
import gc
import importlib
import importlib.util
import inspect
import operator
import sys
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import twobp
import twobp.capture.captured
from twobp.capture import capture
from twobp.capture.state import guards
from twobp.capture.state.fingerprint import package_digest, walk_over

SETTINGS = "SHIFT = 0.0\nOTHER = 1.0\n"
SOURCE = """
import enum
import types
import torch
from torch import nn
from torch.nn import functional as F

SCALE = 0.5
TABLE = torch.arange(4.0, dtype=torch.float64)
OPTIONS = {"power": 1, "nested": [1.0, {"deep": 2.0}]}
BY_NAME = 1.0
WEIGHT = 1.0

class Gain(float):
    more = 1.0
    def times(self, x):
        return x * (float(self) * self.more)

class Meta(type):
    @property
    def factor(cls):
        return cls.hidden

class Config(metaclass=Meta):
    hidden = 1.0

class Slots:
    __slots__ = ("shift",)
    def __init__(self):
        self.shift = 0.0

class Mode(enum.Enum):
    ON = 1.0
    OFF = 0.0

def half(x, by=1.0, *, also=1.0):
    return x * SCALE * half.gain * by * also
half.gain = 1.0

class Part(nn.Module):
    def forward(self, x):
        return x * 2

class Other(Part):
    def forward(self, x):
        return x * 3

class Net(nn.Module):
    of_class = 0.0

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 4)
        self.part = Part()
        self.flag, self.factor, self.unread, self.gain, self.mode, self.slots = False, 1.0, 0, Gain(1.0), Mode.OFF, Slots()
        self.table = torch.linspace(0, 1, 4, dtype=torch.float64)
        self.register_buffer("offset", torch.linspace(0, 1, 8, dtype=torch.float64), persistent=False)
        self.config = types.SimpleNamespace(shift=0.0, deep=types.SimpleNamespace(sizes=[1.0, 2.0]))
        self.double()

    def act(self, x):
        return torch.tanh(x)

    def forward(self, x):
        import settings_of_the_test
        from settings_of_the_test import OTHER
        y = self.drop(self.norm(self.up(x))) + self.offset
        y = self.down(self.act(y)) * self.factor + self.table + TABLE * OPTIONS["nested"][1]["deep"]
        if self.flag:
            y = F.gelu(y)
        y = half(self.part(y)) * globals()["BY_NAME"] + settings_of_the_test.SHIFT + OTHER + self.config.shift + self.config.deep.sizes[0]
        return self.gain.times(y) * Config.factor ** OPTIONS["power"] + self.of_class + self.mode.value + self.slots.shift

def loss_fn(output, batch):
    return F.mse_loss(output, batch["y"]) * WEIGHT
"""


def load(folder, name, source):
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def made(tmp_path):
    """The net and its namespace, with the settings that forward imports."""
    settings = load(tmp_path, "settings_of_the_test", SETTINGS)
    space = load(tmp_path, "net_of_the_test", SOURCE)
    torch.manual_seed(1)
    yield types.SimpleNamespace(settings=settings, space=space, net=space.Net().train())
    del sys.modules["settings_of_the_test"], sys.modules["net_of_the_test"]


def batch(samples=6):
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(samples, 4, generator=generator, dtype=torch.float64) for name in "xy"}


def trainer_of(net, loss_fn, cache=False, **settings):
    example = {name: one[:3] for name, one in batch().items()}
    return twobp.Trainer(
        net,
        example,
        loss_fn=loss_fn,
        cache=cache,
        **{"ranks": 2, "micro_batches": 2, "optimizer": twobp.SGD(lr=0.01), **settings},
    )


def by_autograd(net, trainer, loss_fn, samples=6):
    """The loss of the module as it is now, with the trainer's weights."""
    state, losses = {name: one.clone() for name, one in trainer.state_dict().items()}, []
    for rows in (slice(0, 3), slice(3, samples)):
        part = {name: one[rows] for name, one in batch(samples).items()}
        losses.append(
            loss_fn(torch.func.functional_call(net, state, (part["x"],)), part).item() * len(part["x"]) / samples
        )
    return sum(losses)


def set_p(m):
    m.net.drop.p = 1.0


def set_forward(m):
    m.net.part.forward = lambda x: x * 5


def in_place(tensor, amount):
    with torch.no_grad():
        tensor.add_(amount)


CHANGES = {
    "a bool": lambda m: setattr(m.net, "flag", True),
    "a float": lambda m: setattr(m.net, "factor", 2.0),
    "Dropout.p": set_p,
    "a tensor, replaced": lambda m: setattr(m.net, "table", m.net.table + 1),
    "a tensor, in place": lambda m: in_place(m.net.table, 1.0),
    "a tensor through data": lambda m: m.net.table.data.mul_(3),
    "a buffer that is not saved": lambda m: in_place(m.net.offset, 1.0),
    "a buffer, replaced": lambda m: setattr(m.net, "offset", m.net.offset * 2),
    "a part in evaluation mode": lambda m: m.net.norm.eval(),
    "forward": set_forward,
    "a method": lambda m: setattr(m.net, "act", torch.relu),
    "__class__": lambda m: setattr(m.net.part, "__class__", m.space.Other),
    "a child": lambda m: setattr(m.net, "part", m.space.Other()),
    "a hook": lambda m: m.net.part.register_forward_hook(lambda part, x, y: y * 2),
    "a method of the class": lambda m: setattr(m.space.Part, "forward", m.space.Other.forward),
    "an attribute of the class": lambda m: setattr(m.space.Net, "of_class", 0.5),
    "a number of a config": lambda m: setattr(m.net.config, "shift", 0.5),
    "a list in a config": lambda m: m.net.config.deep.sizes.__setitem__(0, 3.0),
    "a config, replaced": lambda m: setattr(m.net, "config", types.SimpleNamespace(shift=1.0, deep=m.net.config.deep)),
    "a global": lambda m: setattr(m.space, "SCALE", 0.25),
    "a global tensor": lambda m: in_place(m.space.TABLE, 1.0),
    "a nested global": lambda m: m.space.OPTIONS["nested"][1].update(deep=1.0),
    "a global of globals()": lambda m: setattr(m.space, "BY_NAME", 2.0),
    "a function": lambda m: setattr(m.space, "half", lambda x: x * 3),
    "a default": lambda m: setattr(m.space.half, "__defaults__", (2.0,)),
    "a keyword's default": lambda m: setattr(m.space.half, "__kwdefaults__", {"also": 2.0}),
    "an attribute of a function": lambda m: setattr(m.space.half, "gain", 2.0),
    "the code of a function": lambda m: setattr(
        m.space.half, "__code__", (lambda x, by=1.0, *, also=1.0: x - by - also).__code__
    ),
    "an imported module": lambda m: setattr(m.settings, "SHIFT", 1.0),
    "an imported name": lambda m: setattr(m.settings, "OTHER", 2.0),
    "a subclass of float": lambda m: setattr(m.net, "gain", m.space.Gain(2.0)),
    "an attribute of a float": lambda m: setattr(m.net.gain, "more", 2.0),
    "a metaclass's property": lambda m: setattr(m.space.Config, "hidden", 2.0),
    "an enum": lambda m: setattr(m.net, "mode", m.space.Mode.ON),
    "a slot": lambda m: setattr(m.net.slots, "shift", 1.0),
    "a global of loss_fn": lambda m: setattr(m.space, "WEIGHT", 0.5),
    "a function of torch": lambda m: setattr(torch.nn.functional, "mse_loss", torch.nn.functional.l1_loss),
}


@pytest.fixture
def undone():
    before = dict(vars(torch.nn.functional))
    yield
    vars(torch.nn.functional).update(before)


@pytest.mark.parametrize("what", CHANGES)
def test_a_step_computes_what_the_module_is_now(what, made, cache, undone):
    loss_fn = made.space.loss_fn
    trainer = trainer_of(made.net, loss_fn, cache)
    for _ in range(2):
        expected = by_autograd(made.net, trainer, loss_fn)
        assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-9)
    unchanged = by_autograd(made.net, trainer, loss_fn)
    captures = len(trainer._captured.cached)
    CHANGES[what](made)
    expected = by_autograd(made.net, trainer, loss_fn)
    assert expected != pytest.approx(unchanged, rel=1e-3), "the change matters"
    assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-9)
    expected = by_autograd(made.net, trainer, loss_fn)
    assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-9)
    expected = by_autograd(made.net, trainer, loss_fn, 5)
    assert trainer.step(batch(5)).loss == pytest.approx(expected, rel=1e-9), "another shape"
    assert len(trainer._captured.cached) == captures + 2
    again = trainer_of(made.net, loss_fn, cache)  # over the cache
    # Statistics that no forward pass changes are numbers of the module there, and trained buffers in the other trainer.
    assert again._captured.cached == ["kept" if what == "a part in evaluation mode" else "hit"], (
        "the variant that the other trainer kept"
    )
    expected = by_autograd(made.net, again, loss_fn)
    assert again.step(batch()).loss == pytest.approx(expected, rel=1e-9)


class Scaled(nn.Module):
    """Scales by what `value` takes out of the net."""

    def __init__(self, value):
        super().__init__()
        self.up, self.value = nn.Linear(4, 4).double(), value

    def forward(self, x):
        return torch.tanh(self.up(x)) * self.value(self)


class Inside(Scaled):
    def inner(self):
        return object.__getattribute__(self, "beta")


class Above:
    def __init__(self):
        self.beta = 0.5

    def get(self):
        return super().__getattribute__("beta")


class Store:
    def __init__(self):
        object.__setattr__(self, "_store", {"beta": 0.5})

    def __getattr__(self, name):
        return object.__getattribute__(self, "_store")[name]


class Named:
    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 0.5

    def __reduce__(self):
        return "NAMED"


class Slotted(nn.Module):
    __slots__ = ("beta",)

    def forward(self, x):
        return x * self.beta


def multiply(by, x):
    return by * x


def teacher():
    return nn.Linear(4, 4).double()


class Names(set):
    pass


CONTEXT, LOCAL = contextvars.ContextVar("context"), threading.local()
TABLE = {"beta": 0.5}
# What a net refers to, how it takes a number or a tensor out of it, and the change.
REACHED = {
    "a module of Python": (lambda s: s, lambda n: n.of.SHIFT, lambda n: setattr(n.of, "SHIFT", 2.0)),
    "one in a dict": (lambda s: {"s": s}, lambda n: n.of["s"].SHIFT, lambda n: setattr(n.of["s"], "SHIFT", 2.0)),
    "one by attrgetter": (lambda s: s, lambda n: operator.attrgetter("SHIFT")(n.of), lambda n: setattr(n.of, "SHIFT", 2.0)),
    "one of import_module": (lambda s: 0, lambda n: importlib.import_module("settings_of_the_test").SHIFT,
                             lambda n: setattr(sys.modules["settings_of_the_test"], "SHIFT", 2.0)),
    "one of sys.modules": (lambda s: 0, lambda n: sys.modules["settings_of_the_test"].SHIFT,
                           lambda n: setattr(sys.modules["settings_of_the_test"], "SHIFT", 2.0)),
    "object.__getattribute__": (lambda s: 0, lambda n: n.inner(), lambda n: setattr(n, "beta", 2.0)),
    "super().__getattribute__": (lambda s: Above(), lambda n: n.of.get(), lambda n: setattr(n.of, "beta", 2.0)),
    "a dict behind __getattr__": (lambda s: Store(), lambda n: n.of.beta, lambda n: n.of._store.update(beta=2.0)),
    "getattr_static": (lambda s: 0, lambda n: inspect.getattr_static(n, "beta"), lambda n: setattr(n, "beta", 2.0)),
    "a teacher's weight": (lambda s: [teacher()], lambda n: n.of[0](torch.ones(4, dtype=torch.float64)), lambda n: in_place(n.of[0].weight, 1.0)),
    "a teacher's data": (lambda s: [teacher()], lambda n: n.of[0](torch.ones(4, dtype=torch.float64)), lambda n: n.of[0].bias.data.add_(1.0)),
    "a teacher's buffer": (lambda s: [nn.BatchNorm1d(4).double().eval()], lambda n: n.of[0](torch.ones(1, 4, dtype=torch.float64)),
                           lambda n: in_place(n.of[0].running_mean, -2.0)),
    "a teacher, another": (lambda s: [teacher()], lambda n: n.of[0](torch.ones(4, dtype=torch.float64)), lambda n: n.of.__setitem__(0, teacher())),
    "a deque": (lambda s: collections.deque([0.5]), lambda n: sum(n.of), lambda n: n.of.append(1.0)),
    "a set of a class of its own": (lambda s: Names({1}), lambda n: 1.0 * len(n.of), lambda n: n.of.add(2)),
    "a view of a dict": (lambda s: (TABLE.update(beta=0.5), TABLE.values())[1], lambda n: sum(n.of), lambda n: TABLE.update(beta=2.0)),
    "a mapping proxy": (lambda s: (TABLE.update(beta=0.5), types.MappingProxyType(TABLE))[1], lambda n: n.of["beta"], lambda n: TABLE.update(beta=2.0)),
    "a partial": (lambda s: functools.partial(multiply, 0.5), lambda n: n.of(1.0), lambda n: n.of.__setstate__((multiply, (2.0,), {}, {}))),
    "a context variable": (lambda s: CONTEXT.set(0.5), lambda n: CONTEXT.get(), lambda n: CONTEXT.set(2.0)),
    "an attribute of a thread": (lambda s: setattr(LOCAL, "beta", 0.5), lambda n: LOCAL.beta, lambda n: setattr(LOCAL, "beta", 2.0)),
    "a slot that reduce hides": (lambda s: Named(), lambda n: n.of.beta, lambda n: setattr(n.of, "beta", 2.0)),
    "a slot of a module": (lambda s: Slotted(), lambda n: n.of(1.0), lambda n: setattr(n.of, "beta", 2.0)),
    "a builtin of torch": (lambda s: 0, lambda n: torch.sigmoid(n.up.bias), lambda n: setattr(torch, "sigmoid", torch.exp)),
    "a method of tensors": (lambda s: 0, lambda n: n.up.bias.sigmoid(), lambda n: setattr(torch.Tensor, "sigmoid", lambda x: x + 3)),
}


@pytest.mark.parametrize("what", REACHED)
def test_a_step_sees_what_the_module_reaches(what, made, cache, monkeypatch):
    monkeypatch.setattr(torch, "sigmoid", torch.sigmoid)
    monkeypatch.setattr(torch.Tensor, "sigmoid", torch.Tensor.sigmoid)
    of, value, change = REACHED[what]
    torch.manual_seed(3)
    net = Inside(value)
    net.beta, made.settings.SHIFT, net.of = 0.5, 0.5, of(made.settings)
    if what == "a slot of a module":
        net.of.beta = 0.5
    loss_fn = made.space.loss_fn
    trainer = trainer_of(net, loss_fn, cache, ranks=1)
    unchanged = by_autograd(net, trainer, loss_fn)
    assert trainer.step(batch()).loss == pytest.approx(unchanged, rel=1e-9)
    change(net)
    for one in (trainer, trainer_of(net, loss_fn, cache, ranks=1)):
        expected = by_autograd(net, one, loss_fn)
        assert expected != pytest.approx(unchanged, rel=1e-3), "the change matters"
        assert one.step(batch()).loss == pytest.approx(expected, rel=1e-9)


def test_objects_whose_classes_cannot_record_reads(made):
    made.net.generator, made.net.function = np.random.default_rng(0), torch.jit.script(lambda_of_torch)
    trainer = trainer_of(made.net, made.space.loss_fn)
    expected = by_autograd(made.net, trainer, made.space.loss_fn)
    assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-9)


def lambda_of_torch(x):
    return x + 1


def test_a_frozen_weight_of_loss_fn_is_watched():
    loss_fn = nn.Linear(4, 1).double().requires_grad_(False)
    loss_fn.forward = lambda output, batch: (output * loss_fn.weight).square().mean()
    trainer = trainer_of(Scaled(lambda net: 1.0), loss_fn, ranks=1)
    trainer.step(batch())
    in_place(loss_fn.weight, 1.0)
    with pytest.raises(twobp.Error, match="'loss_fn.weight' was changed after the trainer was made"):
        trainer.step(batch())


def test_a_change_over_the_cache_alone(made, cache):
    """Each change, made before a trainer: the entry of the net without it is not taken."""
    state = walk_over(twobp.capture.captured.WithLoss(made.net, made.space.loss_fn))[1]
    assert walk_over(twobp.capture.captured.WithLoss(made.net, made.space.loss_fn))[1] == state
    for what in (
        "a float",
        "a subclass of float",
        "an attribute of a float",
        "an imported module",
        "an imported name",
        "an attribute of a function",
        "a global of globals()",
        "a metaclass's property",
        "a slot",
    ):
        CHANGES[what](made)
        before, state = state, walk_over(twobp.capture.captured.WithLoss(made.net, made.space.loss_fn))[1]
        assert state != before, what


def test_changed_and_changed_back(made):
    trainer = trainer_of(made.net, made.space.loss_fn)
    for factor in (1.0, 2.0, 1.0, 2.0, 1.0):
        made.net.factor = factor
        made.net.unread += 1  # nothing reads it, so no variant belongs to it
        expected = by_autograd(made.net, trainer, made.space.loss_fn)
        assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-9)
    assert len(trainer._captured.cached) == 2 and len(trainer._captured.variants) == 2


def test_equal_values_of_another_identity_are_no_change(made):
    trainer = trainer_of(made.net, made.space.loss_fn)
    made.net.factor = float("1.0")
    made.net.config = types.SimpleNamespace(shift=0.0, deep=types.SimpleNamespace(sizes=[1.0, 2.0]))
    made.net.table = made.net.table.clone()
    trainer.step(batch())
    assert len(trainer._captured.cached) == 1 and trainer._captured.variant.guards.change() is None


def test_an_evaluation_takes_the_change_and_not_the_modes(made):
    trainer = trainer_of(made.net, made.space.loss_fn)
    made.net.drop.p = 0.5
    made.net.eval()
    made.net.factor = 3.0
    expected = by_autograd(made.net, trainer, made.space.loss_fn)
    assert trainer.evaluate([batch()]).loss == pytest.approx(expected, rel=1e-9)
    with pytest.raises(twobp.Error, match=r"evaluation mode.*module\.train\(\)"):
        trainer.step(batch())
    made.net.train()
    assert trainer.step(batch()).step == 1


def test_gradients_and_the_optimizer_s_state_go_on(made):
    """AdamW over three values of an attribute is that of PyTorch."""
    trainer = trainer_of(made.net, made.space.loss_fn, optimizer=twobp.AdamW(lr=1e-2, weight_decay=0.0))
    net = made.space.Net().train()
    net.load_state_dict(made.net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    for flag, factor in ((False, 1.0), (True, 1.0), (True, 0.5), (False, 1.0)):
        made.net.flag = net.flag = flag
        made.net.factor = net.factor = factor
        trainer.step(batch())
        optimizer.zero_grad()
        for i in range(2):
            part = {name: one[i * 3 : (i + 1) * 3] for name, one in batch().items()}
            (made.space.loss_fn(net(part["x"]), part) / 2).backward()
        optimizer.step()
    for name, one in trainer.state_dict().items():
        assert torch.allclose(one, net.state_dict()[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.slow
def test_an_annealed_closure_is_right_warned_of_and_bounded(made):
    beta = 0.0

    def loss_fn(output, batch):
        return made.space.loss_fn(output, batch) * (1 + beta)

    trainer = trainer_of(made.net, loss_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(12):
            beta = i / 10
            expected = by_autograd(made.net, trainer, loss_fn)
            assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-9)
    said = [str(one.message) for one in caught if "captured for" in str(one.message)]
    assert (
        len(said) == 1 and "'loss_fn.beta' (now" not in said[0] and "loss_fn.beta" in said[0] and "a field" in said[0]
    )
    assert len(trainer._captured.variants) <= twobp.capture.captured.KEPT_VARIANTS + 1


@pytest.mark.slow
def test_an_annealed_tensor_keeps_bounded_memory(made):
    trainer = trainer_of(made.net, made.space.loss_fn)
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(14):
            in_place(made.net.table, 0.1)
            expected = by_autograd(made.net, trainer, made.space.loss_fn)
            assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-9)
            sizes.append((len(trainer._captured.constants), len(trainer._shapes)))
    assert sizes[-1] == sizes[-3]


def test_a_field_of_the_batch_is_no_change():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(torch.tanh(self.layer(x)))

    def loss_fn(output, batch):
        return (((output - batch["y"]) ** 2).mean(1) * batch["beta"]).mean()

    torch.manual_seed(0)
    whole = {"x": torch.randn(4, 4), "y": torch.randn(4, 4), "beta": torch.ones(4)}
    trainer = twobp.Trainer(
        Net().train(),
        {name: one[:2] for name, one in whole.items()},
        loss_fn=loss_fn,
        micro_batches=2,
        cache=False,
        optimizer=twobp.SGD(lr=1e-12),
    )
    one = trainer.step(whole).loss
    assert (
        trainer.step({**whole, "beta": torch.full((4,), 2.0)}).loss == pytest.approx(2 * one, rel=1e-6)
        and len(trainer._captured.cached) == 1
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda m: setattr(m.net, "part", nn.Sequential(nn.Linear(4, 4).double())),
            "part 'part' of the module was replaced",
        ),
        (
            lambda m: (
                setattr(m.net, "more", nn.Linear(4, 4).double()),
                setattr(m.space.Net, "forward", lambda self, x: self.more(self.down(self.up(x)))),
            ),
            r"has changed.*'more.*new trainer",
        ),
        (
            lambda m: setattr(m.space.Net, "forward", lambda self, x: self.down(self.act(self.up(x)).detach())),
            r"has changed.*(different layers|trained then).*new trainer",
        ),
        (
            lambda m: setattr(m.space.Net, "forward", lambda self, x: self.down(self.up(x))),
            r"has changed.*trained then.*new trainer",
        ),
    ],
)
def test_other_layers_or_parameters_are_refused_by_name(change, message, made):
    trainer = trainer_of(made.net, made.space.loss_fn)
    before = trainer.step(batch())
    change(made)
    for _ in range(2):
        with pytest.raises(twobp.Error, match=message):
            trainer.step(batch())
    assert trainer.steps_done == before.step


def test_settings_of_torch_are_followed(made, cache):
    made.net.act = lambda x: torch.tanh(x) * torch.full((), 1 / 3)  # rounded to the default dtype
    trainer = trainer_of(made.net, made.space.loss_fn, cache)
    trainer.step(batch())
    unchanged = by_autograd(made.net, trainer, made.space.loss_fn)
    torch.set_default_dtype(torch.float64)
    try:
        assert "torch" in trainer._captured.variant.guards.change()
        expected = by_autograd(made.net, trainer, made.space.loss_fn)
        assert expected != pytest.approx(unchanged, rel=1e-12)
        assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = by_autograd(made.net, trainer, made.space.loss_fn)
    assert trainer.step(batch()).loss == pytest.approx(expected, rel=1e-12)


def test_a_second_file_of_an_installed_package_counts(tmp_path, monkeypatch):
    """Its version stays."""
    monkeypatch.setattr("twobp.capture.state.fingerprint.INSTALLED", (str(tmp_path) + "/",))
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "package_of_the_test"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.0'\n")
    (package / "inner.py").write_text("SCALE = 2.0\ndef scale(x):\n    return x * SCALE\n")
    (package / "outer.py").write_text("from .inner import scale\ndef twice(x):\n    return scale(x)\n")
    outer = importlib.import_module("package_of_the_test.outer")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return outer.twice(self.layer(x))

    whole = twobp.capture.captured.WithLoss(Net(), None)
    package_digest.cache_clear()
    first = walk_over(whole)[1]
    (package / "inner.py").write_text("SCALE = 3.00\ndef scale(x):\n    return x * SCALE\n")
    package_digest.cache_clear()
    assert walk_over(whole)[1] != first


def test_a_hit_is_compared_once_in_a_process(made, tmp_path, monkeypatch):
    """An entry whose programs are wrong is made again."""
    example = {name: one[:3] for name, one in batch().items()}

    def captured():
        ran = []
        with monkeypatch.context() as patch:
            compare = twobp.capture.captured.Captured._dry_run
            patch.setattr(twobp.capture.captured.Captured, "_dry_run", lambda *a: ran.append(1) or compare(*a))
            result = capture(made.net, example, loss_fn=made.space.loss_fn, cache=tmp_path / "cache")
        return result.cached[-1], len(ran)

    assert captured() == ("kept", 1) and captured() == ("hit", 0)
    monkeypatch.setattr("twobp.capture.state.cache._met", set())  # as in another process
    assert captured() == ("hit", 1) and captured() == ("hit", 0)
    from twobp.capture.state import cache as kept

    read = kept.Entry.read

    def wrong(entry, whole):
        found = read(entry, whole)
        if found is not None:
            tamper(found[0].programs)
        return found

    monkeypatch.setattr(kept.Entry, "read", wrong)
    monkeypatch.setattr("twobp.capture.state.cache._met", set())
    assert captured() == ("kept", 2)


def tamper(programs):
    """Another function in place of tanh."""
    for program in programs:
        for step in program["forward"]:
            if step.get("op") == "aten::tanh":
                step["op"] = "aten::sin"
                return


def test_check_every_names_the_layer_that_differs(made):
    trainer = trainer_of(made.net, made.space.loss_fn, check_every=2)
    for _ in range(4):
        trainer.step(batch())
    tamper(trainer._captured.graph["shapes"][0]["programs"])
    trainer.step(batch())
    name = next(
        layer["name"]
        for number, layer in enumerate(trainer._captured.graph["layers"])
        if "aten::sin" in {step.get("op") for step in trainer._captured._chain().program(number)["forward"]}
    )
    with pytest.raises(twobp.Error, match=f"step 6 was not made.*micro-batch 0: layer '{name}' computes other values"):
        trainer.step(batch())
    assert trainer.steps_done == 5


def test_check_every_finds_a_wrong_gradient_and_a_wrong_runtime(made, monkeypatch):
    trainer = trainer_of(made.net, made.space.loss_fn, check_every=1)
    made.net.drop.p = 0.5
    trainer.step(batch())
    made.net.drop.p = 0.0
    trainer.step(batch())
    programs = trainer._captured.graph["shapes"][0]["programs"]
    step = next(
        step
        for program in reversed(programs)
        for step in program["backward_p1"]
        if step.get("op") == "aten::tanh_backward"
    )
    step["op"] = "aten::sigmoid_backward"
    with pytest.raises(twobp.Error, match="layer '(up|norm|down).*' computes another gradient of"):
        trainer.step(batch())
    step["op"] = "aten::tanh_backward"
    native = trainer._native

    class Wrong:
        def __getattr__(self, name):
            return getattr(native, name)

        def step(self, *arguments):
            result = native.step(*arguments)
            return {**result, "loss": result["loss"] * 1.01}

    trainer._native = Wrong()
    with pytest.raises(twobp.Error, match="where the module has"):
        trainer.step(batch())


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"])
def test_a_wrong_check_every(made, value):
    with pytest.raises(twobp.Error, match="check_every is"):
        trainer_of(made.net, made.space.loss_fn, check_every=value)


def test_guards_do_not_keep_a_trainer_alive():
    class Holder:
        def loss_fn(self, output, batch):
            return nn.functional.mse_loss(output, batch["y"].float())

    holder, net = Holder(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).train()
    example = {"input": torch.randn(3, 4), "y": torch.randn(3, 4)}
    holder.trainer = twobp.Trainer(net, example, loss_fn=holder.loss_fn, cache=False)
    dead = weakref.ref(holder)
    del holder
    gc.collect()
    assert dead() is None


def test_reads_are_recorded_and_classes_left_as_they_were(made):
    before = {one: dict(vars(one)) for one in (nn.Module, made.space.Net, types.SimpleNamespace)}
    whole = twobp.capture.captured.WithLoss(made.net, None)
    walk, _ = walk_over(whole)
    with guards.recording(walk) as reads:
        made.net(batch()["x"])
    names = reads[walk.number_of(made.net)]
    assert {"factor", "flag", "table", "act"} <= names and "unread" not in names
    assert {one: dict(vars(one)) for one in before} == before


KEPT = """
import torch
from torch import nn
from torch.nn import functional as F

LAST = {}

class Box:
    pass

class Keeps(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), getattr(self, way)
        self.calls, self.last, self.outputs, self.tables, self.box = 0, None, [], {}, Box()
        self.double()

    def forward(self, x):
        return self.way(x, self.layer(x))

    def attribute(self, x, y):
        if getattr(self, "table", None) is None:
            self.table = torch.arange(1.0, 5.0)
        return y * self.table

    def of_size(self, x, y):
        if getattr(self, "rows", None) != len(x):
            self.rows, self.table = len(x), torch.arange(1.0, len(x) + 1)[:, None]
        return y * self.table

    def buffer(self, x, y):
        if getattr(self, "rows", None) != len(x):
            self.rows = len(x)
            self.register_buffer("table", torch.arange(1.0, len(x) + 1)[:, None], persistent=False)
        return y * self.table

    def in_dict(self, x, y):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(1.0, len(x) + 1)[:, None]
        return y * self.tables[len(x)]

    def in_object(self, x, y):
        if not hasattr(self.box, "table"):
            self.box.table = torch.arange(1.0, 5.0)
        return y * self.box.table

    def in_global(self, x, y):
        if "table" not in LAST:
            LAST["table"] = torch.arange(1.0, 5.0)
        return y * LAST["table"]

    def count_and_outputs(self, x, y):
        self.calls += 1
        self.last = y.detach()
        self.outputs.append(self.last)
        return y

    def hook(self, x, y):
        if not hasattr(self, "hooked"):
            self.hooked = True
            self.layer.register_forward_hook(lambda part, given, made: made * 2)
        return self.layer(x)

    def read_count(self, x, y):
        self.calls += 1
        return y * self.calls

    def parameter(self, x, y):
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(4))
        return y * self.gain

    def part(self, x, y):
        self.more = nn.Linear(4, 4)
        return y
"""


def state_of(net, space):
    return (
        {path: dict(vars(part)) | dict(part._buffers) for path, part in net.named_modules()},
        list(net.outputs),
        dict(net.tables),
        dict(vars(net.box)),
        dict(space.LAST),
    )


@pytest.mark.parametrize(
    "way", ["attribute", "of_size", "buffer", "in_dict", "in_object", "in_global", "count_and_outputs", "hook"]
)
def test_capture_leaves_what_forward_keeps_as_it_was(tmp_path, way):
    """In a trace, forward keeps tensors without numbers. Later calls of the module must not meet them."""
    space = load(tmp_path, "keeps_of_the_test", KEPT)
    torch.manual_seed(1)
    net = space.Keeps(way).train()

    def loss_fn(output, batch):
        return nn.functional.mse_loss(output, batch["y"])

    before = state_of(net, space)
    trainer = trainer_of(net, loss_fn, ranks=1)
    assert state_of(net, space) == before
    losses = [trainer.step(batch(samples)).loss for samples in (6, 5, 6)]
    assert state_of(net, space) == before
    optimizer, expected = torch.optim.SGD(net.parameters(), 0.01), []
    for samples in (6, 5, 6):
        optimizer.zero_grad()
        expected.append(0.0)
        for part in (slice(0, 3), slice(3, samples)):
            mine = {name: one[part] for name, one in batch(samples).items()}
            loss = loss_fn(net(mine["x"]), mine) * len(mine["x"]) / samples
            loss.backward()
            expected[-1] += loss.item()
        optimizer.step()
    assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "way, message",
    [
        ("read_count", "changes 'calls', and may compute something else at its next call"),
        ("parameter", "makes 'gain', whose parameters"),
        ("part", "makes 'more', whose parameters"),
    ],
)
def test_what_forward_keeps_and_programs_cannot_is_named(tmp_path, way, message):
    space = load(tmp_path, "keeps_of_the_test", KEPT)
    net = space.Keeps(way).train()
    before = state_of(net, space)
    with pytest.raises(twobp.Error, match=message):
        trainer_of(net, lambda output, batch: nn.functional.mse_loss(output, batch["y"]), ranks=1)
    assert state_of(net, space) == before
