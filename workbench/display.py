"""Tables in HTML, for notebooks and reports."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_LEFT = "style='text-align:left'"


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table of text; without a head the first column is one."""
    lines = [f"<tr>{''.join(_cell('th', text) for text in head)}</tr>"] if head else []
    for row in rows:
        first = _cell("td" if head else "th", row[0])
        lines.append(f"<tr>{first}{''.join(_cell('td', text) for text in row[1:])}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _cell(tag: str, text: str) -> str:
    return f"<{tag} {_LEFT}>{html.escape(text)}</{tag}>"
