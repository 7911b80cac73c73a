"""What every test shares."""

import os
from pathlib import Path

from hypothesis import settings

from tests.examples import DEEP, examples

# Machine code of earlier runs, from whatever checkout: kernels_cpu says when it still counts.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-workbench" / "compiled-for-tests"
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE))

# A deadline asserts a time, and on a shared computer an example may take any.
settings.register_profile("workbench", examples(100), deadline=None, derandomize=not DEEP)
settings.load_profile("workbench")
