"""`fused_moe` against its float64 oracle, on every code path and in every format."""

import importlib
import os
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_cpu import (
    CodePath,
    Format,
    PackedExperts,
    experts_by_node,
    experts_in_place,
    experts_of_blocks,
    fused_moe,
    fused_moe_reference,
    fused_moe_work,
    pack_experts,
    pack_int4,
    pack_mxfp4,
)
from kernels_cpu.experts import tasks as expert_tasks
from kernels_cpu.experts.tasks import by_matrices, columns_of, terms_of
from kernels_cpu.experts.weights import aligned, unpacked
from kernels_cpu.machine.features import features
from kernels_triton import mxfp4_weights
from tests.examples import examples

module = importlib.import_module("kernels_cpu.experts.fused_moe")
# (M, F): whole groups and blocks, what fills neither, and fewer than one of each
SHAPES = [(256, 128), (136, 200), (20, 13)]
NAMES = [format.name.lower() for format in Format]


def layer(experts: int, shape: tuple[int, int], seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    model, inner = shape
    gate_up = rng.standard_normal((experts, 2 * inner, model), dtype=np.float32)
    return gate_up, rng.standard_normal((experts, model, inner), dtype=np.float32)


def batch(tokens: int, experts: int, chosen: int, width: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((tokens, width), dtype=np.float32)
    ids = np.array([rng.permutation(experts)[:chosen] for _ in range(tokens)], np.int64).reshape(tokens, chosen)
    return h, ids, rng.random((tokens, chosen), dtype=np.float32)


def error(found: Any, want: Any) -> float:
    return float(np.linalg.norm(found - want) / max(1e-30, np.linalg.norm(want)))


def bound(experts: PackedExperts, path: CodePath, ids: Any) -> float:
    if experts.format.scaled:
        return 2e-2
    most, terms = np.bincount(ids.ravel(), minlength=1).max(), terms_of(experts, path, exact=False)
    return 5e-3 if terms == 1 and most > 4 else 1e-6


def in_bytes(x: Any, group: int) -> Any:
    """Activations as the kernels round them for INT8 and INT4: multiples of each group's largest magnitude over 127."""
    full = np.zeros(-(-len(x) // group) * group, np.float32)
    full[: len(x)] = x
    grouped = full.reshape(-1, group)
    scales = np.abs(grouped).max(axis=1, keepdims=True) / np.float32(127)
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return (np.rint(grouped * factors).astype(float) * scales).ravel()[: len(x)]


def oracle(h: Any, packed: PackedExperts, ids: Any, weights: Any) -> Any:
    """The reference, with activations rounded to bytes where the format asks for it."""
    if not packed.format.scaled:
        return fused_moe_reference(h, packed, ids, weights)
    gate_ups, downs = (unpacked(part, range(len(packed))) for part in (packed.gate_up, packed.down))
    out = np.zeros(h.shape)
    for t, j in np.ndindex(*ids.shape):
        gate, up = np.split(gate_ups[ids[t, j]] @ in_bytes(h[t], packed.gate_up.group), 2)
        inner = gate * 0.5 * (1 + np.tanh(gate / 2)) * up
        out[t] += weights[t, j] * (downs[ids[t, j]] @ in_bytes(inner, packed.down.group))
    return out


@examples(80)
@given(
    st.integers(0, 16), st.integers(1, 5), st.data(), st.sampled_from(SHAPES), st.sampled_from(NAMES),
    st.sampled_from(CodePath),
)  # fmt: skip
def test_equals_float64_with_any_tokens_per_expert(tokens, experts, data, shape, form, path):
    packed = pack_experts(*layer(experts, shape), format=form)
    h, ids, weights = batch(tokens, experts, data.draw(st.integers(1, experts)), shape[0], data.draw(st.integers(0, 9)))
    found = fused_moe(h, packed, ids, weights, path=path, threads=data.draw(st.integers(1, 3)))
    # half of what rounding alone may cost: a number of the inner row can still be rounded to its other neighbour
    limit = 1e-2 if packed.format.scaled else bound(packed, path, ids)
    assert error(found, oracle(h, packed, ids, weights)) < limit


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("by_node", [False, True])
def test_rows_in_bf16_give_the_sums_in_fp32_rounded_once(by_node, tokens, form):
    weights = layer(3, SHAPES[1])
    nodes = [{cpu} for cpu in sorted(os.sched_getaffinity(0))[:2]]
    packed = pack_experts(*weights, format=form)
    packed = experts_by_node(packed, nodes=nodes[: packed.pieces]) if by_node else packed
    h, ids, scales = batch(tokens, 3, 2, SHAPES[1][0])
    rows = torch.from_numpy(h).bfloat16()
    want = torch.from_numpy(fused_moe(rows.float().numpy(), packed, ids, scales)).bfloat16()
    out = torch.empty_like(rows)
    assert fused_moe(rows, packed, ids, scales, out=out) is out
    assert out.equal(want)
    found = fused_moe(rows.view(torch.uint16).numpy(), packed, ids, scales)
    np.testing.assert_array_equal(found, want.view(torch.uint16).numpy())


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 11, 13])
def test_every_number_of_tokens_has_its_code(path, form, tokens):
    packed = pack_experts(*layer(2, SHAPES[0]), format=form)
    h, ids, weights = batch(tokens, 1, 1, SHAPES[0][0])
    found = fused_moe(h, packed, ids + 1, weights, path=path)
    assert error(found, fused_moe_reference(h, packed, ids + 1, weights)) < bound(packed, path, ids)


@pytest.mark.skipif(not features().matrices, reason="a CPU without matrix registers")
@pytest.mark.parametrize("shape", [(256, 128), (256, 96), (160, 200)])
@pytest.mark.parametrize("tokens", [5, 16, 18, 19, 36, 37, 56, 64, 100])
def test_matrix_registers_round_activations_or_multiply_exactly_as_asked(tokens, shape, monkeypatch):
    packed = pack_experts(*layer(3, shape), format="bf16")
    h, ids, weights = batch(tokens, 1, 1, shape[0], seed=tokens)
    ids[: tokens // 8] = 1  # another expert with fewer; 5, 14, 16, 17, 32, 33, 49, 56 and 88 are left
    want = fused_moe_reference(h, packed, ids, weights)
    asked = fused_moe(h, packed, ids, weights, exact=True)
    assert error(asked, want) < 1e-6
    found = fused_moe(h, packed, ids, weights)
    fits = shape[1] % 32 == 0  # 200 columns of down do not
    assert by_matrices(packed, CodePath.AVX512) == fits
    assert np.array_equal(found, asked) == (not fits)
    assert error(found, want) < 5e-3
    monkeypatch.setattr(module, "_WORTH", 1)  # else one thread serves
    for kept in (1, 1 << 16):  # blocks of a task: one, or two with one left over
        monkeypatch.setattr(expert_tasks, "_KEPT", kept)
        np.testing.assert_array_equal(fused_moe(h, packed, ids, weights, exact=True, threads=2), asked)
        np.testing.assert_array_equal(fused_moe(h, packed, ids, weights, threads=2), found)


@pytest.mark.skipif(not features().matrices, reason="a CPU without matrix registers")
@pytest.mark.parametrize("form", ["int8", "int4", "uint4"])
@pytest.mark.parametrize(("group", "columns"), [(128, 64), (64, 64), (96, 32), (32, 32), (40, 0)])
@pytest.mark.parametrize("tokens", [6, 17, 64, 75, 150])
def test_matrix_registers_multiply_bytes_as_vectors_do(tokens, group, columns, form, monkeypatch):
    packed = pack_experts(*layer(3, (256, 200)), format=form, group=group)
    h, ids, weights = batch(tokens, 2, 1, 256, seed=tokens)
    ids[:5] = 1
    h[-1, 3] = np.inf
    monkeypatch.setattr(module, "_WORTH", 1)  # else one thread serves
    found = fused_moe(h, packed, ids, weights, threads=2)
    assert [columns_of(packed, path) for path in (CodePath.AVX512, CodePath.AVX2)] == [columns, 0]
    monkeypatch.setattr(module, "columns_of", lambda *_: 0)
    np.testing.assert_array_equal(found, fused_moe(h, packed, ids, weights, threads=2))
    assert np.isfinite(found[:-1]).all()
    assert error(found[:-1], oracle(h[:-1], packed, ids[:-1], weights[:-1])) < 1e-2


def plain(experts: int, shape: tuple[int, int]) -> tuple[Any, Any]:
    gate_up, down = layer(experts, shape)
    return torch.from_numpy(gate_up).bfloat16(), torch.from_numpy(down).bfloat16()


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 6, 7, 11, 13])
@pytest.mark.parametrize("shape", [(256, 128), (64, 32), (128, 224)])
def test_weights_in_place_give_what_packed_ones_give(path, tokens, shape):
    weights = plain(3, shape)
    here, packed = experts_in_place(*weights), pack_experts(*weights)
    for whole, part in ((here.gate_up, packed.gate_up), (here.down, packed.down)):
        np.testing.assert_array_equal(whole.words, part.words)
    h, ids, scales = batch(tokens, 3, 2, shape[0])
    found = fused_moe(h, here, ids, scales, path=path, threads=2)
    assert error(found, fused_moe_reference(h, packed, ids, scales)) < 1e-6
    np.testing.assert_array_equal(found, fused_moe(h, here, ids, scales, path=path, threads=1))


def test_weights_in_place_may_change_later():
    gate_up, down = plain(2, SHAPES[0])
    experts, (h, ids, weights) = experts_in_place(gate_up, down), batch(3, 2, 1, SHAPES[0][0])
    before = fused_moe(h, experts, ids, weights)
    down *= 2
    np.testing.assert_array_equal(fused_moe(h, experts, ids, weights), 2 * before)


ELSEWHERE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gate_up": lambda w: w.float()}, TypeError, "gate_up must be uint16"),
    ({"gate_up": lambda w: w[:0]}, ValueError, "gate_up must have an expert"),
    ({"down": lambda w: w[:1]}, ValueError, r"down must be \(2, 256, 128\), which gate_up asks for"),
    ({"gate_up": lambda w: w.mT.contiguous().mT}, ValueError, "gate_up must be C-contiguous .*: use pack_experts"),
    ({"gate_up": lambda w: w[:, :96], "down": lambda w: w[..., :48].contiguous()}, ValueError, "multiples of 64 rows"),
    ({"gate_up": lambda w: torch.cat((w.flatten(), w[0, 0]))[1 : w.numel() + 1].view(w.shape)}, ValueError, "4 bytes"),
]


