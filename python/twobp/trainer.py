"""The trainer runs a module or a configured model in a pipeline with the C++ runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import gc
import json
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from twobp import _native, batches, checks, padding, processes
from twobp._native import Error
from twobp.batches import Batch, Tensors
from twobp.optimizers import SGD, Adam, AdamW, Muon
from twobp.watch import Watch

if TYPE_CHECKING:
    from twobp.capture import Captured

MOST_LR = 1e6
MANY_VARIANTS = 4
SECTIONS = ("pipeline", "train")  # their keys are arguments of a trainer; those of the optimizer are its own


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A training step. `loss` is the mean over the counted targets of the global batch, before the update. `grad_norm`
    is that of all gradients, before clipping. `idle` (a fraction) and `peak_bytes` are lists by rank. `skipped` means
    that an fp16 gradient overflowed, so no weight has changed. `metrics` has each loss and metric that the trainer was
    given by name, as the mean over the micro-batches. `experts` has for each layer with experts (of a model by type)
    how many tokens of all replicas chose each expert."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    step_seconds: float
    idle: list[float]
    peak_bytes: list[int]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    experts: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`loss` is the mean over the counted targets. `accuracy` is None for models that predict no classes."""

    loss: float
    accuracy: float | None


class Trainer:
    """Trains a model on the ranks of a pipeline. The ranks are threads of this process. If torch.distributed is
    initialized with more than one process, each process is a rank. All processes then make the same calls with the same
    batches. With `data_parallel`, these are the batches of all replicas, and each replica takes its share.

    The trainer has its own copies of the weights. It does not change the module, and does not see changes of the
    module. Use `state_dict` and `load_state_dict` between the two. `step` and `evaluate` raise Error if parameters of
    the module have changed, unless they come from the trainer.

    Ctrl-C gives up a step, or lets it end if a rank has begun its update or several processes share it.
    KeyboardInterrupt then says whether the step counts. If it does, `last_result` has its result. The trainer can
    continue. After an error in a step, make a new trainer. Only one thread at a time may call a trainer, in the process
    that made it."""

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        example: Batch | Tensors | Sequence[Batch] | None = None,
        *,
        model: Mapping | None = None,
        loss_fn: Callable | Mapping[str, Callable] | None = None,
        metrics: Mapping[str, Callable] | None = None,
        loss_reduction: str | None = None,
        optimizer: AdamW | Adam | Muon | SGD | None = None,
        cache: bool | str | os.PathLike = True,
        check_every: int = 0,
        **settings,
    ):
        """`example` is one micro-batch, a dict of tensors whose first dimension counts samples. A list of several, of
        other sizes, has the module captured once for all sizes.

        `module` is captured with the example. Its forward takes the dict's tensors by name. A tensor or a tuple of
        tensors may replace the dict in the example and in batches. Its tensors are forward's arguments in order, and
        one additional tensor is the "target" for loss_fn. forward returns the loss, or `loss_fn(output, batch)` does.
        `loss_reduction`, "mean" or "sum" over a micro-batch's samples, is needed if capture cannot recognise it;
        "micro_batch" weighs all micro-batches alike. A dict of functions trains the sum of their losses, and `metrics`
        is a dict of functions whose numbers are only reported. The user's cache folder keeps the result of capture,
        unless `cache` is False or another folder.

        `model` may replace a module. It has the keys of the section `model`, such as {"type": "mlp", "dim": 64}, or
        {"from": FOLDER} for a bundle, or for a Hugging Face directory of a model for which twobp has layers.

        With `check_every=N`, every Nth step is compared with a module under autograd. If the numbers differ, it raises
        twobp.Error that names the first layer that differs. Such a step takes many times as long.

        `settings` are the keys of the sections `pipeline` and `train` by name: ranks, schedule, micro_batches, p2,
        memory_cap, clip_norm, seed, ... (docs/settings.md). With device="cuda", the ranks compute on this machine's
        GPUs. The module and the batches stay on the CPU, and `state_dict` returns tensors on the CPU. Raises
        twobp.Error for an unknown name, a value out of range, keys that contradict each other, and modules that capture
        refuses."""
        if module is not None and not isinstance(module, torch.nn.Module):
            raise Error(f"module is {checks.shown(module)}, but must be a torch.nn.Module")
        if (module is None) == (model is None):
            raise Error("give a module, or model= with the keys of a configured one")
        if example is None:
            raise Error("give an example: a dict of tensors, one micro-batch")
        if (
            isinstance(check_every, bool)
            or not isinstance(check_every, int)
            or check_every < 0
            or check_every
            and module is None
        ):
            raise Error(f"check_every is {check_every!r}, but must be a number of steps, for a module")
        self._check_every = check_every
        self._module = module
        self._example, *others = self._examples(example)
        self._captured: Captured | None = None
        self._unmasked = _sliced(settings) and padding.is_mask(module, self._example)
        example, mask = self._without_mask(self._example, "the example")
        graph, constants, weights = "", dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        if isinstance(device := settings.get("device"), str):
            _native.check_device(checks.text(device, "device"))  # before capture, which takes seconds
        if module is not None:
            loss_fn = _reported(loss_fn, metrics, settings)
            from twobp.capture import capture  # late, so that importing twobp registers no operator

            self._captured = capture(
                module,
                [batches.with_a_target(one) for one in (example, *(() if _sliced(settings) else others))],
                loss_fn=loss_fn,
                loss_reduction=loss_reduction,
                cache=cache if isinstance(cache, bool) else checks.path(cache, "cache"),
                beside=mask,
                slices=_sliced(settings),
                precision=settings.get("precision", "fp32"),
            )
        elif loss_fn is not None or loss_reduction is not None or metrics is not None:
            raise Error("loss_fn, metrics and loss_reduction are for a module: a configured model has its own loss")
        self._reported = getattr(loss_fn, "names", []) if module is not None else []
        self._parts_of_last = 0
        config = _config(settings, AdamW() if optimizer is None else optimizer, self._example)
        if self._captured is not None:
            graph, constants, weights = _parts(self._captured)
            config["optimizer"]["groups"] = _used_groups(config["optimizer"]["groups"], self._captured)
        else:
            config["model"] = checks.mapping(model, "model")
        if group := _process_group():
            processes.check_loading(config["pipeline"].get("device", "cpu"))
        self._native = _native.Trainer(_as_json(config), graph, constants, example, weights, group)
        if warning := self._native.warning_of_cap():
            warnings.warn(warning, stacklevel=2)
        self._shapes: dict[int, set] = {0: {_shape(example)}}  # of micro-batches that programs serve, by variant
        self._told: set[str] = set()  # reasons for captures
        self._type = "captured" if module is not None else self.config["model"]["type"]
        self._positions = self.config["model"].get("positions")  # that the model has
        self._variants = 0  # that were captured because something changed
        self._watch = Watch(module, set(self._captured.buffers), loss_fn) if module is not None else None
        self._shared: set[str] = set()  # parameters of the module that are the trainer's own weights
        if others and self._captured is not None:
            self._tell(self._captured.why, {name: list(one.shape) for name, one in self._example.items()})

    def _examples(self, example: Any) -> list[dict[str, torch.Tensor]]:
        """Returns the example, and others of other sizes if there are."""
        given = self._named(example)
        several = list(given) if isinstance(given, (list, tuple)) else [given]
        if not several or len(several) > 1 and self._module is None:
            raise Error(
                "give one example: several micro-batches are for a module, which is then captured for all sizes"
            )
        first, *others = (batches.check_fields(one, "the example") for one in several)
        for one in others:
            batches.check_like(one, first, "an example", any_sizes=True)
        return [first, *(one for one in others if _shape(one) != _shape(first))]

    def step(
        self,
        batch: Batch | Tensors | Sequence[Batch],
        *,
        lr: float | None = None,
        following: Batch | Tensors | Sequence[Batch] | None = None,
    ) -> StepResult:
        """Makes one optimizer step, with the learning rate `lr` instead of the optimizer's own if it is given.
        `following` is the batch of the next step, or its first micro-batches, if they are known: frozen first layers,
        such as those of a reference model, may compute ahead for it in waits. It changes no bit, also if the next step
        gets another batch.

        `batch` is the global batch, a dict of tensors, or a list of micro-batches. The dict has micro_batches (times
        data_parallel) as many samples as the example, or fewer at the end of an epoch. Raises twobp.Error for a batch
        with other keys, dtypes or sizes, for a batch without a counted target, and for a loss or gradient that is not
        finite. Raises KeyboardInterrupt for Ctrl-C, which says whether the step counts."""
        if lr is not None and (isinstance(lr, bool) or not isinstance(lr, numbers.Real) or not 0 <= lr < MOST_LR):
            raise Error(f"lr is {lr!r}, but must be a number from 0 to {MOST_LR:g}")
        done = self.steps_done
        try:
            parts = self._cut(batch)
            expected = (
                self._compare(batch, parts)
                if self._check_every and (self.steps_done + 1) % self._check_every == 0
                else None
            )
            ahead = self._ahead(following)
            try:
                result = StepResult(**self._native.step(parts, None if lr is None else float(lr), ahead))
            except Error as error:
                advice = batches.too_long(self._module, parts) if "index" in str(error) else ""
                if not advice:
                    raise
                raise Error(f"{error}{advice}") from error
            finally:
                self._wrote()
            self._parts_of_last = len(parts)
        except BaseException as error:  # also what the handler of a signal raises
            if self.steps_done > done:
                self._native.tell_counted(error)
            raise
        if expected is not None and not abs(result.loss - expected) <= self._captured.limit() * abs(expected):
            raise Error(
                f"step {result.step} was made with the loss {result.loss}, where the module has {expected}. This is an "
                "error of twobp: please report it"
            )
        return self._with_metrics(result)

    def _ahead(self, following: Batch | Tensors | Sequence[Batch] | None) -> list[dict[str, torch.Tensor]]:
        count = self._native.forwards_ahead if following is not None else 0
        with contextlib.suppress(Error):
            return self._cut(following)[:count] if count else []
        return []

    def _wrote(self) -> None:
        if self._watch is not None:
            self._watch.trainer_wrote()

    def _with_metrics(self, result: StepResult) -> StepResult:
        if not self._reported:
            return result
        from twobp.capture.loss.reported import ROWS

        rows = self._native.weights(names={ROWS})[ROWS][-self._parts_of_last :]
        return dataclasses.replace(result, metrics=dict(zip(self._reported, rows.mean(0).tolist())))

    def _pass_over(self, batch: Batch | Tensors | Sequence[Batch]) -> bool:
        """Counts the step without an update, and returns True, if the batch has no counted target. `step` raises for
        such a batch."""
        return self._native.pass_over(self._cut(batch))

    def evaluate(self, batches_: Iterable[Batch | Sequence[Batch]]) -> Evaluation:
        """Returns the loss over all batches, in evaluation mode. Each batch is as for `step`. While `batches_` gives
        its batches, it must not use the trainer, whose weights may be their running means."""
        if isinstance(batches_, (Mapping, torch.Tensor)):
            raise Error("evaluate takes an iterable of batches, and this is one batch: give [batch]")
        try:
            batches_ = iter(batches_)
        except Exception:
            raise Error(f"evaluate takes an iterable of batches, not {checks.shown(batches_)}") from None
        with _native.Evaluation(self._native) as evaluation:
            for batch in batches_:
                evaluation.add(self._cut(batch, training=False))
        all_ = evaluation.sums()
        targets, right = all_["targets"], all_["right"]
        if targets == 0:
            raise Error("nothing to evaluate: there is no batch, or no target that counts")
        return Evaluation(all_["loss"] / targets, None if right is None else right / targets)

    @contextlib.contextmanager
    def _in_another_variant(self):
        """Within this context, programs may be added and used for the module as it is now. Training goes on with those
        of before."""
        before = self._captured.variant
        try:
            yield
        finally:
            self._captured.step_back()
            self._captured.use(before)
            self._use_variant()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns copies of all weights and buffers under the module's own names, as module.load_state_dict takes
        them."""
        trained = self._native.weights()
        if self._module is None:
            return trained
        state = {
            name: trained[known] if (known := self._name(name, trained)) else tensor.detach().clone()
            for name, tensor in self._module.state_dict().items()
        }
        self._watch.came_from_trainer(state)
        return state

    def _share_weights(self) -> None:
        """Lets the module's parameters be the trainer's own weights, if these are in this process and of the same dtype
        and order. All that are trained, or none, so that the module always has the weights of one step."""
        weights = self._native.shared_weights()
        for name, parameter in self._module.named_parameters():
            own = weights.get(name)
            if own is not None and (own.dtype, own.stride()) == (parameter.dtype, parameter.stride()):
                self._shared.add(name)
        if not self._captured.trained <= self._shared:
            self._shared.clear()
        self._watch.share({name: weights[name] for name in self._shared}, self._native.written)
        gc.collect()  # the graphs of capture, which lead to themselves
        _native.release_memory()  # that of these, and of the module's own weights

    def _load_into_module(self) -> None:
        """Gives the module the weights and buffers of the last step that it does not share: one by one, so that there
        is no further copy of all of them."""
        if _process_group():  # each tensor would be a message
            self._module.load_state_dict(self.state_dict(), strict=False)  # bitsandbytes' has what it does not load
            return
        buffers, kept = dict(self._module.named_buffers()), self._module.state_dict().keys()
        changed = {name: self._captured.parameters[name] for name in self._captured.trained - self._shared}
        changed.update({name: buffers[name] for name in self._captured.buffers if name in kept})
        with torch.no_grad():
            for name, one in changed.items():
                one.copy_(self._native.weights(names={name})[name])
        if changed:
            self._watch.came_from_trainer(self._module.state_dict())

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces all weights and buffers. The optimizer's state stays. Raises twobp.Error for missing or unknown
        names, for other shapes, and for other values of a tensor that training never changes. Also for numbers that are
        not finite where the trainer's are, for those that overflow the trainer's dtype, for negative variances, and for
        complex or whole numbers in place of floating-point ones."""
        given = state = _tensors(state, "the state")
        if self._module is not None:
            own = self._native.weights()
            unknown = state.keys() - self._module.state_dict().keys()
            if unknown:
                raise Error(f"the state has {min(unknown)}, which the model does not have")
            self._watch.check_fixed(state)
            names = {name: self._name(name, own) for name in state}
            state = {known: state[name] for name, known in names.items() if known}
        self._native.load(state)
        self._wrote()
        if self._watch is not None:
            self._watch.came_from_trainer(given)

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns copies of the optimizer's state by parameter: "exp_avg" and "exp_avg_sq" of Adam and AdamW,
        "momentum" of SGD and Muon."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self._native.optimizer_state().items():
            parameter, _, what = name.rpartition(".")
            state.setdefault(parameter, {})[what] = tensor
        return state

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]], steps: int) -> None:
        """Replaces the optimizer's state by the state after `steps` steps. With the weights of that step, training
        continues to the bit. Raises twobp.Error as `load_state_dict`."""
        steps = checks.whole(steps, "steps", most=checks.MOST_STEPS)
        flat = {
            f"{name}.{what}": tensor
            for name, of in checks.mapping(state, "the state").items()
            for what, tensor in _tensors(of, f"the state of {checks.shown(name)}").items()
        }
        self._native.load_optimizer_state(flat, steps)

    def save(self, folder: str | os.PathLike, *, dtype: str = "float32") -> None:
        """Writes the model. A configured model becomes a Hugging Face directory or, if it came from a bundle, a bundle.
        A module becomes a bundle in its own dtype, which `twobp train --set model.from=FOLDER` trains without Python
        (docs/bundle.md). The bundle of a module of transformers is also a directory that its from_pretrained loads. It
        has no tokenizer, so add the tokenizer's files. With an optimizer's `average`, the running means of the weights
        are saved."""
        folder, dtype = checks.path(folder, "folder"), checks.text(dtype, "dtype")
        if self._captured is None:
            self._native.save(folder, dtype)
            return
        if dtype != "float32":
            raise Error("a captured module is saved in its own dtype: leave out dtype")
        from twobp.capture import bundle

        weights = self._native.weights(averaged=True)
        if self._native.process == 0:
            with checks.files("the model cannot be saved"):
                bundle.write(folder, self._captured.graph, weights, self._captured.constants_in_use(), self._module)

    def checkpoint(self, folder: str | os.PathLike, *, keep: int = 3) -> None:
        """Writes a checkpoint into a folder that has none of another run: weights, optimizer state and position. The
        newest `keep` stay. The checkpoint is on disk when this returns."""
        self._native.checkpoint(checks.path(folder, "folder"), checks.whole(keep, "keep", least=1))

    def resume(self, folder: str | os.PathLike, *, keep: int = 3) -> list[str]:
        """Sets a new trainer to the newest whole checkpoint. The checkpoint may have other ranks and another schedule.
        Training then continues to the bit. Returns notes, such as a changed learning rate, or that there is no
        checkpoint. Raises twobp.Error if the checkpoint belongs to another run."""
        folder = checks.path(folder, "folder")
        notes = self._native.resume(folder, checks.whole(keep, "keep", least=1))
        self._wrote()
        return (
            notes
            if notes or self.steps_done
            else [f"there is no checkpoint in {folder}, so training begins at its start"]
        )

    def trace(self, path: str | os.PathLike) -> None:
        """Writes the next step, when it ends, as JSON for https://ui.perfetto.dev. If that fails, the step counts, with
        a warning."""
        path = checks.path(path, "path")
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise Error(f"trace: cannot write into {folder}: give a path in a folder that exists and is writable")
        self._native.trace(path)

    @property
    def steps_done(self) -> int:
        return self._native.steps_done

    @property
    def last_result(self) -> StepResult | None:
        """The result of the last step that counts, also if an exception such as KeyboardInterrupt took its place."""
        last = self._native.last()
        return self._with_metrics(StepResult(**last)) if last else None

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a global batch, over all replicas."""
        return self._native.micro_batches

    @property
    def ranks(self) -> int:
        return self._native.ranks

    @property
    def captures(self) -> int:
        """The number of captures of the module, as it is now, for shapes of micro-batches."""
        return self._captured.variant.captures if self._captured is not None else 1

    @property
    def split(self) -> list[int]:
        """The number of layers of each stage."""
        return self._native.split

    @property
    def layers(self) -> list[str]:
        return self._native.layers

    @property
    def config(self) -> dict:
        """The whole configuration, including the defaults."""
        return json.loads(self._native.config)

    def _cut(self, batch: Batch | Tensors | Sequence[Batch], training: bool = True) -> list[dict[str, torch.Tensor]]:
        if self._watch is not None:
            self._watch.check()
        change = self._captured.follow(training) if self._captured is not None else None
        captured = self._type == "captured"  # the runtime refuses shapes without programs, before a step
        tokens = not captured and "input_ids" in self._example
        parts = batches.cut(self._named(batch), self._example, self._native.micro_batches, any_sizes=tokens or captured)
        for i, part in enumerate(parts if tokens else ()):
            batches.check_tokens(part, f"micro-batch {i}", self._positions)
        if self._captured is None:
            return parts
        pairs = [self._without_mask(part, f"micro-batch {i}") for i, part in enumerate(parts)]
        self._use_variant()
        for part, mask in pairs:
            if _shape(part) not in self._shapes[self._captured.variant.number]:
                self._add_shape(part, mask, change)
        return [part for part, _ in pairs]

    def _compare(self, batch: Batch | Tensors | Sequence[Batch], parts: list[dict[str, torch.Tensor]]) -> float | None:
        """Compares the programs with the module, and returns the loss of the step, or None if it depends on random
        numbers."""
        from twobp.capture.verify.check import compare

        weights, sums = self._native.weights(), []
        wholes = batches.cut(self._named(batch), self._example, self._native.micro_batches, any_sizes=True)
        for i, (part, whole) in enumerate(zip(parts, wholes)):
            try:
                sums.append(
                    compare(
                        self._captured, part, {name: one for name, one in whole.items() if name not in part}, weights
                    )
                )
            except Error as error:
                raise Error(
                    f"step {self.steps_done + 1} was not made, because the programs differ from the module on "
                    f"micro-batch {i}: {error}"
                ) from error
        targets = sum(count for _, count, _ in sums)
        return (
            None
            if targets == 0 or any(drew for *_, drew in sums)
            else sum(loss * count for loss, count, _ in sums) / targets
        )

    def _use_variant(self) -> None:
        """Lets the runtime run the programs of the variant that the module is now."""
        number = self._captured.variant.number
        self._shapes.setdefault(number, set())
        self._native.use_variant(number)
        for old in self._captured.forget_variants():
            self._native.drop_variant(old)
            del self._shapes[old]

    def _without_mask(
        self, fields: dict[str, torch.Tensor], what: str
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns what the programs read, and the mask that slices do without."""
        if not self._unmasked:
            return fields, {}
        return padding.without_mask(fields, what), {padding.MASK: fields[padding.MASK]}

    def _named(self, batch: Any) -> Any:
        if self._module is None:
            return batch
        if isinstance(batch, (tuple, list)) and not batches.is_positional(batch):
            return [batches.named(self._module, part) for part in batch]  # a list of micro-batches
        return batches.named(self._module, batch)

    def _add_shape(self, part: Batch, mask: Batch, change: str | None) -> None:
        """Finds programs for micro-batches of another shape, or captures the module because of that or a change."""
        captured, sizes = self._captured, {name: list(tensor.shape) for name, tensor in part.items()}
        before, known = dict(captured.constants), len(captured.graph["shapes"])
        try:
            captured.add_shape(batches.with_a_target(part), beside=mask)
            self._tell(captured.why, sizes)
            if self.config["pipeline"]["slices"] > 1 and (reason := captured.graph["shapes"][-1].get("no_slices")):
                raise Error(f"its sequences cannot be cut into slices: {reason}")
            for shape in captured.graph["shapes"][known:]:
                self._native.add_shape(
                    json.dumps(shape),
                    {name: tensor.contiguous() for name, tensor in captured.constants.items() if name not in before},
                    captured.variant.number,
                )
        except BaseException as error:
            del captured.graph["shapes"][known:]
            captured.constants = before
            captured.step_back()
            self._use_variant()
            if not isinstance(error, Error):
                raise
            if change:
                raise Error(
                    f"{change} has changed since the last step, so the module needs programs of its own. Their "
                    f"capture failed: {error}. Undo the change, or make a new trainer"
                ) from error
            from twobp.capture.errors import OtherLayers

            raise Error(
                f"a micro-batch of the sizes {sizes} needs a capture of its own, because the trainer was made with "
                f"other sizes. That capture failed: {error}"
                + (". Make a new trainer for such micro-batches" if isinstance(error, OtherLayers) else "")
            ) from error
        self._shapes[captured.variant.number].add(_shape(part))
        if change and known == 0:
            self._variants += 1
            if self._variants == MANY_VARIANTS:
                warnings.warn(
                    f"{change} has changed again since the last step. The module was captured for {self._variants} "
                    "values so far, which takes seconds each time. Let the batch hold what changes from step to step, "
                    "as a field, or a buffer that forward reads",
                    stacklevel=4,
                )

    def _tell(self, why: str, sizes: dict[str, list[int]]) -> None:
        """Warns once for each reason why programs for many shapes do not serve a micro-batch."""
        if why and why not in self._told:
            self._told.add(why)
            warnings.warn(
                f"a micro-batch of the sizes {sizes} was captured on its own, which takes seconds: {why}", stacklevel=5
            )

    def _name(self, name: str, known: Mapping[str, torch.Tensor]) -> str | None:
        """Returns the name under which the trainer has a tensor of the module. For a tied weight, this is one of its
        names. Returns None if the trainer does not have it, because training never changes it."""
        if name in known:
            return name
        tensors: dict[str, torch.Tensor] = dict(self._module.named_parameters(remove_duplicate=False))
        tensors.update(self._module.named_buffers(remove_duplicate=False))
        return next(
            (other for other in known if other in tensors and name in tensors and tensors[other] is tensors[name]), None
        )

    def __repr__(self) -> str:
        pipeline = self.config["pipeline"]
        return (
            f"<twobp.Trainer, {len(self.layers)} layers on {self.ranks} ranks, {pipeline['schedule']}, "
            f"{self.micro_batches} micro-batches, {self.steps_done} steps done>"
        )


