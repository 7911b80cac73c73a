"""Pipelines read from code: the words of the algebra are read, and nothing of the text is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Any, NoReturn

from workbench.core.errors import PipelineError
from workbench.pipeline.algebra import Pipeline, cpu, fetch, gpu, load, offload
from workbench.pipeline.elements import located
from workbench.pipeline.stack import Stack
from workbench.stages import BUILT_IN, ExpertSet, Op, Streamed, attention, flatten, kv, moe, weights

PIPELINE_WORDS: Mapping[str, Any] = {
    "Pipeline": Pipeline,
    "cpu": cpu,
    "fetch": fetch,
    "gpu": gpu,
    "load": load,
    "offload": offload,
}
STAGE_WORDS: Mapping[str, Any] = {
    **BUILT_IN,
    "ExpertSet": ExpertSet,
    "attention": attention,
    "kv": kv,
    "moe": moe,
    "weights": weights,
}
WORDS: Mapping[str, Any] = {**PIPELINE_WORDS, **STAGE_WORDS, "slice": slice}
"""The words that pipelines are written with, and what each of them means."""

_MODULES = {"workbench.pipeline": PIPELINE_WORDS, "workbench.stages": STAGE_WORDS}
_MOST_BYTES = 100_000
_MOST_LEVELS = 100
_MOST_ELEMENTS = 200
_MOST_ITEMS = 50_000
_MOST_RANGES = 1000
_CALLED: dict[Any, tuple[str, ...]] = {
    gpu: ("skip",),
    cpu: ("defer", "skip"),
    fetch: (),
    ExpertSet: ("name", "table", "bounds", "rest"),
    ExpertSet.of_slice: ("which",),
    slice: (),
    Pipeline: (),
}
"""What can be called, with the names of the arguments that it takes by name."""
_ATTRIBUTES = ("chosen", "decode", "prefill", "weights")
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.Add: operator.add,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.Invert: operator.invert, ast.USub: operator.neg}
_ONLY = "write pipelines with gpu, cpu, fetch, offload, load, >>, |, + and [a:b] alone"


def pipeline_of(text: str, names: Mapping[str, Op | ExpertSet] | None = None) -> Pipeline | Stack:
    """The pipeline or stack that the last assignment or expression of a cell gives; nothing of the text is run.

    It is read as Python would run it, if it has nothing but the words of the algebra, names that it assigns, and the
    given names. Lines that import these words may stand in it or be left out.

    Parameters
    ----------
    text : str
        At most 100 kB.
    names : mapping of str to Op or ExpertSet, optional
        What the user has defined, by the names of its variables. A word of the algebra keeps its meaning.

    Raises
    ------
    PipelineError
        If the text is anything else, or the wiring is refused; its `line` is that of the text.
    """
    if len(text.encode(errors="replace")) > _MOST_BYTES:
        raise PipelineError("a cell of more than 100 kB is not read; pass large sets of experts by name.", line=1)
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise PipelineError(
            f"line {error.lineno or 1}: this is no Python ({error.msg:.80}); {_ONLY}.", line=error.lineno or 1
        ) from None
    except (RecursionError, MemoryError, ValueError):
        raise PipelineError("line 1: the text is nested too deeply to be read; wire it in steps.", line=1) from None
    return _Reader(names or {}).cell(module)


class _Reader:
    """Reads the statements of a cell in order."""

    def __init__(self, names: Mapping[str, Op | ExpertSet]) -> None:
        self._known: dict[str, Any] = {**names, **WORDS}

    def cell(self, module: ast.Module) -> Pipeline | Stack:
        """The value of the last statement that is no import."""
        last: tuple[int, Any] | None = None
        for statement in module.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._import(statement)
            elif isinstance(statement, ast.Assign):
                last = statement.lineno, self._value(statement.value, 0)
                for target in statement.targets:
                    self._assign(target, last[1])
            elif isinstance(statement, ast.Expr):
                last = statement.lineno, self._value(statement.value, 0)
            else:
                _refuse(statement, f"a line that is no assignment is not read here; {_ONLY}")
        if last is None:
            raise PipelineError("the cell is empty; write a pipeline, as in layer = gpu(qkv, attention).", line=1)
        line, value = last
        if not isinstance(value, Pipeline | Stack):
            raise _at(
                line, f"the last line gives {_described(value)}, not a pipeline; end with layer = gpu(...) >> ..."
            )
        return value

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Check an import, and bind what it names."""
        module = statement.module if isinstance(statement, ast.ImportFrom) and not statement.level else None
        if isinstance(statement, ast.Import) and all(each.name == "workbench" for each in statement.names):
            return
        words = _MODULES.get(module or "")
        if words is None:
            _refuse(statement, "only imports from workbench.pipeline and workbench.stages are read here; leave it out")
        for each in statement.names:
            if each.name not in words:
                near = _nearest(each.name, words) or f"the words are {', '.join(sorted(words))}"
                _refuse(statement, f"{module} has no {each.name} to wire with; {near}")
            self._known[each.asname or each.name] = words[each.name]

    def _assign(self, target: ast.expr, value: Any) -> None:
        if not isinstance(target, ast.Name):
            _refuse(target, "a pipeline is assigned to one name; write layer = ...")
        self._known[target.id] = value

    # ---------------------------------------------------------------------------------------------------- expressions

    def _value(self, node: ast.expr, level: int) -> Any:
        """The value of an expression that stands so many brackets deep."""
        if level > _MOST_LEVELS:
            _refuse(node, "the text is nested too deeply to be read; wire it in steps")
        if isinstance(node, ast.BinOp):
            return self._binary(node, level)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, int | str)):
            return node.value
        if isinstance(node, ast.Call):
            return self._call(node, level + 1)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, level + 1)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, level + 1)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return self._unary(node, level + 1)
        if isinstance(node, ast.Tuple | ast.List):
            items = list(islice(self._items(node.elts, level + 1), _MOST_ITEMS + 1))
            if len(items) > _MOST_ITEMS:
                _refuse(node, f"a list of more than {_MOST_ITEMS} parts is not read; give a set of experts by name")
            return tuple(items) if isinstance(node, ast.Tuple) else items
        _refuse(node, f"{_excerpt(node)} is no part of a pipeline; {_ONLY}")

    def _items(self, nodes: list[ast.expr], level: int) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self._value(node.value, level)
                if not isinstance(value, tuple | list):
                    _refuse(node, f"* takes a tuple of operations, not {_described(value)}; leave the * out")
                yield from value
            else:
                yield self._value(node, level)

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._known:
            return self._known[node.id]
        near = _nearest(node.id, self._known) or "assign it in a line above, or define the operation in a cell before"
        _refuse(node, f"{node.id!r} is not known; {near}")

    def _binary(self, node: ast.BinOp, level: int) -> Any:
        """The value of a row of operators; they are taken from the left, however many there are."""
        row: list[ast.BinOp] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp):
            row.append(left)
            left = left.left
        value = self._value(left, level + 1)
        for each in reversed(row):
            apply = _BINARY.get(type(each.op))
            if apply is None:
                _refuse(each, f"this operator is no part of a pipeline; {_ONLY}")
            right = self._value(each.right, level + 1)
            unplaced = next((side for side in (value, right) if not isinstance(side, Pipeline | Stack)), None)
            if unplaced is not None:
                _refuse(each.right, f"operators join pipelines, not {_described(unplaced)}; place it first: gpu(...)")
            value = _tried(each.right, partial(apply, value, right))
            _check_size(each.right, value)
        return value

    def _unary(self, node: ast.UnaryOp, level: int) -> Any:
        value = self._value(node.operand, level)
        numbers = isinstance(value, int)
        if not numbers and not (isinstance(value, ExpertSet) and isinstance(node.op, ast.Invert)):
            _refuse(node, f"~ takes a set of experts, not {_described(value)}; write experts[~hot]")
        return _UNARY[type(node.op)](value)

    def _attribute(self, node: ast.Attribute, level: int) -> Any:
        value = self._value(node.value, level)
        if value is ExpertSet and node.attr == "of_slice":
            return ExpertSet.of_slice
        if not isinstance(value, Op) or node.attr not in _ATTRIBUTES:
            near = _nearest(node.attr, _ATTRIBUTES) or f"operations have {', '.join(_ATTRIBUTES)}"
            _refuse(node, f"{_described(value)} has no .{node.attr}; {near}")
        return _tried(node, lambda: getattr(value, node.attr))

    def _subscript(self, node: ast.Subscript, level: int) -> Any:
        value = self._value(node.value, level)
        if not isinstance(value, Op | Pipeline):
            _refuse(
                node, f"[...] stands behind experts or a whole pipeline, not behind {_described(value)}; leave it out"
            )
        if isinstance(node.slice, ast.Slice):
            edges = (node.slice.lower, node.slice.upper, node.slice.step)
            which: Any = slice(*(None if edge is None else self._value(edge, level) for edge in edges))
        else:
            which = self._value(node.slice, level)
        return _tried(node, lambda: value[which])

    def _call(self, node: ast.Call, level: int) -> Any:
        called = self._value(node.func, level)
        takes = next((names for one, names in _CALLED.items() if one == called), None)
        if takes is None:
            _refuse(node, f"{_described(called)} is not called; write gpu(...), cpu(...) or fetch(...) around it")
        if called is Pipeline and (node.args or node.keywords):
            _refuse(node, "Pipeline() takes nothing here; write the layer with gpu(...) >> ...")
        arguments = list(self._items(node.args, level))
        named: dict[str, Any] = {}
        for each in node.keywords:
            if each.arg not in takes:
                known = f"it takes {' and '.join(f'{name}=' for name in takes)}" if takes else "leave it out"
                _refuse(node, f"{_described(called)}(...) takes no {each.arg or '**'}=; {known}")
            named[each.arg] = self._value(each.value, level)
        if called in (gpu, cpu):
            arguments = list(islice(flatten(tuple(arguments)), _MOST_ELEMENTS + 1))
        made = _tried(node, partial(called, *arguments, **named))
        _check_size(node, made)
        return made


def _check_size(node: ast.expr, value: Any) -> None:
    """Refuse what would take long to wire: no layer is so long, and no model so deep."""
    if isinstance(value, Pipeline) and len(list(islice(located(value.chain), _MOST_ELEMENTS + 1))) > _MOST_ELEMENTS:
        _refuse(node, f"a layer of more than {_MOST_ELEMENTS} stages and transfers is not read; leave some out")
    if isinstance(value, Stack) and len(value.ranges) > _MOST_RANGES:
        _refuse(node, f"a stack of more than {_MOST_RANGES} ranges is not read; merge some")


def _tried(node: ast.expr, made: Callable[[], Any]) -> Any:
    """The value of a call; what it refuses is told with its line."""
    try:
        return made()
    except PipelineError as error:
        raise _at(node.lineno, str(error)) from None
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise _at(node.lineno, f"{_excerpt(node)} cannot be read ({error!s:.80}); {_ONLY}.") from None


def _nearest(name: str, known: Any) -> str:
    """A suggestion, or nothing if no known name is near."""
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else ""


def _described(value: Any) -> str:
    """A value as an error names it."""
    if isinstance(value, Op | Streamed):
        return f"{value.name}"
    if isinstance(value, Pipeline | Stack):
        return "a pipeline" if isinstance(value, Pipeline) else "a range of layers"
    if isinstance(value, ExpertSet):
        return f"the set of experts {str(value)!r}"
    word = next((word for word, meaning in WORDS.items() if meaning is value), None)
    kinds = {int: "a number", bool: "a truth value", str: "a text", tuple: "a tuple", list: "a list"}
    return word or kinds.get(type(value), "None" if value is None else "this")


def _excerpt(node: ast.expr) -> str:
    """The beginning of an expression as it is written."""
    try:
        return f"{ast.unparse(node):.40}"
    except (RecursionError, ValueError):
        return "this"


def _at(line: int, text: str) -> PipelineError:
    return PipelineError(f"line {line}: {text}", line=line)


def _refuse(node: ast.stmt | ast.expr, text: str) -> NoReturn:
    mark = "" if text.endswith("?") else "."
    raise _at(node.lineno, f"{text}{mark}")
