"""Stages of few rows: as the single operations in float64 or bit by bit, on every path and number of threads."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_cpu import (
    CodePath,
    Decodes,
    FewExperts,
    FewLayer,
    FewLayers,
    FewLinear,
    FewQkv,
    FewRoute,
    Format,
    PagedDecode,
    append_kv,
    decode_attention,
    experts_in_place,
    fits_few_rows,
    fused_moe,
    pack_experts,
    rms_norm,
    rope,
    route,
)
from kernels_cpu.few_rows import decode, products
from kernels_cpu.machine.features import has
from kernels_triton import rope_table
from tests.examples import DEEP, examples
from tests.kernels.experts_at_hand import error

FP32, BF16 = DTYPES = torch.float32, torch.bfloat16
LIMIT = {FP32: 1e-5, BF16: 8e-3}
PATHS = st.sampled_from([CodePath.AVX512, CodePath.AVX2])
TOKENS = st.integers(1, FewLinear.MOST)
MANY = st.integers(1, 2 * FewLinear.MOST) | st.integers(1, 128)


def made_for_many(stage, *operands, **options):
    """A stage that multiplies in pairs on any CPU that can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_MANY", 128)
        return stage(*operands, **options)


def numbers(dtype, *shape, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype)


def product(x, weight, bias=None):
    """The exact product, rounded once."""
    found = x.double() @ weight.double().T
    return (found if bias is None else found + bias.double()).to(x.dtype)


@examples(120)
@given(
    MANY,
    st.sampled_from([(4, 32), (8, 64), (60, 96), (132, 1024), (1536, 32)]),
    st.sampled_from(DTYPES),
    PATHS,
    st.integers(0, 7),
    st.integers(1, 3),
)
def test_products_agree_with_float64(T, sizes, dtype, path, options, threads):
    R, C = sizes
    torch.manual_seed(R + T)
    weight = numbers(dtype, R, C, scale=C**-0.5)
    bias = numbers(dtype, R) if options & 1 else None
    norm = numbers(dtype, C) if options & 2 else None
    stage = made_for_many(FewLinear, weight, bias, norm=norm, eps=1e-3, path=path)
    T = min(T, stage.most)
    x = numbers(dtype, T, C, scale=3)
    residual = numbers(dtype, T, R) if options & 4 else None
    found = stage(x, residual, threads=threads)
    assert found.equal(stage(x, residual))
    assert found.dtype is dtype
    want = product(x if norm is None else rms_norm(x, norm, eps=1e-3), weight, bias)
    assert error(found, (want if residual is None else residual + want).double()) <= LIMIT[dtype]


@pytest.mark.skipif(not has("avx512bf16"), reason="a CPU without AVX512_BF16")
@pytest.mark.parametrize("T", [5, 6, 7, 8, 13, 128])
def test_many_rows_are_multiplied_in_pairs(T):
    torch.manual_seed(T)
    weight, x = numbers(BF16, 60, 96, scale=0.1), numbers(BF16, T, 96)
    stage = made_for_many(FewLinear, weight, path=CodePath.AVX512)
    assert error(stage(x, threads=2), product(x, weight).double()) < 1e-3  # a sum that is rounded otherwise is rare


@examples(60)
@given(
    MANY,
    st.sampled_from([(4, 2, 16, 16), (6, 2, 12, 8), (2, 2, 64, 64), (1, 1, 8, 2)]),
    st.sampled_from(DTYPES),
    PATHS,
    st.sampled_from(["", "each", "whole"]),
    st.booleans(),
    st.booleans(),
)
def test_queries_keys_and_values_are_normed_projected_and_rotated(T, heads, dtype, path, normed, biased, interleaved):
    H, K, D, R = heads
    torch.manual_seed(T + H)
    M, rows = 64, (H + 2 * K) * D
    norm, proj = numbers(dtype, M), numbers(dtype, rows, M, scale=M**-0.5)
    bias = numbers(dtype, rows) if biased else None
    wide = {"": 0, "each": 1, "whole": 2}[normed]
    q_norm, k_norm = [numbers(dtype, D * (count if wide == 2 else 1)) if wide else None for count in (H, K)]
    table = rope_table(R, 50)
    how = {"interleaved": interleaved, "eps": 1e-3}
    norms = {"q_norm": q_norm, "k_norm": k_norm}
    stage = made_for_many(FewQkv, norm, proj, table, H, K, bias=bias, **norms, path=path, **how)
    T = min(T, stage.most)
    x, positions = numbers(dtype, T, M, scale=3), torch.randint(50, (T,))
    found = stage(x, positions, threads=2)
    joined = product(rms_norm(x, norm, eps=1e-3), proj, bias)
    q, k, v = joined.split([H * D, K * D, K * D], dim=1)

    def turned(own, weight):
        if weight is not None and len(weight) == own.shape[1]:
            own, weight = rms_norm(own, weight, eps=1e-3), None
        return rope(own.unflatten(1, (-1, D)), positions, table, weight=weight, **how).flatten(1)

    wanted = turned(q, q_norm), turned(k, k_norm), v
    for one, want in zip(found, wanted, strict=True):
        assert one.dtype is dtype
        assert one.shape == want.shape
        assert error(one, want.double()) <= LIMIT[dtype]
    assert stage.normed(x).equal(rms_norm(x, norm, eps=1e-3))
    assert all(one.equal(want) for one, want in zip(stage.split(joined, positions), wanted, strict=True))


@examples(40)
@given(
    MANY,
    st.sampled_from([(8, 2), (4, 4), (60, 3)]),
    st.sampled_from(DTYPES),
    PATHS,
    st.booleans(),
)
def test_rows_are_normed_and_routed(T, sizes, dtype, path, renormalise):
    E, k = sizes
    torch.manual_seed(T + E)
    norm, gate = numbers(dtype, 64), numbers(dtype, E, 64, scale=0.3)
    bias, scale = (numbers(dtype, E), 2.0) if T & 1 else (None, 1.0)
    options = {"bias": bias, "renormalise": renormalise, "scale": scale, "eps": 1e-3, "path": path}
    stage = made_for_many(FewRoute, norm, gate, k, **options)
    x = numbers(dtype, min(T, stage.most), 64, scale=3)
    h, gates = stage(x, threads=2)
    assert h.equal(rms_norm(x, norm, eps=1e-3))
    ids, shares = gates.chunk(2, dim=1)
    logits = product(h, gate, bias)
    want = route(logits, k, renormalise=renormalise)
    scores = logits.float().softmax(1)
    chosen = scores.gather(1, ids.long())
    torch.testing.assert_close(chosen, scores.gather(1, want[0].long()), rtol=2e-2, atol=1e-6)  # of near ones, either
    wanted = scale * chosen / (chosen.sum(1, keepdim=True) if renormalise else 1)
    torch.testing.assert_close(shares, wanted, rtol=2e-2, atol=1e-6)


@examples(40)
@given(
    TOKENS,
    st.sampled_from([(64, 64), (128, 192), (24, 40)]),
    st.sampled_from([*[(form, CodePath.AVX512) for form in Format], (Format.BF16, CodePath.AVX2)]),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
)
def test_experts_are_those_of_fused_moe_bit_by_bit(T, sizes, kind, dtype, threads):
    M, F = sizes
    form, path = kind
    E, k = 5, 3
    torch.manual_seed(T + M)
    pair = numbers(FP32, E, 2 * F, M, scale=M**-0.5), numbers(FP32, E, M, F, scale=F**-0.5)
    experts = pack_experts(*pair, format=form, group=8)
    h, ids, shares = numbers(dtype, T, M), torch.randint(E, (T, k)), torch.rand(T, k)
    options = {}
    if T & 1:
        biases = {"gate_up_bias": numbers(dtype, E, 2 * F), "down_bias": numbers(dtype, E, M)}
        options = {"activation": "swiglu-clamped", **biases}
    stage, gates, residual = FewExperts(experts, path=path, **options), torch.cat((ids.float(), shares), dim=1), h * 2
    found = stage(h, gates, threads=threads)
    assert stage(h, gates, residual, threads=threads).equal(residual + found)
    want = fused_moe(h.float(), experts, ids, shares, exact=True, path=path, **options).to(dtype)
    assert found.equal(want)


@pytest.mark.parametrize("form", Format)
def test_a_helper_computes_each_format_as_the_caller_does(form):
    """Of experts that are large enough for it to come before the caller has taken all tasks."""
    torch.manual_seed(0)
    pair = numbers(FP32, 2, 1024, 512, scale=512**-0.5), numbers(FP32, 2, 512, 512, scale=512**-0.5)
    experts = FewExperts(pack_experts(*pair, format=form))
    h, gates = numbers(FP32, 4, 512), torch.cat((torch.arange(8).view(4, 2) % 2, torch.rand(4, 2)), dim=1)
    want = experts(h, gates, threads=1)
    for _ in range(50):
        assert experts(h, gates, threads=2).equal(want)


