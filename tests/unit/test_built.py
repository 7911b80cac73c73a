"""Models that transformers builds on the meta device: their weights, their layers, and those that are refused."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import workbench as wb
from tests.model_types import PATH, survey, table
from workbench.core.errors import CheckpointError
from workbench.models.built import built
from workbench.models.families import FAMILIES
from workbench.pipeline import cpu, gpu, load, offload
from workbench.schedules import Sequential
from workbench.stages import attention, combine, experts, out_proj, qkv, route

ON_CPU = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
REAL = {
    "qwen3_next": {},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "jamba": {},
    "kimi_linear": {},
    "llama4_text": {},
    "mimo_v2_flash": {},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe"] * 8 + ["full_attention", "moe"] * 2},
}
"""Types of models with unlike layers, and what their default configs lack."""


def model_of(kind, **changes):
    config = transformers.AutoConfig.for_model(kind, **changes).to_dict()
    return wb.model({**config, "dtype": "bfloat16"}, name=kind)


def test_at_least_95_of_100_types_are_understood_and_none_wrongly():
    found = survey()
    accepted = [each for each in found if not each.refused]
    assert len(accepted) >= 0.95 * len(found) >= 40
    wrong = {
        each.model_type: (each.params / each.built, each.active_params / each.active)
        for each in accepted
        if abs(each.params / each.built - 1) > 0.005 or abs(each.active_params / each.active - 1) > 0.01
    }
    assert not wrong


@pytest.mark.parametrize(
    ("kind", "words"), [("jetmoe", "experts in its attention"), ("longcat_flash", r"layers with \[512, 768\] experts")]
)
def test_what_is_not_understood_is_named(kind, words):
    refused = {each.model_type: each.refused for each in survey() if each.refused}
    assert set(refused) == {"jetmoe", "longcat_flash"}
    with pytest.raises(CheckpointError, match=words):
        model_of(kind)


def test_the_table_of_the_docs_is_that_of_the_survey():
    kept = json.loads(PATH.read_text(encoding="utf-8"))
    if kept["transformers"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {kept['transformers']}")
    assert kept == json.loads(json.dumps(table())), "write it anew: python -m tests.model_types"


@pytest.mark.parametrize("kind", REAL)
def test_bound_and_simulation_take_every_kind_of_layers(kind):
    model = model_of(kind, **REAL[kind])
    cache = 200 * model.kv_bytes_per_token("bf16")
    scenario = wb.Scenario(
        ON_CPU,
        model=model,
        machine=wb.machine("h200-sxm", "epyc-9654", memory="2TB"),
        memory=wb.Memory(kv_capacity=cache),
        workload=wb.workloads["mtbench"].sample(requests=1, output_len=8, seed=1),
        scheduler=wb.ResourceAware(),
    )
    bound = wb.bound(scenario, Sequential())
    simulated = wb.simulate(scenario, Sequential())
    assert 0 < simulated.gen_tok_s <= bound.gen_tok_s * (1 + 1e-9)


def test_jamba_is_as_large_as_published():
    """52 B parameters of which 12 B are active, 4 of 32 layers with attention (Jamba, arXiv 2403.19887)."""
    model = model_of("jamba")
    assert round(model.params / 1e9) == 52
    assert round(model.active_params / 1e9) == 12
    assert sum(kind.own.recurrence is None for kind in model.layer_kinds) == 4
    assert model.kv_bytes_per_token("bf16") == 4 * 2 * 8 * 128 * 2


def test_sparse_attention_reads_the_entries_that_its_paper_tells():
    """DeepSeek-V3.2: 2048 entries of 576, chosen by 64 heads of 128 that score a key of 128 of every token."""
    model = model_of("deepseek_v32")
    sparse = model.layer_kinds[0].own.sparse
    assert (sparse.top, sparse.keys, sparse.macs) == (2048, 128, 64 * 128)
    assert float(model.attended(100_000)) == 2048
    assert model.kv_bytes_per_token("bf16") == 61 * (576 + 128) * 2


def test_the_delta_rule_keeps_a_matrix_for_each_head():
    """Qwen3-Next: 32 heads of 128 x 128 and 3 earlier inputs of 8192 convolved channels, in 36 of 48 layers."""
    model = model_of("qwen3_next")
    states = [kind.own.recurrence for kind in model.layer_kinds if kind.own.recurrence]
    assert len(states) == 36
    assert {one.state for one in states} == {32 * 128 * 128 + 3 * 8192}
    assert {one.macs for one in states} == {3.5 * 32 * 128 * 128 + 4 * 8192}


def test_states_are_as_large_as_in_the_modeling_code():
    """Elements of each type's state: of heads or channels, and of the last inputs of its convolutions."""
    states = {
        "jamba": (8192 * 16 + 3 * 8192, 2.5 * 8192 * 16 + 4 * 8192),
        "nemotron_h": (128 * 64 * 128 + 3 * 10240, 2.5 * 128 * 64 * 128 + 4 * 10240),
        "kimi_linear": (32 * 128 * 128 + 3 * 12288, 3.5 * 32 * 128 * 128 + 4 * 12288),
        "minimax": (32 * 128 * 128, 2.5 * 32 * 128 * 128),
    }
    for kind, (state, macs) in states.items():
        kinds = model_of(kind, **REAL.get(kind, {})).layer_kinds
        found = {own.recurrence for own in (each.own for each in kinds) if own.recurrence and own.recurrence.state}
        assert {(one.state, one.macs) for one in found} == {(state, macs)}, kind


