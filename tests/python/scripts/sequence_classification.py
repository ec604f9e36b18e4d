"""Classification of texts, padded to the longest of a batch, with metrics while it trains."""
import numpy
from datasets import Dataset
from transformers import DataCollatorWithPadding, DistilBertConfig, DistilBertForSequenceClassification, TrainingArguments
from transformers import Trainer

import small

tokenizer = small.tokenizer()
texts = small.sentences(80)
data = Dataset.from_dict({"text": texts, "label": [int(text.split()[0][1:]) % 3 for text in texts]}).map(
    lambda rows: {"input_ids": tokenizer(rows["text"])["input_ids"]}, batched=True, remove_columns="text").train_test_split(16, seed=0)
model = small.seeded(lambda: DistilBertForSequenceClassification(DistilBertConfig(
    vocab_size=small.VOCABULARY, dim=small.WIDTH, hidden_dim=4 * small.WIDTH, n_layers=small.LAYERS, n_heads=2, max_position_embeddings=small.LENGTH,
    dropout=0, attention_dropout=0, seq_classif_dropout=0, num_labels=3, pad_token_id=0)))


def accuracy(result):
    return {"accuracy": float(numpy.mean(result.predictions.argmax(-1) == result.label_ids))}


trainer = Trainer(
    model=model, args=TrainingArguments("output", eval_strategy="steps", eval_steps=2, label_smoothing_factor=0.1, **small.COMMON),
    train_dataset=data["train"], eval_dataset=data["test"], data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=accuracy)
trainer.train()
