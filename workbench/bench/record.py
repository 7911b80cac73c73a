"""The record that every benchmark writes with ``--json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from workbench.core.catalogue import data_path
from workbench.core.errors import WorkbenchError
from workbench.core.result import versions
from workbench.hardware import Machine

ROOF = "of the roof"
FALL = 0.03
"""Share by which a record may be missed."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors of reading a file that is no record."""


def say(line: str) -> None:
    """Print a line and flush it, because benchmarks take minutes."""
    print(line, flush=True)


def ratio(values: Sequence[float]) -> dict[str, float]:
    """Median and range of the repetitions."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": len(values)}


def write(
    path: Path,
    machine: Machine | str,
    ratios: Mapping[str, Mapping[str, float]],
    rows: Sequence[Mapping[str, Any]],
    *,
    family: str | None = None,
) -> None:
    """Write the record as JSON; if no machine was measured, `machine` is a description in words.

    A record of a family of CPUs names it.

    Raises
    ------
    WorkbenchError
        If the file is the record of another family.
    """
    other = _family(path)
    if family and other not in (None, family):
        raise WorkbenchError(f"{path} is a record of {other} and this CPU is of {family}; write to another file.")
    record = {
        "machine": machine if isinstance(machine, str) else machine.name,
        **({"family": family} if family else {}),
        "calibrated": None if isinstance(machine, str) else machine.measured,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ratios": ratios,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def of_family(name: str, family: str) -> Path:
    """The shipped record of a family of CPUs, such as "kernels"; it need not be there."""
    return data_path("measured/cpu") / family / f"{name}.json"


def fallen(ratios: Mapping[str, Mapping[str, float]], path: Path) -> dict[str, float]:
    """Shares of the roof that lie more than `FALL` below those of a record, over these; none without a record."""
    common = {name: before for name, before in medians(path).items() if name in ratios and ROOF in name}
    shares = {name: ratios[name]["median"] / before for name, before in common.items()}
    return {name: share for name, share in shares.items() if share < 1 - FALL}


def medians(path: Path) -> dict[str, float]:
    """The medians of a record by name; none if it cannot be read."""
    with suppress(*_UNREADABLE):
        found = json.loads(path.read_bytes())["ratios"]
        return {name: float(each["median"]) for name, each in found.items()}
    return {}


def _family(path: Path) -> str | None:
    """The family of CPUs whose record a file is; None if it is none."""
    with suppress(*_UNREADABLE):
        return str(json.loads(path.read_bytes())["family"])
    return None


def rows_by_step(path: Path, machine: str) -> dict[str, dict[str, Any]]:
    """The rows of a record by their `step`; none if it cannot be read, or is of another machine or other versions."""
    with suppress(*_UNREADABLE):
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
