"""The contract: printed plans that fix what the words of the algebra mean. Changing one needs its reason told."""

import inspect
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import tiny_model, tiny_scenario
from tests.systems import ADDED, GOLDEN, MIXED, PIPELINES, STACKS, VSL, split
from workbench import schedules
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, fetch
from workbench.pipeline.stack_graph import StackGraph
from workbench.schedules import FlexGenS4, Lowering, Overlap, Schedule, Sequential, Step, VSLPipe
from workbench.schedules.registry import every_schedule
from workbench.stages import qkv

FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", GOLDEN)
def test_printed_plan(name: str) -> None:
    pipeline, schedule = GOLDEN[name]
    printed = f"{pipeline}\n{schedule.lower(pipeline, MIXED)}\n"
    assert printed == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STACKS)
def test_printed_plan_of_a_stack(name: str) -> None:
    stack, schedule = STACKS[name]
    printed = f"{stack}\n{schedule.lower(stack, replace(MIXED, layers=4))}\n"
    assert printed == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def of_model(pipeline: Pipeline, model: ModelConfig, **shares: float) -> StackGraph:
    """The layers of a model, of whose streamed weights and KV these shares stay on the GPU."""
    of = tiny_scenario(pipeline=pipeline, model=model)
    return of.on(memory=replace(of.memory, **shares)).graph


DENSE_FIRST = replace(tiny_model(), moe_intermediate_size=40, first_k_dense_replace=2)
LAYERS: dict[str, tuple[StackGraph, Schedule]] = {
    "a_share_stays.vslpipe": (of_model(VSL, tiny_model(), weights_on_gpu=0.6), VSLPipe()),
    "both_shares_stay.flexgen_s4": (
        of_model(PIPELINES["flexgen_s4"], tiny_model(), weights_on_gpu=0.3, kv_on_gpu=0.5),
        FlexGenS4(micro_batches=2),
    ),
    "every_other_stays.prefetch": (
        of_model(fetch(qkv.weights) | Pipeline(VSL.chain), tiny_model(), weights_on_gpu=0.5),
        Sequential(prefetch=True),
    ),
    "dense_first.overlap": (of_model(split(slice(None, 2)), DENSE_FIRST), Overlap()),
    "dense_first_streamed.vslpipe": (of_model(VSL, DENSE_FIRST), VSLPipe()),
}
"""Layers of a model that are not all alike, or of which a share stays on the GPU."""


def of_layers(stack: StackGraph, schedule: Schedule) -> str:
    """The plan of layers, behind what of them stays on the GPU."""
    told = [f"{stack}"]
    for layer, kept in enumerate(stack.resident):
        stays = [f"{count} of {op.name}" for op, count in kept.items()] + ["KV"] * (layer in stack.kv_resident)
        told.append(f"layer {layer} keeps {', '.join(stays) or 'nothing'}")
    plan = Lowering(schedule, stack).plan(replace(MIXED, layers=4), Step.MIDDLE)
    return "\n".join([*told, f"{plan}\n"])


@pytest.mark.parametrize("name", LAYERS)
def test_printed_plan_of_the_layers_of_a_model(name: str) -> None:
    assert of_layers(*LAYERS[name]) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*GOLDEN, *STACKS, *LAYERS}


SHOWN = {
    "vslpipe.sequential",
    "vslpipe.vslpipe",
    "lightning.cgopipe",
    "lightning.fastdecode",
    "lightning.flexgen_s3",
    "flexgen_s4.flexgen_s4",
    "streamed.layer_streaming",
    "ktransformers.ktransformers",
    "ktransformers.fiddler",
    "both_on_cpu.overlap",
    *ADDED,
}
"""Those that a schedule's docstring shows."""


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_docstring_shows_the_same_lane_chart(name: str) -> None:
    golden = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    chart = textwrap.dedent(golden.split("lanes if every task took one unit\n")[1]).strip()
    assert textwrap.indent(chart, "    ") in inspect.getdoc(type(GOLDEN[name][1]))


def test_every_schedule_shows_its_lane_chart() -> None:
    offered = {thing for thing in vars(schedules).values() if inspect.isclass(thing) and issubclass(thing, Schedule)}
    shown = {type(GOLDEN[name][1]) for name in SHOWN}
    assert shown == set(every_schedule())
    assert offered - {Schedule} <= shown
