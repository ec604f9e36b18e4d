"""The mixture of experts that benchmarks train: a Qwen3-MoE of width 512, with 16 experts of width 256, 4 for each
token, and its samples."""

import transformers

VOCABULARY, SEQUENCE, SAMPLES = 1024, 256, 2  # SAMPLES: of a micro-batch


def config_of(layers: int) -> transformers.Qwen3MoeConfig:
    return transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=SEQUENCE,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        use_cache=False,
    )
