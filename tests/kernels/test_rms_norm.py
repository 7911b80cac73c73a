"""The Triton RMSNorm in the interpreter, in a process of its own: the mode is chosen when triton is first imported."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CASES = """
import pytest, torch
from kernels_triton import rms_norm, rms_norm_reference
torch.manual_seed(0)
for rows, width in ((1, 1), (3, 7), (5, 64), (2, 129), (0, 8)):
    x, weight = torch.randn(rows, 2 * width)[:, :width] * 3, torch.randn(width)
    want = rms_norm_reference(x, weight)
    assert torch.allclose(rms_norm(x, weight).double(), want, rtol=1e-5, atol=1e-7), (rows, width)
    half = rms_norm(x.half(), weight.half()).double()
    assert torch.allclose(half, rms_norm_reference(x.half(), weight.half()), rtol=2e-3, atol=1e-5), (rows, width)
    x, weight = x.bfloat16(), weight.bfloat16()
    bf16 = rms_norm(x, weight).double()
    assert torch.allclose(bf16, rms_norm_reference(x, weight), rtol=8e-3, atol=1e-7), (rows, width)
large = torch.full((1, 4), 2.0)
assert torch.allclose(rms_norm(large, torch.ones(4), eps=12.0), torch.full((1, 4), 0.5))
for x, weight, word in (
    (torch.ones(4), torch.ones(4), "takes x"),
    (torch.ones(2, 4), torch.ones(3), "takes x"),
    (torch.ones(2, 4), torch.ones(4).half(), "both alike"),
    (torch.ones(4, 2).T, torch.ones(4), "contiguous"),
    (torch.ones(2, 4).bfloat16(), torch.ones(4), "both alike"),
):
    with pytest.raises(ValueError, match=word):
        rms_norm(x, weight)
print("all right")
"""


def interpreted(code: str, interpret: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": interpret}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_rms_norm_agrees_with_float64_and_refuses_bad_operands() -> None:
    done = interpreted(CASES, "1")
    assert done.stdout.strip() == "all right", done.stderr


def test_without_gpu_and_interpreter_the_error_says_how_to_go_on() -> None:
    done = interpreted("import torch, kernels_triton as k; k.rms_norm(torch.ones(1, 4), torch.ones(4))", "0")
    assert "set TRITON_INTERPRET=1 before triton is imported" in done.stderr
