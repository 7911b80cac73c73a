"""Lane charts of several results on one time axis."""

import pytest

from tests.builders import tiny_scenario
from workbench.core.result import Source
from workbench.core.timeline import Span, Timeline
from workbench.plots import middle, plot_lanes
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate

SCHEDULES = (Sequential(), VSLPipe())


def test_lane_charts_share_one_time_axis():
    scenario = tiny_scenario(8, 4, 6)
    results = [simulate(scenario, schedule, detail=Detail.TASK) for schedule in SCHEDULES]
    axes = plot_lanes(results)
    assert [ax.get_title(loc="left").partition(",")[0] for ax in axes] == [
        f"{Source.SIMULATED.value}: {result.schedule}" for result in results
    ]
    longest = max(result.timeline.window(*middle(results[0].timeline)).seconds for result in results)
    assert {ax.get_xlim() for ax in axes} == {(0, longest)}


@pytest.mark.parametrize(("iterations", "expected"), [(0, (0, 1)), (1, (0, 1)), (2, (0, 2)), (5, (1, 3)), (10, (4, 6))])
def test_middle_lies_within_the_run(iterations, expected):
    assert middle(Timeline([Span("gpu", "A0", i, i + 1, i) for i in range(iterations)])) == expected
