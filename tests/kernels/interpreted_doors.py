"""The law of doors in the interpreter, for operands that go together. `test_triton.py` runs this file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.kernels.doors import DOORS
from tests.kernels.law_of_doors import check, drawn

CALLS = 5
"""Drawn calls per door."""


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if door.backends])
@examples(CALLS)
@given(st.randoms(use_true_random=False))
def test_any_call_gives_the_answer_of_float64_or_an_error_of_ours(name, random):
    check(drawn(DOORS[name], random, "triton-interpret", wrong=0))
