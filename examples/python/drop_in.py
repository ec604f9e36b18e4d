"""Trains a small Qwen3 on this repository's README with a script for transformers.Trainer. Two lines are new: the import of
twobp.transformers, and the pipeline's arguments.

One process runs both ranks:      python examples/python/drop_in.py
Each rank is a process:           torchrun --nproc-per-node 2 examples/python/drop_in.py runs/drop_in
"""
import pathlib
import sys
import tempfile

import torch
from transformers import EarlyStoppingCallback, Qwen3Config, Qwen3ForCausalLM, TrainingArguments

from twobp.transformers import Trainer                       # before: from transformers import Trainer

SEQUENCE = 64

text = list(pathlib.Path(__file__).resolve().parents[2].joinpath("README.md").read_bytes())
samples = [{"input_ids": text[i:i + SEQUENCE], "labels": text[i:i + SEQUENCE]} for i in range(0, len(text) - SEQUENCE, SEQUENCE)]
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                                     num_key_value_heads=2, head_dim=16, max_position_embeddings=SEQUENCE))
temporary = tempfile.TemporaryDirectory()
folder = sys.argv[1] if len(sys.argv) > 1 else temporary.name    # the same for all processes
arguments = TrainingArguments(
    folder, use_cpu=True, max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=4, learning_rate=3e-3,
    lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.01, logging_steps=5, eval_strategy="steps", eval_steps=10, save_steps=10,
    load_best_model_at_end=True, report_to="none")
trainer = Trainer(model, arguments, train_dataset=samples[8:], eval_dataset=samples[:8],
                  callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
                  ranks=2, schedule="zb-v")                      # new
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
trainer.save_model(folder)
if trainer.is_world_process_zero():
    print(f"{trainer.pipeline}\nheld-out loss {before:.3f} -> {after:.3f}")
    assert after < 0.8 * before
    Qwen3ForCausalLM.from_pretrained(folder)
trainer.end()
