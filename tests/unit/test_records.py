"""Plain values of frozen dataclasses: they come back equal, and nothing else is let in."""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.records import from_plain, to_plain


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: float
    y: int = 0


@dataclass(frozen=True)
class Drawing:
    name: str
    start: Point
    points: tuple[Point, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()
    colour: Colour = Colour.RED
    end: Point | None = None
    size: str | float = 1.0
    path: Path | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


numbers = st.floats(allow_nan=False)
points = st.builds(Point, numbers, st.integers())
drawings = st.builds(
    Drawing,
    st.text(),
    points,
    st.lists(points).map(tuple),
    st.lists(st.tuples(st.text(), numbers)).map(tuple),
    st.sampled_from(Colour),
    st.none() | points,
    st.text() | numbers,
    st.none() | st.text("ab", min_size=1).map(Path),
    st.dictionaries(st.text(), st.text()),
)


@given(drawings)
def test_what_was_written_comes_back_equal(drawing):
    assert from_plain(Drawing, json.loads(json.dumps(to_plain(drawing)))) == drawing


def test_whole_numbers_stay_whole_and_what_is_missing_takes_its_default():
    back = from_plain(Drawing, {"name": "d", "start": {"x": 1}, "rates": [["a", 2]]})
    assert repr(back.start) == "Point(x=1, y=0)"
    assert back.rates == (("a", 2),)
    assert back.colour is Colour.RED


def test_whole_numbers_of_numpy_become_plain_ones():
    assert type(to_plain(np.int64(3))) is int
    assert to_plain(True) is True


@pytest.mark.parametrize("value", [object(), {1, 2}, Point, lambda: 0, np.zeros(2)])
def test_what_json_does_not_hold_is_refused(value):
    with pytest.raises(TypeError, match="cannot be kept as JSON; use numbers, text, tuples"):
        to_plain({"inside": value})


@pytest.mark.parametrize(
    "values",
    [{"start": {"x": 1}}, {"name": "d", "start": {"x": 1}, "more": 2}, {"name": "d", "start": {"x": "one"}}, 3],
)
def test_values_of_another_kind_are_refused(values):
    with pytest.raises((TypeError, ValueError, AttributeError)):
        from_plain(Drawing, values)
