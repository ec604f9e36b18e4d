"""A causal model with base weights in 4 bits, of which only adapters of LoRA are trained."""
import tempfile

from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer

import small

tokenizer = small.tokenizer()
data = Dataset.from_dict({"input_ids": tokenizer(small.sentences(80))["input_ids"]})
with tempfile.TemporaryDirectory() as folder:
    small.seeded(lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=small.VOCABULARY, hidden_size=4 * small.WIDTH, intermediate_size=8 * small.WIDTH, num_hidden_layers=small.LAYERS, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2))).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, device_map="cpu", quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = small.seeded(lambda: get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")))
trainer = Trainer(
    model=model, args=TrainingArguments("output", **small.COMMON), train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
trainer.train()
trainer.save_model("adapter")
