"""Phi-3.5-MoE: layer norms with biases, biases of attention and head, LongRoPE, and a softmax for each choice."""

from workbench.models.family import Family, Norm, TensorNames

FAMILY = Family(
    "phimoe",
    "PhimoeForCausalLM",
    gguf="phimoe",
    other_names=("PhiMoEForCausalLM",),
    defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_jitter_noise": 0.01},
    tensors=TensorNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    out_bias=True,
    norm=Norm.LAYER_BIAS,
    scoring="sparsemixer",
    options=("attention_bias", "lm_head_bias"),
    only={"moe_intermediate_size": (), "norm_topk_prob": (False,), "router_jitter_noise": (0.01,)},
)
"""The defaults are those of transformers' `PhimoeConfig`; the noise is that of which the kernel takes twice."""
