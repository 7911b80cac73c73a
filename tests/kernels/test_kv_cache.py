"""`append_kv` against the rounding of torch and of numpy, and a plain numpy oracle."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernels_cpu import (
    append_kv,
    append_kv_reference,
    append_kv_work,
    copy_blocks,
    copy_blocks_reference,
    copy_blocks_work,
    decode_attention,
    warm_up,
)
from tests.examples import examples

EDGES = np.array(
    [0, 0x8000, 0x7FFF, 0x18000, 0x8001, 1, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0x3F808000, 0x3F818000],
    np.uint32,
)
EVERY_EDGE = np.concatenate([EDGES, EDGES | np.uint32(0x80000000)])


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


SMALL = [0x33000000, 0x33000001, 0x33800000, 0x33C00000, 0x33C00001, 0x387FC000, 0x387FE000, 0x387FDFFF, 0x387FFFFF]
LARGE = [0x38800000, 0x38800FFF, 0x38801000, 0x38803000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x47800001]
HALF_EDGES = np.array([*SMALL, *LARGE], np.uint32)
"""Ties, the smallest fp16, the smallest normal one, and the largest, each with what lies beside it."""


def rounded(values, dtype=np.uint16):
    """`values` stored into a cache of one head, one value a slot, and read back; a bfloat16 cache as bits."""
    kv = np.zeros((1, 1, 2, values.size, 1), dtype)
    rows = values.reshape(-1, 1, 1)
    append_kv(kv, np.arange(values.size), rows, rows)
    np.testing.assert_array_equal(kv[0, 0, 0], kv[0, 0, 1])
    return kv[0, 0, 0, :, 0]


def torch_rounded(values):
    return torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()


def test_rounds_ties_extremes_and_subnormals_as_torch_does():
    values = EVERY_EDGE.view(np.float32)
    np.testing.assert_array_equal(rounded(values), torch_rounded(values))


@examples(150)
@given(arrays(np.uint32, st.integers(1, 70)))
def test_rounds_any_bits_as_torch_does(bits):
    values = bits.view(np.float32)
    got, nan = rounded(values), np.isnan(values)
    np.testing.assert_array_equal(got[~nan], torch_rounded(values)[~nan])
    assert np.isnan((got[nan].astype(np.uint32) << 16).view(np.float32)).all()


def numpy_halves(values):
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def test_rounds_to_fp16_as_numpy_does_at_every_edge():
    edges = np.concatenate([EVERY_EDGE, HALF_EDGES, HALF_EDGES | np.uint32(0x80000000)]).view(np.float32)
    np.testing.assert_array_equal(rounded(edges, np.float16).view(np.uint16), numpy_halves(edges))


def test_every_fp16_and_all_between_two_neighbours_round_as_numpy_does():
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    values = np.concatenate([halves, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    values = np.concatenate([values, -values])
    np.testing.assert_array_equal(rounded(values, np.float16).view(np.uint16), numpy_halves(values))


@examples(150)
@given(arrays(np.uint32, st.integers(1, 70)))
def test_rounds_any_bits_to_fp16_as_numpy_does(bits):
    values = bits.view(np.float32)
    got, nan = rounded(values, np.float16), np.isnan(values)
    np.testing.assert_array_equal(got.view(np.uint16)[~nan], numpy_halves(values)[~nan])
    assert np.isnan(got[nan]).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_nan_stays_nan_in_fp16_and_keeps_its_sign(bits):
    got = int(rounded(np.array([bits], np.uint32).view(np.float32), np.float16).view(np.uint16)[0])
    assert got & 0x7E00 == 0x7E00
    assert got >> 15 == bits >> 31


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_nan_stays_nan_and_keeps_its_sign(bits):
    got = int(rounded(np.array([bits], np.uint32).view(np.float32))[0])
    assert got & 0x7FC0 == 0x7FC0
    assert got >> 15 == bits >> 31


def rows_of(rng, count, kv_heads, dim):
    return rng.standard_normal((2, count, kv_heads, dim), dtype=np.float32)


def empty_cache(blocks, kv_heads, block, dim, dtype):
    return np.full((blocks, kv_heads, 2, block, dim), 7, dtype)


@examples(60)
@given(
    st.integers(0, 20),
    st.integers(1, 4),
    st.sampled_from((1, 5, 16, 64)),
    st.sampled_from((1, 8, 20, 80, 128)),
    st.sampled_from((np.float32, np.uint16, np.float16)),
    st.integers(0, 2**32 - 1),
)
def test_each_row_goes_to_its_slot_and_nothing_else_changes(count, kv_heads, block, dim, dtype, seed):
    rng = np.random.default_rng(seed)
    kv = empty_cache(-(-count // block) + 2, kv_heads, block, dim, dtype)
    slots = rng.permutation(kv.shape[0] * block)[:count]
    k, v = rows_of(rng, count, kv_heads, dim)
    want = append_kv_reference(kv, slots, k, v)
    append_kv(kv, slots, k, v)
    np.testing.assert_array_equal(kv, want)
    for t, slot in enumerate(slots):  # said once more, without the oracle
        for half, row in ((0, k[t]), (1, v[t])):
            stored = torch_rounded(row) if dtype is np.uint16 else row.astype(dtype)
            np.testing.assert_array_equal(kv[slot // block, :, half, slot % block], stored)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float16])
def test_slices_of_a_fused_qkv_need_no_copy(dtype):
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((5, 8 + 2 + 2, 16), dtype=np.float32)
    slots = np.array([3, 0, 9, 31, 17])
    k, v = qkv[:, 8:10], qkv[:, 10:]
    kv = empty_cache(2, 2, 16, 16, dtype)
    want = append_kv_reference(kv, slots, k, v)
    append_kv(kv, slots, k, v)
    np.testing.assert_array_equal(kv, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_tensors_are_written_in_place(dtype):
    rng = np.random.default_rng(0)
    k, v = rows_of(rng, 3, 2, 8)
    slots = np.array([6, 1, 4])
    kv = torch.zeros((2, 2, 2, 4, 8), dtype=dtype)
    append_kv(kv, torch.from_numpy(slots), torch.from_numpy(k), torch.from_numpy(v))
    want = torch.zeros_like(kv)
    for t, slot in enumerate(slots):
        want[slot // 4, :, 0, slot % 4] = torch.from_numpy(k[t]).to(dtype)
        want[slot // 4, :, 1, slot % 4] = torch.from_numpy(v[t]).to(dtype)
    assert torch.equal(kv, want)


def test_the_last_row_wins_a_slot_that_occurs_twice():
    kv = empty_cache(1, 1, 1, 1, np.float32)
    rows = np.array([1, 2], np.float32).reshape(2, 1, 1)
    append_kv(kv, np.zeros(2, np.int64), rows, -rows)
    assert kv.ravel().tolist() == [2, -2]


def in_bytes(rows):
    """Rows (..., D) as whole numbers, and their scales."""
    scales = np.abs(rows).max(axis=-1) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(np.rint(rows / scales[..., None])).astype(np.int8), scales


@examples(60)
@given(st.integers(1, 20), st.sampled_from((1, 5, 16)), st.sampled_from((1, 8, 80)), st.integers(0, 2**32 - 1))
def test_bytes_and_scales_of_each_row_go_to_its_slot(count, block, dim, seed):
    rng = np.random.default_rng(seed)
    kv = empty_cache(-(-count // block) + 2, 2, block, dim, np.int8)
    scales = np.full(kv.shape[:4], 7, np.float32)
    slots = rng.permutation(kv.shape[0] * block)[:count]
    k, v = rows_of(rng, count, 2, dim) * np.float32(10) ** rng.integers(-20, 20, (2, count, 2, 1)).astype(np.float32)
    want, factors = kv.copy(), scales.copy()
    for half, rows in enumerate((k, v)):
        at = (slots // block, slice(None), half, slots % block)
        want[at], factors[at] = in_bytes(rows)
    append_kv(kv, slots, k, v, scales=scales)
    np.testing.assert_array_equal(kv, want)
    np.testing.assert_array_equal(scales, factors)
    stored = kv[slots // block, :, 0, slots % block] * scales[slots // block, :, 0, slots % block, None]
    half_a_unit = np.abs(k).max(axis=2, keepdims=True) / 254
    assert (np.abs(stored - k) <= half_a_unit * (1 + 1e-4)).all()


KV, SLOTS, ROWS = (2, 2, 2, 4, 8), [6, 1, 4], (3, 2, 8)


@pytest.mark.parametrize(
    "row, byte, scale",
    [
        ([0, -0.0], [0, 0], 0),
        ([1e-45, 0], [0, 0], 0),
        ([2e-43, -2e-43], [127, -127], 1.401298464324817e-45),  # the unit itself is rounded
        ([np.nan, 1], [0, 0], np.nan),
        ([1, np.nan], [0, 0], np.nan),
        ([-np.inf, 1], [0, 0], np.inf),
        ([3.4e38, -3.4e38], [127, -127], np.float32(3.4e38) / np.float32(127)),
    ],
)
def test_rows_at_the_edges_become_zero_nan_or_the_largest_bytes(row, byte, scale):
    kv, scales = np.full((1, 1, 2, 1, 2), 7, np.int8), np.ones((1, 1, 2, 1), np.float32)
    rows = np.array(row, np.float32).reshape(1, 1, 2)
    append_kv(kv, np.array([0]), rows, rows, scales=scales)
    assert kv[0, 0, :, 0].tolist() == [byte, byte]
    np.testing.assert_array_equal(scales.ravel(), np.float32([scale, scale]))


@pytest.mark.parametrize(
    "dtype, scales, message",
    [
        (np.int8, None, r"scales must be given for a cache of int8: pass fp32 of shape .* = \(2, 2, 2, 4\)"),
        (
            np.int8,
            np.zeros((2, 2, 2, 5), np.float32),
            r"scales must have the shape .* = \(2, 2, 2, 4\) of kv's rows, not",
        ),
        (np.int8, np.zeros((4, 2, 2, 4), np.float32)[::2], "scales must be C-contiguous"),
        (np.float32, np.zeros((2, 2, 2, 4), np.float32), "scales must be left out: a cache of float32 has none"),
    ],
)
def test_scales_belong_to_a_cache_of_bytes(dtype, scales, message):
    rows, kv = np.ones(ROWS, np.float32), np.zeros(KV, dtype)
    with pytest.raises(ValueError, match=message):
        append_kv(kv, np.array(SLOTS), rows, rows, scales=scales)
    queries, table, lengths = np.ones((1, 2, 8), np.float32), np.zeros((1, 1), np.int32), np.array([4])
    with pytest.raises(ValueError, match=message):
        decode_attention(queries, kv, table, lengths, scales=scales)
    assert not kv.any()


def in_a_field(shape):
    """Rows of a structured array, 1 byte apart."""
    return np.zeros(shape[:1], [("own", np.float32, shape[1:]), ("odd", np.uint8)])["own"]


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"kv": np.zeros(KV)},
            TypeError,
            r"kv must be float32 or uint16 \(bfloat16 bits\) or float16 or int8, not float64",
        ),
        ({"kv": np.zeros(KV[1:], np.float32)}, ValueError, r"kv must have shape \(P, K, 2, b, D\), not"),
        ({"kv": np.zeros((2, 2, 3, 4, 8), np.float32)}, ValueError, r"kv must have shape .* with K, b and D >= 1, not"),
        ({"kv": np.zeros((4, 2, 2, 4, 8), np.float32)[::2]}, ValueError, "kv must be C-contiguous and aligned: pass"),
        ({"kv": read_only(np.zeros(KV, np.float32))}, ValueError, "kv must be writeable, because the kernel stores"),
        ({"slots": np.array(SLOTS, np.int32)}, TypeError, "slots must be int64, not int32: convert"),
        ({"slots": np.array([SLOTS])}, ValueError, r"slots must have shape \(T\), not \(1, 3\): reshape"),
        ({"slots": np.array([6, 8, 4])}, ValueError, r"slots\[1\] must be in \[0, 8\), the slots of kv, not 8: pass"),
        ({"slots": np.array([6, 1, -1])}, ValueError, r"slots\[2\] must be in \[0, 8\), the slots of kv, not -1: pass"),
        ({"k": np.zeros(ROWS)}, TypeError, "k must be float32, not float64: convert"),
        ({"k": np.zeros((2, 2, 8), np.float32)}, ValueError, r"k must have shape \(T, K, D\) = \(3, 2, 8\) .* not"),
        ({"v": np.zeros((3, 2, 9), np.float32)}, ValueError, r"v must have shape \(T, K, D\) = \(3, 2, 8\) .* not"),
        ({"v": np.zeros((3, 8, 2), np.float32).swapaxes(1, 2)}, ValueError, "each row of v must be C-contiguous"),
        (
            {"v": np.zeros(ROWS, np.float32)[::-1]},
            ValueError,
            "v must have rows of neighbouring numbers, aligned and in order in memory: pass",
        ),
        ({"v": in_a_field(ROWS)}, ValueError, "v must have rows of neighbouring numbers, aligned"),
        ({"v": [1.0]}, TypeError, "v must be a numpy array or a torch tensor, not list: pass"),
    ],
)
def test_a_bad_operand_is_named_with_its_mend_and_stores_nothing(change, error, message):
    rows = np.ones(ROWS, np.float32)
    operands = {"kv": np.zeros(KV, np.float32), "slots": np.array(SLOTS), "k": rows, "v": rows} | change
    with pytest.raises(error, match=message):
        append_kv(**operands)
    assert not operands["kv"].any()


def test_rows_of_the_same_cache_are_refused():
    kv, slots = np.zeros((4, 1, 2, 1, 8), np.float32), np.array([2, 3])
    rows = np.ones((2, 1, 8), np.float32)
    for name, own in (("k", kv[:2, :, 0, 0]), ("v", kv[2:, :, 1, 0])):
        with pytest.raises(ValueError, match=rf"kv must not overlap {name}, .*: pass a copy of {name}"):
            append_kv(kv, slots, **{"k": rows, "v": rows} | {name: own})


def test_declared_work():
    assert append_kv_work(kv_heads=2, head_dim=8, rows=3, kv_itemsize=4) == (0, 3 * 2 * (2 * 8) * (4 + 4))
    assert append_kv_work(kv_heads=2, head_dim=8, rows=3, kv_itemsize=1) == (0, 3 * 2 * 2 * (8 * (4 + 1) + 4))


def test_python_runs_while_rows_are_stored():
    count = 4000
    rows = np.ones((count, 8, 128), np.float32)

    def seen_half_done():
        kv = np.zeros((count, 8, 2, 1, 128), np.uint16)
        thread = threading.Thread(target=append_kv, args=(kv, np.arange(count), rows, rows))
        thread.start()
        while not kv[0, -1, -1, -1, -1]:
            pass
        half_done = not kv[-1, -1, -1, -1, -1]
        thread.join()
        return half_done

    assert any(seen_half_done() for _ in range(20))


@given(st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.uint16, np.float16, np.int8]), st.booleans())
def test_copied_blocks_are_the_references_bit_by_bit(seed, dtype, latents):
    random = np.random.default_rng(seed)
    held, kv_heads, block, dim, count = random.integers(1, [5, 4, 9, 12, 8]).tolist()
    shape = (block, dim) if latents else (kv_heads, 2, block, dim)
    source, target = (
        random.integers(0, 256, (number, *shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
        for number in (held, count)
    )
    source, target = source.copy(), target.copy()
    blocks = random.integers(0, held, count, dtype=np.int32)
    tokens = random.integers(0, block + 1, count)
    want = copy_blocks_reference(target, source, blocks, tokens)
    copy_blocks(target, source, blocks, tokens)
    assert target.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("blocks", np.array([2], np.int32), r"blocks\[0\] must be in 0 .. 1"),
        ("blocks", np.array([-1], np.int32), r"blocks\[0\] must be in 0 .. 1"),
        ("tokens", np.array([5]), r"tokens\[0\] must be in 0 .. 4"),
        ("tokens", np.array([1, 1]), "tokens must have shape"),
        ("target", np.zeros((2, 1, 2, 4, 3), np.float32), "target must have shape"),
        ("source", np.zeros((2, 1, 1, 4, 3), np.float32), "source must have shape"),
        ("source", np.zeros((2, 4, 3), np.float32), r"target must have shape \(N, b, D\)"),
    ],
)
def test_blocks_that_cannot_be_copied_are_refused_and_the_target_stays(name, value, match):
    operands = {
        "target": np.zeros((1, 1, 2, 4, 3), np.float32),
        "source": np.ones((2, 1, 2, 4, 3), np.float32),
        "blocks": np.array([1], np.int32),
        "tokens": np.array([4]),
    } | {name: value}
    with pytest.raises(ValueError, match=match):
        copy_blocks(**operands)
    assert not operands["target"].any()


def test_a_target_that_overlaps_the_source_is_refused():
    pool = np.zeros((3, 1, 2, 4, 3), np.float32)
    with pytest.raises(ValueError, match="target must not overlap source"):
        copy_blocks(pool[:1], pool, np.zeros(1, np.int32), np.ones(1, np.int64))


def test_copying_declares_every_entry_read_and_stored_once():
    assert copy_blocks_work(kv_heads=2, head_dim=8, tokens=3, kv_itemsize=2) == (0, 3 * 2 * 2 * 8 * 2 * 2)
