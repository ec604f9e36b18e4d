#!/usr/bin/env python3
"""PEFT loads an adapter that is saved with save.lora=adapter. Its logits are those of the model that the same training saves with
save.lora=merged. An adapter of PEFT for experts (target_parameters) is, after a step of SGD here, what it is after that step there. Usage: `peft_test.py PROGRAM`. Exit code 77: a Python package is missing."""
import argparse
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

for package in ("torch", "transformers", "peft"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {sys.executable} has no {package}")
        sys.exit(77)
import numpy
import peft
import torch
import transformers
from safetensors.torch import load_file

VOCAB, SEQUENCE, SAMPLES = 50, 16, 8
SIZES = dict(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
             max_position_embeddings=SEQUENCE, initializer_range=0.2)
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(num_key_value_heads=1, **SIZES)),
    "bert": (transformers.BertForMaskedLM,
             transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES)),
    # The weights are stored as (in, out), and rows are interleaved.
    "gpt2": (transformers.GPT2LMHeadModel,
             transformers.GPT2Config(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=2, n_positions=SEQUENCE, initializer_range=0.2,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)),
    "gpt_neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5, bos_token_id=0, eos_token_id=0)),
}
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "bert": ["key", "value", "dense"], "gpt2": ["c_attn", "c_proj"],
           "gpt_neox": ["query_key_value", "dense_h_to_4h"]}
MIXTURE = dict(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=20,
               max_position_embeddings=SEQUENCE, initializer_range=0.2, num_experts_per_tok=2, experts_implementation="eager", pad_token_id=None)
MIXTURES = {
    "qwen3_moe": transformers.Qwen3MoeConfig(num_experts=5, moe_intermediate_size=12, head_dim=12, **MIXTURE),
    "mixtral": transformers.MixtralConfig(num_local_experts=4, **MIXTURE),
    "granitemoe": transformers.GraniteMoeConfig(num_local_experts=4, **MIXTURE),
    # Gate and up take turns, and weights are (experts, in, out).
    "gpt_oss": transformers.GptOssConfig(num_local_experts=4, head_dim=12, attn_implementation="eager", **MIXTURE),
    "deepseek_v3": transformers.DeepseekV3Config(n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=6,
                                                 qk_rope_head_dim=4, v_head_dim=8, moe_intermediate_size=12, first_k_dense_replace=1, **MIXTURE),
}
PARAMETERS = (["experts.gate_up_proj", "experts.down_proj"], ["experts.down_proj"])
TOLERANCE = 1e-5  # absolute, for logits of about 1 that are computed in two ways


def train(program, folder, lora, targets):
    to = folder / lora
    settings = [f"model.from={folder}/model", "model.lora=3", "model.lora_alpha=12", f"save.lora={lora}", f"save.model={to}",
                f"data.arrays={folder}/data", f"data.sequence={SEQUENCE}", "data.held_out=0", "optimizer.lr=0.05",
                "pipeline.micro_batches=2", "pipeline.micro_batch_size=2", "pipeline.ranks=2", "train.steps=3",
                "model.lora_targets=" + ",".join(targets)]
    subprocess.run([program, "train", "--set", *settings], check=True, stdout=subprocess.DEVNULL)
    return to


def check_experts(program, kind, parameters):
    """Returns a sentence that describes the error, or None."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (SAMPLES, SEQUENCE))
    model = transformers.AutoModelForCausalLM.from_config(MIXTURES[kind], dtype=torch.float32, experts_implementation="eager")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model.save_pretrained(folder / "model")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["o_proj"], target_parameters=parameters))
        own = [one for one in adapted.parameters() if one.requires_grad]
        with torch.no_grad():
            for one in own:
                one.normal_(0, 0.2)
        adapted.save_pretrained(folder / "start")
        before = load_file(folder / "start/adapter_model.safetensors")
        (folder / "data").mkdir()
        for field in ("input_ids", "labels"):
            numpy.save(folder / f"data/{field}.npy", ids.numpy())
        settings = [f"model.from={folder}/model", "model.lora=3", "model.lora_alpha=6", f"model.adapter={folder}/start", f"data.arrays={folder}/data",
                    "model.lora_targets=" + ",".join(["o_proj", *parameters]), "save.lora=adapter", f"save.model={folder}/after", "data.held_out=0",
                    f"data.sequence={SEQUENCE}", "optimizer.type=sgd", "optimizer.lr=0.5", "train.clip_norm=0", "pipeline.micro_batches=2",
                    "optimizer.schedule=constant", "optimizer.weight_decay=0", f"pipeline.micro_batch_size={SAMPLES // 2}", "pipeline.ranks=2", "train.steps=1"]
        subprocess.run([program, "train", "--set", *settings], check=True, stdout=subprocess.DEVNULL)
        actual = load_file(folder / "after/adapter_model.safetensors")
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        torch.optim.SGD(own, lr=0.5).step()
        adapted.save_pretrained(folder / "expected")
        expected = load_file(folder / "expected/adapter_model.safetensors")
        again = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder / "model", experts_implementation="eager"), folder / "after")
        error = (logits(again, ids) - logits(adapted, ids)).abs().max().item()
    if set(actual) != set(expected):
        return f"the adapter has {sorted(actual)}, not {sorted(expected)}"
    changes = {name: (expected[name] - before[name]).abs().max().item() for name in expected}
    if min(changes.values()) < 1e-4:
        return f"next to nothing changes in {min(changes, key=changes.get)}"
    wrong = [name for name, one in expected.items() if (actual[name] - one).abs().max() > 1e-3 * changes[name] + 1e-6]
    if wrong:
        return f"another step of {wrong[0]}"
    return None if error <= 1e-4 else f"logits differ by {error:.2g}"


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def check(program, kind, targets):
    """Returns a sentence that describes the error, or None."""
    auto, config = MODELS[kind]
    source = numpy.random.default_rng(1)
    ids = source.integers(0, VOCAB, (SAMPLES, SEQUENCE), dtype=numpy.int64)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        torch.manual_seed(1)
        auto(config).save_pretrained(folder / "model")
        (folder / "data").mkdir()
        numpy.save(folder / "data/input_ids.npy", ids)
        numpy.save(folder / "data/labels.npy", ids)
        merged = auto.from_pretrained(train(program, folder, "merged", targets))
        expected = logits(merged, torch.from_numpy(ids))
        before = logits(auto.from_pretrained(folder / "model"), torch.from_numpy(ids))
        adapter = train(program, folder, "adapter", targets)
        actual = logits(peft.PeftModel.from_pretrained(auto.from_pretrained(folder / "model"), adapter), torch.from_numpy(ids))
    if (expected - before).abs().max() < 0.1:
        return "the adapter changes next to nothing"
    error = (actual - expected).abs().max().item() / expected.abs().max().item()
    return None if error <= TOLERANCE else f"logits differ by {error:.2g} of the largest"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    program = parser.parse_args().program
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    wrong = 0
    for kind, targets in TARGETS.items():
        found = check(program, kind, targets)
        wrong += found is not None
        print(f"{kind}, {targets}: {found or 'as merged'}")
    for kind in MIXTURES:
        for parameters in PARAMETERS:
            found = check_experts(program, kind, parameters)
            wrong += found is not None
            print(f"{kind}, {parameters}: {found or 'as in PEFT'}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
