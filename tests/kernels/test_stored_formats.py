"""FP8 blocks and MXFP4 against a loop over the numbers, and against transformers' own conversion."""

import pytest
import torch

from kernels_triton import fp8_weights, mxfp4_weights


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


def test_what_does_not_belong_together_is_refused():
    values = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="with a scale per block of 128"):
        fp8_weights(values, torch.ones(2, 1), torch.float32)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        fp8_weights(torch.zeros(4, 4), torch.ones(1, 1), torch.float32)
    with pytest.raises(ValueError, match="MXFP4 weights must be"):
        mxfp4_weights(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8), torch.float32)
