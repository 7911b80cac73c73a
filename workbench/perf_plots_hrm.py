"""Pictures of the hierarchical roofline and of MoE-Lightning's policies. Each takes an `ax` and returns it."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from workbench.hardware import Machine
from workbench.perfmodels.hrm import first_turning_point, local_performance, second_turning_point
from workbench.perfmodels.policy_search import PolicyMap

_GPU, _CPU, _LINK = "#1d4ed8", "#059669", "#d97706"


def plot_roofline(machine: Machine, gpu_intensity: float, dtype: str = "bf16", ax: Axes | None = None) -> Axes:
    """Roofs of GPU, CPU and link over the FLOP per byte that lies in DRAM, with both turning points.

    Parameters
    ----------
    machine : Machine
    gpu_intensity : float
        FLOP per byte read from GPU memory: what the micro-batch allows, whatever the batch is.
    dtype : str
        Whose GEMM rate is the GPU's compute roof.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(7, 4), layout="constrained")[1]
    gpu, cpu, link = machine.gpu, machine.cpu, machine.link.h2d
    peak, far_peak = gpu.flop_rate(dtype), cpu.flop_rate("fp32")
    first = first_turning_point(far_flops=far_peak, far_bandwidth=cpu.bandwidth, link=link)
    reached = local_performance(gpu_intensity, flops=peak, bandwidth=gpu.bandwidth)
    second = second_turning_point(gpu_intensity, flops=peak, bandwidth=gpu.bandwidth, link=link)
    span = np.geomspace(float(first) / 100, max(float(second), peak / link) * 10, 200)
    ax.plot(span, local_performance(span, flops=peak, bandwidth=gpu.bandwidth), color=_GPU, label="GPU, its own memory")
    ax.plot(span, local_performance(span, flops=far_peak, bandwidth=cpu.bandwidth), color=_CPU, label="CPU, DRAM")
    ax.plot(span, np.minimum(link * span, peak), color=_LINK, label="GPU, over the link")
    ax.axhline(float(reached), color=_GPU, linestyle=":", label=f"GPU at {gpu_intensity:.3g} FLOP/B")
    ax.plot(first, far_peak, "o", color=_CPU)
    ax.annotate(" P1", (float(first), far_peak), va="top")
    ax.plot(second, reached, "o", color=_GPU)
    ax.annotate(" P2", (float(second), float(reached)), va="top")
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte of DRAM", ylabel="FLOP per second")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax


def plot_policy_map(policies: PolicyMap, ax: Axes | None = None) -> Axes:
    """Share of the weights on the GPU as colour, over link and CPU; red points where the CPU does the attention.

    Sizes of the other points tell the share of the KV cache that stays in GPU memory.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(6.5, 4), layout="constrained")[1]
    x, y = np.meshgrid(policies.links / 1e9, policies.cpu_scales)
    mesh = ax.pcolormesh(x, y, policies.weights_on_gpu, cmap="Blues", vmin=0, vmax=1, shading="nearest")
    on_cpu = policies.gpu_attention == 0
    ax.scatter(x[on_cpu], y[on_cpu], color="#dc2626", s=30, label="attention on the CPU")
    if not on_cpu.all():
        sizes = 6 + 50 * policies.kv_on_gpu[~on_cpu]
        label = "attention on the GPU; size: KV there"
        ax.scatter(x[~on_cpu], y[~on_cpu], s=sizes, facecolors="none", edgecolors="#111827", label=label)
    ax.figure.colorbar(mesh, ax=ax, label="share of weights on the GPU")
    ax.set_xlabel("link, GB/s")
    ax.set_ylabel("CPU scale")
    ax.legend(loc="upper left", bbox_to_anchor=(0, 1.14), ncols=2, frameon=False, fontsize=8)
    return ax
