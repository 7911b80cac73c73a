"""Model configurations: the published sizes of Mixtral-8x7B, and what a config.json may ask for."""

import json

import pytest

from workbench.errors import CatalogueError, CheckpointError
from workbench.models import checkpoint, config_from_hf, models

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


def test_mixtral_8x7b_has_its_published_sizes():
    model = models["mixtral-8x7b"]
    assert model.params == 46_702_792_704  # Hugging Face's count of the checkpoint
    assert model.flops_per_token() == pytest.approx(25.50e9, rel=1e-3)
    assert model.kv_bytes_per_token("bf16") == 131_072
    assert model.kv_bytes_per_token("fp32") == 262_144


def test_parameters_add_up_from_their_parts():
    model = config_from_hf(MIXTRAL, name="m")
    attention = 64 * 64 * 2 + 2 * 64 * 32
    experts = 4 * 3 * 64 * 96
    assert model.layer_params == attention + 4 * 64 + experts + 2 * 64
    assert model.params == 2 * model.layer_params + 2 * 100 * 64 + 64


def test_tied_embeddings_are_counted_once():
    tied = config_from_hf(MIXTRAL | {"tie_word_embeddings": True}, name="m")
    assert config_from_hf(MIXTRAL, name="m").params - tied.params == 100 * 64


def test_an_unknown_model_is_answered_with_the_known_ones():
    with pytest.raises(CatalogueError) as error:
        models["gpt-5"]
    assert str(error.value) == f"models.toml has no entry 'gpt-5'; it has {', '.join(sorted(models))}."
    assert isinstance(error.value, KeyError)


def test_a_config_is_translated_field_by_field():
    model = config_from_hf(MIXTRAL | {"rope_theta": 5e4, "rms_norm_eps": 1e-6}, name="m")
    assert (model.name, model.dtype, model.head_dim, model.rope_theta, model.rms_norm_eps) == (
        "m",
        "bf16",
        16,
        5e4,
        1e-6,
    )
    assert (model.q_size, model.kv_size) == (64, 32)
    assert model.path is None


def test_head_dim_of_the_config_goes_before_the_quotient():
    assert config_from_hf(MIXTRAL | {"head_dim": 24}, name="m").head_dim == 24


def test_rope_theta_is_found_where_newer_files_keep_it():
    newer = MIXTRAL | {"rope_parameters": {"rope_theta": 1234.0, "rope_type": "default"}}
    assert config_from_hf(newer, name="m").rope_theta == 1234.0


@pytest.mark.parametrize(
    ("spelled", "dtype"),
    [({"dtype": "float32"}, "fp32"), ({"dtype": "bfloat16"}, "bf16"), ({"torch_dtype": None}, "fp32")],
)
def test_the_precision_is_read_under_both_names(spelled, dtype):
    raw = {key: value for key, value in MIXTRAL.items() if key != "torch_dtype"}
    assert config_from_hf(raw | spelled, name="m").dtype == dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            {"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "MixtralForCausalLM"], id="architecture"
        ),
        pytest.param({"architectures": [], "model_type": "qwen3_moe"}, ["qwen3_moe"], id="model type"),
        pytest.param({"hidden_size": None}, ["positive integers for hidden_size"], id="missing size"),
        pytest.param({"vocab_size": 0}, ["positive integers for vocab_size"], id="zero size"),
        pytest.param({"num_local_experts": "8"}, ["num_local_experts"], id="size as text"),
        pytest.param({"num_key_value_heads": 3}, ["4 query heads", "3 key-value heads"], id="uneven groups"),
        pytest.param({"num_experts_per_tok": 5}, ["more experts per token"], id="too many experts"),
        pytest.param({"hidden_act": "gelu"}, ["hidden_act='gelu'"], id="activation"),
        pytest.param({"sliding_window": 4096}, ["sliding_window=4096"], id="sliding window"),
        pytest.param({"rope_scaling": {"rope_type": "yarn"}}, ["rope_type='yarn'"], id="rope"),
        pytest.param({"quantization_config": {"bits": 4}}, ["quantization_config"], id="quantised"),
        pytest.param({"torch_dtype": "float16"}, ["float16", "unsupported"], id="precision"),
    ],
)
def test_what_the_engine_would_not_do_is_an_error(change, words):
    with pytest.raises(CheckpointError) as error:
        config_from_hf(MIXTRAL | change, name="mine")
    for word in ["'mine'", *words]:
        assert word in str(error.value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_a_checkpoint_knows_where_its_weights_are(folder):
    assert checkpoint(folder).path == folder
    assert checkpoint(str(folder)).name == folder.name


def test_a_folder_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json; give the folder"):
        checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "5", "null"])
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
