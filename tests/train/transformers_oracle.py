"""Makes small random LLaMas with `transformers` and computes their results, for transformers_test.cpp.

  make(folder)  writes for each case: model/ (saved by transformers), data/ (input_ids.npy, labels.npy, perhaps attention_mask.npy),
                before.safetensors (all weights), logits.safetensors, after.safetensors (the weights after one step of SGD), facts.json
  check(folder) writes for each case and each model saved by the test, saved*/: facts.json beside it (as transformers loads
                it), weights.safetensors (all its tensors)
"""
import json

import numpy
import torch
import transformers
from oracle import padding, save_step, weights_of
from safetensors.torch import save_file

COMMON = dict(hidden_size=24, num_hidden_layers=3, intermediate_size=40, vocab_size=53, max_position_embeddings=64,
              bos_token_id=5, eos_token_id=6, use_cache=False, initializer_range=0.3)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
CASES = {
    # head_dim differs from hidden_size / heads. All three parts of llama3's frequencies are used. The model has several files.
    "grouped": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5,
                    tie_word_embeddings=False, rope_parameters=LLAMA3),
    "tied": dict(num_attention_heads=3, num_key_value_heads=1, head_dim=6, rms_norm_eps=1e-6, tie_word_embeddings=True,
                 rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}, pad_token_id=7),
    "plain": dict(num_attention_heads=3, num_key_value_heads=3, rms_norm_eps=1e-5, tie_word_embeddings=False,
                  pad_token_id=7),
}
SHARDED = {"grouped"}
PADDED = {"plain"}
LR = 0.5


def config_of(case):
    settings = dict(COMMON, **CASES[case])
    if int(transformers.__version__.split(".")[0]) < 5 and "rope_parameters" in settings:
        scaling = dict(settings.pop("rope_parameters"))
        settings["rope_theta"] = scaling.pop("rope_theta")
        settings["rope_scaling"] = scaling
    return transformers.LlamaConfig(**settings)


def facts_of(model):
    config = model.config
    return {"inv_freq": model.model.rotary_emb.inv_freq.tolist(), "dtype": str(model.dtype),
            "tied": model.lm_head.weight is model.model.embed_tokens.weight,
            "bos": config.bos_token_id, "positions": config.max_position_embeddings}


def make(folder):
    for seed, case in enumerate(CASES):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config_of(case)).float().train()
        with torch.no_grad():  # otherwise gains are ones, and a test could not see whether they are read
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
        to = folder / case
        model.save_pretrained(to / "model", **({"max_shard_size": "20KB"} if case in SHARDED else {}))
        ids = torch.randint(0, COMMON["vocab_size"], (4, 32))
        ids[0, 3:6] = 7  # other tokens attend to it although it is the padding token
        labels = torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
        mask = padding(ids, right=20, both=30) if case in PADDED else torch.ones_like(ids)
        labels[mask == 0] = -100
        (to / "data").mkdir()
        numpy.save(to / "data" / "input_ids.npy", ids.numpy())
        numpy.save(to / "data" / "labels.npy", labels.numpy())
        if case in PADDED:
            numpy.save(to / "data" / "attention_mask.npy", mask.numpy())
        out = model(input_ids=ids, labels=labels, attention_mask=mask)
        save_file({"logits": out.logits.detach().contiguous()}, to / "logits.safetensors")
        save_step(model, out.loss, LR, to, facts_of(model))


def check(folder):
    for saved in sorted(folder.glob("*/saved*")):
        model = transformers.AutoModelForCausalLM.from_pretrained(saved)
        save_file(weights_of(model), saved / "weights.safetensors")
        (saved / "facts.json").write_text(json.dumps(facts_of(model)))
