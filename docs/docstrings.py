"""Docstrings as reStructuredText: indented formulas become literal blocks, and marks of prose mean themselves."""

import re

HEADINGS = ("Parameters", "Returns", "Raises", "Notes", "Attributes", "Examples", "References", "See Also", "Yields")
CODE = re.compile(r"(``.+?``|`[^`]+`)")
MARKS = re.compile(r"(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)")


def as_rst(app, what, name, obj, options, lines):
    """Rewrite a docstring in place, before napoleon reads it."""
    lines[:] = rewritten(lines)


def rewritten(lines):
    """The lines with formulas as literal blocks."""
    out = []
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


def _margin(lines, number):
    before = [line for line in lines[:number] if line.strip()]
    return len(before[-1]) - len(before[-1].lstrip()) if before else 0


def _opens(lines, number, indent):
    """True if an indented block begins here, after an empty line."""
    if number == 0 or lines[number - 1].strip():
        return False
    return indent > _margin(lines, number)


def _announced(lines, number):
    before = [line for line in lines[:number] if line.strip()]
    return bool(before) and before[-1].rstrip().endswith("::")


def _plain(line):
    """A line whose stars, bars and trailing underscores are no markup."""
    parts = CODE.split(line)
    return "".join(part if CODE.fullmatch(part) else _escaped(part) for part in parts)


def _escaped(text):
    return MARKS.sub(lambda found: "\\" + found[0], text)
