"""FP8 blocks, INT4 and MXFP4 against a loop over the numbers, and against transformers' own conversion."""

import pytest
import torch

from kernels_triton import Int4Order, fp8_weights, int4_codes, int4_weights, mxfp4_weights


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (1, 1), (130, 257)])
def test_fp8_is_each_number_times_its_blocks_factor(rows, columns):
    torch.manual_seed(rows)
    values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1
    found = fp8_weights(values, scales, torch.float64)
    for row, column in {(0, 0), (rows - 1, 0), (0, columns - 1), (rows - 1, columns - 1), (rows // 2, columns // 2)}:
        exact = values[row, column].float() * scales[row // 128, column // 128]
        assert found[row, column] == exact


def test_mxfp4_is_what_transformers_makes_of_it():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(3)
    blocks = torch.randint(0, 256, (3, 8, 5, 16), dtype=torch.uint8)
    scales = torch.randint(118, 136, (3, 8, 5), dtype=torch.uint8)
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert mxfp4_weights(blocks, scales, torch.float32).transpose(1, 2).equal(wanted)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (64, 24), (16, 160)])
@pytest.mark.parametrize("order", Int4Order)
def test_int4_is_unpacked_number_by_number(order, inputs, outputs):
    torch.manual_seed(inputs)
    shape = (inputs // 8, outputs) if order is Int4Order.INPUTS else (inputs, outputs // 8)
    words = torch.randint(-(2**31), 2**31, shape).to(torch.int32)
    found = int4_codes(words, order)
    assert tuple(found.shape) == (outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            if order is Int4Order.INPUTS:
                word, place = int(words[column // 8, row]), column % 8
            else:
                word = int(words[column, row // 8])
                place = (0, 2, 4, 6, 1, 3, 5, 7).index(row % 8) if order is Int4Order.AWQ else row % 8
            if order is Int4Order.OUTPUTS_LESS_ONE:
                word += 0x11111111
            assert found[row, column] == (word >> 4 * place) % 16


@pytest.mark.parametrize("asymmetric", [False, True])
def test_int4_is_each_code_less_its_zero_point_times_its_scale(asymmetric):
    torch.manual_seed(5)
    codes = torch.randint(0, 16, (6, 24), dtype=torch.uint8)
    scales = torch.rand(6, 3).half()
    zeros = torch.randint(0, 16, (6, 3), dtype=torch.uint8)
    found = int4_weights(codes, scales, torch.float64, zeros=zeros if asymmetric else None)
    for row in range(6):
        for column in range(24):
            zero = int(zeros[row, column // 8]) if asymmetric else 8
            assert found[row, column] == (int(codes[row, column]) - zero) * float(scales[row, column // 8])


def test_what_does_not_belong_together_is_refused():
    values = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="with a scale per block of 128"):
        fp8_weights(values, torch.ones(2, 1), torch.float32)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        fp8_weights(torch.zeros(4, 4), torch.ones(1, 1), torch.float32)
    with pytest.raises(ValueError, match="words must be a matrix of int32, not"):
        int4_codes(torch.zeros(2, 8), Int4Order.AWQ)
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="INT4 weights must be"):
        int4_weights(codes, torch.ones(2, 3), torch.float32)
    with pytest.raises(ValueError, match="INT4 weights must be"):
        int4_weights(codes, torch.ones(2, 2), torch.float32, zeros=torch.ones(2, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="MXFP4 weights must be"):
        mxfp4_weights(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8), torch.float32)
