"""Pictures of the hierarchical roofline and of MoE-Lightning's policies. Each takes an `ax` and returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from workbench.core.units import format_seconds
from workbench.hardware import Machine
from workbench.perfmodels.domain import Array
from workbench.perfmodels.moe_lightning import LayerTime
from workbench.perfmodels.moe_lightning.hrm import first_turning_point, local_performance, second_turning_point
from workbench.perfmodels.moe_lightning.policy_search import PolicyMap

_GPU = "#1d4ed8"
_CPU = "#059669"
_LINK = "#d97706"
_BACK = "#db2777"
_INK = "#111827"
_MODELS = ("#d97706", "#7c3aed", "#1d4ed8", "#059669")
_LANES = {"link": (_LINK, "link to the GPU"), "gpu": (_GPU, "GPU"), "cpu": (_CPU, "CPU"), "back": (_BACK, "link back")}


def plot_roofline(
    machine: Machine,
    gpu_intensity: float,
    dtype: str = "bf16",
    ax: Axes | None = None,
    *,
    operations: Mapping[str, float] | None = None,
) -> Axes:
    """Plot the roofs of GPU, CPU and link over the FLOP per byte that lies in DRAM, with both turning points.

    Parameters
    ----------
    machine : Machine
    gpu_intensity : float
        FLOP per byte read from GPU memory, which the micro-batch alone decides.
    dtype : str
        Number format whose GEMM rate is the GPU's compute roof.
    operations : mapping of name to float, optional
        FLOP per byte of DRAM of operations, which are drawn as vertical lines.
    """
    ax = _axes(ax, (7.5, 4.2))
    gpu = machine.gpu
    cpu = machine.cpu
    link = machine.link.h2d
    peak = gpu.flop_rate(dtype)
    far_peak = cpu.flop_rate("fp32")
    first = float(first_turning_point(far_flops=far_peak, far_bandwidth=cpu.bandwidth, link=link))
    reached = float(local_performance(gpu_intensity, flops=peak, bandwidth=gpu.bandwidth))
    second = float(second_turning_point(gpu_intensity, flops=peak, bandwidth=gpu.bandwidth, link=link))
    span = np.geomspace(first / 100, max(second, peak / link) * 10, 200)
    near = f"GPU, data in its memory at {gpu_intensity:.3g} FLOP/B"
    far = local_performance(span, flops=far_peak, bandwidth=cpu.bandwidth)
    ax.plot(span, np.full(len(span), peak) / 1e12, color=_GPU, linewidth=1, label="GPU's peak")
    ax.plot(span, np.full(len(span), reached) / 1e12, ":", color=_GPU, linewidth=2, label=near)
    ax.plot(span, np.minimum(link * span, peak) / 1e12, color=_LINK, linewidth=2, label="GPU, data over the link")
    ax.plot(span, np.asarray(far) / 1e12, color=_CPU, linewidth=2, label="CPU, data in its DRAM")
    for name, x, y, colour in (("P1", first, far_peak, _CPU), ("P2", second, reached, _GPU)):
        ax.plot(x, y / 1e12, "o", color=colour, zorder=3)
        ax.annotate(name, (x, y / 1e12), (6, -6), textcoords="offset points", va="top", weight="bold")
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    at_the_foot = ax.get_xaxis_transform()
    for name, intensity in (operations or {}).items():
        ax.axvline(intensity, color=_INK, linewidth=0.8, linestyle="--")
        said = ax.text(intensity, 0.02, name, transform=at_the_foot, ha="center", va="bottom", rotation=90)
        said.set(fontsize=8, bbox=behind)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte that lies in DRAM", ylabel="TFLOP per second")
    return _finish(ax)


def plot_layer_times(times: Mapping[str, LayerTime], ax: Axes | None = None) -> Axes:
    """Plot the times for which one layer of decode keeps link, GPU and CPU busy, policy by policy.

    The longest of the three is the layer's time.

    Parameters
    ----------
    times : mapping of label to LayerTime
        Times of single policies, as `moe_lightning.layer_time` gives them [s].
    """
    ax = _axes(ax, (7.5, 1.2 + 0.9 * len(times)))
    used = []
    for lane in _LANES:
        by_policy = [float(getattr(layer, lane)) for layer in times.values()]
        if any(by_policy):
            used.append(lane)
    height = 0.8 / len(used)
    for row, layer in enumerate(times.values()):
        for place, lane in enumerate(used):
            colour, label = _LANES[lane]
            seconds = float(getattr(layer, lane))
            y = row + (place - (len(used) - 1) / 2) * height
            ax.barh(y, seconds, 0.9 * height, color=colour, label=None if row else label)
            if lane == layer.binding():
                said = f" {format_seconds(seconds)}, limits"
                ax.annotate(said, (seconds, y), va="center", fontsize=9, weight="bold")
    ax.set_yticks(range(len(times)), list(times))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.2 * max(float(layer.seconds) for layer in times.values()))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value else "0"))
    ax.set_xlabel("time at work for one layer")
    return _finish(ax)


def plot_beside_measured(
    measured: Mapping[str, float], predicted: Mapping[str, Sequence[float]], ax: Axes | None = None
) -> Axes:
    """Plot measured output tokens per second as bars, and the predictions of models as points.

    Parameters
    ----------
    measured : mapping of label to float
        One bar each [tokens/s].
    predicted : mapping of label to sequence of float
        A model's predictions, in the order of the bars [tokens/s].
    """
    ax = _axes(ax, (7.5, 4))
    places = np.arange(len(measured))
    ax.bar(places, list(measured.values()), 0.6, color="#d1d5db", label="measured")
    for (name, rates), colour, marker in zip(predicted.items(), cycle(_MODELS), cycle("sDo^"), strict=False):
        ax.plot(places, list(rates), marker, color=colour, label=name)
    ax.set_xticks(places, list(measured))
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("setting, output tokens per request")
    ax.set_ylabel("output tokens per second")
    return _finish(ax)


def plot_policy_map(policies: PolicyMap, ax: Axes | None = None) -> Axes:
    """Plot the share of the weights on the GPU as colour, over link and CPU, with red points for attention on the CPU.

    The size of the other points is the share of the KV cache that stays in GPU memory.
    """
    ax = _axes(ax, (7.5, 4.2))
    x, y = np.meshgrid(policies.links / 1e9, policies.cpu_scales)
    mesh = ax.pcolormesh(x, y, policies.weights_on_gpu, cmap="Blues", vmin=0, vmax=1, shading="nearest")
    on_cpu = policies.gpu_attention == 0
    ax.scatter(x[on_cpu], y[on_cpu], color="#dc2626", s=30, label="attention on the CPU")
    if not on_cpu.all():
        sizes = 6 + 50 * policies.kv_on_gpu[~on_cpu]
        label = "attention on the GPU; size: KV there"
        ax.scatter(x[~on_cpu], y[~on_cpu], s=sizes, facecolors="white", edgecolors=_INK, label=label)
    ax.figure.colorbar(mesh, ax=ax, label="least share of weights on the GPU", format=PercentFormatter(1))
    ax.set_xlabel("link, GB/s")
    ax.set_ylabel("host, times its memory and rates")
    return _finish(ax)


def plot_scaling(
    degrees: Sequence[int],
    rates: Mapping[str, npt.ArrayLike],
    ax: Axes | None = None,
    *,
    measured: Mapping[int, float] | None = None,
    title: str = "",
) -> Axes:
    """Plot output tokens per second over the number of GPUs; a dotted line shows proportional growth.

    Parameters
    ----------
    degrees : sequence of int
    rates : mapping of label to array (degrees,)
        Rates as `policy_search.tensor_parallel` gives them [tokens/s].
    measured : mapping of int to float, optional
        Rates by number of GPUs [tokens/s].
    """
    ax = _axes(ax, (6, 3.6))
    drawn = [(name, list(degrees), np.asarray(values, float)) for name, values in rates.items()]
    for (name, where, line), colour, marker in zip(drawn, cycle(_MODELS), cycle("sDo^"), strict=False):
        _line_beside_proportion(ax, where, line, f"{marker}-", color=colour, label=name)
    if measured:
        values = np.array(list(measured.values()))
        _line_beside_proportion(ax, list(measured), values, "o-", color=_INK, linewidth=2.5, label="measured")
    ax.plot([], [], ":", color=_INK, linewidth=1, label="in proportion to the GPUs")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel("GPUs in the node")
    ax.set_ylabel("output tokens per second")
    ax.set_title(title, fontsize=10, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax


def _line_beside_proportion(ax: Axes, where: Sequence[int], line: Array, shape: str, **style: Any) -> None:
    ax.plot(where, line, shape, **style)
    ax.plot(where, line[0] * np.asarray(where) / where[0], ":", linewidth=1, color=style["color"])


def _axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    return ax if ax is not None else plt.subplots(figsize=figsize, layout="constrained")[1]


def _finish(ax: Axes) -> Axes:
    """Put the legend above the picture, where it covers nothing."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2, frameon=False, fontsize=8, borderaxespad=0.2)
    return ax
