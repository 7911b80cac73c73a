"""The Triton kernels in the interpreter, against float64. `test_triton.py` runs this file in a process of its own."""

import pytest
import torch

from kernels_triton import (
    fused_moe,
    fused_moe_reference,
    grouped_gemm,
    grouped_gemm_reference,
    route,
    route_reference,
    sort_pairs,
)
from kernels_triton.backend.backend import Backend
from kernels_triton.moe.experts import Activation
from kernels_triton.moe.fused_moe import with_triton
from kernels_triton.moe.jit_grouped import combine
from kernels_triton.moe.tiles import LayerTiles, Tiles
from tests.kernels.experts_at_hand import LIMITS, check, error, layer, paged, quantised, with_biases

INTERPRET = "triton-interpret"

ROUTERS = [
    (8, 2, {}),
    (60, 4, {"renormalise": True}),
    (256, 8, {"scoring": "sigmoid", "groups": 8, "kept_groups": 4, "renormalise": True, "scale": 2.5, "bias": True}),
    (160, 6, {"groups": 8, "kept_groups": 3, "scale": 16.0}),
    (3, 1, {"scoring": "sigmoid", "groups": 3, "kept_groups": 1}),
    (16, 1, {"scoring": "sigmoid"}),
]


@pytest.mark.parametrize("experts, k, options", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route(experts, k, options, dtype):
    torch.manual_seed(experts)
    logits = (torch.randn(7, experts) * 2).to(dtype)
    given = options | ({"bias": torch.randn(experts)} if "bias" in options else {})
    found, want = route(logits, k, backend=INTERPRET, **given), route_reference(logits, k, **given)
    assert found.ids.equal(want.ids)
    torch.testing.assert_close(found.weights.double(), want.weights, rtol=1e-5, atol=1e-9)


def test_route_breaks_ties_and_ranks_nan_last_as_torch_does():
    logits = torch.tensor([[0.0] * 8, [1, 2, 2, 1, 2, 0, 0, 0], [torch.nan, 1, -torch.inf, 1, 0, 0, 0, 0]])
    for options in ({}, {"groups": 4, "kept_groups": 2}, {"scoring": "sigmoid", "groups": 2, "kept_groups": 2}):
        if options:
            logits = logits.nan_to_num(nan=-9.0)
        assert route(logits, 4, backend=INTERPRET, **options).ids.equal(route(logits, 4, **options).ids)


@pytest.mark.parametrize("tokens, k, experts, block", [(1, 1, 1, 16), (5, 2, 8, 16), (40, 8, 60, 16), (1100, 2, 3, 32)])
@pytest.mark.parametrize("beyond", [0, 2])
def test_sort_pairs(tokens, k, experts, block, beyond):
    """`beyond`: how far ids go past the experts that there are, on both sides."""
    torch.manual_seed(tokens)
    ids = torch.randint(-beyond, experts + beyond, (tokens, k), dtype=torch.int32)
    found, want = (sort_pairs(ids, experts, block, backend=backend) for backend in (INTERPRET, "torch"))
    rows = int(want.rows)
    assert int(found.rows) == rows
    assert found.pairs[:rows].equal(want.pairs[:rows])
    assert found.experts[: rows // block].equal(want.experts[: rows // block])


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LAYERS = [
    (1, 64, 32, 8, 2, BF16),  # one token, whole blocks
    (17, 72, 40, 8, 3, FP32),  # sizes that are no multiple of a block
    (5, 33, 17, 256, 8, BF16),  # most experts without tokens
    (16, 64, 32, 4, 1, FP16),  # no sum over experts
    (33, 48, 80, 60, 4, BF16),
    (20, 40, 24, 8, 8, FP32),  # every expert has every token: two blocks each
    (18, 1, 1, 9, 5, FP32),
    (0, 64, 32, 8, 2, BF16),
]


@pytest.mark.parametrize("T, M, F, E, k, dtype", LAYERS)
def test_fused_moe(T, M, F, E, k, dtype):
    check(layer(T, M, F, E, k, dtype), INTERPRET)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu-clamped"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_activations_and_biases(activation, dtype):
    case = with_biases(layer(7, 40, 24, 5, 3, dtype)) | {"activation": activation}
    case["gate_up"] = 4 * case["gate_up"]  # so that GPT-OSS' limits matter
    check(case, INTERPRET)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("M, F, group", [(64, 96, 32), (72, 40, None)])
def test_quantised_weights(kind, M, F, group):
    check(quantised(layer(7, M, F, 5, 3, BF16), kind, group), INTERPRET)
    check(quantised(layer(2, M, F, 5, 1, FP32), kind, group), INTERPRET)


def test_one_expert_with_all_tokens():
    case = layer(37, 64, 32, 8, 1, BF16)
    check(case | {"ids": torch.full((37, 1), 3)}, INTERPRET)


def test_pages_in_any_order_and_nan_where_nothing_may_be_read():
    check(paged(layer(6, 72, 40, 16, 2, FP32)), INTERPRET)
    check(paged(layer(6, 72, 40, 16, 2, BF16)), INTERPRET)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_an_expert_that_is_left_out_adds_nothing(dtype):
    case = paged(layer(9, 72, 40, 6, 3, dtype))
    case |= {"gate_up_bias": torch.randn(len(case["gate_up"]), 80).to(dtype)}
    case["pages"][[1, 4]] = -1
    case["ids"][2] = torch.tensor([1, 4, 1])
    check(case, INTERPRET)
    assert not fused_moe(**case, backend=INTERPRET)[2].any()


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu-clamped"])
def test_nan_in_a_token_stays_in_its_row(activation):
    case = layer(9, 40, 24, 2, 2, FP32) | {"activation": activation}
    case["x"][4, 7] = torch.nan
    assert fused_moe(**case, backend=INTERPRET).isnan().any(dim=1).nonzero().tolist() == [[4]]


@pytest.mark.parametrize("k", [1, 3])
def test_no_expert_or_page_makes_nan_of_its_tokens_alone(k):
    case = paged(layer(7, 40, 24, 5, k, BF16), spare=0)
    want = fused_moe(**case, backend=INTERPRET)
    case["ids"][2, 0], case["ids"][5, k - 1] = 5, -1
    lost = [[t] for t in range(7) if t in (2, 5)]
    for pages in (case["pages"], None):
        found = fused_moe(**case | {"pages": pages}, backend=INTERPRET)
        assert found.isnan().any(dim=1).nonzero().tolist() == found.isnan().all(dim=1).nonzero().tolist() == lost
    case["pages"][case["ids"][0, 0]] = 5
    gone = [t for t in range(7) if t in (2, 5) or case["ids"][0, 0] in case["ids"][t]]
    found = fused_moe(**case, backend=INTERPRET)
    assert found.isnan().all(dim=1).nonzero().flatten().tolist() == gone
    kept = [t for t in range(7) if t not in gone]
    assert found[kept].equal(want[kept])


WAYS = [(True, 0), (False, 1)]


@pytest.mark.parametrize("kind", [FP32, FP16, BF16, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_all_ways_to_launch_give_the_same(kind):
    """Weights through pointers or by TMA; one program per tile or fewer."""
    case = with_biases(layer(5, 40, 24, 3, 2, kind if kind in LIMITS else BF16))
    if kind not in LIMITS:
        case = quantised(layer(5, 64, 32, 3, 2, BF16), kind, 32)
    operands = [case[name] for name in ("x", "gate_up", "down", "ids", "weights")]
    biases = (case.get("gate_up_bias"), case.get("down_bias"))

    def made(tma, per_sm):
        own = LayerTiles(16, *[Tiles(32, 32, 8, 4, 1, tma, per_sm)] * 2)
        return with_triton(*operands, Activation.SWIGLU, biases, None, 3, Backend.INTERPRET, own)

    want = fused_moe_reference(**case)
    found = made(False, 0)
    assert error(found, want) <= LIMITS[case["x"].dtype]
    assert all(made(*way).equal(found) for way in WAYS)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_torch_computes_the_same(dtype):
    case = paged(layer(11, 72, 40, 12, 4, dtype))
    assert error(fused_moe(**case, backend=INTERPRET), fused_moe(**case, backend="torch").double()) <= LIMITS[dtype]


def far_apart(tensor, distance, axis=0):
    """The same tensor with an axis `distance` elements apart; what lies between is never touched."""
    strides = [distance if of == axis else stride for of, stride in enumerate(tensor.stride())]
    if axis:
        strides[0] = tensor.shape[axis] * distance
    room = torch.empty(1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)), dtype=tensor.dtype)
    return room.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("name", ["x", "gate_up", "down"])
def test_offsets_past_32_bits(name):
    case = layer(3, 32, 32, 3, 1, BF16) | {"ids": torch.tensor([[2], [2], [2]])}
    check(case | {name: far_apart(case[name], 2**30 + 64)}, INTERPRET)


def test_offsets_past_32_bits_within_an_expert_and_in_the_sum():
    case = layer(3, 32, 2, 2, 2, BF16)
    check(case | {"gate_up": far_apart(case["gate_up"], 2**30 + 64, axis=1)}, INTERPRET)
    parts, out = far_apart(torch.randn(3, 16), 2**30), torch.empty(16)
    combine[(1, 1)](parts, out, 2**30, K=3, BLOCK=16)
    torch.testing.assert_close(out, parts.sum(dim=0))


@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_grouped_gemm(per_pair, dtype):
    case = layer(6, 40, 24, 5, 3, dtype)
    x = torch.randn(6, 3, 40).to(dtype) if per_pair else case["x"]
    bias = torch.randn(5, 48).to(dtype)
    for options in ({}, {"weights": case["weights"], "bias": bias, "pages": torch.tensor([3, 1, 4, 0, 2])}):
        found = grouped_gemm(x, case["gate_up"], case["ids"], **options, backend=INTERPRET)
        want = grouped_gemm_reference(x, case["gate_up"], case["ids"], **options)
        assert error(found, want) <= LIMITS[dtype]


def test_the_answer_is_the_same_every_time():
    case = layer(21, 48, 40, 6, 3, BF16)
    assert fused_moe(**case, backend=INTERPRET).equal(fused_moe(**case, backend=INTERPRET))
