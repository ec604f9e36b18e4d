"""Qwen3 of transformers, whole for twobp and as layers for pytorch_pipeline.py."""
import torch
import torch.nn as nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from work import Unit
from work import not_tied as tied, random_tokens as batch, tokens_of_sample as items  # noqa: F401

KEYS = {"dim": None, "layers": None, "heads": None, "hidden": None, "vocab": None}
VARIANTS = ("plain",)
CUTS = ("blocks",)


def config_of(work):
    sizes = work.model
    config = Qwen3Config(vocab_size=sizes.vocab, hidden_size=sizes.dim, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
                         num_key_value_heads=sizes.heads, head_dim=sizes.dim // sizes.heads, intermediate_size=sizes.hidden,
                         max_position_embeddings=work.sequence, bos_token_id=0, eos_token_id=0, use_cache=False)
    config._attn_implementation = "sdpa"
    return config


def whole(work):
    return Qwen3ForCausalLM(config_of(work))


class Block(nn.Module):
    """The rotary tables are computed once, not in every micro-batch."""

    def __init__(self, config):
        super().__init__()
        self.block = Qwen3DecoderLayer(config, layer_idx=0)
        tables = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(config.max_position_embeddings)[None])
        self.register_buffer("cos", tables[0], persistent=False)
        self.register_buffer("sin", tables[1], persistent=False)

    def forward(self, x):
        y = self.block(x, position_embeddings=(self.cos, self.sin))
        return y[0] if isinstance(y, tuple) else y


def units(work):
    config = config_of(work)
    return [Unit("embedding", lambda: nn.Embedding(config.vocab_size, config.hidden_size)),
            *[Unit("block", lambda: Block(config))] * config.num_hidden_layers,
            Unit("head", lambda: nn.Sequential(Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
                                               nn.Linear(config.hidden_size, config.vocab_size, bias=False)))]


def name_in_whole(unit, name, units):
    """The name that transformers gives to a parameter of a unit."""
    if unit == 0:
        return f"model.embed_tokens.{name}"
    if unit == units - 1:
        return {"0.weight": "model.norm.weight", "1.weight": "lm_head.weight"}[name]
    return f"model.layers.{unit - 1}.{name.removeprefix('block.')}"
