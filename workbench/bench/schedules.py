"""Effect of the order of tasks: random scenarios, each simulated under every schedule and at every placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from workbench.bench import record
from workbench.core.errors import WorkbenchError
from workbench.hardware.assembly import machine
from workbench.hardware.processors import ProcessorKind, processors
from workbench.models import models
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import FlexGenS4, KTransformers, LayerStreaming, Schedule, Sequential, VSLPipe, contenders
from workbench.serving import fits
from workbench.simulate import in_flight, steady
from workbench.stages import (
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    weights,
)
from workbench.workload import Workload, workloads

ATTENTION_ON_CPU = fetch(weights) | (
    gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
)
ELSEWHERE: dict[str, tuple[Pipeline, Schedule]] = {
    "KV cache on the GPU": (fetch(weights) | gpu(qkv, attention, out_proj, moe), LayerStreaming()),
    "KV cache streamed": (fetch(weights, kv) | gpu(qkv, attention, out_proj, moe), FlexGenS4()),
    "experts on the CPU": (
        gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine),
        KTransformers(),
    ),
}
"""Other placements of the same layer, each with the schedule of its system."""
BASELINE = Sequential(prefetch=True)
"""The simplest schedule that prefetches weights; it supports any pipeline."""
NEAR = 1.02
"""Rates within this factor count as equal."""
_HOST_MEMORY = (128e9, 256e9, 512e9, 1024e9)  # bytes
_SOCKETS = (1, 2)
_SERVER = 8  # memory channels from which a CPU is a server's, which may have two sockets
_ROOM = 1e9  # bytes of KV with which the ledger is drawn up first
_FEWEST = 16  # requests in flight
_SAMPLE = 1000  # requests whose lengths stand for a workload's


@dataclass(frozen=True)
class Drawn:
    """A random scenario and its rates in output tokens per second.

    Attributes
    ----------
    scenario : Scenario
        Scenario with attention on the CPU; all its requests are in flight.
    rates : dict
        Rates by schedule, with attention on the CPU.
    elsewhere : dict
        Rates by placement, with as many of the requests in flight as fit there; placements that fit none are left out.
    """

    scenario: Scenario
    rates: dict[str, float]
    elsewhere: dict[str, float]

    def over_others(self, schedule: str) -> float:
        """Rate of a schedule over the best of the other schedules, attention on the CPU."""
        return self.rates[schedule] / max(rate for name, rate in self.rates.items() if name != schedule)

    def over_baseline(self, schedule: str) -> float:
        """Rate of a schedule over that of `BASELINE`, attention on the CPU."""
        return self.rates[schedule] / self.rates[BASELINE.name]

    def over_here(self, placement: str) -> float:
        """Rate of another placement over the best with attention on the CPU."""
        return self.elsewhere.get(placement, 0.0) / max(self.rates.values())


def draw(random: np.random.Generator) -> Scenario | None:
    """Draw a steady stream of requests on a machine whose GPU is smaller than the model; None if none fits.

    Model, GPU, a server's CPU, sockets, host memory and workload are drawn uniformly from the catalogue. The KV cache
    takes a uniform share of the host memory that the weights leave.
    """
    pick = _Picker(random)
    model = models[pick.one_of(sorted(models))]
    host = {
        "cpu": pick.one_of(_servers()),
        "sockets": pick.one_of(_SOCKETS),
        "memory": pick.one_of(_HOST_MEMORY),
    }
    card = pick.one_of(_gpus())
    lengths = pick.one_of(sorted(workloads))
    share = random.uniform()
    seed = int(random.integers(2**31))
    try:
        workload = _sample(lengths, pick, seed)
        there = machine(card, **host)
        if model.weight_bytes <= there.gpu.memory:
            return None
        scheduler = ResourceAware(token_budget=1)
        memory = Memory(kv_capacity=_ROOM)
        empty = Scenario(ATTENTION_ON_CPU, model, there, memory, workload, scheduler)
        room = fits(empty, VSLPipe()).host.left + _ROOM
        held = float((workload.prompt_len + workload.output_len).mean())
        requests = int(share * room / (held * model.kv_bytes_per_token(empty.precision.kv)))
        return _stream(empty, ATTENTION_ON_CPU, requests) if requests >= _FEWEST else None
    except WorkbenchError:
        return None


class _Picker:
    """Uniform random choice."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.random.integers(len(choices)))]


def _gpus() -> list[str]:
    return [name for name, each in sorted(processors.items()) if each.kind is ProcessorKind.GPU]


def _servers() -> list[str]:
    """CPUs of servers; the measured hosts are, whose channels are unknown."""
    cpus = {name: each.channels for name, each in sorted(processors.items()) if each.kind is ProcessorKind.CPU}
    return [name for name, channels in cpus.items() if channels is None or channels >= _SERVER]


