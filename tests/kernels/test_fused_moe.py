"""`fused_moe` and `grouped_gemm` in torch, what they refuse, and how torch's own tools see them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from kernels_triton import (
    Quantised,
    dequantise,
    fused_moe,
    fused_moe_reference,
    fused_moe_work,
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_work,
    quantise,
    route,
    with_shared,
)
from tests.examples import examples
from tests.kernels.experts_at_hand import LIMITS, check, error, layer, paged, quantised, with_biases

DTYPES = sorted(LIMITS, key=str)
KINDS = [torch.int8, torch.uint8, torch.float8_e4m3fn]


@examples(100)
@given(st.integers(0, 20), st.integers(1, 9), st.data(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_agrees_with_float64(tokens, experts, data, dtype, seed):
    M, F = data.draw(st.sampled_from([(64, 32), (33, 17), (40, 5)]))
    case = layer(tokens, M, F, experts, data.draw(st.integers(1, experts)), dtype, seed)
    if data.draw(st.booleans()):
        case = with_biases(case)
    elif data.draw(st.booleans()):
        case = paged(case)
    check(case | {"activation": data.draw(st.sampled_from(["swiglu", "geglu", "swiglu-clamped"]))}, "torch")


@pytest.mark.parametrize("tokens, experts, k", [(260, 4, 2), (90, 60, 6)])
def test_many_pairs_agree_with_float64_and_are_the_same_every_time(tokens, experts, k):
    case = layer(tokens, 48, 40, experts, k, torch.bfloat16)
    check(paged(case), "torch")
    assert fused_moe(**case).equal(fused_moe(**case))


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_twice_as_wide_is_two_more_experts(gated):
    case, shared = layer(9, 64, 32, 6, 2, torch.float32), layer(9, 64, 64, 1, 1, torch.float32, seed=1)
    gates, ups = shared["gate_up"][0].chunk(2)
    halves = [torch.cat(pair) for pair in zip(gates.chunk(2), ups.chunk(2), strict=True)]
    joined = case | {"gate_up": torch.cat((case["gate_up"], torch.stack(halves)))}
    joined["down"] = torch.cat((case["down"], torch.stack(shared["down"][0].chunk(2, dim=1))))
    routing = route(torch.randn(9, 6), 2, renormalise=True)
    weights = torch.rand(9) if gated else None
    joined["ids"], joined["weights"] = with_shared(routing, [6, 7], weights)
    case["ids"], case["weights"] = routing
    ones = torch.ones(9, 1) if weights is None else weights[:, None]
    alone = shared | {"x": case["x"], "ids": torch.zeros(9, 1).int(), "weights": ones}
    want = fused_moe_reference(**case) + fused_moe_reference(**alone)
    assert error(fused_moe(**joined), want) <= LIMITS[torch.float32]


def test_weights_of_shared_experts_are_one_per_token():
    with pytest.raises(ValueError, match=r"weights must be \(3,\) fp32, one per token, not \(3, 1\)"):
        with_shared(route(torch.zeros(3, 4), 2), [4], torch.ones(3, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M, F, group", [(64, 96, 32), (72, 40, None)])
def test_quantised_weights(kind, M, F, group):
    check(quantised(layer(7, M, F, 5, 3, torch.bfloat16), kind, group), "torch")


@pytest.mark.parametrize("kind, least", [(torch.int8, 254), (torch.uint8, 14)])
@pytest.mark.parametrize("group", [8, None])
def test_quantising_errs_by_half_a_step_at_most(kind, least, group):
    weight = torch.randn(3, 5, 64)
    packed = quantise(weight, kind, group)
    steps = 2 * weight.unflatten(2, (-1, group or 64)).abs().amax(3) / least
    wrong = (dequantise(packed, torch.float32) - weight).abs().unflatten(2, (-1, group or 64)).amax(3)
    assert (packed.shape, packed.group) == (weight.shape, group or 64)
    assert bool((wrong <= steps * 0.501).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm_takes_rows_per_token_and_per_pair(dtype):
    case = layer(6, 40, 24, 5, 3, dtype)
    for x in (case["x"], torch.randn(6, 3, 40).to(dtype)):
        for weights in (None, case["weights"]):
            found = grouped_gemm(x, case["gate_up"], case["ids"], weights)
            assert error(found, grouped_gemm_reference(x, case["gate_up"], case["ids"], weights)) <= LIMITS[dtype]


def test_nan_in_a_token_stays_in_its_row():
    case = layer(9, 40, 24, 2, 2, torch.bfloat16)
    case["x"][4, 7] = torch.nan
    assert fused_moe(**case).isnan().any(dim=1).nonzero().tolist() == [[4]]


BAD = [
    ({"x": lambda x: x[0]}, ValueError, r"x must have shape \(T, M\)"),
    ({"x": lambda x: x.double()}, TypeError, "x must be fp32, fp16 or bf16, not torch.float64"),
    ({"x": lambda x: x.T.contiguous().T}, ValueError, "x must have contiguous columns"),
    ({"x": lambda x: x[:, :32].contiguous()}, ValueError, r"gate_up must have shape \(P, 2 F, 32\)"),
    ({"gate_up": lambda w: w.half()}, TypeError, "gate_up must be torch.float32 as its input, not torch.float16"),
    ({"gate_up": lambda w: w.to(torch.int8)}, TypeError, "or pass Quantised"),
    ({"gate_up": lambda w: w[:, 1:]}, ValueError, "gate_up must have an even number of rows"),
    ({"gate_up": lambda w: w.mT.contiguous().mT}, ValueError, "gate_up must have contiguous columns"),
    ({"gate_up": lambda w: Quantised(w, w[:, :, :1])}, TypeError, "gate_up must hold int8, uint8 or float8_e4m3fn"),
    ({"gate_up": lambda w: quantise(w, torch.int8, 16)}, ValueError, r"gate_up.scales must be .* multiple of 32 or 64"),
    ({"down": lambda w: w[:2]}, ValueError, r"down must be \(5, 64, 96\), which gate_up and x ask for, not \(2,"),
    ({"ids": lambda i: i.float()}, TypeError, "ids must be int32 or int64"),
    ({"ids": lambda i: i[:-1]}, ValueError, r"ids must be \(4, k\), one row per row of x, not \(3, 2\)"),
    ({"ids": lambda i: i + 4}, ValueError, r"ids must be experts in \[0, 5\), not \d: correct"),
    ({"ids": lambda i: i - 9}, ValueError, r"ids must be experts in \[0, 5\), not -\d: correct"),
    ({"weights": lambda w: w.half()}, TypeError, "weights must be fp32, not torch.float16"),
    ({"weights": lambda w: w[:, :1].contiguous()}, ValueError, r"weights must be \(4, 2\) as ids, not \(4, 1\)"),
    ({"pages": lambda _: torch.zeros(5)}, ValueError, r"pages must be \(E,\) int32 or int64"),
    (
        {"pages": lambda _: torch.full((5,), -2)},
        ValueError,
        r"pages\[\d\] must be one of the 5 pages held, or -1, not",
    ),
    ({"down_bias": lambda _: torch.zeros(5, 3)}, ValueError, r"down_bias must be \(5, 64\) torch.float32"),
    ({"activation": lambda _: "relu"}, ValueError, "activation must be 'swiglu', 'geglu', 'swiglu-clamped', not"),
    ({"backend": lambda _: "triton"}, ValueError, "backend 'triton' needs GPU tensors, not cpu: move them"),
]


@pytest.mark.parametrize("change, kind, message", BAD)
def test_a_bad_operand_is_named_with_its_mend(change, kind, message):
    case = layer(4, 64, 96, 5, 2, torch.float32)
    for name, make in change.items():
        case[name] = make(case.get(name))
    with pytest.raises(kind, match=message):
        fused_moe(**case)


def test_torch_sees_one_operation_with_a_shape():
    case = layer(4, 64, 96, 5, 2, torch.float32)
    names = ("x", "gate_up", None, "down", None, "ids", "weights", None, None, None)
    operands = tuple(case.get(name) for name in names)
    torch.library.opcheck(torch.ops.moe_workbench.fused_moe.default, (*operands, "swiglu", "torch"))
    with FakeTensorMode() as mode:
        fake = fused_moe(**{name: mode.from_tensor(value) for name, value in case.items()})
    assert (fake.shape, fake.dtype) == (case["x"].shape, case["x"].dtype)


def test_compiled_code_keeps_it_whole():
    case = layer(4, 64, 96, 5, 2, torch.float32)
    compiled = torch.compile(lambda x: 2 * fused_moe(**case | {"x": x}), backend="eager", fullgraph=True)
    assert compiled(case["x"]).equal(2 * fused_moe(**case))


def test_declared_work():
    flops, moved = fused_moe_work(8, 16, tokens=5, chosen=2, touched=3, weight_bytes=0.625, itemsize=2)
    assert flops == 5 * 2 * 3 * 2 * 8 * 16  # three products, multiply and add
    assert moved == 3 * 3 * 8 * 16 * 0.625 + 2 * 5 * 8 * 2
    both = grouped_gemm_work(32, 8, 5, 2, 3, 2, 2)[0], grouped_gemm_work(8, 16, 10, 1, 3, 2, 2)[0]
    assert sum(both) == flops
