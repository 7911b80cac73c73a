"""Colours of tasks are told apart on white and on black, by colour-blind readers too."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from workbench.pipeline.layer_graph import _LETTERS
from workbench.plots import task_colour
from workbench.plots.results import TASK_COLOURS

SEEN = {
    "full": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Linear RGB as readers see it (Machado, Oliveira and Fernandes 2009, severity 1)."""
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
APART = 24
"""Least distance in CIELAB, where 2 is just seen."""


def linear(colour):
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)])


def lab(colour, seen):
    x, y, z = np.cbrt(XYZ @ np.clip(np.array(SEEN[seen]) @ linear(colour), 1e-3, 1) / XYZ.sum(axis=1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distances(codes, seen):
    found = {code: lab(task_colour(code), seen) for code in codes}
    return {one + other: np.linalg.norm(found[one] - found[other]) for one, other in combinations(codes, 2)}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("lane", ["gpu", "cpu", "d2h", "h2d"])
def test_tasks_of_one_lane_are_told_apart_by_every_reader(lane, seen):
    letters = f"{_LETTERS[lane]}{'WK' if lane == 'h2d' else ''}"
    coloured = [code for code in letters if code in TASK_COLOURS]
    assert coloured
    assert {pair: far for pair, far in distances(coloured, seen).items() if far < APART} == {}


def test_tasks_of_all_lanes_have_colours_of_their_own():
    assert {pair: far for pair, far in distances(TASK_COLOURS, "full").items() if far < APART} == {}


@pytest.mark.parametrize("code", TASK_COLOURS)
@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
def test_bars_stand_out_from_either_ground(ground, code):
    light, dark = sorted((float(XYZ[1] @ linear(each)) + 0.05 for each in (ground, task_colour(code))), reverse=True)
    assert light / dark > 2
