"""Says how each method of transformers.Trainer between a batch and its step is treated if a subclass or an instance has
its own. A test finds the methods that a new release of transformers adds."""

from __future__ import annotations

import transformers.trainer

import twobp.transformers
from twobp import Error

# The loop of transformers calls these, or this trainer does, where transformers would.
CALLED = frozenset(
    """
    _run_epoch training_step _prepare_inputs _prepare_input get_batch_samples _get_num_items_in_batch
    _load_rng_state _get_learning_rate _maybe_log_save_evaluate _track_num_input_tokens floating_point_ops
""".split()
)

# Nothing calls these on one device without FSDP.
UNUSED = frozenset("_defer_fsdp_gradient_reduction _has_mixed_mesh_grads _mixed_mesh_grad_norm".split())

_LOSS = "the loss of the pipeline is that of the model: let the model return it, or use twobp.Trainer with loss_fn"
_CONTEXT = "the pipeline runs the forward pass without it: leave it out, and change the model or its dtype instead"
_ONE_DEVICE = "the batches are those of one device: leave it out"
_CLIPPED = "the pipeline has the gradients, and clips them: leave it out, and set TrainingArguments.max_grad_norm"
METHODS_REFUSED = {
    "compute_loss": _LOSS,
    "compute_loss_context_manager": _CONTEXT,
    "autocast_smart_context_manager": _CONTEXT,
    "_prepare_context_parallel_inputs": _CONTEXT,
    "get_cp_size": _ONE_DEVICE,
    "get_sp_size": _ONE_DEVICE,
    "get_tp_size": _ONE_DEVICE,
    "_clip_grad_norm": _CLIPPED,
    "_get_grad_norm": _CLIPPED,
}
VALUES_REFUSED = {
    "compute_loss_func": _LOSS,
    "label_smoother": _LOSS,
    "neftune_noise_alpha": "the captured model runs without it: leave it out",
}  # unless None


def check_overrides(trainer) -> None:
    """Raises Error for the first method or value that would have no effect."""
    for name, advice in METHODS_REFUSED.items():
        if is_overridden(trainer, name):
            raise Error(f"{type(trainer).__name__}.{name} is not that of transformers.Trainer, but {advice}")
    for name, advice in VALUES_REFUSED.items():
        if getattr(trainer, name, None) is not None:
            raise Error(f"{type(trainer).__name__}.{name} is set, but {advice}")


def is_overridden(trainer, name: str) -> bool:
    """Returns whether the method is neither that of transformers nor of this package. It may be replaced in a class,
    also in that of transformers, or in the instance."""
    method = getattr(trainer, name)
    code = getattr(getattr(method, "__func__", None), "__code__", None)
    return (
        code is None
        or method.__self__ is not trainer
        or code.co_filename not in (transformers.trainer.__file__, twobp.transformers.__file__)
    )


def check_weights(trainer, batches: list[dict], items: list, accepts_loss_kwargs: bool) -> None:
    """Raises Error if transformers would weigh the micro-batches of a step otherwise than by their targets. `items` are
    the num_items_in_batch that each got."""
    if trainer.model_accepts_loss_kwargs:
        count = transformers.Trainer._get_num_items_in_batch(trainer, batches, trainer.args.device)
        if other := [
            one for one in items if (one is None) != (count is None) or one is not None and float(one) != float(count)
        ]:
            names = [
                name
                for name in (
                    "_get_num_items_in_batch",
                    "get_batch_samples",
                    "_prepare_inputs",
                    "_prepare_input",
                    "training_step",
                )
                if is_overridden(trainer, name)
            ]
            raise Error(
                f"num_items_in_batch is {_plain(other[0])}, by which transformers would divide the loss, but "
                f"{_plain(count)} labels count, by which the "
                f"pipeline divides it. See {type(trainer).__name__}.{', '.join(names) or '_get_num_items_in_batch'}: "
                "change labels in the data "
                "collator, and let num_items_in_batch be the number of those that count"
            )
    if len(batches) == 1:
        return
    check_reduction(trainer, batches, items)
    scaled = trainer.model_accepts_loss_kwargs and items[0] is not None
    if trainer.loss_is_scaled_for_ga not in (None, scaled):
        raise Error(
            f"{type(trainer).__name__}.loss_is_scaled_for_ga is {trainer.loss_is_scaled_for_ga}, but the loss of a "
            "step in the pipeline is the "
            "mean over its targets. Leave it out"
        )
    if (
        trainer.model_accepts_loss_kwargs != accepts_loss_kwargs
        and len(counts := {_labels(batch, trainer._loss_shifts_labels) for batch in batches}) > 1
    ):
        raise Error(
            f"{type(trainer).__name__}.model_accepts_loss_kwargs was changed to {trainer.model_accepts_loss_kwargs}, "
            "so that transformers would take "
            f"the mean of the means of the micro-batches, which have {sorted(counts)} labels. The pipeline takes the "
            "mean over all labels of the step. Leave it out"
        )


def check_reduction(trainer, batches: list[dict], items: list) -> None:
    """Raises Error if the weights that loss_reduction gives the micro-batches of a step are not those of
    transformers."""
    if trainer.loss_reduction is None:
        return
    if trainer.model_accepts_loss_kwargs and items[0] is not None:
        raise Error(
            "loss_reduction weighs each micro-batch by its samples. transformers weighs the labels of this model by "
            "num_items_in_batch, "
            "and adds other terms, such as the auxiliary loss of a router, once for each micro-batch: set "
            "gradient_accumulation_steps to 1, leave that "
            "term out (output_router_logits=False), or use twobp.Trainer"
        )
    sizes = [len(next(iter(batch.values()))) for batch in batches]
    if len(set(sizes)) > 1:
        raise Error(
            f"loss_reduction weighs each micro-batch by its samples, which are {sizes} in this step, but transformers "
            "weighs all micro-batches of this model alike: set "
            "dataloader_drop_last=True"
        )


def _labels(batch: dict, shifted: bool) -> int:
    labels = batch.get("labels")
    return 0 if labels is None else int((labels[..., 1:] if shifted else labels).ne(-100).sum())


def _plain(count) -> str:
    return "None" if count is None else f"{float(count):g}"