def by_section(settings: Mapping) -> dict[str, dict]:
    """Returns the settings of a trainer by section of the configuration. Raises Error for an unknown name."""
    section_of = {}
    for name in _native.config_keys():
        section, key = name.split(".", 1)
        if section in SECTIONS:
            section_of[key] = section
    config: dict[str, dict] = {section: {} for section in SECTIONS}
    for key, value in settings.items():
        if key not in section_of:
            near = difflib.get_close_matches(key, section_of, n=1)
            raise Error(
                f"unknown setting '{key}'"
                + (
                    f": did you mean '{near[0]}'?"
                    if near
                    else ": settings are the keys of the sections pipeline and train (docs/settings.md)"
                )
            )
        config[section_of[key]][key] = value
    return config


def _config(settings: Mapping, optimizer: AdamW | Adam | Muon | SGD, example: Batch) -> dict:
    """Returns the configuration with an object for each section."""
    if not isinstance(optimizer, (AdamW, Adam, Muon, SGD)):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise Error(f"optimizer is {got}, but must be twobp.AdamW(...), Adam, Muon or SGD")
    config = by_section(settings)
    config["optimizer"] = optimizer.settings()
    samples = batches.samples_of(example)
    if checks.whole(config["pipeline"].setdefault("micro_batch_size", samples), "micro_batch_size") != samples:
        raise Error(
            f"micro_batch_size is {config['pipeline']['micro_batch_size']}, but the example has {samples} samples: "
            "leave it out"
        )
    return config


