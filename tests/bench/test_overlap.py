"""The setting in which overlap is measured: balanced lanes, a balanced link, the same passes for every clock."""

import platform
from dataclasses import replace

import numpy as np
import pytest

from tests.builders import small_machine, tiny_model
from workbench.bench import overlap
from workbench.bench.overlap import STEADY, Bench
from workbench.schedules import Sequential, VSLPipe
from workbench.serving import prepare
from workbench.simulate.clock import TaskClock

MODEL = tiny_model(8)
MACHINE = replace(
    small_machine(gpu=3e9, hbm=1e10, cpu=1e12, dram=1e8, h2d=1e9, d2h=1e9, host_memory=1e11), host=platform.node()
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
    seconds, busy = bench.passes(prepared, clock)
    assert len(seconds) == STEADY
    assert len(seen) == STEADY + 2
    for number, plan in enumerate(seen):
        held = np.concatenate([part.context for part in plan.parts])
        assert held.tolist() == [bench.context + number] * 32
    assert all(0 <= share <= 1 + 1e-9 for share in busy.values())


def test_overlap_pays_in_simulation_when_lanes_and_link_are_balanced(bench):
    fast, slow = (bench.simulated(schedule).simulated for schedule in (VSLPipe(), Sequential()))
    assert 2.5 < slow / fast < 3.1


def test_ratios_pair_the_repetitions(bench):
    contenders = [overlap.Contender(s, 1.0, list(m)) for s, m in ((overlap.VSL, (1.0, 2.0)), (overlap.PLAIN, (2.0, 3.0)))]
    lines: list[str] = []
    ratios = overlap._print(contenders, lines.append)
    assert ratios["VSLPipe / Sequential, speed"]["median"] == 1.75
    assert ratios["VSLPipe: measured speed / simulated"] == {"median": 0.75, "min": 0.5, "max": 1.0, "runs": 2}
    assert any("1.75 (1.50 to 2.00, 2 runs)" in line for line in lines)
