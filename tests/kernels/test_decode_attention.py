"""`decode_attention` against its float64 oracle, on caches whose unused memory is poisoned."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels_cpu
from kernels_cpu import (
    CodePath,
    append_kv,
    decode_attention,
    decode_attention_reference,
    decode_attention_work,
    mla_decode,
    mla_decode_reference,
)
from kernels_cpu.attention import tasks as decode_tasks
from kernels_cpu.attention.matrix_tasks import fits_matrices
from kernels_cpu.codegen.vector_ir import LINE, Storage
from kernels_cpu.machine.features import has
from kernels_cpu.machine.parameters import parameters
from kernels_cpu.threads import team
from tests.examples import examples

GARBAGE = np.int32(2**31 - 1)
DTYPES = ("fp32", "bf16", "fp16", "int8")
# (query heads per KV head, head dim, cache) with vector code, each compiled once: every way in which heads and rows are
# cut into registers. AVX2 takes a few of them, the portable path any.
SHAPES = {
    CodePath.AVX512: [
        (1, 128, "bf16"), (2, 64, "bf16"), (3, 96, "fp32"), (4, 128, "bf16"), (5, 80, "bf16"), (8, 192, "bf16"),
        (12, 64, "fp16"), (16, 256, "bf16"), (4, 24, "bf16"), (1, 128, "int8"), (12, 96, "int8"),
    ],
    CodePath.AVX2: [(1, 128, "bf16"), (4, 80, "bf16"), (7, 64, "fp32"), (16, 96, "fp16"), (3, 64, "int8")],
}  # fmt: skip


on_both_paths = pytest.mark.parametrize("path", [CodePath.AVX512, CodePath.PORTABLE], ids=lambda path: path.name)


@dataclass(frozen=True)
class Problem:
    q: Any
    kv: Any
    table: Any
    lengths: Any
    scales: Any = None

    def decode(self, **options: Any) -> Any:
        return decode_attention(self.q, self.kv, self.table, self.lengths, scales=self.scales, **options)

    def reference(self, **options: Any) -> Any:
        return decode_attention_reference(self.q, self.kv, self.table, self.lengths, scales=self.scales, **options)


def stored(kv: Any, dtype: str) -> Any:
    """fp32 rounded to the type of a cache."""
    if dtype == "bf16":
        return torch.from_numpy(kv).to(torch.bfloat16).view(torch.uint16).numpy()
    return kv.astype(np.float16 if dtype == "fp16" else np.float32)


def in_bytes(kv: Any) -> tuple[Any, Any]:
    """A cache of int8 and its scales; what is NaN gets the largest byte and a scale of NaN."""
    scales = np.abs(kv).max(axis=4) / np.float32(127)
    return np.rint(np.nan_to_num(kv / scales[..., None], nan=127)).astype(np.int8), scales


def problem(lengths, kv_heads=2, group=4, dim=16, block=16, dtype="fp32", seed=0) -> Problem:
    """Random operands: every slot that is not in use is NaN, every table entry past the end is garbage."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int64)
    pages = -(-lengths // block)
    order = rng.permutation(pages.sum() + 2).astype(np.int32)  # two blocks stay unused
    kv = np.full((order.size, kv_heads, 2, block, dim), np.nan, np.float32)
    table = np.full((lengths.size, pages.max() + 1), GARBAGE, np.int32)
    for s, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        table[s, :count], order = order[:count], order[count:]
        token = np.arange(length)
        shape = (length, kv_heads, 2, dim)
        kv[table[s, token // block], :, :, token % block] = rng.standard_normal(shape, dtype=np.float32)
    q = rng.standard_normal((lengths.size, kv_heads * group, dim), dtype=np.float32)
    if dtype == "int8":
        numbers, scales = in_bytes(kv)
        return Problem(q, numbers, table, lengths, scales)
    return Problem(q, stored(kv, dtype), table, lengths)


@st.composite
def problems(draw: st.DrawFn, path: CodePath) -> Problem:
    block = draw(st.sampled_from((1, 5, 16, 64, 100, 256)))
    near = st.integers(1, 5).flatmap(lambda n: st.sampled_from((n * block - 1, n * block, n * block + 1)))
    whatever = st.tuples(st.integers(1, 16), st.sampled_from((8, 13, 16, 20, 32, 64, 80, 128)), st.sampled_from(DTYPES))
    group, dim, dtype = draw(st.sampled_from(SHAPES[path]) if path in SHAPES else whatever)
    return problem(
        draw(
            st.lists(st.one_of(st.just(1), near.map(lambda n: max(n, 1)), st.integers(1, 200)), min_size=1, max_size=4)
        ),
        kv_heads=draw(st.integers(1, 3)),
        group=group,
        dim=dim,
        block=block,
        dtype=dtype,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@examples(150)
@given(st.data(), st.sampled_from(CodePath))
def test_equals_float64_whatever_the_unused_memory_holds(data, path):
    case = data.draw(problems(path))
    options = {"window": data.draw(st.none() | st.integers(1, 300))}
    if data.draw(st.booleans()):
        options["sinks"] = np.linspace(-2, 3, case.q.shape[1], dtype=np.float32)
    found = case.decode(**options, path=path, threads=data.draw(st.integers(1, 3)))
    np.testing.assert_allclose(found, case.reference(**options), rtol=0, atol=2e-6)


with_matrices = pytest.mark.skipif(not kernels_cpu.features().matrices, reason="a CPU without matrix registers")


@with_matrices
@examples(30)
@given(st.sampled_from([(6, 128), (8, 192), (9, 96), (16, 256)]), st.lists(st.integers(1, 300), min_size=1, max_size=3))
def test_vectors_equal_float64_where_matrices_would_be_taken(shape, lengths):
    case = problem(lengths, 2, *shape, block=16, dtype="bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_tasks, "fits_matrices", lambda *_: False)
        np.testing.assert_allclose(case.decode(path=CodePath.AVX512), case.reference(), rtol=0, atol=2e-6)


@with_matrices
@examples(150)
@given(st.data())
def test_matrices_equal_float64_whatever_the_unused_memory_holds(data):
    group, dim = data.draw(st.sampled_from([(6, 128), (7, 64), (8, 128), (9, 96), (12, 160), (16, 256), (20, 32)]))
    block = data.draw(st.sampled_from((1, 5, 16, 64, 100, 256)))
    near = st.sampled_from((1, 31, 32, 33, 127, 128, 129, 255, 256, 257)) | st.integers(1, 400)
    lengths, kv_heads = data.draw(st.lists(near, min_size=1, max_size=4)), data.draw(st.integers(1, 3))
    case = problem(lengths, kv_heads, group, dim, block, "bf16", data.draw(st.integers(0, 2**32 - 1)))
    assert fits_matrices(CodePath.AVX512, Storage.BF16, group, dim, dim)
    options = {"window": data.draw(st.none() | st.integers(1, 300))}
    if data.draw(st.booleans()):
        options["sinks"] = np.linspace(-2, 3, case.q.shape[1], dtype=np.float32)
    found = case.decode(**options, threads=data.draw(st.integers(1, 3)))
    np.testing.assert_allclose(found, case.reference(**options), rtol=0, atol=2e-6)


with_pairs = pytest.mark.skipif(not has("avx512bf16"), reason="a CPU without AVX512_BF16")


def in_bf16(case: Problem, rows: slice = slice(None)) -> Problem:
    """The problem with the queries of some sequences cut to bf16 numbers."""
    q = case.q.copy()
    q.view(np.uint32)[rows] &= 0xFFFF0000
    return replace(case, q=q)


@pytest.fixture
def pairs(monkeypatch):
    """Decide whether decodes multiply pairs, with any number of heads and on any CPU that can."""
    monkeypatch.setattr(decode_tasks, "fits_matrices", lambda *_: False)
    return lambda taken: monkeypatch.setattr(decode_tasks, "multiplies_pairs", lambda *_: taken)


@with_pairs
@examples(100)
@given(st.data())
def test_pairs_equal_float64_whatever_the_unused_memory_holds(data):
    group, dim = data.draw(st.sampled_from([(4, 128), (5, 80), (12, 48)]))  # each is compiled
    block = data.draw(st.sampled_from((1, 5, 16, 64, 100, 256)))
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    drawn = problem(lengths, data.draw(st.integers(1, 3)), group, dim, block, "bf16", data.draw(st.integers(0, 999)))
    case = in_bf16(drawn, slice(data.draw(st.integers(0, 2)), None))
    options = {"window": data.draw(st.none() | st.integers(1, 300)), "scale": data.draw(st.sampled_from([None, -0.2]))}
    if data.draw(st.booleans()):
        options["sinks"] = np.linspace(-2, 3, case.q.shape[1], dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_tasks, "fits_matrices", lambda *_: False)
        patch.setattr(decode_tasks, "multiplies_pairs", lambda *_: True)
        found = case.decode(**options, path=CodePath.AVX512)
        again = case.decode(**options, path=CodePath.AVX512, threads=3)
    np.testing.assert_allclose(found, case.reference(**options), rtol=0, atol=2e-6)
    np.testing.assert_array_equal(found, again)


@with_pairs
@pytest.mark.parametrize(("bit", "taken"), [(0, True), (1, False), (1 << 15, False)])
def test_pairs_are_taken_for_sequences_of_bf16_queries_alone(bit, taken, pairs):
    """A query with one more bit than bf16 has would lose it; the sequences beside it do not matter."""
    case = in_bf16(problem([70, 9], group=8, dim=128, dtype="bf16"))
    case.q.view(np.uint32)[0, -1, -1] |= bit
    pairs(False)
    without = case.decode(path=CodePath.AVX512)
    pairs(True)
    found = case.decode(path=CodePath.AVX512)
    assert [not np.array_equal(*each) for each in zip(found, without, strict=True)] == [taken, True]
    first = replace(case, q=case.q[:1], table=case.table[:1], lengths=case.lengths[:1])
    np.testing.assert_array_equal(first.decode(path=CodePath.AVX512)[0], found[0])


@pytest.mark.parametrize(("least", "expected"), [(0, []), (3, [4, 5, 16]), (5, [5, 16])])
def test_pairs_are_taken_from_as_many_heads_on_as_the_table_says(least, expected, monkeypatch):
    monkeypatch.setattr(decode_tasks, "_SETTINGS", replace(parameters().attention, pairs_from=least))
    monkeypatch.setattr(decode_tasks, "has", lambda feature: feature == "avx512bf16")
    assert [group for group in (1, 2, 4, 5, 16) if decode_tasks.multiplies_pairs(16, group)] == expected
    assert not decode_tasks.multiplies_pairs(8, 16)


LLVM_ORDERS = kernels_cpu.features().lanes != 16 or parameters().attention.ordered_products[16] < 8


def prefetched_at_once(*, paired: bool) -> list[int]:
    """How many lines are prefetched from one product to the next in the loop for four heads of 128 dims in bf16."""
    known = decode_tasks.decoder(16, Storage.BF16, 4, 128, 128, False, paired)
    code = numba.njit(known.py_func)
    code.compile(known.signatures[0])
    (assembly,) = code.inspect_asm().values()
    steps = itertools.groupby(re.findall(r"prefetch|vfmadd\w+ps|vdpbf16ps", assembly), lambda step: step == "prefetch")
    return [len(list(some)) for asked, some in steps if asked]


@pytest.mark.skipif(LLVM_ORDERS, reason="LLVM orders the products here")
def test_next_lines_are_prefetched_between_products():
    """LLVM gathers a dozen prefetches at a block's beginning unless it is told to keep the order; then memory waits."""
    problem([64], group=4, dim=128, dtype="bf16").decode(path=CodePath.AVX512)
    bursts = prefetched_at_once(paired=False)
    assert bursts.count(1) >= 16 + 8  # a group of four rows of keys, two passes over values
    assert max(bursts) <= 4  # in the softmax


@with_pairs
def test_next_lines_are_prefetched_between_products_of_pairs(pairs):
    """Three quarters of the keys are prefetched there, in a decoder that has code for queries in fp32 too."""
    pairs(True)
    in_bf16(problem([64], group=4, dim=128, dtype="bf16")).decode(path=CodePath.AVX512)
    assert prefetched_at_once(paired=True).count(1) >= 12


@with_matrices
@pytest.mark.parametrize("group", [8, 16, 20])
def test_matrices_keep_every_bit_of_queries_and_weights(group):
    """With two bf16 to an fp32 the last 8 of 24 bits would be lost: the bound is a quarter of the usual one."""
    case = problem([2, 300, 20_000], group=group, dim=128, dtype="bf16")
    alone = case.decode(threads=1)
    np.testing.assert_allclose(alone, case.reference(), rtol=0, atol=5e-7)
    np.testing.assert_array_equal(case.decode(threads=3), alone)
    capped = case.reference(softcap=2.0, scale=1.0)
    np.testing.assert_allclose(case.decode(softcap=2.0, scale=1.0), capped, rtol=0, atol=2e-6)


def test_scratch_outlives_its_last_use_by_name():
    """Numba frees an array while its address is in use; with one arena for all threads, another one gets it."""
    code = (
        "import numpy as np; from kernels_cpu import decode_attention\n"
        "draw = np.random.default_rng(0)\n"
        "kv = draw.standard_normal((256, 2, 2, 64, 128), np.float32)\n"
        "kv = (kv.view(np.uint32) >> 16).astype(np.uint16)\n"
        "table, lengths = draw.permutation(256).astype(np.int32).reshape(64, 4), np.full(64, 200)\n"
        "for heads in (4, 16, 32, 64):\n"
        "    q = draw.standard_normal((64, heads, 128), np.float32)\n"
        "    alone, *others = (decode_attention(q, kv, table, lengths, threads=t) for t in [1] + 20 * [4])\n"
        "    print(heads, sum(not np.array_equal(alone, other) for other in others))\n"
    )
    one = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=one, check=False)
    assert run.stdout == "4 0\n16 0\n32 0\n64 0\n", run.stderr


@with_matrices
@pytest.mark.parametrize("half", [0, 1])
def test_nan_in_a_live_token_is_not_hidden_by_matrices(half):
    case = problem([20, 20], group=8, dim=64, dtype="bf16")
    case.kv[case.table[0, 1], 0, half, 2] = 0x7FC0
    out = case.decode()
    assert np.isnan(out[0, :8]).all()
    assert np.isfinite(out[0, 8:]).all()
    assert np.isfinite(out[1]).all()


@with_matrices
def test_torch_multiplies_matrices_before_and_after_in_the_same_thread():
    case = problem([300, 77], group=8, dim=128, dtype="bf16")
    a, b = torch.randn(64, 256).bfloat16(), torch.randn(256, 512).bfloat16()
    product, want = a @ b, case.decode(threads=1)
    for _ in range(3):
        np.testing.assert_array_equal(case.decode(threads=1), want)
        assert torch.equal(a @ b, product)


@on_both_paths
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_scores_are_capped(softcap, path):
    case = problem([70, 130], group=2, dim=64, dtype="bf16")
    np.testing.assert_allclose(
        case.decode(softcap=softcap, scale=1.0, path=path),
        case.reference(softcap=softcap, scale=1.0),
        rtol=0,
        atol=5e-6,
    )
    assert np.abs(case.reference(softcap=softcap, scale=1.0) - case.reference(scale=1.0)).max() > 1e-2


@on_both_paths
def test_a_long_context_keeps_the_error_and_parts_merge_alike_on_any_threads(path):
    case = problem([20_000, 1, 4097], dim=128, dtype="bf16")
    alone = case.decode(threads=1, path=path)
    np.testing.assert_allclose(alone, case.reference(), rtol=0, atol=2e-6)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(case.decode(threads=threads, path=path), alone)


@on_both_paths
def test_a_window_reads_nothing_before_it(path):
    case = problem([200, 64, 5], dim=128, dtype="bf16")
    hidden = replace(case, table=case.table.copy())
    hidden.table[0, : (200 - 70) // 16] = GARBAGE
    np.testing.assert_array_equal(hidden.decode(window=70, path=path), case.decode(window=70, path=path))


@pytest.mark.parametrize("path", CodePath)
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("cut", [0, 0xFFFF], ids=["fp32", "bf16"])
def test_latent_attention_equals_float64(path, heads, cut):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, heads, 576), dtype=np.float32)
    q.view(np.uint32)[:] &= ~np.uint32(cut)
    kv = np.full((40, 16, 576), np.nan, np.float32)
    table, lengths = rng.permutation(39).astype(np.int32).reshape(3, 13), np.array([200, 65, 1])
    for row, length in zip(table, lengths, strict=True):
        for token in range(length):
            kv[row[token // 16], token % 16] = rng.standard_normal(576)
    kv = stored(kv, "bf16")
    found = mla_decode(q, kv, table, lengths, scale=192**-0.5, path=path)
    np.testing.assert_allclose(found, mla_decode_reference(q, kv, table, lengths, scale=192**-0.5), rtol=0, atol=2e-6)


def test_latent_attention_is_that_of_one_head_whose_value_begins_its_key():
    case = problem([50, 3], kv_heads=1, group=3, dim=20)
    rows = case.kv[:, 0, 0]
    same = replace(case, kv=np.stack([rows, rows], axis=1)[:, None])
    found = mla_decode(case.q, rows.copy(), case.table, case.lengths, value_dim=13, scale=20**-0.5)
    np.testing.assert_allclose(found, same.reference()[..., :13], rtol=0, atol=2e-6)


@pytest.mark.parametrize("shift", [1, 3])
def test_rows_need_no_alignment_beyond_their_elements(shift):
    case = problem([100, 33], dim=128, dtype="bf16")
    room = np.empty(case.kv.size + shift, np.uint16)
    room[shift:] = case.kv.ravel()
    moved = replace(case, kv=room[shift:].reshape(case.kv.shape))
    np.testing.assert_array_equal(moved.decode(), case.decode())


def test_the_oracle_equals_torch():
    case = problem([37], dim=20)
    rows = case.kv[case.table[0, :3]].transpose(2, 1, 0, 3, 4).reshape(2, 2, 48, 20)[:, :, :37]
    k, v = torch.from_numpy(rows).double()
    q = torch.from_numpy(case.q[0]).double()[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(4, 0), v.repeat_interleave(4, 0))
    np.testing.assert_allclose(case.reference()[0], want[:, 0], rtol=1e-12)


@on_both_paths
@pytest.mark.parametrize("scale", [0.0, 0.5, -1.0, 3.0])
def test_scale_is_applied(scale, path):
    case = problem([70, 3])
    np.testing.assert_allclose(case.decode(scale=scale, path=path), case.reference(scale=scale), rtol=0, atol=1e-5)


@on_both_paths
def test_scores_of_any_size_neither_overflow_nor_vanish(path):
    case = problem([100, 40])
    np.testing.assert_allclose(case.decode(scale=1e4, path=path), case.reference(scale=1e4), rtol=0, atol=5e-2)
    assert np.isfinite(case.decode(scale=1e30, path=path)).all()


@on_both_paths
@pytest.mark.parametrize("half", [0, 1])
def test_nan_in_a_live_token_is_not_hidden(half, path):
    case = problem([20, 20])
    case.kv[case.table[0, 1], 0, half, 2] = np.nan
    out = case.decode(path=path)
    assert np.isnan(out[0, :4]).all()
    assert np.isfinite(out[0, 4:]).all()
    assert np.isfinite(out[1]).all()


@on_both_paths
def test_scales_are_those_of_the_rows_in_every_option_and_size_of_block(path):
    for block in (1, 16, 70):
        case = problem([150, 64, 5], group=1, dim=128, block=block, dtype="int8")
        options = {"window": 100, "softcap": 2.0, "sinks": np.linspace(-2, 3, 2, dtype=np.float32)}
        want = case.reference(**options)
        np.testing.assert_allclose(case.decode(**options, path=path), want, rtol=0, atol=2e-6)
        for half in (0, 1):  # a scale that is not used would change nothing
            other = replace(case, scales=case.scales.copy())
            other.scales[other.table[0, 149 // block], :, half, 149 % block] *= 9
            assert np.abs(other.decode(**options, path=path)[0] - want[0]).max() > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_and_arrays_are_the_same_memory(dtype):
    case = problem([33, 16, 1], dtype=dtype)
    kv = torch.from_numpy(case.kv)
    tensors = Problem(
        torch.from_numpy(case.q),
        kv.view(torch.bfloat16) if dtype == "bf16" else kv,
        torch.from_numpy(case.table),
        torch.from_numpy(case.lengths),
        None if case.scales is None else torch.from_numpy(case.scales),
    )
    out = torch.empty(case.q.shape)
    assert tensors.decode(out=out) is out
    assert isinstance(tensors.decode(), torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), case.decode())
    np.testing.assert_array_equal(tensors.decode().numpy(), case.decode())
    np.testing.assert_array_equal(tensors.reference(), case.reference())


def test_out_int32_lengths_and_an_empty_batch():
    case = problem([33, 16, 1])
    out = np.full_like(case.q, np.nan)
    assert case.decode(out=out) is out
    np.testing.assert_array_equal(replace(case, lengths=case.lengths.astype(np.int32)).decode(), out)
    empty = Problem(case.q[:0], case.kv, case.table[:0], case.lengths[:0])
    assert empty.decode().shape == (0, 8, 16)


def test_decodes_what_append_stored():
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 9, 2, 8), dtype=np.float32)
    kv = np.full((4, 2, 2, 4, 8), np.nan, np.float32)
    table = np.array([[3, 0, 2]], np.int32)
    token = np.arange(9)
    append_kv(kv, table[0, token // 4].astype(np.int64) * 4 + token % 4, k, v)
    q = rng.standard_normal((1, 2, 8), dtype=np.float32)
    scores = np.einsum("hd,thd->ht", q[0].astype(np.float64), k) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    want = np.einsum("ht,thd->hd", weights, v)
    np.testing.assert_allclose(decode_attention(q, kv, table, np.array([9]))[0], want, rtol=0, atol=2e-6)


def bad(**change):
    return lambda case: replace(case, **{name: make(getattr(case, name)) for name, make in change.items()})


def with_value(index, value):
    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


BAD = [
    (bad(q=lambda q: q.astype(np.float64)), TypeError, "q must be float32, not float64: convert"),
    (bad(q=lambda q: q.tolist()), TypeError, "q must be a numpy array or a torch tensor, not list: pass"),
    (bad(q=lambda q: torch.empty(q.shape, device="meta")), ValueError, r"q must be in CPU memory, not on meta: pass"),
    (bad(q=lambda q: torch.from_numpy(q).bfloat16()), TypeError, "q must be float32, not torch.bfloat16: convert"),
    (bad(q=lambda q: torch.from_numpy(q).to_sparse()), TypeError, "q must be a tensor that numpy can read"),
    (bad(q=lambda q: torch._neg_view(torch.from_numpy(q))), TypeError, "q must be a tensor that numpy can read"),
    (bad(kv=lambda kv: torch.from_numpy(kv).to(torch.float8_e5m2)), TypeError, "kv must be a tensor that numpy can"),
    (bad(q=lambda q: q[0]), ValueError, r"q must have shape \(B, H, D\), not \(8, 16\): reshape"),
    (bad(q=lambda q: q[:, ::-1]), ValueError, "q must be C-contiguous and aligned: pass"),
    (bad(q=lambda q: q[:, :7].copy()), ValueError, "q must have a multiple of the 2 KV heads of kv, not 7: pass"),
    (bad(q=lambda q: q[:, :0].copy()), ValueError, "q must have a multiple of the 2 KV heads of kv, not 0: pass"),
    (bad(q=lambda q: q[..., :8].copy()), ValueError, "kv must have the head dim of q, 8, not 16: pass"),
    (
        bad(kv=lambda kv: kv.astype(np.float64)),
        TypeError,
        r"kv must be float32 or uint16 \(bfloat16 bits\) or float16 or int8, not float64",
    ),
    (bad(kv=lambda kv: kv[0]), ValueError, r"kv must have shape \(P, K, 2, b, D\), not \(2, 2, 16, 16\): reshape"),
    (bad(kv=lambda kv: kv[:, :, :1].copy()), ValueError, r"kv must have shape \(P, K, 2, b, D\) with K, b and D >= 1"),
    (bad(kv=lambda kv: kv[:, :0].copy()), ValueError, "kv must have shape .* with K, b and D >= 1, not"),
    (bad(kv=lambda kv: kv[::2]), ValueError, "kv must be C-contiguous and aligned: pass"),
    (bad(table=lambda t: t.astype(np.int64)), TypeError, "table must be int32, not int64: convert"),
    (bad(table=lambda t: t[:1]), ValueError, "table must have one row per row of q, 2, not 1: pass"),
    (bad(table=lambda t: t[:, ::-1]), ValueError, "table must be C-contiguous and aligned: pass"),
    (bad(table=with_value((0, 1), 6)), ValueError, r"table\[0, 1\] must be a block of kv in \[0, 6\), not 6: allocate"),
    (
        bad(table=with_value((1, 0), -1)),
        ValueError,
        r"table\[1, 0\] must be a block of kv in \[0, 6\), not -1: allocate",
    ),
    (bad(lengths=lambda n: n.astype(np.float32)), TypeError, "lengths must be int32 or int64, not float32: convert"),
    (bad(lengths=lambda n: n[:1]), ValueError, "lengths must have one row per row of q, 2, not 1: pass"),
    (bad(lengths=with_value(1, 0)), ValueError, r"lengths\[1\] must be >= 1, not 0: leave"),
    (bad(lengths=with_value(0, 65)), ValueError, r"lengths\[0\] must be <= 64, .* not 65: widen"),
]


@pytest.mark.parametrize("change, error, message", BAD)
def test_a_bad_operand_is_named_with_its_mend(change, error, message):
    case = problem([33, 16])
    assert case.kv.shape[0] == 6
    with pytest.raises(error, match=message):
        change(case).decode()


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "out, error, message",
    [
        (lambda q: np.empty(q.shape), TypeError, "out must be float32, not float64"),
        (
            lambda q: np.empty_like(q[:1]),
            ValueError,
            r"out must have the shape \(2, 8, 16\) of the result, not \(1, 8, 16\): leave",
        ),
        (lambda q: np.empty((2, 16, 8), np.float32).transpose(0, 2, 1), ValueError, "out must be C-contiguous"),
        (lambda q: read_only(np.empty_like(q)), ValueError, "out must be writeable, because the kernel stores"),
    ],
)
def test_a_bad_out_is_named_with_its_mend(out, error, message):
    case = problem([33, 16])
    with pytest.raises(error, match=message):
        case.decode(out=out(case.q))


@pytest.mark.parametrize(
    "option, message",
    [
        ({"scale": np.nan}, "scale must be finite, not nan: leave"),
        ({"scale": np.inf}, "scale must be finite, not inf: leave"),
        ({"window": 0}, "window must be >= 1 token, not 0: leave"),
        ({"softcap": 0.0}, "softcap must be positive, not 0.0: leave"),
        ({"softcap": np.nan}, "softcap must be positive, not nan: leave"),
        ({"softcap": 1e300}, r"softcap must be positive, not 1e\+300: leave"),
        ({"scale": 1e300}, r"scale must be finite, not 1e\+300: leave"),
        ({"scale": 10**400}, "scale must be finite"),
        ({"threads": 0}, "threads must be >= 1, not 0: leave"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks must have one score per head of q, 8, not 3: pass"),
    ],
)
def test_a_bad_option_is_named_with_its_mend(option, message):
    with pytest.raises(ValueError, match=message):
        problem([3]).decode(**option)


@pytest.mark.parametrize(
    "option, message",
    [
        ({"window": 1.5}, "window must be a whole number, not 1.5: pass an int"),
        ({"window": "3"}, "window must be a whole number, not '3'"),
        ({"threads": 1.5}, "threads must be a whole number, not 1.5"),
        ({"threads": True}, "threads must be a whole number, not True"),
        ({"scale": "x"}, "scale must be a number, not 'x': pass a float"),
        ({"softcap": "x"}, "softcap must be a number, not 'x'"),
        ({"path": "AVX2"}, r"path must be a CodePath, not 'AVX2'"),
    ],
)
def test_an_option_of_another_kind_is_named_with_its_mend(option, message):
    with pytest.raises(TypeError, match=message):
        problem([3]).decode(**option)


def test_options_of_latent_attention_are_checked_too():
    q, kv, table, lengths = (
        np.zeros(s, d) for s, d in (((1, 1, 8), "f4"), ((1, 4, 8), "f4"), ((1, 1), "i4"), (1, "i8"))
    )
    with pytest.raises(TypeError, match="scale must be a number, not None"):
        mla_decode(q, kv, table, lengths + 1, value_dim=4, scale=None)
    with pytest.raises(TypeError, match=r"value_dim must be a whole number, not 4\.0"):
        mla_decode(q, kv, table, lengths + 1, value_dim=4.0, scale=1.0)


def test_a_window_wider_than_any_sequence_hides_nothing():
    case = problem([33, 16])
    np.testing.assert_array_equal(case.decode(window=2**70), case.decode())


def test_out_may_be_q_itself():
    case = problem([700, 3, 512])
    want, q = case.decode(), case.q.copy()
    assert decode_attention(q, case.kv, case.table, case.lengths, out=q) is q
    np.testing.assert_array_equal(q, want)


def test_out_that_overlaps_what_is_still_read_is_refused():
    case = problem([33, 16])
    shared = np.zeros(case.q.size + 128, np.float32)
    q, out = (shared[start : start + case.q.size].reshape(case.q.shape) for start in (0, 128))
    with pytest.raises(ValueError, match=r"out must not overlap q, .*: pass a copy of q"):
        decode_attention(q, case.kv, case.table, case.lengths, out=out)
    with pytest.raises(ValueError, match="out must not overlap kv"):
        case.decode(out=case.kv.reshape(-1)[: case.q.size].reshape(case.q.shape))
    case = problem([33, 16], kv_heads=1, group=1, dtype="int8")
    with pytest.raises(ValueError, match="out must not overlap scales"):
        case.decode(out=case.scales.reshape(-1)[: case.q.size].reshape(case.q.shape))


@examples(2000)
@given(st.integers(0, 2**32 - 1))
def test_operands_at_random_give_one_clear_error_or_the_right_result(seed):
    """Tables, lengths, blocks, shapes and types are broken one by one; nothing is read that is not there."""
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 3, 16]))
    case = problem(rng.integers(1, 40, rng.integers(1, 4)), group=4, dim=128, block=block, dtype="bf16", seed=seed)
    where = rng.integers(0, 7)
    table, lengths, kv = case.table.copy(), case.lengths.copy(), case.kv
    if where == 0:
        table.flat[rng.integers(table.size)] = rng.integers(-3, len(kv) + 3)
    elif where == 1:
        lengths[rng.integers(len(lengths))] = rng.integers(-2, table.shape[1] * block + 3)
    elif where == 2:
        kv = kv[: rng.integers(0, len(kv))]
    elif where == 3:
        kv = kv[..., : rng.integers(1, 128)]
    elif where == 4:
        table = table[:, : rng.integers(0, table.shape[1])]
    elif where == 5:
        table = np.asfortranarray(table)
    else:
        lengths = lengths.astype(rng.choice([np.int32, np.int64, np.float64, np.uint8]))
    broken = Problem(case.q, kv, table, lengths)
    try:
        found = broken.decode()
    except (TypeError, ValueError) as error:
        told = str(error)
        assert re.fullmatch(r"\w+(\[[\d, ]+\])? must .*: .*", told)
        return
    np.testing.assert_allclose(found, broken.reference(), rtol=0, atol=2e-6)  # NaN where unused rows became live


def test_declared_work():
    flops, moved = decode_attention_work(heads=8, kv_heads=2, head_dim=16, context=49, rows=2, kv_itemsize=2)
    assert flops == 2 * 2 * 8 * 16 * 49  # two products, multiply and add
    assert moved == 49 * 2 * 2 * 16 * 2 + 2 * (2 * 8 * 16) * 4


@on_both_paths
def test_two_threads_at_once_get_their_own_answers(path):
    cases = [problem([300, 77, 1], group=2, dim=64, dtype="bf16", seed=seed) for seed in range(2)]
    want = [case.decode(path=path) for case in cases]
    start, wrong = threading.Barrier(2), []

    def work(index):
        start.wait()
        for _ in range(30):
            if not np.array_equal(cases[index].decode(path=path), want[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


on_every_loop = pytest.mark.parametrize(
    ("path", "group"), [(CodePath.AVX512, 4), (CodePath.AVX512, 8), (CodePath.PORTABLE, 4)],
    ids=["vectors", "matrices where there are any", "portable"],
)  # fmt: skip


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores")
def test_threads_that_help_a_pinned_one_work_on_other_cores():
    """Whichever thread called first, and wherever it was pinned."""
    everywhere = os.sched_getaffinity(0)
    found = {}

    def call(core):
        os.sched_setaffinity(0, {core})
        begun = threading.Barrier(2)
        team.side_by_side(lambda: (begun.wait(10), found.setdefault(core, []).append(os.sched_getaffinity(0))), 2)

    for core in everywhere:
        thread = threading.Thread(target=call, args=(core,))
        thread.start()
        thread.join()
    assert all({core} in seen and everywhere - {core} in seen for core, seen in found.items())
    assert set(found) == everywhere


@on_every_loop
def test_a_thread_that_comes_when_all_is_done_does_nothing(path, group, monkeypatch):
    counter = np.zeros(2 * LINE // 8, np.int64)
    late = []

    def alone(serve, arguments, threads):
        late.append(lambda: serve(counter.ctypes.data, *arguments))
        late[0]()

    monkeypatch.setattr(decode_tasks, "pull", alone)
    case = problem([40, 3, 130], group=group, dim=128, dtype="bf16")
    out = np.empty_like(case.q)
    case.decode(path=path, out=out)
    np.testing.assert_allclose(out, case.reference(), rtol=0, atol=2e-6)
    out[:] = np.nan
    late[0]()
    assert np.isnan(out).all()


def seen_half_done(case: Problem) -> bool:
    """Whether Python here saw the first row of a running call stored before the last one."""
    out = np.full_like(case.q, np.nan)
    thread = threading.Thread(target=case.decode, kwargs={"out": out})
    thread.start()
    while np.isnan(out[0, -1, -1]):
        pass
    half_done = bool(np.isnan(out[-1, -1, -1]))
    thread.join()
    return half_done


def test_python_runs_while_the_kernel_does():
    # Holding the GIL, no attempt can succeed; releasing it, one fails only if this thread is kept off every core.
    case = problem([64], kv_heads=8, dim=128)
    rows = 1500
    many = Problem(
        np.repeat(case.q, rows, axis=0), case.kv, np.repeat(case.table, rows, axis=0), np.repeat(case.lengths, rows)
    )
    assert any(seen_half_done(many) for _ in range(10))


def test_an_edit_anywhere_in_the_package_is_seen_by_the_next_process(tmp_path):
    """Numba's own disk cache sees edits of a function's file only; the vectors are emitted by another one."""
    shutil.copytree(
        Path(kernels_cpu.__file__).parent, tmp_path / "kernels_cpu", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = (
        "import numpy as np; from kernels_cpu import decode_attention; "
        "print(decode_attention(np.ones((1, 1, 16), np.float32), np.ones((1, 1, 2, 2, 16), np.float32), "
        "np.zeros((1, 1), np.int32), np.array([2]))[0, 0, 0])"
    )

    def said() -> float:
        command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True, env=beside).stdout)

    beside = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    beside["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    assert said() == said() == 1.0
    assert list((tmp_path / "cache" / "moe-workbench" / "kernels_cpu" / "code").rglob("*.nbi"))
    edited = tmp_path / "kernels_cpu/attention/partials.py"
    text = edited.read_text()
    assert "np.float32(1) / whole" in text
    edited.write_text(text.replace("np.float32(1) / whole", "np.float32(2) / whole"))
    assert said() == 2.0
    emitted = tmp_path / "kernels_cpu/codegen/vector_ir.py"
    text = emitted.read_text()
    assert "return self.b.call(function, [a, b, c])" in text
    emitted.write_text(text.replace("return self.b.call(function, [a, b, c])", "return c"))
    assert said() != 2.0


def test_what_numba_does_not_compile_for_is_not_used():
    """LLVM stops the process at an instruction of another CPU than it was asked for."""
    code = (
        "import numpy as np; from kernels_cpu import features, decode_attention; "
        "q, kv = np.ones((1, 8, 64), np.float32), np.zeros((1, 1, 2, 4, 64), np.uint16); "
        "print(decode_attention(q, kv, np.zeros((1, 1), np.int32), np.ones(1, int)).sum(), "
        "features().path.name, features().matrices)"
    )
    generic = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=generic).stdout
    assert said == "0.0 PORTABLE False\n"


def test_import_loads_neither_torch_nor_the_workbench():
    code = "import sys, kernels_cpu; print([m for m in ('torch', 'triton', 'workbench') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
