"""GGUF files: every byte is an operation's, sizes follow from metadata and shapes, damage is one clear error."""

import shutil
import sys
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader

import workbench as wb
from tests.builders import enough_experts, small_machine, tiny_scenario
from tests.damage import DAMAGES
from tests.gguf_files import DEEPSEEK, FILES, HIDDEN, SIZES, WIDTH, grouped, mixtral, mixture, network, outside, write
from tests.systems import PIPELINES, STREAMED
from workbench.core.errors import CheckpointError, EngineError
from workbench.models import LayerKind, checkpoint, model, models
from workbench.models.formats import with_formats
from workbench.models.gguf import read_gguf
from workbench.models.gguf.contents import described
from workbench.models.gguf.header import Header, Tensor
from workbench.models.rope import Rope
from workbench.perfmodels import bound
from workbench.pipeline import gpu
from workbench.scenario import Scenario
from workbench.schedules import LayerStreaming, Sequential, VSLPipe
from workbench.serving import fits
from workbench.simulate import simulate
from workbench.stages import attention, combine, experts, out_proj, qkv, route, shared_experts
from workbench.stages.ops import BUILT_IN

LAYER = grouped(0, "q4_k", "q4_k") | mixture(0, "q4_k", "q4_k")
WEIGHTED = ("qkv", "out_proj", "route", "experts", "shared_experts")
UNCOUNTED = {"gpt_oss": 3, "glm": 19, "phimoe": 5}
"""Numbers of tensors that no operation is charged for, beside the last norm alone: sinks, a layer for further tokens,
the head's bias and factors of RoPE."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return {name: make(folder / f"{name}.gguf") for name, make in FILES.items()}


def sizes_in(path):
    """Bytes by tensor, as the package reads them."""
    return {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize("name", FILES)
def test_every_byte_belongs_to_an_operation_or_is_listed_as_uncounted(files, name):
    contents = read_gguf(files[name]).contents
    sizes = sizes_in(files[name])
    tied = "output.weight" not in sizes
    layers = sum(stored.bytes for layer in contents.layers for stored in layer.values())
    ends = contents.embed.bytes + (0 if tied else contents.head.bytes)
    assert layers + ends + sum(contents.uncounted.values()) == sum(sizes.values())
    assert len(contents.uncounted) == UNCOUNTED.get(name, 1)
    assert all(sizes[tensor] == size for tensor, size in contents.uncounted.items())


@pytest.mark.parametrize("name", FILES)
def test_operations_have_the_bytes_of_their_tensors_in_every_layer(files, name):
    found = read_gguf(files[name])
    whole = model(found.config, name=name)
    for layer, (kind, formats) in enumerate(zip(whole.layer_kinds, found.formats(whole), strict=True)):
        alike = whole.of_kind(kind)
        each = dict(formats)
        for op in WEIGHTED:
            stored = found.contents.layers[layer].get(op)
            kept = 4 * BUILT_IN[op].kept(alike) if BUILT_IN[op].kept else 0
            size = kept + BUILT_IN[op].elements(alike) * each.get(op, 0)
            assert size == pytest.approx(stored.bytes if stored else 0, abs=1e-3)


def test_the_bits_of_a_layer_are_those_of_its_tensors(files):
    """By hand: Q4_K has 144 bytes per 256 weights, Q6_K 210."""
    first, second = read_gguf(files["mixtral"]).contents.layers
    matrix = HIDDEN * WIDTH * 4 // 256
    assert first["experts"].bytes == (2 * 144 + 210) * matrix
    assert second["experts"].bytes == 3 * 144 * matrix
    latent = read_gguf(files["deepseek"]).contents.layers[1]
    assert latent["out_proj"].bytes == 2 * 256 * 256 // 256 * 176


def test_a_joint_expansion_is_parted_between_keys_and_values(files):
    """Half of the rows of 64 + 64 dims per head are keys'; with Q6_K."""
    layer = read_gguf(files["old_deepseek"]).contents.layers[0]
    half = 4 * 64 * 256 // 256 * 210
    output = 256 * 256 // 256 * 144
    assert layer["out_proj"].bytes == half + output


