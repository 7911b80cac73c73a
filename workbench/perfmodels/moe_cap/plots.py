"""MoE-CAP's pictures: demand against the hardware's box, and bandwidth against power over the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from workbench.core.units import format_seconds
from workbench.hardware.processors import Processor, ProcessorKind
from workbench.models import ModelConfig
from workbench.perfmodels.coverage import skewed_coverage
from workbench.perfmodels.moe_cap.diagram import Fit, Requirement, fits, requirement
from workbench.perfmodels.moe_cap.processor_cost import offloaded_bandwidth
from workbench.plots.labels import Label, place_labels

_MODELS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
_BOXES = {ProcessorKind.GPU: "#4b5563", ProcessorKind.CPU: "#047857", ProcessorKind.UNIFIED: "#7c2d12"}
_HAVE = {
    ProcessorKind.GPU: "GPU has",
    ProcessorKind.CPU: "CPU has",
    ProcessorKind.UNIFIED: "GPU and CPU on one memory have",
}
_OWN = "#2563eb"
_OFFLOADED = "#d97706"
_FEW = 6
_CROWD = 12
"""Number of models and processors up to which each dot shows its batch size; with more, the picture is drawn larger."""


@dataclass(frozen=True)
class CapDiagram:
    """Demands of models and boxes of processors, on common axes.

    Attributes
    ----------
    lines : mapping of model to Requirement
        Theoretical demand, one point per batch size.
    practical : mapping of model to Requirement
        Practical demand, at the given utilisation.
    boxes : mapping of name to Processor
    batch : array
        Batch sizes [sequences].
    context, tpot, smbu, smfu : float
        Values as given to `cap_diagram`.
    """

    lines: Mapping[str, Requirement]
    practical: Mapping[str, Requirement]
    boxes: Mapping[str, Processor]
    batch: NDArray[np.float64]
    context: float
    tpot: float
    smbu: float
    smfu: float

    def fits(self) -> dict[tuple[str, str], Fit]:
        """Compare each point of each model's practical line with each box."""
        return {(m, p): fits(line, box) for m, line in self.practical.items() for p, box in self.boxes.items()}


def cap_diagram(
    models: Mapping[str, ModelConfig],
    processors: Mapping[str, Processor],
    *,
    batch: ArrayLike,
    context: float,
    tpot: float,
    smbu: float = 1.0,
    smfu: float = 1.0,
    sigma: float = 0.0,
) -> CapDiagram:
    """Data of a CAP diagram: the demand of each model at each batch size, and the box of each processor.

    Parameters
    ----------
    models, processors : mapping
        For example the catalogues `models` and `processors`.
    batch : array_like
        Batch sizes [sequences].
    context, tpot : float
        Cached tokens of each sequence, target time per output token [s].
    smbu, smfu : float
        Utilisation that the system at hand reaches, for the practical line.
    sigma : float
        Spread of the experts' popularity, as for `skewed_coverage`; 0 is uniform routing, an upper bound of the demand.

    Raises
    ------
    ValueError
        If an argument is outside its domain.

    Notes
    -----
    MoE-CAP section 4.1 and Figure 7.
    """
    rows = np.atleast_1d(np.asarray(batch, dtype=np.float64))
    lines = {
        name: requirement(
            model,
            batch=rows,
            context=context,
            tpot=tpot,
            coverage=skewed_coverage(
                rows, experts=model.num_local_experts, top_k=model.num_experts_per_tok, sigma=sigma
            ),
        )
        for name, model in models.items()
    }
    dashed = {name: line.practical(smbu=smbu, smfu=smfu) for name, line in lines.items()}
    return CapDiagram(lines, dashed, dict(processors), rows, context, tpot, smbu, smfu)


