"""Pipelines as the code that makes them: a notebook cell that gives an equal pipeline when it runs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import count
from keyword import iskeyword
from typing import NamedTuple

from workbench.core.errors import PipelineError
from workbench.pipeline.algebra import Pipeline
from workbench.pipeline.elements import Element, Fork, bracketed
from workbench.pipeline.parsing import PIPELINE_WORDS, STAGE_WORDS, WORDS
from workbench.pipeline.stack import Stack
from workbench.stages import (
    BUILT_IN,
    ExpertSet,
    Move,
    Op,
    RowClass,
    Stage,
    Streamed,
    attention,
    combine,
    experts,
    kv,
    moe,
    weights,
)

_WIDTH = 60  # columns that the builder has room for beside its figures, in a view of 1,200 pixels
_STEP = "    "
TOGETHER = {"attention": tuple(op.name for op in attention), "moe": tuple(op.name for op in moe)}
"""Words that stand for several operations in a row."""
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")


def code_of(pipeline: Pipeline | Stack, names: Mapping[str, Op | ExpertSet] | None = None, name: str = "layer") -> str:
    """A notebook cell that assigns an equal pipeline or stack to a name: imports, sets of experts, the assignment.

    Parameters
    ----------
    pipeline : Pipeline or Stack
        As the algebra or the edits of this package make it.
    names : mapping of str to Op or ExpertSet, optional
        What the user has defined, by the names of its variables. An operation that is not among them is written under
        its own name, and a comment says that it must be defined before.
    name : str
        The variable that the cell assigns.

    Returns
    -------
    str
        Lines of at most 60 columns, a single longer word apart.

    Raises
    ------
    PipelineError
        If `name` cannot be the name of a variable, or `fetch` names weights of an operation that is nowhere else.
    """
    if name in WORDS or not _is_variable(name):
        raise PipelineError(f"name={name!r} is no name for a new variable; give one, as in name='layer'.")
    return _Cell(pipeline, names or {}, name).text()


def _is_variable(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name) and unicodedata.normalize("NFKC", name) == name


# ------------------------------------------------------------------------------------------------------------ layout


class _Group(NamedTuple):
    """Parts in brackets: on one line if they fit, else one on each.

    Attributes
    ----------
    parts : tuple of (str, text or group)
        Each with what stands before it on one line: nothing, a comma or an operator.
    soft : bool
        True if the brackets are needed only where the parts stand on several lines.
    filled : bool
        True if lines are to be filled with as many parts as fit.
    """

    opening: str
    parts: tuple[tuple[str, _Text], ...]
    closing: str
    soft: bool = False
    filled: bool = False


_Text = str | _Group


def _listed(
    opening: str, items: tuple[_Text, ...], closing: str, *, soft: bool = False, filled: bool = False
) -> _Group:
    """Parts with commas between them."""
    return _chained(opening, items, ", ", closing, soft=soft, filled=filled)


def _chained(
    opening: str, items: tuple[_Text, ...], joint: str, closing: str, *, soft: bool = False, filled: bool = False
) -> _Group:
    parts = tuple((joint if number else "", item) for number, item in enumerate(items))
    return _Group(opening, parts, closing, soft, filled)


def _flat(text: _Text) -> str:
    """The text on one line."""
    if isinstance(text, str):
        return text
    inside = "".join(joint + _flat(part) for joint, part in text.parts)
    return inside if text.soft else f"{text.opening}{inside}{text.closing}"


def _laid_out(text: _Text, start: str, end: str = "", indent: str = "") -> list[str]:
    """Lines of a text behind the start of a line, with `end` behind them, that keep to the width as far as they can."""
    line = f"{start}{_flat(text)}{end}"
    if isinstance(text, str) or len(line) <= _WIDTH:
        return [line]
    inner = indent + _STEP
    lines = [f"{start}{text.opening}"]
    for joint, part in text.parts:
        if joint in ("", ", "):
            comma = "," if text.parts[-1][0] in ("", ", ") else ""
            if text.filled and joint and len(lines[-1]) + len(_flat(part)) + 2 <= _WIDTH:
                lines[-1] = f"{lines[-1]} {_flat(part)}{comma}"
            else:
                lines += _laid_out(part, inner, comma, inner)
        else:
            lines += _laid_out(part, f"{inner}{joint.lstrip()}", "", inner)
    return [*lines, f"{indent}{text.closing}{end}"]


# ----------------------------------------------------------------------------------------------------------- the cell


class _Cell:
    """The cell of one pipeline or stack, with what has to be imported and defined for it."""

    def __init__(self, what: Pipeline | Stack, names: Mapping[str, Op | ExpertSet], name: str) -> None:
        self._pipelines = [each.pipeline for each in what.ranges] if isinstance(what, Stack) else [what]
        self._what = what
        self._name = name
        self._given = {key: value for key, value in names.items() if key not in WORDS and _is_variable(key)}
        self._taken = {*WORDS, *self._given, name}
        self._used: set[str] = set()
        self._sets: dict[ExpertSet, str] = {}
        self._unknown: dict[Op, str] = {}
        subsets = (stage.op.subset for pipeline in self._pipelines for stage in pipeline.stages)
        self._inverted = {~subset for subset in subsets if subset is not None and subset.rest}

    def text(self) -> str:
        """All lines of the cell."""
        lines = _laid_out(self._whole(), f"{self._name} = ")
        sets: list[str] = []
        for subset, name in self._sets.items():
            sets += _laid_out(self._definition(subset), f"{name} = ")
        comments = [f"# define {name} before this: your Op({op.name!r}, ...)" for op, name in self._unknown.items()]
        return "\n".join([*self._imports(), "", *comments, *sets, *lines]) + "\n"

    def _imports(self) -> list[str]:
        lines: list[str] = []
        for module, words in (("pipeline", PIPELINE_WORDS), ("stages", STAGE_WORDS)):
            used = tuple(sorted(self._used.intersection(words), key=lambda word: (word.islower(), word)))
            if used:
                lines += _laid_out(_listed("(", used, ")", soft=True, filled=True), f"from workbench.{module} import ")
        return lines

    def _word(self, word: str) -> str:
        self._used.add(word)
        return word

    def _whole(self) -> _Text:
        if isinstance(self._what, Pipeline):
            whole = self._pipeline(self._what)
            return whole._replace(soft=True) if isinstance(whole, _Group) and whole.opening == "(" else whole
        ranges = tuple(_behind(self._pipeline(each.pipeline), each.slice) for each in self._what.ranges)
        return ranges[0] if len(ranges) == 1 else _chained("(", ranges, " + ", ")", soft=True)

    def _pipeline(self, pipeline: Pipeline) -> _Text:
        items = self._items(pipeline.chain)
        if pipeline.fetches:
            fetched = tuple(self._streamed(item, pipeline) for item in pipeline.fetches)
            fetch = _listed(f"{self._word('fetch')}(", fetched, ")")
            parts = [(" >> " if number else " | ", item) for number, item in enumerate(items)]
            return _Group("(", (("", fetch), *parts), ")") if parts else fetch
        if len(items) == 1:
            return items[0]
        return _chained("(", items, " >> ", ")") if items else f"{self._word('Pipeline')}()"

    def _items(self, chain: tuple[Element, ...]) -> tuple[_Text, ...]:
        """The pieces of a chain."""
        items: list[_Text] = []
        for piece in bracketed(chain):
            first = piece[0]
            if isinstance(first, Fork):
                items.append(self._fork(first))
            elif isinstance(first, Move):
                items.append(self._word(str(first)))
            else:
                items.append(self._placed([element for element in piece if isinstance(element, Stage)]))
        return tuple(items)

    def _fork(self, fork: Fork) -> _Text:
        arms: list[_Text] = []
        for arm in fork.arms:
            items = self._items(arm)
            arms.append(items[0] if len(items) == 1 else _chained("(", items, " >> ", ")", soft=True))
        return _chained("(", tuple(arms), " | ", ")") if len(arms) > 1 else arms[0]

    def _placed(self, run: list[Stage]) -> _Group:
        """Stages that follow one another on one device."""
        words = [self._op(stage.op) for stage in run]
        for name, parts in TOGETHER.items():
            for first in range(len(words) - len(parts) + 1):
                if tuple(words[first : first + len(parts)]) == parts:
                    words[first : first + len(parts)] = [name]
        self._used.update(STAGE_WORDS.keys() & set(words))
        return _listed(f"{self._word(run[0].device.value)}(", (*words, *run[0].options), ")")

    # ---------------------------------------------------------------------------------- operations, weights and sets

    def _op(self, op: Op) -> str:
        """An operation as it is written; words that stand for it alone are imported by who places it."""
        if op.plain is combine or BUILT_IN.get(op.name) == op:
            return op.plain.name
        if op.plain is experts:
            some = "" if op.subset is None else f"[{self._subset(op.subset)}]"
            rows = "" if op.rows is RowClass.ALL else f".{op.rows.value}"
            return f"{self._word('experts')}{some}{rows}"
        name = next((key for key, value in self._given.items() if value == op), self._unknown.get(op))
        if name is None:
            name = self._unknown[op] = self._new_name(op.name, "own")
        return name

    def _streamed(self, item: Streamed, pipeline: Pipeline) -> str:
        if item in (weights, kv):
            return self._word(item.name)
        op = next((op for op in self._streamable(item, pipeline) if op.name == item.op), None)
        if op is None:
            raise PipelineError(
                f"fetch({item.name}) names an operation that is neither in the pipeline nor among the given names; "
                "leave it out."
            )
        word = self._op(op)
        self._used.update(STAGE_WORDS.keys() & {word})
        return f"{word}.{'chosen' if item.chosen else 'weights'}"

    def _streamable(self, item: Streamed, pipeline: Pipeline) -> Iterator[Op]:
        """Operations that can be meant by something that is fetched."""
        placed = [stage.op for stage in pipeline.stages]
        given = [value for value in self._given.values() if isinstance(value, Op)]
        yield from (*placed, *BUILT_IN.values(), *given)
        yield from (op.holder for op in placed)
        subsets: list[ExpertSet | None] = [None, *(op.subset for op in placed)]
        subsets += [value for value in self._given.values() if isinstance(value, ExpertSet)]
        named = re.fullmatch(r"experts\[(.*)\](\.prefill|\.decode)?", item.op or "")
        bounds = _SLICE.fullmatch(named[1].removeprefix("~")) if named else None
        if bounds:
            subsets.append(_of_bounds(bounds))
        for subset in subsets:
            for one in (subset, None if subset is None else ~subset):
                base = experts if one is None else experts[one]
                yield from (base, base.prefill, base.decode)

    def _subset(self, subset: ExpertSet) -> str:
        """A set as it stands in the brackets behind `experts`."""
        given = {value: key for key, value in self._given.items() if isinstance(value, ExpertSet)} | self._sets
        if subset in given:
            return given[subset]
        if ~subset in given:
            return f"~{given[~subset]}"
        base = ~subset if subset.rest else subset
        bounds = _SLICE.fullmatch(base.name)
        if bounds and base not in self._inverted and _of_bounds(bounds) == subset:
            return base.name
        name = self._sets[base] = self._new_name(base.name, "experts")
        return f"~{name}" if subset.rest else name

    def _definition(self, subset: ExpertSet) -> _Group:
        """The call that makes a set of experts."""
        arguments: list[_Text] = [_quoted(subset.name)]
        if subset.table:
            rows = tuple(_listed("[", tuple(map(str, row)), "]", filled=True) for row in subset.table)
            arguments.append(_listed("[", rows, "]"))
        if subset.bounds is not None:
            arguments.append(f"bounds={subset.bounds}")
        return _listed(f"{self._word('ExpertSet')}(", tuple(arguments), ")")

    def _new_name(self, text: str, kind: str) -> str:
        """The name of a variable that is not taken, as near to a text as it can be."""
        letters = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", text)).strip("_")
        name = next((each for each in (letters, f"{kind}_{letters}") if _is_variable(each)), kind)
        tries = (f"{name}_{number}" if number > 1 else name for number in count(1))
        free = next(each for each in tries if each not in self._taken)
        self._taken.add(free)
        return free


def _behind(text: _Text, suffix: str) -> _Text:
    if isinstance(text, str):
        return text + suffix
    return text._replace(closing=text.closing + suffix, soft=False)


def _of_bounds(found: re.Match[str]) -> ExpertSet:
    first, stop = (None if edge is None else int(edge) for edge in found.groups())
    return ExpertSet.of_slice(slice(first, stop))


def _quoted(text: str) -> str:
    """A text in double quotes, if it holds none."""
    written = repr(text)
    return f'"{written[1:-1]}"' if written[0] == "'" and '"' not in text else written
