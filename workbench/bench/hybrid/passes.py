"""Steady passes with the gpu lane on a card of limited memory: bound, simulated, measured, and the link's use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

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
from workbench.core.units import format_bytes
from workbench.engine.devices.opening import open_driver
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.schedules import Schedule
from workbench.serving.capacity import ledger

if TYPE_CHECKING:
    from workbench.engine.devices.cuda import CudaDriver

_Setting = tuple[int, int]
SCHEDULES: tuple[Schedule, ...] = (VSL, TWO_SLOTS, PREFETCH, PAGED, PLAIN)


class Passes:
    """Steady passes of a model in several settings, predicted once and measured round after round.

    Parameters
    ----------
    model : ModelConfig
    machine : Machine
        The card's and the host's measured rates; the card's memory is the limit.
    settings : sequence of (int, int)
        Decodes of a pass, and KV entries that each reads.
    """

    def __init__(self, model: ModelConfig, machine: Machine, settings: Sequence[_Setting]) -> None:
        self._machine = machine
        rate = machine.link.h2d
        driver = partial(open_driver, machine, on_card=True)
        self._benches = {
            (rows, context): Bench(model, machine, rows, context, rate, driver, settings) for rows, context in settings
        }
        self._predicted = {setting: list(map(bench.simulated, SCHEDULES)) for setting, bench in self._benches.items()}
        self._warm = False

    def round(self, number: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Measure every schedule in every setting, the schedules in an order of this round; rows of the record.

        A schedule's settings share an engine, in which each is warmed up in this object's first round.
        """
        compared = {
            setting: list(map(ScheduleTimes.unmeasured, several)) for setting, several in self._predicted.items()
        }
        order = np.random.default_rng(number).permutation(len(SCHEDULES)).tolist()
        memory = {SCHEDULES[place].name: self._measure(place, compared) for place in order}
        self._warm = True
        found = list[dict[str, Any]]()
        for (rows, context), several in compared.items():
            say(f"{rows} decodes that read {context} KV entries each:")
            table(several, ratios_of(several), say)
            for times in several:
                link = self._link(self._benches[rows, context], times)
                say(f"{times.schedule.name}: the link moved weights at {link:.1%} of its rate")
                seen = {"link": link, "rows": rows, "context": context, **memory[times.schedule.name]}
                found.append(row(times) | seen)
        for name, taken in memory.items():
            say(
                f"{name}: tensors took at most {taken['peak'] / taken['ledger']:.1%} of the card's memory that the "
                f"ledger names; at the end {format_bytes(taken['occupied'])} of the card are in use, with CUDA's own"
            )
        return found

    def _measure(self, place: int, compared: Mapping[_Setting, Sequence[ScheduleTimes]]) -> dict[str, float]:
        """Measure the schedule of a place in every setting.

        Returns bytes of the card: by the ledger, the most that tensors took, and all that are in use at the end.
        """
        schedule = SCHEDULES[place]
        first = next(iter(self._benches.values()))
        with first.engine(schedule) as engine:
            for setting, bench in self._benches.items():
                if not self._warm:
                    bench.warm_up(schedule, engine)
                bench.measure(compared[setting][place], engine, disturbed=True)
            driver = cast("CudaDriver", engine.driver)
            taken = {"peak": driver.peak, "occupied": driver.occupied}
        return {"ledger": ledger(first.prepared(schedule)).gpu.total, **taken}

    def _link(self, bench: Bench, times: ScheduleTimes) -> float:
        """Share of the link's rate at which a pass moved weights."""
        prepared = bench.prepared(times.schedule)
        moved = prepared.cost.weights_per_layer * prepared.layers
        return moved / times.seconds / self._machine.link.h2d


def told(found: Sequence[dict[str, Any]]) -> str:
    """One line on all rows."""
    best = max(found, key=lambda each: each["link"])
    return f"the link is used most under {best['schedule']}, at {best['link']:.1%} of its rate"
