"""Pictures of the performance models: maps and curves of GPU utilisation. Each takes an `ax` and returns it."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from workbench.units import format_bytes

_LEFT_OUT = "GEMM of the weights only: attention scores, KV traffic, embedding and head are left out"


def plot_utilisation_map(
    prompt_len: npt.ArrayLike, output_len: npt.ArrayLike, utilisation: npt.ArrayLike, ax: Axes | None = None
) -> Axes:
    """A map over prompt and output length, such as `moe_lens.utilisation_over_lengths` gives.

    Parameters
    ----------
    prompt_len : array (P,)
    output_len : array (G,)
    utilisation : array (G, P)
        Share of the GPU, 0 to 1.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(5.5, 4.2), layout="constrained")[1]
    picture = ax.pcolormesh(prompt_len, output_len, np.asarray(utilisation), vmin=0, vmax=1, shading="nearest")
    ax.figure.colorbar(picture, ax=ax, label="share of the GPU", format=PercentFormatter(1))
    ax.set_xlabel("prompt tokens")
    ax.set_ylabel("output tokens")
    ax.set_title(_LEFT_OUT, fontsize=7, loc="left")
    return ax


def plot_utilisation_curves(
    kv_bytes: npt.ArrayLike, curves: Mapping[str, npt.ArrayLike], ax: Axes | None = None
) -> Axes:
    """Curves over KV capacity, such as `moe_lens.utilisation_over_capacity` gives for several sizes of job.

    Parameters
    ----------
    kv_bytes : array (C,)
        Capacities [B].
    curves : mapping of label to array (C,)
        Shares of the GPU, 0 to 1.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(6, 3.6), layout="constrained")[1]
    for label, shares in curves.items():
        ax.plot(np.asarray(kv_bytes), np.asarray(shares), label=label)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("KV capacity")
    ax.set_ylabel("share of the GPU")
    ax.set_title(_LEFT_OUT, fontsize=7, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax
