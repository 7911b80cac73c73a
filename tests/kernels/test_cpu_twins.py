"""The public doors on CPU tensors: Numba where it has a kernel, torch elsewhere, the same answers as on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_cpu
import kernels_triton
from kernels_triton import decode_attention_reference, rms_norm_reference, rope_table
from tests.kernels.attention_at_hand import decodes
from tests.kernels.experts_at_hand import LIMITS, error
from workbench import kernels

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SINKS = torch.linspace(-2, 2, 6)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={"window": st.integers(1, 25), "softcap": st.just(3.0), "sinks": st.just(SINKS), "scale": st.just(0.3)},
)


@settings(max_examples=40)
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
    called = []
    monkeypatch.setattr(kernels_cpu, name, lambda *_, **__: called.append("numba"))
    getattr(kernels, name)(*operands)
    getattr(kernels, name)(*operands, backend="torch")
    assert called == ["numba"]


def test_decodes_go_to_the_flash_decode_of_the_same_cache(monkeypatch):
    called = []
    monkeypatch.setattr(kernels_cpu, "flash_decode", lambda q, *_, **__: called.append(q.dtype) or q)
    case = decodes([3, 2], 2, 1, 4, 16, BF16)
    kernels.decode_attention(**case)
    kernels.decode_attention(**case, backend="torch")
    assert called == [FP32]


def test_what_numba_has_no_kernel_for_goes_to_torch():
    x, weight = X.half(), torch.ones(8).half()
    assert error(kernels.rms_norm(x, weight), rms_norm_reference(x, weight)) <= 1e-3
    with pytest.raises(TypeError, match="x must be fp32, fp16 or bf16"):
        kernels.rms_norm(X.double(), weight.double())


def test_a_negative_length_is_refused():
    case = decodes([3, 2], 2, 1, 4, 16, FP32)
    with pytest.raises(ValueError, match=r"lengths\[1\] must be >= 1, not -1"):
        kernels.decode_attention(**case | {"lengths": torch.tensor([3, -1])})


def test_every_door_leads_somewhere():
    for name in kernels.__all__:
        assert getattr(kernels, name) is not None
