"""Reference pages: the place of a package in the flow, its files one line each, and the docstrings of its modules."""

import ast
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = ("kernels_cpu", "kernels_triton")
PLACES = tomllib.loads((ROOT / "docs" / "packages.toml").read_text(encoding="utf-8"))
"""By package: what it takes and what it gives."""


def packages() -> list[Path]:
    """Packages of the workbench, and the two kernel packages."""
    inside = sorted(path.parent for path in (ROOT / "workbench").glob("*/__init__.py"))
    return [*inside, *(ROOT / name for name in KERNELS)]


def dotted(path: Path) -> str:
    """Name by which a module or package is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def modules(package: Path) -> list[Path]:
    """Modules of a package at any depth, without ``__init__``."""
    return [path for path in sorted(package.rglob("*.py")) if path.stem not in ("__init__", "__main__")]


def reference(package: Path) -> str:
    """Page of one package."""
    place = PLACES[package.name]
    rows = [(what, place[what].replace("|", "\\|")) for what in ("takes", "gives")]
    rows += [("imports", _links(imports(package))), ("is imported by", _links(importers(package)))]
    lines = [f"# `{dotted(package)}`", "", docstring(package / "__init__.py"), "", "## Place in the flow", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {told} |" for name, told in rows)]
    lines += ["", "## Files", "", *_files(package)]
    for module in modules(package):
        name = dotted(module)
        lines += ["", f"({_label(module)})=", f"## `{name}`", "", "```{eval-rst}"]
        lines += [f".. automodule:: {name}", "   :members:", "```"]
    return "\n".join([*lines, ""])


def docstring(path: Path) -> str:
    """Docstring of a module."""
    return ast.get_docstring(_tree(path)) or ""


def first_sentence(path: Path) -> str:
    """First paragraph of a module's docstring, for a cell of a table."""
    paragraph = docstring(path).partition("\n\n")[0]
    return paragraph.replace("\n", " ").replace("|", "\\|")


@cache
def imports(package: Path) -> list[str]:
    """Packages that the modules of this one import, by their names."""
    found = set[str]()
    for path in package.rglob("*.py"):
        found.update(_imported(path))
    names = [each.name for each in packages()]
    return [name for name in names if name in found and name != package.name]


def importers(package: Path) -> list[str]:
    """Packages that import this one."""
    return [other.name for other in packages() if package.name in imports(other)]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(path: Path) -> Iterable[str]:
    """Names of the packages that one module imports: the second part of ``workbench.core``, or the kernels'."""
    for node in ast.walk(_tree(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first in KERNELS:
                yield first
            if first == "workbench" and rest:
                yield rest[0]


def _files(package: Path) -> list[str]:
    """Table of the package's files; those of an inner package stand under it."""
    return ["| file | content |", "|---|---|", *_rows(package, package)]


def _rows(folder: Path, package: Path) -> Iterable[str]:
    for path in _entries(folder):
        yield _row(path, package)
        if path.is_dir():
            yield from _rows(path, package)


def _entries(folder: Path) -> list[Path]:
    """Modules of a folder, then its inner packages."""
    files = [path for path in sorted(folder.glob("*.py")) if path.stem not in ("__init__", "__main__")]
    return [*files, *sorted(path.parent for path in folder.glob("*/__init__.py"))]


def _row(path: Path, package: Path) -> str:
    shown = path.relative_to(package).as_posix()
    if path.is_dir():
        return f"| **`{shown}/`** | {first_sentence(path / '__init__.py')} |"
    return f"| [`{shown}`](#{_label(path)}) | {first_sentence(path)} |"


def _label(module: Path) -> str:
    return f"file-{dotted(module)}".replace(".", "-").replace("_", "-").lower()


def _links(names: Iterable[str]) -> str:
    linked = [f"[`{name}`]({page(name)})" for name in names]
    return ", ".join(linked) or "none"


def page(name: str) -> str:
    """File name of a package's page."""
    return f"{name}.md" if name in KERNELS else f"workbench.{name}.md"