def _as_json(config: dict) -> str:
    """Returns the configuration as JSON. Numbers and arrays of numpy and torch count as those of Python. Raises Error
    for values that a configuration cannot hold."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            checks.check_dense(value, "the tensor")
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError

    for section, keys in config.items():
        for key, value in keys.items():
            try:
                json.dumps(value, default=plain, allow_nan=False)
            except (TypeError, Error, RecursionError):
                raise Error(
                    f"{section}.{key} is {checks.shown(value)}, a {type(value).__name__}: give a number, a text, or a "
                    "list of these"
                ) from None
            except ValueError:
                raise Error(f"{section}.{key} is {checks.shown(value)}: give finite numbers") from None
            except Exception as error:
                raise Error(f"{section}.{key} cannot be read: {type(error).__name__}: {error}") from None
    return json.dumps(config, default=plain)


def _process_group() -> str:
    """Returns the name of the process group of all processes, or an empty string if this is the only process."""
    if (
        not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
        or torch.distributed.get_world_size() == 1
    ):
        return ""
    return torch.distributed.group.WORLD.group_name


def _reported(loss_fn: Any, metrics: object, settings: Mapping) -> Callable | None:
    if metrics is None and not isinstance(loss_fn, Mapping):
        return loss_fn
    if settings.get("data_parallel", 1) != 1:
        raise Error("a dict of losses, and metrics, are for one replica: leave out data_parallel, or give one loss_fn")
    from twobp.capture.loss.reported import reported

    losses, metrics = (
        checks.mapping(one, what) if isinstance(one, Mapping) else one
        for one, what in ((loss_fn, "loss_fn"), (metrics, "metrics"))
    )
    return reported(losses, metrics, settings.get("micro_batches"))


def _sliced(settings: Mapping) -> bool:
    return isinstance(settings.get("slices", 1), int) and settings.get("slices", 1) > 1


def _parts(captured: Captured) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns graph.json, the constants, and the weights with the buffers that training changes."""
    read = _read(captured)
    weights = {**{name: tensor for name, tensor in captured.parameters.items() if name in read}, **captured.buffers}
    return (
        json.dumps(captured.graph),
        {name: tensor.contiguous() for name, tensor in captured.constants.items()},
        {name: tensor.detach().contiguous() for name, tensor in weights.items()},
    )


