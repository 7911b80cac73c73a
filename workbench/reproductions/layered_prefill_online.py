"""Layered Prefill's comparison with chunked prefill, simulated with the schedulers that also serve live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from workbench.core.latency import Slo
from workbench.core.result import Result
from workbench.hardware import Machine, machines
from workbench.models import models
from workbench.perfmodels.coverage import measured_coverage, routed
from workbench.pipeline import gpu
from workbench.reproductions.rows import published
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import Scheduler
from workbench.schedules import Sequential
from workbench.simulate import simulate
from workbench.stages import attention, moe, out_proj, qkv
from workbench.workload import workloads

RESIDENT = gpu(qkv, attention, out_proj, moe)


def paper_machine() -> Machine:
    """Two H100 with rates that, together with the fixed time of every operation, about give the paper's Table 6."""
    table = published("layered_prefill")["sustained"]
    nominal = machines["layered-prefill"]
    rates = (("bf16", float(table["flops"])),)
    device = replace(nominal.gpu, bandwidth=table["bandwidth"], flops=rates, overhead=table["overhead"])
    return replace(nominal, name="layered-prefill, sustained", gpu=device)


def online_scenario(dataset: str, rate: float, scheduler: Scheduler, *, requests: int = 400, seed: int = 0) -> Scenario:
    """Qwen3-30B-A3B with all weights on the GPU and the measured routing, under Poisson arrivals."""
    workload = workloads[dataset].sample(requests, seed=seed).arriving(rate=rate, seed=seed)
    model = routed(models["qwen3-30b-a3b"], measured_coverage)
    return Scenario(RESIDENT, model, paper_machine(), Memory(kv_capacity="60GB"), workload, scheduler)


def played(
    dataset: str, rate: float, scheduler: Scheduler, *, requests: int = 400, seeds: Iterable[int] = (0,)
) -> list[Result]:
    """Simulate once per seed, which draws lengths and arrivals."""
    return [
        simulate(online_scenario(dataset, rate, scheduler, requests=requests, seed=seed), Sequential())
        for seed in seeds
    ]


def objective(dataset: str) -> Slo:
    """The paper's latency objective for Qwen."""
    return Slo(**published("layered_prefill")["slo"][f"qwen_{dataset}"])
