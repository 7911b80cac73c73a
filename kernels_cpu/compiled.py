"""The Numba settings of this package: the GIL released, kept on disk until any file of the package changes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache

P = ParamSpec("P")
R = TypeVar("R")


def _digest() -> str:
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


_SOURCES = _digest()


class _PackageCache(FunctionCache):  # type: ignore[misc]
    """Numba's disk cache looks only at the file of the function itself: here an edit of what it calls counts too."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _SOURCES)


def compiled(*fastmath: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile with these LLVM fast-math flags; never nnan or ninf, so that NaN in live data stays NaN."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        dispatcher = njit(nogil=True, error_model="numpy", fastmath=set(fastmath))(function)
        dispatcher._cache = _PackageCache(function)
        return cast(Callable[P, R], dispatcher)

    return decorate