EXPECTED = {
    "mixtral": {"architecture": "MixtralForCausalLM", "head_dim": 64, "moe_intermediate_size": 256},
    "old_mixtral": {"moe_intermediate_size": 256},
    "qwen3moe": {"architecture": "Qwen3MoeForCausalLM", "tie_word_embeddings": True, "vocab_size": 320},
    "deepseek": {
        "architecture": "DeepseekV3ForCausalLM",
        "first_k_dense_replace": 1,
        "intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "routed_scaling_factor": 2.5,
    },
    "old_deepseek": {"architecture": "DeepseekV2ForCausalLM", "q_lora_rank": None, "qk_nope_head_dim": 64},
    "gpt_oss": {"sliding_window": 128, "windowed_layers": 1, "attention_bias": True},
    "dbrx": {"architecture": "DbrxForCausalLM", "clip_qkv": 8.0, "num_key_value_heads": 2},
    "ernie": {"first_k_dense_replace": 1, "shared_expert_intermediate_size": 512},
    "llama4": {"intermediate_size": 512, "shared_expert_intermediate_size": 256, "windowed_layers": 0},
    "minimax": {"architecture": None, "routed_scaling_factor": 1.0},
    "phimoe": {"lm_head_bias": True, "attention_bias": True, "windowed_layers": 0},
    "qwen2moe": {"shared_expert_intermediate_size": 512, "rope": Rope("yarn", factor=4.0, trained=256)},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 6.0, "shared_expert_intermediate_size": 256},
    "glm": {"num_hidden_layers": 2, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_sizes_follow_from_metadata_and_shapes(files, name):
    found = model(read_gguf(files[name]).config, name=name)
    assert {key: getattr(found, key) for key in EXPECTED[name]} == EXPECTED[name]
    assert (found.hidden_size, found.num_local_experts, found.num_experts_per_tok) == (256, 4, 2)


def test_qwen3_30b_in_q4_k_m_has_its_published_size():
    """qwen3-coder-30b-a3b-instruct-q4_k_m.gguf has 18.6 GB (huggingface.co, seen 2026-11-26).

    Values and down projections are in Q6_K in the first and last eighth of the layers, and in every third between
    (general knowledge).
    """
    sizes = models["qwen3-30b-a3b"]
    hidden = sizes.hidden_size
    experts = sizes.num_local_experts
    table = {"f32": 4, "q4_k": 144 / 256, "q6_k": 210 / 256}
    shapes = {"token_embd.weight": ((hidden, sizes.vocab_size), "q4_k")}
    shapes |= {"output.weight": ((hidden, sizes.vocab_size), "q6_k"), "output_norm.weight": ((hidden,), "f32")}
    for layer in range(48):
        more = "q6_k" if layer < 6 or layer >= 42 or (layer - 6) % 3 == 2 else "q4_k"
        inner = {
            "attn_norm": ((hidden,), "f32"),
            "attn_q": ((hidden, sizes.q_size), "q4_k"),
            "attn_k": ((hidden, sizes.kv_size), "q4_k"),
            "attn_v": ((hidden, sizes.kv_size), more),
            "attn_q_norm": ((sizes.head_dim,), "f32"),
            "attn_k_norm": ((sizes.head_dim,), "f32"),
            "attn_output": ((sizes.q_size, hidden), "q4_k"),
            "ffn_norm": ((hidden,), "f32"),
            "ffn_gate_inp": ((hidden, experts), "f32"),
            "ffn_gate_exps": ((hidden, sizes.expert_width, experts), "q4_k"),
            "ffn_up_exps": ((hidden, sizes.expert_width, experts), "q4_k"),
            "ffn_down_exps": ((sizes.expert_width, hidden, experts), more),
        }
        shapes |= {f"blk.{layer}.{name}.weight": each for name, each in inner.items()}
    tensors = {name: Tensor(name, shape, round(prod(shape) * table[kind])) for name, (shape, kind) in shapes.items()}
    metadata = {
        **SIZES,
        "block_count": 48,
        "embedding_length": hidden,
        "attention.head_count": sizes.num_attention_heads,
        "attention.head_count_kv": sizes.num_key_value_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "expert_count": experts,
        "expert_used_count": sizes.num_experts_per_tok,
    }
    values = {"general.architecture": "qwen3moe", **{f"qwen3moe.{key}": value for key, value in metadata.items()}}
    found = described(Header("qwen3", values, tensors))
    whole = with_formats(model(found.config), found.formats(model(found.config)))
    assert (whole.params, whole.active_params) == (sizes.params, sizes.active_params)
    assert len({kind.own.formats for kind in whole.layer_kinds}) == 2
    assert whole.weight_bytes / 1e9 == pytest.approx(18.6, abs=0.05)
    assert whole.weight_bytes == pytest.approx(sum(tensor.bytes for tensor in tensors.values()), rel=1e-4)


def test_windows_alternate_in_gpt_oss(files):
    assert model(read_gguf(files["gpt_oss"]).config).layer_kinds == (LayerKind.WINDOWED, LayerKind.FULL)


def test_files_of_machines_with_the_other_byte_order_are_read(files, tmp_path):
    swapped = mixtral(tmp_path / "mixtral.gguf", endianess=GGUFEndian.BIG)
    assert read_gguf(swapped) == read_gguf(files["mixtral"])


@pytest.mark.parametrize("part", [1, 3])
def test_parts_of_a_model_are_read_together(files, tmp_path, part):
    whole = read_gguf(files["mixtral"])
    mixtral(tmp_path / "mixtral.gguf", split_max_tensors=9)
    parts = sorted(file.name for file in tmp_path.iterdir())
    assert parts == [f"mixtral-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    found = read_gguf(tmp_path / parts[part - 1])
    assert found.contents == whole.contents
    assert (found.name, found.config) == ("mixtral", whole.config)
    (tmp_path / parts[1]).unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 parts, of which mixtral-00002-of-00003\.gguf is missing"):
        read_gguf(tmp_path / parts[0])


def test_a_part_under_another_name_is_refused(files, tmp_path):
    mixtral(tmp_path / "mixtral.gguf", split_max_tensors=9)
    alone = shutil.copy(tmp_path / "mixtral-00001-of-00003.gguf", tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts by its metadata, and of 1 by its name"):
        read_gguf(alone)


# ---------------------------------------------------------------------------------------------------------- prices


@pytest.mark.parametrize("name", FILES)
def test_a_described_model_has_the_bytes_of_the_file_in_every_layer(files, name):
    """Of every operation to the byte, by the number formats of a scenario with this model."""
    contents = read_gguf(files[name]).contents
    whole = model(files[name])
    precision = tiny_scenario(model=whole, pipeline=PIPELINES["all_gpu"]).precision
    for kind, stored in zip(whole.layer_kinds, contents.layers, strict=True):
        alike = whole.of_kind(kind)
        for op in WEIGHTED:
            present = BUILT_IN[op].is_in(whole, kind)
            size = BUILT_IN[op].weight_bytes(alike, precision) if present else 0.0
            assert size == pytest.approx(stored[op].bytes if op in stored else 0, abs=1e-3)


@pytest.mark.parametrize("name", FILES)
def test_the_ledger_has_the_bytes_of_the_file(files, name):
    """Beside the operations' bytes: the last norm and the head's bias in bf16, and the sinks in fp32."""
    contents = read_gguf(files[name]).contents
    whole = model(files[name])
    scenario = tiny_scenario(model=whole, pipeline=with_shared(whole))
    layers = sum(stored.bytes for layer in contents.layers for stored in layer.values())
    ends = contents.embed.bytes + (0 if whole.tie_word_embeddings else contents.head.bytes)
    sinks = sum(size for tensor, size in contents.uncounted.items() if "sinks" in tensor)
    last = 2 * (whole.norm_size + (whole.vocab_size if whole.lm_head_bias else 0))
    assert fits(scenario, Sequential()).gpu["weights"] == pytest.approx(layers + ends + sinks + last, abs=1e-3)


def with_shared(whole):
    """Everything on the GPU, with shared experts or dense networks if the model has any."""
    others = (shared_experts,) if whole.unrouted_params else ()
    return gpu(qkv, *attention, out_proj, route, experts, *others, combine)


def test_fewer_bits_are_fewer_seconds_on_the_link(files):
    """Streaming every layer takes the time of its bytes: of the experts, 5.19 and 4.5 bits per weight, and not 16."""
    whole = model(files["mixtral"])
    plain = replace(whole, formats=(), layers=())
    slow = small_machine(h2d=1e5)
    seconds = []
    for each in (whole, plain):
        scenario = tiny_scenario(model=each, pipeline=STREAMED, machine=slow)
        at_least = bound(scenario, LayerStreaming()).seconds
        simulated = simulate(scenario, LayerStreaming()).seconds
        assert at_least <= simulated
        seconds.append(simulated)
    experts_alone = (5.1875 + 4.5) / 2 / 16
    assert experts_alone < seconds[0] / seconds[1] < 1.05 * experts_alone


@pytest.mark.parametrize("name", PIPELINES)
def test_layers_of_several_formats_keep_the_law_of_time(files, name):
    whole = enough_experts(model(files["qwen3moe"]), PIPELINES[name])
    scenario = tiny_scenario([8, 16, 5], [4, 3, 6], model=whole, pipeline=PIPELINES[name])
    assert bound(scenario, Sequential()).seconds <= simulate(scenario, Sequential()).seconds


def test_a_scenario_with_it_is_saved_and_loaded(files, tmp_path):
    scenario = tiny_scenario(model=model(files["qwen3moe"]), pipeline=PIPELINES["all_gpu"])
    scenario.save(tmp_path / "scenario.json")
    assert Scenario.load(tmp_path / "scenario.json").model == scenario.model
    assert scenario.weight_formats == "4.87 bits on average"


def test_weights_in_another_precision_have_none_of_the_files_formats(files):
    whole = model(files["mixtral"])
    scenario = tiny_scenario(model=whole, pipeline=PIPELINES["all_gpu"])
    wider = scenario.on(memory=replace(scenario.memory, weights="bf16"))
    elements = whole.params + whole.vectors
    assert fits(wider, Sequential()).gpu["weights"] == pytest.approx(2 * elements)


def test_run_refuses_it(files):
    whole = model(files["mixtral"])
    with pytest.raises(EngineError, match=r"'mixtral' has no weights here; give model=wb\.checkpoint"):
        wb.run(tiny_scenario(model=whole), VSLPipe())
    with pytest.raises(CheckpointError, match=r"mixtral\.gguf' is a GGUF file, which run does not execute"):
        checkpoint(files["mixtral"])


def test_it_may_have_another_name(files):
    assert model(files["mixtral"]).name == "mixtral"
    assert model(str(files["mixtral"]), name="mine").name == "mine"


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_error(files, tmp_path, damage):
    path = shutil.copy(files["mixtral"], tmp_path / "spoilt.gguf")
    DAMAGES[damage](path)
    if damage == "a bit flipped":  # in the weights, which are not read
        assert read_gguf(path).contents == read_gguf(files["mixtral"]).contents
        return
    with pytest.raises(CheckpointError, match=r"spoilt\.gguf"):
        read_gguf(path)


def test_any_byte_of_the_header_may_be_wrong(files, tmp_path):
    """No error but ours, and no endless loop: also where a list seems to be longer than the file."""
    raw = files["old_mixtral"].read_bytes()
    start = GGUFReader(files["old_mixtral"]).data_offset
    path = tmp_path / "spoilt.gguf"
    generator = np.random.default_rng(3)
    outcomes = set()
    for place in generator.integers(0, start, 100):
        spoilt = bytearray(raw)
        spoilt[place] = int(generator.integers(0, 256))
        path.write_bytes(spoilt)
        try:
            read_and_format(path)
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_list_longer_than_the_file_is_refused_at_once(files, tmp_path):
    raw = bytearray(files["mixtral"].read_bytes())
    length = raw.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    raw[length : length + 8] = (2**60).to_bytes(8, "little")
    path = tmp_path / "long.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="it is cut off"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("architecture", "changed", "told"),
    [
        ("qwen3next", {}, r"of the architecture 'qwen3next', which is not understood; use one of dbrx, deepseek2"),
        ("llama", {"block_count": "three"}, r"has llama\.block_count='three'; give a number"),
        ("llama", {"block_count": 99}, r"has llama\.block_count=99; give a number of layers that the file has"),
        ("llama", {"nextn_predict_layers": 1}, r"has llama\.block_count=1; give a number of layers that"),
        ("llama", {"attention.head_count": [2, 4]}, r"attention\.head_count=\[2, 4\]; give one number for all layers"),
        ("llama", {"attention.value_length": 32}, r"attention\.value_length=32; give as many dims as keys have, 64"),
        ("llama", {"attention.head_count_kv": 4}, "layer 0 of 'small' has 131072 weights for qkv, and by the sizes"),
        ("llama", {"expert_used_count": 0}, "describe no model: .* needs positive integers for num_experts_per_tok"),
        ("minimax-m2", {"attention.sliding_window": 64}, r"attention\.sliding_window_pattern=None; give a flag"),
        ("deepseek2", {**DEEPSEEK, "block_count": 1, "rope.dimension_count": 96}, "fewer dims than keys have, 96"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, architecture, changed, told):
    tensors = outside() | LAYER
    path = write(tmp_path / "small.gguf", architecture, {**SIZES, "block_count": 1, **changed}, tensors)
    with pytest.raises(CheckpointError, match=told):
        model(path)


def read_and_format(path):
    found = read_gguf(path)
    return found.formats(model(found.config, name=found.name))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("blk.0.ssm_in.weight", r"has the tensor blk\.0\.ssm_in\.weight, which is not understood"),
        ("v.patch_embd.weight", r"has the tensor v\.patch_embd\.weight, which is not understood"),
    ],
)
def test_an_unknown_tensor_is_refused_by_name(tmp_path, name, told):
    tensors = outside() | LAYER | {name: ((HIDDEN, 4), "f32")}
    path = write(tmp_path / "small.gguf", "llama", {**SIZES, "block_count": 1}, tensors)
    with pytest.raises(CheckpointError, match=told):
        read_gguf(path)


def test_a_layer_without_its_norm_is_refused(tmp_path):
    """In a dense layer, the norm is all that belongs to the router."""
    tensors = outside() | grouped(0, "q4_k", "q4_k") | network(0, "", "q4_k", WIDTH)
    tensors |= grouped(1, "q4_k", "q4_k") | mixture(1, "q4_k", "q4_k")
    del tensors["blk.0.ffn_norm.weight"]
    path = write(tmp_path / "small.gguf", "llama", {**SIZES, "block_count": 2}, tensors)
    with pytest.raises(CheckpointError, match="layer 0 of 'small' has too few bytes for route; convert the model anew"):
        model(path)


def test_a_model_without_experts_or_embedding_is_refused(tmp_path):
    dense = outside() | grouped(0, "q4_k", "q4_k")
    path = write(tmp_path / "dense.gguf", "llama", {**SIZES, "block_count": 1}, dense)
    with pytest.raises(CheckpointError, match="'dense' has no experts; give a mixture of experts"):
        read_gguf(path)
    path = write(tmp_path / "layers.gguf", "llama", {**SIZES, "block_count": 1}, LAYER)
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd\.weight; give the file of a whole model"):
        read_gguf(path)


def test_without_the_package_the_error_names_the_extra(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "workbench.models.gguf.reader", raising=False)
    with pytest.raises(CheckpointError, match=r"package gguf, which is missing; pip install 'moe-workbench\[models\]'"):
        read_gguf(files["mixtral"])