def _sample(name: str, pick: _Picker, seed: int) -> Workload:
    outputs = workloads[name].output
    given = {"output_len": pick.one_of(outputs)} if isinstance(outputs, tuple) else {}
    return workloads[name].sample(requests=_SAMPLE, seed=seed, **given)


def _stream(scenario: Scenario, pipeline: Pipeline, requests: int) -> Scenario:
    """Scenario with `requests` in flight at a placement, and a token budget for one iteration of them."""
    lengths = scenario.workload
    tokens = requests * (1 + float(lengths.prompt_len.mean()) / float(lengths.output_len.mean()))
    scheduler = ResourceAware(token_budget=max(1, int(tokens)))
    return in_flight(scenario.on(pipeline=pipeline, scheduler=scheduler), requests)


def play(scenario: Scenario) -> Drawn | None:
    """Simulate all schedules and placements of a scenario; None if some schedule does not fit."""
    try:
        rates = {schedule.name: _rate(scenario, schedule) for schedule in contenders(scenario.stack)}
    except WorkbenchError:
        return None
    found = {name: _most(scenario, pipeline, schedule) for name, (pipeline, schedule) in ELSEWHERE.items()}
    return Drawn(scenario, rates, {name: rate for name, rate in found.items() if rate})


def _rate(scenario: Scenario, schedule: Schedule) -> float:
    return steady(scenario, schedule).gen_tok_s


def _most(scenario: Scenario, pipeline: Pipeline, schedule: Schedule) -> float:
    """The rate of another placement, with as many of the requests in flight as fit its memory; 0 if none does."""
    requests = len(scenario.workload)
    try:
        one = fits(_stream(scenario, pipeline, 1), schedule).gpu
        all_of_them = fits(_stream(scenario, pipeline, requests), schedule).gpu
        room = all_of_them.capacity - one.total
        grown = all_of_them.total - one.total
        if room < 0:
            return 0.0
        fitting = requests if room >= grown else 1 + int((requests - 1) * room / grown)
        return _rate(_stream(scenario, pipeline, fitting), schedule)
    except WorkbenchError:
        return 0.0


def drawn(count: int, seed: int) -> Iterator[Drawn]:
    """Yield `count` random scenarios that fit, always the same for a seed."""
    random = np.random.default_rng(seed)
    while count:
        if (scenario := draw(random)) and (played := play(scenario)):
            count -= 1
            yield played


def bench_schedules(
    *, scenarios: int, seed: int, json: Path | None, say: Callable[[str], None] = record.say
) -> dict[str, dict[str, float]]:
    """Print how often each schedule is best and by how much, over random scenarios that are simulated, not run.

    Returns
    -------
    dict
        Each schedule's rate over the best of the others.
    """
    found = list(drawn(scenarios, seed))
    for line in summary(found):
        say(line)
    names = tuple(found[0].rates)
    ratios = {}
    for name in names:
        ratios[f"{name} over the best other"] = record.ratio([each.over_others(name) for each in found])
    if json is not None:
        rows = [{"setting": str(each.scenario), "rates": each.rates, "elsewhere": each.elsewhere} for each in found]
        record.write(json, "drawn from the catalogue", ratios, rows)
    return ratios


def summary(found: Sequence[Drawn]) -> list[str]:
    """Lines of a table of the schedules, and the share of scenarios in which another placement is faster than all."""
    head = ("schedule", f"best by {NEAR - 1:.0%}", f"within {NEAR - 1:.0%}", "over best other", f"over {BASELINE.name}")
    rows = [head]
    for name in found[0].rates:
        over = [each.over_others(name) for each in found]
        gain = [each.over_baseline(name) for each in found]
        rows.append((name, _share(over, NEAR), _share(over, 1 / NEAR), _spread(over), _spread(gain)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [_padded(row, widths) for row in rows]
    more: dict[str, list[float]] = {}
    for where in ELSEWHERE:
        more[where] = [each.over_here(where) for each in found]
    best = [max(over) for over in zip(*more.values(), strict=True)]
    told = ", ".join(f"{where} in {_share(over, NEAR)}" for where, over in more.items())
    return [
        f"{len(found)} scenarios: one iteration of a settled stream, attention on the CPU",
        *table,
        f"another placement gives {NEAR - 1:.0%} more than all of these in {_share(best, NEAR)}: {told}",
    ]


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    return "  ".join(cells).rstrip()


def _share(ratios: Sequence[float], least: float) -> str:
    return f"{sum(ratio >= least for ratio in ratios) / len(ratios):.0%}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