def _read(captured: Captured) -> set[str]:
    """Returns the parameters on which the loss depends."""
    from twobp.capture.layers import parameter_names

    return parameter_names(captured.graph["layers"])


def _used_groups(groups: list[str], captured: Captured) -> list[str]:
    """Returns the groups without those for parameters on which the loss does not depend. Raises Error for a pattern
    that matches no parameter."""
    used = _read(captured)
    matching = [(group, fnmatch.filter(captured.parameters, group.partition(" ")[0])) for group in groups]
    for group, names in matching:
        if not names:
            raise Error(f"groups: no parameter is called '{group.partition(' ')[0]}'. Patterns may have * and ?")
    return [group for group, names in matching if used.intersection(names)]


def _tensors(state: object, what: str) -> dict[str, torch.Tensor]:
    """Returns a state's dense tensors by name. Those that torch negates when they are read, it negates here."""
    state = checks.mapping(state, what)
    for name, tensor in state.items():
        checks.text(name, f"a name of {what}")
        if not isinstance(tensor, torch.Tensor):
            raise Error(f"{what}'s {name} is {checks.shown(tensor)}, but must be a tensor")
        checks.check_dense(tensor, f"{what}'s {name}")
    return {name: tensor.detach().resolve_neg() for name, tensor in state.items()}


def _shape(fields: Batch) -> tuple:
    return tuple((name, fields[name].dtype, tuple(fields[name].shape)) for name in sorted(fields))
