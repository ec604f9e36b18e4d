"""Makes a small random decoder of each family with `transformers` and computes its results, for decoder_transformers_test.cpp.

  make(folder)  writes for each case: model/, data/ (input_ids.npy, labels.npy, perhaps attention_mask.npy), before.safetensors (all
                weights), logits.safetensors, after.safetensors (the weights after one step of SGD), facts.json (with the norm of the
                gradients);
                for PACKED also packed/: documents.safetensors (input_ids, labels of the previous position, document_starts),
                gradients.safetensors and facts.json (loss, grad_norm)
  check(folder) writes for each case and each model saved by the test, saved*/: weights.safetensors (all its tensors as transformers
                loads them), logits.safetensors
"""
import contextlib
import json

import numpy
import torch
import transformers
from oracle import padding, save_step, weights_of
from safetensors.torch import save_file

LENGTH = 32
COMMON = dict(hidden_size=24, num_hidden_layers=3, intermediate_size=40, vocab_size=53, max_position_embeddings=64, bos_token_id=None,
              eos_token_id=None, pad_token_id=7, initializer_range=0.3)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = dict(COMMON, num_attention_heads=3, num_key_value_heads=1, head_dim=10, query_pre_attn_scalar=24)
CASES = {
    "llama": transformers.LlamaConfig(**COMMON, **HEADS, attention_bias=True, mlp_bias=True, rope_parameters=YARN),
    "llama-dynamic": transformers.LlamaConfig(**dict(COMMON, max_position_embeddings=16), **HEADS,
                                              rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 3.0}),
    "mistral": transformers.MistralConfig(**COMMON, **HEADS, head_dim=10, sliding_window=7),
    "qwen2": transformers.Qwen2Config(**COMMON, **HEADS, use_sliding_window=True, sliding_window=5, max_window_layers=1,
                                      tie_word_embeddings=True, rope_parameters={**YARN, "attention_factor": 1.25}),
    "qwen3": transformers.Qwen3Config(**COMMON, **HEADS, head_dim=10),
    "phi3": transformers.Phi3Config(**COMMON, num_attention_heads=3, num_key_value_heads=1, sliding_window=11, resid_pdrop=0.0,
                                    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}),
    "phi3-longrope": transformers.Phi3Config(**COMMON, **HEADS, original_max_position_embeddings=LENGTH + 4, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 4.0, 9.0]}),
    "olmo2": transformers.Olmo2Config(**COMMON, **HEADS, attention_bias=True),
    "gemma": transformers.GemmaConfig(**COMMON, num_attention_heads=3, num_key_value_heads=1, head_dim=10, attention_bias=True,
                                      hidden_act="gelu"),  # which means tanh's
    "gemma2": transformers.Gemma2Config(**GEMMA, attn_implementation="eager", sliding_window=6, final_logit_softcapping=5.0, attn_logit_softcapping=2.0),
    "gemma3_text": transformers.Gemma3TextConfig(**GEMMA, sliding_window=6, sliding_window_pattern=2, rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}),
    "smollm3": transformers.SmolLM3Config(**COMMON, **HEADS, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=9,
                                          mlp_bias=True),
    "gpt2": transformers.GPT2Config(n_embd=27, n_layer=3, n_head=3, vocab_size=53, n_positions=50, resid_pdrop=0.0, embd_pdrop=0.0,
                                    attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, initializer_range=0.3),
    "gpt_neox": transformers.GPTNeoXConfig(**dict(COMMON, pad_token_id=None), num_attention_heads=3,
                                           rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}),
    "gpt_neox-serial": transformers.GPTNeoXConfig(**dict(COMMON, pad_token_id=None), num_attention_heads=2, use_parallel_residual=False,
                                                  attention_bias=False, hidden_act="gelu_new", rope_parameters={
                                                      "rope_type": "default", "partial_rotary_factor": 1.0}),
    "granite": transformers.GraniteConfig(**COMMON, **HEADS, embedding_multiplier=3.0, logits_scaling=1.7, residual_multiplier=0.6,
                                          attention_multiplier=0.3),
    "stablelm": transformers.StableLmConfig(**COMMON, num_attention_heads=2, num_key_value_heads=1, use_qkv_bias=True, rope_parameters={
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "starcoder2": transformers.Starcoder2Config(**COMMON, **HEADS, sliding_window=5),
}
PACKED = {"llama", "qwen3", "gpt2"}  # these have no window, because a mask from outside would replace it
LR = 0.05


def model_of(config):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():  # otherwise gains are ones and biases zeros, and a test could not see whether they are read
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def names_of(model):
    """Returns the names of this model's parameters in files, by their names in the module."""
    return {name: name.replace("lm_head", "embed_out") if model.config.model_type == "gpt_neox" else name for name, _ in model.named_parameters()}


def logits_of(model, ids, mask):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits.contiguous()


def padding_of(case, ids):
    """Returns a mask of padding. In Gemma 2, no position may see padding alone: its attention there, which no label reads, is not ours (docs/decoders.md)."""
    if case != "gemma2":
        return padding(ids, right=20, both=30)
    mask = torch.ones_like(ids)
    mask[0, 28:] = mask[2, 5:7] = 0
    return mask


@contextlib.contextmanager
def in_float64():
    """transformers computes norms and rotary embedding in float32 by name, whatever the model's type. Here the names mean float64."""
    usual = torch.float32
    torch.float = torch.float32 = torch.float64
    try:
        yield
    finally:
        torch.float = torch.float32 = usual


@in_float64()
def make_packed(model, to):
    """Packs documents of random lengths into two samples. A block-diagonal mask and their own positions keep them apart. The computation is
    in float64, so its rounding does not matter."""
    weights = model.state_dict()
    model = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).train()  # with the frequencies in float64
    model.load_state_dict(weights)
    ids = torch.randint(0, model.config.vocab_size, (2, LENGTH))
    starts = torch.zeros_like(ids)
    for row in starts:
        for begin in torch.randperm(LENGTH - 1)[:4] + 1:  # a document may have one token
            row[begin:] = torch.maximum(row[begin:], begin)
    places = torch.arange(LENGTH)
    labels = torch.where(starts == places, -100, ids)  # no target crosses into another document
    same = (starts[:, :, None] == starts[:, None, :]) & (places[:, None] >= places)
    mask = torch.zeros(same[:, None].shape, dtype=torch.float64).masked_fill(~same[:, None], torch.finfo(torch.float64).min)  # (B, 1, S, S)
    loss = model(input_ids=ids, labels=labels, attention_mask=mask, position_ids=places - starts).loss
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
    to.mkdir()
    ours = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    save_file({"input_ids": ids, "labels": ours.contiguous(), "document_starts": starts}, to / "documents.safetensors")
    save_file({name: gradient.float().contiguous() for name, gradient in gradients.items()}, to / "gradients.safetensors")
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    (to / "facts.json").write_text(json.dumps({"loss": loss.item(), "grad_norm": norm}))


