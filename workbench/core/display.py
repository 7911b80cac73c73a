"""Display in notebooks: short names of configured objects, and tables in HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

_LEFT = "style='text-align:left'"


def short_name(configured: Any) -> str:
    """Class name of a dataclass, and the fields that differ from their defaults."""
    chosen = [(f.name, getattr(configured, f.name), f.default) for f in fields(configured)]
    changed = ", ".join(f"{name}={value!r}" for name, value, default in chosen if value != default)
    return f"{type(configured).__name__}({changed})" if changed else type(configured).__name__


def escaped(text: str) -> str:
    """Escape text for HTML, so that tags in it are shown and not interpreted; all text goes into HTML through this."""
    return html.escape(text)


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """An HTML table of text; without a head, the first column is set as headings."""
    lines = [f"<tr>{''.join(_cell('th', text) for text in head)}</tr>"] if head else []
    for row in rows:
        first = _cell("td" if head else "th", row[0])
        lines.append(f"<tr>{first}{''.join(_cell('td', text) for text in row[1:])}</tr>")
    return f"<table>{''.join(lines)}</table>"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines whose columns stand below one another."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def _cell(tag: str, text: str) -> str:
    return f"<{tag} {_LEFT}>{escaped(text)}</{tag}>"
