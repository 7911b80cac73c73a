"""Up to four pinned settings, compared side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.analysis.wording import listed
from workbench.core.result import Result
from workbench.core.units import format_bytes, format_seconds
from workbench.pipeline import Pipeline, ranges_of
from workbench.schedules import Schedule
from workbench.serving.ledger import Account, Ledger
from workbench.stages import Place, Stage
from workbench.widgets.parts.words import digits
from workbench.widgets.state.figures import Plain, joules_per_token, limited, under_load
from workbench.widgets.state.predictions import Predictions
from workbench.widgets.state.settings import Settings

MOST = 4
Measured = Sequence[tuple[Settings, Result]]
_PARTS = 2
"""Parts of a memory that are told, the largest ones."""
_OWN = "the model's own format"
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Variant(NamedTuple):
    """One pinned position of all settings, with the code of its pipeline."""

    number: int
    settings: Settings
    code: str


class _Figure(NamedTuple):
    """One compared figure: its text, a number that ranks it (the largest is best, or the least), and a note on it."""

    text: str
    value: float
    least_is_best: bool = True
    note: str = ""


class Variants:
    """The variants that are pinned, the oldest first; a fifth one takes the place of the oldest.

    Parameters
    ----------
    predictions : Predictions
    measured : callable () -> sequence of (Settings, Result)
        What was measured so far.
    """

    def __init__(self, predictions: Predictions, measured: Callable[[], Measured]) -> None:
        self._predictions = predictions
        self._measured = measured
        self._pinned: list[Variant] = []
        self._next = 0

    def pin(self, settings: Settings, code: str) -> None:
        """Pin these settings, unless they are pinned already."""
        if any(each.settings == settings for each in self._pinned):
            return
        self._pinned = [*self._pinned[-MOST + 1 :], Variant(self._next, settings, code)]
        self._next += 1

    def unpin(self, number: int) -> None:
        """Remove a variant."""
        self._pinned = [each for each in self._pinned if each.number != number]

    def settings(self, number: int) -> Settings | None:
        """The settings of a variant; None if it is not pinned any more."""
        return next((each.settings for each in self._pinned if each.number == number), None)

    def named(self) -> list[tuple[str, Settings]]:
        """All variants by name and what sets them apart, and their settings."""
        found = list[tuple[str, Settings]]()
        for each in self._pinned:
            apart = self._apart(each.settings) or [each.settings.schedule.name]
            found.append((f"{_name(each)}: {', '.join(apart)}", each.settings))
        return found

    def plain(self) -> list[Plain]:
        """All variants for the browser, each with the figures in which it is the best.

        None is the best among variants of several models, whose tokens and bytes do not compare.
        """
        figures = [self._figures(each.settings) for each in self._pinned]
        ranked = figures if len({each.settings.model for each in self._pinned}) == 1 else []
        return [self._plain(each, mine, ranked) for each, mine in zip(self._pinned, figures, strict=True)]

    def _plain(self, each: Variant, mine: dict[str, _Figure], ranked: list[dict[str, _Figure]]) -> Plain:
        best = [name for name in mine if _is_best(name, mine, ranked)]
        return {
            "id": each.number,
            "name": _name(each),
            "about": self._about(each.settings),
            "code": each.code,
            "rows": {name: figure.text for name, figure in mine.items()},
            "notes": {name: figure.note for name, figure in mine.items() if figure.note},
            "best": best,
        }

    def _about(self, settings: Settings) -> str:
        """In what these settings differ from others that are pinned; of a single one, or one that looks alike, all."""
        return ", ".join(self._apart(settings) or _told(settings))

    def _apart(self, settings: Settings) -> list[str]:
        """The choices of these settings that not all that are pinned have; wirings that look alike, in full."""
        others = [each.settings for each in self._pinned]
        choices = zip(_told(settings), *map(_told, others), strict=True)
        found = [own for own, *theirs in choices if set(theirs) - {own}]
        wired = _wirings(settings)
        alike = [each for each in others if _wirings(each) == wired]
        if any(each.pipeline != settings.pipeline for each in alike):
            found.append(str(settings.pipeline))
        return found

    def _figures(self, settings: Settings) -> dict[str, _Figure]:
        """The figures of a simulation and of the last run, and what both memories hold."""
        result = self._predictions.simulation(settings, settings.schedule)
        ledger = self._predictions.ledger(settings)
        runs = [run for at, run in self._measured() if at == settings]
        found = dict[str, _Figure]()
        if isinstance(result, Result):
            rate = self._predictions.of_all(result, settings)
            found["output tokens/s, simulated"] = _Figure(digits(rate), rate, False)
            found["limited by"] = _Figure(limited(result), math.nan)
            if int(result.facts["requests"]) == settings.requests:
                found |= _of_requests(result, "simulated")
        else:
            found["does not run"] = _Figure(result.why.partition(". ")[0], math.nan)
        if runs:
            run = runs[-1]
            load = under_load(run.others)
            note = f"measured {load}" if load else ""
            found["output tokens/s, measured"] = _Figure(digits(run.gen_tok_s), run.gen_tok_s, False, note)
            found |= _of_requests(run, "measured")
        if isinstance(ledger, Ledger):
            found["GPU memory"] = _held(ledger.gpu)
            found["host memory"] = _held(ledger.host)
        return found


def _held(account: Account) -> _Figure:
    """The total of a memory, with its largest parts."""
    largest = sorted(account.entries, key=lambda entry: -entry.bytes)[:_PARTS]
    note = ", ".join(f"{entry.name} {format_bytes(entry.bytes)}" for entry in largest if entry.bytes)
    return _Figure(format_bytes(account.total), account.total, note=note)


def _of_requests(result: Result, source: str) -> dict[str, _Figure]:
    """Mean times of requests and the energy of a token, if a meter counted what is "measured" and not "simulated"."""
    found = {
        f"mean time to first token, {source}": _Figure(format_seconds(result.ttft), result.ttft),
        f"mean time between tokens, {source}": _Figure(format_seconds(result.tbt), result.tbt),
    }
    each = joules_per_token(result)
    if each is not None:
        found[f"energy, {source}"] = _Figure(f"{digits(each)} J/token", each)
    return found


def _name(variant: Variant) -> str:
    return _NAMES[variant.number % len(_NAMES)]


def _told(settings: Settings) -> list[str]:
    """Every choice of some settings, in words."""
    return [
        settings.model.name,
        f"weights in {settings.memory.weights or _OWN}",
        f"KV in {settings.memory.kv or settings.model.dtype}",
        settings.machine.name,
        _wirings(settings),
        settings.schedule.name,
        _micro_batches(settings.schedule),
        type(settings.scheduler).__name__,
        f"{format_bytes(settings.kv_capacity)} of KV",
        f"{settings.requests:,} requests",
        f"{settings.prompt_len:,} prompt tokens",
        f"{settings.output_len:,} output tokens",
        f"link {format_bytes(settings.link)}/s",
        f"{format_bytes(settings.gpu_memory)} of GPU memory",
    ]


def _micro_batches(schedule: Schedule) -> str:
    number = getattr(schedule, "micro_batches", "no")
    return f"{number} micro-batch{'' if number == 1 else 'es'}"


def _wirings(settings: Settings) -> str:
    """The wiring of each range of layers, in words."""
    return "; ".join(_wired(each.pipeline) for each in ranges_of(settings.pipeline))


def _wired(pipeline: Pipeline) -> str:
    """Operations on the CPU with their options and tensors that are streamed, in words."""
    on_cpu = [_operation(stage) for stage in pipeline.stages if stage.device is Place.CPU]
    streamed = [item.name for item in pipeline.fetches]
    where = f"{listed(on_cpu)} on the CPU" if on_cpu else "all on the GPU"
    return f"{where}, {listed(streamed)} streamed" if streamed else where


def _operation(stage: Stage) -> str:
    return f"{stage.op.name} ({', '.join(stage.options)})" if stage.options else stage.op.name


def _is_best(name: str, mine: dict[str, _Figure], all_of_them: list[dict[str, _Figure]]) -> bool:
    """True if none has a better figure; figures that read the same are equally good, and if all do none is best."""
    found = [other[name] for other in all_of_them if name in other and not math.isnan(other[name].value)]
    if len({each.text for each in found}) < 2:
        return False
    best = (min if mine[name].least_is_best else max)(found, key=lambda each: each.value)
    return mine[name].text == best.text
