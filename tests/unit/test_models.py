"""Model configurations: published totals, layers of other kinds than Mixtral's, and what a config.json may ask for."""

import json
import tomllib
from dataclasses import replace

import pytest

from workbench.core.catalogue import Catalogue, data_path
from workbench.core.errors import CatalogueError, CheckpointError, ScenarioError
from workbench.models import checkpoint, model, models

ENTRIES = tomllib.loads(data_path("catalogue/models.toml").read_text(encoding="utf-8"))
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
    "hidden_act": "silu",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_mixtral_8x7b_has_its_published_sizes():
    mixtral = models["mixtral-8x7b"]
    assert mixtral.params == 46_702_792_704  # Hugging Face's count of the checkpoint
    assert mixtral.flops_per_token() == pytest.approx(25.50e9, rel=1e-3)
    assert mixtral.kv_bytes_per_token("bf16") == 131_072
    assert mixtral.kv_bytes_per_token("fp32") == 262_144


@pytest.mark.parametrize("name", ENTRIES)
def test_parameters_add_up_to_the_published_total(name):
    assert models[name].params == pytest.approx(ENTRIES[name]["parameters"], rel=0.012)
    assert ENTRIES[name]["source"]["all"]


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("gpt-oss-20b", 13.76), ("gpt-oss-120b", 65.25), ("deepseek-v3", 672.9)]
)
def test_quantised_checkpoints_have_their_size(name, gigabytes):
    """GPT-OSS: the published files' sizes; DeepSeek-V3: 671 GB of fp8, embedding and head in bf16."""
    assert models[name].weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_parameters_add_up_from_their_parts():
    config = model(MIXTRAL, name="m")
    attention = 64 * 64 * 2 + 2 * 64 * 32
    experts = 4 * 3 * 64 * 96
    assert config.layer_params == attention + 4 * 64 + experts + 2 * 64
    assert config.params == 2 * config.layer_params + 2 * 100 * 64 + 64


def test_tied_embeddings_are_counted_once():
    tied = model(MIXTRAL | {"tie_word_embeddings": True}, name="m")
    assert model(MIXTRAL, name="m").params - tied.params == 100 * 64


def test_an_unknown_model_is_answered_with_the_known_ones():
    with pytest.raises(CatalogueError) as error:
        models["gpt-5"]
    assert str(error.value) == f"models.toml has no entry 'gpt-5'; it has {', '.join(sorted(models))}."
    assert isinstance(error.value, KeyError)


def test_a_catalogue_reads_its_file_once(monkeypatch):
    read = []
    monkeypatch.setattr("workbench.core.catalogue.tomllib.loads", lambda text: read.append(text) or {"a": {}, "b": {}})
    catalogue = Catalogue("models.toml", lambda name, table: name.upper())
    assert (dict(catalogue), len(catalogue), len(read)) == ({"a": "A", "b": "B"}, 2, 1)


def test_a_config_is_translated_field_by_field():
    config = model(MIXTRAL | {"rope_theta": 5e4, "rms_norm_eps": 1e-6}, name="m")
    assert (config.name, config.dtype, config.head_dim) == ("m", "bf16", 16)
    assert (config.rope_theta, config.rms_norm_eps) == (5e4, 1e-6)
    assert (config.q_size, config.kv_size) == (64, 32)
    assert config.path is None


