"""Law 8 before any work: what `fits` says of a scenario is what the readers then do."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from tests.builders import scenarios, schedulers, small_machine, tiny_scenario
from tests.examples import examples
from workbench.core.errors import CapacityError, ScenarioError, WorkbenchError
from workbench.perfmodels import bound
from workbench.scheduler.continuous import ContinuousBatching
from workbench.schedules import Sequential
from workbench.serving import fits
from workbench.serving.capacity import least_fitting
from workbench.simulate import simulate

FORMATS = st.sampled_from([None, "fp32", "bf16", "fp16"])
KNOWN = st.sets(st.sampled_from(["fp32", "bf16", "fp16"]), min_size=1)


@st.composite
def asked(draw):
    """Any precisions on machines that lack some rates or memory, under any scheduler."""
    scenario, schedule = draw(scenarios())
    machine = scenario.machine
    for lane, kept in (("gpu", draw(KNOWN)), ("cpu", draw(KNOWN | st.just({"fp32", "bf16", "fp16"})))):
        device = getattr(machine, lane)
        memory = device.memory * draw(st.sampled_from([1.0, 1.0, 1e-3]))
        rates = tuple((dtype, 1e11) for dtype in sorted(kept))
        machine = replace(machine, **{lane: replace(device, flops=rates, memory=memory)})
    precisions = {"weights": draw(FORMATS), "kv": draw(FORMATS)}
    try:
        memory = replace(scenario.memory, kv_capacity=2 * float(scenario.memory.kv_capacity), **precisions)
        return scenario.on(machine=machine, memory=memory, scheduler=draw(schedulers())), schedule
    except WorkbenchError:
        reject()


@examples(150)
@given(asked())
def test_fits_says_yes_exactly_where_the_readers_answer(case):
    scenario, schedule = case
    try:
        fitting = bool(fits(scenario, schedule))
    except WorkbenchError as error:
        refusal = type(error), str(error)
        for read in (bound, simulate):
            with pytest.raises(WorkbenchError) as found:
                read(scenario, schedule)
            assert (type(found.value), str(found.value)) == refusal
        return
    for read in (bound, simulate):
        if fitting:
            assert read(scenario, schedule).generated == scenario.workload.output_len.sum()
        else:
            with pytest.raises(CapacityError):
                read(scenario, schedule)


def test_a_precision_without_a_rate_is_refused_by_fits_too():
    machine = replace(small_machine(), gpu=replace(small_machine().gpu, flops=(("bf16", 1e11),)))
    scenario = tiny_scenario(machine=machine, scheduler=ContinuousBatching(64))
    half = scenario.on(memory=replace(scenario.memory, weights="fp16"))
    with pytest.raises(ScenarioError, match="no known FLOP rate for fp16"):
        fits(half, Sequential())


@st.composite
def rising(draw):
    """Bytes left by number, which never fall: linear, in steps, or bent."""
    count = draw(st.integers(1, 300))
    slopes = draw(st.lists(st.sampled_from([0, 0, 1, 1, 7, 1000]) | st.integers(0, 10**9), min_size=1, max_size=6))
    bent = [slopes[len(slopes) * number // count] for number in range(count)]
    start = -draw(st.integers(-5, 2 * sum(bent) + 5))
    return list(accumulate(bent, initial=start))


@examples(400)
@given(rising())
def test_the_least_number_that_fits_is_the_first_of_all(left):
    first = next((number for number, free in enumerate(left) if free >= 0), None)
    assert least_fitting(0, len(left) - 1, left.__getitem__) == first


def test_what_is_linear_takes_few_steps():
    asked = []

    def left(number):
        asked.append(number)
        return 4096.0 * number - 1e9

    assert least_fitting(1, 10**6, left) == -(-(10**9) // 4096)
    assert len(asked) <= 5