def make(folder):
    for seed, (case, config) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        model = model_of(config)
        to = folder / case
        model.save_pretrained(to / "model")
        ids = torch.randint(0, config.vocab_size, (4, LENGTH))
        labels = torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
        mask = padding_of(case, ids)
        labels[mask == 0] = -100
        (to / "data").mkdir()
        numpy.save(to / "data/input_ids.npy", ids.numpy())
        numpy.save(to / "data/labels.npy", labels.numpy())
        numpy.save(to / "data/attention_mask.npy", mask.numpy())
        save_file({"logits": logits_of(model, ids, mask)}, to / "logits.safetensors")
        if case in PACKED:
            make_packed(model, to / "packed")
        loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
        save_step(model, loss, LR, to, {"names": names_of(model)})
        facts = json.loads((to / "facts.json").read_text())
        facts["grad_norm"] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        (to / "facts.json").write_text(json.dumps(facts))


def check(folder):
    for saved in sorted(folder.glob("*/saved*")):
        model = transformers.AutoModelForCausalLM.from_pretrained(saved, attn_implementation=CASES[saved.parent.name]._attn_implementation)
        save_file(weights_of(model), saved / "weights.safetensors")
        data = saved.parent / "data"
        ids, mask = (torch.from_numpy(numpy.load(data / f"{name}.npy")) for name in ("input_ids", "attention_mask"))
        save_file({"logits": logits_of(model, ids, mask)}, saved / "logits.safetensors")
