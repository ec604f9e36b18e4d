"""Speech to text, with a collator that pads the texts."""
import torch
from transformers import Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration
from transformers import Seq2SeqTrainer

import small

tokenizer = small.tokenizer()
generator = torch.Generator().manual_seed(0)
recordings = [{"input_features": torch.randn(8, 2 * small.LENGTH, generator=generator), "text": text} for text in small.sentences(80)]
model = small.seeded(lambda: WhisperForConditionalGeneration(WhisperConfig(
    vocab_size=small.VOCABULARY, num_mel_bins=8, d_model=small.WIDTH, encoder_layers=small.LAYERS, decoder_layers=small.LAYERS, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=4 * small.WIDTH, decoder_ffn_dim=4 * small.WIDTH, max_source_positions=small.LENGTH,
    max_target_positions=small.LENGTH + 2, dropout=0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)))


def collated(samples):
    labels = tokenizer([one["text"] for one in samples], padding=True, return_tensors="pt")
    return {"input_features": torch.stack([one["input_features"] for one in samples]),
            "labels": labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)}


trainer = Seq2SeqTrainer(
    model=model, args=Seq2SeqTrainingArguments("output", remove_unused_columns=False, **small.COMMON), train_dataset=recordings, data_collator=collated)
trainer.train()
