"""Pictures of expert deferral beside expert skipping, over the number of a token's experts that are left out."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_STYLES = (("o-", "#059669"), ("s-", "#d97706"), (":", "#7c3aed"))


def plot_left_out(
    curves: Mapping[str, Mapping[int, float]], ax: Axes | None = None, *, ylabel: str, title: str = ""
) -> Axes:
    """Plot one line per way to leave experts out, over the number of experts of each token that it leaves out.

    Parameters
    ----------
    curves : mapping of name to mapping of experts to value
        Curves of deferral and of skipping in this order, then any others, such as a model's prediction.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(6, 3.2), layout="constrained")[1]
    for (name, curve), (style, colour) in zip(curves.items(), _STYLES, strict=False):
        ax.plot(list(curve), list(curve.values()), style, color=colour, markersize=5, label=name)
    ax.set(xlabel="experts of each token left out", ylabel=ylabel, title=title)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    ax.legend(frameon=False)
    return ax
