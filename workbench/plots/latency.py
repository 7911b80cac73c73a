"""Pictures of online serving: latencies, attainment of objectives by rate, and prompt tokens per layer.

Each function takes an `ax` and returns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from workbench.scheduler.base import Scheduler
from workbench.scheduler.block_manager import BlockManager
from workbench.workload import Workload

_COLOURS = ("#1d4ed8", "#d97706", "#059669", "#db2777", "#7c3aed")
_LIMIT = "#6b7280"


def plot_shares(
    seconds: Mapping[str, npt.ArrayLike], ax: Axes | None = None, *, limit: float | None = None, title: str = ""
) -> Axes:
    """Plot the share of requests, or of gaps between tokens, that took at most a given time.

    Parameters
    ----------
    seconds : mapping of name to array_like
        Times such as `Result.latencies.ttft` or `.tbt` [s].
    limit : float, optional
        Limit of an objective [s].
    """
    ax = _axes(ax, (5.2, 3.4))
    for (name, times), colour in zip(seconds.items(), _COLOURS, strict=False):
        ordered = np.sort(np.asarray(times, dtype=np.float64))
        ax.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=colour, label=name)
    if limit is not None:
        ax.axvline(limit, color=_LIMIT, linestyle="--", linewidth=1)
        ax.annotate("objective", (limit, 0.02), (3, 0), textcoords="offset points", fontsize=8, color=_LIMIT)
    ax.set(xlabel="seconds", ylabel="share that took at most so long", ylim=(0, 1.02), title=title)
    ax.set_xlim(left=0)
    return _finished(ax, "lower right")


def plot_attainment(
    curves: Mapping[str, Mapping[float, float]], ax: Axes | None = None, *, target: float = 0.9
) -> Axes:
    """Plot the share of requests that met an objective over their arrival rate [requests/s].

    Parameters
    ----------
    curves : mapping of name to mapping of rate to share
    target : float
        Required share.
    """
    ax = _axes(ax, (6, 3.4))
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        ax.plot(list(curve), list(curve.values()), "o-", color=colour, label=name)
    ax.axhline(target, color=_LIMIT, linestyle="--", linewidth=1, label=f"{target:.0%} asked for")
    ax.set(xlabel="requests per second", ylabel="met the objective", ylim=(0, 1.02))
    return _finished(ax, "lower left")


def layer_tokens(scheduler: Scheduler, prompts: Sequence[int], layers: int) -> npt.NDArray[np.int64]:
    """Count the prompt tokens that pass each layer in each iteration, for requests of one output token each.

    Returns
    -------
    ndarray, shape (layers, iterations)
    """
    workload = Workload.lengths(list(prompts), 1)
    blocks = BlockManager(int(workload.prompt_len.sum()), 1, len(workload), int(workload.prompt_len.max()) + 1)
    queue = scheduler.open(workload, blocks, scheduler.token_budget or np.inf, layers)
    queue.add(np.arange(len(workload)), workload.prompt_len, workload.output_len)
    columns = []
    while (batch := queue.next()) is not None:
        passed = np.zeros(layers, dtype=np.int64)
        passed[batch.prefill_layers] = int(batch.prefill_len.sum())
        columns.append(passed)
        queue.complete(batch)
    return np.stack(columns, axis=1)


def plot_passes(tokens: npt.NDArray[np.int64], ax: Axes | None = None, *, title: str = "") -> Axes:
    """Plot the counts of `layer_tokens`: dark where many prompt tokens pass a layer at once."""
    ax = _axes(ax, (5.2, 2.8))
    image = ax.imshow(tokens, aspect="auto", origin="lower", cmap="Blues", vmin=0, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="prompt tokens")
    ax.set(xlabel="iteration", ylabel="layer", title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    return ax if ax is not None else plt.subplots(figsize=size, layout="constrained")[1]


def _finished(ax: Axes, legend: Literal["lower left", "lower right"]) -> Axes:
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    ax.legend(loc=legend, frameon=False)
    return ax
