"""Preferences, with the base weights of LoRA as the reference."""
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig
from trl import DPOTrainer

import small

sentences = [small.sentences(80, seed) for seed in range(3)]
data = Dataset.from_list([{"prompt": a, "chosen": " " + b, "rejected": " " + c} for a, b, c in zip(*sentences)])
model = small.seeded(lambda: Qwen3ForCausalLM(Qwen3Config(
    vocab_size=small.VOCABULARY, hidden_size=small.WIDTH, intermediate_size=2 * small.WIDTH, num_hidden_layers=small.LAYERS, num_attention_heads=2,
    num_key_value_heads=1, head_dim=small.WIDTH // 2, pad_token_id=0, bos_token_id=1, eos_token_id=2)))
trainer = DPOTrainer(
    model=model, args=DPOConfig("output", bf16=False, gradient_checkpointing=False, pad_to_multiple_of=small.LENGTH, **small.COMMON), train_dataset=data,
    processing_class=small.tokenizer(), peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer.train()
