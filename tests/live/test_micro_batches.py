"""Any number of micro-batches serves the workload or is refused at once, whatever the schedule and the reader."""

from collections.abc import Iterator
from dataclasses import fields

import pytest

import workbench as wb
from tests.builders import tiny_scenario
from tests.live.world import WIRED, requests, scenario
from workbench.core.errors import ScheduleError
from workbench.models import ModelConfig
from workbench.schedules import FlexGenS4, Schedule, Sequential, WeightPlace
from workbench.schedules.micro_batches import MicroBatched
from workbench.serving.prepared import FEW_PARTS

ASKED = requests((5, 9, 3, 12), 3)


def schedules(count: int) -> Iterator[Schedule]:
    """Every schedule that takes micro-batches, with its weights in each place."""
    for kind in MicroBatched.__subclasses__():
        if count >= kind.least:
            chosen = [{"weights": place} for place in WeightPlace]
            yield from (kind(count, **each) for each in (chosen if "weights" in names(kind) else [{}]))


def names(kind: type[MicroBatched]) -> set[str]:
    return {field.name for field in fields(kind)}


def wired_for(case: wb.Scenario, schedule: Schedule) -> wb.Scenario:
    return case.on(pipeline=WIRED["flexgen_s4" if isinstance(schedule, FlexGenS4) else "vslpipe"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [1, 2, 7, FEW_PARTS])
def test_few_micro_batches_serve_however_few_requests_there_are(count: int, tiny: ModelConfig):
    case = scenario(tiny, ASKED)
    answer = wb.run(case, Sequential()).tokens
    for schedule in schedules(count):
        here = wired_for(case, schedule)
        assert wb.simulate(here, schedule).generated == 12
        assert wb.run(here, schedule).tokens == answer


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [wb.bound, wb.simulate, wb.run, wb.start], ids=lambda read: read.__name__)
@pytest.mark.parametrize("count", [FEW_PARTS + 1, 1000, 10**6])
def test_more_micro_batches_than_requests_are_refused(count: int, read, tiny: ModelConfig):
    case = scenario(tiny, ASKED)
    for schedule in schedules(count):
        with pytest.raises(ScheduleError, match=f"has {count} micro-batches for 4 requests.*; give at most 4"):
            read(wired_for(case, schedule), schedule)


def test_as_many_micro_batches_as_requests_serve():
    for schedule in schedules(150):
        case = wired_for(tiny_scenario(3, 2, 150), schedule)
        assert wb.simulate(case, schedule).generated == 300
