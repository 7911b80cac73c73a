"""MoE-CAP's pictures: demand against the hardware's box, and bandwidth against power over the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike

from workbench.perfmodels.architecture import Architecture
from workbench.perfmodels.cap_diagram import Fit, Requirement, fits, requirement
from workbench.perfmodels.coverage import uniform_coverage
from workbench.perfmodels.processor_cost import offloaded_bandwidth
from workbench.processors import Kind, Processor

_MODELS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
_BOX = "#6b7280"
_OWN, _OFFLOADED = "#2563eb", "#f59e0b"


@dataclass(frozen=True)
class CapDiagram:
    """Demands of models and boxes of processors, on common axes.

    Attributes
    ----------
    lines : mapping of model to Requirement
        Theoretical demand, one point per batch size.
    practical : mapping of model to Requirement
        The same at the given utilisation.
    boxes : mapping of name to Processor
    """

    lines: Mapping[str, Requirement]
    practical: Mapping[str, Requirement]
    boxes: Mapping[str, Processor]

    def fits(self) -> dict[tuple[str, str], Fit]:
        """Whether each point of each model's practical line lies inside each box."""
        return {(m, p): fits(line, box) for m, line in self.practical.items() for p, box in self.boxes.items()}


def cap_diagram(
    models: Mapping[str, Architecture],
    processors: Mapping[str, Processor],
    *,
    batch: ArrayLike,
    context: float,
    tpot: float,
    smbu: float = 1.0,
    smfu: float = 1.0,
) -> CapDiagram:
    """Data of a CAP diagram: what each model needs at each batch size, beside what each processor has.

    Parameters
    ----------
    models, processors : mapping
        For example the catalogues `architectures` and `processors`.
    batch : array_like
        Batch sizes [sequences].
    context, tpot : float
        Cached tokens of each sequence, target time per output token [s].
    smbu, smfu : float
        Utilisation that the system at hand reaches, for the practical line.

    Raises
    ------
    ValueError
        If an argument is outside its domain.

    Notes
    -----
    MoE-CAP section 4.1 and Figure 7. Routing is taken as uniform, an upper bound of the demand; for measured or
    skewed routing call `requirement` with that coverage.
    """
    rows = np.asarray(batch, dtype=np.float64)
    lines = {
        name: requirement(
            model,
            batch=rows,
            context=context,
            tpot=tpot,
            coverage=uniform_coverage(rows, experts=model.experts, top_k=model.top_k),
        )
        for name, model in models.items()
    }
    dashed = {name: line.practical(smbu=smbu, smfu=smfu) for name, line in lines.items()}
    return CapDiagram(lines, dashed, dict(processors))


def plot_cap(diagram: CapDiagram, ax: Axes | None = None, *, ops: bool = False) -> Axes:
    """Memory [GB] against bandwidth [GB/s], or against operations [TFLOP/s]; solid theoretical, dashed practical.

    A processor of which the catalogue does not know one side of the box is left out.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(7, 4.2), layout="constrained")[1]
    scale, unit = (1e12, "operations [TFLOP/s]") if ops else (1e9, "memory bandwidth [GB/s]")
    for number, (name, solid) in enumerate(diagram.lines.items()):
        colour = _MODELS[number % len(_MODELS)]
        for line, style in ((solid, "o-"), (diagram.practical[name], "--")):
            demand = np.atleast_1d(line.ops if ops else line.bandwidth) / scale
            label = name if line is solid else None
            ax.plot(np.atleast_1d(line.memory) / 1e9, demand, style, color=colour, markersize=3, label=label)
    for name, box in diagram.boxes.items():
        height = (box.flops if ops else box.bandwidth) / scale
        if np.isfinite(box.memory) and np.isfinite(height):
            face, edge = to_rgba(_BOX, 0.05), to_rgba(_BOX, 0.5)
            ax.add_patch(Rectangle((0, 0), box.memory / 1e9, height, facecolor=face, edgecolor=edge))
            ax.annotate(name, (box.memory / 1e9, height), fontsize=7, ha="right", va="bottom", color=_BOX)
    _log_axes(ax)
    ax.autoscale_view()
    ax.set_xlabel("memory [GB]")
    ax.set_ylabel(unit)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=7)
    return ax


@dataclass(frozen=True)
class PowerPoint:
    """One dot of bandwidth [B/s] against power [W]: of its own memory, or offloaded."""

    name: str
    power: float
    bandwidth: float
    offloaded: bool


def bandwidth_against_power(
    processors: Mapping[str, Processor], weights: float, *, host_power: float = 0.0
) -> list[PowerPoint]:
    """One dot per processor of known power, and one more for what offloading leaves of it where the model does not fit.

    Parameters
    ----------
    processors : mapping of name to Processor
    weights : float
        Size of the model [B]. GPUs that cannot hold it read the rest over their link from a host.
    host_power : float
        Added to a GPU's power where it offloads [W].

    Raises
    ------
    ValueError
        If the size is not positive.

    Notes
    -----
    MoE-CAP, Figure 2. A CPU's DRAM is taken to be large enough.
    """
    points = []
    for name, item in processors.items():
        if not np.isfinite(item.power):
            continue
        points.append(PowerPoint(name, item.power, item.bandwidth, offloaded=False))
        if item.kind is Kind.GPU and weights > item.memory:
            rate = offloaded_bandwidth(weights, memory=item.memory, bandwidth=item.bandwidth, link=item.link)
            points.append(PowerPoint(name, item.power + host_power, float(rate), offloaded=True))
    return points


def plot_bandwidth_against_power(
    points: Iterable[PowerPoint], demands: Mapping[str, float], ax: Axes | None = None
) -> Axes:
    """Dots over power, and one horizontal line per named demand [B/s]: dots above a line meet it."""
    ax = ax if ax is not None else plt.subplots(figsize=(7, 4.2), layout="constrained")[1]
    for point in points:
        colour = _OFFLOADED if point.offloaded else _OWN
        ax.plot(point.power, point.bandwidth / 1e9, "o", color=colour, markersize=5)
        ax.annotate(f" {point.name}", (point.power, point.bandwidth / 1e9), fontsize=6, va="center", color=_BOX)
    for colour, label in ((_OWN, "own memory"), (_OFFLOADED, "offloading")):
        ax.plot([], [], "o", color=colour, label=label)
    for number, (name, demand) in enumerate(demands.items()):
        ax.axhline(demand / 1e9, color=_MODELS[(number + 1) % len(_MODELS)], linestyle="--", linewidth=1, label=name)
    _log_axes(ax)
    ax.set_xlabel("power [W]")
    ax.set_ylabel("memory bandwidth [GB/s]")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower right", frameon=False, fontsize=8)
    return ax


def _log_axes(ax: Axes) -> None:
    """Both axes logarithmic with plain numbers, 1, 2 and 5 of each decade."""
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
