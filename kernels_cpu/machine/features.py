"""Which of the three code paths this computer takes, and why."""

from __future__ import annotations

import ctypes
import enum
import functools
import platform
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm
from numba.core import config

from ..declarations import public


@public
class CodePath(enum.Enum):
    """Code paths, by the fp32 lanes of a register; PORTABLE leaves vectors to the compiler."""

    AVX512 = 16
    AVX2 = 8
    PORTABLE = 0


@public
@dataclass(frozen=True)
class Features:
    """The code path that the kernels take on this computer.

    Attributes
    ----------
    path : CodePath
    reason : str
        The instructions found, or the ones that are missing.
    matrices : bool
        Whether matrix registers (AMX) multiply bf16 and bytes: for attention with many query heads per KV head, and
        experts with some tokens.
    """

    path: CodePath
    reason: str
    matrices: bool = False

    @property
    def lanes(self) -> int:
        """fp32 lanes of a vector register, 0 on the portable path."""
        return self.path.value

    def __str__(self) -> str:
        return f"{self.path.name.lower()}: {self.reason}{', and matrices (AMX)' if self.matrices else ''}"


_NEEDED = {CodePath.AVX512: ("avx512f", "avx512bw", "avx512vl", "fma"), CodePath.AVX2: ("avx2", "fma", "f16c")}


def code_path(path: CodePath | None) -> CodePath:
    """`path`, or this computer's own if it is None."""
    if path is not None and not isinstance(path, CodePath):
        raise TypeError(f"path must be a CodePath, not {path!r}: leave it out for this computer's own.")
    return path or features().path


@functools.cache  # LLVM asks the CPU anew each time: 0.4 ms
def has(feature: str) -> bool:
    """Whether this CPU has it and Numba compiles for it (NUMBA_CPU_FEATURES), by LLVM's name such as ``avx512bf16``."""
    if config.CPU_FEATURES is not None:  # type: ignore[attr-defined]
        return f"+{feature}" in config.CPU_FEATURES.split(",")  # type: ignore[attr-defined]
    return bool(llvm.get_host_cpu_features().get(feature))


@functools.cache
def has_matrices() -> bool:
    """Whether this CPU multiplies matrices (AMX) and Linux lets this process do so, which has to be asked for."""
    arch_prctl, ask_for_state, tile_data = 158, 0x1023, 18
    if sys.platform != "linux" or not all(map(has, ("amx-tile", "amx-bf16", "amx-int8"))):
        return False
    return bool(ctypes.CDLL(None).syscall(arch_prctl, ask_for_state, tile_data) == 0)


def is_zen() -> bool:
    """Whether this CPU is of AMD's Zen family."""
    return bool(llvm.get_host_cpu_name().startswith("znver"))


@public
@functools.cache
def features() -> Features:
    """The code path of this computer.

    Examples
    --------
    >>> features().path in CodePath
    True
    """
    for path, needed in _NEEDED.items():
        missing = [name for name in needed if not has(name)]
        if not missing:
            matrices = path is CodePath.AVX512 and has_matrices()
            return Features(path, f"this CPU has {', '.join(needed)}", matrices)
    return Features(CodePath.PORTABLE, f"this {platform.machine()} CPU has no {', '.join(missing)}")