def test_a_config_is_read_from_a_dict_a_file_or_its_folder(tmp_path):
    raw = {key: value for key, value in ENTRIES["deepseek-v3"].items() if key not in ("source", "parameters")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for given in (raw, tmp_path, str(tmp_path / "config.json")):
        assert model(given, name="deepseek-v3") == models["deepseek-v3"]
    assert model(tmp_path).name == tmp_path.name
    assert model(raw | {"model_type": "deepseek_v3"}).name == "deepseek_v3"


def test_names_of_other_families_are_translated():
    renamed = {key: value for key, value in MIXTRAL.items() if "experts" not in key}
    renamed |= {"n_routed_experts": 4, "moe_topk": 2, "n_shared_experts": 3, "moe_intermediate_size": 20}
    config = model(renamed | {"first_k_dense_replace": 1}, name="m")
    assert (config.num_local_experts, config.num_experts_per_tok) == (4, 2)
    assert (config.expert_params, config.shared_params, config.dense_params) == tuple(3 * 64 * w for w in (20, 60, 96))
    assert model({"_name_or_path": "whole", "text_config": renamed}) == replace(model(renamed), name="whole")


def test_latent_attention_keeps_576_elements_and_computes_with_the_latent_twice():
    v3 = models["deepseek-v3"]
    assert (v3.head_dim, v3.kv_elements, v3.query_group) == (192, 576, 128 * (2 * 512 + 64) / 576)
    assert (v3.pair_macs, v3.entry_macs) == (128 * (192 + 128), 128 * (2 * 512 + 64))
    assert v3.attention_params == v3.attention_in_params + v3.attention_out_params == 187_105_280
    assert v3.kv_bytes_per_token("bf16") == 61 * 576 * 2
    assert (v3.moe_layers, v3.expert_bytes, v3.other_bytes) == (58, 1.0, 1.0)


def test_a_sliding_window_caps_what_is_attended_to():
    gpt = models["gpt-oss-20b"]
    assert (gpt.sliding_window, gpt.windowed_layers) == (128, 12)
    assert gpt.attended(100) == 100
    assert 24 * gpt.attended(1000) == 12 * 1000 + 12 * 128
    assert gpt.attended_below(1000) == pytest.approx(sum(gpt.attended(n) for n in range(1, 1001)))
    assert gpt.attended_below(100) == 5050


def test_a_window_that_is_switched_off_does_not_count():
    assert model(MIXTRAL | {"sliding_window": 8, "use_sliding_window": False}).windowed_layers == 0
    assert model(MIXTRAL | {"sliding_window": 8}).windowed_layers == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised by 'aqlm'; known are"),
        ({"quantization_config": "aqlm"}, "quantised by 'aqlm'; known are"),
        ({"quantization_config": {"quant_method": "awq"}}, "bits is None, no number of bits from 1 to 16"),
        ({"torch_dtype": "float8"}, "has weights of 'float8'; set dtype to one of float32"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 layer_types"),
        ({"sliding_window": 8, "use_sliding_window": True}, "add layer_types"),
        ({"sliding_window": -8}, "positive integers for sliding_window"),
        ({"decoder_sparse_step": 3}, "no layer with experts; correct the dense layers"),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1, no list of layers"),
        ({"first_k_dense_replace": 2}, "no layer with experts"),
        ({"n_shared_experts": "1"}, "whole numbers for n_shared_experts"),
        ({"kv_lora_rank": 16}, "positive integers for qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
    ],
)
def test_layers_that_are_not_understood_are_refused(change, words):
    with pytest.raises(CheckpointError, match=words):
        model(MIXTRAL | change, name="mine")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": 2}, "layer_types=2, no list"),
        ({"layer_types": "sliding_attention"}, "layer_types='sliding_attention', no list"),
        ({"v_head_dim": -1}, "positive integers for v_head_dim"),
        ({"v_head_dim": float("nan")}, "positive integers for v_head_dim"),
        ({"qk_rope_head_dim": [64]}, "positive integers for qk_rope_head_dim"),
    ],
)
def test_values_of_the_wrong_kind_are_named(change, words):
    with pytest.raises(CheckpointError, match=words):
        model({**MIXTRAL, **change})


def test_keys_of_ours_in_a_config_of_theirs_are_not_taken():
    """Names of fields that no config.json of Hugging Face's has, and nothing checks."""
    foreign = {"coverage": [[1, 0.1]], "path": "/etc", "windowed_layers": 2, "expert_dtype": "int4", "name": "<img>"}
    foreign |= {"architecture": "GPT2"}
    assert model(MIXTRAL | foreign, name="m") == model(MIXTRAL, name="m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "no_such"}, "type 'no_such', which neither the key table nor transformers"),
        ({"model_type": "jetmoe"}, "experts in its attention"),
        ({"model_type": ["mixtral"]}, "whose layers are not understood; give one of dbrx"),
        ({"mamba_d_state": 16}, "sets 'mamba_d_state', a key of layers that are not understood"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"kv_channels": 128}, "kv_channels"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
        ({"index_topk": 2048}, "index_topk"),
        ({"mlp_layer_types": 3}, "mlp_layer_types=3"),
        ({"mlp_layer_types": ["dense"] * 3}, "give 'dense' or 'sparse' for each of its 2 layers"),
        ({"num_hidden_layers": 10**400}, "positive integers for num_hidden_layers"),
        ({"rope_theta": 10**400}, "positive numbers for rope_theta"),
        ({"hidden_size": 2**41}, "positive integers for hidden_size"),
        ({"decoder_sparse_step": [[[[[[[[3]]]]]]]] * 1000}, "positive integers for decoder_sparse_step"),
    ],
)
def test_what_reveals_layers_that_are_not_priced_is_named_in_a_few_words(change, words):
    with pytest.raises(CheckpointError, match=words) as error:
        model(MIXTRAL | change, name="mine")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "told",
    [
        {"mlp_layer_types": ["dense", "sparse"]},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"moe_layer_start_index": 1},
    ],
)
def test_dense_first_layers_are_counted_however_they_are_told(told):
    assert model(MIXTRAL | told, name="m") == model(MIXTRAL | {"first_k_dense_replace": 1}, name="m")


