"""GPT-2 of transformers, whole for twobp and as layers for pytorch_pipeline.py. Without dropout, and with a head of its own."""
import torch
import torch.nn as nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from work import Unit
from work import not_tied as tied, random_tokens as batch, tokens_of_sample as items  # noqa: F401

KEYS = {"dim": None, "layers": None, "heads": None, "vocab": None}
VARIANTS = ("plain",)
CUTS = ("blocks",)


def config_of(work):
    sizes = work.model
    config = GPT2Config(vocab_size=sizes.vocab, n_positions=work.sequence, n_embd=sizes.dim, n_layer=sizes.layers, n_head=sizes.heads, attn_pdrop=0.0,
                        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, use_cache=False)
    config._attn_implementation = "sdpa"
    return config


def whole(work):
    return GPT2LMHeadModel(config_of(work))


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.n_positions, config.n_embd)

    def forward(self, ids):
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.block = GPT2Block(config, layer_idx=0)

    def forward(self, x):
        y = self.block(x)
        return y[0] if isinstance(y, tuple) else y


def units(work):
    config = config_of(work)
    return [Unit("embedding", lambda: Embedding(config)), *[Unit("block", lambda: Block(config))] * config.n_layer,
            Unit("head", lambda: nn.Sequential(nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon),
                                               nn.Linear(config.n_embd, config.vocab_size, bias=False)))]


def name_in_whole(unit, name, units):
    """The name that transformers gives to a parameter of a unit."""
    if unit == 0:
        return f"transformer.{name}"
    if unit == units - 1:
        return {"0.weight": "transformer.ln_f.weight", "0.bias": "transformer.ln_f.bias", "1.weight": "lm_head.weight"}[name]
    return f"transformer.h.{unit - 1}.{name.removeprefix('block.')}"