@pytest.mark.parametrize("change, kind, message", ELSEWHERE)
def test_weights_that_cannot_be_read_in_place_are_named_with_their_mend(change, kind, message):
    case = dict(zip(("gate_up", "down"), plain(2, SHAPES[0]), strict=True))
    for name, make in change.items():
        case[name] = make(case[name])
    with pytest.raises(kind, match=message):
        experts_in_place(**case)


def copied(array: Any) -> Any:
    """A copy that begins on a cache line."""
    found = aligned(array.dtype, *array.shape)
    found[...] = array
    return found


def of_copies(packed: Any, **changes: Any) -> Any:
    """The operands of `experts_of_blocks` for copies of packed weights, with changes."""
    matrices = {"gate_up": packed.gate_up, "down": packed.down}
    case = {name: copied(matrix.blocks) for name, matrix in matrices.items()}
    if packed.format.scaled:
        case |= {f"{name}_scales": copied(matrix.scales) for name, matrix in matrices.items()}
    for name, make in changes.items():
        case[name] = make(case.get(name))
    return case


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize(("shape", "group"), [((256, 128), 128), ((64, 192), 64), ((128, 64), 32)])
def test_packed_weights_elsewhere_give_the_same_bits(form, shape, group):
    packed = pack_experts(*layer(3, shape), format=form, group=group)
    found = experts_of_blocks(**of_copies(packed))
    assert (found.format, len(found), found.nbytes) == (packed.format, 3, packed.nbytes)
    for there, here in ((found.gate_up, packed.gate_up), (found.down, packed.down)):
        assert (there.rows, there.dim, there.width) == (here.rows, here.dim, here.width)
        assert there.group == here.group or not packed.format.scaled
        np.testing.assert_array_equal(there.words, here.words)
        np.testing.assert_array_equal(there.scales, here.scales)
    case = batch(9, 3, 2, shape[0])
    np.testing.assert_array_equal(fused_moe(case[0], found, *case[1:]), fused_moe(case[0], packed, *case[1:]))


