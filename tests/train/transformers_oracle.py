"""Makes small random models with `transformers` and computes their results, for transformers_test.cpp.

    transformers_oracle.py

Prints "ok", or "skip: ..." if a package is missing. Then each line of the input, "make FAMILY FOLDER" or "check FAMILY FOLDER", is a
call. The answer is "ok". If the call fails, the process ends.

  make   writes for each case of the family: model/ (saved by transformers), data/ (its fields), logits.safetensors, before.safetensors and
         after.safetensors (what training changes, before and after a step of SGD), facts.json. Of a mixture also exact/: gradients.safetensors
         and facts.json (loss) in float64. Of an encoder also encoder/ (without its
         head); for PACKED also packed/: documents.safetensors (input_ids, labels of the previous position, document_starts),
         gradients.safetensors and facts.json (loss, grad_norm)
  check  writes for each model saved by the test, saved*/: weights.safetensors (all its tensors, as transformers loads them),
         logits.safetensors, facts.json
"""
import contextlib
import importlib.util
import json
import pathlib
import sys

missing = [name for name in ("numpy", "torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
if missing:
    print(f"skip: {sys.executable} has no {', '.join(missing)}", flush=True)
    sys.exit()

import numpy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

LENGTH = 32
COMMON = dict(hidden_size=24, num_hidden_layers=3, intermediate_size=40, vocab_size=53, max_position_embeddings=64, bos_token_id=None,
              eos_token_id=None, pad_token_id=7, initializer_range=0.3)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = dict(COMMON, num_attention_heads=3, num_key_value_heads=1, head_dim=10, query_pre_attn_scalar=24)
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.3)
LATENT = dict(COMMON, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=6, v_head_dim=7,
              moe_intermediate_size=16)
DECODERS = {
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
    "mixtral": transformers.MixtralConfig(**COMMON, **HEADS, head_dim=10, num_local_experts=4),
    "mixtral-balanced": transformers.MixtralConfig(**COMMON, **HEADS, **BALANCED, num_local_experts=5),
    "qwen2_moe": transformers.Qwen2MoeConfig(**COMMON, **HEADS, **BALANCED, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16,
                                             shared_expert_intermediate_size=20),
    "qwen3_moe": transformers.Qwen3MoeConfig(**COMMON, **HEADS, head_dim=10, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=16),
    "qwen3_moe-normalized": transformers.Qwen3MoeConfig(**COMMON, **HEADS, **BALANCED, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
                                                        norm_topk_prob=True),
    "granitemoe": transformers.GraniteMoeConfig(**COMMON, **HEADS, **BALANCED, num_local_experts=5, embedding_multiplier=3.0, logits_scaling=1.7,
                                                residual_multiplier=0.6, attention_multiplier=0.3),
    # Only eager attention has the sinks.
    "gpt_oss": transformers.GptOssConfig(**COMMON, **HEADS, **BALANCED, head_dim=10, num_local_experts=5, num_experts_per_tok=3,
                                         sliding_window=7, attn_implementation="eager", rope_parameters={**YARN, "truncate": False}),
    "gpt_oss-plain": transformers.GptOssConfig(**COMMON, **HEADS, head_dim=6, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
                                               attention_bias=False, layer_types=["full_attention"] * 3,
                                               rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "olmoe": transformers.OlmoeConfig(**COMMON, **HEADS, **BALANCED, num_experts=4, num_experts_per_tok=2),
    "deepseek_v2": transformers.DeepseekV2Config(**LATENT, q_lora_rank=None, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2,
                                                 mlp_bias=True, routed_scaling_factor=1.3, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "deepseek_v2-limited": transformers.DeepseekV2Config(**LATENT, q_lora_rank=9, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1, n_group=3,
                                                         topk_group=2, topk_method="group_limited_greedy", first_k_dense_replace=1, attention_bias=True,
                                                         rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}),
    "deepseek_v3": transformers.DeepseekV3Config(**LATENT, q_lora_rank=9, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2,
                                                 first_k_dense_replace=1, attention_bias=True, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek_v3-halves": transformers.DeepseekV3Config(**LATENT, q_lora_rank=None, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2, n_group=1,
                                                        topk_group=1, first_k_dense_replace=0, norm_topk_prob=False, rope_interleave=False,
                                                        rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
}
# The parts of an expert, as twobp names them. In the module, all experts have one tensor, with gate and up in one.
EXPERTS = {"mixtral": ("block_sparse_moe", ("w1", "w3"), ("w2",)), "qwen3_moe": ("mlp", ("gate_proj", "up_proj"), ("down_proj",))}
EXPERTS["qwen2_moe"] = EXPERTS["olmoe"] = EXPERTS["gpt_oss"] = EXPERTS["deepseek_v2"] = EXPERTS["deepseek_v3"] = EXPERTS["qwen3_moe"]
EXPERTS["granitemoe"] = ("block_sparse_moe", *EXPERTS["qwen3_moe"][1:])
PACKED = {"llama", "qwen3", "gpt2"}  # these have no window, because a mask from outside would replace it

SMALL = dict(hidden_size=24, num_hidden_layers=3, intermediate_size=40, vocab_size=53, initializer_range=0.3)
LLAMA = dict(SMALL, max_position_embeddings=64, bos_token_id=5, eos_token_id=6, use_cache=False)
LLAMAS = {
    # head_dim differs from hidden_size / heads. All three parts of llama3's frequencies are used. The model has several files.
    "grouped": transformers.LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5,
                                        tie_word_embeddings=False, rope_parameters={
                                            "rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0,
                                            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}),
    "tied": transformers.LlamaConfig(**LLAMA, num_attention_heads=3, num_key_value_heads=1, head_dim=6, rms_norm_eps=1e-6,
                                     tie_word_embeddings=True, pad_token_id=7,
                                     rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}),
    "plain": transformers.LlamaConfig(**LLAMA, num_attention_heads=3, num_key_value_heads=3, rms_norm_eps=1e-5,
                                      tie_word_embeddings=False, pad_token_id=7),
}
BERT = dict(SMALL, max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BERTS = {
    "tied": transformers.BertConfig(**BERT, num_attention_heads=4, hidden_act="gelu", layer_norm_eps=1e-12, tie_word_embeddings=True),
    "untied": transformers.BertConfig(**BERT, num_attention_heads=3, hidden_act="gelu_new", layer_norm_eps=1e-3,
                                      tie_word_embeddings=False, type_vocab_size=3),
}
MAMBA = dict(vocab_size=53, use_cache=False, initializer_range=0.3, bos_token_id=5, eos_token_id=6)
MAMBAS = {
    "tied": transformers.MambaConfig(**MAMBA, hidden_size=24, num_hidden_layers=3, state_size=16, tie_word_embeddings=True),
    "untied": transformers.MambaConfig(**MAMBA, hidden_size=20, num_hidden_layers=2, state_size=5, conv_kernel=3, expand=3, time_step_rank=7,
                                       layer_norm_epsilon=1e-3, tie_word_embeddings=False),
}
RESNETS = {
    "bottleneck": transformers.ResNetConfig(layer_type="bottleneck", embedding_size=8, hidden_sizes=[16, 24], depths=[2, 1], num_labels=7),
    "basic": transformers.ResNetConfig(layer_type="basic", embedding_size=8, hidden_sizes=[8, 12, 12], depths=[1, 2, 1], num_labels=3),
    "deep": transformers.ResNetConfig(layer_type="bottleneck", embedding_size=6, hidden_sizes=[8, 8], depths=[3, 3], num_labels=2, num_channels=1),
}
FAMILIES = {"decoders": DECODERS, "llama": LLAMAS, "bert": BERTS, "mamba": MAMBAS, "resnet": RESNETS}
CLASSES = {"bert": transformers.BertForMaskedLM, "resnet": transformers.ResNetForImageClassification}
LR = {"decoders": 0.05}
PAD = 0  # of BERT, the default of transformers; its embedding gets no gradient, even if a token attends to it


def unlike(family, name, weight):
    """Gains are ones and biases zeros or all equal otherwise, and a test could not see whether they are read."""
    if family == "decoders" and weight.dim() == 1:
        weight.add_(0.3 * torch.randn_like(weight))
    if family == "llama" and "norm" in name or family == "bert" and "LayerNorm.weight" in name or family == "mamba" and ("norm" in name or name.endswith(".D")):
        weight.uniform_(0.5, 1.5)
    elif family == "bert" and name.endswith("bias"):
        weight.normal_(0, 0.2)
    elif family == "mamba" and name.endswith("A_log"):
        weight.add_(torch.randn_like(weight) * 0.3)
    elif family == "mamba" and name.endswith(("dt_proj.bias", "conv1d.bias")):
        weight.uniform_(*((-2, 1) if "dt_proj" in name else (-0.5, 0.5)))
    elif family == "resnet" and "normalization" in name and weight.is_floating_point():
        weight.uniform_(*((-1.0, 0.5) if name.endswith(("bias", "mean")) else (0.5, 1.5)))
    elif name.endswith("num_batches_tracked"):
        weight.fill_(11)


def model_of(family, config):
    model = CLASSES.get(family, transformers.AutoModelForCausalLM)
    model = (model.from_config(config, dtype=torch.float32) if family not in CLASSES else model(config).float()).train()
    with torch.no_grad():
        for name, tensor in tensors_of(model, copy=False).items():
            unlike(family, name, tensor)
            if config.model_type == "gpt_oss" and name.endswith(("gate_proj.weight", "up_proj.weight")):
                tensor.mul_(3)  # so that the limits of the gate are reached
    return model


def tensors_of(model, copy=True, of=lambda one: one):
    """The parameters, each once, and the buffers that are saved, with the experts apart, as files have them; or their gradients."""
    buffers = {name: one for name, one in model.named_buffers() if name in model.state_dict()}
    found = {}
    for name, one in {**dict(model.named_parameters()), **buffers}.items():
        one = of(one)
        if one is None:  # the gradient of a buffer
            continue
        found.update(experts_of(model, name, one) if ".experts." in name else {name: one})
    return {name: one.detach().clone().contiguous() if copy else one for name, one in found.items()}


def experts_of(model, name, stack):
    block, inputs, output = EXPERTS[model.config.model_type]
    names, kind = inputs if "gate_up_proj" in name else output, "bias" if name.endswith("bias") else "weight"
    before = ".".join(name.split(".")[:3])
    in_out = model.config.model_type == "gpt_oss"  # and gate and up take turns
    parts_of = (lambda expert: [expert.T[i::len(names)] for i in range(len(names))]) if in_out else (lambda expert: expert.chunk(len(names)))
    return {f"{before}.{block}.experts.{number}.{part}.{kind}": rows for number, expert in enumerate(stack)
            for part, rows in zip(names, parts_of(expert))}


def padding(ids, right, both):
    """Returns a mask of four samples. They are padded on the right from `right` on, on the left, with a hole, and on both sides (from `both` on)."""
    mask = torch.ones_like(ids)
    mask[0, right:] = 0
    mask[1, :9] = 0
    mask[2, 5:7] = 0
    mask[3, :2] = mask[3, both:] = 0
    return mask


def of_tokens(family, case, config):
    ids = torch.randint(0, config.vocab_size, (4, 39 if family == "mamba" else LENGTH))  # 39: not a multiple of a chunk of the scan
    if family == "llama":
        ids[0, 3:6] = 7  # other tokens attend to it although it is the padding token
    labels = torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
    if case == "gemma2":
        # No position may see padding alone: its attention there, which no label reads, is not ours (docs/decoders.md).
        mask = torch.ones_like(ids)
        mask[0, 28:] = mask[2, 5:7] = 0
    elif family == "mamba":
        mask = padding(ids, right=30, both=37) if case == "untied" else None
    else:
        mask = padding(ids, right=20, both=30) if family == "decoders" or case == "plain" else None
    if mask is None:
        return {"input_ids": ids, "labels": labels}
    labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def of_texts(config):
    ids = torch.randint(1, config.vocab_size, (4, LENGTH))
    mask = torch.ones_like(ids)
    for row, length in enumerate((32, 20, 1, 31)):
        mask[row, length:] = 0
    ids[mask == 0] = PAD
    ids[0, 3:6] = PAD
    labels = torch.where(torch.rand(ids.shape) < 0.3, torch.randint(0, config.vocab_size, ids.shape), -100)
    labels[0, 0] = 7
    labels[mask == 0] = -100
    types = torch.randint(0, config.type_vocab_size, ids.shape)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}


def of_pictures(config):
    pictures = torch.randn(12, config.num_channels, 65, 61)
    labels = torch.randint(0, config.num_labels, (12,))
    labels[0], labels[1] = 0, 1
    return {"pixel_values": pictures, "labels": labels}


def logits_of(family, model, fields):
    """In evaluation, which uses the running statistics."""
    with torch.no_grad():
        inputs = {name: one for name, one in fields.items() if name != "labels"}
        return {"logits": model.train(family != "resnet")(**inputs).logits.contiguous()}


@contextlib.contextmanager
def in_float64():
    """transformers computes norms and rotary embedding in float32 by name, whatever the model's type. Here the names mean float64."""
    usual, cast = torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float = torch.float32 = usual
        torch.Tensor.float = cast


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


def shares_of(family, config, fields):
    """The micro-batches of our step with their shares of its loss, if together they have another loss than apart."""
    apart = getattr(config, "output_router_logits", False)
    if family != "resnet" and not apart:
        return [(fields, 1)]
    parts = [dict(zip(fields, chunk)) for chunk in zip(*(field.chunk(2) for field in fields.values()))]
    counts = [int((part["labels"][:, 1:] != -100).sum()) if apart else 1 for part in parts]
    return [(part, count / sum(counts)) for part, count in zip(parts, counts)]


@in_float64()
def make_exact(model, fields, to):
    """Loss and gradients of a step in float64."""
    exact = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float64, experts_implementation="eager").train()
    exact.load_state_dict(model.state_dict())
    loss = sum(exact(**part).loss * share for part, share in shares_of("decoders", model.config, fields))
    loss.backward()
    to.mkdir()
    save_file(tensors_of(exact, of=lambda one: one.grad), to / "gradients.safetensors")
    (to / "facts.json").write_text(json.dumps({"loss": loss.item()}))


