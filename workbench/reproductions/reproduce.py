"""Reproduction of a paper: its rows computed, counted by class and outcome, as a table and as text."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workbench.core.display import escaped
from workbench.reproductions.rows import Evidence, Inputs, Outcome, Printed, Row, Tolerance, Value, papers, printed

if TYPE_CHECKING:
    import pandas

_UNCHANGED: Mapping[str, Any] = MappingProxyType({})
_COLOURS = {
    Outcome.MET: "#059669",
    Outcome.MISSED: "#dc2626",
    Outcome.MISPRINT: "#d97706",
    Outcome.COMPARED: "#2563eb",
    Outcome.OPEN: "#6b7280",
}


@dataclass(frozen=True)
class Reproduction:
    """The printed values of one paper, recomputed."""

    paper: str
    rows: tuple[Row, ...]

    def count(self) -> dict[Outcome, int]:
        """Number of rows by outcome."""
        found = Counter(row.outcome for row in self.rows)
        return {outcome: found[outcome] for outcome in Outcome}

    def classes(self, outcome: Outcome) -> dict[Evidence, int]:
        """Number of rows of one outcome by class; classes without any are left out."""
        found = Counter(row.printed.evidence for row in self.rows if row.outcome is outcome)
        return {evidence: found[evidence] for evidence in Evidence if found[evidence]}

    def factors(self, group: str) -> list[float]:
        """Factors between computed and measured values of the compared rows whose group's name begins with `group`."""
        compared = [row for row in self.rows if row.outcome is Outcome.COMPARED]
        return [row.factor for row in compared if f"{row.printed.group}.".startswith(f"{group}.")]

    def remarks(self, *outcomes: Outcome) -> dict[str, Printed]:
        """Each remark once, with the first row of these outcomes that it explains; of all outcomes if none is given."""
        found: dict[str, Printed] = {}
        for row in self.rows:
            if row.printed.remark and (not outcomes or row.outcome in outcomes):
                found.setdefault(row.printed.remark, row.printed)
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """One row per printed value; numbers stay numbers."""
        import pandas

        return pandas.DataFrame([_plain(row) for row in self.rows])

    def text(self) -> str:
        """The counts, and a line per printed value."""
        import pandas

        lines = []
        for row in self.rows:
            one = row.printed
            end = _allowed(row) if row.outcome is Outcome.COMPARED else row.outcome.value
            lines.append((one.item, one.quantity, _value(one.value, one.unit), _computed(row), end))
        columns = ["item", "quantity", "published", "computed", "outcome"]
        return f"{self}\n{pandas.DataFrame(lines, columns=columns).to_string(index=False)}"

    def style(self) -> Any:
        """The table as a pandas Styler: grouped by item, with outcomes in colour and remarks as numbered notes."""
        import pandas

        notes = list(self.remarks())
        cells = [_text(row, notes) for row in self.rows]
        index = pandas.MultiIndex.from_tuples([(row.printed.item, row.printed.quantity) for row in self.rows])
        colours = {outcome.value: f"color: {colour}; font-weight: 600" for outcome, colour in _COLOURS.items()}
        small = {"selector": "", "props": "font-size: 90%"}
        left = {"selector": "th", "props": "vertical-align: top; text-align: left; font-weight: normal"}
        wide = {"selector": "th.level1", "props": "min-width: 19em; white-space: normal"}
        head = {"selector": "th.col_heading", "props": "font-weight: 600; text-align: right"}
        return (
            pandas.DataFrame(cells, index=index)
            .style.map(lambda word: colours.get(word, ""), subset=["outcome"])
            .set_properties(**{"text-align": "right", "white-space": "nowrap", "vertical-align": "top"})
            .set_table_styles([small, left, wide, head])
        )

    def __str__(self) -> str:
        met = ", ".join(f"{count} {evidence.value}" for evidence, count in self.classes(Outcome.MET).items())
        counts = {outcome: f"{count} {outcome.value}" for outcome, count in self.count().items() if count}
        if met:
            counts[Outcome.MET] += f" ({met})"
        return f"{self.paper}: " + ", ".join(counts.values())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escaped(remark)}</li>" for remark in self.remarks())
        return f"<p>{escaped(str(self))}</p>{self.style().to_html()}<ol>{notes}</ol>"


def reproduce(paper: str) -> Reproduction:
    """Recompute every printed value of one paper.

    Parameters
    ----------
    paper : str
        A name from `papers`.

    Raises
    ------
    CatalogueError
        If there is no such paper.
    """
    rows = tuple(Row(one, compute(one)) for one in printed(paper))
    return Reproduction(rows[0].printed.paper, rows)


def summary(reproductions: Iterable[Reproduction]) -> pandas.DataFrame:
    """Rows of these papers by class, one line each, and by outcome, one column each; the last line is their sum."""
    import pandas

    found = Counter((row.printed.evidence, row.outcome) for one in reproductions for row in one.rows)
    columns = {}
    for outcome in Outcome:
        columns[outcome.value] = [found[evidence, outcome] for evidence in Evidence]
    table = pandas.DataFrame(columns, index=[evidence.value for evidence in Evidence])
    table.loc["all"] = table.sum()
    return table


def compute(one: Printed, changes: Inputs = _UNCHANGED) -> Value | None:
    """The value as the workbench computes it, with other inputs if given; None if nothing computes it."""
    return None if one.expected is Outcome.OPEN else _functions()[one.group]({**one.given, **changes})


@cache
def _functions() -> dict[str, Callable[[Inputs], Value]]:
    """The function that computes each group of values, from the module of every paper."""
    found = dict[str, Callable[[Inputs], Value]]()
    for paper in papers():
        found |= importlib.import_module(f"workbench.reproductions.{paper}").COMPUTE
    return found


def _plain(row: Row) -> dict[str, Any]:
    one = row.printed
    return {
        "paper": one.paper,
        "key": one.key,
        "item": one.item,
        "quantity": one.quantity,
        "unit": one.unit,
        "published": one.value,
        "computed": row.computed,
        "difference": row.difference,
        "ratio": row.ratio,
        "rel": one.tolerance.rel,
        "abs": one.tolerance.abs,
        "factor": row.factor,
        "outcome": row.outcome.value,
        "evidence": one.evidence.value,
        "remark": one.remark,
    }


def _text(row: Row, notes: list[str]) -> dict[str, str]:
    one = row.printed
    return {
        "published": _value(one.value, one.unit),
        "computed": _computed(row),
        "difference": "" if math.isnan(row.difference) else f"{row.difference:+.3g}",
        "tolerance": _allowed(row),
        "outcome": row.outcome.value,
        "note": str(notes.index(one.remark) + 1) if one.remark else "",
        "evidence": one.evidence.value,
    }


def _computed(row: Row) -> str:
    return "" if row.computed is None else _value(row.computed, "")


def _allowed(row: Row) -> str:
    """The tolerance in words; for a compared row, its factor."""
    if row.computed is None:
        return ""
    if row.outcome is Outcome.COMPARED:
        return f"factor {row.factor:.2f}"
    return _tolerance(row.printed.tolerance, row.printed.value)


def _value(value: Value, unit: str) -> str:
    if isinstance(value, tuple):
        text = " to ".join(f"{end:.4g}" for end in value)
    elif isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    else:
        text = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def _tolerance(tolerance: Tolerance, value: Value) -> str:
    if isinstance(value, bool | str):
        return ""
    limits = [f"{tolerance.rel * 100:.3g} %"] * (tolerance.rel > 0) + [f"{tolerance.abs:g}"] * (tolerance.abs > 0)
    return " or ".join(f"± {limit}" for limit in limits) or "exact"
