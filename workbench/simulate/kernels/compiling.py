"""Compilation of the kernels by Numba, and the machine code that it keeps on disk.

Machine code is kept where Numba keeps that of this folder, until a file of the folder or a number that the kernels take
from elsewhere changes: Numba itself would notice edits of the file of a function, and not of what the function calls.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime.nrt import rtsys

from workbench.schedules.plan import LANES
from workbench.serving.iterations import NEVER
from workbench.simulate import tapes


def _digest() -> str:
    """Digest of everything that the machine code is made from."""
    found = hashlib.sha256(repr((LANES, NEVER)).encode())
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(tapes.__file__)):
        found.update(file.read_bytes())
    return found.hexdigest()


_SOURCES = _digest()
_NJIT: Any = functools.partial(numba.njit, nogil=True, error_model="numpy", no_cfunc_wrapper=True)


class _Cache(FunctionCache):
    """Numba's cache on disk of one kernel. Code that cannot be read is compiled anew, and kept where it can be."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        name = self._impl.filename_base
        self._cache_file = IndexDataCacheFile(self._cache_path, name, _SOURCES)  # type: ignore[no-untyped-call]

    def has(self, signature: str, context: Any) -> bool:
        """True if the machine code for a signature is there."""
        key = self._index_key(signature, context.codegen())  # type: ignore[no-untyped-call]
        try:
            return key in self._cache_file._load_index()  # type: ignore[no-untyped-call]
        except Exception:  # pickle raises exceptions of many types for a damaged file
            return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code kept for a signature, or None.

        Numba's own method first fills its registries, which takes several times as long and which only compiling needs.
        """
        try:
            rtsys.initialize(target_context)
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code, where that is possible."""
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a kernel that other kernels call; it is compiled with them.

    It does not count references to its arrays, which would take longer than its arithmetic. So it may neither make nor
    return an array: its caller passes the arrays that it works in.
    """
    return cast(Callable[..., Any], _NJIT(no_cpython_wrapper=True, forceinline=True, _nrt=False)(function))


def making(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a kernel that other kernels call and that makes or returns arrays, whose references it counts."""
    return cast(Callable[..., Any], _NJIT(no_cpython_wrapper=True, forceinline=True)(function))


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a kernel that Python calls. `Compiled` compiles it for its one signature."""
    dispatcher: Any = _NJIT()(function)
    with suppress(RuntimeError, OSError):  # there is no folder that can be written
        dispatcher._cache = _Cache(function)
    return cast(Callable[..., Any], dispatcher)


class Compiled:
    """Kernels that Python calls, each with its signature."""

    def __init__(self, *kernels: tuple[Any, str]) -> None:
        self._kernels = kernels

    @property
    def folder(self) -> Path | None:
        """The folder in which the machine code is kept; None if no folder can be written."""
        cache = self._kernels[0][0]._cache
        return Path(cache.cache_path) if isinstance(cache, _Cache) else None

    @property
    def kept(self) -> bool:
        """True if the machine code of all is on disk, so that it need not be compiled."""
        if self.folder is None:
            return False
        return all(kernel._cache.has(signature, kernel.targetctx) for kernel, signature in self._kernels)

    def load(self) -> None:
        """Load the machine code of all from disk, or compile it and keep it there."""
        for kernel, signature in self._kernels:
            kernel.compile(signature)
            kernel.disable_compile()
