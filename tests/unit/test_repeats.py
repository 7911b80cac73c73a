"""Patterns that follow themselves, and plans that are played without repeating them."""

import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from workbench.perfmodels import bound
from workbench.schedules import VSLPipe
from workbench.schedules.repeats import Repeat, find_repeats
from workbench.simulate import Detail, simulate


@pytest.mark.parametrize(
    ("items", "repeats"),
    [
        ("", []),
        ("abcabcabc", []),
        ("abcabcabcabc", [Repeat(0, 3, 12)]),
        ("xyabababababz", [Repeat(2, 2, 12)]),
        ("aaaabbbbbc", [Repeat(0, 1, 4), Repeat(4, 1, 9)]),
        ("ababababcdcdcdcd", [Repeat(0, 2, 8), Repeat(8, 2, 16)]),
        ("abacadae", []),
    ],
)
def test_runs_are_found_from_the_first_on(items, repeats):
    assert find_repeats(items) == repeats


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
@pytest.mark.parametrize("h2d", [2e7, 1e8, 1.2e8, 1e9])
def test_a_stack_is_played_as_if_no_layer_were_skipped(slots, h2d):
    scenario = tiny_scenario([20] * 9, [6] * 9, model=tiny_model(30), machine=small_machine(h2d=h2d))
    whole, skipping = (simulate(scenario, VSLPipe(1e-4, slots), detail=detail) for detail in Detail)
    assert skipping.seconds == pytest.approx(whole.seconds, rel=1e-4)
    assert skipping.busy == pytest.approx(whole.busy, rel=1e-4)
    assert bound(scenario, VSLPipe(1e-4, slots)).seconds <= skipping.seconds
