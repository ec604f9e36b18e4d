"""Causal language modelling: texts are joined and cut into blocks."""
import itertools
import math

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, default_data_collator
from transformers import Trainer

import small

tokenizer = small.tokenizer()
ids = list(itertools.chain.from_iterable(tokenizer(small.sentences(200))["input_ids"]))
blocks = [ids[i:i + small.LENGTH] for i in range(0, len(ids) - small.LENGTH, small.LENGTH)]
data = Dataset.from_dict({"input_ids": blocks, "labels": blocks}).train_test_split(8, seed=0)
model = small.seeded(lambda: GPT2LMHeadModel(GPT2Config(
    vocab_size=small.VOCABULARY, n_positions=small.LENGTH, n_embd=small.WIDTH, n_layer=small.LAYERS, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=1, eos_token_id=2)))
trainer = Trainer(
    model=model, args=TrainingArguments("output", lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, **small.COMMON),
    train_dataset=data["train"], eval_dataset=data["test"], data_collator=default_data_collator)
trainer.train()
perplexity = math.exp(trainer.evaluate()["eval_loss"])
