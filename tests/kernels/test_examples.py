"""The examples in the kernels' docstrings are true."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels_cpu", "kernels_triton", "workbench/kernels")


def modules_with_examples() -> list[str]:
    """Modules of the kernel packages and of their door, a new one too, whose text has an example."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    shown = [path for path in files if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in shown]


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed
