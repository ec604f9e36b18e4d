"""A drop-in replacement for transformers.Trainer that trains in a pipeline. Its loop, data, schedules, logs, callbacks
and files are those of transformers. Each step is one of twobp.Trainer. It is tested with transformers 5.23."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType
from transformers.trainer_utils import TrainOutput

import twobp
from twobp import Error, checks
from twobp.trainer import by_section
from twobp.transformers.arguments import check_arguments
from twobp.transformers.optimizer import fetch_state, fixed_settings, highest_lr, load_state, update_rule
from twobp.transformers.overrides import check_overrides, check_weights, is_overridden

# TrainingArguments has these settings of the pipeline under another name.
NAMES = {
    "micro_batches": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "steps": "max_steps",
    "clip_norm": "max_grad_norm",
    "seed": "seed",
}


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
    and `gradient_accumulation_steps` is the number of micro-batches of a step. `loss_reduction` may be "mean", as for
    twobp.Trainer. `check_every` is as there.

    The ranks are threads of this process. Under torchrun, each process is a rank. Raises twobp.Error for an argument
    that cannot be honoured, and names it. `train` raises it for everything that twobp.Trainer refuses.

    `pipeline` is the twobp.Trainer of the last call of `train`, from its first step on. The model gets the trained
    weights when it is evaluated or saved and when training ends. During steps its own weights are old, and its
    gradients stay None."""

    pipeline: twobp.Trainer | None = None
    _late_error: BaseException | None = None

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
        **settings,
    ):
        self.compute_loss_func = compute_loss_func
        check_overrides(self)
        if args is not None and not isinstance(args, transformers.TrainingArguments):
            raise Error(f"args is {checks.shown(args)}, but must be TrainingArguments")
        args = copy.copy(transformers.TrainingArguments("tmp_trainer") if args is None else args)
        check_arguments(args)
        if args.activation_checkpointing:
            settings.setdefault("recompute", ["activations"])
            args.activation_checkpointing = args.gradient_checkpointing = False
        for name in NAMES.keys() & settings.keys():
            raise Error(f"{name} comes from TrainingArguments.{NAMES[name]}: set it there, and leave out {name}")
        if checks.whole(settings.get("data_parallel", 1), "data_parallel", least=1) != 1:
            raise Error(
                f"data_parallel is {settings['data_parallel']}, but this trainer has one pipeline: use twobp.Trainer "
                "for replicas"
            )
        by_section(settings)
        if loss_reduction not in (None, "mean"):
            raise Error(
                f"loss_reduction is {loss_reduction!r}, but transformers takes the mean of the losses of "
                'micro-batches: let the model return a mean, and give "mean"'
            )
        self._settings, self.loss_reduction = (
            {**settings, "loss_reduction": loss_reduction, "check_every": check_every},
            loss_reduction,
        )
        self._stale = False  # whether the model's weights are older than the pipeline's
        self._saves_checkpoint = False
        self._many = args.distributed_state.distributed_type != DistributedType.NO
        if self._many:
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
            None,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        self._accepts_loss_kwargs = self.model_accepts_loss_kwargs

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._many:
            self.accelerator.state = OneDevice(self.accelerator.state)
            self.accelerator.dataloader_config.dispatch_batches = False  # every process reads all batches
            self.accelerator.gather = self.accelerator.gather_for_metrics = self.gather_function = lambda data, **_: (
                data
            )

    def train(self, *args, **keywords) -> TrainOutput:
        check_overrides(self)
        check_arguments(self.args)
        self._begin_step()
        self._update_model()
        if self.pipeline is not None:  # another call continues with the optimizer's state
            fetch_state(self.optimizer, self.model, self.pipeline)
            self.pipeline = None
        return super().train(*args, **keywords)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        loader = super().get_train_dataloader()
        if self._many:  # random changes of samples are the same in all processes
            loader.worker_init_fn = functools.partial(loader.worker_init_fn, rank=0)
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        if self._step_batches:
            warnings.warn(
                f"an epoch ended within step {self.state.global_step + 1}: its {len(self._step_batches)} micro-batches "
                "train nothing. Let the number of batches be a "
                "multiple of gradient_accumulation_steps, and let callbacks end an epoch in on_step_end",
                stacklevel=2,
            )
        self._begin_step()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Trains when it gets the last micro-batch of a step, and then returns the step's loss. Before that, returns
        0."""
        check_overrides(self)
        if model is not self.model and model is not self.model_wrapped:
            raise Error(
                f"training_step got a {type(model).__name__} that is not the trainer's model, but the pipeline trains "
                "that one: leave out _wrap_model, "
                "and give super().training_step the model that it gets"
            )
        model.train()  # as in transformers, also those parts that were in evaluation mode
        if is_overridden(self, "_prepare_inputs") or is_overridden(self, "_prepare_input"):
            self._update_model()  # they may run it
        inputs = self._prepare_inputs(inputs)
        if not isinstance(inputs, Mapping):
            raise Error(f"_prepare_inputs returned a {type(inputs).__name__}, but must return a dict of tensors")
        if self._step_norm is None:
            self._step_batches.append(dict(inputs))
            self._step_items.append(num_items_in_batch)
        count, whole = len(self._step_batches), self.current_gradient_accumulation_steps
        last = self.accelerator.sync_gradients
        if self._step_norm is not None or count > whole or last and count < whole:
            raise Error(
                f"a step has {whole} micro-batches, but training_step of {type(self).__name__} did not call "
                "super().training_step, which trains in the "
                "pipeline, once for each of them"
            )
        return self._step() if last else torch.tensor(0.0)

    def _begin_step(self) -> None:
        self._step_batches: list[dict] = []
        self._step_items: list = []
        self._step_norm: float | None = None  # that of the gradients, when the pipeline has made the step

    def _step(self) -> torch.Tensor:
        """Makes the step of `_step_batches` in the pipeline. Returns its loss."""
        check_weights(self, self._step_batches, self._step_items, self._accepts_loss_kwargs)
        if self.pipeline is None:
            self._make_pipeline(self._step_batches[0])
        self._check_settings()
        self._update_model(needed=False)
        done = self.pipeline.steps_done
        try:
            result = self.pipeline.step(self._step_batches, lr=highest_lr(self.optimizer))
        except Error:
            if not self.pipeline._pass_over(self._step_batches):
                raise
            warnings.warn(
                f"step {self.state.global_step + 1} changes nothing: no label of its batch counts (all are -100)",
                stacklevel=2,
            )
            self._step_norm = 0.0
            return torch.tensor(0.0)
        except BaseException as error:  # of a signal
            if self.pipeline.steps_done == done:
                raise
            self._late_error = error  # raised when transformers has counted the step, too
            result = self.pipeline.last_result
        self._stale = True
        self._step_norm = result.grad_norm
        return torch.tensor(result.loss)

    def _check_settings(self) -> None:
        """Raises Error for settings that transformers reads at each step, but the pipeline has since its first."""
        if fixed_settings(self.optimizer) != self._fixed:
            raise Error(
                f"settings of the optimizer changed since the first step: from {self._fixed} to "
                f"{fixed_settings(self.optimizer)}. Only its learning rate "
                "may change, as by a callback"
            )
        if self.args.max_grad_norm != self._clip_norm:
            raise Error(
                f"TrainingArguments.max_grad_norm changed since the first step: from {self._clip_norm} to "
                f"{self.args.max_grad_norm}. Set it before training"
            )

    def _maybe_log_save_evaluate(self, *args, **keywords) -> None:
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error
        super()._maybe_log_save_evaluate(*args, **keywords)

    def _get_grad_norm(self, model, grad_norm=None) -> float:
        if self._step_norm is None:
            raise Error(
                f"training_step of {type(self).__name__} did not call super().training_step, which trains in the "
                "pipeline"
            )
        norm = self._step_norm
        self._begin_step()
        return norm

    def _finalize_training(self, *args, **keywords) -> TrainOutput:
        self._update_model()
        output = super()._finalize_training(*args, **keywords)
        output.metrics["captured_shapes"] = self.pipeline.captures if self.pipeline is not None else 0
        return output

    def evaluate(self, *args, **keywords) -> dict[str, float]:
        """Runs the model itself on PyTorch's threads, so that metrics and predictions are those of transformers."""
        self._update_model()
        return super().evaluate(*args, **keywords)

    def predict(self, *args, **keywords):
        self._update_model()
        return super().predict(*args, **keywords)

    def end(self) -> None:
        """Ends the pipeline's connections, too: a process that ends without this could cut off one that is behind."""
        self.pipeline = None
        super().end()

    def save_model(self, *args, **keywords) -> None:
        """Any process may call this alone. During training, the others then send their weights before their next
        step."""
        self._update_model()
        super().save_model(*args, **keywords)
        if self._many and self._saves_checkpoint:
            dist.barrier()  # the others look for the folder

    def _save_checkpoint(self, *args, **keywords) -> None:
        self._saves_checkpoint = True
        try:
            super()._save_checkpoint(*args, **keywords)
        finally:
            self._saves_checkpoint = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.pipeline is None:  # no step since the state was loaded
            super()._save_optimizer_and_scheduler(output_dir)
            return
        fetch_state(self.optimizer, self.model, self.pipeline)
        super()._save_optimizer_and_scheduler(output_dir)
        self.optimizer.state.clear()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all processes have the same state
            super()._save_rng_state(output_dir)

    def _make_pipeline(self, example: dict) -> None:
        self.pipeline = twobp.Trainer(
            self.model,
            example,
            optimizer=update_rule(self.optimizer, self.model),
            micro_batches=self.args.gradient_accumulation_steps,
            clip_norm=self.args.max_grad_norm,
            seed=self.args.seed,
            steps=self.state.max_steps,
            **self._settings,
        )
        self._fixed, self._clip_norm = fixed_settings(self.optimizer), self.args.max_grad_norm
        load_state(self.optimizer, self.model, self.pipeline, self.state.global_step)

    def _update_model(self, needed: bool = True) -> None:
        """Gives the model the trained weights. All processes collect them together, but one alone may call this during
        training: the others ask before each step whether the weights are `needed`."""
        if not self._stale:
            return
        if self._many:
            by_any = torch.tensor([needed], dtype=torch.uint8)
            dist.all_reduce(by_any, dist.ReduceOp.MAX)
            needed = bool(by_any)
        if needed:
            self.model.load_state_dict(self.pipeline.state_dict())
            self._stale = False