def test_compressed_attention_reads_summaries_and_a_window():
    """DeepSeek-V4: one key of 512 for 64 heads, entries of 4 tokens of which 512 are read, or all entries of 128."""
    kinds = set(model_of("deepseek_v4").layer_kinds)
    assert {(own.num_attention_heads, own.kv_lora_rank, own.head_dim) for own in (each.own for each in kinds)} == {
        (64, 512, 512)
    }
    found = {(one.top, one.ratio, one.window, one.keys, one.macs) for one in (each.own.sparse for each in kinds)}
    assert found == {(512, 4, 128, 128, 64 * 128), (0, 128, 128, 0, 0)}


def test_layers_may_have_unlike_heads_and_windows():
    """MiMo-V2-Flash: keys of 192 and values of 128; 4 of both in 9 full layers, 8 in 39 with a window of 128 + 1."""
    kinds = model_of("mimo_v2_flash").layer_kinds
    sizes = {
        (own.num_attention_heads, own.num_key_value_heads, own.head_dim, own.v_head_dim, own.sliding_window)
        for own in (each.own for each in kinds)
    }
    assert sizes == {(64, 4, 192, 128, None), (64, 8, 192, 128, 129)}
    assert sum(each.windowed for each in kinds) == 39


def test_a_layer_without_its_own_index_takes_the_choice_of_another():
    kinds = model_of("hy_v4").layer_kinds
    assert {(each.own.sparse.top, each.own.sparse.keys) for each in kinds} == {(2048, 128), (2048, 0)}


def test_a_window_of_the_config_counts_where_modules_have_none():
    assert model_of("minimax", sliding_window=100).windowed_layers == 16


def test_layers_of_llama_4_without_experts_are_told_by_their_list():
    model = model_of("llama4_text", moe_layers=list(range(1, 48, 2)))
    assert (model.dense_layers, round(model.params / 1e9)) == (24, 62)


def test_a_list_of_unquantised_modules_is_refused_for_types_of_other_names():
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config = transformers.AutoConfig.for_model("qwen3_next").to_dict() | {"dtype": "bfloat16"}
    found = wb.model(config | {"quantization_config": {**quantised, "modules_to_not_convert": ["lm_head"]}})
    assert found.expert_bytes < 0.6
    with pytest.raises(CheckpointError, match="leaves 'linear_attn' unquantised"):
        wb.model(config | {"quantization_config": {**quantised, "modules_to_not_convert": ["linear_attn"]}})


def test_attention_in_chunks_is_limited_to_a_chunk():
    """Llama 4: chunks of 8192 tokens in three of four layers, by the key table and as transformers builds it."""
    config = transformers.AutoConfig.for_model("llama4_text").to_dict()
    by_key_table = wb.model({**config, "dtype": "bfloat16"})
    by_tensors = built(config, "llama4")
    for model in (by_key_table, by_tensors):
        assert model.windowed_layers == 36
        assert float(model.attended(10_000)) == pytest.approx((3 * (10_000 - 8192) + 10_000) / 4)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe", "glm4_moe", "ernie4_5_moe"])
