"""Which schedule is faster than which, over 400 random layers; and the closed forms of a steady layer."""

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from tests.papers.lens_cases import overlap_gain
from tests.papers.sched_cases import CASES, Times, best_s4, layer_time, steady_cgopipe
from tests.systems import LIGHTNING, VSL
from workbench.hardware import machines
from workbench.models import models
from workbench.pipeline import Pipeline
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import CGOPipe, FastDecode, FlexGenS3, FlexGenS4, Schedule, Step, VSLPipe, WeightPlace
from workbench.serving.prepared import price
from workbench.stages import Rows
from workbench.workload import Workload

DRAWS = 400
ROUNDING = 1 + 1e-9


class Layer(NamedTuple):
    """One draw, and what each schedule makes of it [s]."""

    parts: int
    times: Times
    cgopipe: float
    s2: float
    s3: float
    s4: float


def draw(random: np.random.Generator) -> tuple[int, Times]:
    """Times around that of a micro-batch's experts.

    A cache that the CPU reads takes the link 2 to 8 times longer and the GPU 0.05 to 0.5 times as long; queries and
    outputs are far smaller than the cache.
    """

    def around(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    parts, on_cpu = int(random.choice([2, 3, 4, 6, 8, 12])), around(0.05, 2)
    cache = {"C": on_cpu, "K": on_cpu * around(2, 8), "G": on_cpu * around(0.05, 0.5)}
    small = {"A": around(0.02, 0.5), "Q": on_cpu * around(0.01, 0.1), "H": on_cpu * around(0.01, 0.1)}
    return parts, {**small, **cache, "B": 1.0, "W": parts * around(0.1, 4)}


@cache
def layers() -> list[Layer]:
    random = np.random.default_rng(0)
    drawn = [draw(random) for _ in range(DRAWS)]
    return [
        Layer(n, t, *(layer_time(s(n), t) for s in (CGOPipe, FastDecode, FlexGenS3)), best_s4(n, t)) for n, t in drawn
    ]


@pytest.mark.parametrize("other", ["s2", "s3"])
def test_cgopipe_is_never_slower_than_s2_and_s3(other):
    assert all(layer.cgopipe <= getattr(layer, other) * ROUNDING for layer in layers())


def test_s2_is_never_slower_than_s3():
    assert all(layer.s2 <= layer.s3 * ROUNDING for layer in layers())


def test_cgopipe_is_nearly_never_slower_than_the_best_s4():
    assert sum(layer.cgopipe > layer.s4 * ROUNDING for layer in layers()) <= 0.01 * DRAWS


def test_s4_beats_cgopipe_where_the_cpu_attends_far_longer_than_all_else_takes():
    times = {"A": 0.1, "B": 1.0, "C": 4.0, "K": 1.5, "G": 0.3, "Q": 0.05, "H": 0.05, "W": 4.0}
    assert best_s4(4, times) < layer_time(CGOPipe(4), times) == pytest.approx(4 * times["C"])


def test_s3_is_slower_than_s4_where_weights_are_hidden_and_kv_comes_sooner_than_the_cpu_attends():
    soon = [x for x in layers() if x.times["K"] < x.times["A"] + x.times["B"] + x.times["C"]]
    hidden = [x for x in soon if x.times["W"] < x.parts * (x.times["A"] + x.times["G"] + x.times["B"] - x.times["K"])]
    assert len(hidden) > 50
    assert all(layer.s3 > layer.s4 for layer in hidden)


# ------------------------------------------------------------------------------------- closed forms of a steady layer


def test_cgopipe_takes_what_its_busiest_lane_does():
    """The few beyond 3 % have the CPU as busy as the GPU, and one waits for the other in turn."""
    over = [layer.cgopipe / steady_cgopipe(layer.times, layer.parts) for layer in layers()]
    assert min(over) * ROUNDING >= 1
    assert sum(share <= 1.03 for share in over) >= 0.99 * DRAWS
    assert max(over) < 1.1


def test_s2_takes_at_most_the_weights_and_the_slower_device():
    """The form adds up what in part overlaps."""
    for parts, t, _, s2, *_ in layers():
        assert s2 <= (t["W"] + parts * max(t["A"] + t["B"], t["C"])) * ROUNDING


@pytest.mark.parametrize("setting", ["L4 summ", "T4 MTB"])
def test_s2_is_near_its_form_on_the_papers_machines(setting):
    times = CASES[f"sched.order.{setting}"]["inputs"]
    form = times["W"] + times["n"] * max(times["A"] + times["B"], times["C"])
    assert 0.92 < layer_time(FastDecode(times["n"]), times) / form < 0.97


def test_s3_adds_up_its_chains():
    for parts, t, _, _, s3, _ in layers():
        chain = t["A"] + t["Q"] + t["C"] + t["H"] + t["B"]
        first = max(t["W"], t["A"] + t["C"] + t["Q"]) + t["H"] + t["B"]
        assert s3 == pytest.approx(first + (parts - 1) * chain, rel=0.03)


def test_s4_in_pages_takes_what_the_link_or_the_gpu_does():
    for parts, t, *_ in layers():
        form = max(t["W"] + parts * t["K"], parts * (t["A"] + t["G"] + t["B"]))
        assert layer_time(FlexGenS4(parts, WeightPlace.PAGED), t) == pytest.approx(form, rel=0.03)


def test_weights_behind_the_first_output_help_s3():
    first, last, paged = (
        np.array([layer_time(FlexGenS3(n, place), t) for n, t, *_ in layers()]) for place in WeightPlace
    )
    assert np.all(last <= first * ROUNDING)
    assert np.all(paged <= first * ROUNDING)
    assert (round((first / last).max(), 1), round((first / paged).max(), 1)) == (1.4, 1.9)  # as the docstring says


# ------------------------------------------------------------------------------- MoE-Lens' schedule and Lightning's


def a40_layer(schedule: Schedule, pipeline: Pipeline, decode: int, context: int, prefill: int) -> float:
    """Layer time of Mixtral-8x7B on MoE-Lens' host [s]."""
    memory, lengths = Memory(kv_capacity="70GB"), Workload.lengths(98, 128, 10)
    scheduler = ResourceAware(token_budget=20_000)
    rows = Rows(prefill, decode, prefill * 50, decode * context, decode)
    part = Rows(*(number / schedule.parts for number in rows))

    def seconds(layers: int) -> float:
        model = models["mixtral-8x7b"].first(layers)
        cost = price(Scenario(pipeline, model, machines["a40"], memory, lengths, scheduler), schedule)
        tasks = cost.lowering.tasks(Step.MIDDLE)
        return cost.plans.lay_out(tasks, [part] * schedule.parts, schedule.packet_seconds, None, 0.0).seconds

    return (seconds(12) - seconds(6)) / 6


@pytest.mark.parametrize(
    "batch", [(3000, 162, 2500), (8000, 162, 8000), (10_000, 162, 3000), (3000, 600, 2000), (11_000, 162, 4500)]
)
def test_vslpipe_and_cgopipe_tie_per_layer(batch):
    lens, lightning = a40_layer(VSLPipe(), VSL, *batch), a40_layer(CGOPipe(12), LIGHTNING, *batch)
    assert 0.144 < lightning < 0.158
    assert 0.148 < lens < 0.158
    assert 1.0 <= lens / lightning < 1.05


@pytest.mark.parametrize("capacity", [70, 210])
@pytest.mark.parametrize("output", [32, 64, 128, 256])
def test_prefill_beside_decode_gains_over_one_after_the_other(capacity, output):
    assert 1.1 <= overlap_gain({"p": 98, "g": output, "cap": capacity, "n_it": 18_500}) <= 1.7
