"""What every test shares."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler.loadfile import LoadFileScheduling

from tests.examples import DEEP, examples

# Machine code of earlier runs, from whatever checkout: kernels_cpu says when it still counts.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-workbench" / "compiled-for-tests"
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE))

# Tests compute on the CPU and on simulated cards; benchmarks prove a real one.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# A deadline asserts a time, and on a shared computer an example may take any.
settings.register_profile("workbench", examples(100), deadline=None, derandomize=not DEEP)
settings.load_profile("workbench")

APART = ("tests/test_notebooks.py", "tests/test_howto.py", "tests/test_every.py", "tests/kernels/test_triton.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return Spread(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: at the end one would keep one process busy while the other has nothing left."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in APART)


class Spread(LoadFileScheduling):
    """Tests of a file run in one process, where they share what is set up; those of `APART`, long ones, run anywhere.

    Files come in the order of collection.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return nodeid if file in APART else file
