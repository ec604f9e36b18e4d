"""Instructions, with base weights in 4 bits and adapters of LoRA."""
import tempfile

from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig
from trl import SFTTrainer

import small

data = Dataset.from_list([{"prompt": a, "completion": " " + b} for a, b in zip(small.sentences(80), small.sentences(80, 1))])
with tempfile.TemporaryDirectory() as folder:
    small.seeded(lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=small.VOCABULARY, hidden_size=4 * small.WIDTH, intermediate_size=8 * small.WIDTH, num_hidden_layers=small.LAYERS, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2))).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, device_map="cpu", quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
trainer = SFTTrainer(
    model=model, args=SFTConfig("output", bf16=False, gradient_checkpointing=False, pad_to_multiple_of=small.LENGTH, **small.COMMON), train_dataset=data,
    processing_class=small.tokenizer(), peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer.train()
