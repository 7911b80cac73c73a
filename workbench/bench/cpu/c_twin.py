"""Decode attention in C intrinsics (`c_twin.c`), compiled on this computer at the first use."""

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

RUN = 4096
"""Tokens of the longest sequence that is a single task."""
CHUNK = 1024
"""Tokens per task of longer sequences."""


class Twin:
    """Decode attention of `group` query heads per KV head over blocks (K, 2, block, dim) of bf16, by gcc.

    Raises
    ------
    OSError
        If there is no gcc or no AVX2, if the C code does not support the shape, or if gcc fails.
    """

    def __init__(self, group: int, dim: int, block: int) -> None:
        lanes = features().lanes
        gcc = shutil.which("gcc")
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
        """Compute as `decode_attention` does; operands are not checked."""
        tasks, first = _tasks(lengths)
        heads, dim = q.shape[1:]
        partials = first[-1]
        tops, totals = np.empty((2, partials, heads), np.float32)
        values = np.empty((partials, heads, dim), np.float32)
        counter = np.zeros(1, np.int64)
        scale = ctypes.c_float(math.log2(math.e) / math.sqrt(dim))
        operands = (q, kv, table, table.shape[1], kv.shape[1], tasks, len(tasks), counter)
        arguments = [_passed(one) for one in (*operands, scale, tops, totals, values, out)]
        side_by_side(lambda: self._library.serve(*arguments), threads)
        for s in np.flatnonzero(np.diff(first)):
            mine = slice(first[s], first[s + 1])
            whole = (int(first[s + 1] - first[s]), heads, tops[mine], totals[mine], values[mine], out[s])
            self._library.merge(*map(_passed, whole))


def _compiled(gcc: str, shape: dict[str, int]) -> ctypes.CDLL:
    """Compile and load the library of a shape; its file is deleted after loading."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "twin.so"
        given = [f"-D{name}={value}" for name, value in shape.items()]
        source = Path(__file__).with_name("c_twin.c")
        command = [gcc, "-O3", "-march=native", "-shared", "-fPIC", *given, str(source), "-lm", "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            complaint = done.stderr.strip()
            raise OSError(f"gcc fails: {complaint.splitlines()[-1] if complaint else 'silently'}")
        return ctypes.CDLL(str(target))


def _passed(value: Any) -> Any:
    """Argument for C: the address of an array or an integer of 64 bits; a ctypes value passes as it is."""
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_int64(value) if isinstance(value, int) else value


def _tasks(lengths: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tasks (sequence, first token, end, row of the partial softmax), longest first, and each sequence's first row.

    A sequence of one task has no partial softmax: its row is -1.
    """
    tasks = list[tuple[int, int, int, int]]()
    first = [0]
    for s, length in enumerate(lengths.tolist()):
        begins = range(0, length, CHUNK if length > RUN else RUN)
        place = first[-1] if len(begins) > 1 else -1
        for number, begin in enumerate(begins):
            end = min(length, begin + begins.step)
            tasks.append((s, begin, end, place + number if place >= 0 else -1))
        first.append(first[-1] + (len(begins) if place >= 0 else 0))
    return np.array(sorted(tasks, key=lambda task: task[1] - task[2]), np.int64), np.array(first)
