"""Random small decoders of transformers, a function for each family that twobp has: make(dice, sizes...) -> config."""
import transformers


def sizes(dice, kv=True, even=True, equal=False):
    """Odd widths and heads. `even`: of a head that turns as a whole; `equal`: hidden_size is a multiple of the heads."""
    kv_heads = dice.choice([1, 2, 3])
    heads = kv_heads * dice.choice([1, 2]) if kv else dice.choice([1, 2, 3])
    head_dim = 2 * dice.randint(2, 6) if even else dice.randint(4, 12)
    out = dict(hidden_size=heads * (dice.randint(6, 12) if equal else head_dim), num_hidden_layers=dice.randint(1, 4),
               num_attention_heads=heads, intermediate_size=dice.randint(5, 70), vocab_size=dice.randint(40, 90),
               initializer_range=0.1, max_position_embeddings=64)
    if kv:
        out["num_key_value_heads"] = kv_heads
    if equal:
        out["head_dim"] = head_dim
    return out


def scaling(dice):
    theta = dice.choice([1e2, 1e4, 5e5])
    return {"rope_theta": theta, **dice.choice([
        {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 0.5,
         "attention_factor": 1.25},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}])}


def common(dice, pad=True):
    return dict(tie_word_embeddings=dice.random() < 0.5, pad_token_id=dice.choice([None, 0, 5]) if pad else None,
                bos_token_id=1, eos_token_id=2, use_cache=True)


def rms(dice):
    return dict(rms_norm_eps=10 ** -dice.uniform(4, 6))


def layer_types(dice, layers):
    return [dice.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]


def llama(dice):
    rope = scaling(dice)
    return transformers.LlamaConfig(**{**sizes(dice, equal=True), **common(dice), **rms(dice), "rope_parameters": rope,
                                       "max_position_embeddings": 8 if rope["rope_type"] == "dynamic" else 64,
                                       "attention_bias": dice.random() < 0.5, "mlp_bias": dice.random() < 0.5,
                                       "hidden_act": dice.choice(["silu", "gelu", "gelu_new"])})


def mistral(dice):
    return transformers.MistralConfig(**sizes(dice), **common(dice), **rms(dice), sliding_window=dice.choice([None, 1, 4, 7, 40]))


def qwen2(dice):
    size = sizes(dice)
    return transformers.Qwen2Config(**size, **common(dice), **rms(dice), use_sliding_window=True, sliding_window=dice.choice([3, 6]),
                                    max_window_layers=dice.randint(0, 3), rope_parameters=scaling(dice))


def qwen3(dice):
    size = sizes(dice, equal=True)
    return transformers.Qwen3Config(**size, **common(dice), **rms(dice), attention_bias=dice.random() < 0.5,
                                    rope_parameters=scaling(dice), use_sliding_window=True, sliding_window=5,
                                    layer_types=layer_types(dice, size["num_hidden_layers"]))


