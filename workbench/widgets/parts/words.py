"""Wording of the dashboard's errors and explanations."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.analysis.sweep import SweepPoint
from workbench.core.display import escaped
from workbench.core.errors import WorkbenchError
from workbench.core.result import Source
from workbench.core.units import format_bytes

_RED = "color: var(--jp-error-color1, #b00020)"


def alert(error: BaseException | str) -> str:
    """Format an error in one sentence, with its class if it is not the workbench's."""
    text = str(error) if isinstance(error, WorkbenchError | str) else f"{type(error).__name__}: {error}"
    return f"<span role='alert' style='{_RED}'>{escaped(text)}</span>" if text else ""


def digits(value: float) -> str:
    """Format a number with three digits, or all before the point: ``0.123``, ``45.6``, ``1,234``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def in_figures(point: SweepPoint) -> str:
    """Sum up the curves at one KV capacity: the rates, and the reasons of schedules that have none."""
    rates = [
        f"{'bound' if result.source is Source.BOUND else result.schedule} {digits(result.gen_tok_s)}"
        for result in point.results
    ]
    without = "".join(f" {name}: {why}" for name, why in point.refused)
    return escaped(f"At {format_bytes(point.kv_capacity)}: {', '.join(rates)} output tok/s.{without}")


def paragraphs(sentences: Iterable[str]) -> str:
    """Format sentences as HTML paragraphs."""
    return "".join(f"<p>{escaped(sentence)}</p>" for sentence in sentences)
