"""The engine computes with `workbench.kernels`: only five lines of its own code do arithmetic on tensors."""

import ast
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

import workbench as wb
from tests.device.rehearsal import rehearsed
from tests.device.streams import Adversary
from tests.live.made import CONFIGS, QUANTISED
from tests.live.world import TINY, WIRED, requests, scenario
from workbench.engine.devices import opening
from workbench.engine.lanes.lane import Lane
from workbench.engine.model.forward import Forward
from workbench.kernels import (
    FewExperts,
    FewLayers,
    FewLinear,
    FewQkv,
    FewRoute,
    PagedDecode,
    fp8_weights,
    int4_codes,
    int4_weights,
    mxfp4_weights,
)
from workbench.kernels.collected import doors
from workbench.schedules import KTransformers, LayerStreaming, Schedule, Sequential, VSLPipe
from workbench.workload import Request, Sampling

ENGINE = Path(wb.__file__).parent / "engine"
LEARNS_OR_MEASURES = ("tiny_model", "calibration")
"""Packages that no run computes with: one trains, the other times torch's own products."""
LINES = {
    "return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)",
    "return torch.add(x, other, alpha=factor)",
    "return x if factor == 1 else x.mul_(factor)",
    'out.mul_(self.linear(read["h"], weights["gate"]).sigmoid_())',
    "off = float(self.codes(name).float().mean() - self.zeros(name).float().mean())",
}
"""The only lines of the engine that may do arithmetic on tensors; the last checks a checkpoint's zero points."""
PRODUCTS = {"addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "conv1d", "dot", "einsum"}
PRODUCTS |= {"inner", "linear", "matmul", "mm", "mv", "outer", "scaled_dot_product_attention", "tensordot", "vdot"}
PRODUCTS |= {"cdist", "kron"}
CURVES = {"cumprod", "cumsum", "glu", "group_norm", "index_add", "layer_norm", "log_softmax", "normalize", "rms_norm"}
CURVES |= {"scatter_add", "scatter_reduce", "silu", "softmax", "softmin"}
EXPONENTIALS = {"exp", "exp2", "expm1", "log", "pow", "rsqrt", "sigmoid", "sqrt", "tanh"}
CHOICES = {"amax", "amin", "aminmax", "argmax", "argmin", "clamp", "clip", "clone", "masked_fill", "max", "min"}
CHOICES |= {"where"}
"""Functions that copy or select numbers; all others of torch's tags compute new ones."""
NOT_CALLED = {
    "add_rms_norm": "the sum is a buffer that another stage may read",
    "dequantise": "kernels read rounded weights as they are",
    "grouped_gemm": "`fused_moe` calls it on a card",
    "quantise": "the host packs rounded experts with `pack_experts`",
    "sampled_logits": "the rows that sample are taken before the last norm, which then has less to do",
    "with_shared": "shared experts are a stage of their own",
}
"""Operations that no run calls, and why."""
STORED = (fp8_weights, int4_codes, int4_weights, mxfp4_weights)
FEW_ROWS = (PagedDecode, FewExperts, FewLayers, FewLinear, FewQkv, FewRoute)
WAYS: tuple[tuple[str, Schedule], ...] = (
    ("all_gpu", Sequential()),
    ("streamed", LayerStreaming()),
    ("flexgen_s4", Sequential(2, prefetch=True)),
    ("vslpipe", VSLPipe()),
    ("experts_on_cpu", KTransformers()),
)
"""Latent attention takes the pipelines of the first two."""


def arithmetic() -> set[str]:
    """Names of torch's functions that compute numbers: products, element-wise functions and sums."""
    found = set(PRODUCTS | CURVES)
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        tags = {tag for each in getattr(packet, "overloads", list)() for tag in getattr(packet, each).tags}
        if tags & {torch.Tag.pointwise, torch.Tag.reduction}:
            found.add(name.strip("_"))
    return found - CHOICES


ARITHMETIC = arithmetic()


class Noted(TorchFunctionMode):
    """Collects the lines of the engine that call torch's arithmetic; calls that return bool do not count."""

    def __init__(self, lines: set[str]) -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        name = func.__name__.strip("_")
        named = name in ARITHMETIC or name[1:] in ARITHMETIC  # __iadd__
        if named and not (isinstance(answer, torch.Tensor) and answer.dtype is torch.bool):
            self._note()
        return answer

    def _note(self) -> None:
        caller = sys._getframe(2)
        while "/torch/" in caller.f_code.co_filename:
            assert caller.f_back is not None
            caller = caller.f_back
        path = Path(caller.f_code.co_filename)
        if path.is_relative_to(ENGINE) and path.relative_to(ENGINE).parts[0] not in LEARNS_OR_MEASURES:
            self._lines.add(path.read_text().splitlines()[caller.f_lineno - 1].strip())


class Seen(NamedTuple):
    """What runs came through: lines of the engine with arithmetic, and all functions of Python."""

    lines: set[str]
    functions: set[CodeType]


@contextmanager
def noting(patch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Note what all threads of runs come through."""
    seen = Seen(set(), set())
    run = Lane.run

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.functions.add(frame.f_code)

    def noted(self: Lane) -> None:
        with Noted(seen.lines):
            run(self)

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        with patch.context() as within, Noted(seen.lines):
            within.setattr(Lane, "run", noted)
            within.setattr(Forward, "_compile", lambda *_: None)  # which calls kernels that a run may not
            yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def asked(sampling: Sampling) -> tuple[Request, ...]:
    """Prompts of several lengths, and so few requests that some passes have few rows."""
    return tuple(Request(each.prompt, each.output_len, sampling) for each in requests((1, 40, 7, 33, 3), 5, vocab=211))


@pytest.fixture(scope="module")
def seen(made: Any, quantised: Any, make_model: Any) -> Seen:
    """Runs of every family, by several schedules, with chunks of prompts, and with samplings of all kinds."""
    with noting(pytest.MonkeyPatch()) as found:
        for number, name in enumerate(CONFIGS):
            pipeline, schedule = WAYS[number % (2 if "deepseek" in name else len(WAYS))]
            sampling = Sampling(0.7, top_p=0.9, repetition_penalty=1.1) if number % 5 == 0 else Sampling()
            wb.run(scenario(made(name), asked(sampling), WIRED[pipeline]), schedule)
        for name in QUANTISED:
            wb.run(
                scenario(wb.checkpoint(quantised(name)), asked(Sampling(logprobs=2)), WIRED["all_gpu"]), Sequential()
            )
        in_chunks = replace(
            scenario(made("mixtral"), asked(Sampling()), WIRED["all_gpu"]), scheduler=wb.ChunkedPrefill(token_budget=8)
        )
        wb.run(in_chunks, Sequential())
        wb.LLM(wb.data_path("models/tiny-moe")).generate(["sort:ba="], max_tokens=2)  # its sizes fit few rows
    wide = make_model(replace(TINY, name="wide", head_dim=16), 0)
    found.functions.update(called_on_a_card(scenario(wide, requests((4, 9), 3), WIRED["all_gpu"])))
    return found


def called_on_a_card(of: wb.Scenario) -> set[CodeType]:
    """What a run on a simulated card comes through, whose cache no kernel holds."""
    with pytest.MonkeyPatch.context() as patch, noting(patch) as found:
        patch.setattr(opening, "CudaDriver", lambda limit: rehearsed(Adversary(), total=1 << 34, limit=limit))
        wb.run(of, Sequential(), device="cuda")
    return found.functions


def sources() -> list[Path]:
    """Sources that runs compute with."""
    return [
        path for path in sorted(ENGINE.rglob("*.py")) if path.relative_to(ENGINE).parts[0] not in LEARNS_OR_MEASURES
    ]


def by_name(path: Path) -> set[str]:
    """Lines of a source that call products, exponentials or curves, or change a tensor by a function of torch."""
    text = path.read_text()
    found = set()
    for node in ast.walk(ast.parse(text)):
        of = node.func if isinstance(node, ast.Call) else None
        name = of.attr if isinstance(of, ast.Attribute) and ast.unparse(of.value) not in ("np", "self") else ""
        plain = name in PRODUCTS | CURVES | EXPONENTIALS
        in_place = name.endswith("_") and name.strip("_") in ARITHMETIC
        if plain or in_place or isinstance(getattr(node, "op", None), ast.MatMult):
            found.add(text.splitlines()[node.lineno - 1].strip())  # type: ignore[attr-defined]
    return found


def test_the_lines_with_arithmetic_are_these(seen: Seen) -> None:
    assert seen.lines == LINES


def test_no_source_names_more_of_it() -> None:
    assert len(LINES) <= 5
    assert set[str]().union(*map(by_name, sources())) <= LINES


def test_the_sources_that_are_searched_are_those_of_runs() -> None:
    assert {"ops.py", "latent.py", "forward.py", "stored.py", "lane.py"} <= {path.name for path in sources()}


def test_four_of_five_operations_are_called(seen: Seen) -> None:
    calls = {name: inspect.unwrap(door.call).__code__ for name, door in doors().items()}
    calls |= {kind.__name__: kind.__call__.__code__ for kind in FEW_ROWS}
    calls |= {convert.__name__: inspect.unwrap(convert).__code__ for convert in STORED}
    missing = {name for name, code in calls.items() if code not in seen.functions}
    assert missing == set(NOT_CALLED)
    assert len(missing) <= 0.2 * len(calls)
