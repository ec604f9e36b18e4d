"""Fine-tunes a small model with LoRA by TRL's SFTTrainer on two ranks: only the answers count, and only the adapters are trained
and saved. Only the import and the argument `ranks` differ from a script for one device. Needs: trl, datasets, peft.
"""
import pathlib
import tempfile

import datasets
import torch
import transformers
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig

from twobp.trl import SFTTrainer

WORDS = ["<pad>", "<eos>", "after", "comes", "?", *map(str, range(40))]


def tokenizer():
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="?")


torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=1))
data = datasets.Dataset.from_list([{"prompt": f"after {a} comes", "completion": f" {a + 1}"} for a in range(39)] * 8)
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(folder, use_cpu=True, bf16=False, learning_rate=1e-2, max_steps=15, logging_steps=1, report_to="none", disable_tqdm=True,
                          save_strategy="no", per_device_train_batch_size=8,  # samples of a micro-batch
                          gradient_accumulation_steps=4, gradient_checkpointing=False)
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapters, ranks=2, schedule="1f1b")
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
    files = sorted(path.name for path in pathlib.Path(folder, "adapter").glob("adapter*"))
log = [line for line in trainer.state.log_history if "mean_token_accuracy" in line]
print(f"loss {log[0]['loss']:.3f} -> {log[-1]['loss']:.3f}, saved {', '.join(files)}")
assert log[-1]["loss"] < log[0]["loss"]
