"""The public doors on CPU tensors: Numba where it has a kernel, torch elsewhere, the same answers as on a GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import kernels_cpu
import kernels_triton
from kernels_triton import decode_attention_reference, fused_moe_reference, rms_norm_reference, rope_table
from tests.examples import examples
from tests.kernels.attention_at_hand import decodes
from tests.kernels.experts_at_hand import LIMITS, error, layer, paged, quantised, with_biases
from workbench import kernels
from workbench.kernels import cpu_twins

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SINKS = torch.linspace(-2, 2, 6)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={"window": st.integers(1, 25), "softcap": st.just(3.0), "sinks": st.just(SINKS), "scale": st.just(0.3)},
)


@examples(40)
@given(
    st.lists(st.integers(0, 19), max_size=4),
    OPTIONS,
    st.sampled_from([FP32, FP16, BF16]),
    st.sampled_from([FP32, BF16]),
)
def test_decodes_agree_with_float64(lengths, options, dtype, kv_dtype):
    """Empty sequences, and rows that lie apart, too."""
    case = decodes(lengths, 6, 2, 4, 16, dtype, kv_dtype, options.get("window")) | options
    found = kernels.decode_attention(**case)
    assert found.dtype is dtype
    assert error(found, decode_attention_reference(**case)) <= LIMITS[dtype]


X, HEADS = torch.randn(3, 8), torch.randn(3, 2, 8)
CALLS = {
    "rms_norm": lambda x: (x, torch.ones(8, dtype=x.dtype)),
    "add_rms_norm": lambda x: (x, x, torch.ones(8, dtype=x.dtype)),
    "gated": lambda x: (x,),
    "rope": lambda x: (x.view(3, 2, 4), torch.arange(3), rope_table(4, 3)),
}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", CALLS)
def test_rows_go_to_numba_unless_a_backend_is_named(name, dtype, monkeypatch):
    operands = CALLS[name](X.to(dtype))
    torch.testing.assert_close(getattr(kernels, name)(*operands), getattr(kernels_triton, name)(*operands))
    called = in_numba(monkeypatch, name)
    getattr(kernels, name)(*operands)
    getattr(kernels, name)(*operands, backend="torch")
    assert called == ["numba"]


def test_decodes_go_to_numba_and_the_same_cache(monkeypatch):
    called, case = in_numba(monkeypatch, "decode_attention"), decodes([3, 2], 2, 1, 4, 16, BF16)
    kernels.decode_attention(**case)
    kernels.decode_attention(**case, backend="torch")
    assert called == ["numba"]


def test_what_numba_has_no_kernel_for_goes_to_torch():
    x, weight = X.half(), torch.ones(8).half()
    assert error(kernels.rms_norm(x, weight), rms_norm_reference(x, weight)) <= 1e-3
    with pytest.raises(TypeError, match="x must be fp32, fp16 or bf16"):
        kernels.rms_norm(X.double(), weight.double())


def test_a_negative_length_is_refused():
    case = decodes([3, 2], 2, 1, 4, 16, FP32)
    with pytest.raises(ValueError, match=r"lengths\[1\] must be >= 1, not -1"):
        kernels.decode_attention(**case | {"lengths": torch.tensor([3, -1])})


def moe(gate_up, down, **case):
    """`fused_moe` of a pair of matrices."""
    return kernels.fused_moe(experts=(gate_up, down), **case)


def in_numba(monkeypatch, name="fused_moe"):
    """Calls of Numba's op from now on."""
    called, compute = [], getattr(kernels_cpu, name)
    monkeypatch.setattr(kernels_cpu, name, lambda *a, **k: called.append("numba") or compute(*a, **k))
    return called


@examples(60)
@given(st.integers(0, 20), st.integers(1, 9), st.data(), st.booleans(), st.integers(0, 99))
def test_experts_agree_with_float64_and_are_the_same_every_time(tokens, experts, data, pages, seed):
    M, F = data.draw(st.sampled_from([(64, 32), (128, 96)]))
    case = layer(tokens, M, F, experts, data.draw(st.integers(1, experts)), BF16, seed)
    case = paged(case) if pages else case
    found = moe(**case)
    assert found.dtype is BF16
    assert error(found, fused_moe_reference(**case)) <= LIMITS[BF16]
    assert found.equal(moe(**case))


