"""The one Numba setting of this package: one thread, the GIL released, kept on disk."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(*fastmath: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile with these LLVM fast-math flags; never nnan or ninf, so that NaN in live data stays NaN."""
    decorator: Callable[[Callable[P, R]], Callable[P, R]] = njit(
        nogil=True, cache=True, error_model="numpy", fastmath=set(fastmath)
    )
    return decorator
