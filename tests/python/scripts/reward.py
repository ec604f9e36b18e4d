"""A model of rewards, from pairs of answers."""
from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig
from trl import RewardTrainer

import small

data = Dataset.from_list([{"chosen": a, "rejected": b} for a, b in zip(small.sentences(80), small.sentences(80, 1))])
model = small.seeded(lambda: LlamaForSequenceClassification(LlamaConfig(
    vocab_size=small.VOCABULARY, hidden_size=small.WIDTH, intermediate_size=2 * small.WIDTH, num_hidden_layers=small.LAYERS, num_attention_heads=2,
    num_labels=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)))
trainer = RewardTrainer(
    model=model, args=RewardConfig("output", bf16=False, gradient_checkpointing=False, pad_to_multiple_of=small.LENGTH, **small.COMMON),
    train_dataset=data, processing_class=small.tokenizer())
trainer.train()