def test_dense_layers_behind_others_keep_their_place():
    found = model(MIXTRAL | {"mlp_layer_types": ["sparse", "dense"]}, name="m")
    assert [kind.dense for kind in found.layer_kinds] == [False, True]
    assert found.dense_layers == 1


@pytest.mark.parametrize("config", [None, 3, b"folder", ["folder"]])
def test_what_is_neither_a_dict_nor_a_path_is_refused(config):
    with pytest.raises(CheckpointError, match="neither dict nor path"):
        model(config)


def test_a_config_that_is_not_there_is_named():
    with pytest.raises(CheckpointError, match=r"does not exist; give a Hugging Face"):
        model("/nowhere/config.json")


def test_head_dim_of_the_config_goes_before_the_quotient():
    assert model(MIXTRAL | {"head_dim": 24}, name="m").head_dim == 24


def test_rope_theta_is_found_where_newer_files_keep_it():
    newer = MIXTRAL | {"rope_parameters": {"rope_theta": 1234.0, "rope_type": "default"}}
    assert model(newer, name="m").rope_theta == 1234.0


@pytest.mark.parametrize(
    ("spelled", "dtype"),
    [({"dtype": "float32"}, "fp32"), ({"dtype": "bfloat16"}, "bf16"), ({"torch_dtype": None}, "fp32")],
)
def test_the_precision_is_read_under_both_names(spelled, dtype):
    raw = {key: value for key, value in MIXTRAL.items() if key != "torch_dtype"}
    assert model(raw | spelled, name="m").dtype == dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            {"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "MixtralForCausalLM"], id="architecture"
        ),
        pytest.param({"architectures": [], "model_type": "qwen3_next"}, ["qwen3_next"], id="model type"),
        pytest.param({"hidden_size": None}, ["positive integers for hidden_size"], id="missing size"),
        pytest.param({"vocab_size": 0}, ["positive integers for vocab_size"], id="zero size"),
        pytest.param({"num_local_experts": "8"}, ["num_local_experts"], id="size as text"),
        pytest.param({"num_key_value_heads": 3}, ["4 query heads", "3 key-value heads"], id="uneven groups"),
        pytest.param({"num_experts_per_tok": 5}, ["more experts per token"], id="too many experts"),
        pytest.param({"hidden_act": "gelu"}, ["hidden_act='gelu'"], id="activation"),
        pytest.param({"rope_scaling": {"rope_type": "yarn"}}, ["rope_parameters", "factor=None"], id="rope"),
        pytest.param({"rope_scaling": {"rope_type": "dynamic"}}, ["rope_type='dynamic'"], id="kind of rope"),
        pytest.param({"n_group": 3}, ["n_group=3"], id="groups"),
        pytest.param({"quantization_config": {"bits": 4}}, ["quantization_config"], id="quantised"),
        pytest.param({"torch_dtype": "float64"}, ["float64", "unsupported"], id="precision"),
        pytest.param({"kv_lora_rank": 16}, ["kv_lora_rank=16"], id="latent attention"),
        pytest.param({"n_shared_experts": 1}, ["n_shared_experts=1"], id="shared experts"),
        pytest.param({"first_k_dense_replace": 1}, ["first_k_dense_replace=1"], id="dense layers"),
    ],
)
def test_what_the_engine_would_not_do_is_an_error(change, words, folder):
    (folder / "config.json").write_text(json.dumps(MIXTRAL | change), encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        checkpoint(folder)
    for word in [repr(folder.name), *words]:
        assert word in str(error.value)


def test_a_checkpoint_that_the_engine_cannot_run_can_still_be_predicted(folder):
    raw = {key: value for key, value in ENTRIES["deepseek-v3"].items() if key not in ("source", "parameters")}
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["SolarOpenForCausalLM"]}), encoding="utf-8")
    assert replace(model(folder), name="deepseek-v3") == models["deepseek-v3"]
    with pytest.raises(CheckpointError, match=r"SolarOpenForCausalLM.*To predict only, give wb\.model\(folder\)"):
        checkpoint(folder)