def test_both_ways_find_the_same_model(kind):
    config = transformers.AutoConfig.for_model(kind).to_dict()
    light = wb.model({**config, "dtype": "bfloat16"})
    heavy = built(config, kind)
    for size in ("num_hidden_layers", "num_local_experts", "num_experts_per_tok", "dense_layers", "windowed_layers"):
        assert getattr(light, size) == getattr(heavy, size)
    for size in ("kv_elements", "pair_macs", "entry_macs", "attention_params", "unrouted_params", "active_params"):
        assert getattr(light, size) == pytest.approx(getattr(heavy, size), rel=1e-3)
    assert light.params + light.vectors == pytest.approx(heavy.params, rel=5e-3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma4_text"}, "has no routed experts"),
        ({"model_type": "minimax", "attn_type_list": [0, 1] * 16}, "give layer_types in its place"),
        ({"model_type": "no_such_type"}, "neither the key table nor transformers"),
        ({"model_type": "qwen3_next", "num_hidden_layers": "many"}, "the config of 'qwen3_next'|cannot build"),
    ],
)
def test_a_config_that_makes_no_mixture_is_refused(config, words):
    with pytest.raises(CheckpointError, match=words):
        wb.model({"dtype": "bfloat16", **config})


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'moe-workbench\[models\]'"):
        wb.model({"model_type": "qwen3_next", "dtype": "bfloat16"})


def test_a_name_on_the_hub_is_read_from_what_transformers_has_kept(tmp_path):
    """A model that was fetched before, without a connection: the key table reads its config."""
    folder = tmp_path / "hub" / "models--some--mixture"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    config = transformers.AutoConfig.for_model("mixtral").to_dict()
    (snapshot / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "architectures": None}))
    code = "import workbench as wb; print(wb.model('some/mixture')); wb.model('some/other')"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root, check=False
    )
    assert done.stdout.startswith("mixture: 32 layers"), done.stderr
    assert "the Hugging Face hub gives no config of 'some/other'" in done.stderr


TYPES = {
    "mixtral-8x7b": "mixtral",
    "mixtral-8x22b": "mixtral",
    "deepseek-v2-lite": "deepseek_v2",
    "deepseek-v2": "deepseek_v2",
    "deepseek-v3": "deepseek_v3",
    "deepseek-r1": "deepseek_v3",
    "qwen1.5-moe-a2.7b": "qwen2_moe",
    "qwen2-57b-a14b": "qwen2_moe",
    "qwen3-30b-a3b": "qwen3_moe",
    "qwen3-235b-a22b": "qwen3_moe",
    "gpt-oss-20b": "gpt_oss",
    "gpt-oss-120b": "gpt_oss",
    "phi-3.5-moe": "phimoe",
    "moonlight-16b-a3b": "deepseek_v3",
    "olmoe-1b-7b": "olmoe",
    "llama-4-scout-17b-16e": "llama4_text",
    "glm-4.5-air": "glm4_moe",
    "kimi-k2": "deepseek_v3",
}
UNBUILT = {"dbrx", "grok-1", "snowflake-arctic"}
"""Models of the catalogue that the installed transformers does not build: DBRX' config has no base of RoPE there, and
it has no Grok and no Arctic."""


def as_transformers_calls_it(name):
    """The sizes of an entry of the catalogue under the keys of its type in transformers."""
    entry = tomllib.loads((PATH.parents[1] / "catalogue" / "models.toml").read_text(encoding="utf-8"))[name]
    entry = {key: value for key, value in entry.items() if key not in ("source", "parameters", "layer_types")}
    kind = TYPES[name]
    family = FAMILIES[kind]
    shared = entry.pop("shared_expert_intermediate_size", None)
    config = {family.keys.get(key, key): value for key, value in entry.items()}
    if kind == "qwen2_moe":
        config["shared_expert_intermediate_size"] = shared
    elif shared and not family.shared_in_code:
        config[family.keys.get("n_shared_experts", "n_shared_experts")] = shared // entry["moe_intermediate_size"]
    if kind == "qwen3_moe":
        config["moe_intermediate_size"] = config["intermediate_size"]
    if kind == "llama4_text":
        config["intermediate_size"] = config.pop("moe_intermediate_size")
    if kind.startswith("deepseek") and "q_lora_rank" not in config:
        config["q_lora_rank"] = None
    return {"model_type": kind, **config}


@pytest.mark.parametrize("name", sorted(set(wb.models) - UNBUILT))
def test_the_catalogue_is_as_transformers_builds_it(name):
    light = wb.models[name]
    heavy = built(as_transformers_calls_it(name), name)
    assert light.params + light.vectors == pytest.approx(heavy.params, rel=5e-3)
    assert light.active_params == pytest.approx(heavy.active_params, rel=5e-3)
    assert light.kv_elements == heavy.kv_elements
    assert light.dense_layers == heavy.dense_layers
    assert light.windowed_layers == heavy.windowed_layers


def test_only_three_models_of_the_catalogue_are_not_built():
    assert set(wb.models) - set(TYPES) == UNBUILT
    assert not {"grok", "grok1", "arctic", "snowflake_arctic"} & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
