"""A drop-in replacement for transformers.Trainer that trains in a pipeline. Its loop, data, schedules, logs, callbacks
and files are those of transformers. Each step is one of twobp.Trainer, whose module is compute_loss. `pipelined` does
the same for any subclass of transformers.Trainer. It is tested with transformers 5.23 and 5.24
(scripts/with_versions)."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType, recursively_apply
from transformers.trainer_utils import TrainOutput

import twobp
from twobp import Error, checks
from twobp.capture.state.fingerprint import walk_over
from twobp.losses.module import EVALUATE, PREDICT, TAKEN, TRAIN, LossModule
from twobp.losses.script import STEP, Plan, Script
from twobp.trainer import SECTIONS, by_section
from twobp.transformers.arguments import check_arguments, keep_to_cpu, without_effect
from twobp.transformers.evaluation import Ahead, Evaluation, Returned, Upcoming
from twobp.transformers.optimizer import fetch_state, fixed_settings, highest_lr, load_state, update_rule
from twobp.transformers.overrides import check_overrides, is_overridden

# TrainingArguments has these settings of the pipeline under another name.
NAMES = {
    "micro_batches": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "steps": "max_steps",
    "clip_norm": "max_grad_norm",
    "seed": "seed",
    "precision": "bf16",
}


MANY_CAPTURES = 8


class OneDevice:
    """A state of accelerate. transformers treats its processes as one device, because they are the ranks of one
    pipeline."""

    num_processes = 1
    distributed_type = DistributedType.NO

    def __init__(self, state):
        self._state = state

    def __getattr__(self, name: str):
        return getattr(self.__dict__["_state"], name)

    def __reduce__(self):
        return type(self._state), ()


class Trainer(transformers.Trainer):
    """Trains a model of transformers, or of PEFT, on the ranks of a pipeline.

    The arguments are those of transformers.Trainer, and also the keys of the sections `pipeline` and `train` by name:
    ranks, schedule, p2, memory_cap, ... (docs/settings.md). `per_device_train_batch_size` is the size of a micro-batch,
    and `gradient_accumulation_steps` is the number of micro-batches of a step. `check_every` is as for twobp.Trainer.
    `evaluate_in_pipeline`: evaluations run on the ranks, so many batches at a time. Their losses and predictions are
    those of transformers up to rounding. None: if the model's weights are copies.

    The loss is that of compute_loss, and micro-batches are weighed as in transformers. With loss_reduction="targets",
    it is the mean over the counted targets of the step, as in twobp.Trainer, and the model itself must return it.

    The ranks are threads of this process. Under torchrun, each process is a rank. Raises twobp.Error for an argument
    that cannot be honoured, and names it. `train` raises it for everything that twobp.Trainer refuses.

    `pipeline` is the twobp.Trainer of the last call of `train`, from its first step on. The model's weights are those
    of the pipeline. Under torchrun, on GPUs and with weights in 16 bits, they are copies, which the model gets when it
    is evaluated or saved and when training ends. Its gradients stay None."""

    pipeline: twobp.Trainer | None = None
    __late_error: BaseException | None = None
    __upcoming: Upcoming | None = None
    __of_pipelined: dict = {}  # the settings that `pipelined` has taken out of the arguments

    def __init__(
        self,
        model=None,
        args=None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        model_init=None,
        compute_loss_func=None,
        compute_metrics=None,
        callbacks=None,
        optimizers=(None, None),
        optimizer_cls_and_kwargs=None,
        preprocess_logits_for_metrics=None,
        *,
        loss_reduction: str | None = None,
        check_every: int = 0,
        evaluate_in_pipeline: bool | None = None,
        **settings,
    ):
        own, settings = self.__of_pipelined, {**settings}
        loss_reduction, check_every = own.pop("loss_reduction", loss_reduction), own.pop("check_every", check_every)
        self.__in_pipeline = own.pop("evaluate_in_pipeline", evaluate_in_pipeline)
        if self.__in_pipeline not in (None, True, False):
            raise Error(f"evaluate_in_pipeline is {self.__in_pipeline!r}, but must be True, False or None")
        settings |= own
        check_overrides(self)
        args = prepared(args, settings)
        for name in NAMES.keys() & settings.keys():
            raise Error(f"{name} comes from TrainingArguments.{NAMES[name]}: set it there, and leave out {name}")
        if checks.whole(settings.get("data_parallel", 1), "data_parallel", least=1) != 1:
            raise Error(
                f"data_parallel is {settings['data_parallel']}, but this trainer has one pipeline: use twobp.Trainer "
                "for replicas"
            )
        by_section(settings)
        if loss_reduction not in (None, "targets"):
            raise Error(
                f"loss_reduction is {loss_reduction!r}, but may only be 'targets': without it, micro-batches are "
                "weighed as in transformers"
            )
        self.__settings, self.loss_reduction = {**settings, "check_every": check_every}, loss_reduction
        self.__frozen: list = []  # parameters of references, while they are trained with
        self.__script: Script | None = None
        self.__module: torch.nn.Module | None = None  # that the pipeline trains
        self.__evaluation: Evaluation | None = None
        self.__stale = False  # whether the model's weights are older than the pipeline's
        self.__saves_checkpoint = False
        self.__many = args.distributed_state.distributed_type != DistributedType.NO
        if self.__many:
            folders = [None] * args.world_size
            dist.all_gather_object(folders, args.output_dir)
            if len(set(folders)) > 1:
                raise Error(
                    f"TrainingArguments.output_dir differs between the processes: {folders}. Give all processes the "
                    "same folder"
                )
            args.distributed_state = OneDevice(args.distributed_state)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            model_init,
            compute_loss_func,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        if loss_reduction == "targets" and self.__has_own_loss():
            raise Error(
                f"loss_reduction is 'targets', but {type(self).__name__} has a compute_loss, compute_loss_func or "
                "label_smoothing_factor of its own, whose weights only it knows: leave out loss_reduction"
            )
        if loss_reduction is None and isinstance(settings.get("slices"), int) and settings["slices"] > 1:
            raise Error(
                'slices need a loss that is the mean over all counted targets of a step: give loss_reduction="targets"'
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.__many:
            self.accelerator.state = OneDevice(self.accelerator.state)
            self.accelerator.dataloader_config.dispatch_batches = False  # every process reads all batches
            self.accelerator.gather = lambda data, **_: data
            self.accelerator.gather_for_metrics = self.gather_function = self.__without_rest

    def __without_rest(self, data, **_):
        """Returns what an evaluation has of a batch. The last one may have fewer samples, as in transformers."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        return recursively_apply(lambda one: one[: state.remainder], data)

    def train(self, *args, **keywords) -> TrainOutput:
        check_overrides(self)
        check_arguments(self.args)
        self.__begin_step()
        self.__update_model()
        if self.pipeline is not None:  # another call continues with the optimizer's state
            fetch_state(self.optimizer, self.__module, self.pipeline)
        try:
            return super().train(*args, **keywords)
        finally:
            self.__unfreeze()

    def _inner_training_loop(self, *args, **keywords) -> TrainOutput:
        # Those of a larger micro-batch, with auto_find_batch_size.
        self.pipeline = self.__script = self.__module = self.__evaluation = None
        self.__stale, self.__upcoming = False, None
        self.__begin_step()
        return super()._inner_training_loop(*args, **keywords)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        loader = super().get_train_dataloader()
        if self.__many:  # random changes of samples are the same in all processes
            loader.worker_init_fn = functools.partial(cast(Callable, loader.worker_init_fn), rank=0)
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        if self.__step_batches:
            warnings.warn(
                f"an epoch ended within step {self.state.global_step + 1}: its {len(self.__step_batches)} "
                "micro-batches train nothing. Let the number of batches be a multiple of gradient_accumulation_steps, "
                "and let callbacks end an epoch in on_step_end",
                stacklevel=2,
            )
        self.__begin_step()
        if self.__upcoming is None or self.__upcoming.source is not epoch_iterator:
            self.__upcoming = Upcoming(epoch_iterator, self.accelerator.gradient_state)
        return super().get_batch_samples(self.__upcoming, num_batches, device)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Trains when it gets the last micro-batch of a step, and then returns the step's loss. Before that, returns
        0."""
        check_overrides(self)
        if model is not self.model and model is not self.model_wrapped:
            raise Error(
                f"training_step got a {type(model).__name__} that is not the trainer's model, but the pipeline trains "
                "that one: leave out _wrap_model, and give super().training_step the model that it gets"
            )
        model.train()  # as in transformers, also those parts that were in evaluation mode
        if is_overridden(self, "_prepare_inputs") or is_overridden(self, "_prepare_input"):
            self.__update_model()  # they may run it
        inputs = self._prepare_inputs(inputs)
        if not isinstance(inputs, Mapping):
            raise Error(f"_prepare_inputs returned a {type(inputs).__name__}, but must return a dict of tensors")
        if self.__step_norm is None:
            self.__step_batches.append(dict(inputs))
            if self.loss_reduction is None:
                self.__step_plans.append(self.__plan(inputs, num_items_in_batch))
        self.__check_unchanged()
        count, whole = len(self.__step_batches), self.current_gradient_accumulation_steps
        last = self.accelerator.sync_gradients
        if self.__step_norm is not None or count > whole or last and count < whole:
            raise Error(
                f"a step has {whole} micro-batches, but training_step of {type(self).__name__} did not call "
                "super().training_step, which trains in the pipeline, once for each of them"
            )
        return self.__step() if last else torch.tensor(0.0)

    def __begin_step(self) -> None:
        self.__step_batches: list[dict] = []
        self.__step_plans: list[Plan] = []
        self.__step_norm: float | None = None  # that of the gradients, when the pipeline has made the step

    def __check_unchanged(self) -> None:
        """Raises Error if the model has changed since the first micro-batch of the step: one program trains all."""
        if self.pipeline is None and self.__has_own_loss():
            return  # finding out what compute_loss takes runs the model, which may keep what it has computed
        captured = self.pipeline._captured if self.pipeline is not None else None
        change = captured.variant.guards.change() if captured is not None else "the model"
        state = walk_over(self.model)[1] if change else None
        if len(self.__step_batches) == 1:
            self.__step_state = state
        elif state != self.__step_state:
            raise Error(
                f"{change or 'the model'} has changed between the micro-batches of step {self.state.global_step + 1}, "
                "which all train with the same: change it before the first, such as in on_step_begin"
            )

    def __has_own_loss(self) -> bool:
        return (
            is_overridden(self, "compute_loss") or self.compute_loss_func is not None or self.label_smoother is not None
        )

    def __plan(self, inputs: Mapping, items) -> Plan:
        """Returns what is known of compute_loss for a micro-batch."""
        own = self.__has_own_loss()
        if self.__script is None:
            self.__script = Script(self, own, self.__update_model)
        elif self.__script.own != own:
            raise Error(f"the compute_loss of {type(self).__name__} was replaced since the first step: set it before")
        plan = self.__script.plan(inputs, None if items is None else torch.as_tensor(items))
        if isinstance(self.__module, LossModule) and len(self.__script.modules) > len(list(self.__module.children())):
            raise Error(
                f"{type(self).__name__}.compute_loss calls {list(self.__script.modules)[-1]}, which it did not call in "
                "the first step. Let it call the same modules in every step"
            )
        return plan

    def __is_scaled(self, items) -> bool:
        """Whether compute_loss divides by num_items_in_batch itself, by the rule of transformers."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return self.model_accepts_loss_kwargs and items is not None or self.compute_loss_func is not None

    def __given(self, plans: list[Plan], of: int | None = None) -> list[dict]:
        """Returns the micro-batches of a step, or of an evaluation, as the pipeline takes them, or the first of a step
        that has so many."""
        given = []
        for number, plan in enumerate(plans):
            scale = (of or len(plans)) if self.__is_scaled(plan.items) else 1
            items = 0 if plan.items is None else plan.items.item()
            numbers = torch.tensor([items, scale, number], dtype=torch.float64)
            given.append({**plan.fields, **dict(zip(STEP, numbers.unbind()))})
        return given

    def __step(self) -> torch.Tensor:
        """Makes the step of `_step_batches` in the pipeline. Returns its loss."""
        given = self.__step_batches if self.loss_reduction == "targets" else self.__given(self.__step_plans)
        if self.__counts_nothing():
            return self.__pass_over()
        if self.pipeline is None:
            self.__make_pipeline(given)
        self.__check_settings()
        self.__update_model(needed=False)
        done, captures = self.pipeline.steps_done, self.pipeline.captures
        try:
            result = self.pipeline.step(given, lr=highest_lr(self.optimizer), following=self.__following())
        except Error as error:
            if self.loss_reduction == "targets" and self.pipeline._pass_over(given):
                return self.__pass_over()
            if failed := self.__failed_guard():
                raise Error(failed) from error
            raise
        except BaseException as error:  # of a signal
            if self.pipeline.steps_done == done:
                raise
            self.__late_error = error  # raised when transformers has counted the step, too
            result = self.pipeline.last_result
        if captures <= MANY_CAPTURES < self.pipeline.captures and self.__script is not None and self.__script.own:
            warnings.warn(
                f"compute_loss was captured for {self.pipeline.captures} shapes of micro-batches so far, which takes "
                "seconds each: pad to fewer lengths, such as by pad_to_multiple_of of the data collator",
                stacklevel=2,
            )
        self.__stale = True
        self.__step_norm = result.grad_norm
        self.__replay()
        return torch.tensor(result.loss)

    def __following(self) -> list[dict] | None:
        """Returns the first micro-batches of the next step of this epoch, for which frozen layers can compute ahead."""
        count = self.pipeline._native.forwards_ahead
        if not count or any(is_overridden(self, name) for name in ("_prepare_inputs", "_prepare_input")):
            return None
        whole = self.args.gradient_accumulation_steps
        items = self.__step_plans[0].items if self.__step_plans else None
        batches = self.__upcoming.next(count if items is None else whole) if self.__upcoming is not None else []
        if not batches:
            return None
        first = [self._prepare_inputs(one) for one in batches[:count]]
        if self.loss_reduction == "targets":
            return first
        if items is not None:
            items = torch.as_tensor(self._get_num_items_in_batch(batches, self.args.device))
        with contextlib.suppress(Exception):  # of Python in compute_loss, which the next step meets again
            return self.__given([self.__script.expected(one, items, self.__step_plans[0]) for one in first], whole)
        return None

    def __counts_nothing(self) -> bool:
        plans = self.__step_plans
        items = plans[0].items if plans else None
        return items is not None and self.__is_scaled(items) and bool(items == 0)

    def __pass_over(self) -> torch.Tensor:
        warnings.warn(
            f"step {self.state.global_step + 1} changes nothing: no label of its batch counts (all are -100)",
            stacklevel=3,
        )
        self.__step_norm = 0.0
        return torch.tensor(0.0)

    def __rows(self) -> torch.Tensor:
        """Returns what the programs of compute_loss have taken for Python, a row for each micro-batch."""
        return self.pipeline._native.weights(names={TAKEN})[TAKEN]

    def __replay(self) -> None:
        """Runs the Python of compute_loss for each micro-batch, with the numbers of the step."""
        if self.__script is None or not self.__script.own:
            return
        rows, state = self.__rows(), self.accelerator.gradient_state
        try:
            for number, plan in enumerate(self.__step_plans):
                state._set_sync_gradients(number == len(self.__step_plans) - 1)
                self.__script.replay(plan, rows[number])
        finally:
            state._set_sync_gradients(True)

    def __failed_guard(self) -> str | None:
        """Says which comparison of compute_loss had another outcome in the step, or which number was too large, if one
        was."""
        if self.__script is None or not self.__script.own:
            return None
        try:
            rows = self.__rows()
        except Error:
            return None
        not_made = f"step {self.state.global_step + 1} was not made, because"
        for number, plan in enumerate(self.__step_plans):
            if not rows[number].any():
                continue  # it did not run
            if large := plan.too_large(rows[number]):
                return f"{not_made} {large}"
            for key, holds in zip(plan.guarded, rows[number, plan.guards_begin :].tolist()):
                if not holds:
                    was = plan.outcomes[key].value
                    return (
                        f"{not_made} a comparison of compute_loss ({key}) is {not was} in micro-batch {number}, but "
                        f"was {was} when it was captured, and the loss depends on it. Compute both sides, and choose: "
                        "torch.where(condition, a, b)"
                    )
        return None

    def __check_settings(self) -> None:
        """Raises Error for settings that transformers reads at each step, but the pipeline has since its first."""
        if fixed_settings(self.optimizer) != self.__fixed:
            raise Error(
                f"settings of the optimizer changed since the first step: from {self.__fixed} to "
                f"{fixed_settings(self.optimizer)}. Only its learning rate may change, as by a callback"
            )
        for name in ("backward", "clip_grad_norm_"):
            if name in vars(self.accelerator):
                raise Error(f"accelerator.{name} was replaced, but the pipeline does not call it: leave it as it is")
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # that accelerate has wrapped
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise Error("the optimizer has hooks of its step, but the pipeline makes the steps: remove them")
        if self.args.max_grad_norm != self.__clip_norm:
            raise Error(
                f"TrainingArguments.max_grad_norm changed since the first step: from {self.__clip_norm} to "
                f"{self.args.max_grad_norm}. Set it before training"
            )

    def _maybe_log_save_evaluate(self, *args, **keywords) -> None:
        if self.__late_error is not None:
            error, self.__late_error = self.__late_error, None
            raise error
        super()._maybe_log_save_evaluate(*args, **keywords)

    def _get_grad_norm(self, model, grad_norm=None) -> float:
        if self.__step_norm is None:
            raise Error(
                f"training_step of {type(self).__name__} did not call super().training_step, which trains in the "
                "pipeline"
            )
        norm = self.__step_norm
        self.__begin_step()
        return norm

    def _finalize_training(self, *args, **keywords) -> TrainOutput:
        self.__update_model()
        output = super()._finalize_training(*args, **keywords)
        output.metrics["captured_shapes"] = self.pipeline.captures if self.pipeline is not None else 0
        return output

    def evaluate(self, *args, **keywords) -> dict[str, float]:
        self.__update_model()  # for callbacks, and for predictions, which the model itself makes
        return super().evaluate(*args, **keywords)

    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, *args, **keywords):
        arguments = description, prediction_loss_only, ignore_keys, *args
        only_losses = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        in_pipeline = self.__in_pipeline
        if in_pipeline is None:
            in_pipeline = self.pipeline is not None and not self.pipeline._shared
        if not in_pipeline or self.__evaluation is None or not only_losses and ignore_keys is not None:
            return super().evaluation_loop(dataloader, *arguments, **keywords)
        batches = Ahead(dataloader)
        with self.__evaluation.of(batches, predicts=not only_losses):
            return super().evaluation_loop(batches, *arguments, **keywords)

    def predict(self, *args, **keywords):
        self.__update_model()
        return super().predict(*args, **keywords)

    def end(self) -> None:
        """Ends the pipeline's connections, too: a process that ends without this could cut off one that is behind."""
        self.pipeline = None
        super().end()

    def save_model(self, *args, **keywords) -> None:
        """Any process may call this alone. During training, the others then send their weights before their next
        step."""
        self.__update_model()
        super().save_model(*args, **keywords)
        if self.__many and self.__saves_checkpoint:
            dist.barrier()  # the others look for the folder

    def _save_checkpoint(self, *args, **keywords) -> None:
        self.__saves_checkpoint = True
        try:
            super()._save_checkpoint(*args, **keywords)
        finally:
            self.__saves_checkpoint = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.pipeline is None:  # no step since the state was loaded
            super()._save_optimizer_and_scheduler(output_dir)
            return
        fetch_state(self.optimizer, self.__module, self.pipeline)
        super()._save_optimizer_and_scheduler(output_dir)
        self.optimizer.state.clear()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all processes have the same state
            super()._save_rng_state(output_dir)

    def __make_pipeline(self, given: list[dict]) -> None:
        reduction = None
        self.__module = self.model
        if self.loss_reduction is None:
            reduction = "micro_batch"
            ignored = {*getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ())}
            scripts = {
                TRAIN: self.__script,
                EVALUATE: Script(self, True, self.__update_model),
                PREDICT: Script(self, True, self.__update_model, Returned(ignored)),
            }
            self.__module = LossModule(scripts, self.__step_plans[0], self.args.gradient_accumulation_steps)
            self.__freeze()
        self.pipeline = twobp.Trainer(
            self.__module,
            given,
            optimizer=update_rule(self.optimizer, self.__module),
            loss_reduction=reduction,
            micro_batches=self.args.gradient_accumulation_steps,
            clip_norm=self.args.max_grad_norm,
            seed=self.args.seed,
            steps=self.state.max_steps,
            # accelerate has put bf16's autocast around the model's forward, but fp16's only on GPUs.
            precision="fp16" if self.args.fp16 and "cuda" in str(self.__settings.get("device")) else "fp32",
            **self.__settings,
        )
        self.pipeline._share_weights()
        if isinstance(self.__module, LossModule):
            self.__evaluation = Evaluation(self, self.__module, self.pipeline, self.__given)
        self.__fixed, self.__clip_norm = fixed_settings(self.optimizer), self.args.max_grad_norm
        for callback in self.callback_handler.callbacks:
            if type(callback).on_pre_optimizer_step is not transformers.TrainerCallback.on_pre_optimizer_step:
                warnings.warn(
                    f"{type(callback).__name__}.on_pre_optimizer_step finds no gradients, and cannot change them: the "
                    "pipeline has them",
                    stacklevel=2,
                )
        load_state(self.optimizer, self.__module, self.pipeline, self.state.global_step)
        if self.loss_reduction is None:
            self.__warn_of_means()

    def __freeze(self) -> None:
        """Models that compute_loss calls, but the optimizer does not have, are references: nothing trains them."""
        trained = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        for name, module in self.__module.named_children():
            if name != "model":
                self.__frozen += [one for one in module.parameters() if one.requires_grad and id(one) not in trained]
        for one in self.__frozen:
            one.requires_grad_(False)

    def __unfreeze(self) -> None:
        for one in self.__frozen:
            one.requires_grad_(True)
        self.__frozen = []

    def __warn_of_means(self) -> None:
        """Warns of a loss that transformers takes for divided by num_items_in_batch, and that is not."""
        plan, count = self.__step_plans[0], len(self.__step_plans)
        if count > 1 and plan.items is not None and self.__is_scaled(plan.items) and self.__script.ignores_items(plan):
            warnings.warn(
                f"the loss of {type(self).__name__} does not divide by num_items_in_batch, but transformers takes it "
                f"for divided and adds those of the {count} micro-batches. If it is a mean, set "
                "loss_is_scaled_for_ga = False in the class of the trainer",
                stacklevel=2,
            )

    def __update_model(self, needed: bool = True) -> None:
        """Gives the model the trained weights. All processes collect them together, but one alone may call this during
        training: the others ask before each step whether the weights are `needed`."""
        if not self.__stale:
            return
        if self.__many:
            by_any = torch.tensor([needed], dtype=torch.uint8)
            dist.all_reduce(by_any, dist.ReduceOp.MAX)
            needed = bool(by_any)
        if needed:
            self.pipeline._load_into_module()
            self.__stale = False