def plot_cap(diagram: CapDiagram, ax: Axes | None = None, *, ops: bool = False) -> Axes:
    """Plot memory [GB] against bandwidth [GB/s], or against operations [TFLOP/s]; solid theoretical, dashed practical.

    Each processor is a box with its name at the corner. A processor is left out if the catalogue lacks a side of it.
    """
    boxes = {name: corner for name, box in diagram.boxes.items() if (corner := _corner(box, ops))}
    ax = ax if ax is not None else _axes(len(diagram.lines) + len(boxes))
    labels = []
    for number, (name, solid) in enumerate(diagram.lines.items()):
        colour = _MODELS[number % len(_MODELS)]
        for line, style in ((solid, "o-"), (diagram.practical[name], "--")):
            memory, demand = _points(line, ops)
            ax.plot(memory, demand, style, color=colour, markersize=3, linewidth=1.2)
        memory, demand = _points(solid, ops)
        labels.append(Label(name, float(memory[-1]), float(demand[-1]), colour))
    for name, (width, height) in boxes.items():
        colour = _BOXES[diagram.boxes[name].kind]
        face = to_rgba(colour, min(0.05, 0.3 / len(boxes)))
        edge = to_rgba(colour, 0.45)
        ax.add_patch(Rectangle((0, 0), width, height, facecolor=face, edgecolor=edge, linewidth=0.7))
        labels.append(Label(name, width, height, colour))
    if len(labels) <= _FEW:
        labels += _batches(diagram, ops)
    _log_axes(ax)
    ax.set_xlabel("memory [GB]")
    ax.set_ylabel("operations [TFLOP/s]" if ops else "memory bandwidth [GB/s]")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(_question(diagram), fontsize=8, loc="left", pad=24)
    ax.legend(
        handles=_meanings(diagram, ops), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=7
    )
    every = [*diagram.lines.values(), *diagram.practical.values()]
    dots = [np.column_stack(_points(line, ops)) for line in every]
    place_labels(ax, labels, avoid=np.concatenate(dots))
    return ax


def _batches(diagram: CapDiagram, ops: bool) -> list[Label]:
    """Labels with the batch size beside each dot."""
    return [
        Label(f"{batch:g}", memory, demand, _MODELS[number % len(_MODELS)])
        for number, line in enumerate(diagram.lines.values())
        for batch, memory, demand in zip(diagram.batch, *_points(line, ops), strict=True)
    ]


def _axes(entries: int) -> Axes:
    size = (10, 6.5) if entries > _CROWD else (7, 4.6)
    return plt.subplots(figsize=size, layout="constrained")[1]


def _corner(box: Processor, ops: bool) -> tuple[float, float] | None:
    """Memory [GB] and bandwidth [GB/s] or operations [TFLOP/s] of a processor; None if one is not known."""
    sides = (box.memory / 1e9, box.flops / 1e12 if ops else box.bandwidth / 1e9)
    return sides if np.isfinite(sides).all() else None