def test_tensors_of_bfloat16_may_be_packed_weights_elsewhere():
    packed = pack_experts(*plain(2, (128, 64)))
    there = [
        torch.from_numpy(copied(m.blocks).view(np.int16)).view(torch.bfloat16) for m in (packed.gate_up, packed.down)
    ]
    assert experts_of_blocks(*there).format is Format.BF16
    there[1].zero_()
    h, ids, weights = batch(3, 2, 1, 128)
    assert not fused_moe(h, experts_of_blocks(*there), ids, weights).any()


MISPLACED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("fp32", {"gate_up": lambda w: w.astype(np.float64)}, TypeError, "gate_up must be float32"),
    ("fp32", {"gate_up": lambda w: w[:, :-1]}, ValueError, "gate_up must be C-contiguous .*: pass what pack_experts"),
    (
        "fp32",
        {"gate_up": lambda w: w[:, :32].copy()},
        ValueError,
        "gate_up must be C-contiguous .*multiples of 64 rows",
    ),
    ("bf16", {"down": lambda w: copied(w[..., :32])}, ValueError, "down must be C-contiguous .*multiples of 64 rows"),
    ("bf16", {"down": lambda w: copied(w[:0])}, ValueError, "down must be C-contiguous"),
    ("bf16", {"down": lambda w: copied(w[:1])}, ValueError, r"down must be \(2, 256, 128\), which gate_up asks for"),
    ("bf16", {"down": lambda w: copied(w.view(np.float32))}, ValueError, "down must be BF16 as gate_up, not FP32"),
    (
        "bf16",
        {"down": lambda w: aligned(np.uint8, w.nbytes + 64)[32 : w.nbytes + 32].view(w.dtype).reshape(w.shape)},
        ValueError,
        "from a multiple of 64 bytes on",
    ),
    ("fp32", {"down_scales": lambda _: np.ones((2, 4, 1, 64), np.float32)}, ValueError, "down_scales must be left out"),
    ("int8", {"down_scales": lambda _: None}, ValueError, "down_scales must be given for INT8"),
    ("int8", {"down_scales": lambda s: s.astype(np.float64)}, TypeError, "down_scales must be float32"),
    (
        "uint4",
        {"down_scales": lambda s: copied(s.view(np.float32))},
        ValueError,
        "down must be UINT4 as gate_up, not INT4",
    ),
    ("int4", {"gate_up_scales": lambda s: copied(s[:1])}, ValueError, r"gate_up_scales must be \(2, 4, groups, 64\)"),
    ("int4", {"gate_up_scales": lambda s: copied(s[:, :, :0])}, ValueError, r"gate_up_scales must be \(2, 4, groups"),
    ("int4", {"gate_up_scales": lambda s: copied(s.repeat(32, axis=2))}, ValueError, "a multiple of 8 columns"),
    (
        "int8",
        {"down_scales": lambda s: aligned(np.float32, s.size + 16)[4 : s.size + 4].reshape(s.shape)},
        ValueError,
        "down_scales must begin on a multiple of 64",
    ),
]


@pytest.mark.parametrize("form, change, kind, message", MISPLACED)
def test_packed_weights_that_cannot_be_read_where_they_lie_are_named(form, change, kind, message):
    packed = pack_experts(*layer(2, (256, 128)), format=form)
    with pytest.raises(kind, match=message):
        experts_of_blocks(**of_copies(packed, **change))


