"""Gain of what stays on the GPU: a share of the streamed weights, and the most used experts, on a link that binds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from workbench.bench import record
from workbench.core.quiet import listening
from workbench.core.result import Result
from workbench.engine import make_checkpoint, run
from workbench.hardware import Machine
from workbench.models import ModelConfig, checkpoint
from workbench.pipeline import Pipeline, fetch, gpu
from workbench.scenario import Memory, Scenario
from workbench.scheduler.continuous import ContinuousBatching
from workbench.schedules import Sequential
from workbench.serving import prepare
from workbench.simulate import simulate
from workbench.stages import attention, combine, experts, moe, most_used, out_proj, qkv, route, weights
from workbench.workload import Frequencies, Request, Workload

SHARES = (0.0, 0.1, 0.2, 0.3)
HOT = 0.3
"""Share of the experts that stays on the GPU."""
SLOWER = 4.0
"""Times as long as computing takes the link for the weights of a pass."""
PROMPT = 8
OUTPUT = 10
STREAMED = fetch(weights) | gpu(qkv, attention, out_proj, moe)
CHOSEN = fetch(experts.chosen) | gpu(qkv, attention, out_proj, moe)
SCHEDULE = Sequential(prefetch=True)


@dataclass
class Way:
    """One placement: its scenario, and the median seconds of a decode pass, simulated and of each measured run."""

    name: str
    scenario: Scenario
    limit: float | None = None
    simulated: float = 0.0
    measured: list[float] = field(default_factory=list)
    dropped: int = 0

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return median(self.measured)


def bench_shares(
    name: str, *, rows: int, repeats: int, json: Path | None, say: Callable[[str], None] = record.say
) -> list[Way]:
    """Measure and simulate decode passes with shares of the weights, and with the most used experts, on the GPU.

    The link is slowed until the weights of a pass take four times as long as computing, so that a share r of resident
    weights should give 1 / (1 - r) times the speed. The most used experts are those of a first run; they are compared
    with all experts streamed once they are chosen. Runs are interleaved.
    """
    model = checkpoint(make_checkpoint(name))
    machine = Machine.local(device="cpu")
    free = run(_scenario(STREAMED, model, machine, rows), SCHEDULE)
    streamed = prepare(_scenario(STREAMED, model, machine, rows), SCHEDULE).cost.weights_per_layer
    computing = free.busy["gpu"] * _pass(free) / sum(free.steps.seconds)
    rate = min(machine.link.h2d, streamed * model.num_hidden_layers / (SLOWER * computing))
    ways = [*_shares(model, machine.limit(link=rate), rows), *_used(model, machine.limit(link=rate), rows, free)]
    say(f"{machine.name}: {name}, {rows} decodes in a pass, link {rate / 1e9:.2f} GB/s")
    for turn in range(repeats):
        for number in np.random.default_rng(turn).permutation(len(ways)).tolist():
            _measure(ways[number])
        say(f"round {turn + 1} of {repeats}")
    ratios = _ratios(ways)
    _print(ways, ratios, say)
    if json is not None:
        record.write(json, machine, ratios, [_row(way) for way in ways])
    return ways


def _scenario(pipeline: Pipeline, model: ModelConfig, machine: Machine, rows: int) -> Scenario:
    random = np.random.default_rng(0)
    prompts = random.integers(0, model.vocab_size, (rows, PROMPT)).tolist()
    capacity = 2 * rows * (PROMPT + OUTPUT + 16) * model.kv_bytes_per_token(model.dtype)
    return Scenario(
        pipeline,
        model,
        machine,
        Memory(capacity),
        Workload.of([Request(tuple(prompt), OUTPUT) for prompt in prompts], name="short requests"),
        ContinuousBatching(),
    )


def _shares(model: ModelConfig, machine: Machine, rows: int) -> list[Way]:
    """All weights streamed, and shares of them resident."""
    found = list[Way]()
    for share in SHARES:
        of = _scenario(STREAMED, model, machine, rows)
        of = of.on(memory=replace(of.memory, weights_on_gpu=share))
        found.append(_simulated(Way(f"{share:.0%} of the weights", of, 1 / (1 - share))))
    return found


def _used(model: ModelConfig, machine: Machine, rows: int, counted: Result) -> list[Way]:
    """All experts streamed once they are chosen, and the most used ones resident."""
    counts = counted.expert_counts
    hot = most_used(counts, max(1, round(HOT * model.num_local_experts)))
    kept = fetch(experts[~hot].chosen) | gpu(qkv, attention, out_proj, route, experts[hot], experts[~hot], combine)
    routing = Frequencies(counts)
    ways = list[Way]()
    for name, pipeline in (("chosen experts", CHOSEN), (f"the {hot} of each layer", kept)):
        of = _scenario(pipeline, model, machine, rows).on(routing=routing)
        ways.append(_simulated(Way(name, of)))
    return ways


def _simulated(way: Way) -> Way:
    way.simulated = _pass(simulate(way.scenario, SCHEDULE))
    return way


def _measure(way: Way) -> None:
    """Measure one run; a disturbed one is dropped, unless there is none yet."""
    with listening() as noise:
        found = _pass(run(way.scenario, SCHEDULE))
    if noise.quiet or not way.measured:
        way.measured.append(found)
    else:
        way.dropped += 1


def _pass(result: Result) -> float:
    """Median seconds of a decode pass; the first iteration prefills, the last brings no weights for another."""
    return median(result.steps.seconds[1:-1])


def _ratios(ways: Sequence[Way]) -> dict[str, dict[str, float]]:
    """Speed of each placement over that of the first of its kind: of the medians and the extremes."""
    found = {}
    whole, *shares = ways[: len(SHARES)]
    chosen, used = ways[len(SHARES) :]
    for base, other in (*((whole, share) for share in shares), (chosen, used)):
        name = f"{other.name} / {base.name}, speed"
        found[name] = {
            "median": base.seconds / other.seconds,
            "min": min(base.measured) / max(other.measured),
            "max": max(base.measured) / min(other.measured),
            "runs": len(other.measured),
            "simulated": base.simulated / other.simulated,
        }
        if other.limit is not None:
            found[name]["limit"] = other.limit
    return found


def _print(ways: Sequence[Way], ratios: dict[str, dict[str, float]], say: Callable[[str], None]) -> None:
    say(f"{'seconds per decode pass':36}  simulated  measured (range)")
    for way in ways:
        spread = f"{way.seconds:.3f} ({min(way.measured):.3f} to {max(way.measured):.3f})"
        say(f"{way.name:36}  {way.simulated:9.3f}  {spread}, {way.dropped} runs dropped")
    for what, seen in ratios.items():
        limit = f", limit {seen['limit']:.3f}" if "limit" in seen else ""
        say(
            f"{what}: {seen['median']:.3f} of the medians ({seen['min']:.3f} to {seen['max']:.3f}), simulated "
            f"{seen['simulated']:.3f}{limit}"
        )


def _row(way: Way) -> dict[str, Any]:
    return {"way": way.name, "simulated": way.simulated, "measured": way.measured, "dropped": way.dropped}
