"""Mutations of Python source: one small change of one expression or statement each."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change: the line where it stands, the old text and the new one, and the whole changed source."""

    line: int
    old: str
    new: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module's functions, in the order of their lines.

    Annotations, decorators, error messages and functions that a GPU compiler reads are left as they are.
    """
    tree = ast.parse(source)
    for place, node in enumerate(ast.walk(tree)):
        if not getattr(node, "lineno", 0) or place not in _changeable(tree):
            continue
        for changed in _changes(node):
            whole = copy.deepcopy(tree)
            _replace(whole, place, changed)
            text = ast.unparse(ast.fix_missing_locations(whole))
            yield Mutant(node.lineno, ast.unparse(node), ast.unparse(changed), text)


def _changeable(tree: ast.Module) -> set[int]:
    """Numbers, in the order of `ast.walk`, of the nodes that stand in a function's statements."""
    cached = getattr(tree, "changeable", None)
    if cached is not None:
        return cached
    inside = set[int]()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not _compiled(function):
            for statement in function.body:
                inside |= _alive(statement)
    found = {place for place, node in enumerate(ast.walk(tree)) if id(node) in inside}
    tree.changeable = found  # type: ignore[attr-defined]
    return found


def _alive(node: ast.AST) -> set[int]:
    """Identities of a node and of all below it that run, without messages of errors."""
    if isinstance(node, ast.Raise | ast.JoinedStr) or (isinstance(node, ast.FunctionDef) and _compiled(node)):
        return set()
    found = {id(node)}
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                found |= _alive(child)
    return found


def _compiled(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What one node may become."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        changed = copy.deepcopy(node)
        changed.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield changed
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield ast.copy_location(
            ast.Constant(
                not node.value if node.value in (True, False) and isinstance(node.value, bool) else node.value + 1
            ),
            node,
        )
    elif isinstance(node, ast.If | ast.While):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.copy_location(ast.Name(NAMES[node.id], ast.Load()), node)
    elif isinstance(node, ast.Attribute) and node.attr in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.copy_location(ast.Attribute(node.value, NAMES[node.attr], ast.Load()), node)
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed


def _replace(tree: ast.Module, place: int, changed: ast.AST) -> None:
    """Put a node in the place of the one that `ast.walk` meets at that number."""
    old = next(node for number, node in enumerate(ast.walk(tree)) if number == place)
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, changed)
                return
            if isinstance(value, list) and any(child is old for child in value):
                value[[child is old for child in value].index(True)] = changed
                return
