"""Names beside points: none on another, none on a point, and every one inside the axes."""

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.text import Text

from workbench.plots.labels import Label, place_labels


def drawn(points, names=None):
    """Boxes of the names as matplotlib really draws them [pixels], and the points."""
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    names = names or [f"name-{number}" for number in range(len(points))]
    place_labels(ax, [Label(name, x, y, "black") for name, (x, y) in zip(names, points, strict=True)])
    figure.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without the line to the point
    box = ax.get_window_extent()
    at = ax.transData.transform(points)
    plt.close(figure)
    return boxes, at, box


def test_no_name_lies_on_another_or_on_a_point_where_there_is_room():
    boxes, at, _ = drawn(np.random.default_rng(0).uniform(0.3, 0.7, (25, 2)))
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(box.contains(*point) for box in boxes for point in at)


def test_names_at_the_border_stay_inside():
    boxes, _, inside = drawn([(0.0, 0.0), (1.0, 1.0), (1.0, 0.5), (0.5, 1.0)])
    assert all(inside.x0 <= b.x0 and b.x1 <= inside.x1 and inside.y0 - 1 <= b.y0 and b.y1 <= inside.y1 for b in boxes)


def test_a_point_alone_has_its_name_beside_it_without_a_line():
    figure, ax = plt.subplots()
    place_labels(ax, [Label("alone", 0.5, 0.5, "black")])
    assert ax.texts[0].arrow_patch is None
    assert ax.texts[0].xyann == (4.0, 0.0)
    place_labels(ax, [])
    plt.close(figure)
