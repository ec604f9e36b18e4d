"""Losses of an evaluation by the ranks of a pipeline. The loop is that of transformers, and so is what it does with a
loss. In it, compute_loss returns what programs have computed for several batches at once."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch

import twobp
from twobp.losses.module import TAKEN, LossModule
from twobp.losses.script import Plan, Script

from .overrides import is_overridden

T = torch.Tensor
OTHER = "compute_loss"


class Ahead:
    """The batches of a loader, of which the next may be looked at. The loader says that it is at its end when the last
    batch is handed out: accelerate then leaves out what the batch has too much."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        self._begin(iter(self._loader))
        return self

    def _begin(self, batches: Iterator) -> None:
        self._batches, self._read, self._ended = batches, collections.deque[Any](), False

    def __next__(self) -> Any:
        if not self._read and not self._more():
            next(self._batches, None)  # the loader cleans up
            raise StopIteration
        batch = self._read.popleft()
        if self._ended and not self._read:
            self._loader.end_of_dataloader = True
        return batch

    def next(self, count: int) -> list:
        """Returns the next batches, at most so many. They are still to come."""
        while len(self._read) < count and self._more():
            continue
        return list(self._read)[:count]

    def _more(self) -> bool:
        if self._ended:
            return False
        try:
            self._read.append(next(self._batches))
        except StopIteration:
            return False
        if getattr(self._loader, "end_of_dataloader", False):
            self._loader.end_of_dataloader, self._ended = False, True
        return True


class Upcoming(Ahead):
    """The same for the batches of training, which accelerate's state knows. `next` returns none if reading them draws
    random numbers in this process, as those would then be drawn before others."""

    def __init__(self, batches: Iterator, state: Any):
        self.source, self._state = batches, state
        self._count, self._draws = 0, False
        self._begin(batches)

    @property
    def _loader(self) -> Any:
        return self._state.active_dataloader

    def __iter__(self) -> Iterator:
        return self

    def next(self, count: int) -> list:
        return super().next(count) if self._count > 1 and not self._draws else []

    def _more(self) -> bool:
        before = drawn()
        more = super()._more()
        self._draws |= self._count > 0 and drawn() != before  # the first time, the loader begins
        self._count += 1
        return more


def drawn() -> tuple:
    """Returns what changes if random numbers are drawn."""
    of_numpy = numpy.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"]


@dataclasses.dataclass
class Loss:
    """That of a batch, and what its program has left in a row for Python."""

    inputs: Mapping
    items: T | None
    plan: Plan
    row: T

    def is_for(self, inputs: Mapping, items: T | None) -> bool:
        """Whether compute_loss was called with these arguments."""
        one, other = ({**inputs, "": items}, {**self.inputs, "": self.items})
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)

    def guards_hold(self) -> bool:
        begin = self.plan.guards_begin
        return bool(self.row[begin : begin + len(self.plan.guarded)].all())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, T) and isinstance(other, T):
        return one is other or one.dtype == other.dtype and torch.equal(one, other)
    return one is other or type(one) is type(other) and not isinstance(one, T) and bool(one == other)


class Evaluation:
    """Evaluates with the programs of a LossModule. `given` makes micro-batches of plans. What they cannot do, the model
    itself does, with a warning that says why."""

    def __init__(
        self, trainer: Any, script: Script, module: LossModule, pipeline: twobp.Trainer, given: Callable[[list], list]
    ):
        self._trainer, self._script, self._module, self._pipeline = trainer, script, module, pipeline
        self._given, self._refused = given, False
        wide = any(one.dtype == torch.float64 for one in module.parameters())
        self._dtype = torch.float64 if wide else torch.float32  # of numbers for metrics

    @contextlib.contextmanager
    def of(self, batches: Ahead):
        """Within this context, the trainer's compute_loss gives the losses of these batches, but no other outputs."""
        self._ahead, self._ready = batches, collections.deque[Loss]()
        own = vars(self._trainer)
        self._before = {OTHER: own[OTHER]} if OTHER in own else {}
        try:
            own[OTHER] = self._compute_loss
            yield
        finally:
            self._put_back()

    def _put_back(self) -> None:
        vars(self._trainer).pop(OTHER, None)
        vars(self._trainer).update(self._before)

    @contextlib.contextmanager
    def _as_it_is(self):
        """Within this context, compute_loss is the trainer's own."""
        self._put_back()
        try:
            yield
        finally:
            vars(self._trainer)[OTHER] = self._compute_loss

    def _compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with self._as_it_is():
            loss = None
            if not self._refused and model in (self._trainer.model, self._trainer.model_wrapped):
                loss = self._by_pipeline(inputs, num_items_in_batch)
            if loss is None:
                return self._trainer.compute_loss(
                    model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
                )
        return (loss, {}) if return_outputs else loss

    def _by_pipeline(self, inputs: Mapping, items: T | None) -> T | None:
        """Returns the loss, or None if the model has to compute it."""
        if not (self._ready and self._ready[0].is_for(inputs, items)):
            self._ready.clear()
            self._run(inputs, items)
        if not self._ready:
            return None
        one = self._ready.popleft()
        if not one.guards_hold():
            return None
        self._script.replay(one.plan, one.row)
        return one.row[0].to(self._dtype)

    def _run(self, inputs: Mapping, items: T | None) -> None:
        """Computes the losses of a batch and of those that come next."""
        asked = [(inputs, items)]
        if not any(is_overridden(self._trainer, name) for name in ("_prepare_inputs", "_prepare_input")):
            for batch in self._ahead.next(self._pipeline.micro_batches - 1):
                batch = self._trainer._prepare_inputs(batch)
                counted = None if items is None else self._trainer._get_num_items_in_batch([batch], items.device)
                asked.append((batch, counted))
        self._module.evaluate(True)
        try:
            with torch.enable_grad(), self._pipeline._in_another_variant():
                try:
                    plans = [self._script.plan(*one) for one in asked]
                    parts = self._pipeline._cut(self._given(plans))
                except Exception as error:  # of capture, or of Python that a plan runs
                    self._refuse(error)
                    return
                self._pipeline._native.forward(parts)
        finally:
            self._module.evaluate(False)
        rows = self._pipeline._native.weights(names={TAKEN})[TAKEN]
        self._ready.extend(Loss(*one, plan, row) for one, plan, row in zip(asked, plans, rows))

    def _refuse(self, error: Exception) -> None:
        self._refused = True
        warnings.warn(
            f"evaluations run the model itself, and not the pipeline, because {error or type(error).__name__}",
            stacklevel=2,
        )
