"""Causes of the gaps between public runs and their simulations, as far as the published rates themselves tell them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.models import ModelConfig
from workbench.reproductions.offload_runs import (
    DATA,
    Compared,
    Phase,
    PublicRun,
    compared,
    machine_of,
    model_of,
    public_runs,
)
from workbench.reproductions.rows import published

if TYPE_CHECKING:
    import pandas

_FLOP_PER_WEIGHT = 2
_FEW = 3
"""Points from which on a slope over the depth is told."""


def memory_rates() -> pandas.DataFrame:
    """Rate at which each run reads its experts from DRAM while it decodes, at its first lengths.

    That is bytes of the chosen experts on the CPU per token times the published tokens per second: the mean over the
    whole time, GPU included [GB/s]. Beside it are what the simulation gives and the nominal rate.
    """
    import pandas

    return pandas.DataFrame([line for run in public_runs() for line in _memory_rate(run)]).set_index("run")


def _memory_rate(run: PublicRun) -> Iterator[dict[str, Any]]:
    one = _first(run, Phase.DECODE)
    if one is None or run.entry["place"] not in ("layers", "beside"):
        return
    model = model_of(run)
    per_token = _layers_on_cpu(run, model) * model.num_experts_per_tok * model.expert_params * _expert_bytes(run)
    nominal = machine_of(run, "nominal").cpu.bandwidth
    yield {
        "run": run.name,
        "engine": run.engine,
        "format": run.entry["quant"],
        "known": run.known,
        "GB/token": per_token / 1e9,
        "published GB/s": per_token * one.published / 1e9,
        "simulated GB/s": per_token * one.simulated / 1e9,
        "nominal GB/s": nominal / 1e9,
        "share of nominal": per_token * one.published / nominal,
    }


def compute_rates() -> pandas.DataFrame:
    """FLOP rate of the experts on the CPU while a run prefills, at its longest prompt, beside the nominal fp32 rate.

    That is 2 FLOP per weight of the chosen experts on the CPU times the published tokens per second: a lower bound of
    what the kernels reach, because other operations take time too [TFLOP/s].
    """
    import pandas

    return pandas.DataFrame([line for run in public_runs() for line in _compute_rate(run)]).set_index("run")


def _compute_rate(run: PublicRun) -> Iterator[dict[str, Any]]:
    points = [one for one in compared(run) if one.phase is Phase.PREFILL]
    if not points or run.entry.get("prompts") != "cpu":
        return
    one = max(points, key=lambda each: (each.lengths.prompt, each.published))
    model = model_of(run)
    weights = _layers_on_cpu(run, model) * model.num_experts_per_tok * model.expert_params
    vector = machine_of(run, "nominal").cpu.flop_rate("fp32")
    reached = _FLOP_PER_WEIGHT * weights * one.published
    yield {
        "run": run.name,
        "engine": run.engine,
        "format": run.entry["quant"],
        "known": run.known,
        "published TFLOP/s": reached / 1e12,
        "simulated TFLOP/s": _FLOP_PER_WEIGHT * weights * one.simulated / 1e12,
        "nominal fp32 TFLOP/s": vector / 1e12,
        "share of nominal": reached / vector,
    }


def depth_costs() -> pandas.DataFrame:
    """Time by which a decoded token takes longer for each 1000 tokens in the cache, published and simulated [ms].

    Each is the slope of a line through a run's points; runs with fewer than three depths are left out.
    """
    import pandas

    return pandas.DataFrame([line for run in public_runs() for line in _depth_cost(run)]).set_index("run")


def _depth_cost(run: PublicRun) -> Iterator[dict[str, Any]]:
    points = [one for one in compared(run) if one.phase is Phase.DECODE and not math.isnan(one.lengths.before)]
    depths = np.array([one.lengths.before for one in points]) / 1000
    if len(set(depths)) < _FEW:
        return
    times = {"published": [one.published for one in points], "simulated": [one.simulated for one in points]}
    slopes = {name: float(np.polyfit(depths, 1000 / np.array(rates), 1)[0]) for name, rates in times.items()}
    yield {
        "run": run.name,
        "engine": run.engine,
        "known": run.known,
        "KV cache": "host" if run.entry["place"] == "cpu" else "GPU",
        **{f"{name} ms": slope for name, slope in slopes.items()},
    }


def token_times(sweep: str) -> pandas.DataFrame:
    """Published and simulated time per token in a sweep with strategies, by share of the experts on the GPU [ms]."""
    import pandas

    lines = []
    for run in public_runs():
        if run.sweep == sweep and run.simulated:
            one = compared(run)[0]
            layers = one.run.entry.get("on_cpu")
            share = run.entry["on_gpu"] if layers is None else layers[0] / layers[1]
            strategy = run.entry["strategy"]
            lines.append((strategy, share, 1000 / one.published, 1000 / one.simulated))
    return pandas.DataFrame(lines, columns=["strategy", "share on the GPU", "published ms", "simulated ms"])


def _first(run: PublicRun, phase: Phase) -> Compared | None:
    return next((one for one in compared(run) if one.phase is phase), None)


def _expert_bytes(run: PublicRun) -> float:
    bits: float = published(DATA)["quants"][run.entry["quant"]]["experts"]
    return bits / 8


def _layers_on_cpu(run: PublicRun, model: ModelConfig) -> int:
    """Layers whose routed experts are on the CPU; dense layers have none."""
    first, stop = run.entry["on_cpu"]
    return sum(not kind.dense for kind in model.layer_kinds[first:stop])
