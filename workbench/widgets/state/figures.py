"""Predictions and measurements as the browser draws them: plain values, and texts with their units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.analysis.limits import MOSTLY
from workbench.analysis.shadow_prices import ShadowPrices
from workbench.analysis.wording import in_words, percent
from workbench.core.quiet import Noise
from workbench.core.result import Result, Source
from workbench.core.timeline import Timeline
from workbench.core.units import format_bytes, format_seconds
from workbench.plots import task_colour
from workbench.serving.ledger import Account, Ledger
from workbench.widgets.parts.gantt import names_in, track
from workbench.widgets.parts.words import digits, naming
from workbench.widgets.state.predictions import Refused

Plain = dict[str, Any]


def figure(
    result: Result | Refused,
    name: str,
    bound: Result | Refused,
    *,
    chosen: bool,
    rate: float | None = None,
    searched: bool = True,
) -> Plain:
    """One row of the table of figures: a result, or the reason why there is none; unless `searched`, not what fits.

    With a `rate` [output tokens/s] the result is of a sample of the requests, which stands for this rate of all;
    its times say nothing of all.
    """
    row: Plain = {"name": name, "chosen": chosen, "source": "simulated", "why": ""}
    if isinstance(result, Refused):
        return {**row, "why": result.told(searched=searched)}
    served = result.source is not Source.BOUND
    joules = joules_per_token(result)
    shown = result.gen_tok_s if rate is None else rate
    whole = served and rate is None
    of_bound = None if isinstance(bound, Refused) or not served else shown / bound.gen_tok_s
    return {
        **row,
        "source": result.source.value,
        "gen_tok_s": digits(shown),
        "of_bound": of_bound,
        "ttft": format_seconds(result.ttft) if whole and result.ttft == result.ttft else "",
        "tbt": format_seconds(result.tbt) if whole and result.tbt == result.tbt else "",
        "seconds": format_seconds(result.seconds) if rate is None else "",
        "energy": "" if joules is None else f"{digits(joules)} J/token",
        "preemptions": f"{result.preemptions:,}" if whole else "",
        "limited": limited(result),
    }


def joules_per_token(result: Result) -> float | None:
    """Energy of an output token [J]; None if none was counted: what a model says of a run was not measured."""
    energy = result.energy
    if energy is None or not result.generated:
        return None
    if result.source is Source.MEASURED and energy.source.startswith("model"):
        return None
    return energy.joules / result.generated


def limited(result: Result) -> str:
    """The resource that limits a bound, or the busiest lane of a run with its share of the time, as `explain` says."""
    words = in_words(result.binding)
    if result.source is Source.BOUND or result.binding not in result.busy:
        return words
    share = result.busy[result.binding] / result.seconds
    if share < MOSTLY:
        return f"waiting: even the busiest part, {words}, works {share:.0%} of the time"
    return f"{words}, busy {share:.0%}"


def under_load(others: float) -> str:
    """The load by other programs, which took so much of the cores, in words; empty for a quiet computer."""
    noise = Noise(others)
    return "" if noise.quiet else f"while other programs took {percent(others)} of the cores"


def memories(ledger: Ledger | Refused) -> list[Plain]:
    """Both memories with what each holds."""
    if isinstance(ledger, Refused):
        return []
    return [
        _memory(f"{account.name[:1].upper()}{account.name[1:]} memory", account) for account in ledger_accounts(ledger)
    ]


def ledger_accounts(ledger: Ledger) -> Iterable[Account]:
    """The accounts of a ledger that have a memory of their own."""
    return (ledger.gpu, ledger.host)


def _memory(name: str, account: Account) -> Plain:
    whole = max(account.capacity, account.total) or 1.0
    parts = [
        {"name": entry.name, "size": format_bytes(entry.bytes), "share": entry.bytes / whole, "note": entry.note}
        for entry in account.entries
        if entry.bytes
    ]
    over = account.left < 0
    left = f"{format_bytes(abs(account.left))} {'too much' if over else 'free'}"
    return {"name": name, "capacity": format_bytes(account.capacity), "over": over, "parts": parts, "left": left}


def priced(prices: ShadowPrices) -> list[Plain]:
    """The gains from twice as much of each resource, the largest first."""
    gains = zip(prices.prices, prices.rows(), strict=True)
    ranked = sorted(gains, key=lambda each: -each[0].gain)
    return [{"what": what, "gain": gain, "then": then} for _, (what, gain, then) in ranked]


def line(name: str, kind: str, points: Sequence[tuple[float, float]]) -> Plain:
    """One curve."""
    return {"name": name, "kind": kind, "points": [list(point) for point in sorted(points)]}


def tracks(titled: Sequence[tuple[str, Timeline]]) -> Plain:
    """Lane charts, one above the other, each from its own begin."""
    found = defaultdict[str, dict[str, None]](dict)
    for _, timeline in titled:
        for code, label in timeline.labels.items():
            found[code][label] = None  # the same code may stand for other operations in another pipeline
    labels = {code: " / ".join(names) for code, names in found.items()}
    colours = {code: task_colour(code) for code in labels}
    return {
        "tracks": [track(title, timeline) for title, timeline in titled],
        "labels": labels,
        "colours": colours,
        "naming": naming(names_in(timeline for _, timeline in titled)),
    }
