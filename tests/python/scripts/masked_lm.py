"""Masked language modelling: the collator masks other words in each batch."""
from datasets import Dataset
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, TrainingArguments
from transformers import Trainer

import small

tokenizer = small.tokenizer()
data = Dataset.from_dict({"text": small.sentences(80, least=small.LENGTH - 2)}).map(
    lambda rows: tokenizer(rows["text"], padding="max_length", max_length=small.LENGTH), batched=True, remove_columns="text")
model = small.seeded(lambda: BertForMaskedLM(BertConfig(
    vocab_size=small.VOCABULARY, hidden_size=small.WIDTH, intermediate_size=4 * small.WIDTH, num_hidden_layers=small.LAYERS, num_attention_heads=2,
    max_position_embeddings=small.LENGTH, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=0)))
trainer = Trainer(
    model=model, args=TrainingArguments("output", **small.COMMON), train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4))
trainer.train()
