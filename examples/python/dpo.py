"""Trains a small model on pairs of answers by TRL's DPOTrainer, with a frozen reference model, on two ranks. Only the import
and the argument `ranks` differ from a script for one device. Needs: trl, datasets.
"""
import tempfile

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig

from twobp.trl import DPOTrainer

WORDS = ["<pad>", "<eos>", "what", "is", "the", "sum", "of", "and", "?", "it", *map(str, range(20))]


def tokenizer():
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="?")


def pair(a, b):
    """The right answer, and one that is too large."""
    return {"prompt": f"what is the sum of {a} and {b} ?", "chosen": f" it is {a + b}", "rejected": f" it is {(a + b + 1) % 20}"}


def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=1))


data = datasets.Dataset.from_list([pair(a, b) for a in range(10) for b in range(10)])
with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(folder, use_cpu=True, bf16=False, beta=0.5, learning_rate=3e-3, max_steps=12, logging_steps=1, report_to="none", disable_tqdm=True,
                          save_strategy="no", per_device_train_batch_size=4,  # pairs of a micro-batch
                          gradient_accumulation_steps=4, gradient_checkpointing=False)
    trainer = DPOTrainer(model(), model(), arguments, train_dataset=data, processing_class=tokenizer(), ranks=2, schedule="1f1b")
    trainer.train()
log = [line for line in trainer.state.log_history if "rewards/accuracies" in line]
print(f"loss {log[0]['loss']:.3f} -> {log[-1]['loss']:.3f}, margin of rewards {log[0]['rewards/margins']:.3f} -> {log[-1]['rewards/margins']:.3f}")
assert log[-1]["loss"] < log[0]["loss"]
