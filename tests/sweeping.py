"""What the tests of sweeps start in other processes: readers that die, and a sweep that is interrupted."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import workbench as wb
from tests.builders import tiny_scenario
from workbench.analysis.sweeps import Sweep, running
from workbench.core.result import Result
from workbench.scenario import Scenario
from workbench.schedules import Schedule, Sequential, VSLPipe

SCENARIO = tiny_scenario([8] * 40, [10] * 40)
OVER = {"workload.requests": tuple(range(1, 61)), "schedule": (Sequential(), VSLPipe())}


@dataclass(frozen=True)
class Deadly:
    """A reader whose process is killed when it meets so many requests: once if there is a mark, else each time.

    It notes each point that it has read.
    """

    requests: int
    log: Path
    mark: Path | None = None

    def __call__(self, scenario: Scenario, schedule: Schedule) -> Result:
        dies = len(scenario.workload) == self.requests and (self.mark is None or not self.mark.exists())
        if dies:
            if self.mark is not None:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        result = wb.bound(scenario, schedule)
        with self.log.open("a") as log:
            log.write(f"{len(scenario.workload)} {schedule.name} {os.getpid()}\n")
        return result


def sweep_to(store: Path) -> Sweep:
    """The sweep that is interrupted."""
    return wb.sweep(SCENARIO, over=OVER, store=store)


def on_processes_at_once() -> None:
    """Let a sweep start its processes with the second point, two of them."""
    running.PROBE = 0.0
    running.WORTH = 0.0
    running.usable_cores = lambda: 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever began the tests ignores it
    if sys.argv[2] == "processes":
        on_processes_at_once()
    else:
        running.WORTH = float("inf")
    sweep_to(Path(sys.argv[1]))
