"""A paper's rows: computed, counted, as a table and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.display import escaped
from workbench.reproductions import ktransformers, layered_prefill, moe_cap, moe_lens, moe_lightning
from workbench.reproductions.rows import Inputs, Outcome, Printed, Row, Tolerance, Value, printed

if TYPE_CHECKING:
    import pandas

_COMPUTE: dict[str, Callable[[Inputs], Value]] = {
    **ktransformers.COMPUTE,
    **layered_prefill.COMPUTE,
    **moe_cap.COMPUTE,
    **moe_lens.COMPUTE,
    **moe_lightning.COMPUTE,
}
_COLOURS = {
    Outcome.MET: "#059669",
    Outcome.MISSED: "#dc2626",
    Outcome.MISPRINT: "#d97706",
    Outcome.OPEN: "#6b7280",
}


@dataclass(frozen=True)
class Reproduction:
    """What one paper prints, recomputed."""

    paper: str
    rows: tuple[Row, ...]

    def count(self) -> dict[Outcome, int]:
        """Rows by outcome."""
        found = Counter(row.outcome for row in self.rows)
        return {outcome: found[outcome] for outcome in Outcome}

    def remarks(self, *outcomes: Outcome) -> dict[str, Printed]:
        """Each reason once, with the first row of these outcomes that it explains; of all rows if none is named."""
        found: dict[str, Printed] = {}
        for row in self.rows:
            if row.printed.remark and (not outcomes or row.outcome in outcomes):
                found.setdefault(row.printed.remark, row.printed)
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """One row per printed value: numbers as numbers."""
        import pandas

        return pandas.DataFrame([_plain(row) for row in self.rows])

    def style(self) -> Any:
        """The table for reading, as a pandas Styler: grouped by item, outcomes in colour, remarks as numbered notes."""
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
        return f"{self.paper}: " + ", ".join(f"{count} {outcome.value}" for outcome, count in self.count().items())

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
    rows = tuple(Row(one, _computed(one)) for one in printed(paper))
    return Reproduction(rows[0].printed.paper, rows)


def _computed(one: Printed) -> Value | None:
    return None if one.expected is Outcome.OPEN else _COMPUTE[one.group](one.given)


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
        "outcome": row.outcome.value,
        "evidence": one.evidence,
        "remark": one.remark,
    }


def _text(row: Row, notes: list[str]) -> dict[str, str]:
    one = row.printed
    return {
        "published": _value(one.value, one.unit),
        "computed": "" if row.computed is None else _value(row.computed, ""),
        "difference": "" if math.isnan(row.difference) else f"{row.difference:+.3g}",
        "tolerance": "" if row.computed is None else _tolerance(one.tolerance, one.value),
        "outcome": row.outcome.value,
        "note": str(notes.index(one.remark) + 1) if one.remark else "",
        "evidence": "" if row.computed is None else one.evidence,
    }


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
    parts = [f"{tolerance.rel * 100:.3g} %"] * (tolerance.rel > 0) + [f"{tolerance.abs:g}"] * (tolerance.abs > 0)
    return " or ".join(f"± {part}" for part in parts) or "exact"
