"""A class for each word; the padding does not count."""
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, RobertaConfig, RobertaForTokenClassification, TrainingArguments
from transformers import Trainer

import small

tokenizer = small.tokenizer()
ids = tokenizer(small.sentences(80))["input_ids"]
data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids],
                          "labels": [[one % 4 if one >= len(small.SPECIAL) else -100 for one in row] for row in ids]})
model = small.seeded(lambda: RobertaForTokenClassification(RobertaConfig(
    vocab_size=small.VOCABULARY, hidden_size=small.WIDTH, intermediate_size=4 * small.WIDTH, num_hidden_layers=small.LAYERS, num_attention_heads=2,
    max_position_embeddings=small.LENGTH + 2, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=4, pad_token_id=0)))
trainer = Trainer(
    model=model, args=TrainingArguments("output", **small.COMMON), train_dataset=data, data_collator=DataCollatorForTokenClassification(tokenizer))
trainer.train()
