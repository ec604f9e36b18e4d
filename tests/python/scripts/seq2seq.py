"""A sentence becomes another one, and is generated for the metrics."""
import numpy
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration
from transformers import Seq2SeqTrainer

import small

tokenizer = small.tokenizer()
texts = small.sentences(80)
data = Dataset.from_dict({"input_ids": tokenizer(texts)["input_ids"], "labels": tokenizer([" ".join(text.split()[::-1]) for text in texts])["input_ids"]})
data = data.train_test_split(4, seed=0)
model = small.seeded(lambda: T5ForConditionalGeneration(T5Config(
    vocab_size=small.VOCABULARY, d_model=small.WIDTH, d_kv=small.WIDTH // 2, d_ff=2 * small.WIDTH, num_layers=small.LAYERS, num_heads=2, dropout_rate=0,
    pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)))


def words(result):
    return {"words": float(numpy.mean(result.predictions > 4))}


trainer = Seq2SeqTrainer(
    model=model, args=Seq2SeqTrainingArguments("output", predict_with_generate=True, generation_max_length=8, **small.COMMON),
    train_dataset=data["train"], eval_dataset=data["test"], data_collator=DataCollatorForSeq2Seq(tokenizer, model=model), compute_metrics=words)
trainer.train()
trainer.evaluate()
