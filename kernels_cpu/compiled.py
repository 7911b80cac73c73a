"""The Numba settings of this package: the GIL released, kept on disk until any file of the package changes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")


def _digest() -> str:
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


_SOURCES = _digest()


class _PackageCache(FunctionCache):
    """Numba's disk cache looks only at the file of the function itself: here an edit of what it calls counts too."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        key: Any = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, _SOURCES)


def compiled(*fastmath: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile with these LLVM fast-math flags; never nnan or ninf, so that NaN in live data stays NaN."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        dispatcher: Any = njit(nogil=True, error_model="numpy", fastmath=set(fastmath))(function)
        dispatcher._cache = _PackageCache(function)  # type: ignore[no-untyped-call]
        return cast(Callable[P, R], dispatcher)

    return decorate


def emitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """An intrinsic of Numba: what it returns emits LLVM instructions; literal arguments arrive as such."""
    return cast(Callable[..., Any], intrinsic(prefer_literal=True)(function))


def literal(value: Any) -> int:
    """An argument of an intrinsic that was given as a literal."""
    return int(value.literal_value)
