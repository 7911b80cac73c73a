"""Report of the gpu benchmark: a table, an SVG written without a plotting library, and ratios for the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from workbench.bench import record

Row = Mapping[str, Any]

_RIGHT = 620
_BAR = 18


def told(row: Row) -> str:
    """One line about a step that is done.

    Examples
    --------
    >>> told({"seconds": 2e-3, "floor": 1e-3, "peers": {"torch": 3e-3}})
    '2.000 ms, 50 % of the floor, torch takes 1.50 times as long'
    """
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    if "rates" in row:
        return ", ".join(f"{name} {rate / 1e9:.4g} G/s" for name, rate in row["rates"].items())
    if "error" in row:
        return f"error {row['error']:.1e} of {row['limit']:.0e}"
    if "seconds" in row:
        peers = [f"{name} takes {took / row['seconds']:.2f} times as long" for name, took in _measured(row).items()]
        share = [f"{row['floor'] / row['seconds']:.0%} of the floor".replace("%", " %")] if "floor" in row else []
        return ", ".join([f"{1e3 * row['seconds']:.3f} ms", *share, *peers])
    if "best" in row:
        return f"best {row['best']}"
    return ", ".join(f"{name} {value}" for name, value in row.items() if name != "step")


def _measured(row: Row) -> dict[str, float]:
    return {name: took for name, took in row.get("peers", {}).items() if isinstance(took, float)}


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Share of the floor and speed relative to each baseline, by case."""
    found = {}
    for row in rows:
        if "seconds" in row:
            if "floor" in row:
                found[f"{row['case']}: of the floor"] = record.ratio([row["floor"] / row["seconds"]])
            for name, took in _measured(row).items():
                found[f"{row['case']}: times as fast as {name}"] = record.ratio([took / row["seconds"]])
    return found


def table(rows: Sequence[Row], rates: Mapping[str, float], missing: Sequence[str]) -> list[str]:
    """Lines of the table: ceilings, one line per case, and the steps that failed or were not reached."""
    lines = [f"{name:28} {rate / 1e9:12.1f} G/s" for name, rate in sorted(rates.items())]
    lines.append(f"{'case':40} {'error':>8} {'ms':>9} {'floor':>9} {'share':>6}  peers: times as long")
    speeds = {row["case"]: row for row in rows if "seconds" in row}
    for row in rows:
        if "error" in row:
            lines.append(_line(row, speeds.get(row["case"], {})))
    failed = [f"FAILED {row['step']}: {row['failed']}" for row in rows if "failed" in row]
    left = [f"not reached: {', '.join(missing)}"] if missing else []
    wrong = f"{len(failed)} of {len(rows)} steps failed"
    return [*lines, *failed, *left, wrong]


def _line(error: Row, speed: Row) -> str:
    head = f"{error['case']:40} {error['error']:8.1e}"
    if not speed:
        return head
    floor = speed.get("floor")
    share = f"{1e3 * floor:9.3f} {floor / speed['seconds']:6.0%}" if floor else " " * 16
    peers = ", ".join(f"{name} {took / speed['seconds']:.2f}" for name, took in _measured(speed).items())
    return f"{head} {1e3 * speed['seconds']:9.3f} {share}  {peers}".rstrip()


def picture(rows: Sequence[Row], card: str) -> str:
    """Draw an SVG with one bar per timed case: its share of the floor; without timed cases, each error over its limit.

    Examples
    --------
    >>> picture([], "a card").startswith("<svg")
    True
    """
    timed = [(row["case"], row["floor"] / row["seconds"]) for row in rows if "seconds" in row and "floor" in row]
    title = f"{card}: share of the floor"
    if not timed:
        timed = [(row["case"], row["error"] / max(row["limit"], 1e-30)) for row in rows if "error" in row]
        title = f"{card}: error, as a share of what is allowed"
    height = _BAR * (len(timed) + 2)
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_RIGHT + 80}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><text x="4" y="14" font-size="13">{escape(title)}</text>'
    ]
    for number, (name, share) in enumerate(timed, 1):
        y = _BAR * number + 6
        length = 340 * min(1.0, max(0.0, share))
        elements.append(
            f'<text x="4" y="{y + 11}">{escape(name)}</text><rect x="270" y="{y}" width="{length:.1f}" height="13" '
            f'fill="#4c78a8"/><text x="{274 + length:.1f}" y="{y + 11}">{share:.0%}</text>'
        )
    return "".join([*elements, "</svg>\n"])
