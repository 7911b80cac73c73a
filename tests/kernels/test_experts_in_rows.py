"""Packed experts in rows: the numbers and scales that the CPU's kernels read, as a card's kernels read them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_cpu import experts_in_rows, pack_experts, pack_int4
from kernels_cpu.experts.weights import unpacked
from kernels_triton import Quantised, dequantise
from tests.examples import examples


def packed(form: str, M: int, F: int, group: int = 32):
    random = np.random.default_rng(M + F)
    gate_up = random.standard_normal((3, 2 * F, M), dtype=np.float32)
    down = random.standard_normal((3, M, F), dtype=np.float32)
    gate_up[0, 0] = 0
    return pack_experts(gate_up, down, format=form, group=group)


@examples(30)
@given(st.sampled_from(["int8", "int4"]), st.integers(1, 5), st.integers(1, 5), st.sampled_from([16, 32, 64, 128]))
def test_the_numbers_are_those_that_were_packed(form, wide, high, group):
    experts = packed(form, wide * group, high * group, group)
    for rows, matrices in zip(experts_in_rows(experts), (experts.gate_up, experts.down), strict=True):
        quantised = Quantised(*map(torch.from_numpy, rows))
        assert quantised.group == group
        want = torch.from_numpy(np.stack(unpacked(matrices, range(3))))
        assert dequantise(quantised, torch.float64).equal(want)
        assert rows.values.nbytes + rows.scales.nbytes == round(want.numel() * matrices.format.weight_bytes(group))


def test_rows_of_a_checkpoint_in_symmetric_int4_have_all_sixteen_numbers():
    codes = np.tile(np.arange(16, dtype=np.uint8), (2, 64, 4))
    scales = np.random.default_rng(0).random((2, 64, 2), dtype=np.float32)
    experts = pack_int4(codes, scales, codes[:, :, :32], scales[:, :, :1])
    for rows, matrices in zip(experts_in_rows(experts), (experts.gate_up, experts.down), strict=True):
        want = torch.from_numpy(np.stack(unpacked(matrices, range(2))))
        assert dequantise(Quantised(*map(torch.from_numpy, rows)), torch.float64).equal(want)
        assert want.min() < -7 * scales.max() * 0.9


@pytest.mark.parametrize(
    "form, M, message",
    [
        ("bf16", 64, "gate_up must be in INT8 or INT4, not in BF16: pass"),
        ("mxfp4", 64, "gate_up must be in INT8 or INT4, not in MXFP4"),
        ("uint4", 64, "gate_up must be in INT8 or INT4, not in UINT4"),
        ("int4", 40, "gate_up must have columns that fill groups of 32, not 40: pack"),
    ],
)
def test_what_has_no_such_rows_is_refused(form, M, message):
    with pytest.raises(ValueError, match=message):
        experts_in_rows(packed(form, M, 64))