def save_encoder(model, case, to):
    encoder = transformers.BertModel(model.config).float()
    encoder.load_state_dict(model.bert.state_dict(), strict=False)
    encoder.save_pretrained(to)
    if case == "untied":  # these are the names of the first release
        tensors = {"bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
                   for name, value in load_file(to / "model.safetensors").items()}
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def facts_of(model):
    """What config.json must keep besides the logits."""
    config = model.config
    head = model.get_output_embeddings() if hasattr(config, "vocab_size") else None
    return {"dtype": str(model.dtype), "tied": head is not None and head.weight is model.get_input_embeddings().weight,
            "kept": [getattr(config, name, None) for name in ("hidden_act", "bos_token_id", "max_position_embeddings", "output_router_logits",
                                                               "router_aux_loss_coef")]}


def make(family, folder):
    for seed, (case, config) in enumerate(FAMILIES[family].items()):
        torch.manual_seed(seed)
        model, to = model_of(family, config), folder / case
        model.save_pretrained(to / "model", **({"max_shard_size": "20KB"} if case == "grouped" else {}))
        if config.model_type in EXPERTS:
            model.save_pretrained(to / "module", save_original_format=False)  # with the names of the module
        if family == "bert":
            save_encoder(model, case, to / "encoder")
        fields = of_texts(config) if family == "bert" else of_pictures(config) if family == "resnet" else of_tokens(family, case, config)
        (to / "data").mkdir()
        for name, field in fields.items():
            numpy.save(to / f"data/{name}.npy", field.numpy())
        save_file(logits_of(family, model, fields), to / "logits.safetensors")
        if family == "decoders" and case in PACKED:
            make_packed(model, to / "packed")
        if family == "decoders" and config.model_type in EXPERTS:
            make_exact(model, fields, to / "exact")
        before, lr, loss = tensors_of(model.train()), LR.get(family, 0.5), 0.0
        for inputs, share in shares_of(family, config, fields):
            part = model(**inputs).loss * share
            part.backward()
            loss += part.item()
        # transformers keeps a second bias of a decoder that is not tied, and does not use it.
        unused = {name for name, one in model.named_parameters() if one.grad is None}
        used = {name for name in before if name not in unused}
        norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]).item()
        torch.optim.SGD(model.parameters(), lr=lr).step()
        for name, tensors in (("before", before), ("after", tensors_of(model))):
            save_file({name: one for name, one in tensors.items() if name in used}, to / f"{name}.safetensors")
        # The names of this model's tensors in files.
        other = {"gpt_neox": ("lm_head", "embed_out"), "mixtral": (".mlp.gate.", ".block_sparse_moe.gate."),
                 "granitemoe": (".router.weight", ".router.layer.weight")}.get(config.model_type, ("", ""))
        names = {name: name.replace(*other) for name in used}
        rotary = getattr(getattr(model, "model", None), "rotary_emb", None) if family == "llama" else None
        (to / "facts.json").write_text(json.dumps({**facts_of(model), "loss": loss, "lr": lr, "grad_norm": norm, "names": names,
                                                   "inv_freq": [] if rotary is None else rotary.inv_freq.tolist()}))


def check(family, folder):
    for saved in sorted(folder.glob("*/saved*")):
        config = FAMILIES[family][saved.parent.name]
        how = {"attn_implementation": config._attn_implementation} if family == "decoders" else {}
        model, loading = CLASSES.get(family, transformers.AutoModelForCausalLM).from_pretrained(saved, output_loading_info=True, **how)
        save_file(tensors_of(model), saved / "weights.safetensors")
        fields = {file.stem: torch.from_numpy(numpy.load(file)) for file in (saved.parent / "data").glob("*.npy")}
        problems = sorted(str(name) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in loading[key])
        (saved / "facts.json").write_text(json.dumps({**facts_of(model), "problems": problems}))
        save_file(logits_of(family, model.float(), fields), saved / "logits.safetensors")


print("ok", flush=True)
for line in sys.stdin:
    function, family, folder = line.rstrip("\n").split(" ", 2)
    {"make": make, "check": check}[function](family, pathlib.Path(folder))
    print("ok", flush=True)
