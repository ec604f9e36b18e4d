"""What the scripts share: a tokenizer of whole words, and sizes that benchmarks/scripts.py makes larger."""
import os
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WIDTH, LAYERS, LENGTH, STEPS = (int(one) for one in os.environ.get("TWOBP_SCRIPT_SIZES", "16 2 12 4").split())
COMMON = dict(use_cpu=True, max_steps=STEPS, logging_steps=1, learning_rate=1e-3, report_to="none", disable_tqdm=True, save_strategy="no",
              per_device_train_batch_size=2, gradient_accumulation_steps=4)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
WORDS = [f"w{i}" for i in range(59)]
VOCABULARY = len(SPECIAL) + len(WORDS)


def tokenizer():
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>")


def sentences(count, seed=0, least=None):
    """Sentences of unlike lengths, in which each word tells the next."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        first = rng.randrange(len(WORDS))
        found.append(" ".join(WORDS[(first + 3 * i) % len(WORDS)] for i in range(rng.randint(least or LENGTH // 2, LENGTH - 2))))
    return found


def seeded(make):
    torch.manual_seed(0)
    return make()
