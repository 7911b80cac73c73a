"""The Triton kernels where there is no GPU: in the interpreter, which is chosen once per process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parents[1] / "kernels_triton"
# What triton 3.6 or 3.9 lacks of the language's names; between them every test in the interpreter passed on both.
IN_ONE_ONLY = {"advance", "make_block_ptr", "aggregate_replace", "atomic_load", "atomic_poll", "atomic_store"}
IN_ONE_ONLY |= {"expect_zero", "squeeze", "to_tensor", "unsqueeze"}


@pytest.mark.parametrize(
    "file", ["interpreted.py", "interpreted_attention.py", "interpreted_rows.py", "interpreted_doors.py"]
)
def test_interpreted_kernels_agree_with_float64(file):
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / file)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_compiled_triton_refuses_to_interpret():
    code = (
        "import triton, torch; from kernels_triton import route; route(torch.ones(1, 2), 1, backend='triton-interpret')"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "triton was imported without TRITON_INTERPRET=1: start Python with it" in run.stderr


@pytest.mark.parametrize(
    "module", [PACKAGE / "backend/mode.py", *sorted(PACKAGE.glob("*/jit_*.py"))], ids=lambda p: p.stem
)
def test_kernels_use_what_triton_has_from_3_6_to_3_9(module):
    assert not IN_ONE_ONLY & set(re.findall(r"\btl\.(\w+)", module.read_text()))
