#!/usr/bin/env python3
"""Captures small random models of many classes and prints a table: the worst error of loss and gradients against
autograd in float32 and float64, layers, kinds, seconds, or the reason why a class is refused. With --train, each is
also trained by the C++ runtime, without dropout: the first loss and all gradients against autograd's, and whether the
weights after 5 steps of AdamW have the same bits on 1, 2 and 3 ranks under several schedules. With --shapes, the table
is about batches of other sizes in float64: the captures that they took, the worst error of all, and what was captured
on its own.

    PYTHONPATH=build/release/python benchmarks/captured_models.py [--train | --shapes] [CLASS ...]
"""

import argparse
import sys
import time
import warnings

import torch
import transformers
from torch import nn
from twobp.capture import CaptureError, capture

import twobp

# ruff: noqa: C408 (dict() reads better here)
V = 96
SMALL = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


# Batch size and length. The first batch is captured as it is; the second one asks for programs for all.
SHAPES = ((3, 13), (2, 7), (5, 67), (9, 31), (1, 65), (7, 5), (6, 33), (4, 49), (8, 17))


def text(samples=2, length=16):
    ids = torch.randint(3, V, (samples, length))
    return {"input_ids": ids, "labels": torch.randint(3, V, (samples, length))}


def image(samples=2, _=None, size=32):
    return {"pixel_values": torch.randn(samples, 3, size, size), "labels": torch.randint(0, 2, (samples,))}


def hugging_face(kind, auto="AutoModelForCausalLM", batch=text, only=None, **settings):
    def make(*sizes):
        chosen = {**(SMALL if only is None else {k: v for k, v in SMALL.items() if k in only}), **settings}
        config = transformers.AutoConfig.for_model(kind, **chosen)
        return getattr(transformers, auto).from_config(config), batch(*sizes), None

    return make


def seq2seq(samples=2, length=16):
    return {**text(samples, length), "decoder_input_ids": torch.randint(3, V, (samples, length))}


def speech(samples=2, length=8):
    return {"input_features": torch.randn(samples, 80, 100), "labels": torch.randint(3, V, (samples, length))}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 32)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(32, V)

    def forward(self, input_ids):
        return self.head(self.encoder(self.embedding(input_ids)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(V, 32), kind(32, 32, 2, batch_first=True), nn.Linear(32, V)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embedding(input_ids))[0])


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def plain(make):
    return lambda *sizes: (make(), text(*sizes), cross_entropy)


