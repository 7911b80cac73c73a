"""The shape of the tree: who may import whom, what importing costs, how deep and under what names files lie."""

import ast
import functools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("workbench", "kernels_cpu", "kernels_triton")
HEAVY = ("torch", "triton", "numba", "matplotlib", "pandas")
SAYS_NOTHING = {"utils", "util", "common", "helpers", "helper", "handlers", "handler", "manager", "misc"}
IMPORT_SECONDS = 1.0
MOST_ENTRIES, MOST_LEVELS, MOST_LAYERS = 12, 3, 11
ALIKE = {
    "workbench": "the list of packages, bounded by the layers of the contract",
    "workbench/models/families": "one file per family",
    "workbench/reproductions": "one file per paper",
    "workbench/schedules": "one file per schedule",
}
"""Folders of alike entries, which may be many, and what an entry is."""


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def folders() -> list[Path]:
    """Packages of the library, at any depth."""
    return sorted({path.parent for path in sources()})


def entries(folder: Path) -> list[str]:
    """Modules and packages in a folder; neither `__init__`, `__main__` nor data."""
    inside = {path.relative_to(folder).parts[0] for path in sources() if path.is_relative_to(folder)}
    return sorted(inside - {"__init__.py", "__main__.py"})


def contract(name: str) -> dict[str, object]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = (each for each in settings["contracts"] if each["id"] == name)
    return found


def in_root(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


def import_workbench() -> tuple[float, set[str]]:
    """Seconds that `import workbench` takes in a fresh interpreter, and the top-level modules it loads."""
    code = (
        "import json, sys, time; began = time.perf_counter(); import workbench; seconds = time.perf_counter() - began;"
        "print(json.dumps([seconds, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    run = in_root("-c", code)
    assert run.returncode == 0, run.stderr
    seconds, modules = json.loads(run.stdout)
    return seconds, set(modules)


def test_imports_keep_the_contracts():
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = in_root("-c", lint, "--no-cache", "--no-logo")
    assert run.returncode == 0, run.stdout + run.stderr


def test_views_do_without_torch_until_a_run_starts():
    run = in_root("-c", "import sys, workbench.widgets; print(*sys.modules)")
    assert run.returncode == 0, run.stderr
    assert {"torch", "triton"}.isdisjoint(run.stdout.split())


@pytest.mark.alone
def test_importing_the_workbench_is_quick_and_light():
    runs = [import_workbench() for _ in range(3)]
    assert runs[0][1].isdisjoint(HEAVY)
    assert min(seconds for seconds, _ in runs) < IMPORT_SECONDS


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_nest_three_levels_at_most(package):
    levels = {path: len(path.relative_to(ROOT).parts) for path in folders() if path.is_relative_to(ROOT / package)}
    assert [path for path, level in levels.items() if level > MOST_LEVELS] == []


def test_a_package_has_twelve_entries_at_most_unless_they_are_alike():
    found = {path.relative_to(ROOT).as_posix(): entries(path) for path in folders()}
    assert {name: each for name, each in found.items() if len(each) > MOST_ENTRIES and name not in ALIKE} == {}


def test_workbench_lists_its_packages_and_nothing_else():
    files = {path.name for path in (ROOT / "workbench").iterdir() if path.is_file()}
    assert files <= {"__init__.py", "__main__.py", "py.typed"}


def test_every_package_says_what_it_is_for():
    silent = [path for path in folders() if not ast.get_docstring(ast.parse((path / "__init__.py").read_text()))]
    assert silent == []


def test_the_layers_are_few_and_without_exceptions():
    layers = contract("layers")
    assert len(layers["layers"]) <= MOST_LAYERS
    assert layers["exhaustive"]
    assert "ignore_imports" not in layers


def test_names_say_what_is_inside():
    vague = [path for path in sources() if SAYS_NOTHING & set(path.stem.split("_")) and path.stem != "block_manager"]
    assert vague == []


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_QUESTIONS = ("What", "How", "Who", "Where", "Whether", "Which", "When", "Why", "Whose")


@functools.cache
def syntax_trees() -> dict[str, ast.Module]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def test_a_line_assigns_one_thing():
    """Fewer than one in fifty assignments is ``a, b = x, y``, as a swap is."""
    assigned = [node for tree in syntax_trees().values() for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    packed = [one for one in assigned if isinstance(one.targets[0], ast.Tuple) and isinstance(one.value, ast.Tuple)]
    assert len(packed) < 0.02 * len(assigned)


def test_comprehensions_are_not_nested():
    nested = [
        f"{file}:{outer.lineno}"
        for file, tree in syntax_trees().items()
        for outer in ast.walk(tree)
        if isinstance(outer, _COMPREHENSIONS)
        and any(isinstance(inner, _COMPREHENSIONS) for inner in ast.walk(outer) if inner is not outer)
    ]
    assert not nested


def test_docstrings_say_what_a_thing_is_instead_of_asking():
    asking = [
        f"{file}: {text.splitlines()[0]}"
        for file, tree in syntax_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and text.split()[0].strip(",:;.") in _QUESTIONS
    ]
    assert not asking


def test_library_code_raises_instead_of_asserting():
    asserts = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert asserts == []


@pytest.mark.slow
@pytest.mark.parametrize("check", [("ruff", "check", "."), ("mypy",)], ids=lambda check: check[0])
def test_is_clean_for(check):
    run = in_root("-m", *check)
    assert run.returncode == 0, run.stdout + run.stderr
