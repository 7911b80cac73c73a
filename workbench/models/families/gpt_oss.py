"""GPT-OSS: a sliding window in every other layer, sinks, biases everywhere, a clamped activation."""

from workbench.models.family import Family, Stacked, TensorNames

FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    gguf="gpt-oss",
    defaults={"torch_dtype": "bfloat16", "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    rope_theta=1.5e5,
    tensors=TensorNames(
        router="router",
        gate_up=(Stacked("experts.gate_up_proj", transposed=True, bias="experts.gate_up_proj_bias"),),
        down_stack=(Stacked("experts.down_proj", transposed=True, bias="experts.down_proj_bias"),),
    ),
    out_bias=True,
    sinks=True,
    router_bias=True,
    activation="swiglu-clamped",
    options=("attention_bias",),
    only={
        "moe_intermediate_size": (),
        "norm_topk_prob": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
)
"""The defaults are those of transformers' `GptOssConfig`."""
