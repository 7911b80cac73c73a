"""Stored formats: bits of every type, and the operations that a quantization_config quantises."""

import pytest
from gguf import GGML_QUANT_SIZES

from workbench.core.errors import CheckpointError, ScenarioError
from workbench.core.units import WEIGHT_BYTES
from workbench.models import LayerKind, ModelConfig, model, models
from workbench.models.families import FAMILIES
from workbench.models.formats import GGUF_BLOCKS, bytes_per_weight, quantisation_of, stored_formats

MIXTRAL = models["mixtral-8x7b"]
DEEPSEEK = models["deepseek-v3"]


def formats(config, model: ModelConfig) -> list[dict[str, float]]:
    """Bits per weight by operation, of every layer."""
    names = FAMILIES["mixtral" if model is MIXTRAL else "deepseek_v3"].tensors
    found = stored_formats(quantisation_of(config, model.name), model, names)
    return [{op: 8 * each for op, each in layer} for layer in found]


def test_the_table_has_all_types_of_the_package():
    assert {kind.name.lower(): sizes for kind, sizes in GGML_QUANT_SIZES.items()} == GGUF_BLOCKS


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("q4_k", 4.5),
        ("q6_k", 6.5625),
        ("q8_0", 8.5),
        ("iq2_xs", 2.3125),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("int4", 4),
        ("int4_g128", 4.25),
        ("int8_g64", 8.5),
        ("bf16", 16),
    ],
)
def test_bits_per_weight(name, bits):
    assert 8 * bytes_per_weight(name) == bits


def test_names_mean_the_same_in_both_tables():
    both = set(GGUF_BLOCKS) & set(WEIGHT_BYTES)
    assert both == {"bf16", "mxfp4"}
    assert all(GGUF_BLOCKS[name][1] / GGUF_BLOCKS[name][0] == WEIGHT_BYTES[name] for name in both)


def test_an_unknown_format_is_refused():
    with pytest.raises(ScenarioError, match="the format 'q4_k_m' is unknown; give one of f64, f32"):
        bytes_per_weight("q4_k_m")


def test_awq_and_gptq_have_a_scale_and_a_zero_point_per_group():
    """4 + (16 + 4) / 128 bits; embedding, head and routers stay as they are."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["gate"]}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    bits = 4 + 20 / 128
    expected = [{"qkv": bits, "out_proj": bits, "experts": bits}] * 32
    assert formats(awq, MIXTRAL) == formats(gptq, MIXTRAL) == expected
    whole_rows = {**gptq, "bits": 8, "group_size": -1, "lm_head": True}
    assert formats(whole_rows, MIXTRAL) == [{"qkv": 8, "out_proj": 8, "experts": 8, "head": 8}] * 32


def test_gptq_leaves_out_what_its_rules_exclude():
    rules = {r"-:model\.layers\.0\..*": {}, r"-:.*\.self_attn": {}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": rules}
    assert formats(config, MIXTRAL) == [{"experts": 16}] + [{"experts": 4 + 20 / 64}] * 31


def compressed(ignore, **weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore}


def test_kimi_k2_has_only_its_routed_experts_in_int4():
    """Patterns as in Kimi-K2-Thinking (general knowledge): int4 in groups of 32 for routed experts alone."""
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    assert formats(compressed(ignore, group_size=32), DEEPSEEK) == [{}] * 3 + [{"experts": 4.5}] * 58


@pytest.mark.parametrize(
    ("weights", "bits"),
    [
        ({"group_size": 128, "symmetric": False}, 4 + 20 / 128),
        ({"group_size": None, "strategy": "channel", "num_bits": 8}, 8),
        ({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}, 8),
        ({"type": "float", "group_size": 16, "strategy": "tensor_group"}, 4.5),
        ({"type": "float", "group_size": 32}, 4.25),
    ],
)
def test_compressed_tensors_says_how_weights_are_stored(weights, bits):
    found = formats(compressed(["lm_head"], **weights), MIXTRAL)
    assert found == [{"qkv": bits, "out_proj": bits, "experts": bits}] * 32


def test_nvfp4_of_modelopt_may_leave_out_attention_layer_by_layer():
    ignore = ["lm_head", "model.layers.1.self_attn*", "model.layers.2.self_attn*"]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ignore}
    found = formats(config, MIXTRAL)
    assert found[0] == {"qkv": 4.5, "out_proj": 4.5, "experts": 4.5}
    assert found[1] == found[2] == {"qkv": 16, "out_proj": 16, "experts": 4.5}
    assert found[3] == found[0]


def test_an_operation_with_one_module_left_out_has_the_mean():
    """Of DeepSeek-V3's projections before attention, only the joint expansion of keys and values stays in bf16."""
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["kv_b_proj", "lm_head"]}
    found = formats(config, DEEPSEEK)[0]
    keys = 512 * 128 * 128
    assert found["qkv"] == pytest.approx(8 + 8 * keys / DEEPSEEK.attention_in_params)
    values = 512 * 128 * 128
    assert found["out_proj"] == pytest.approx(8 + 8 * values / DEEPSEEK.attention_out_params)
    assert found["shared_experts"] == 8