def test_experts_go_to_numba_for_as_many_tokens_as_it_is_faster_for(monkeypatch):
    called, few, many = in_numba(monkeypatch), layer(32, 64, 32, 8, 2, BF16), layer(33, 64, 32, 8, 2, BF16)
    for most, times in ((float("inf"), 2), (8, 1)):
        monkeypatch.setattr(cpu_twins, "_MOST", most)
        called.clear()
        for case in (few, many):
            moe(**case)
        assert len(called) == times


def test_experts_that_numba_has_no_kernel_for_go_to_torch(monkeypatch):
    called, case = in_numba(monkeypatch), layer(4, 64, 32, 5, 2, BF16)
    odd, narrow = layer(4, 64, 48, 5, 2, BF16), layer(4, 32, 32, 5, 2, BF16)
    others = [case | {"backend": "torch"}, case | {"activation": "geglu"}, with_biases(case), odd, narrow]
    others += [quantised(case, torch.int8, None), layer(4, 64, 32, 5, 2, FP32)]
    others += [case | {"gate_up": torch.cat((case["gate_up"],) * 2, 2)[..., :64]}]
    for other in others:
        want = fused_moe_reference(**{name: value for name, value in other.items() if name != "backend"})
        assert error(moe(**other), want) <= 1.5 * LIMITS[other["x"].dtype]
    assert not called


@pytest.mark.parametrize("tokens", [4, 40])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_experts_may_share_a_page(tokens, activation):
    case = layer(tokens, 64, 32, 3, 2, BF16) | {"pages": torch.tensor([1, 1, 2]), "activation": activation}
    want = fused_moe_reference(**case)
    assert error(moe(**case), want) <= LIMITS[BF16]
    assert error(moe(**case, backend="torch"), want) <= LIMITS[BF16]


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_weights_may_begin_at_an_odd_element(name, monkeypatch):
    called, case = in_numba(monkeypatch), layer(4, 64, 32, 5, 2, BF16)
    room = torch.zeros(case[name].numel() + 1, dtype=BF16)
    case[name] = room[1:].view(case[name].shape).copy_(case[name])
    assert error(moe(**case), fused_moe_reference(**case)) <= LIMITS[BF16]
    assert not called


BAD = [
    ({"ids": lambda i: i + 4}, r"ids\[\d, \d\] must be an expert in \[0, 5\), not \d: correct"),
    ({"ids": lambda i: i - 9}, r"ids\[\d, \d\] must be an expert in \[0, 5\), not -\d: correct"),
    ({"ids": lambda i: i[:-1]}, r"ids must be \(4, k\), one row per row of x, not \(3, 2\)"),
    ({"pages": lambda _: torch.full((5,), -2)}, r"pages\[\d\] must be one of the 5 pages held, or -1, not -2"),
    ({"down": lambda w: w[:2]}, r"down must be \(5, 64, 96\), which gate_up and x ask for, not \(2,"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_bad_operands_of_the_experts_are_named_as_on_a_gpu(change, message):
    case = layer(4, 64, 96, 5, 2, BF16)
    for name, make in change.items():
        case[name] = make(case.get(name))
    with pytest.raises(ValueError, match=message):
        moe(**case)


def test_torch_sees_the_experts_in_numba_as_one_operation():
    case = layer(4, 64, 96, 5, 2, BF16)
    operands = tuple(case[name] for name in ("x", "gate_up", "down", "ids", "weights"))
    torch.library.opcheck(torch.ops.moe_workbench.fused_moe_in_numba.default, (*operands, None))
    compiled = torch.compile(lambda x: 2 * moe(**case | {"x": x}), backend="eager", fullgraph=True)
    assert compiled(case["x"]).equal(2 * moe(**case))
    with FakeTensorMode() as mode:
        fake = moe(**{name: mode.from_tensor(value) for name, value in case.items()})
    assert (fake.shape, fake.dtype) == (case["x"].shape, BF16)


def test_every_door_leads_somewhere():
    for name in kernels.__all__:
        assert getattr(kernels, name) is not None
