"""Pictures of MoE-Lens' equations: saturation of the GPU, KV held by a sequence, and maps and curves of utilisation.

Each takes an `ax` and returns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

from workbench.core.units import format_bytes
from workbench.perfmodels.moe_lens.intensity import tokens_to_saturate
from workbench.perfmodels.moe_lens.maps import utilisation_over_lengths
from workbench.perfmodels.moe_lens.stage1 import parallelism_memory_efficiency
from workbench.perfmodels.moe_lens.streaming import Streaming

_LEFT_OUT = "GEMM of the weights only: attention scores, KV traffic, embedding and head are left out"
_COLOURS = ("#1d4ed8", "#d97706", "#059669", "#db2777", "#7c3aed")
_ROOF = "#9ca3af"
_TEXT = "#4b5563"
_MARK = "#111827"
_GRID = 240  # points along either side of a map
_POINTS = ("o", "x", "s", "+")


def plot_saturation(
    flop_rates: Mapping[str, float], bandwidth: float, intensity_per_token: float, ax: Axes | None = None
) -> Axes:
    """Plot the GEMM rate over the tokens that share one pass of weights: the link limits first, then the GPU.

        rate(n) = min(B I(1) n, C_GPU)

    Parameters
    ----------
    flop_rates : mapping of name to float
        C_GPU of each GPU [FLOP/s].
    bandwidth : float
        B, rate of the link over which the weights come [B/s].
    intensity_per_token : float
        I(1), as `moe_lens.intensity` gives it for one token [FLOP/B].

    Raises
    ------
    ValueError
        If a rate or the intensity is not positive.

    Notes
    -----
    MoE-Lens, Eqs. 1 and 2. The GEMM of the weights only; the knees are `moe_lens.tokens_to_saturate`.
    """
    ax = _axes(ax, (7, 3.8))
    knees = {name: tokens_to_saturate(rate, bandwidth, intensity_per_token) for name, rate in flop_rates.items()}
    last = max(map(float, knees.values()))
    top = max(flop_rates.values())
    ax.plot([0, last], [0, top / 1e12], color=_ROOF, linewidth=2)
    said = f"what {format_bytes(bandwidth)}/s allow"
    ax.annotate(said, (last / 4, top / 4e12), (8, -4), textcoords="offset points", va="top", color=_TEXT)
    for (name, rate), colour in zip(flop_rates.items(), cycle(_COLOURS), strict=False):
        knee = float(knees[name])
        height = rate / 1e12
        ax.plot([knee, 1.7 * last], [height, height], color=colour, linewidth=2)
        ax.plot(knee, height, "o", color=colour)
        said = f"{name}: from {knee:,.0f} tokens"
        ax.annotate(said, (1.7 * last, height), (0, 4), textcoords="offset points", ha="right", color=colour)
    ax.set_xlim(0, 1.7 * last)
    ax.set_ylim(0, 1.15 * top / 1e12)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_xlabel("tokens that share one pass of the weights")
    ax.set_ylabel("TFLOP per second")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_kv_life(lengths: Iterable[tuple[int, int]], ax: Axes | None = None) -> Axes:
    """Plot the KV tokens that a sequence holds from its admission to its end; the area is its cost, memory times time.

    Parameters
    ----------
    lengths : iterable of (int, int)
        Prompt and output length of each sequence [tokens].

    Raises
    ------
    ValueError
        If a length is out of the domain of `moe_lens.parallelism_memory_efficiency`.

    Notes
    -----
    MoE-Lens, Eq. 3 and its integrand.
    """
    ax = _axes(ax, (7, 3.6))
    for (prompt, output), colour in zip(lengths, cycle(_COLOURS), strict=False):
        pme = float(parallelism_memory_efficiency(prompt, output))
        label = f"{prompt} + {output} tokens: PME {pme:.2g}"
        ax.fill_between([0, output], [prompt, prompt + output], color=colour, alpha=0.15)
        ax.plot([0, 0, output, output], [0, prompt, prompt + output, 0], color=colour, label=label)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("iterations since the sequence was admitted")
    ax.set_ylabel("KV tokens that it holds")
    return _finish(ax)


def plot_utilisation_map(
    prompt_len: npt.ArrayLike,
    output_len: npt.ArrayLike,
    utilisation: npt.ArrayLike,
    ax: Axes | None = None,
    *,
    marks: Mapping[str, tuple[float, float]] | None = None,
) -> Axes:
    """Plot a map over prompt and output length, such as `moe_lens.utilisation_over_lengths` gives.

    Parameters
    ----------
    prompt_len : array (P,)
    output_len : array (G,)
    utilisation : array (G, P)
        Share of the GPU, 0 to 1.
    marks : mapping of label to (float, float), optional
        Prompt and output length of workloads to point out.
    """
    ax = _axes(ax, (7, 4.4))
    shares = np.asarray(utilisation)
    picture = ax.pcolormesh(prompt_len, output_len, shares, vmin=0, vmax=1, shading="nearest", rasterized=True)
    if shares.min() < 0.98 <= shares.max():
        ax.contour(prompt_len, output_len, shares, levels=[0.98], colors=_MARK, linewidths=1)
    for name, (prompt, output) in (marks or {}).items():
        ax.plot(prompt, output, "o", color="white", markeredgecolor=_MARK)
        box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.8, "edgecolor": "none"}
        ax.annotate(name, (prompt, output), (7, 0), textcoords="offset points", va="center", fontsize=8, bbox=box)
    ax.figure.colorbar(picture, ax=ax, label="share of the GPU", format=PercentFormatter(1))
    ax.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="output tokens")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(2))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_locator(NullLocator())
    ax.set_title(_LEFT_OUT, fontsize=8, loc="left")
    return ax


def plot_stage1_map(
    host: Streaming,
    capacity: str | float,
    ax: Axes | None = None,
    *,
    marks: Mapping[str, tuple[float, float]] | None = None,
) -> Axes:
    """Draw the share of the GPU that Stage 1 allows over prompts of 8 to 2048 and outputs of 8 to 1024 tokens.

    Parameters
    ----------
    host : Streaming
        As `moe_lens.streaming` gives it for a model and a machine.
    capacity : str or float
        Size of the KV cache, such as ``"70GB"`` [B].
    marks
        As for `plot_utilisation_map`.

    Raises
    ------
    ValueError
        If the capacity is no positive quantity.

    Notes
    -----
    MoE-Lens, Figure 3a.
    """
    prompts = np.geomspace(8, 2048, _GRID)
    outputs = np.geomspace(8, 1024, _GRID)
    shares = utilisation_over_lengths(prompts, outputs, host.kv_tokens(capacity), host.pass_tokens)
    return plot_utilisation_map(prompts, outputs, shares, ax, marks=marks)


def plot_utilisation_curves(
    kv_bytes: npt.ArrayLike,
    curves: Mapping[str, npt.ArrayLike],
    ax: Axes | None = None,
    *,
    roof: npt.ArrayLike | None = None,
) -> Axes:
    """Plot curves over KV capacity, such as `moe_lens.utilisation_over_capacity` gives for several sizes of job.

    Parameters
    ----------
    kv_bytes : array (C,)
        Capacities [B].
    curves : mapping of label to array (C,)
        Shares of the GPU, 0 to 1.
    roof : array (C,), optional
        Utilisation that `moe_lens.stage1_utilisation` allows, drawn dashed.
    """
    ax = _axes(ax, (7, 3.8))
    if roof is not None:
        ax.plot(np.asarray(kv_bytes), np.asarray(roof), "--", color=_ROOF, label="Stage 1")
    for (label, shares), colour in zip(curves.items(), cycle(_COLOURS), strict=False):
        ax.plot(np.asarray(kv_bytes), np.asarray(shares), color=colour, label=label)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("KV capacity")
    ax.set_ylabel("share of the GPU")
    ax.set_title(_LEFT_OUT, fontsize=8, loc="left")
    return _finish(ax)


def plot_over_output_len(
    output_len: npt.ArrayLike,
    curves: Mapping[str, npt.ArrayLike],
    ax: Axes | None = None,
    *,
    roof: tuple[str, npt.ArrayLike] | None = None,
    points: Mapping[str, Mapping[float, float]] | None = None,
    title: str = "",
) -> Axes:
    """Plot output tokens per second over the output length: predictions as lines, simulations or runs as points.

    Parameters
    ----------
    output_len : array (G,)
    curves : mapping of label to array (G,)
        Predictions [tokens/s].
    roof : (label, array (G,)), optional
        A bound, drawn dashed [tokens/s].
    points : mapping of label to mapping of length to rate, optional
        Simulations or measurements [tokens/s].
    """
    ax = _axes(ax, (7, 3.8))
    lengths = np.asarray(output_len)
    if roof is not None:
        ax.plot(lengths, np.asarray(roof[1]), "--", color=_ROOF, label=roof[0])
    for (label, rates), colour in zip(curves.items(), cycle(_COLOURS), strict=False):
        ax.plot(lengths, np.asarray(rates), color=colour, label=label)
    for (label, played), marker in zip((points or {}).items(), cycle(_POINTS), strict=False):
        ax.plot(*_columns(played), marker, color=_MARK, markerfacecolor="none", label=label, linestyle="none")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("output tokens per request")
    ax.set_ylabel("output tokens per second")
    ax.set_title(title, fontsize=10, loc="left")
    return _finish(ax)


def _columns(pairs: Mapping[float, float]) -> tuple[Sequence[float], Sequence[float]]:
    return tuple(pairs), tuple(pairs.values())


def _axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    return ax if ax is not None else plt.subplots(figsize=figsize, layout="constrained")[1]


def _finish(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax
