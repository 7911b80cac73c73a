"""Faults put into the kernels on purpose: the tests in the interpreter turn red at each."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.proofs import Proofs, proved

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """Text of a kernel module, what to write instead, and which tests of which file are to notice."""

    module: str
    right: str
    wrong: str
    tests: str
    file: str = "interpreted.py"


ATTENTION, ROWS = "interpreted_attention.py", "interpreted_rows.py"


def attention(right: str, wrong: str, tests: str) -> Fault:
    return Fault("attention", right, wrong, tests, ATTENTION)


def rows(module: str, right: str, wrong: str, tests: str) -> Fault:
    return Fault(module, right, wrong, tests, ROWS)


def kv_layout(right: str, wrong: str) -> Fault:
    return Fault("kv_layout", right, wrong, "cache_and_back", ATTENTION)


FAULTS = {
    "dropped K tail": Fault("grouped", "stored = K // HALVES", "stored = K // HALVES // STEP * STEP", "grouped_gemm"),
    "wrong mask of the columns": Fault(
        "grouped", "inside = columns < N\n        gates", "inside = columns < N - 1\n        gates", "grouped_gemm"
    ),
    "swapped gate and up": Fault(
        "grouped",
        "gates = columns.to(tl.int64)\n        ups = gates + N",
        "ups = columns.to(tl.int64)\n        gates = ups + N",
        "one_expert",
    ),
    "expert of the block before": Fault(
        "grouped", "tl.load(experts + block)", "tl.load(experts + tl.maximum(block - 1, 0))", "grouped_gemm"
    ),
    "no page table": Fault("grouped", "if PAGED:", "if False:", "grouped_gemm"),
    "no routing weights": Fault("grouped", "if WEIGHTED:", "if False:", "grouped_gemm"),
    "no bias": Fault("grouped", "if BIASED:", "if False:", "activations"),
    "no clamping": Fault("grouped", "up = tl.clamp(up, -LIMIT, LIMIT", "up = tl.clamp(up, -99.0, 99.0", "activations"),
    "4-bit halves swapped": Fault("grouped", "((tile & 15)", "((tile >> 4)", "quantised"),
    "32-bit rows": Fault(
        "grouped", "tl.load(pairs + row).to(tl.int64)", "tl.load(pairs + row).to(tl.int32)", "offsets"
    ),
    "a sum without its last row": Fault("grouped", "tl.static_range(K)", "tl.static_range(K - 1)", "fused_moe"),
    "32-bit sums over experts": Fault(
        "grouped", "token = tl.program_id(0).to(tl.int64)", "token = tl.program_id(0)", "offsets"
    ),
    "32-bit rows of weights": Fault("grouped", "gates = columns.to(tl.int64)", "gates = columns", "offsets"),
    "answers made up for no expert": Fault(
        "grouped", "tl.where(end > 0, total, nothing)", "total", "no_expert_or_page"
    ),
    "pairs of no expert without a row": Fault(
        "pairs", "tl.where((owner < 0) | (owner >= E), E, owner)", "owner", "no_expert"
    ),
    "ups from the gates' rows by TMA": Fault(
        "grouped", "N + column * BLOCK_N, start", "column * BLOCK_N, start", "ways"
    ),
    "programs that skip tiles": Fault("grouped", "tl.num_programs(0)):", "tl.num_programs(0) + 1):", "ways"),
    "no renormalisation": Fault("router", "if RENORMALISE:", "if False:", "test_route"),
    "bias in the weights": Fault("router", "rank += tl.load(bias", "scores += tl.load(bias", "test_route"),
    "last of equal experts": Fault(
        "router",
        "tl.min(tl.min(tl.where(rank == value, at, 0x7FFFFFFF)",
        "tl.max(tl.max(tl.where(rank == value, at, -1)",
        "test_route",
    ),
    "one group too many": Fault("router", "tl.static_range(KEPT)", "tl.static_range(KEPT + 1)", "test_route"),
    "a query sees the next key": attention("at[None, :] <= position", "at[None, :] <= 1 + position", "test_prefill"),
    "a window one token wider": attention("> position[:, None] - WINDOW", ">= position[:, None] - WINDOW", "prefix"),
    "values without the shrinking": attention("acc * shrink[:, None]", "acc", "test_decode"),
    "keys of the head before": attention(
        "keys = k + key_begin * k_row + kv_head", "keys = k + key_begin * k_row + (kv_head - 1)", "test_prefill"
    ),
    "32-bit pages": attention("other=0).to(tl.int64) * page_stride", "other=0) * page_stride", "offsets"),
    "chunks added up without the last": attention(
        "range(first, tl.cdiv(length, CHUNK), BLOCK)", "range(first, length // CHUNK, BLOCK)", "test_decode"
    ),
    "values beside the keys": kv_layout("v, tl.load(place + SIZE * DIM", "v, tl.load(place + DIM"),
    "heads side by side": kv_layout("at // DIM * (2 * SIZE * DIM)", "at // DIM * (SIZE * DIM)"),
    "32-bit slots": Fault("kv_layout", "tl.load(slots + t)", "tl.load(slots + t).to(tl.int32)", "offsets", ATTENTION),
    "qk-norm of the turned dims alone": rows("rope", " + tl.sum(c * c, 1)", "", "rope"),
    "a residual that is not stored": rows("norms", "if ADDED:", "if False:", "norms"),
    "pairs that are no neighbours": rows("rope", "first = pair * 2", "first = pair", "rope"),
    "dims that stay are lost": rows("rope", "if R < D:", "if False:", "rope"),
    "sums of what is past the row": rows("norms", "tl.where(inside, wide - ", "tl.where(True, wide - ", "norms"),
    "no shift": rows("norms", "if BIASED:", "if False:", "norms"),
    "eps left out": rows("norms", "middle * middle, axis=0) / M + EPS", "middle * middle, axis=0) / M", "eps"),
    "ups of the gates' first column": rows("grouped", "tl.load(place + F,", "tl.load(place,", "gated"),
    "rows of a narrower table": rows("vocabulary", "table + row * stride", "table + row * M", "embed"),
    "rows not chosen": rows("vocabulary", "tl.load(rows + row, mask=live, other=0)", "row", "logits"),
    "a draw of the token before": rows("sampling", "c0 = position + 1", "c0 = position", "same_tokens"),
    "nucleus without its last token": rows(
        "sampling", "(need - above + each - 1) // each", "(need - above) // each", "same_tokens"
    ),
    "last of equal logits": rows("sampling", "(target - above) // each", "0 * target", "same_tokens"),
    "pairs one place further": Fault("pairs", "tl.cumsum(mine, 0) - 1", "tl.cumsum(mine, 0)", "sort_pairs"),
}


PROOFS = Proofs(
    "planted_faults",
    tuple(f"tests/kernels/{name}" for name in ("test_mutations.py", "planted.py", "interpreted.py", ATTENTION, ROWS)),
    ("kernels_triton/**/*.json",),
    ("triton", "torch"),
)


@pytest.fixture(scope="module")
def planted() -> Iterator[Callable[..., dict[str, Any]]]:
    """One process that has imported what takes long and forks for every fault; it starts with the first."""
    children: list[subprocess.Popen[str]] = []

    def noticed(**fault: str) -> dict[str, Any]:
        if not children:
            env = {**os.environ, "TRITON_INTERPRET": "1"}
            command = [sys.executable, str(Path(__file__).with_name("planted.py"))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            children.append(subprocess.Popen(command, env=env, **pipes))
        print(json.dumps(fault), file=children[0].stdin, flush=True)
        return json.loads(children[0].stdout.readline())

    yield noticed
    for child in children:
        child.stdin.close()
        assert child.wait(30) == 0
        child.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@proved(PROOFS)
def test_a_fault_turns_a_test_red(name, planted, tmp_path):
    fault = FAULTS[name]
    shutil.copytree(ROOT / "kernels_triton", tmp_path / "kernels_triton")
    (tmp_path / "tests").mkdir()
    for part in ("examples.py", "kernels"):
        copy = shutil.copytree if part == "kernels" else shutil.copy
        copy(ROOT / "tests" / part, tmp_path / "tests" / part)
    (module,) = (tmp_path / "kernels_triton").glob(f"*/jit_{fault.module}.py")
    source = module.read_text()
    assert source.count(fault.right) == 1
    module.write_text(source.replace(fault.right, fault.wrong))
    run = planted(root=str(tmp_path), file=f"tests/kernels/{fault.file}", tests=fault.tests)
    red = re.search(r"^FAILED \S+::(\S+)", run["output"], re.MULTILINE)
    assert (run["code"] == 1 and "1 failed" in run["output"]) or run["code"] < 0, run["output"]
    return red[1] if red else "read memory that is not its own"


@pytest.mark.slow
@proved(PROOFS)
def test_without_a_fault_no_test_is_red(planted):
    """The way in which faults are planted breaks nothing by itself."""
    run = planted(root=str(ROOT), file="tests/kernels/interpreted.py", tests="sort_pairs")
    assert run["code"] == 0, run["output"]
