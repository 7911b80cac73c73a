"""GGUF files: every byte is an operation's, sizes follow from metadata and shapes, damage is one clear error."""

import shutil
import sys

import numpy as np
import pytest
from gguf import GGUFReader

from tests.damage import DAMAGES
from tests.gguf_files import DEEPSEEK, FILES, HIDDEN, SIZES, WIDTH, grouped, mixtral, mixture, outside, write
from workbench.core.errors import CheckpointError
from workbench.models import LayerKind, model
from workbench.models.gguf import read_gguf
from workbench.stages.ops import BUILT_IN

LAYER = grouped(0, "q4_k", "q4_k") | mixture(0, "q4_k", "q4_k")
WEIGHTED = ("qkv", "out_proj", "route", "experts", "shared_experts")
UNCOUNTED = {"mixtral": 1, "old_mixtral": 1, "qwen3moe": 1, "deepseek": 1, "old_deepseek": 1, "gpt_oss": 3, "glm": 19}
"""Numbers of tensors that no operation is charged for: the last norm, two sinks, a layer for further tokens."""


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
    assert len(contents.uncounted) == UNCOUNTED[name]
    assert all(sizes[tensor] == size for tensor, size in contents.uncounted.items())


@pytest.mark.parametrize("name", FILES)
def test_operations_have_the_bytes_of_their_tensors_in_every_layer(files, name):
    found = read_gguf(files[name])
    described = model(found.config, name=name)
    for layer, (kind, formats) in enumerate(zip(described.layer_kinds, found.formats(described), strict=True)):
        alike = described.of_kind(kind)
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
    "glm": {"num_hidden_layers": 2, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_sizes_follow_from_metadata_and_shapes(files, name):
    found = model(read_gguf(files[name]).config, name=name)
    assert {key: getattr(found, key) for key in EXPECTED[name]} == EXPECTED[name]
    assert (found.hidden_size, found.num_local_experts, found.num_experts_per_tok) == (256, 4, 2)


def test_windows_alternate_in_gpt_oss(files):
    assert model(read_gguf(files["gpt_oss"]).config).layer_kinds == (LayerKind.WINDOWED, LayerKind.FULL)


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
        ("minimax-m2", {"attention.sliding_window": 64}, r"attention\.sliding_window_pattern=None; give a flag"),
        ("deepseek2", {**DEEPSEEK, "block_count": 1, "rope.dimension_count": 96}, "fewer dims than keys have, 96"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, architecture, changed, told):
    tensors = outside() | LAYER
    path = write(tmp_path / "small.gguf", architecture, {**SIZES, "block_count": 1, **changed}, tensors)
    with pytest.raises(CheckpointError, match=told):
        read_and_format(path)


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