@pytest.mark.parametrize("form", NAMES)
def test_the_answer_depends_on_nobody_else_and_not_on_threads(form):
    packed = pack_experts(*layer(3, SHAPES[1]), format=form)
    h, _, weights = batch(7, 3, 1, SHAPES[1][0])
    ids = np.arange(7)[:, None] % 3  # few per expert: with more, activations would be rounded to bf16
    whole = fused_moe(h, packed, ids, weights, threads=1)
    np.testing.assert_array_equal(fused_moe(h, packed, ids, weights, threads=4), whole)
    alone = [fused_moe(h[t : t + 1], packed, ids[t : t + 1], weights[t : t + 1]) for t in range(7)]
    np.testing.assert_allclose(np.concatenate(alone), whole, rtol=0, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("tokens", [9, 70])
def test_pairs_computed_part_by_part_give_what_all_at_once_give(form, tokens, monkeypatch):
    packed = pack_experts(*layer(4, SHAPES[1]), format=form)
    h, ids, weights = batch(tokens, 4, 3, SHAPES[1][0])
    whole = fused_moe(h, packed, ids, weights, exact=True)
    monkeypatch.setattr(module, "_BUFFERED", 0)
    monkeypatch.setattr(module, "_FEWEST", 20)
    for threads in (1, 3):
        found = fused_moe(h, packed, ids, weights, exact=True, threads=threads)
        assert error(found, whole) < 1e-6


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 30))
def test_parts_are_within_the_limit_and_cut_only_experts_that_exceed_it(counts, limit):
    ids = np.repeat(np.arange(len(counts)), counts)[:, None]
    pairs = module._sorted(ids, len(counts))
    parts = module._parts(pairs, limit)
    assert np.concatenate([part.tokens for part in parts]).tolist() == pairs.tokens.tolist()
    assert all(len(part.tokens) <= limit for part in parts)
    assert sum(np.diff(part.first) for part in parts).tolist() == counts
    for expert, count in enumerate(counts):
        assert sum(expert in part.touched for part in parts) == -(-count // limit)
    fullest = [a + b for a, b in pairwise([len(part.tokens) for part in parts])]
    assert all(two > limit for two in fullest) or max(counts) > limit


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_results_do_not_depend_on_the_batch(form, shape):
    packed = pack_experts(*layer(2, shape), format=form)
    h, ids, weights = batch(40, 1, 1, shape[0])
    whole = fused_moe(h, packed, ids, weights, exact=True)
    assert error(whole, fused_moe_reference(h, packed, ids, weights)) < 1e-6
    for count in (4, 8):
        few = fused_moe(h[:count], packed, ids[:count], weights[:count], exact=True)
        assert error(few, whole[:count]) < 1e-6


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_the_largest_numbers_are_as_finite_with_many_tokens_as_with_one(form):
    packed = pack_experts(*layer(1, SHAPES[0]), format=form)
    h, ids, weights = batch(6, 1, 1, SHAPES[0][0])
    packed.gate_up.words[:] = 0
    h[:, 3] = np.finfo(np.float32).max
    np.testing.assert_array_equal(fused_moe(h, packed, ids, weights, exact=True), np.zeros_like(h))


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize(("form", "group"), [("int8", 128), ("int4", 8), ("int4", 40), ("int4", 128), ("mxfp4", 32)])
def test_sums_of_the_largest_bytes_do_not_overflow(path, form, group):
    model, inner = 240, 64
    largest = np.float32(1.5 if form == "mxfp4" else 1)  # of the numbers with its power of two
    gate_up = np.full((1, 2 * inner, model), largest)
    gate_up[:, inner::3] = -largest
    down = np.full((1, model, inner), largest)
    packed = pack_experts(gate_up, down, format=form, group=group)
    h = np.full((10, model), 6 / model, np.float32)
    h[::2] *= -1
    ids = np.zeros((len(h), 1), np.int64)
    weights = np.ones((len(h), 1), np.float32)
    for tokens in (1, 2, 3, 4, 10):
        case = h[:tokens], packed, ids[:tokens], weights[:tokens]
        assert error(fused_moe(*case, path=path), fused_moe_reference(*case)) < 1e-2


def test_threads_of_python_may_call_at_once():
    packed = pack_experts(*layer(4, SHAPES[0]))
    case = batch(9, 4, 2, SHAPES[0][0])
    want = fused_moe(case[0], packed, *case[1:])
    wrong: list[int] = []

    def call() -> None:
        for _ in range(30):
            wrong.extend([1] * (not np.array_equal(fused_moe(case[0], packed, *case[1:], threads=3), want)))

    callers = [threading.Thread(target=call) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


def test_large_gates_neither_overflow_nor_vanish():
    packed = pack_experts(*layer(2, SHAPES[1]), format="fp32")
    h, ids, weights = batch(3, 2, 1, SHAPES[1][0])
    for scale in (1e3, 1e15):
        found = fused_moe(np.float32(scale) * h, packed, ids, weights)
        assert error(found, fused_moe_reference(np.float32(scale) * h, packed, ids, weights)) < 1e-6


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_nan_in_an_expert_reaches_those_who_chose_it_only(form):
    gate_up, down = layer(4, SHAPES[1])
    gate_up[1, 5, 7] = np.nan
    h, _, weights = batch(6, 4, 1, SHAPES[1][0])
    ids = np.array([[0], [1], [2], [3], [1], [0]])
    found = np.isnan(fused_moe(h, pack_experts(gate_up, down, format=form), ids, weights)).any(axis=1)
    assert found.tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_not_finite_spoils_itself_only(path, form, bad):
    packed = pack_experts(*layer(2, SHAPES[0]), format=form)
    h, ids, weights = batch(6, 2, 1, SHAPES[0][0])
    h[2, 5] = bad
    found = np.isfinite(fused_moe(h, packed, np.zeros_like(ids), weights, path=path)).all(axis=1)
    assert found.tolist() == [True, True, False, True, True, True]


def test_tensors_are_read_in_place_and_lists_packed_one_by_one():
    gate_up, down = (torch.from_numpy(whole).bfloat16() for whole in layer(3, SHAPES[0]))
    packed = pack_experts([m.clone() for m in gate_up], [m.clone() for m in down])
    assert packed.format is Format.BF16
    h, ids, weights = batch(4, 3, 2, SHAPES[0][0])
    out = torch.empty(h.shape)
    assert fused_moe(torch.from_numpy(h), packed, torch.from_numpy(ids), torch.from_numpy(weights), out=out) is out
    np.testing.assert_array_equal(out.numpy(), fused_moe(h, pack_experts(gate_up, down), ids, weights))


@pytest.mark.parametrize("source", ["fp32", "fp16", "bf16"])
def test_packing_to_bf16_rounds_to_nearest_even_as_torch_does(source):
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    gate_up, down = (torch.from_numpy(whole).to(kinds[source]) for whole in layer(1, SHAPES[2]))
    packed = pack_experts(gate_up, down, format=Format.BF16)
    np.testing.assert_array_equal(unpacked(packed.down, [0])[0], down[0].bfloat16().double().numpy())


@pytest.mark.parametrize(("form", "step"), [("int8", 1 / 254), ("int4", 1 / 14)])
def test_scaled_weights_are_within_half_a_step_of_their_group(form, step):
    _, down = layer(1, (64, 256))
    found = unpacked(pack_experts(*layer(1, (64, 256)), format=form).down, [0])[0]
    largest = np.abs(down[0].reshape(64, 2, 128)).max(axis=2).repeat(128, axis=1)
    assert (np.abs(found - down[0]) <= step * largest * (1 + 1e-5)).all()


@pytest.mark.parametrize("shape", [(64, 128), (72, 200)])
@pytest.mark.parametrize("group", [8, 64, 128])
@pytest.mark.parametrize(("form", "most"), [("int8", 127), ("int4", 7)])
def test_scaled_weights_are_rounded_as_numpy_rounds(form, most, group, shape):
    """To the bit: the group's largest magnitude over the largest number, and multiples of it, halves to even."""
    gate_up, down = layer(1, shape)
    down[0, 0], down[0, 1] = 0, np.float32(1e-45)
    down[0, 2] = np.arange(down.shape[2]) / 2 % most
    width = -(-down.shape[2] // group) * group
    grouped = np.pad(down[0], ((0, 0), (0, width - down.shape[2]))).reshape(len(down[0]), -1, group)
    scales = np.abs(grouped).max(axis=2, keepdims=True) / np.float32(most)
    want = np.rint(grouped / np.where(scales > 0, scales, np.float32(1))).astype(float) * scales
    found = unpacked(pack_experts(gate_up, down, format=form, group=group).down, [0])[0]
    np.testing.assert_array_equal(found, want.reshape(len(want), -1)[:, : found.shape[1]])


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("bias_type", [np.float32, np.uint16])
def test_biases_and_the_clamped_function_are_those_of_the_oracle(path, form, bias_type):
    packed = pack_experts(*layer(4, (136, 200)), format=form)
    h, ids, weights = batch(9, 4, 3, 136)
    rng = np.random.default_rng(1)
    biases = [4 * rng.standard_normal((4, rows), dtype=np.float32) for rows in (400, 136)]
    if bias_type is np.uint16:
        biases = [(bias.view(np.uint32) >> 16).astype(np.uint16) for bias in biases]
    options = {"activation": "swiglu-clamped", "gate_up_bias": biases[0], "down_bias": biases[1]}
    found = fused_moe(3 * h, packed, ids, weights, path=path, **options)
    want = fused_moe_reference(3 * h, packed, ids, weights, **options)
    assert error(found, want) < bound(packed, path, ids)
    for left_out in ({"activation": "swiglu"}, {"gate_up_bias": np.zeros_like(biases[0])}):
        assert error(found, fused_moe_reference(3 * h, packed, ids, weights, **options | left_out)) > 0.1


def test_biases_are_of_their_own_expert_in_every_part(monkeypatch):
    packed = pack_experts(*layer(5, (64, 64)))
    h, ids, weights = batch(40, 5, 2, 64)
    rng = np.random.default_rng(1)
    options = {
        "gate_up_bias": rng.standard_normal((5, 128), dtype=np.float32),
        "down_bias": rng.standard_normal((5, 64), dtype=np.float32),
    }
    monkeypatch.setattr(module, "_BUFFERED", 1)
    monkeypatch.setattr(module, "_FEWEST", 7)
    found = fused_moe(h, packed, ids, weights, **options)
    assert error(found, fused_moe_reference(h, packed, ids, weights, **options)) < 1e-6


def test_a_number_that_is_not_one_stays_so_where_it_is_clamped():
    gate_up, down = np.full((1, 2, 1), np.nan, np.float32), np.ones((1, 1, 1), np.float32)
    one = np.ones((1, 1), np.float32)
    found = fused_moe(one, pack_experts(gate_up, down), np.zeros((1, 1), int), one, activation="swiglu-clamped")
    assert np.isnan(found).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_bias": None}, "gate_up_bias and down_bias must both be given"),
        ({"down_bias": np.zeros((2, 19), np.float32)}, r"down_bias must be \(2, 20\), not \(2, 19\)"),
        ({"activation": "geglu"}, "activation must be 'swiglu' or 'swiglu-clamped'"),
    ],
)
def test_biases_that_do_not_fit_are_refused(change, message):
    h, ids, weights = batch(1, 2, 1, 20)
    options = {"gate_up_bias": np.zeros((2, 26), np.float32), "down_bias": np.zeros((2, 20), np.float32)} | change
    with pytest.raises(ValueError, match=message):
        fused_moe(h, pack_experts(*layer(2, (20, 13))), ids, weights, **options)


def stored_int4(experts: int, rows: int, columns: int, group: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Codes, scales of any sign and zero points of all values."""
    rng = np.random.default_rng(seed)
    groups = experts, rows, columns // group
    scales = (rng.uniform(0.001, 0.1, groups) * rng.choice([1, 1, -1, 0], groups)).astype(np.float16)
    return rng.integers(0, 16, (experts, rows, columns), np.uint8), scales, rng.integers(0, 16, groups, np.uint8)


def numbers_of(codes: Any, scales: Any, zeros: Any) -> Any:
    """(code - zero point) * scale in float64, group by group."""
    found = np.empty(codes.shape)
    group = codes.shape[2] // scales.shape[2]
    for column in range(codes.shape[2]):
        own = codes[:, :, column].astype(float) - zeros[:, :, column // group]
        found[:, :, column] = own * scales[:, :, column // group].astype(float)
    return found


INT4_SIZES = [(64, 32, 32), (96, 160, 8), (256, 128, 64), (256, 128, 128)]


@pytest.mark.parametrize(("model", "inner", "group"), INT4_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_keeps_the_numbers_of_its_checkpoint(model, inner, group, symmetric):
    up, down = stored_int4(2, 2 * inner, model, group), stored_int4(2, model, inner, group, seed=1)
    zeros = {} if symmetric else {"gate_up_zeros": [*up[2]], "down_zeros": torch.from_numpy(down[2])}
    packed = pack_int4([*up[0]], [*up[1]], torch.from_numpy(down[0]), torch.from_numpy(down[1]), **zeros)
    assert packed.format is (Format.INT4 if symmetric else Format.UINT4)
    for matrices, stored in ((packed.gate_up, up), (packed.down, down)):
        middle = np.full_like(stored[2], 8) if symmetric else stored[2]
        np.testing.assert_array_equal(unpacked(matrices, range(2)), numbers_of(*stored[:2], middle))


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_scales_of_int4_may_be_of_other_types(kind):
    up, down = stored_int4(1, 128, 64, 32), stored_int4(1, 64, 64, 32, seed=1)
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    scales = [torch.from_numpy(part[1]).to(kinds[kind]) for part in (up, down)]
    packed = pack_int4(up[0], scales[0], down[0], scales[1], gate_up_zeros=up[2], down_zeros=down[2])
    wanted = numbers_of(down[0], scales[1].float().numpy(), down[2])
    np.testing.assert_array_equal(unpacked(packed.down, [0]), wanted)


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize(("model", "inner", "group"), INT4_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_of_checkpoints_equals_float64(path, model, inner, group, symmetric):
    """Of rows with codes whose mean is far from the zero point, so that a zero point that is left out tells."""
    up, down = stored_int4(3, 2 * inner, model, group), stored_int4(3, model, inner, group, seed=1)
    zeros = {} if symmetric else {"gate_up_zeros": up[2], "down_zeros": down[2]}
    packed = pack_int4(*up[:2], *down[:2], **zeros)
    for tokens in (1, 2, 4, 13):
        h, ids, weights = batch(tokens, 3, 2, model, seed=tokens)
        h += np.float32(0.5)
        assert error(fused_moe(h, packed, ids, weights, path=path), oracle(h, packed, ids, weights)) < 1e-2


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize("group", [8, 40, 80, 240])
@pytest.mark.parametrize(("code", "zero"), [(0, None), (15, None), (0, 15), (15, 0), (15, 15), (0, 0)])
def test_sums_of_the_extreme_codes_do_not_overflow(path, group, code, zero):
    """With all activations at their largest, which are bytes of 127."""
    model, inner = 240, 240
    sizes = {"up": (1, 2 * inner, model), "down": (1, model, inner)}
    codes = [np.full(size, code, np.uint8) for size in sizes.values()]
    codes[0][:, inner::3] = 15 - code
    scales = [np.full((*size[:2], size[2] // group), 1 / 256, np.float32) for size in sizes.values()]
    zeros = {}
    if zero is not None:
        zeros = {
            f"{name}_zeros": np.full(one.shape, zero, np.uint8)
            for name, one in zip(("gate_up", "down"), scales, strict=True)
        }
    packed = pack_int4(codes[0], scales[0], codes[1], scales[1], **zeros)
    h = np.full((10, model), 0.5, np.float32)
    h[::2] *= -1
    ids, weights = np.zeros((len(h), 1), np.int64), np.ones((len(h), 1), np.float32)
    for tokens in (1, 2, 3, 4, 10):
        case = h[:tokens], packed, ids[:tokens], weights[:tokens]
        wanted = fused_moe_reference(*case)
        assert np.linalg.norm(fused_moe(*case, path=path) - wanted) <= 1e-2 * np.linalg.norm(wanted)


def given_int4(**changes: Any) -> dict[str, Any]:
    up, down = stored_int4(2, 128, 64, 32), stored_int4(2, 64, 64, 32, seed=1)
    names = ("gate_up", "gate_up_scales", "gate_up_zeros", "down", "down_scales", "down_zeros")
    return dict(zip(names, (*up, *down), strict=True)) | changes


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"down_zeros": None}, ValueError, "gate_up_zeros and down_zeros must both be given, or none"),
        ({"down": np.zeros((2, 64, 64), np.int8)}, TypeError, r"down\[0\] must be uint8"),
        ({"gate_up": np.full((2, 128, 64), 16, np.uint8)}, ValueError, r"gate_up\[0\] must have codes from 0 to 15"),
        ({"gate_up_zeros": np.full((2, 128, 2), 16, np.uint8)}, ValueError, r"gate_up_zeros\[0\] must be .* up to 16"),
        ({"gate_up_zeros": np.zeros((2, 128, 1), np.uint8)}, ValueError, r"gate_up_zeros\[0\] must be \(128, 2\)"),
        ({"gate_up_scales": np.full((2, 128, 2), np.nan, np.float16)}, ValueError, r"_scales\[0\] must be finite"),
        ({"down_scales": np.full((2, 64, 2), 0.1, np.float32)}, ValueError, r"scales of down_zeros\[0\] must have 20"),
        (
            {"down_scales": np.ones((2, 64, 3), np.float16)},
            ValueError,
            "groups of a multiple of 8 columns, not 3 for 64",
        ),
        ({"down_scales": np.ones((1, 64, 2), np.float16)}, ValueError, "down, down_scales and down_zeros must have an"),
        ({"down": np.zeros((2, 64, 32), np.uint8)}, ValueError, r"down must be \(2, 64, 64\), which gate_up asks for"),
        (
            {"gate_up": [np.zeros((128, 64), np.uint8), np.zeros((128, 32), np.uint8)]},
            ValueError,
            r"gate_up\[1\] must be \(128, 64\) with scales \(128, 2\), not \(128, 32\)",
        ),
    ],
)
def test_int4_that_cannot_be_packed_is_named_with_its_mend(changes, kind, message):
    with pytest.raises(kind, match=message):
        pack_int4(**given_int4(**changes))


@pytest.mark.parametrize("group", [8, 64, 128])
def test_uint4_is_within_a_step_of_its_group(group):
    """A step is the reach of a group, with 0 in it, over 15; the zero point is rounded too."""
    gate_up, down = layer(1, (72, 256))
    down[0, 0], down[0, 1], down[0, 2] = 0, np.abs(down[0, 1]) + 3, -np.abs(down[0, 2])
    found = unpacked(pack_experts(gate_up, down, format="uint4", group=group).down, [0])[0]
    grouped = down[0].reshape(len(down[0]), -1, group)
    reach = np.maximum(grouped.max(axis=2), 0) - np.minimum(grouped.min(axis=2), 0)
    assert (np.abs(found - down[0]) <= reach.repeat(group, axis=1) / 15 * (1 + 1e-5)).all()
    inside = np.abs(found - down[0]) <= reach.repeat(group, axis=1) / 30 * (1 + 1e-5)
    assert inside.mean() > 0.95
    assert not found[0].any()


def stored_mxfp4(experts: int, rows: int, columns: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    shape = (experts, rows, columns // 32)
    return rng.integers(0, 256, (*shape, 16), np.uint8), rng.integers(2, 250, shape, np.uint8)


@pytest.mark.parametrize(("model", "inner"), [(64, 32), (96, 160), (2880, 64)])
def test_mxfp4_keeps_the_numbers_of_its_checkpoint(model, inner):
    up, down = stored_mxfp4(2, 2 * inner, model), stored_mxfp4(2, model, inner, seed=1)
    packed = pack_mxfp4([*up[0]], [*up[1]], torch.from_numpy(down[0]), torch.from_numpy(down[1]))
    for matrices, stored in ((packed.gate_up, up), (packed.down, down)):
        wanted = mxfp4_weights(*map(torch.from_numpy, stored), torch.float32).double().numpy()
        assert np.array_equal(np.array(unpacked(matrices, range(2))), wanted)


def test_the_smallest_scales_of_mxfp4_become_zero_and_nan_is_refused():
    codes, scales = stored_mxfp4(1, 64, 64)
    scales[0, 0] = 1
    packed = pack_mxfp4(codes, scales, *stored_mxfp4(1, 64, 32))
    assert not unpacked(packed.gate_up, [0])[0][0].any()
    scales[0, 5, 1] = 255
    with pytest.raises(ValueError, match=r"gate_up_scales\[0\] must not be 255, which is NaN"):
        pack_mxfp4(codes, scales, *stored_mxfp4(1, 64, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.zeros((1, 64, 2, 8), np.uint8)}, r"gate_up\[0\] must be \(R, G, 16\)"),
        ({1: np.zeros((1, 64, 1), np.uint8)}, r"with scales \(R, G\)"),
        ({3: np.zeros((2, 64, 1), np.uint8)}, "down and down_scales must have an expert at least, and as many"),
        ({2: np.zeros((1, 64, 2, 16), np.uint8), 3: np.zeros((1, 64, 2), np.uint8)}, "down must be"),
    ],
)
def test_mxfp4_of_other_shapes_is_refused(change, message):
    given = dict(enumerate((*stored_mxfp4(1, 64, 64), *stored_mxfp4(1, 64, 32)))) | change
    with pytest.raises(ValueError, match=message):
        pack_mxfp4(*given.values())


def test_numbers_become_the_nearest_of_mxfp4_and_ties_the_even_one():
    values = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 4, -0.3, -0.7, 6, 0, 5.1, 2.49, 3.51, -6], np.float32)
    row = np.concatenate([values, np.zeros(16, np.float32)])
    packed = pack_experts(np.tile(row, (1, 2, 1)), np.ones((1, 32, 1), np.float32), format="mxfp4")
    wanted = [0, 1, 1, 2, 2, 4, 4, 4, -0.5, -0.5, 6, 0, 6, 2, 4, -6]
    assert unpacked(packed.gate_up, [0])[0][0][:16].tolist() == wanted


def test_packed_weights_take_their_format_s_room():
    gate_up, down = layer(2, (256, 128))
    weights = 2 * 3 * 256 * 128
    sizes = {form: pack_experts(gate_up, down, format=form).nbytes for form in NAMES}
    assert sizes == {
        "fp32": 4 * weights, "bf16": 2 * weights, "int8": weights + weights // 32, "int4": weights // 2 + weights // 32,
        "mxfp4": weights // 2 + weights // 32, "uint4": weights // 2 + weights // 32,
    }  # fmt: skip


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gate_up": lambda w: w[:, :-1]}, ValueError, "gate_up must have an even number of rows, not 255"),
    ({"gate_up": lambda w: w[:0]}, ValueError, "gate_up must have an expert"),
    (
        {"gate_up": lambda w: [w[0], w[1].astype(np.float16), w[2]]},
        ValueError,
        r"gate_up\[1\] must be .* as gate_up\[0\]",
    ),
    ({"gate_up": lambda w: w.astype(np.int8)}, TypeError, "gate_up must be float32 or uint16"),
    ({"down": lambda w: w[:2]}, ValueError, r"down must be \(3, 256, 128\), which gate_up asks for, not \(2,"),
    (
        {"format": lambda _: "int5"},
        ValueError,
        "format must be one of fp32, bf16, int8, int4, mxfp4, uint4, not 'int5'",
    ),
    ({"group": lambda _: 12}, ValueError, "group must be a multiple of 8 columns, not 12"),
    ({"gate_up": lambda w: w * np.inf, "format": lambda _: "int8"}, ValueError, r"gate_up\[0\] must be finite"),
]


@pytest.mark.parametrize("change, kind, message", BAD)
def test_weights_that_cannot_be_packed_are_named_with_their_mend(change, kind, message):
    gate_up, down = layer(3, SHAPES[0])
    case: dict[str, Any] = {"gate_up": gate_up, "down": down, "format": None, "group": 128}
    for name, make in change.items():
        case[name] = make(case[name])
    with pytest.raises(kind, match=message):
        pack_experts(case["gate_up"], case["down"], format=case["format"], group=case["group"])


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": lambda h: h.astype(np.float64)}, TypeError, "x must be float32"),
    ({"x": lambda h: h[:, ::2]}, ValueError, "x must be C-contiguous"),
    ({"x": lambda h: h[:, :64].copy()}, ValueError, "x must have the 256 columns of the experts, not 64"),
    ({"experts": lambda _: np.zeros((3, 2, 2))}, TypeError, "experts must be PackedExperts, not ndarray"),
    ({"ids": lambda i: i + 2}, ValueError, r"ids\[\d, \d\] must be an expert in \[0, 3\), not \d: correct"),
    ({"ids": lambda i: i - 1}, ValueError, r"ids\[\d, \d\] must be an expert in \[0, 3\), not -1: correct"),
    ({"ids": lambda i: i[:-1]}, ValueError, "weights must have the shape of ids and both one row per row of x"),
    ({"weights": lambda w: w[:, :1].copy()}, ValueError, "weights must have the shape of ids"),
]


@pytest.mark.parametrize("change, kind, message", WRONG)
def test_a_bad_operand_is_named_with_its_mend(change, kind, message):
    h, ids, weights = batch(4, 3, 2, SHAPES[0][0])
    case = {"x": h, "experts": pack_experts(*layer(3, SHAPES[0])), "ids": ids, "weights": weights}
    for name, make in change.items():
        case[name] = make(case[name])
    with pytest.raises(kind, match=message):
        fused_moe(**case)


@pytest.mark.parametrize("option", [{"threads": 0}, {"out": np.empty((3, 256), np.float32)}])
def test_a_bad_option_is_named_with_its_mend(option):
    h, ids, weights = batch(4, 3, 2, SHAPES[0][0])
    with pytest.raises(ValueError, match=r"must .*: leave"):
        fused_moe(h, pack_experts(*layer(3, SHAPES[0])), ids, weights, **option)


def test_out_that_overlaps_what_is_read_is_refused():
    gate_up, down = np.zeros((3, 128, 64), np.uint16), np.zeros((3, 64, 64), np.uint16)
    h, shared = np.ones((4, 64), np.float32), np.ones((4, 64), np.float32)
    weights = shared.reshape(-1)[:8].reshape(4, 2)
    case = {"experts": experts_in_place(gate_up, down), "ids": np.zeros((4, 2), np.int64), "weights": weights}
    over_gates = gate_up.reshape(-1)[: 2 * h.size].view(np.float32).reshape(h.shape)
    over_downs = down.reshape(-1)[: 2 * h.size].view(np.float32).reshape(h.shape)
    for name, out in (("experts", over_gates), ("experts", over_downs), ("x", h), ("weights", shared)):
        with pytest.raises(ValueError, match=rf"out must not overlap {name}, .*: pass a copy of {name}"):
            fused_moe(h, **case, out=out)
    biases = {name: np.zeros((3, size), np.float32) for name, size in (("gate_up_bias", 128), ("down_bias", 64))}
    for name in biases:
        memory = np.zeros(biases[name].size + h.size, np.float32)
        lying = memory[: biases[name].size].reshape(biases[name].shape)
        over = memory[lying.size - 8 : lying.size - 8 + h.size].reshape(h.shape)
        with pytest.raises(ValueError, match=rf"out must not overlap {name}, .*: pass a copy of {name}"):
            fused_moe(h, **case, **biases | {name: lying}, out=over)


def test_ids_that_are_overwritten_meanwhile_choose_no_other_bias():
    """The result may lie over the ids: threads read a copy of them that has been checked."""
    packed = pack_experts(*layer(2, (64, 64)))
    h, ids, weights = batch(8, 2, 1, 64)
    biases = {"gate_up_bias": np.ones((2, 128), np.float32), "down_bias": np.ones((2, 64), np.float32)}
    want = fused_moe(h, packed, ids, weights, **biases)
    memory = np.zeros((8, 64), np.float32)
    over = memory.reshape(-1)[-16:].view(np.int64).reshape(8, 1)
    over[:] = ids
    assert np.array_equal(fused_moe(h, packed, over, weights, **biases, out=memory), want)


def test_declared_work():
    flops, moved = fused_moe_work(
        model_dim=8, expert_dim=16, tokens=5, chosen=2, touched=3, weight_bytes=Format.INT8.weight_bytes(32)
    )
    assert flops == 5 * 2 * 3 * 2 * 8 * 16  # three products, multiply and add
    assert moved == 3 * 3 * 8 * 16 * (1 + 4 / 32) + 2 * 5 * 8 * 4
