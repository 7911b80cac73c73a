"""Products of 16-bit rows on CPUs with and without instructions for them."""

import pytest
import torch

from kernels_triton.backend import products
from kernels_triton.moe import torch_path
from tests.kernels.doors import ONCE
from workbench import kernels


def drawn(dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture(params=[True, False], ids=["by torch", "widened"])
def both_kinds(request, monkeypatch):
    for module in (products, torch_path):
        monkeypatch.setattr(module, "has_products", lambda dtype: request.param)


@pytest.mark.usefixtures("both_kinds")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7])
def test_sums_are_in_fp32_and_rounded_once_over_several_blocks_of_the_weight(dtype, rows):
    blocks = 2.3
    columns = 4096
    outputs = int(blocks * products._CACHED / (4 * columns))
    x, weight, bias = drawn(dtype, rows, columns), drawn(dtype, outputs, columns), drawn(dtype, outputs)
    found = kernels.linear(x, weight, bias)
    assert found.dtype is dtype
    assert error(found, kernels.linear_reference(x, weight, bias)) < ONCE[dtype]


@pytest.mark.usefixtures("both_kinds")
@pytest.mark.parametrize("rows", [0, 3])
def test_operands_may_have_any_layout(rows):
    x, weight = drawn(torch.bfloat16, 5, 8), drawn(torch.bfloat16, 8, 6)
    found = kernels.linear(x.T[: 2 * rows : 2, :5], weight.T[:, :5])
    assert found.shape == (rows, 6)
    torch.testing.assert_close(found.double(), x.T[: 2 * rows : 2].double() @ weight[:5].double(), rtol=8e-3, atol=8e-3)


@pytest.mark.usefixtures("both_kinds")
def test_experts_on_the_host_are_the_same_on_both_kinds_of_cpu():
    x = drawn(torch.bfloat16, 50, 64)
    both = drawn(torch.bfloat16, 4, 48, 64) / 8, drawn(torch.bfloat16, 4, 64, 24) / 8
    chosen = torch.arange(100, dtype=torch.int32).reshape(50, 2) * 3 % 4
    weights = torch.rand(50, 2, generator=torch.Generator().manual_seed(0))
    found = kernels.fused_moe(x, both, chosen, weights, backend="torch")
    assert error(found, kernels.fused_moe_reference(x, both, chosen, weights)) < 8e-3
