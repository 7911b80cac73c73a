"""DBRX: layer norms, queries, keys and values of one projection, whose magnitudes are limited."""

from workbench.models.family import Family, Norm, Stacked, TensorNames

FAMILY = Family(
    "dbrx",
    "DbrxForCausalLM",
    gguf="dbrx",
    keys={
        "num_hidden_layers": "n_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "num_key_value_heads": "attn_config.kv_n_heads",
        "clip_qkv": "attn_config.clip_qkv",
        "rope_theta": "attn_config.rope_theta",
        "intermediate_size": "ffn_config.ffn_hidden_size",
        "num_local_experts": "ffn_config.moe_num_experts",
        "num_experts_per_tok": "ffn_config.moe_top_k",
    },
    defaults={"rms_norm_eps": 1e-5},
    rope_theta=1e4,
    tensors=TensorNames(
        "ffn",
        router="router.layer",
        layers="transformer.blocks",
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        attention_norm="norm_attn_norm.norm_1",
        mixture_norm="norm_attn_norm.norm_2",
        attention="norm_attn_norm.attn",
        out="out_proj",
        qkv="Wqkv",
        gate_up=(Stacked("experts.mlp.w1", flat=True), Stacked("experts.mlp.v1", flat=True)),
        down_stack=(Stacked("experts.mlp.w2", flat=True, transposed=True),),
    ),
    norm=Norm.LAYER,
    options=("clip_qkv",),
    never_null=("ffn_config.moe_normalize_expert_weights",),
    only={
        "ffn_config.moe_normalize_expert_weights": (1,),
        "ffn_config.ffn_act_fn": ({"name": "silu"},),
        "sliding_window": (),
        "moe_intermediate_size": (),
        "norm_topk_prob": (True,),
    },
)
"""The epsilon is that of torch's `LayerNorm`."""