def phi3(dice):
    size = sizes(dice)
    head_dim = size["hidden_size"] // size["num_attention_heads"]
    part = dice.choice([1.0, 0.5]) if head_dim % 4 == 0 else 1.0
    factors = lambda: [dice.uniform(1, 9) for _ in range(int(head_dim * part) // 2)]
    rope = dice.choice([{"rope_type": "default"}, {"rope_type": "longrope", "short_factor": factors(), "long_factor": factors()}])
    return transformers.Phi3Config(**size, **common(dice), **rms(dice), sliding_window=dice.choice([None, 5]), original_max_position_embeddings=12,
                                   rope_parameters={**rope, "rope_theta": 1e4, "partial_rotary_factor": part})


def olmo2(dice):
    return transformers.Olmo2Config(**sizes(dice), **common(dice), **rms(dice), attention_bias=dice.random() < 0.5,
                                    rope_parameters=scaling(dice))


def gemma(dice):
    return transformers.GemmaConfig(**{**sizes(dice), "head_dim": 2 * dice.randint(2, 6)}, **common(dice), **rms(dice),
                                    attention_bias=dice.random() < 0.5, hidden_act=dice.choice(["gelu", "gelu_pytorch_tanh"]))


def gemma2(dice):
    return transformers.Gemma2Config(**sizes(dice, equal=True), **common(dice), **rms(dice), sliding_window=dice.choice([2, 5]),
                                     query_pre_attn_scalar=dice.choice([16, 144]), final_logit_softcapping=dice.choice([None, 2.0, 30.0]),
                                     attn_logit_softcapping=dice.choice([None, 0.5, 50.0]), attn_implementation="eager",
                                     hidden_activation=dice.choice(["gelu_pytorch_tanh", "silu"]))


def gemma3_text(dice):
    scaled = dice.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
    return transformers.Gemma3TextConfig(**sizes(dice, equal=True), **common(dice), **rms(dice), sliding_window=dice.choice([2, 5]),
                                         query_pre_attn_scalar=dice.choice([16, 144]), sliding_window_pattern=dice.choice([1, 2, 3]),
                                         final_logit_softcapping=dice.choice([None, 2.0]),
                                         rope_parameters={"full_attention": {"rope_theta": 1e5, **scaled},
                                                          "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})


def smollm3(dice):
    size = sizes(dice)
    return transformers.SmolLM3Config(**size, **common(dice), **rms(dice), no_rope_layer_interval=dice.choice([1, 2, 3]),
                                      use_sliding_window=dice.random() < 0.5, sliding_window=4, rope_parameters=scaling(dice),
                                      attention_bias=dice.random() < 0.5, mlp_bias=dice.random() < 0.5)


def gpt2(dice):
    size = sizes(dice, kv=False, even=False)
    return transformers.GPT2Config(n_embd=size["hidden_size"], n_layer=size["num_hidden_layers"], n_head=size["num_attention_heads"],
                                   n_inner=dice.choice([None, size["intermediate_size"]]), n_positions=dice.choice([40, 64]),
                                   vocab_size=size["vocab_size"], initializer_range=0.1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                   activation_function=dice.choice(["gelu_new", "gelu"]), bos_token_id=1, eos_token_id=2,
                                   tie_word_embeddings=dice.random() < 0.5)


def gpt_neox(dice):
    size = sizes(dice, kv=False)
    head = size["hidden_size"] // size["num_attention_heads"]
    part = dice.choice([p for p in (0.25, 0.5, 1.0) if int(head * p) % 2 == 0 and int(head * p) > 2])
    rope = scaling(dice)
    return transformers.GPTNeoXConfig(**size, **common(dice, pad=False), use_parallel_residual=dice.random() < 0.7,
                                      attention_bias=dice.random() < 0.7, rope_parameters={**rope, "partial_rotary_factor": part},
                                      hidden_act=dice.choice(["gelu", "gelu_new"]))


def granite(dice):
    return transformers.GraniteConfig(**sizes(dice), **common(dice), **rms(dice), embedding_multiplier=3.0, logits_scaling=1.7,
                                      residual_multiplier=0.22, attention_multiplier=0.3, attention_bias=dice.random() < 0.5)


def stablelm(dice):
    size = sizes(dice, kv=True)
    head = size["hidden_size"] // size["num_attention_heads"]
    part = dice.choice([p for p in (0.25, 0.5, 1.0) if int(head * p) % 2 == 0 and int(head * p) > 0])
    return transformers.StableLmConfig(**size, **common(dice), use_qkv_bias=dice.random() < 0.5,
                                       rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": part})


def starcoder2(dice):
    return transformers.Starcoder2Config(**sizes(dice), **common(dice), use_bias=dice.random() < 0.5,
                                         sliding_window=dice.choice([None, 4]), rope_parameters=scaling(dice))


def routing(dice, experts, more):
    """Of Mixtral, `more` is False: its routing is always normalized."""
    count = dice.randint(1, 6)
    return {experts: count, "num_experts_per_tok": dice.randint(1, count), "experts_implementation": "eager",  # the other takes even widths
            **({"norm_topk_prob": dice.random() < 0.5} if more else {})}


def mixtral(dice):
    return transformers.MixtralConfig(**sizes(dice), **common(dice), **rms(dice), **routing(dice, "num_local_experts", False),
                                      sliding_window=dice.choice([None, 4]))


def qwen2_moe(dice):
    return transformers.Qwen2MoeConfig(**sizes(dice), **common(dice), **rms(dice), **routing(dice, "num_experts", True), qkv_bias=dice.random() < 0.5,
                                       moe_intermediate_size=dice.randint(3, 20), shared_expert_intermediate_size=dice.randint(3, 20))


def qwen3_moe(dice):
    return transformers.Qwen3MoeConfig(**sizes(dice, equal=True), **common(dice), **rms(dice), **routing(dice, "num_experts", True),
                                       moe_intermediate_size=dice.randint(3, 20), attention_bias=dice.random() < 0.5, rope_parameters=scaling(dice))


def olmoe(dice):
    return transformers.OlmoeConfig(**sizes(dice), **common(dice), **rms(dice), **routing(dice, "num_experts", True),
                                    attention_bias=dice.random() < 0.5, rope_parameters=scaling(dice))


def granitemoe(dice):
    return transformers.GraniteMoeConfig(**sizes(dice), **common(dice), **rms(dice), **routing(dice, "num_local_experts", False),
                                         embedding_multiplier=3.0, logits_scaling=1.7, residual_multiplier=0.22, attention_multiplier=0.3,
                                         rope_parameters=scaling(dice))


def gpt_oss(dice):
    size = sizes(dice, equal=True)
    yarn = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16, "truncate": dice.random() < 0.5}
    return transformers.GptOssConfig(**size, **common(dice), **rms(dice), **routing(dice, "num_local_experts", False),
                                     attn_implementation="eager", attention_bias=dice.random() < 0.5, sliding_window=dice.choice([3, 5]),
                                     layer_types=layer_types(dice, size["num_hidden_layers"]),
                                     rope_parameters=dice.choice([yarn, {"rope_type": "default", "rope_theta": 1e3}]))


def latent(dice, groups):
    # transformers' second generation takes no odd strides.
    heads, count = dice.randint(1, 3), groups * dice.randint(2, 3)
    chosen = dice.randint(1, groups)
    return dict(hidden_size=heads * dice.randint(6, 12), num_hidden_layers=dice.randint(1, 3), num_attention_heads=heads, num_key_value_heads=heads,
                intermediate_size=dice.randint(5, 40), moe_intermediate_size=dice.randint(3, 20), vocab_size=dice.randint(40, 90), initializer_range=0.1,
                max_position_embeddings=64, q_lora_rank=dice.choice([None, dice.randint(2, 9)]), kv_lora_rank=2 * dice.randint(1, 5),
                qk_nope_head_dim=2 * dice.randint(1, 4), qk_rope_head_dim=2 * dice.randint(1, 4), v_head_dim=dice.randint(1, 9), n_routed_experts=count,
                num_experts_per_tok=dice.randint(1, chosen * count // groups), n_shared_experts=dice.randint(1, 2), n_group=groups, topk_group=chosen,
                first_k_dense_replace=dice.randint(0, 2), routed_scaling_factor=dice.choice([1.0, 2.5]), experts_implementation="eager",
                rope_parameters={"rope_theta": 1e3, **dice.choice([{"rope_type": "default"}, {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9}])})


def deepseek_v2(dice):
    groups = dice.choice([1, 3])
    return transformers.DeepseekV2Config(**latent(dice, groups), **common(dice), **rms(dice), mlp_bias=dice.random() < 0.5,
                                         topk_method="group_limited_greedy" if groups > 1 else "greedy")


def deepseek_v3(dice):
    return transformers.DeepseekV3Config(**latent(dice, dice.choice([1, 3])), **common(dice), **rms(dice), norm_topk_prob=dice.random() < 0.5,
                                         rope_interleave=dice.random() < 0.5)


FAMILIES = [llama, mistral, qwen2, qwen3, phi3, olmo2, gemma, gemma2, gemma3_text, smollm3, gpt2, gpt_neox, granite, stablelm, starcoder2]
MIXTURES = [mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, gpt_oss, deepseek_v2, deepseek_v3]
