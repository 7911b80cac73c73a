"""The dashboard's dropdowns and sliders, whose values form a `Settings`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as w

from workbench.core.units import format_bytes
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.widgets.dashboard.settings import (
    Settings,
    full_link,
    kv_bytes_per_token,
    ladder,
    machines_offered,
    models_offered,
    settings_of,
    suitable_kv,
    whole_ladder,
)

_STYLE = {"description_width": "98px"}
_WIDE = {"width": "336px"}
_SLOWEST_LINK = 1 / 512  # of the link's full rate


class Controls(w.VBox):  # type: ignore[misc]
    """Dropdowns of model, machine and schedule; sliders in steps of a quarter octave around the scenario's values."""

    def __init__(self, base: Scenario, schedules: Sequence[Schedule]) -> None:
        own = settings_of(base, schedules[0])
        self._base = base
        self._own = own
        self.model = _dropdown("Model", list(models_offered(base).items()), own.model)
        self.machine = _dropdown("Machine", list(machines_offered(base).items()), own.machine)
        self.schedule = _dropdown("Schedule", [(schedule.name, schedule) for schedule in schedules], own.schedule)
        self.requests = _slider("Requests", _counts(whole_ladder(own.requests, 1, 256)), own.requests)
        self.prompt_len = _slider("Prompt tokens", _counts(whole_ladder(own.prompt_len, 4, 512)), own.prompt_len)
        self.output_len = _slider("Output tokens", _counts(whole_ladder(own.output_len, 2, 128)), own.output_len)
        self.kv_tokens = _slider("KV capacity", self._capacities(), own.kv_tokens)
        self.link = _slider("Link speed", self._rates(), own.link)
        self.model.observe(lambda _: self._offer_kv(), "value")
        self.machine.observe(lambda _: self._offer_machine(), "value")
        super().__init__([*self._all()])

    def _all(self) -> tuple[Any, ...]:
        sliders = (self.kv_tokens, self.requests, self.prompt_len, self.output_len, self.link)
        return (self.model, self.machine, self.schedule, *sliders)

    @property
    def settings(self) -> Settings:
        """Values of the controls."""
        return Settings(
            self.model.value,
            self.machine.value,
            self.schedule.value,
            self.requests.value,
            self.prompt_len.value,
            self.output_len.value,
            self.kv_tokens.value,
            self.link.value,
        )

    def on_change(self, react: Callable[[Settings], None]) -> None:
        """Call `react` with the new settings whenever one changes."""
        for control in self._all():
            control.observe(lambda _: react(self.settings), "value")

    def lock(self, locked: bool) -> None:
        """Disable or enable the controls."""
        for control in self._all():
            control.disabled = locked

    @property
    def kv_steps(self) -> tuple[float, ...]:
        """Positions of the KV slider [tokens]: from the longest request to well beyond all requests at once."""
        held = self._base.workload.prompt_len + self._base.workload.output_len
        return ladder(self._own.kv_tokens, float(held.max()), 4 * max(float(held.sum()), self._own.kv_tokens))

    def _offer_machine(self) -> None:
        """Set the link and the KV capacity for the chosen machine."""
        own = self.machine.value == self._own.machine
        _offer(self.link, self._rates(), self._own.link if own else full_link(self.machine.value))
        self._offer_kv()

    def _offer_kv(self) -> None:
        """Set the scenario's KV capacity for its own model and machine, and a suitable one for others."""
        now = self.settings
        own = (now.model, now.machine) == (self._own.model, self._own.machine)
        chosen = self._own.kv_tokens if own else suitable_kv(self._base, now, self.kv_steps)
        _offer(self.kv_tokens, self._capacities(), chosen)

    def _capacities(self) -> list[tuple[str, float]]:
        per_token = kv_bytes_per_token(self._base, self.model.value)
        return [(format_bytes(tokens * per_token), tokens) for tokens in self.kv_steps]

    def _rates(self) -> list[tuple[str, float]]:
        full = full_link(self.machine.value)
        middle = self._own.link if self.machine.value == self._own.machine else full
        rates = sorted({*ladder(middle, full * _SLOWEST_LINK, full), full})
        return [(f"{format_bytes(rate)}/s", rate) for rate in rates]


def _counts(steps: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"{step:,}", step) for step in steps]


def _dropdown(label: str, options: Sequence[tuple[str, Any]], value: Any) -> Any:
    return w.Dropdown(options=options, value=value, description=label, style=_STYLE, layout=w.Layout(**_WIDE))


def _slider(label: str, options: Sequence[tuple[str, Any]], value: Any) -> Any:
    return w.SelectionSlider(options=options, value=value, description=label, style=_STYLE, layout=w.Layout(**_WIDE))


def _offer(slider: Any, options: Sequence[tuple[str, float]], value: float) -> None:
    """Set a slider's options and its value."""
    slider.options = options
    slider.value = value
