"""The shape of the tree: who may import whom, what importing costs, how deep and under what names files lie."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("workbench", "kernels_cpu", "kernels_triton")
HEAVY = ("torch", "triton", "numba", "matplotlib", "pandas")
SAYS_NOTHING = {"utils", "util", "common", "helpers", "helper", "handlers", "handler", "manager", "misc"}
IMPORT_SECONDS = 1.0


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


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


@pytest.mark.alone
def test_importing_the_workbench_is_quick_and_light():
    runs = [import_workbench() for _ in range(3)]
    assert runs[0][1].isdisjoint(HEAVY)
    assert min(seconds for seconds, _ in runs) < IMPORT_SECONDS


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_nest_two_levels_at_most(package):
    deep = [path for path in sources() if path.is_relative_to(ROOT / package) and len(path.relative_to(ROOT).parts) > 3]
    assert deep == []


def test_names_say_what_is_inside():
    vague = [path for path in sources() if SAYS_NOTHING & set(path.stem.split("_")) and path.stem != "block_manager"]
    assert vague == []


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
