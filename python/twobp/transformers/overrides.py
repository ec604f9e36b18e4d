"""Says how each method of transformers.Trainer between a batch and its step is treated if a subclass or an instance has
its own. A test finds the methods that a new release of transformers adds."""

from __future__ import annotations

import transformers.trainer

import twobp.transformers
from twobp import Error

# The loop of transformers calls these, or this trainer does, where transformers would.
CALLED = frozenset(
    """
    _run_epoch training_step compute_loss _prepare_inputs _prepare_input get_batch_samples _get_num_items_in_batch
    _load_rng_state _get_learning_rate _maybe_log_save_evaluate _track_num_input_tokens floating_point_ops
""".split()
)

# Nothing calls these on one device without FSDP.
UNUSED = frozenset("_defer_fsdp_gradient_reduction _has_mixed_mesh_grads _mixed_mesh_grad_norm".split())

_CONTEXT = "the pipeline runs the forward pass without it: leave it out, and change the model or its dtype instead"
_ONE_DEVICE = "the batches are those of one device: leave it out"
_CLIPPED = "the pipeline has the gradients, and clips them: leave it out, and set TrainingArguments.max_grad_norm"
METHODS_REFUSED = {
    "compute_loss_context_manager": _CONTEXT,
    "autocast_smart_context_manager": _CONTEXT,
    "_prepare_context_parallel_inputs": _CONTEXT,
    "get_cp_size": _ONE_DEVICE,
    "get_sp_size": _ONE_DEVICE,
    "get_tp_size": _ONE_DEVICE,
    "_clip_grad_norm": _CLIPPED,
    "_get_grad_norm": _CLIPPED,
}


def check_overrides(trainer) -> None:
    """Raises Error for the first method that would have no effect."""
    for name, advice in METHODS_REFUSED.items():
        if is_overridden(trainer, name):
            raise Error(f"{type(trainer).__name__}.{name} is not that of transformers.Trainer, but {advice}")


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
