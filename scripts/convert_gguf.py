#!/usr/bin/env python3
"""Converts a GGUF file of a LLaMa model to a Hugging Face directory: config.json, model.safetensors, tokenizer.json.

    python scripts/convert_gguf.py MODEL.gguf FOLDER

Quantised weights are written as float32 numbers. The script needs the packages gguf, numpy and safetensors. The sources
for the format are docs/gguf.md of ggml and the readers in these packages.
"""
import argparse
import json
import pathlib
import sys

try:
    import gguf
    import numpy
    from safetensors.numpy import save_file
except ImportError as error:
    sys.exit(f"convert_gguf: {error}: pip install gguf==0.19.0 safetensors numpy")

CONTROL = 3  # the token type of names that are not text

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def hugging_face_name(name):
    parts = name.split(".")  # for example blk.3.attn_q.weight or output_norm.weight
    if parts[-1] != "weight" or parts[-2] not in NAMES:
        raise SystemExit(f"convert_gguf: tensor {name} does not belong to a LLaMa model")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{NAMES[parts[-2]]}.weight"


def halves_apart(weight, heads):
    """In GGUF, the two numbers that a rotation mixes are adjacent. In Hugging Face, they are half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer_json(value):
    if value("tokenizer.ggml.model") != "gpt2":
        raise SystemExit("convert_gguf: only byte-level BPE tokenizers (gpt2) are supported, but this one is "
                         f"{value('tokenizer.ggml.model')}")
    tokens = value("tokenizer.ggml.tokens")
    types = value("tokenizer.ggml.token_type")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = [byte_level]
    if value("tokenizer.ggml.pre") in ("smollm", "starcoder", "refact", "command-r"):
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, token in enumerate(tokens) if types[i] == CONTROL]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {token: i for i, token in enumerate(tokens)},
                      "merges": value("tokenizer.ggml.merges")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.gguf)

    def value(name, default=None):
        field = reader.get_field(name)
        if field is None:
            return default
        return field.contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise SystemExit(f"convert_gguf: only LLaMa models are supported, but this one is {architecture}")
    heads = value("llama.attention.head_count")
    kv_heads = value("llama.attention.head_count_kv", heads)
    dim = value("llama.embedding_length")

    weights = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise SystemExit("convert_gguf: the model has rope factors (rope_freqs.weight), which are not supported")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        weight = weight.reshape([int(n) for n in reversed(tensor.shape)])
        name = hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = halves_apart(weight, heads if "q_proj" in name else kv_heads)
        weights[name] = numpy.ascontiguousarray(weight)
    vocab = weights["model.embed_tokens.weight"].shape[0]
    eos = value("tokenizer.ggml.eos_token_id", 0)
    eot = value("tokenizer.ggml.eot_token_id", eos)  # ends a turn of a chat; generation stops at both
    tokens = value("tokenizer.ggml.tokens")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": dim,
              "num_hidden_layers": value("llama.block_count"), "num_attention_heads": heads,
              "num_key_value_heads": kv_heads, "head_dim": value("llama.attention.key_length", dim // heads),
              "intermediate_size": value("llama.feed_forward_length"), "vocab_size": vocab,
              "rms_norm_eps": round(float(value("llama.attention.layer_norm_rms_epsilon")), 12),
              "rope_theta": float(value("llama.rope.freq_base", 10000.0)),
              "max_position_embeddings": value("llama.context_length"), "hidden_act": "silu",
              "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": "lm_head.weight" not in weights,
              "bos_token_id": value("tokenizer.ggml.bos_token_id", eos), "eos_token_id": eos if eot == eos else [eos, eot],
              "torch_dtype": "float32"}
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config.json", config), ("tokenizer.json", tokenizer_json(value)),
                          ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast",
                                                     "eos_token": tokens[eos]})):
        (args.folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{args.folder}: {sum(w.size for w in weights.values()) / 1e6:.1f}M parameters, {vocab} tokens")


if __name__ == "__main__":
    main()
