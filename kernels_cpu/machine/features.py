"""The choice among the three code paths on this computer, with the reason."""

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
from .parameters import parameters


@public
class CodePath(enum.Enum):
    """Code paths; values are the fp32 lanes of a register. PORTABLE leaves vectorisation to the compiler."""

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
        The instruction sets that were found, or those that are missing.
    matrices : bool
        True if matrix registers (AMX) multiply bf16 and bytes, in attention with many query heads per KV head and in
        experts with more than a few tokens.
    settings : str
        The table from which the kernels have their settings, see `Parameters`.
    """

    path: CodePath
    reason: str
    matrices: bool = False
    settings: str = ""

    @property
    def lanes(self) -> int:
        """fp32 lanes of a vector register, 0 on the portable path."""
        return self.path.value

    def __str__(self) -> str:
        matrices = ", and matrices (AMX)" if self.matrices else ""
        return f"{self.path.name.lower()}: {self.reason}{matrices}; settings: {self.settings}"


_NEEDED = {CodePath.AVX512: ("avx512f", "avx512bw", "avx512vl", "fma"), CodePath.AVX2: ("avx2", "fma", "f16c")}


def code_path(path: CodePath | None) -> CodePath:
    """`path`, or this computer's own if it is None."""
    if path is not None and not isinstance(path, CodePath):
        raise TypeError(f"path must be a CodePath, not {path!r}: leave it out for this computer's own.")
    return path or features().path


@functools.cache  # LLVM queries the CPU at each call, which takes 0.4 ms
def has(feature: str) -> bool:
    """True if this CPU has a feature, named as LLVM does (``avx512bf16``), and NUMBA_CPU_FEATURES permits it."""
    if config.CPU_FEATURES is not None:  # type: ignore[attr-defined]
        return f"+{feature}" in config.CPU_FEATURES.split(",")  # type: ignore[attr-defined]
    return bool(llvm.get_host_cpu_features().get(feature))


@functools.cache
def has_matrices() -> bool:
    """True if this CPU multiplies matrices (AMX) and Linux grants this process's request to use the registers."""
    arch_prctl = 158
    request_permission = 0x1023
    tile_data = 18
    if sys.platform != "linux" or not all(map(has, ("amx-tile", "amx-bf16", "amx-int8"))):
        return False
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


@public
@functools.cache
def features() -> Features:
    """Determine the code path of this computer, and whose settings the kernels have.

    Examples
    --------
    >>> features().path in CodePath
    True
    """
    for path, needed in _NEEDED.items():
        missing = [name for name in needed if not has(name)]
        if not missing:
            matrices = path is CodePath.AVX512 and has_matrices()
            return Features(path, f"this CPU has {', '.join(needed)}", matrices, parameters().why)
    missed = f"this {platform.machine()} CPU has no {', '.join(missing)}"
    return Features(CodePath.PORTABLE, missed, settings=parameters().why)