MODELS = {
    "GPT2": hugging_face("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=80),
    "Qwen3": hugging_face("qwen3", head_dim=8),
    "Qwen2": hugging_face("qwen2"),
    "LLaMa": hugging_face("llama"),
    "Mistral": hugging_face("mistral"),
    "Gemma2": hugging_face("gemma2", head_dim=8),
    "Gemma3": hugging_face("gemma3_text", head_dim=8),
    "Phi3": hugging_face("phi3"),
    "Olmo2": hugging_face("olmo2"),
    "GPTNeoX": hugging_face("gpt_neox"),
    "OPT": hugging_face("opt", ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=80),
    "Falcon": hugging_face("falcon"),
    "Granite": hugging_face("granite"),
    "Cohere": hugging_face("cohere"),
    "StableLm": hugging_face("stablelm"),
    "SmolLM3": hugging_face("smollm3"),
    "Starcoder2": hugging_face("starcoder2"),
    "GPTJ": hugging_face("gptj", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "Bloom": hugging_face("bloom", n_layer=2, n_head=4),
    "GLM": hugging_face("glm", head_dim=8),
    "BERT": hugging_face("bert", "AutoModelForMaskedLM"),
    "RoBERTa": hugging_face("roberta", "AutoModelForMaskedLM"),
    "DistilBERT": hugging_face("distilbert", "AutoModelForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "ELECTRA": hugging_face("electra", "AutoModelForMaskedLM", embedding_size=32),
    "ALBERT": hugging_face("albert", "AutoModelForMaskedLM", embedding_size=32),
    "DeBERTa": hugging_face("deberta-v2", "AutoModelForMaskedLM"),
    "ModernBERT": hugging_face("modernbert", "AutoModelForMaskedLM"),
    "BART": hugging_face(
        "bart",
        "AutoModelForSeq2SeqLM",
        seq2seq,
        only={"vocab_size", "pad_token_id", "use_cache"},
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=80,
    ),
    "T5": hugging_face(
        "t5",
        "AutoModelForSeq2SeqLM",
        seq2seq,
        only={"vocab_size", "use_cache"},
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "Whisper": hugging_face(
        "whisper",
        "AutoModelForSpeechSeq2Seq",
        speech,
        only={"vocab_size", "use_cache"},
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "ViT": hugging_face(
        "vit",
        "AutoModelForImageClassification",
        image,
        only={"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"},
        image_size=32,
        patch_size=8,
    ),
    "ConvNeXt": hugging_face(
        "convnext",
        "AutoModelForImageClassification",
        image,
        only=(),
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_stages=2,
    ),
    "ResNet": hugging_face(
        "resnet",
        "AutoModelForImageClassification",
        image,
        only=(),
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
    ),
    "Swin": hugging_face(
        "swin",
        "AutoModelForImageClassification",
        lambda *sizes: image(*sizes, size=64),
        only=(),
        image_size=64,
        embed_dim=32,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "Mamba": hugging_face("mamba", state_size=8),
    "Mixtral": hugging_face("mixtral", num_local_experts=4),
    "Qwen3MoE": hugging_face("qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "GptOss": hugging_face("gpt_oss", head_dim=8, num_local_experts=4),
    "DeepSeekV3": hugging_face(
        "deepseek_v3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "RWKV": hugging_face("rwkv", attention_hidden_size=32, rescale_every=0),
    "Mamba2": hugging_face("mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "TransformerEncoder": plain(Encoder),
    "LSTM": plain(lambda: Recurrent(nn.LSTM)),
    "GRU": plain(lambda: Recurrent(nn.GRU)),
}


def attempt(make, dtype):
    torch.manual_seed(0)
    module, batch, loss_fn = make()
    batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    start = time.time()
    captured = capture(module.train().to(dtype), batch, loss_fn=loss_fn)
    return captured, time.time() - start


def in_float64(batch):
    return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}


def computes(module, batch, loss_fn) -> bool:
    """Whether the module itself can compute in its dtype. Products of torch for experts cannot in float64."""
    try:
        output = module(**{n: t for n, t in batch.items() if loss_fn is None or n != "labels"})
        (output.loss if loss_fn is None else loss_fn(output, batch)).backward()
    except RuntimeError:
        return False
    return True


def double(make) -> str:
    """The worst error in float64; "eager" if the module itself cannot compute in it."""
    module, batch, loss_fn = make()
    if not computes(module.train().double(), in_float64(batch), loss_fn):
        return f"{'no eager':>7}"
    run = attempt(make, torch.float64)[0].dry_runs[0]
    return f"{max(run.loss, run.gradients):.1e}"


SCHEDULES = (
    {"ranks": 1, "schedule": "1f1b"},
    {"ranks": 2, "schedule": "1f1b", "p2": "fill"},
    {"ranks": 3, "schedule": "gpipe", "p2_batching": "concat"},
    {"ranks": 2, "schedule": "zb-v"},
)


def without_dropout(module):
    """The runtime draws its masks in another way than autograd."""
    for part in module.modules():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def trained(make) -> str:
    """The worst relative error of the runtime's first loss and gradients, and whether all schedules have the same
    bits."""
    torch.manual_seed(0)
    module, batch, loss_fn = make()
    module = without_dropout(module.train())
    whole = {name: torch.cat([tensor, tensor.flip(0)]) for name, tensor in batch.items()}

    def trainer(optimizer, **settings):
        return twobp.Trainer(
            module, batch, loss_fn=loss_fn, micro_batches=2, threads=1, optimizer=optimizer, **settings
        )

    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    one = trainer(twobp.SGD(lr=1.0), ranks=1)
    result = one.step(whole)
    after = one.state_dict()
    losses = []
    for part in (batch, {name: tensor.flip(0) for name, tensor in batch.items()}):
        output = module(**{n: t for n, t in part.items() if loss_fn is None or n != "labels"})
        losses.append((output.loss if loss_fn is None else loss_fn(output, part)) / 2)
        losses[-1].backward()
    expected = sum(losses).item()
    largest = max(p.grad.norm().item() for p in module.parameters() if p.grad is not None)
    # A difference of weights has the weight's rounding.
    worst = max(
        (
            (before[name] - after[name] - p.grad).norm() / (p.grad.norm() + before[name].norm() * 1e-2 + largest * 1e-3)
        ).item()
        for name, p in module.named_parameters()
        if p.grad is not None
    )
    module.load_state_dict(before)
    states, all_losses = [], []
    for settings in SCHEDULES:
        if len(one.layers) < settings["ranks"] * (2 if settings["schedule"] == "zb-v" else 1):
            continue  # too few layers for so many stages
        run = trainer(twobp.AdamW(lr=1e-3), **settings)
        all_losses.append([run.step(whole).loss for _ in range(5)])
        states.append(run.state_dict())
    same = all(other == all_losses[0] for other in all_losses) and all(
        torch.equal(states[0][name], other[name]) for other in states for name in other
    )
    return f"{max(abs(result.loss - expected) / abs(expected), worst):.1e} | {'equal' if same else 'DIFFER':>6}"


def compute_in_float64():
    """Models of transformers compute norms, rotary tables and losses in float32 whatever their dtype. From here on,
    they compute all in float64, so that errors are rounding."""
    to = torch.Tensor.to

    def wide(one):
        return torch.float64 if one is torch.float32 else one

    def to_wide(self, *a, **k):
        if sys._getframe(1).f_globals["__name__"].startswith("torch."):  # how torch traces its own operators
            return to(self, *a, **k)
        return to(self, *map(wide, a), **{n: wide(v) for n, v in k.items()})

    torch.Tensor.float = lambda self: self.double()
    torch.Tensor.to = to_wide
    softmax = nn.functional.softmax
    nn.functional.softmax = lambda *a, dtype=None, **k: softmax(*a, dtype=wide(dtype), **k)


def over_shapes(make) -> str:
    """The captures for all SHAPES, the worst error of loss and gradients, and the reasons for captures of their own."""
    torch.manual_seed(0)
    module, batch, loss_fn = make()
    if not computes(module.train().double(), in_float64(batch), loss_fn):
        return "no eager |         |"
    module.zero_grad()
    captured, worst, reasons = None, 0.0, []
    for sizes in SHAPES:
        fields = in_float64(make(*sizes)[1])
        if captured is None:
            captured = capture(module, fields, loss_fn=loss_fn, slices=False, cache=False)
        else:
            captured.add_shape(fields)
            if captured.why:
                reasons.append(f"{sizes}: {captured.why}")
        with captured.leaving_as_before(captured.variant.walk):
            run = captured._dry_run(fields, None, captured.shape_number(fields))
        worst = max(worst, run.loss, run.gradients, run.buffers, run.evaluation)
    return f"{captured.variant.captures:8} | {worst:.1e} | {'; '.join(reasons)[:300]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", metavar="CLASS", help=", ".join(MODELS))
    parser.add_argument("--train", action="store_true", help="train each model by the runtime too")
    parser.add_argument("--shapes", action="store_true", help="batches of other sizes")
    options = parser.parse_args()
    chosen = options.classes or list(MODELS)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if options.shapes:
        compute_in_float64()
        print(f"| {'class':<20} | captures | error   | captured on their own\n|{'-' * 22}|----------|---------|---")
        for name in chosen:
            try:
                print(f"| {name:<20} | {over_shapes(MODELS[name])}", flush=True)
            except Exception as error:  # a table of all classes, whatever happens to one
                print(
                    f"| {name:<20} | refused: {type(error).__name__}: {' '.join(str(error).split())[:260]}", flush=True
                )
        return
    print(f"| {'class':<20} | float32 | float64 | layers | kinds | seconds |" + options.train * " runtime | bits   |")
    print(f"|{'-' * 22}|---------|---------|--------|-------|---------|" + options.train * "---------|--------|")
    refused = 0
    for name in chosen:
        try:
            captured, seconds = attempt(MODELS[name], torch.float32)
            single = captured.dry_runs[0]
            print(
                f"| {name:<20} | {max(single.loss, single.gradients):.1e} | {double(MODELS[name])} | "
                f"{len(captured.graph['layers']):6} | "
                f"{len(captured.graph['kinds']):5} | {seconds:7.1f} |"
                + (f" {trained(MODELS[name])} |" if options.train else ""),
                flush=True,
            )
        except Exception as error:  # a table of all classes, whatever happens to one
            refused += 1
            kind = "" if isinstance(error, CaptureError) else f"{type(error).__name__}: "
            print(f"| {name:<20} | refused: {kind}{' '.join(str(error).split())[:260]}", flush=True)
    print(f"{len(chosen) - refused} of {len(chosen)} classes captured")


if __name__ == "__main__":
    main()
