"""Positions of sliders: equal parts of an octave, which mean the same change everywhere."""

from __future__ import annotations

import math


def ladder(anchor: float, low: float, high: float, *, per_octave: int = 4) -> tuple[float, ...]:
    """Return steps of equal parts of an octave through `anchor`, from `low` to `high`; always with the anchor."""
    first = math.ceil(per_octave * math.log2(min(low, anchor) / anchor))
    last = math.floor(per_octave * math.log2(max(high, anchor) / anchor))
    return tuple(anchor * 2 ** (step / per_octave) for step in range(first, last + 1))


def whole_ladder(anchor: int, low: int, high: int) -> tuple[int, ...]:
    """Return the steps of `ladder` as integers."""
    return tuple(sorted({round(step) for step in ladder(anchor, low, high)}))


def nearest(steps: tuple[float, ...], value: float) -> int:
    """Number of the step that is nearest to a value in proportion."""
    return min(range(len(steps)), key=lambda place: abs(math.log(steps[place] / value)))


def outward(steps: tuple[float, ...], centre: float, most: int) -> list[float]:
    """Choose about `most` of the steps, always the same ones, and the centre, ordered by distance from the centre."""
    chosen = {*steps[:: max(1, round(len(steps) / most))], steps[-1], centre}
    return sorted(chosen, key=lambda step: max(step / centre, centre / step))
