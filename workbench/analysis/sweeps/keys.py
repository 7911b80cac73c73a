"""The key of a point: a digest of its scenario, its schedule, the reader and the code that reads."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from workbench.analysis.sweeps.reading import Base, Reader
from workbench.core.errors import ScenarioError
from workbench.core.result import versions
from workbench.pipeline import Pipeline, Stack, ranges_of
from workbench.scenario import Scenario
from workbench.scenario.record import import_path, plain_part
from workbench.stages import BUILT_IN
from workbench.workload import Workload

_SOURCES = Path(__file__).parents[2]
_NOT_READ_BY = ("bench", "plots", "reproductions", "widgets")
"""Packages on which no reading depends."""


class Keys:
    """Makes the keys of points; what points have in common is read once."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._made = dict[tuple[str, int], tuple[object, str]]()
        self._reader = reader_name(base.read)

    def of(self, values: Mapping[str, Any]) -> str | None:
        """The key of a point; None for what other processes cannot know: operations and readers of the user's own.

        Raises
        ------
        WorkbenchError
            If the values do not go together.
        """
        if self._reader is None:
            return None
        scenario, schedule = self._base.at(values)
        try:
            parts = [self._part(known.name, getattr(scenario, known.name)) for known in fields(Scenario)]
            schedule_ = _digest(plain_part("schedule", schedule))
        except (ScenarioError, TypeError):
            return None
        return _digest([*parts, schedule_, self._reader, code_version()])

    def _part(self, name: str, part: object) -> str:
        """The digest of a part of the scenario, which many points share."""
        if (name, id(part)) not in self._made:
            if isinstance(part, Pipeline | Stack) and has_own_operations(part):
                raise ScenarioError("operations of the user's own have no version.")
            made = _of_workload(part) if isinstance(part, Workload) else _digest(plain_part(name, part))
            self._made[name, id(part)] = part, made  # the part is kept, so that its id stays its own
        return self._made[name, id(part)][1]


def has_own_operations(pipeline: Pipeline | Stack) -> bool:
    """True if a pipeline has operations of the user's own."""
    ops = {stage.op for each in ranges_of(pipeline) for stage in each.pipeline.stages}
    return any(op.name not in BUILT_IN and import_path(op) is not None for op in ops)


def reader_name(read: Reader) -> str | None:
    """The name of a reader of this package, with the arguments that were set; None for others."""
    function = read.func if isinstance(read, functools.partial) else read
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if not name.startswith("workbench.") or "<" in name:
        return None
    if isinstance(read, functools.partial):
        return None if read.args else f"{name}({read.keywords!r})"
    return f"{name}({{}})"


@functools.cache
def code_version() -> str:
    """A digest of the package's own code and of the versions of what it computes with."""
    made = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for path in sorted(_SOURCES.rglob("*.py")):
        if path.relative_to(_SOURCES).parts[0] not in _NOT_READ_BY:
            made.update(path.read_bytes())
    return made.hexdigest()


def _of_workload(workload: Workload) -> str:
    """The digest of a workload, whose lengths are many."""
    rest = plain_part("workload", workload) if workload.requests else [workload.name, workload.source]
    made = hashlib.sha256(json.dumps(rest).encode())
    for column in (workload.prompt_len, workload.output_len, workload.arrival, workload.ends):
        made.update(f"{column.dtype}{column.shape}".encode() + column.tobytes())
    return made.hexdigest()


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
