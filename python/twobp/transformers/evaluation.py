"""Losses and predictions of an evaluation by the ranks of a pipeline. The loop is that of transformers, and so is what
it does with these. In it, compute_loss returns what programs have computed for several batches at once."""

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
import torch.distributed as dist
import transformers
from torch.utils import _pytree as pytree

import twobp
from twobp.losses.module import EVALUATE, PREDICT, SCRIPTS, TAKEN, TRAIN, LossModule
from twobp.losses.script import Plan

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
class Form:
    """What compute_loss returned beside the loss, with the class T for each tensor."""

    leaves: list
    tree: Any

    def filled(self, tensors: list[T]) -> Any:
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if one is T else one for one in self.leaves], self.tree)


@dataclasses.dataclass
class Returned:
    """Finds the tensors in what compute_loss returns beside the loss, without caches and what the model's configuration
    says that evaluations ignore."""

    ignored: set[str]

    def __call__(self, outputs: Any) -> tuple[list[T], Form]:
        if isinstance(outputs, Mapping):
            caches = transformers.cache_utils.Cache
            kept = {n: v for n, v in outputs.items() if n not in self.ignored and not isinstance(v, caches)}
            outputs = type(outputs)(**kept) if isinstance(outputs, transformers.utils.ModelOutput) else kept
        leaves, tree = pytree.tree_flatten(outputs)
        for one in leaves:
            if not isinstance(one, (T, int, float, str, type(None))):
                raise twobp.Error(f"compute_loss returns a {type(one).__name__} beside the loss, and not only tensors")
        form = Form([T if isinstance(one, T) else one for one in leaves], tree)
        return [one for one in leaves if isinstance(one, T)], form


@dataclasses.dataclass
class Done:
    """What programs computed for a batch, with a row for Python."""

    mode: str
    inputs: Mapping
    items: T | None
    plan: Plan
    row: T
    predictions: list[T]

    def is_for(self, mode: str, inputs: Mapping, items: T | None) -> bool:
        """Whether compute_loss was called with these arguments."""
        one, other = ({**inputs, "": items}, {**self.inputs, "": self.items})
        same_names = mode == self.mode and one.keys() == other.keys()
        return same_names and all(same(one[name], other[name]) for name in one)

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

    def __init__(self, trainer: Any, module: LossModule, pipeline: twobp.Trainer, given: Callable[[list], list]):
        self._trainer, self._module, self._pipeline, self._given = trainer, module, pipeline, given
        self._refused: set[str] = set()  # modes
        wide = any(one.dtype == torch.float64 for one in module.parameters())
        self._dtype = torch.float64 if wide else torch.float32  # of numbers for metrics

    @contextlib.contextmanager
    def of(self, batches: Ahead, predicts: bool):
        """Within this context, the trainer's compute_loss gives what programs compute for these batches. It gives other
        outputs than the loss only if it `predicts`."""
        self._ahead, self._ready, self._predicts = batches, collections.deque[Done](), predicts
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
        mode = PREDICT if return_outputs and self._predicts else EVALUATE
        with self._as_it_is():
            found = None
            if mode not in self._refused and model in (self._trainer.model, self._trainer.model_wrapped):
                found = self._by_pipeline(mode, inputs, num_items_in_batch)
            if found is None:
                return self._trainer.compute_loss(
                    model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
                )
        loss, outputs = found
        return (loss, outputs) if return_outputs else loss

    def _by_pipeline(self, mode: str, inputs: Mapping, items: T | None) -> tuple[T, Any] | None:
        """Returns the loss and the other outputs, or None if the model has to compute them."""
        if not (self._ready and self._ready[0].is_for(mode, inputs, items)):
            self._ready.clear()
            self._run(mode, inputs, items)
        if not self._ready:
            return None
        one = self._ready.popleft()
        if not one.guards_hold():
            return None
        SCRIPTS[self._module][mode].replay(one.plan, one.row)
        return one.row[0].to(self._dtype), one.plan.form.filled(one.predictions) if mode == PREDICT else {}

    def _run(self, mode: str, inputs: Mapping, items: T | None) -> None:
        """Runs the programs for a batch and those that come next."""
        asked = [(inputs, items)]
        if not any(is_overridden(self._trainer, name) for name in ("_prepare_inputs", "_prepare_input")):
            for batch in self._ahead.next(self._pipeline.micro_batches - 1):
                batch = self._trainer._prepare_inputs(batch)
                counted = None if items is None else self._trainer._get_num_items_in_batch([batch], items.device)
                asked.append((batch, counted))
        self._module.use(mode)
        try:
            with torch.enable_grad(), self._pipeline._in_another_variant():
                try:
                    plans = [SCRIPTS[self._module][mode].plan(*one) for one in asked]
                    parts = self._pipeline._cut(self._given(plans))
                except Exception as error:  # of capture, or of Python that a plan runs
                    self._refuse(mode, error)
                    return
                predictions = self._pipeline._native.forward(parts)
        finally:
            self._module.use(TRAIN)
        rows = self._pipeline._native.weights(names={TAKEN})[TAKEN]
        predictions = in_all_processes(predictions) if mode == PREDICT else [[]] * len(plans)
        for one, plan, row, own in zip(asked, plans, rows, predictions):
            self._ready.append(Done(mode, *one, plan, row, own))

    def _refuse(self, mode: str, error: Exception) -> None:
        self._refused.add(mode)
        if isinstance(error.__cause__, twobp.Error):  # without what a step says of the mode that it finds changed
            error = error.__cause__
        what = "predictions" if mode == PREDICT else "evaluations"
        warnings.warn(
            f"{what} run the model itself, and not the pipeline, because {error or type(error).__name__}", stacklevel=2
        )


def in_all_processes(predictions: list[list[T]]) -> list[list[T]]:
    """Gives every process those of the one that ran the last layer."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return predictions
    described: list = [None] * dist.get_world_size()
    dist.all_gather_object(described, [[(one.shape, one.dtype) for one in batch] for batch in predictions])
    last = next((rank for rank, one in enumerate(described) if any(one)), 0)
    if dist.get_rank() != last:
        predictions = [[torch.empty(shape, dtype=dtype) for shape, dtype in batch] for batch in described[last]]
    for one in (one for batch in predictions for one in batch):
        dist.broadcast(one.contiguous() if dist.get_rank() == last else one, last)
    return predictions