def prepared(args: transformers.TrainingArguments | None, settings: dict) -> transformers.TrainingArguments:
    """Returns the arguments as the pipeline honours them, and adds to its settings. Raises Error for the first that
    cannot be honoured."""
    if args is not None and not isinstance(args, transformers.TrainingArguments):
        raise Error(f"args is {checks.shown(args)}, but must be TrainingArguments")
    args = copy.copy(transformers.TrainingArguments("tmp_trainer") if args is None else args)
    if settings.get("device", "cpu") != "cpu":
        keep_to_cpu(args)
    check_arguments(args)
    if settings.get("gradients") == "streamed" and args.max_grad_norm:
        raise Error(
            f"gradients is 'streamed', but TrainingArguments.max_grad_norm is {args.max_grad_norm}: clipping needs the "
            "norm of all gradients before one is applied, so set it to 0, or gradients to 'auto'"
        )
    without_effect(args, settings.get("device"))
    if args.activation_checkpointing or args.gradient_checkpointing:
        settings.setdefault("recompute", ["activations"])
        args.activation_checkpointing = args.gradient_checkpointing = False
    return args


@functools.cache
def pipelined(kind: type[transformers.Trainer]) -> type[Trainer]:
    """Returns a subclass of `kind`, a subclass of transformers.Trainer such as one of TRL, that trains in a pipeline.
    It takes the arguments of `kind`, and beside them those of Trainer."""
    if not isinstance(kind, type) or not issubclass(kind, transformers.Trainer):
        raise Error(f"pipelined takes a subclass of transformers.Trainer, not {checks.shown(kind)}")
    if kind is transformers.Trainer or issubclass(kind, Trainer):
        return kind if issubclass(kind, Trainer) else Trainer
    names = {name.split(".", 1)[1] for name in twobp._native.config_keys() if name.startswith(SECTIONS)}
    names = (names | NAMES.keys() | {"loss_reduction", "check_every", "evaluate_in_pipeline"}) - inspect.signature(
        kind.__init__
    ).parameters.keys()

    def __init__(self, *args, **keywords):
        own = {name: keywords.pop(name) for name in names & keywords.keys()}

        def honoured(one):
            return prepared(one, own) if isinstance(one, transformers.TrainingArguments) else one

        self._Trainer__of_pipelined = own  # of the class above
        super(made, self).__init__(
            *map(honoured, args), **{name: honoured(one) if name == "args" else one for name, one in keywords.items()}
        )

    made = type(kind.__name__, (kind, Trainer), {"__init__": __init__, "__doc__": kind.__doc__})
    made.__module__, made.__qualname__ = __name__, f"pipelined({kind.__qualname__})"
    return made


Seq2SeqTrainer = pipelined(transformers.Seq2SeqTrainer)
