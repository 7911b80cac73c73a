"""Steady passes with the gpu lane on a card of limited memory: bound, simulated, measured, and the link's use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workbench.bench.live.overlap import (
    PAGED,
    PLAIN,
    PREFETCH,
    TWO_SLOTS,
    VSL,
    Bench,
    ScheduleTimes,
    ratios_of,
    row,
    table,
)
from workbench.engine.devices.opening import open_driver
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.schedules import Schedule
from workbench.serving import prepare

SCHEDULES: tuple[Schedule, ...] = (VSL, TWO_SLOTS, PREFETCH, PAGED, PLAIN)


def passes(
    model: ModelConfig,
    machine: Machine,
    *,
    rows: int,
    context: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure every schedule, round after round in another order; a row of the record for each.

    Parameters
    ----------
    model : ModelConfig
    machine : Machine
        The card's and the host's measured rates; the card's memory is the limit.
    rows, context : int
        Decodes of a pass, and KV entries that each reads.
    rounds : int
        Rounds of 6 passes; one more is made first and not counted, for it compiles kernels.
    say : callable
        Receives each line of the report.
    """
    bench = Bench(model, machine, rows, context, machine.link.h2d, lambda: open_driver(machine, on_card=True))
    compared = [bench.simulated(schedule) for schedule in SCHEDULES]
    for turn in range(rounds + 1):
        for number in np.random.default_rng(turn).permutation(len(compared)).tolist():
            bench.measure(compared[number], disturbed=True)
        if not turn:
            for times in compared:
                times.forget()
    table(compared, ratios_of(compared), say)
    found = [row(times) | _link(bench, times, machine) for times in compared]
    for times, each in zip(compared, found, strict=True):
        say(f"{times.schedule.name}: the link moved weights at {each['link']:.1%} of its rate")
    return [each | {"rows": rows, "context": context} for each in found]


def _link(bench: Bench, times: ScheduleTimes, machine: Machine) -> dict[str, float]:
    """Share of the link's rate at which a pass moved weights."""
    prepared = prepare(bench.scenario(bench.context, bench.rate, times.schedule), times.schedule)
    moved = prepared.cost.weights_per_layer * prepared.layers
    return {"link": moved / times.seconds / machine.link.h2d}


def told(found: Sequence[dict[str, Any]]) -> str:
    """One line on all rows."""
    best = min(found, key=lambda each: float(np.median(each["measured"])))
    return f"fastest is {best['schedule']}, with the link at {best['link']:.0%}"
