"""How the cases of schedules are computed: task times are given, `lay_out` plays them as the schedule orders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.systems import LIGHTNING, VSL
from workbench.pipeline import Pipeline, fetch, gpu
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules import CGOPipe, FastDecode, FlexGenS3, FlexGenS4, Schedule, Step, VSLPipe, WeightPlace
from workbench.schedules.plan import Task, lay_out
from workbench.stages import attention, experts, kv, moe, out_proj, qkv

Times = dict[str, float]
"""Seconds of each task of one layer: A, C, B, Q, H, W (whole), K and G as SPEC 2 names them."""

CASES = {case["id"]: case for case in json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))}
S4_LAYER = fetch(experts.weights, kv) | gpu(qkv, attention, out_proj, moe)
_S4_CODES = {"A": "A", "K": "K", "B": "G", "S": "Q", "F": "B", "W": "W"}  # codes of the graph in SPEC's letters


@cache
def lowered(schedule: Schedule, layers: int, step: Step, pipeline: Pipeline) -> tuple[Task, ...]:
    return schedule.tasks(stack_graph(pipeline, layers), step)


def makespan(schedule: Schedule, layers: int, times: Times, step: Step = Step.LAST, pipeline: Pipeline = LIGHTNING):
    """Seconds of one iteration. By default the first weights are there and the last layer loads none."""
    s4 = isinstance(schedule, FlexGenS4)
    tasks = lowered(schedule, layers, step, S4_LAYER if s4 else pipeline)
    codes = (_S4_CODES.get(t.node.code, "") if s4 else t.node.code for t in tasks)
    seconds = [times.get(code, 0.0) / t.page.pages for t, code in zip(tasks, codes, strict=True)]
    return max(lay_out(tasks, seconds, schedule.packet_seconds)[1])


def layer_time(schedule: Schedule, times: Times, few: int = 4, many: int = 10) -> float:
    """Seconds that each further layer of a deep model adds."""
    shallow, deep = (makespan(schedule, layers, times, Step.MIDDLE) for layers in (few, many))
    return (deep - shallow) / (many - few)


def best_s4(parts: int, times: Times) -> float:
    """Layer time of S4 with whole weights or pages, whichever is faster."""
    return min(layer_time(FlexGenS4(parts, place), times) for place in (WeightPlace.FIRST, WeightPlace.PAGED))


def steady_cgopipe(times: Times, parts: int) -> float:
    return max(times["W"] + parts * times["H"], parts * (times["A"] + times["B"]), parts * times["C"])


def toy(schedule: Callable[[int], Schedule], inputs: dict[str, Any]) -> float:
    assert inputs["h2d"] == "fifo"
    return makespan(schedule(inputs["n"]), inputs["L"], inputs)


def vslpipe(inputs: dict[str, Any]) -> float:
    assert inputs["barrier"]
    return makespan(VSLPipe(inputs["W"] / inputs["packets"]), inputs["L"], inputs, pipeline=VSL)


def s3_is_slower_than_s4(inputs: dict[str, Any]) -> bool:
    return layer_time(FlexGenS3(inputs["n"]), inputs) > best_s4(inputs["n"], inputs)


def cgopipe_is_fastest(inputs: dict[str, Any]) -> bool:
    parts = inputs["n"]
    others = [layer_time(other(parts), inputs) for other in (FastDecode, FlexGenS3)]
    return layer_time(CGOPipe(parts), inputs) < min(*others, best_s4(parts, inputs))


def over_closed_form(setting: str, inputs: dict[str, Any]) -> float:
    """CGOPipe's layer time over its closed form, with the task times of the setting's other case."""
    times = CASES[f"sched.order.{setting}"]["inputs"]
    assert times["n"] == inputs["n"]
    return layer_time(CGOPipe(inputs["n"]), times) / steady_cgopipe(times, inputs["n"])


COMPUTE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "sched.CGOPipe.L2n2": partial(toy, CGOPipe),
    "sched.CGOPipe.L3n3": partial(toy, CGOPipe),
    "sched.S2_Wlast.L3n3": partial(toy, FastDecode),
    "sched.S2_Wlast.L4n4": partial(toy, FastDecode),
    "sched.S3_Wfirst.L3n3": partial(toy, FlexGenS3),
    "sched.S3_Wfirst.L4n4": partial(toy, FlexGenS3),
    "sched.S4_Wfirst.L3n3": partial(toy, FlexGenS4),
    "sched.S4_Wfirst.L4n4": partial(toy, FlexGenS4),
    "sched.S4_paged.L3n3": partial(toy, partial(FlexGenS4, weights=WeightPlace.PAGED)),
    "sched.S4_paged.L4n4": partial(toy, partial(FlexGenS4, weights=WeightPlace.PAGED)),
    "sched.S3_slower_S4": s3_is_slower_than_s4,
    "sched.VSL.L2": vslpipe,
    "sched.VSL.L3": vslpipe,
    "sched.cgo.lb.L4 summ": partial(over_closed_form, "L4 summ"),
    "sched.cgo.lb.T4 MTB": partial(over_closed_form, "T4 MTB"),
    "sched.order.L4 summ": cgopipe_is_fastest,
    "sched.order.T4 MTB": cgopipe_is_fastest,
}

_NO_BARRIERS = "VSLPipe always waits at the end of a phase; the case asks for one that does not"

OPEN: dict[str, str] = {
    "sched.VSL.nobarrier.L3": _NO_BARRIERS,
    "sched.VSL.nobarrier.L4": _NO_BARRIERS,
    "sched.cgo.fifo_vs_ready": "a lane always keeps its issue order; the case asks for one that runs what is ready",
}
