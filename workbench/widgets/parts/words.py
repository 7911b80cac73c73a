"""Wording of errors and numbers in widgets."""

from __future__ import annotations

import re
from collections.abc import Collection

from workbench.core.display import escaped
from workbench.core.errors import WorkbenchError

_RED = "color: var(--jp-error-color1, #b00020)"
_TASK = re.compile(r"(.[₀-₉]*)(\d+)([a-z]|p\d+)?")


def alert(error: BaseException | str) -> str:
    """Format an error in one sentence, with its class if it is not the workbench's."""
    text = str(error) if isinstance(error, WorkbenchError | str) else f"{type(error).__name__}: {error}"
    return f"<span role='alert' style='{_RED}'>{escaped(text)}</span>" if text else ""


def digits(value: float) -> str:
    """Format a number with three digits, from 1,000 on with four: ``0.123``, ``45.6``, ``1,234``, ``10,720``."""
    return f"{float(f'{value:.4g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def naming(names: Collection[str]) -> str:
    """A sentence on reading names of tasks: ``Q12a is task Q in layer 12, for part a of the batch``.

    The longest name is the example. Empty for names that are not a schedule's.
    """
    longest = max((name for name in names if "." not in name), key=len, default="")
    found = _TASK.fullmatch(longest)
    if found is None:
        return ""
    code, layer, part = found.groups()
    of_batch = f", for part {part} of the batch" if part else ""
    pages = "; .0 behind a layer is the first page of its weights" if any("." in name for name in names) else ""
    return f"{longest} is task {code} in layer {layer}{of_batch}{pages}"


def roughly(seconds: float) -> str:
    """Time in whole seconds, minutes or hours: ``24 s``, ``3 min``, ``2 h``."""
    if seconds < 89.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 89.5 * 60:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3600)} h"
