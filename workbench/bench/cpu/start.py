"""Time of the kernels' first calls: with compilation, and with loading of compiled code from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from workbench.bench import record

_FIRST_CALLS = """
import json, time
import numpy as np
from workbench.kernels import append_kv, decode_attention, fused_moe, pack_experts
kv, row, seconds = np.zeros((1, 8, 2, 64, 128), np.uint16), np.ones((1, 8, 128), np.float32), []
for group in (4, 1, 8):
    begin = time.perf_counter()
    append_kv(kv, np.zeros(1, np.int64), row, row)
    decode_attention(np.ones((1, 8 * group, 128), np.float32), kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64))
    seconds.append(time.perf_counter() - begin)
up, down, row = np.ones((2, 256, 128), np.float32), np.ones((2, 128, 128), np.float32), np.ones((1, 128), np.float32)
for format in ("bf16", "int8", "int4"):
    begin = time.perf_counter()
    fused_moe(row, pack_experts(up, down, format=format), np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))
    seconds.append(time.perf_counter() - begin)
print(json.dumps(seconds))
"""


def first_calls(cache: str) -> list[float]:
    """Seconds of the first calls in a new process: attention at D 128 in bf16, G 4 with its append, then G 1 and G 8;
    then experts in BF16, INT8 and INT4, packed and called.
    """
    told = subprocess.run(
        [sys.executable, "-c", _FIRST_CALLS],
        env={**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds: list[float] = json.loads(told.stdout)
    return seconds


def say_start(say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Report and return the seconds of the first calls, with an empty and with a filled cache of compiled code."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("compiling", "from the cache"):
            seconds = first_calls(cache)
            first = seconds[0]
            more = sum(seconds[1:3])
            expert = sum(seconds[3:])
            say(f"first call, {state}: {first:.2f} s; two more groups {more:.2f} s; experts {expert:.2f} s")
            found[f"first call, {state} [s]"] = record.ratio([first])
            found[f"two more groups, {state} [s]"] = record.ratio([more])
            found[f"experts in 3 formats, {state} [s]"] = record.ratio([expert])
    return found
