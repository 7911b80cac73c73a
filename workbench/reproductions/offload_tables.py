"""Public runs beside simulations in tables: every run, the errors, and the order within each sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workbench.reproductions.offload_runs import DATA, Compared, Phase, PublicRun, compared, public_runs
from workbench.reproductions.reproduce import Reproduction
from workbench.reproductions.rows import Evidence, Outcome, Printed, Row, Tolerance, published

if TYPE_CHECKING:
    import pandas

KNOWN = ("full", "partial", "poor")
FULL = KNOWN[0]
_DIGITS = 6
"""Digits of simulated rates that count for their order: equal settings differ by rounding alone."""


def offload_reproduction() -> Reproduction:
    """The runs whose hardware is fully known: at their first and their last lengths, published and simulated rates.

    A run that cannot be simulated has its reason as the remark.
    """
    title = published(DATA)["title"]
    rows = [row for run in public_runs() if run.known == FULL for row in _rows(title, run)]
    return Reproduction(title, tuple(rows))


def _rows(title: str, run: PublicRun) -> Iterator[Row]:
    for phase in Phase:
        points = [one for one in compared(run) if one.phase is phase]
        for one in dict.fromkeys((*points[:1], *points[-1:])):
            where = f"{phase.value} of {_lengths(one)}"
            yield Row(_printed(title, run, where, one.published, Outcome.COMPARED), one.simulated)
        if phase in run.unsayable and run.rates[phase]:
            rate = run.rates[phase][0][1]
            yield Row(_printed(title, run, phase.value, rate, Outcome.OPEN, run.unsayable[phase]), None)


def _printed(title: str, run: PublicRun, where: str, rate: float, expected: Outcome, remark: str = "") -> Printed:
    return Printed(
        paper=title,
        group=run.name,
        key=f"{run.name}.{where}",
        item=run.name,
        quantity=f"{run.engine}, {run.entry['published']}: {where}",
        unit="tok/s",
        value=rate,
        tolerance=Tolerance(),
        evidence=Evidence.MEASURED if expected is Outcome.OPEN else Evidence.RECOMPUTED,
        expected=expected,
        remark=remark or run.entry.get("caveat", ""),
        given=MappingProxyType({}),
        otherwise=MappingProxyType({}),
        source=run.entry["source"],
    )


def _lengths(one: Compared) -> str:
    before, prompt, output = one.lengths
    tokens = prompt if one.phase is Phase.PREFILL else output
    told = "unstated" if math.isnan(tokens) else f"{tokens:.0f}"
    behind = before if one.phase is Phase.PREFILL else before + prompt
    return f"{told} tokens" + (f" behind {behind:.0f}" if behind > 0 else "")


def offload_report() -> str:
    """The table of all runs, reasons of those that cannot be simulated, the median errors, and the order in sweeps."""
    found = offload_reproduction()
    reasons = {}
    for run in public_runs():
        if run.known == FULL and not run.simulated:
            reasons[run.name] = run.unsayable[Phase.DECODE]
    orders = rank_correlations()
    of_sweeps = orders[orders["phase"].notna()].drop(columns=["varies", "remark"])
    counts = of_sweeps.astype({"runs": int, "points": int})
    return "\n".join(
        [
            found.text(),
            "\nnot simulated:",
            *(f"{name}: {reason}" for name, reason in reasons.items()),
            "",
            *(error_line(phase) for phase in Phase),
            "\norder within sweeps (Spearman's rank correlation):",
            counts.to_string(index=False, float_format="{:.2f}".format),
        ]
    )


def error_line(phase: Phase) -> str:
    """The median error of a phase and its direction, in words."""
    found = ratios(phase)
    return (
        f"{phase.value}: {len(found)} runs, median error {median_error(phase):.0%}, median of simulated over published "
        f"{median(found.values()):.2f}, from {min(found.values()):.2f} to {max(found.values()):.2f}"
    )


def ratios(phase: Phase, known: str = FULL) -> dict[str, float]:
    """Simulated over published rate of each run, median over its lengths, for runs whose hardware is known so well."""
    found = {}
    for run in public_runs():
        of_run = [one.ratio for one in compared(run) if one.phase is phase]
        if run.known == known and of_run:
            found[run.name] = median(of_run)
    return found


def median_error(phase: Phase, known: str = FULL) -> float:
    """Median over the runs of abs(simulated / published - 1), each run with its median ratio."""
    return median(abs(ratio - 1) for ratio in ratios(phase, known).values())


def rank_correlations() -> pandas.DataFrame:
    """Spearman's rank correlation of simulated and published rates in each sweep, decode and prefill apart.

    Over all points, and over the runs at their first lengths alone, where depth does not help; `runs` and `points` are
    those that can be simulated. A sweep of which none can be has the reason as its remark.
    """
    import pandas

    sweeps = published(DATA)["sweeps"]
    lines = [line for sweep in sweeps for line in _correlations(sweep)]
    return pandas.DataFrame(lines)


def _correlations(sweep: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "unsayable" in sweep:
        yield {"sweep": sweep["id"], "remark": sweep["unsayable"]}
        return
    runs = [run for run in public_runs() if run.sweep == sweep["id"] and run.simulated]
    for phase in Phase:
        points = [one for run in runs for one in compared(run) if one.phase is phase]
        first = {one.run.name: one for one in reversed(points)}
        if len(points) > 1:
            yield {
                "sweep": sweep["id"],
                "varies": sweep["varies"],
                "of placement": sweep["of_placement"],
                "known": max((run.known for run in runs), key=KNOWN.index),
                "phase": phase.value,
                "runs": len(first),
                "points": len(points),
                "correlation": spearman(points),
                "of runs": spearman(first.values()),
                "remark": sweep.get("remark", ""),
            }


def spearman(points: Iterable[Compared]) -> float:
    """Spearman's rank correlation of published and simulated rates; nan if all rates of one kind are equal."""
    from scipy.stats import spearmanr

    rates = [(one.published, round(one.simulated, _DIGITS)) for one in points]
    theirs, ours = zip(*rates, strict=True)
    if len(set(theirs)) == 1 or len(set(ours)) == 1:
        return math.nan
    return float(spearmanr(theirs, ours).statistic)
