"""Simulating 20,000 requests stays cheap: counted in calls, which no other process can slow down."""

import cProfile
import pstats

from tests.systems import VSL
from workbench.hardware import machines
from workbench.memory import Memory
from workbench.models import models
from workbench.scenario import Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import VSLPipe
from workbench.simulate import Detail, simulate
from workbench.workload import Workload

CALLS_PER_ITERATION = 780  # 690 when this was written (CPython 3.11, profiled calls of C functions included)


def test_twenty_thousand_requests_are_simulated_in_few_calls():
    """Mixtral-8x7B on the A40 with 70 GB of KV, p = 98, g = 128."""
    scenario = Scenario(
        VSL,
        model=models["mixtral-8x7b"],
        machine=machines["a40"],
        memory=Memory(kv_capacity="70GB", kv_block=16),
        workload=Workload.lengths(98, 128, 20_000),
        scheduler=ResourceAware(),
    )
    profile = cProfile.Profile()
    result = profile.runcall(simulate, scenario, VSLPipe(), detail=Detail.ITERATION)
    assert (result.iterations, result.preemptions) == (931, 7969)
    assert result.generated == 20_000 * 128
    assert max(result.steps.used_blocks) <= scenario.kv_blocks
    assert sum(result.steps.prefill) + sum(result.steps.decode) == result.processed
    assert pstats.Stats(profile).total_calls < CALLS_PER_ITERATION * result.iterations
