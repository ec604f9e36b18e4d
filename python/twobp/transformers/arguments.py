"""Says how each field of TrainingArguments is treated. A test finds the fields that a new release of transformers
adds."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import torch
import transformers

from twobp import Error

HONOURED = frozenset(
    """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    use_cache
    logging_strategy logging_steps logging_first_step log_on_each_node include_num_input_tokens_seen log_level
    log_level_replica
    disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches
    eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_only_model save_strategy save_steps save_on_each_node save_total_limit
    load_best_model_at_end metric_for_best_model greater_is_better
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    ddp_backend ddp_timeout
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy
    label_smoothing_factor bf16 fp16
    length_column_name skip_memory_metrics neftune_noise_alpha auto_find_batch_size predict_with_generate
""".split()
)

# These tune replicas or GPUs, which do not exist here, or only scripts read them. A loss that is not finite
# is an error, whatever logging_nan_inf_filter says.
WITHOUT_EFFECT = frozenset(
    """
    average_tokens_across_devices eval_use_gather_object ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers
    ddp_static_graph tf32 torch_empty_cache_steps local_rank logging_nan_inf_filter
    do_train do_eval do_predict resume_from_checkpoint torch_compile torch_compile_backend torch_compile_mode
""".split()
)

_OWN_DTYPE = "the model is evaluated in its own dtype: set it to False, and load the model with dtype=torch.bfloat16"
_EAGER = "the captured model runs without the code that this changes: leave it out"
_PIPELINE = "the pipeline takes its place: leave it out, and choose ranks and schedule"
REFUSED = {
    "bf16_full_eval": _OWN_DTYPE,
    "fp16_full_eval": _OWN_DTYPE,
    "use_liger_kernel": _EAGER,
    "liger_kernel_config": _EAGER,
    "debug": _EAGER,
    "optim_target_modules": "it is for optimizers that the pipeline does not have: leave it out",
    "enable_jit_checkpoint": "it would save in the middle of a step: use save_steps",
    "fsdp": _PIPELINE,
    "fsdp_config": _PIPELINE,
    "deepspeed": _PIPELINE,
    "parallelism_config": _PIPELINE,
    # Of TRL.
    "use_liger_loss": _EAGER,
    "activation_offloading": _PIPELINE,
}
CHECKPOINTING = {"every_n_layers": 1, "offload": False}  # keys of activation_checkpointing_kwargs that have an effect


# Names of AdamW whose state has 8 bits, or may leave the device.
SMALL_ADAMW = frozenset(
    "adamw_bnb_8bit adamw_8bit adamw_torch_8bit adamw_torch_4bit paged_adamw_32bit paged_adamw_8bit".split()
)


def without_effect(args: transformers.TrainingArguments, device: object = None) -> None:
    """Changes, with a warning, what the pipeline does in its own way. `device` is that of the ranks."""
    if args.fp16 and "cuda" not in str(device):
        warnings.warn(
            "TrainingArguments.fp16 has no effect on a CPU, as in transformers: set bf16, or leave it out", stacklevel=4
        )
    optimizer: Any = getattr(args, "optim", None)
    if optimizer in SMALL_ADAMW:
        warnings.warn(
            f"TrainingArguments.optim is {optimizer.value!r}: the pipeline's AdamW has its "
            "state in 32 bits, spread over the ranks",
            stacklevel=4,
        )
        args.optim = type(args.optim)("adamw_torch")
    if args.torch_compile:
        warnings.warn("TrainingArguments.torch_compile has no effect: the model is captured instead", stacklevel=4)
        args.torch_compile = False
        for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):  # TrainingArguments has set them
            os.environ.pop(name, None)


def keep_to_cpu(args: transformers.TrainingArguments) -> None:
    """With ranks on GPUs, the model and the batches stay on the CPU all the same. Several processes have to say so
    themselves, because transformers has connected them by then."""
    if not args.use_cpu and not torch.distributed.is_initialized():
        args.use_cpu = True
        vars(args).pop("_setup_devices", None)  # transformers has chosen a GPU


def check_arguments(args: transformers.TrainingArguments) -> None:
    """Raises Error for the first argument that cannot be honoured."""
    if args.device.type != "cpu":
        raise Error(
            "TrainingArguments.use_cpu is False, but the model and the batches stay on the CPU: set it to True. For "
            'ranks on GPUs, give the trainer device="cuda"'
        )
    if not args.use_cpu and torch.distributed.is_initialized():
        raise Error(
            "TrainingArguments.use_cpu is False, so that transformers does not see the other processes: set it to True"
        )
    usual = {field.name: field.default for field in dataclasses.fields(args)}
    for name, advice in REFUSED.items():
        value = getattr(args, name, None)
        if value and value != usual[name]:
            raise Error(f"TrainingArguments.{name} is {value!r}: {advice}")
    for name, usually in CHECKPOINTING.items():
        given: Any = args.activation_checkpointing_kwargs or {}
        value = given.get(name, usually)
        if value != usually:
            raise Error(
                f"TrainingArguments.activation_checkpointing_kwargs: {name} is {value!r}: give the trainer "
                "recompute=[...] instead, which chooses the layers"
            )