HEADS = (4, 2, 16), (8, 1, 5)
CACHES = [*(itertools.product(HEADS, DTYPES) if DEEP else zip(HEADS, DTYPES, strict=True)), ((6, 1, 32), BF16)]


OPTIONS = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([None, 0.3]),
        "window": st.sampled_from([None, 3, 2050]),
        "sinks": st.sampled_from([None, 0.5]),
    }
)


@examples(30)
@given(
    st.integers(1, 40),
    st.sampled_from(CACHES),
    st.sampled_from(DTYPES),
    st.sampled_from(CodePath),
    st.booleans(),
    OPTIONS,
)
def test_attention_is_that_of_the_single_operations_bit_by_bit(T, cached, dtype, path, long, options):
    """Each kind of cache is compiled for each path, which takes most of the time."""
    long &= T <= 4
    (H, K, D), stored = cached
    torch.manual_seed(T + H)
    lengths = torch.randint(1, 9, (T,)) + (2100 if long else 0)
    b = 16
    width = -(-int(lengths.max()) // b)
    kv = numbers(stored, T * width, K, 2, b, D)
    table = torch.randperm(T * width).view(T, width).int()
    k, v, q = numbers(dtype, T, K * D), numbers(dtype, T, K * D), numbers(dtype, T, H * D)
    last = lengths - 1
    slots = table[torch.arange(T), last // b].long() * b + last % b
    other = kv.clone()
    append_kv(other, slots, *(own.float().view(T, K, D) for own in (k, v)))
    if options["sinks"] is not None:
        options |= {"sinks": torch.full((H,), options["sinks"])}
    want = decode_attention(q.float().view(T, H, D), other, table, lengths, path=path, threads=2, **options)
    cache = PagedDecode(kv, H, path=path)
    cache.append(slots, k, v)
    assert kv.equal(other)
    for threads in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "_ALONE", 0)  # two threads share what one would read alone
            assert cache(q, table, lengths, threads=threads, **options).equal(want.flatten(1).to(dtype))


@examples(40)
@given(
    TOKENS,
    st.sampled_from(DTYPES),
    st.sampled_from([Format.BF16, Format.INT4, Format.FP32]),
    st.booleans(),
    OPTIONS,
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_layers_in_one_call_are_their_stages_one_by_one_bit_by_bit(T, dtype, form, biased, options, threads, count):
    """Also the second call of a thread with as many rows, and the keys and values that are appended."""
    torch.manual_seed(T)
    M, H, K, D, E, k, F, b = 64, 4, 2, 16, 8, 3, 32, 8
    bias = numbers(dtype, (H + 2 * K) * D) if biased else None
    norms = {"q_norm": numbers(dtype, D), "k_norm": numbers(dtype, D)} if biased else {}
    proj = numbers(dtype, (H + 2 * K) * D, M, scale=M**-0.5)
    qkv = FewQkv(numbers(dtype, M), proj, rope_table(D, 50), H, K, bias=bias, **norms)
    out = FewLinear(numbers(dtype, M, H * D, scale=0.1))
    router = FewRoute(numbers(dtype, M), numbers(dtype, E, M, scale=0.3), k, renormalise=biased)
    pair = numbers(FP32, E, 2 * F, M, scale=M**-0.5), numbers(FP32, E, M, F, scale=F**-0.5)
    experts = FewExperts(pack_experts(*pair, format=form, group=8))
    lengths = torch.randint(1, 40, (T,))
    kv = numbers(dtype, 5 * T, K, 2, b, D)
    table = torch.randperm(5 * T).view(T, 5).int()
    last = lengths - 1
    slots = table[torch.arange(T), last // b].long() * b + last % b
    other = kv.clone()
    if options["sinks"] is not None:
        options |= {"sinks": torch.full((H,), options["sinks"])}
    layers = FewLayers([FewLayer(qkv, PagedDecode(kv, H), out, router, experts, **options)] * count)
    cache = PagedDecode(other, H)
    for _ in range(2):
        x = want = numbers(dtype, T, M)
        before = x.clone()
        chosen = []
        for _ in range(count):
            q, keys, values = qkv(want, last)
            cache.append(slots, keys, values)
            attended = out(cache(q, table, lengths, **options), want)
            h, gates = router(attended)
            want = attended + experts(h, gates)
            chosen.append(gates)
        begun = time.perf_counter()
        following, gates, ends = layers(x, Decodes(last, slots, table, lengths), threads=threads)
        past = time.perf_counter()
        assert following.equal(want)
        assert gates.equal(torch.stack(chosen))
        assert kv.equal(other)
        assert x.equal(before)
        assert len(ends) == count
        if FewLayers.TELLS_TIME:
            assert np.all(np.diff([begun, *ends, past]) > 0)


def test_threads_share_a_layer():
    """Each has scratch of its own, and calls with unlike numbers of rows."""
    torch.manual_seed(0)
    M, E, F = 64, 8, 32
    out = FewLinear(numbers(BF16, M, 32))
    router = FewRoute(numbers(BF16, M), numbers(BF16, E, M), 2)
    experts = FewExperts(pack_experts(numbers(FP32, E, 2 * F, M), numbers(FP32, E, M, F)))
    qkv = FewQkv(numbers(BF16, M), numbers(BF16, 64, M), rope_table(16, 50), 2, 1)
    layer = FewLayers([FewLayer(qkv, PagedDecode(numbers(BF16, 10, 1, 2, 4, 16), 2), out, router, experts)])
    xs = [numbers(BF16, T, M) for T in (1, 2, 3, 4)]
    blocks = torch.arange(10).split([1, 2, 3, 4])  # calls with unlike rows store theirs in blocks of their own
    decodes = [Decodes(each % 4, each * 4, each[:, None].int(), torch.ones_like(each)) for each in blocks]
    right = [layer(x, each) for x, each in zip(xs, decodes, strict=True)]
    wrong = []

    def many(seed):
        for T in np.random.default_rng(seed).integers(0, 4, 300).tolist():
            found = layer(xs[T], decodes[T], threads=1 + seed % 2)
            if not all(one.equal(want) for one, want in zip(found[:2], right[T][:2], strict=True)):
                wrong.append((seed, T))

    callers = [threading.Thread(target=many, args=(seed,)) for seed in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_layer_is_read_by_several_threads_where_its_sequences_are_long():
    stages = WIDE_QKV, PagedDecode(WIDE_KV, 2), OUT, ROUTE, FewExperts(FOUR)
    whole, windowed = FewLayer(*stages), FewLayer(*stages, window=8)
    long = Decodes(ZERO, ZERO, np.zeros((1, 1), np.int32), ZERO + (1 << 30))
    assert FewLayers([whole]).reads_alone(FIRST)
    assert not FewLayers([whole]).reads_alone(long)
    assert FewLayers([windowed]).reads_alone(long)
    assert not FewLayers([windowed, whole, windowed]).reads_alone(long)


def test_a_later_layer_that_fails_names_the_operand():
    stages = OUT, ROUTE, FewExperts(FOUR)
    small = FewLayer(WIDE_QKV, PagedDecode(WIDE_KV, 2), *stages)
    large = FewLayer(WIDE_QKV, PagedDecode(np.zeros((2, 1, 2, 4, 16), np.float32), 2), *stages)
    second = Decodes(ZERO, ZERO + 4, np.ones((1, 1), np.int32), ZERO + 1)
    FewLayers([large, large])(X, second)
    with pytest.raises(ValueError, match=r"slots must be in \[0, 4\), not 4"):
        FewLayers([large, small])(X, second)


def test_helpers_join_call_after_call_and_rest_in_between():
    """Calls of several kinds follow one another at once and after pauses, from two threads side by side."""
    torch.manual_seed(0)
    linear = made_for_many(FewLinear, numbers(BF16, 256, 64))
    exact = FewLinear(numbers(FP32, 64, 256))
    experts = FewExperts(pack_experts(numbers(FP32, 4, 128, 64), numbers(FP32, 4, 64, 64), format="int8"))
    narrow, wide = numbers(BF16, 70, 64), numbers(FP32, 4, 256)
    gates = torch.cat((torch.arange(8).view(4, 2) % 4, torch.rand(4, 2)), dim=1)
    calls = [
        lambda T, threads: linear(narrow[: T if T < 4 else min(70, linear.most)], threads=threads),
        lambda T, threads: exact(wide[:T], threads=threads),
        lambda T, threads: experts(narrow[:T], gates[:T], threads=threads),
    ]
    right = {(at, T): call(T, 1) for at, call in enumerate(calls) for T in (1, 3, 4)}
    wrong = []

    def many(seed):
        random = np.random.default_rng(seed)
        for turn in range(400):
            at, T = int(random.integers(3)), int(random.choice((1, 3, 4)))
            if not calls[at](T, int(random.integers(1, 4))).equal(right[at, T]):
                wrong.append((seed, turn))
            if turn % 100 == 0:
                time.sleep(0.005)

    callers = [threading.Thread(target=many, args=(seed,)) for seed in (1, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_numpy_and_torch_give_the_same():
    torch.manual_seed(0)
    weight, x = numbers(BF16, 8, 32), numbers(BF16, 2, 32)
    found = FewLinear(weight.view(torch.uint16).numpy())(x.view(torch.uint16).numpy())
    assert torch.from_numpy(found).view(BF16).equal(FewLinear(weight)(x))


def test_what_fits():
    fitting = [
        fits_few_rows(np.zeros(shape, dtype), path)
        for shape, dtype, path in itertools.product(
            [(4, 16), (4, 32), (6, 32), (4, 40)], [np.float32, np.uint16], [CodePath.AVX512, CodePath.AVX2]
        )
    ]
    assert fitting == [True, True, False, True, True, True, True, True, *[False] * 4, False, True, False, False]
    assert not fits_few_rows(np.zeros((4, 32), np.float32), CodePath.PORTABLE)
    assert not fits_few_rows(np.zeros((4, 64), np.float32)[:, ::2])


X, W = np.ones((1, 32), np.float32), np.ones((8, 32), np.float32)
TABLE = np.ones((3, 2), np.float32)
QKV = FewQkv(X[0], W, TABLE, 2, 1)
EXPERTS = pack_experts(np.ones((2, 4, 32), np.float32), np.ones((2, 32, 2), np.float32))
FOUR = pack_experts(np.ones((4, 4, 32), np.float32), np.ones((4, 32, 2), np.float32))
KV = np.zeros((2, 1, 2, 4, 2), np.float32)
ZERO = np.zeros(1, np.int64)
WIDE_QKV = FewQkv(X[0], np.ones((64, 32), np.float32), TABLE, 2, 1)
WIDE_KV = np.zeros((1, 1, 2, 4, 16), np.float32)
OUT = FewLinear(np.ones((32, 32), np.float32))
ROUTE = FewRoute(X[0], W[:4].copy(), 1)
FIRST = Decodes(ZERO, ZERO, np.zeros((1, 1), np.int32), ZERO + 1)


def layered(positions=0, slot=0, block=0, length=1, *, x=X, heads=2, router=ROUTE):
    """A call of a layer for one token."""
    stages = OUT, router, FewExperts(FOUR)
    places = [ZERO + positions, ZERO + slot, np.full((1, 1), block, np.int32), ZERO + length]
    return FewLayers([FewLayer(WIDE_QKV, PagedDecode(WIDE_KV, heads), *stages)])(x, Decodes(*places))


def attended(table, lengths, threads=1):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_ALONE", 0)
        return PagedDecode(KV, 1)(X[:, :2], table, lengths, threads=threads)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: FewLinear(W[:3]), ValueError, r"weight must be C-contiguous .* not \(3, 32\)"),
        (lambda: FewLinear(W.astype(np.float64)), TypeError, "weight must be float32 or uint16"),
        (lambda: FewLinear(W, path=CodePath.PORTABLE), ValueError, "on portable"),
        (lambda: FewLinear(W, X[0]), ValueError, "bias must have 8 numbers, not 32"),
        (lambda: FewLinear(W, norm=X[0].astype(np.uint16)), TypeError, "norm must be float32"),
        (lambda: FewLinear(W)(X[:, :16]), ValueError, r"x must be \(T, 32\) of FP32"),
        (lambda: FewLinear(W)(np.ones((5, 32), np.float32)), ValueError, r"T in 1 .. 4, not \(5, 32\)"),
        (lambda: FewRoute(X[0], W, 1)(np.ones((129, 32), np.float32)), ValueError, r"T in 1 .. \d+, not \(129, 32\)"),
        (lambda: FewLinear(W)(X.astype(np.uint16)), ValueError, "x must be .* of uint16"),
        (lambda: FewLinear(W)(X, np.ones((2, 8), np.float32)), ValueError, "residual must have the 1 rows of x"),
        (lambda: layered(positions=3), ValueError, r"positions must be in \[0, 3\), not \[3\]"),
        (lambda: layered(slot=4), ValueError, r"slots must be in \[0, 4\), not 4"),
        (lambda: layered(block=1), ValueError, r"table\[0, 0\] must be a block of kv"),
        (lambda: layered(length=5), ValueError, r"lengths\[0\] must be <= 4"),
        (lambda: layered(x=X[:, :16].copy()), ValueError, r"x must be \(T, 32\) of FP32"),
        (lambda: layered(x=np.ones((2, 32), np.float32)), ValueError, "x must have one row per decode, 1, not 2"),
        (lambda: layered(heads=4), ValueError, "the stages must be of one model"),
        (lambda: layered(router=FewRoute(X[0], W, 1)), ValueError, "4 experts at most, not 8"),
        (lambda: FewLayers([]), ValueError, "layers must have rows of one format"),
        (lambda: Decodes(ZERO, ZERO, ZERO[None], ZERO), ValueError, r"table must be \(1, W\) int32"),
        (lambda: Decodes(ZERO, np.zeros(2, np.int64), ZERO[None], ZERO), ValueError, r"slots must be \(1,\) int64"),
        (lambda: FewExperts(EXPERTS)(X, np.zeros((1, 2), np.float32), X[:, :2]), ValueError, r"residual must be"),
        (lambda: FewLinear(W)(X.astype(int)), ValueError, "x must be .* of FP32 .* not .* of int64"),
        (lambda: FewQkv(X[0], W, TABLE, 3, 1), ValueError, r"proj must have \(H \+ 2 K\) D = \(3 \+ 2 1\) D rows"),
        (lambda: FewQkv(X[0], W, TABLE, 2, 1, q_norm=X[0]), ValueError, "q_norm must have 2 or 4 numbers, not 32"),
        (lambda: QKV(X, np.array([3])), ValueError, r"positions must be in \[0, 3\), not \[3\]"),
        (lambda: QKV(X, np.array([-1])), ValueError, r"positions must be in \[0, 3\)"),
        (lambda: QKV(X, np.array([1, 1])), ValueError, r"positions must be \(1,\) int64"),
        (lambda: FewRoute(X[0], W, 9), ValueError, r"k must be in \[1, 8\]"),
        (lambda: FewExperts(EXPERTS, path=CodePath.PORTABLE), ValueError, "experts must be packed in blocks"),
        (
            lambda: FewExperts(experts_in_place(np.zeros((1, 64, 64), np.uint16), np.zeros((1, 64, 32), np.uint16))),
            ValueError,
            "experts must be packed in blocks",
        ),
        (lambda: FewExperts((W, W)), TypeError, "experts must be PackedExperts, not tuple"),
        (lambda: FewExperts(EXPERTS)(X, np.ones((1, 3), np.float32)), ValueError, r"gates must be \(1, 2 k\)"),
        (
            lambda: FewExperts(EXPERTS)(X, np.full((1, 2), 2, np.float32)),
            ValueError,
            r"gates\[0, 0\] must be an expert",
        ),
        (lambda: PagedDecode(KV[:, :, 0].copy(), 1), ValueError, "kv must have shape"),
        (lambda: PagedDecode(np.zeros((2, 2, 2, 4, 2), np.float32), 3), ValueError, "K a divisor of the 3 query heads"),
        (
            lambda: PagedDecode(KV, 1).append(ZERO + 8, X[:, :2], X[:, :2]),
            ValueError,
            r"slots must be in \[0, 8\), not 8",
        ),
        (lambda: PagedDecode(KV, 1).append(ZERO, X[:, :2], np.ones((2, 2), np.float32)), ValueError, "must be one per"),
        (lambda: attended(np.full((1, 1), 2, np.int32), ZERO + 1), ValueError, r"table\[0, 0\] must be a block of kv"),
        (lambda: attended(np.zeros((1, 1), np.int32), ZERO + 5), ValueError, r"lengths\[0\] must be <= 4"),
        (
            lambda: attended(np.full((1, 1), 2, np.int32), ZERO + 1, 2),
            ValueError,
            r"table\[0, 0\] must be a block of kv",
        ),
        (lambda: attended(np.zeros((1, 1), np.int32), ZERO + 5, 2), ValueError, r"lengths\[0\] must be <= 4"),
        (lambda: attended(np.zeros((1, 1), np.int32), ZERO), ValueError, r"lengths\[0\] must be >= 1"),
        (
            lambda: attended(np.zeros((2, 1), np.int32), ZERO + 1),
            ValueError,
            "must have one row per row of q, 1, not 2",
        ),
    ],
)
def test_a_bad_operand_is_named_with_its_mend(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
