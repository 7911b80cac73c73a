"""The setting in which overlap is measured: balanced lanes, a balanced link, the same passes for every clock."""

import platform
from dataclasses import replace

import numpy as np
import pytest

from tests.builders import small_machine, tiny_model
from workbench.bench.live import overlap
from workbench.bench.live.overlap import STEADY, Bench
from workbench.core.units import DTYPE_BYTES
from workbench.schedules import Sequential, VSLPipe
from workbench.serving import prepare
from workbench.simulate.clock import TaskClock

pytestmark = pytest.mark.alone

MODEL = tiny_model(8)
MACHINE = replace(
    small_machine(gpu=3e9, hbm=1e10, cpu=4e8, dram=1e10, h2d=1e9, d2h=1e9, host_memory=1e11), host=platform.node()
)


@pytest.fixture
def bench() -> Bench:
    return Bench(MODEL, MACHINE, 32, None, None)


def test_the_context_gives_both_compute_lanes_as_much_to_do(bench):
    lanes = bench._lanes(bench.context)
    assert lanes["cpu"] == pytest.approx(lanes["gpu"], rel=0.1)


def test_the_link_takes_as_long_for_a_passs_weights_as_the_busier_lane(bench):
    cost = prepare(bench.scenario(bench.context, None), VSLPipe()).cost
    weights = cost.weights_per_layer * MODEL.num_hidden_layers
    assert weights / bench.rate == pytest.approx(max(bench._lanes(bench.context).values()))


def test_what_is_given_is_taken():
    bench = Bench(MODEL, MACHINE, 32, 100, 5e8)
    assert (bench.context, bench.rate) == (100, 5e8)
    assert bench.scenario(100, 5e8).machine.link.h2d == 5e8


def test_every_pass_decodes_all_requests_with_one_more_token_in_the_cache(bench, monkeypatch):
    prepared = prepare(bench.scenario(bench.context, bench.rate), VSLPipe())
    clock, seen = TaskClock(prepared), []
    execute = clock.execute
    monkeypatch.setattr(clock, "execute", lambda plan, *rest: (seen.append(plan), execute(plan, *rest))[1])
    steady = list(bench.passes(prepared, clock))
    assert len(steady) == STEADY
    assert len(seen) == STEADY + 2
    for number, plan in enumerate(seen):
        held = np.concatenate([part.context for part in plan.parts])
        assert held.tolist() == [bench.context + number] * 32
    assert all(0 <= share <= seconds * (1 + 1e-9) for seconds, busy in steady for share in busy.values())


def test_overlap_pays_in_simulation_when_lanes_and_link_are_balanced(bench):
    fast, slow = (bench.simulated(schedule).simulated for schedule in (VSLPipe(), Sequential()))
    assert 1.7 < slow / fast <= 3  # three equal lanes, but Sequential reads each expert once for the whole batch


def test_no_pass_is_simulated_below_its_bound_and_the_slow_link_is_it(bench):
    found = [bench.simulated(schedule) for schedule in (overlap.VSL, overlap.PREFETCH, overlap.PLAIN)]
    assert len({times.bound for times in found}) == 1
    assert all(times.bound <= times.simulated for times in found)
    weights = prepare(bench.scenario(bench.context, bench.rate), overlap.VSL).cost.weights_per_layer
    assert found[0].bound >= weights * bench.scenario(bench.context, bench.rate).model.num_hidden_layers / bench.rate


def test_cgopipe_streams_the_experts_alone(bench):
    scenario = bench.scenario(bench.context, bench.rate, overlap.PAGED)
    found = prepare(scenario, overlap.PAGED).cost.weights_per_layer
    size = DTYPE_BYTES[scenario.precision.weights]
    assert found == scenario.model.num_local_experts * scenario.model.expert_params * size


def test_the_table_tells_the_share_of_the_bound():
    lines: list[str] = []
    times = overlap.ScheduleTimes(overlap.VSL, [1.0], [1.5])
    times.note(2.0, {"gpu": 1.0})
    overlap.table([times], {}, lines.append)
    assert "0.75, 0.50" in lines[1]


def test_ratios_are_those_of_the_medians_with_the_extremes():
    fast, slow = (
        overlap.ScheduleTimes(overlap.VSL, [1.0], [1.5], [1.0, 2.0, 3.0]),
        overlap.ScheduleTimes(overlap.PLAIN, [2.0], [4.0], [4.0, 5.0]),
    )
    ratios = overlap.ratios_of([fast, slow])
    assert ratios["VSLPipe(weight_slots=3) / Sequential, speed"] == {
        "median": 2.25,
        "min": 4 / 3,
        "max": 5.0,
        "runs": 3,
    }
    assert ratios["VSLPipe(weight_slots=3): measured / simulated speed"] == {
        "median": 0.75,
        "min": 0.5,
        "max": 1.5,
        "runs": 3,
    }


def test_lanes_are_busy_for_their_share_of_all_passes():
    times = overlap.ScheduleTimes(overlap.VSL, [1.0], [1.0])
    times.note(1.0, {"gpu": 0.5, "h2d": 1.0})
    times.note(3.0, {"gpu": 2.5, "h2d": 1.0})
    assert times.utilisation == {"gpu": 0.75, "h2d": 0.5}
    assert times.seconds == 2.0


def test_predictions_by_several_calibrations_are_averaged() -> None:
    times = overlap.ScheduleTimes(overlap.VSL, [1.0], [1.5])
    times.predict_again(overlap.ScheduleTimes(overlap.VSL, [2.0], [2.5]))
    assert (times.bound, times.simulated) == (1.5, 2.0)
