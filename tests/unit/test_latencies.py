"""Latencies that are computed when a column is asked for."""

import copy
import pickle

import numpy as np
import pytest

from tests.builders import tiny_scenario
from workbench.core.latency import Latencies
from workbench.schedules import Sequential
from workbench.simulate import simulate

KNOWN = Latencies((0, 1), (0.0, 0.5), (1.0, 2.0), (3.0, 4.0), (1.5, 0.0), (1.5,), (2,))


def later():
    """Latencies that are not computed yet, and a list that grows when they are."""
    computed = list[None]()

    def compute():
        computed.append(None)
        return {name: np.array(column) for name, column in KNOWN.columns().items()}

    return Latencies.later(compute), computed


def test_they_are_computed_once_and_only_if_asked_for():
    found, computed = later()
    assert not computed
    assert found.first == (1.0, 2.0)
    assert found.columns() == KNOWN.columns()
    assert computed == [None]


@pytest.mark.parametrize("use", [repr, hash, copy.deepcopy, pickle.dumps, Latencies.summary])
def test_they_are_as_those_that_are_there(use):
    found, _ = later()
    assert use(found) == use(KNOWN)
    assert found == KNOWN


def test_a_name_that_is_no_column_is_none():
    found, computed = later()
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        found.speed  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        KNOWN.speed  # noqa: B018
    assert len(computed) <= 1


def test_a_simulation_computes_none():
    result = simulate(tiny_scenario([8] * 5, [4] * 5), Sequential())
    assert set(vars(result.latencies)) == {"_compute"}
    assert len(result.latencies.first) == 5
