"""The same decode attention in C intrinsics (`c_twin.c`), compiled on this computer when it is asked for."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels_cpu.threads.team import side_by_side
from workbench.kernels import features

RUN, PART = 4096, 1024
"""Tokens of a sequence up to which it is one task, and of each task of a longer one."""


class Twin:
    """Decode attention of `group` query heads per KV head over blocks (K, 2, block, dim) of bf16, by gcc.

    Raises
    ------
    OSError
        Says why there is none here: no gcc, no AVX2, a shape that the C code does not take, or gcc's own complaint.
    """

    def __init__(self, group: int, dim: int, block: int) -> None:
        lanes, gcc = features().lanes, shutil.which("gcc")
        if gcc is None:
            raise OSError("there is no gcc here")
        if not lanes:
            raise OSError(str(features()))
        if dim % (2 * lanes) or group not in (1, 2, 4, 8, 16) or block % lanes:
            raise OSError(f"it takes no {group} heads per KV head of {dim} dims in blocks of {block}")
        shape = {"GROUP": group, "DIM": dim, "BLOCK": block, "LANES": lanes}
        self._library = _compiled(gcc, shape)

    def __call__(
        self,
        q: npt.NDArray[np.float32],
        kv: npt.NDArray[np.uint16],
        table: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int64],
        out: npt.NDArray[np.float32],
        threads: int,
    ) -> None:
        """As `decode_attention`; nothing is checked."""
        tasks, first = _tasks(lengths)
        heads, dim = q.shape[1:]
        parts = first[-1]
        tops, totals = np.empty((2, parts, heads), np.float32)
        values, counter = np.empty((parts, heads, dim), np.float32), np.zeros(1, np.int64)
        scale = ctypes.c_float(math.log2(math.e) / math.sqrt(dim))
        operands = (q, kv, table, table.shape[1], kv.shape[1], tasks, len(tasks), counter)
        arguments = [_passed(one) for one in (*operands, scale, tops, totals, values, out)]
        side_by_side(lambda: self._library.serve(*arguments), threads)
        for s in np.flatnonzero(np.diff(first)):
            mine = slice(first[s], first[s + 1])
            whole = (int(first[s + 1] - first[s]), heads, tops[mine], totals[mine], values[mine], out[s])
            self._library.merge(*map(_passed, whole))


def _compiled(gcc: str, shape: dict[str, int]) -> ctypes.CDLL:
    """The library of a shape; its file is gone as soon as it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "twin.so"
        given = [f"-D{name}={value}" for name, value in shape.items()]
        source = Path(__file__).with_name("c_twin.c")
        command = [gcc, "-O3", "-march=native", "-shared", "-fPIC", *given, str(source), "-lm", "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"gcc fails: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'silently'}")
        return ctypes.CDLL(str(target))


def _passed(value: Any) -> Any:
    """What C takes: the address of an array, a whole number of 64 bits, or what is one of C's already."""
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_int64(value) if isinstance(value, int) else value


def _tasks(lengths: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tasks (sequence, first token, end, place), the longest first, and where the parts of each sequence begin."""
    tasks, first = list[tuple[int, int, int, int]](), [0]
    for s, length in enumerate(lengths.tolist()):
        begins = range(0, length, PART if length > RUN else RUN)
        place = first[-1] if len(begins) > 1 else -1
        for number, begin in enumerate(begins):
            end = min(length, begin + begins.step)
            tasks.append((s, begin, end, place + number if place >= 0 else -1))
        first.append(first[-1] + (len(begins) if place >= 0 else 0))
    return np.array(sorted(tasks, key=lambda task: task[1] - task[2]), np.int64), np.array(first)