def test_names_in_multimodal_models_are_understood():
    ignore = ["language_model.lm_head", "model.language_model.layers.0.*", "language_model.model.layers.1.self_attn"]
    found = formats(compressed(ignore, group_size=128), MIXTRAL)
    assert found[0] == {"qkv": 16, "out_proj": 16, "experts": 16}
    assert found[1] == {"qkv": 16, "out_proj": 16, "experts": 4.125}
    assert found[2] == {"qkv": 4.125, "out_proj": 4.125, "experts": 4.125}


def test_dense_layers_and_shared_experts_are_told_apart():
    found = formats(compressed(["lm_head", "re:.*self_attn", "re:.*experts"], group_size=128), DEEPSEEK)
    assert DEEPSEEK.layer_kinds[2:4] == (LayerKind.DENSE, LayerKind.FULL)
    assert found[2:4] == [{"shared_experts": 4.125}, {"shared_experts": 16}]


MIXTRAL_JSON = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "float16",
}


def test_mixtral_quantised_by_awq_has_its_published_size():
    """TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ has files of 9.97, 9.98 and 4.7 GB (huggingface.co, seen 2026-11-26)."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["gate"]}
    found = model({**MIXTRAL_JSON, "quantization_config": awq}, name="mixtral-awq")
    assert found.weight_bytes / 1e9 == pytest.approx(9.97 + 9.98 + 4.7, rel=0.003)
    assert found.layers == ()


def test_layers_with_other_formats_are_other_kinds():
    """Attention of the first 16 layers is left out, so that the model has two kinds of layers."""
    ignore = ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(16))]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ignore}
    found = model({**MIXTRAL_JSON, "quantization_config": config}, name="mixtral-nvfp4")
    (first,), times = found.layers[0]
    (last,), others = found.layers[1]
    assert (times, others) == (16, 16)
    assert dict(found.of_kind(last).formats) == {"qkv": 0.5625, "out_proj": 0.5625, "experts": 0.5625}
    assert dict(found.of_kind(first).formats) == {"qkv": 2, "out_proj": 2, "experts": 0.5625}
    routed = 0.5625 * found.routed_params
    others = found.always_params + found.embedding_params - 16 * found.attention_params
    assert found.weight_bytes == pytest.approx(routed + 2 * others + 16 * 0.5625 * found.attention_params)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'; known are fp8, mxfp4, awq, gptq"),
        ({"quant_method": "awq"}, "bits is None, no number of bits from 1 to 16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, no number of weights"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*down": {"bits": 8}}}, "a rule with other bits"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo is 'MIXED_PRECISION', not one of"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups has no group with weights"),
        ({"quant_method": "compressed-tensors"}, "not understood"),
        ({**compressed(["re:("])}, "not understood"),
        ({**compressed("lm_head")}, "ignore is 'lm_head', no list of names"),
        ({**compressed([], type="codebook")}, "type is 'codebook', not int or float"),
        ({**compressed([]), "sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, told):
    with pytest.raises(CheckpointError, match=told):
        quantisation_of(config, "some-model")