QWEN = {key: value for key, value in MIXTRAL.items() if key not in ("num_local_experts", "architectures")} | {
    "num_experts": 4,
    "moe_intermediate_size": 40,
    "rope_theta": None,
    "rms_norm_eps": None,
    "sliding_window": 4096,
}


def test_what_a_config_of_qwens_leaves_out_is_what_transformers_takes_it_to_be(folder):
    (folder / "config.json").write_text(json.dumps(QWEN | {"model_type": "qwen2_moe"}), encoding="utf-8")
    second = checkpoint(folder)
    assert (second.architecture, second.num_local_experts, second.expert_width) == ("Qwen2MoeForCausalLM", 4, 40)
    assert (second.rope_theta, second.rms_norm_eps, second.norm_topk_prob) == (1e4, 1e-6, False)
    assert (second.windowed_layers, second.shared_params) == (0, (3 * 5632 + 1) * 64)
    assert second.attention_vectors == second.q_size + 2 * second.kv_size
    third = model(QWEN | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}, name="m")
    assert (third.norm_topk_prob, third.shared_params, third.attention_vectors) == (True, 0, 2 * third.head_dim)
    assert len({second.shape, third.shape, replace(third, architecture=None).shape}) == 3


def test_a_window_of_0_that_is_switched_off_loads(folder):
    """As transformers saves a Qwen2-MoE."""
    saved = QWEN | {"model_type": "qwen2_moe", "sliding_window": 0, "use_sliding_window": False}
    (folder / "config.json").write_text(json.dumps(saved | {"layer_types": ["full_attention"] * 2}), encoding="utf-8")
    assert (checkpoint(folder).sliding_window, checkpoint(folder).windowed_layers) == (0, 0)
    with pytest.raises(CheckpointError, match="positive integers for sliding_window"):
        model(MIXTRAL | {"sliding_window": 0}, name="m")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen2_moe", {"layer_types": 3}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("qwen2_moe", {"n_shared_experts": 1}),
        ("qwen3_moe", {"attention_bias": True}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}),
        ("qwen2_moe", {"norm_topk_prob": "yes"}),
        ("qwen3_moe", {"first_k_dense_replace": 1}),
        ("mixtral", {"decoder_sparse_step": 2}),
        ("mixtral", {"mlp_only_layers": [0]}),
        ("glm4_moe", {"n_group": 3}),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}),
        ("mixtral", {"norm_topk_prob": False}),
    ],
)
def test_qwens_options_that_the_engine_would_not_do_are_errors(kind, change, folder):
    raw = QWEN | {"model_type": kind, "moe_intermediate_size": None, "sliding_window": None, **change}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{folder.name}.*{next(iter(change))}"):
        checkpoint(folder)


def test_an_architecture_that_nothing_is_known_of_is_an_error():
    with pytest.raises(ScenarioError, match="architecture='GPT2'; give one of DbrxForCausalLM"):
        replace(model(MIXTRAL, name="m"), architecture="GPT2")


def test_a_checkpoint_knows_where_its_weights_are(folder):
    assert checkpoint(folder).path == folder
    assert checkpoint(str(folder)).name == folder.name


def test_a_folder_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json; give the folder"):
        checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "5", "null", pytest.param(100_000 * "[", id="deep")])
def test_a_damaged_config_is_named(folder, text):
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint(folder)


def test_a_checkpoint_without_weights_says_what_to_copy(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file; copy the weights"):
        checkpoint(folder)


def test_pickled_weights_are_refused_and_never_opened(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\).*safe_serialization=True"):
        checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0; give a whole number from 1 on"),
        ({"head_dim": 1.5}, "head_dim=1.5; give a whole number from 1 on"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank='512'; give a whole number from 1 on"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1; give a whole number from 0 on"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9; give at most its 8 experts"),
        ({"first_k_dense_replace": 33}, "first_k_dense_replace=33; give at most its 32 layers"),
        ({"dtype": "fp8"}, "dtype='fp8'; give one of fp32, bf16, fp16"),
        ({"expert_dtype": "int3"}, "expert_dtype='int3'; give one of fp32, bf16, fp16, fp8, int8, mxfp4, int4"),
        ({"other_dtype": []}, "other_dtype=.*; give one of fp32"),
    ],
)
def test_a_model_changed_into_an_impossible_one_is_refused(change, words):
    with pytest.raises(ScenarioError, match=f"mixtral-8x7b has {words}"):
        replace(models["mixtral-8x7b"], **change)
