"""Makes small random Mambas with `transformers` and computes their results, for mamba_transformers_test.cpp.

  make(folder)  writes for each case: model/ (saved by transformers), data/ (input_ids.npy, labels.npy, perhaps
                attention_mask.npy), before.safetensors (all weights), logits.safetensors, after.safetensors (the
                weights after one step of SGD), facts.json
  check(folder) writes for each model saved by the test, saved*/: weights.safetensors (all its tensors, as transformers loads
                them), logits.safetensors
"""
import numpy
import torch
import transformers
from oracle import padding, save_step, weights_of
from safetensors.torch import save_file

COMMON = dict(vocab_size=53, use_cache=False, initializer_range=0.3, bos_token_id=5, eos_token_id=6)
CASES = {
    "tied": dict(hidden_size=24, num_hidden_layers=3, state_size=16, tie_word_embeddings=True),
    "untied": dict(hidden_size=20, num_hidden_layers=2, state_size=5, conv_kernel=3, expand=3, time_step_rank=7,
                   layer_norm_epsilon=1e-3, tie_word_embeddings=False),
}
PADDED = {"untied"}
LR = 0.5
SEQUENCE = 39  # not a multiple of a chunk of the scan


def make(folder):
    for seed, case in enumerate(CASES):
        torch.manual_seed(seed)
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**COMMON, **CASES[case])).float().train()
        with torch.no_grad():  # otherwise all channels are equal, and a test could not see how they are read
            for name, weight in model.named_parameters():
                if "norm" in name or name.endswith(".D"):
                    weight.uniform_(0.5, 1.5)
                elif name.endswith("A_log"):
                    weight.add_(torch.randn_like(weight) * 0.3)
                elif name.endswith("dt_proj.bias"):
                    weight.uniform_(-2, 1)
                elif name.endswith("conv1d.bias"):
                    weight.uniform_(-0.5, 0.5)
        to = folder / case
        model.save_pretrained(to / "model")
        ids = torch.randint(0, COMMON["vocab_size"], (4, SEQUENCE))
        labels = torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
        mask = padding(ids, right=30, both=37) if case in PADDED else torch.ones_like(ids)
        labels[mask == 0] = -100
        (to / "data").mkdir()
        if case in PADDED:
            numpy.save(to / "data" / "attention_mask.npy", mask.numpy())
        numpy.save(to / "data" / "input_ids.npy", ids.numpy())
        numpy.save(to / "data" / "labels.npy", labels.numpy())
        out = model(input_ids=ids, labels=labels, attention_mask=mask)
        save_file({"logits": out.logits.detach().contiguous()}, to / "logits.safetensors")
        save_step(model, out.loss, LR, to, {})


def check(folder):
    for saved in sorted(folder.glob("*/saved*")):
        model = transformers.AutoModelForCausalLM.from_pretrained(saved).eval()
        assert type(model).__name__ == "MambaForCausalLM"
        save_file(weights_of(model), saved / "weights.safetensors")
        data = {file.stem: torch.from_numpy(numpy.load(file)) for file in (saved.parent / "data").glob("*.npy")}
        with torch.no_grad():
            save_file({"logits": model.float()(**data).logits.contiguous()}, saved / "logits.safetensors")
