"""The record that every benchmark writes with ``--json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from workbench.core.result import versions
from workbench.hardware import Machine


def say(line: str) -> None:
    """Print a line and flush it, because benchmarks take minutes."""
    print(line, flush=True)


def ratio(values: Sequence[float]) -> dict[str, float]:
    """Median and range of the repetitions."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": len(values)}


def write(
    path: Path, machine: Machine | str, ratios: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write the record as JSON; if no machine was measured, `machine` is a description in words."""
    record = {
        "machine": machine if isinstance(machine, str) else machine.name,
        "calibrated": None if isinstance(machine, str) else machine.measured,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ratios": ratios,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def rows_by_step(path: Path, machine: str) -> dict[str, dict[str, Any]]:
    """The rows of a record by their `step`; none if it cannot be read, or is of another machine or other versions."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = json.loads(path.read_bytes())
        if (found["machine"], found["versions"]) == (machine, versions()):
            return {row["step"]: row for row in found["rows"]}
    return {}


def replace(
    path: Path, machine: Machine | str, ratios: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write the record as `write` does; the old file stays until the new one is complete."""
    whole = path.with_suffix(".part")
    write(whole, machine, ratios, rows)
    whole.replace(path)
