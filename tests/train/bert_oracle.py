"""Makes small random BERTs with `transformers` and computes their results, for bert_transformers_test.cpp.

  make(folder)  writes for each case: model/ (saved by transformers), data/ (.npy fields), before.safetensors (all
                weights), logits.safetensors, after.safetensors (the weights after one step of SGD), facts.json, and
                encoder/ (the encoder alone, as BertModel saves it)
  check(folder) writes for each model saved by the test, */saved*/: weights.safetensors (all its tensors, as transformers
                loads it), loading.json (the keys that it finds missing or unexpected)
"""
import json

import numpy
import torch
import transformers
from oracle import save_step, weights_of
from safetensors.torch import load_file, save_file

COMMON = dict(hidden_size=24, num_hidden_layers=3, intermediate_size=40, vocab_size=53, max_position_embeddings=40,
              initializer_range=0.3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CASES = {
    "tied": dict(num_attention_heads=4, hidden_act="gelu", layer_norm_eps=1e-12, tie_word_embeddings=True),
    "untied": dict(num_attention_heads=3, hidden_act="gelu_new", layer_norm_eps=1e-3, tie_word_embeddings=False,
                   type_vocab_size=3),
}
LR = 0.5
PAD = 0  # the default of transformers; its embedding gets no gradient, even if a token attends to it


def fields_of(config):
    ids = torch.randint(1, COMMON["vocab_size"], (4, 32))
    mask = torch.ones_like(ids)
    for row, length in enumerate((32, 20, 1, 31)):
        mask[row, length:] = 0
    ids[mask == 0] = PAD
    ids[0, 3:6] = PAD
    labels = torch.where(torch.rand(ids.shape) < 0.3, torch.randint(0, COMMON["vocab_size"], ids.shape), -100)
    labels[0, 0] = 7
    labels[mask == 0] = -100
    types = torch.randint(0, config.type_vocab_size, ids.shape)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}


def make(folder):
    for seed, case in enumerate(CASES):
        torch.manual_seed(seed)
        config = transformers.BertConfig(**COMMON, **CASES[case])
        model = transformers.BertForMaskedLM(config).float().train()
        with torch.no_grad():  # otherwise gains are ones and biases zeros, and a test could not see whether they are read
            for name, weight in model.named_parameters():
                if "LayerNorm.weight" in name:
                    weight.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    weight.normal_(0, 0.2)
        to = folder / case
        model.save_pretrained(to / "model")
        encoder = transformers.BertModel(config).float()
        encoder.load_state_dict(model.bert.state_dict(), strict=False)
        encoder.save_pretrained(to / "encoder")
        if case == "untied":  # these are the names of the first release
            file = to / "encoder" / "model.safetensors"
            tensors = {"bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma")
                       .replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
        fields = fields_of(config)
        (to / "data").mkdir()
        for name, field in fields.items():
            numpy.save(to / "data" / f"{name}.npy", field.numpy())
        out = model(**fields)
        save_file({"logits": out.logits.detach().contiguous()}, to / "logits.safetensors")
        save_step(model, out.loss, LR, to, {})


def check(folder):
    for saved in sorted(folder.glob("*/saved*")):
        model, loading = transformers.BertForMaskedLM.from_pretrained(saved, output_loading_info=True)
        save_file(weights_of(model), saved / "weights.safetensors")
        problems = sorted(str(name) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
                          for name in loading[key])
        facts = {"problems": problems, "activation": model.config.hidden_act,
                 "tied": model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight}
        (saved / "facts.json").write_text(json.dumps(facts))
