"""Comparison of results: a table, a picture, and the differences explained in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.analysis.explain import explain
from workbench.core.display import escaped, html_table
from workbench.core.result import Result, Source
from workbench.core.timeline import write_perfetto
from workbench.core.units import format_seconds, four_digits

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_HEADINGS = (
    "schedule",
    "source",
    "output tok/s",
    "processed tok/s",
    "of bound",
    "time",
    "iterations",
    "preempted",
    "limited by",
)


@dataclass(frozen=True)
class Comparison:
    """Results of one or several schedules and readers."""

    results: tuple[Result, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """One row of text per result, under the headings of the table; with its scheduler if not all have the same."""
        return [self._row(result) for result in self.results]

    def _row(self, result: Result) -> tuple[str, ...]:
        bounds = [r for r in self.results if r.source is Source.BOUND and r.same_question(result)]
        share = f"{result.gen_tok_s / bounds[0].gen_tok_s:.0%}" if bounds else ""
        return (
            ", ".join((result.schedule, *self._scheduler(result))),
            result.origin,
            four_digits(result.gen_tok_s),
            four_digits(result.proc_tok_s),
            share,
            format_seconds(result.seconds),
            str(result.iterations),
            "" if result.source in (Source.BOUND, Source.PREDICTED) else str(result.preemptions),
            _limited_by(result),
        )

    def _scheduler(self, result: Result) -> tuple[str, ...]:
        """The scheduler of a result, if others have another one; with its settings where names are alike."""
        scheduler = result.facts.get("scheduler", "")
        name = scheduler.partition("(")[0]
        others = {(r.schedule, r.facts.get("scheduler", "")) for r in self.results} - {(result.schedule, scheduler)}
        if not scheduler or all(other == scheduler for _, other in others):
            return ()
        alike = any(of == result.schedule and other.partition("(")[0] == name for of, other in others)
        return (scheduler if alike else name,)

    def explanations(self) -> list[str]:
        """Sentences on what limits the results and why they differ; see `workbench.analysis.explain`."""
        return explain(self.results)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per result, in plain units."""
        import pandas

        keys = (
            "schedule",
            "model",
            "machine",
            "seconds",
            "gen_tok_s",
            "proc_tok_s",
            "iterations",
            "preemptions",
            "ttft",
            "tbt",
        )
        rows = []
        for result in self.results:
            row = {"source": result.source.value, "predictor": result.predictor}
            row |= {key: getattr(result, key) for key in keys}
            rows.append(row)
        return pandas.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars of output tokens per second, one group per schedule."""
        from workbench.plots import plot_throughput

        return plot_throughput(self.results, ax)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write all timelines, simulated and measured, into one trace for ui.perfetto.dev, each a group of lanes.

        Raises
        ------
        ValueError
            If no result has one: `run` and ``simulate(..., detail=Detail.TASK)`` record every task.
        """
        tracks = [(f"{r.origin} {r.schedule}", r.timeline) for r in self.results if len(r.timeline)]
        if not tracks:
            raise ValueError("no result here has a timeline; take those of run, or of simulate(detail=Detail.TASK).")
        return write_perfetto(path, tracks)

    def __str__(self) -> str:
        table = [_HEADINGS, *self.rows()]
        columns = zip(*table, strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, "", *self.explanations()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escaped(sentence)}</p>" for sentence in self.explanations())
        return html_table(self.rows(), _HEADINGS) + words


def compare(results: Iterable[Result]) -> Comparison:
    """Put results side by side.

    Parameters
    ----------
    results : iterable of Result
        Results of any readers and schedules.

    Raises
    ------
    ValueError
        If there are none.
    """
    found: tuple[Any, ...] = tuple(results) if isinstance(results, Iterable) else ()
    if not found or not all(isinstance(result, Result) for result in found):
        raise ValueError("compare needs at least one Result, as bound, simulate or run return them.")
    return Comparison(found)


def _limited_by(result: Result) -> str:
    """The limit that gives a bound, or the busiest lane of a simulation or a run."""
    if result.limits or not result.busy:
        return result.binding
    return f"{result.binding}, {result.utilisation[result.binding]:.0%} busy"
