"""The reading of one point: the numbers that a sweep keeps of it, or the reason why there are none."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from workbench.core.errors import EngineError, WorkbenchError
from workbench.core.latency import Latencies, percentiles
from workbench.core.records import reason
from workbench.core.result import Result, Source
from workbench.hardware import Machine
from workbench.hardware.processors import processors
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.scenario.fields import with_fields
from workbench.schedules import Schedule
from workbench.serving import fits
from workbench.workload.resizing import with_tokens

Reader = Callable[[Scenario, Schedule], Result]


class Variable(NamedTuple):
    """One number of a point.

    Attributes
    ----------
    unit, meaning : str
    more : bool
        True if more of it is better.
    """

    unit: str
    meaning: str
    more: bool = False


VARIABLES: Mapping[str, Variable] = {
    "gen_tok_s": Variable("tokens/s", "output tokens per second", more=True),
    "proc_tok_s": Variable("tokens/s", "processed tokens per second", more=True),
    "seconds": Variable("s", "time to serve the workload"),
    "ttft": Variable("s", "mean time to the first token"),
    "tbt": Variable("s", "mean time between tokens"),
    "ttft_p90": Variable("s", "time to the first token, 90th percentile"),
    "tbt_p90": Variable("s", "time between tokens, 90th percentile"),
    "iterations": Variable("", "iterations"),
    "preemptions": Variable("", "preemptions"),
    "gpu_memory_needed": Variable("B", "GPU memory needed"),
    "host_memory_needed": Variable("B", "host memory needed"),
    "energy": Variable("J", "energy of the whole run"),
    "gpu_price": Variable("USD", "purchase price of the GPUs"),
    "bound_gen_tok_s": Variable("tokens/s", "bound of the output tokens per second", more=True),
}
"""The numbers of a point by name; NaN where one is not known."""


@dataclass(frozen=True)
class Base:
    """The scenario, schedule and reader from which all points of a sweep are made."""

    scenario: Scenario
    schedule: Schedule
    read: Reader

    @property
    def live(self) -> bool:
        """True if the reader runs a model: points are then read one after the other."""
        return is_live(self.read)

    def at(self, values: Mapping[str, Any]) -> tuple[Scenario, Schedule]:
        """Scenario and schedule of a point; a run gets tokens where lengths were changed.

        Raises
        ------
        WorkbenchError
            If the values do not go together, or a run would need another computer.
        """
        scenario, schedule = with_fields(self.scenario, self.schedule, values)
        if not self.live:
            return scenario, schedule
        if scenario.machine is not self.scenario.machine and "machine" not in values:
            _check_limits(self.scenario.machine, scenario.machine)
        return scenario.on(workload=with_tokens(scenario.workload, scenario.model)), schedule


class Row(NamedTuple):
    """The reading of one point.

    Attributes
    ----------
    numbers : dict of {str: float}
        See `VARIABLES`; those that are not known are left out.
    problem : str
        The reason why the point was set aside; empty if it was read.
    source : str
        Source of the result; empty without one.
    result : dict or None
        A measured result, which cannot be read again, as `Result.to_dict` gives it without its timeline.
    lasting : bool
        True if reading it again would give the same.
    """

    numbers: dict[str, float]
    problem: str = ""
    source: str = ""
    result: dict[str, Any] | None = None
    lasting: bool = True


class Rows(NamedTuple):
    """The readings of a chunk of points, and the time that they took [s]."""

    rows: list[Row]
    seconds: float


def is_live(read: object) -> bool:
    """True for `wb.run`, and for a function made of it."""
    return getattr(getattr(read, "func", read), "__module__", "").startswith("workbench.engine")


@dataclass(frozen=True)
class Sent:
    """A base that is sent to another process with each chunk.

    The process reads all chunks of a sweep with the base that came first, so that what was prepared for it, such as
    costs and needs of memory, serves them all.
    """

    sweep: str
    base: Base = field(compare=False)


@lru_cache(maxsize=1)
def _first(sent: Sent) -> Base:
    return sent.base


def read_chunk(base: Base | Sent, chunk: Sequence[Mapping[str, Any]]) -> Rows:
    """Read some points one after the other; executed in this process or in another one."""
    begin = time.perf_counter()
    base = _first(base) if isinstance(base, Sent) else base
    rows = [read_point(base, values) for values in chunk]
    return Rows(rows, time.perf_counter() - begin)


def read_point(base: Base, values: Mapping[str, Any]) -> Row:
    """Read one point; what goes wrong is told in the row."""
    numbers = dict[str, float]()
    try:
        scenario, schedule = base.at(values)
        numbers["gpu_price"] = gpu_price(scenario.machine)
        ledger = fits(scenario, schedule)
        numbers |= {"gpu_memory_needed": ledger.gpu.total, "host_memory_needed": ledger.host.total}
        if not ledger:
            return Row(_known(numbers), ledger.verdict)
        result = base.read(scenario, schedule)
        most = result if result.source is Source.BOUND else bound(scenario, schedule)
        numbers |= {**_of_result(result), "bound_gen_tok_s": most.gen_tok_s}
    except WorkbenchError as error:
        return Row(_known(numbers), str(error))
    except Exception as error:  # one point must not end the sweep
        return Row(_known(numbers), reason(error), lasting=False)
    measured = result.to_dict(timeline=False) if result.source is Source.MEASURED else None
    return Row(_known(numbers), source=result.source.value, result=measured)


def _of_result(result: Result) -> dict[str, float]:
    names = ("gen_tok_s", "proc_tok_s", "seconds", "ttft", "tbt", "iterations", "preemptions")
    found = {name: float(getattr(result, name)) for name in names}
    if result.energy is not None:
        found["energy"] = result.energy.joules
    return found | {"ttft_p90": percentiles(result.latencies.ttft)[1], "tbt_p90": gap_percentile(result.latencies, 0.9)}


def gap_percentile(latencies: Latencies, share: float) -> float:
    """The shortest gap between tokens that at least this share of all gaps does not exceed; NaN without gaps [s]."""
    gaps = latencies.array("gap")
    if not gaps.size:
        return math.nan
    order = np.argsort(gaps)
    counted = np.cumsum(latencies.array("gap_count")[order])
    return float(gaps[order][counted.searchsorted(share * counted[-1])])


def _known(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}


_COUNTED = re.compile(r"(?:(\d+) x )?(.+?)(?: over .*|, its GPU)?")


def gpu_price(machine: Machine) -> float:
    """Purchase price of a machine's GPUs, or of its one chip, by the catalogue; NaN if it has none [USD]."""
    match = _COUNTED.fullmatch(machine.gpu.name)
    if match is None or match.group(2) not in processors:
        return math.nan
    return int(match.group(1) or 1) * processors[match.group(2)].price


def _check_limits(own: Machine, asked: Machine) -> None:
    """Refuse a computer that the one at hand cannot be made by limits."""
    memory = asked.gpu.memory if asked.gpu.memory != own.gpu.memory else None
    link = asked.link.h2d if asked.link != own.link else None
    limited = own.limit(gpu_memory=memory, link=link)
    if (limited.gpu, limited.cpu, limited.link) != (asked.gpu, asked.cpu, asked.link):
        raise EngineError(
            f"run takes {own.name!r} as it is: of its fields only machine.gpu.memory and machine.link can be lowered; "
            "simulate the others."
        )
