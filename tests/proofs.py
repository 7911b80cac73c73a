"""What a costly test has shown is kept, with a digest of all it rests on: while that holds, the work is not done again.

`./lab test --all -m proved` makes those proofs that no longer hold, `./lab test --deep -m proved` every one.
"""

import ast
import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.examples import DEEP

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Proofs:
    """One file of proofs, each of a case of a test.

    Parameters
    ----------
    name : str
    starts : tuple of str
        Source files, from the root. With them count all that they import of this tree, however far away.
    data : tuple of str
        Patterns of other files that count, from the root.
    distributions : tuple of str
        Installed ones whose versions count.
    root : Path
    """

    name: str
    starts: tuple[str, ...]
    data: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    root: Path = ROOT

    @property
    def path(self) -> Path:
        return self.root / "data" / "proofs" / f"{self.name}.json"

    def files(self) -> list[Path]:
        """All that the proofs rest on."""
        found = _with_imports(self.root, [self.root / start for start in self.starts])
        for pattern in self.data:
            matched = {path for path in self.root.glob(pattern) if path.is_file()}
            if not matched:
                raise FileNotFoundError(f"{pattern} names no file that {self.name} could rest on")
            found |= matched
        return sorted(found)

    @functools.cache  # noqa: B019  # once in a process: a file that changes during the work has not been proved
    def rests_on(self) -> dict[str, str]:
        """Versions, and a digest of the files' contents: a file that is moved and not changed leaves it as it is."""
        contents = sorted(hashlib.sha256(path.read_bytes()).digest() for path in self.files())
        versions = {name: version(name).partition("+")[0] for name in self.distributions}
        return {"files": hashlib.sha256(b"".join(contents)).hexdigest()} | versions

    def shown(self) -> dict[str, Any]:
        """Outcome of every case that has been shown of the files as they stand."""
        rests_on = self.rests_on()
        if not self.path.exists():
            return {}
        found = json.loads(self.path.read_text(encoding="utf-8"))
        return dict(found["shown"]) if found["rests_on"] == rests_on else {}

    def holds(self, case: str) -> bool:
        return case in self.shown()

    def keep(self, case: str, outcome: Any) -> None:
        self._write(self.shown() | {case: outcome})

    def forget(self, case: str) -> None:
        if self.holds(case):
            self._write({name: outcome for name, outcome in self.shown().items() if name != case})

    def _write(self, shown: dict[str, Any]) -> None:
        text = json.dumps({"rests_on": self.rests_on(), "shown": dict(sorted(shown.items()))}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(f".{os.getpid()}")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(self.path)


def wanted(proofs: Proofs, case: str) -> bool:
    """Whether the work is to be done."""
    return DEEP or not proofs.holds(case)


def case_of(test: Callable[..., Any], operands: dict[str, Any]) -> str:
    """A test and its parameters; fixtures do not tell cases apart.

    Raises
    ------
    TypeError
        If a parameter is nothing that tells cases apart, which would share one proof then.
    """
    plain = {name: value for name, value in operands.items() if isinstance(value, str | int | float)}
    if lost := sorted(_parameters(test).intersection(operands).difference(plain)):
        raise TypeError(
            f"{test.__name__} has the parameter {lost[0]}, no string or number: name the cases, and look it up."
        )
    told = map(str, plain.values())
    return " ".join([test.__name__, *told])


def _parameters(test: Callable[..., Any]) -> set[str]:
    """Names of a test's operands that `pytest.mark.parametrize` gives."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    given = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in marks]
    return {name.strip() for names in given for name in (names.split(",") if isinstance(names, str) else names)}


def proved(proofs: Proofs) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test that passes by its proof, or else does the work and keeps what it returns as the outcome.

    Fixtures are made in either case, so they must leave what is costly until they are called.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @pytest.mark.proved
        @functools.wraps(test)
        def checked(**operands: Any) -> None:
            case = case_of(checked, operands)
            if wanted(proofs, case):
                proofs.forget(case)
                outcome = test(**operands)
                proofs.keep(case, "passed" if outcome is None else outcome)
                if not DEEP:
                    warnings.warn(f"the proof no longer held: commit data/proofs/{proofs.name}.json", stacklevel=1)
            assert proofs.holds(case)

        return checked

    return decorate


def _with_imports(root: Path, starts: list[Path]) -> set[Path]:
    """The files, what they import, what that imports, and the `__init__` files on the way, which may do anything."""
    found: set[Path] = set()
    todo = list(starts)
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += [file for name in _imported(path) for file in _modules(root, name, path.parent)]
    return found | {init for path in found for init in _packages(root, path)}


def _imported(path: Path) -> Iterator[str]:
    """Names of modules, and what may be modules, that a file imports anywhere in it, also by `import_module("name")`.

    Relative ones begin with dots.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:  # it counts as it is, and whoever imports it will tell
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            yield from (f"{base}.{alias.name}" if node.module else base + alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            yield from (
                word.value for word in node.args[:1] if isinstance(word, ast.Constant) and type(word.value) is str
            )


def _modules(root: Path, name: str, folder: Path) -> list[Path]:
    """The file of a module of this tree, none if it is another's; a script also imports what lies beside it."""
    dots = len(name) - len(name.lstrip("."))
    tops = [folder.joinpath(*[".."] * (dots - 1)).resolve()] if dots else [root, folder]
    places = [top.joinpath(*name.lstrip(".").split(".")) for top in tops]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return [file for file in files if file.is_file()]


def _packages(root: Path, path: Path) -> list[Path]:
    between = [folder for folder in path.parents if folder.is_relative_to(root)]
    return [folder / "__init__.py" for folder in between if (folder / "__init__.py").is_file()]
