"""The interpreter's bf16: wrong by itself, right once mended. Each in its own process: triton chooses once."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels_triton.backend.bf16_mend import rounded, widened

pytest.importorskip("triton")

# Prints which of the three computations on bf16 agree with torch.
COMPUTE = """
import torch
{imports}

@triton.jit
def compute(a, b, wide, product, narrow, total, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    left, right = tl.load(a + at), tl.load(b + at)
    tl.store(product + at, tl.dot(left, right))
    tl.store(narrow + at, tl.load(wide + at).to(tl.bfloat16))
    tl.store(total + at, left * right + left)

torch.manual_seed(0)
a, b, wide = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.randn(16, 16)
product, narrow, total = torch.empty(16, 16), torch.empty_like(a), torch.empty_like(a)
compute[(1,)](a, b, wide, product, narrow, total, N=16)
print(torch.allclose(product, a.float() @ b.float(), rtol=1e-5, atol=1e-5), narrow.equal(wide.bfloat16()),
      total.equal(a * b + a))
"""


def computed(imports: str, folder: Path) -> list[str]:
    """What COMPUTE prints; from a file, because triton reads its kernels' source."""
    script = folder / "compute.py"
    script.write_text(COMPUTE.format(imports=imports))
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_products_rounding_and_arithmetic_are_right_with_the_mend(tmp_path):
    assert computed("from kernels_triton.backend.mode import tl, triton", tmp_path) == ["True"] * 3


def test_the_mend_is_still_needed(tmp_path):
    """Red once triton computes bf16 rightly by itself; then the mend can go."""
    assert computed("import triton, triton.language as tl", tmp_path) == ["False"] * 3


def test_rounding_is_torchs_for_every_upper_half_and_every_kind_of_remainder():
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    values = (upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    torchs = torch.from_numpy(values.copy()).bfloat16()
    ours = torch.from_numpy(rounded(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert torch.equal(ours.nan_to_num(), torchs.nan_to_num())
    assert np.array_equal(widened(rounded(values)), ours.float().numpy(), equal_nan=True)
