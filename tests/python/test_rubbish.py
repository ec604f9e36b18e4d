"""Rubbish as each argument of the public functions: it is taken, or the error is twobp.Error and names the argument."""
import collections.abc
import inspect
import math
import warnings

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import twobp
from twobp import _native

with FakeTensorMode():
    FAKE = torch.zeros(2, 16)


class Broken:
    """Every question to it fails."""

    def fails(self, *_):
        raise RuntimeError("broken")
    __len__ = __iter__ = __getitem__ = __float__ = __int__ = __index__ = __bool__ = __fspath__ = __eq__ = fails
    __hash__ = object.__hash__


class BrokenSequence(collections.abc.Sequence):
    def __len__(self):
        raise RuntimeError("broken")

    def __getitem__(self, index):
        raise RuntimeError("broken")


class BrokenMapping(collections.abc.Mapping):
    def __len__(self):
        return 1

    def __iter__(self):
        return iter(["input"])

    def __getitem__(self, key):
        raise RuntimeError("broken")


RUBBISH = {
    "None": None, "True": True, "text": "rubbish", "empty text": "", "null": "a\0b", "surrogate": "\ud800", "bytes": b"rubbish", "1.5": 1.5, "-1": -1, "0": 0,
    "nan": math.nan, "inf": math.inf, "1e308": 1e308, "2**31": 2**31, "2**63": 2**63, "2**70": 2**70, "-2**70": -2**70, "10**400": 10**400, "complex": 1j,
    "object": object(), "class": int, "function": lambda: 1, "list": [], "None in a list": [None], "nested": [[]], "set": {1}, "dict": {}, "dict of None": {"input": None},
    "key": {1: 2}, "tuple of rubbish": (1, "a"), "generator": (one for one in ()), "array": numpy.zeros(3), "objects": numpy.array([object()]), "tensor": torch.zeros(2, 16),
    "scalar": torch.tensor(1.0), "sparse": torch.zeros(2, 16).to_sparse(), "meta": torch.zeros(2, 16, device="meta"), "fake": FAKE, "complex tensor": torch.zeros(2, 16, dtype=torch.cfloat),
    "quantized": torch.quantize_per_tensor(torch.zeros(2, 16), 1.0, 0, torch.qint8), "nested tensor": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "broken": Broken(), "broken sequence": BrokenSequence(), "broken mapping": BrokenMapping()}
TENSORS = ("tensor", "scalar", "sparse", "meta", "fake", "complex tensor", "quantized", "nested tensor")
# Python's own messages for arguments that are missing or that a function does not have.
OF_PYTHON = ("missing", "unexpected keyword", "positional argument")
# The batches' own error, as that of a DataLoader, is the user's.
OF_THE_USER = ("Trainer.evaluate(batches_)", "broken sequence")