def _points(line: Requirement, ops: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    demand = np.asarray(line.ops) / 1e12 if ops else np.asarray(line.bandwidth) / 1e9
    memory, demand = np.broadcast_arrays(np.atleast_1d(np.asarray(line.memory) / 1e9), np.atleast_1d(demand))
    return memory, demand


def _question(diagram: CapDiagram) -> str:
    return f"Needed for a step in {format_seconds(diagram.tpot)}, each sequence with {diagram.context:g} cached tokens"


def _meanings(diagram: CapDiagram, ops: bool) -> list[Artist]:
    low = diagram.batch.min()
    high = diagram.batch.max()
    batches = f"batch {low:g}" if low == high else f"batch {low:g} (low end) to {high:g} (name)"
    reached = f"S-MFU {diagram.smfu:g}" if ops else f"S-MBU {diagram.smbu:g}"
    kinds = {box.kind for name, box in diagram.boxes.items() if _corner(box, ops)}
    return [
        Line2D([], [], color="#111827", marker="o", markersize=3, label=f"needed, {batches}"),
        Line2D([], [], color="#111827", linestyle="--", label=f"the same at {reached}"),
        *(
            Patch(facecolor="none", edgecolor=_BOXES[kind], label=_HAVE[kind])
            for kind in ProcessorKind
            if kind in kinds
        ),
    ]


@dataclass(frozen=True)
class PowerPoint:
    """A dot of bandwidth [B/s] against power [W], of a processor's own memory or with offloading."""

    name: str
    power: float
    bandwidth: float
    offloaded: bool


def bandwidth_against_power(
    processors: Mapping[str, Processor], weights: float, *, host_power: float = 0.0
) -> list[PowerPoint]:
    """Dots of bandwidth against power: one per processor of known power, and one more with offloading if needed.

    Parameters
    ----------
    processors : mapping of name to Processor
    weights : float
        Size of the model [B]. GPUs that cannot hold it read the rest over their link from a host.
    host_power : float
        Power of the host, which is added to a GPU's power if it offloads [W].

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
        if item.kind is ProcessorKind.GPU and weights > item.memory:
            rate = offloaded_bandwidth(weights, memory=item.memory, bandwidth=item.bandwidth, link=item.link)
            points.append(PowerPoint(name, item.power + host_power, float(rate), offloaded=True))
    return points


def plot_bandwidth_against_power(
    points: Iterable[PowerPoint], demands: Mapping[str, float], ax: Axes | None = None
) -> Axes:
    """Plot dots over power, and one horizontal line per named demand [B/s]: dots above a line meet it."""
    dots = list(points)
    ax = ax if ax is not None else _axes(len(dots))
    labels = []
    for point in dots:
        colour = _OFFLOADED if point.offloaded else _OWN
        ax.plot(point.power, point.bandwidth / 1e9, "o", color=colour, markersize=4)
        labels.append(Label(point.name, point.power, point.bandwidth / 1e9, colour))
    for colour, label in ((_OWN, "own memory"), (_OFFLOADED, "offloading, with its host's power")):
        ax.plot([], [], "o", color=colour, markersize=4, label=label)
    for number, (name, demand) in enumerate(demands.items()):
        ax.axhline(demand / 1e9, color=_MODELS[(number + 2) % len(_MODELS)], linestyle="--", linewidth=1, label=name)
    ax.margins(0.08)
    _log_axes(ax)
    ax.set_xlabel("power [W]")
    ax.set_ylabel("memory bandwidth [GB/s]")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=8)
    place_labels(ax, labels)
    return ax


def plot_coverage(tokens: ArrayLike, curves: Mapping[str, ArrayLike], ax: Axes | None = None) -> Axes:
    """Plot the share of a layer's experts that a batch touches, over its tokens.

    Parameters
    ----------
    tokens : array (B,)
        Batch sizes.
    curves : mapping of label to array (B,)
        Shares, 0 to 1, such as `uniform_coverage` and `measured_coverage` give.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(6, 3.6), layout="constrained")[1]
    for (label, share), colour in zip(curves.items(), cycle(_MODELS), strict=False):
        ax.plot(np.asarray(tokens), np.asarray(share), "o-", markersize=3, color=colour, label=label)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("tokens in the batch")
    ax.set_ylabel("experts touched")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax


def plot_cost(names: Sequence[str], costs: Mapping[str, ArrayLike], ax: Axes | None = None) -> Axes:
    """Plot the price of a million tokens, one bar per machine, stacked by the kind of cost.

    Parameters
    ----------
    names : sequence of str, (P,)
        Machines.
    costs : mapping of label to array (P,)
        For example hardware and energy [USD per token].
    """
    ax = ax if ax is not None else plt.subplots(figsize=(7, 1 + 0.3 * len(names)), layout="constrained")[1]
    paid = np.zeros(len(names))
    for (label, price), colour in zip(costs.items(), cycle(_MODELS), strict=False):
        ax.barh(range(len(names)), 1e6 * np.asarray(price), left=paid, height=0.7, color=colour, label=label)
        paid = paid + 1e6 * np.asarray(price)
    for place, total in enumerate(paid):
        ax.annotate(f" {total:.3g}", (float(total), place), fontsize=8, va="center")
    ax.set_yticks(range(len(names)), list(names))
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel("US dollars per million tokens")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1.0), ncols=len(costs), frameon=False, fontsize=8)
    return ax


def _log_axes(ax: Axes) -> None:
    """Make both axes logarithmic with plain numbers: 1, 2 and 5 of each decade, more if there is only one decade."""
    ax.set(xscale="log", yscale="log")
    ax.autoscale_view()
    for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 12 * low else (1, 2, 3, 4, 6, 8)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
