"""Predictions at any position of the dashboard's controls, with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from workbench.analysis.sweep import SweepPoint, predict
from workbench.core.errors import WorkbenchError
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.widgets.dashboard.settings import Settings, WorkloadOf, kv_bytes_per_token, scenario_of

_REMEMBERED = 512  # points


class Predictions:
    """Points of a sweep for settings around a scenario."""

    def __init__(self, base: Scenario, schedules: Sequence[Schedule], workload: WorkloadOf) -> None:
        self._base = base
        self._schedules = tuple(schedules)
        self._workload = lru_cache(maxsize=8)(workload)
        self._lengths = lru_cache(maxsize=8)(lambda *sizes: replace(self._workload(*sizes), requests=()))
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._predict)

    def scenario(self, settings: Settings) -> Scenario:
        """Return the scenario of these settings, ready to run.

        Raises
        ------
        WorkbenchError
            If the settings disagree.
        """
        return scenario_of(self._base, settings, self._workload)

    def point(self, settings: Settings) -> SweepPoint:
        """Predict bound and simulations of all schedules at these settings; the point holds an error as text."""
        return self._remembered(replace(settings, schedule=self._schedules[0]))

    def capacity(self, settings: Settings) -> float:
        """KV capacity of these settings [B]."""
        return settings.kv_tokens * kv_bytes_per_token(self._base, settings.model)

    def _predict(self, settings: Settings) -> SweepPoint:
        try:
            # Token ids change no prediction, and hashing them into every result would take longer than the rest.
            scenario = scenario_of(self._base, settings, self._lengths)
            return predict(scenario, self._schedules, self.capacity(settings))
        except WorkbenchError as error:
            return SweepPoint(self.capacity(settings), (), str(error))


def outward(steps: Sequence[float], centre: float, most: int) -> list[float]:
    """Choose about `most` of the steps, always the same ones, and the centre, ordered by distance from the centre."""
    chosen = {*steps[:: max(1, round(len(steps) / most))], steps[-1], centre}
    return sorted(chosen, key=lambda step: max(step / centre, centre / step))