def wrong(call, value):
    """Returns what is wrong with the error of a call, if anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(value)
    except twobp.Error as error:
        text = str(error)
        return f"the text {text!r}" if not text or "incompatible function arguments" in text else None
    except TypeError as error:
        if any(words in str(error) for words in OF_PYTHON):
            return None
        return f"TypeError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


PARTS = 4
in_parts = pytest.mark.parametrize("part", range(PARTS))


def check(calls, part=None):
    """`calls` by name, each of one argument. A part of them takes each call and each value, but not all pairs."""
    faults = [f"{name} <- {what}: {fault}" for i, (name, call) in enumerate(calls.items()) for j, (what, value) in enumerate(RUBBISH.items())
              if part in (None, (i + j) % PARTS) and (name, what) != OF_THE_USER and (fault := wrong(call, value))]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(fault[:300] for fault in faults)


def each_argument(function, **usual):
    """A call for each argument of a function, the others as usual."""
    parameters = [name for name, one in inspect.signature(function).parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return {f"{function.__qualname__}({name})": lambda value, name=name: function(**{**usual, name: value}) for name in parameters if name != "self"}


@pytest.fixture
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_schedules(inside):
    schedule = twobp.schedule("1f1b", ranks=2, micro_batches=4)
    simulation = schedule.simulate()
    check({**each_argument(twobp.schedule, name="1f1b"), **each_argument(schedule.validate), **each_argument(schedule.simulate), **each_argument(schedule.to_csv),
           **each_argument(twobp.Schedule.from_csv), **each_argument(simulation.svg), **each_argument(simulation.grid), **each_argument(simulation.to_csv),
           "costs of stages": lambda value: schedule.simulate(forward=[1, value]), "costs of micro-batches": lambda value: schedule.simulate(forward=[[1, value]])})


@in_parts
def test_plans(inside, make, vectors, part):
    trainer = make()
    costs = each_argument(twobp.plan, of=trainer, seconds=0.01, ranks=2, micro_batches=4, schedule="1f1b", p2="off")
    check({**costs, **{f"a list for {name}": lambda value, call=call: call([value]) for name, call in costs.items() if name not in ("plan(of)", "plan(seconds)")}}, part)


def test_trainers(inside, make, vectors):
    check({**{f"settings: {key.split('.')[1]}": lambda value, key=key.split(".")[1]: make(**{key: value}) for key in _native.config_keys() if key.split(".")[0] in ("pipeline", "train")},
           "optimizer": lambda value: make(optimizer=value)})


def test_optimizers(inside, make):
    import dataclasses
    check({f"{kind.__name__}({field.name})": lambda value, kind=kind, field=field: make(optimizer=kind(**{field.name: value}))
           for kind in (twobp.AdamW, twobp.Adam, twobp.Muon, twobp.SGD) for field in dataclasses.fields(kind)})
    check({"groups": lambda value: make(optimizer=twobp.SGD(groups={value: {"weight_decay": 1.0}} if isinstance(value, collections.abc.Hashable) else value)),
           "groups of a pattern": lambda value: make(optimizer=twobp.SGD(groups={"*": value})),
           "a value of groups": lambda value: make(optimizer=twobp.SGD(groups={"*": {"weight_decay": value}}))})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, input, target):
        return torch.nn.functional.mse_loss(self.linear(input), target)


@in_parts
def test_models(inside, vectors, part):
    example = {name: tensor[:2] for name, tensor in vectors.items()}
    usual = {"module": Net(), "example": example, "ranks": 1}
    check({f"Trainer({name})": lambda value, name=name: twobp.Trainer(**{**usual, name: value})
           for name in ("module", "example", "model", "loss_fn", "loss_reduction", "optimizer", "cache")}, part)
    check({"no module, model": lambda value: twobp.Trainer(model=value, example=example), "type": lambda value: twobp.Trainer(model={"type": value}, example=example),
           "dim": lambda value: twobp.Trainer(model={"type": "mlp", "dim": value}, example=example), "from": lambda value: twobp.Trainer(model={"from": value}, example=example),
           "a field": lambda value: twobp.Trainer(Net(), {**example, "target": value}, ranks=1)}, part)


@pytest.mark.parametrize("kind", ["configured", "module"])
def test_calls(inside, make, vectors, kind):
    trainer = make() if kind == "configured" else twobp.Trainer(Net(), {name: tensor[:2] for name, tensor in vectors.items()}, ranks=1, micro_batches=4)
    trainer.step(vectors)
    state, optimizer = trainer.state_dict(), trainer.optimizer_state()
    name, parameter = next(iter(state)), next(iter(optimizer))
    check({**each_argument(trainer.step, batch=vectors), **each_argument(trainer.evaluate, batches_=[vectors]), **each_argument(trainer.load_state_dict, state=state),
           **each_argument(trainer.load_optimizer_state, state=optimizer, steps=1), **each_argument(trainer.save, folder="saved"),
           **each_argument(trainer.checkpoint, folder="checkpoints"), **each_argument(trainer.resume, folder="none"), **each_argument(trainer.trace, path="step.json"),
           "a field": lambda value: trainer.step({**vectors, "target": value}), "a micro-batch": lambda value: trainer.step([value]), "a batch": lambda value: trainer.evaluate([value]),
           "a tensor of the state": lambda value: trainer.load_state_dict({**state, name: value}),
           "a name of the state": lambda value: trainer.load_state_dict({**state, value: state[name]} if isinstance(value, collections.abc.Hashable) else value),
           "a parameter's state": lambda value: trainer.load_optimizer_state({**optimizer, parameter: value}, 1),
           "a tensor of it": lambda value: trainer.load_optimizer_state({**optimizer, parameter: {**optimizer[parameter], "exp_avg": value}}, 1)})
    trainer.load_state_dict(state)
    trainer.load_optimizer_state(optimizer, 1)
    assert math.isfinite(trainer.step(vectors).loss)


def test_processes():
    check(each_argument(twobp.init_process_group))
