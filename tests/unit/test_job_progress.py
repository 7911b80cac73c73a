"""The time that a job has left: simulated at first, measured at the end."""

import pytest

import workbench as wb
from tests.builders import tiny_scenario
from workbench.jobs.progress import Estimate, simulated
from workbench.schedules import Sequential


def test_before_it_begins_the_simulation_tells_the_time_that_is_left() -> None:
    scenario = tiny_scenario([30, 2, 25, 3], 5)
    prompts, outputs = [30, 2, 25, 3], [5, 5, 5, 5]
    estimate = simulated(scenario, Sequential(), prompts, outputs)
    assert estimate.left == wb.simulate(scenario, Sequential()).seconds
    assert str(estimate).endswith("left (simulated)")


def test_of_many_requests_some_are_simulated() -> None:
    scenario = tiny_scenario([20] * 4, 5)
    few, many = (simulated(scenario, Sequential(), [20] * count, [5] * count).left for count in (256, 2560))
    assert many == pytest.approx(10 * few, rel=1e-9)


def test_a_job_that_takes_twice_as_long_is_found_out() -> None:
    begun = Estimate(100.0)
    late = begun.at(0.5, 100.0)
    assert late.left == pytest.approx(100, rel=0.03)
    assert str(late).endswith("(simulated, x 1.96 as measured)")
    assert begun.at(0.5, 50.0).left == 50
    assert begun.at(1.0, 130.0).left == 0


def test_one_quick_request_says_little() -> None:
    assert Estimate(100.0).at(0.001, 0.0).left == pytest.approx(100 * 20 / 21, rel=2e-3)
