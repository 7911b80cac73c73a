"""Docstrings as reStructuredText: indented formulas become literal blocks, and marks of prose mean themselves."""

import re
from collections.abc import Sequence
from typing import Any

CODE = re.compile(r"(``.+?``|`[^`]+`)")
MARKS = re.compile(r"(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)")


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place, before napoleon reads it.

    Napoleon takes what stands before a colon in the first line of an attribute for its type; an empty comment
    before it prevents that.
    """
    first = ["..", ""] if what in ("attribute", "data", "property") else []
    lines[:] = [*first, *rewritten(lines)]


def rewritten(lines: Sequence[str]) -> list[str]:
    """The lines with formulas as literal blocks."""
    out: list[str] = []
    literal = False
    margin = 0
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal:
            if line.strip() and indent <= margin:
                literal = False
            else:
                out.append(line)
                continue
        if line.strip() and _opens(lines, number, indent):
            margin = _margin(lines, number)
            if not _announced(lines, number):
                out += [" " * margin + "::", ""]
            literal = True
            out.append(line)
            continue
        out.append(_plain(line))
    return out


def _margin(lines: Sequence[str], number: int) -> int:
    before = [line for line in lines[:number] if line.strip()]
    return len(before[-1]) - len(before[-1].lstrip()) if before else 0


def _opens(lines: Sequence[str], number: int, indent: int) -> bool:
    """True if an indented block begins here, after an empty line."""
    if number == 0 or lines[number - 1].strip():
        return False
    return indent > _margin(lines, number)


def _announced(lines: Sequence[str], number: int) -> bool:
    before = [line for line in lines[:number] if line.strip()]
    return bool(before) and before[-1].rstrip().endswith("::")


def _plain(line: str) -> str:
    """A line whose stars, bars and trailing underscores are no markup."""
    parts = CODE.split(line)
    return "".join(part if CODE.fullmatch(part) else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    return MARKS.sub(lambda found: "\\" + found[0], text)
