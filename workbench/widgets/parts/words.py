"""Wording of errors and numbers in widgets."""

from __future__ import annotations

from workbench.core.display import escaped
from workbench.core.errors import WorkbenchError

_RED = "color: var(--jp-error-color1, #b00020)"


def alert(error: BaseException | str) -> str:
    """Format an error in one sentence, with its class if it is not the workbench's."""
    text = str(error) if isinstance(error, WorkbenchError | str) else f"{type(error).__name__}: {error}"
    return f"<span role='alert' style='{_RED}'>{escaped(text)}</span>" if text else ""


def digits(value: float) -> str:
    """Format a number with three digits, or all before the point: ``0.123``, ``45.6``, ``1,234``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
