"""Products of rows with a matrix by torch, in fp32 where the CPU has no instructions for the operands' type."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from ..declarations import public

_CACHED = 2 << 20
"""Bytes of the weights that are widened at a time, which stay in the cache: 128 rows of bf16 and 14336 x 4096 take 1.07
times as long in blocks of 512 KiB, and 2.0 times as long in one block (a Zen 3 core)."""


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows (T, C) times the transposed weight (R, C), plus bias (R,), with sums in fp32 -> (T, R) of their type."""
    if torch.compiler.is_compiling() or not rows.is_cpu or has_products(rows.dtype):
        return functional.linear(rows, weight, bias)
    wide = rows.float()
    step = max(1, _CACHED // (4 * max(1, weight.shape[1])))
    products = []
    for low in range(0, max(1, len(weight)), step):
        some = slice(low, low + step)
        shift = None if bias is None else bias[some].float()
        products.append(functional.linear(wide, weight[some].float(), shift).to(rows.dtype))
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


@public
@functools.cache
def has_products(dtype: torch.dtype) -> bool:
    """True if torch has a kernel for products of matrices of this type on this CPU.

    Where oneDNN has none for a 16-bit type, torch converts number by number, which takes seven times as long as in fp32
    (bf16, 128 rows, Zen 3, which has AVX2 and no AVX-512).

    Examples
    --------
    >>> has_products(torch.float32)
    True
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
