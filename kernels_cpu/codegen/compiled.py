"""Compilation by Numba: the GIL is released, and machine code is kept on disk until what it depends on changes.

It stands in the user's cache, so that all copies of the same sources share it. The cache is optional: files that cannot
be read are compiled again, and where none can be written each process compiles for itself.
"""

import functools
import hashlib
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, ParamSpec, TypeVar, cast

from numba import config, njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic

from ..machine.cpu import user_folder
from .progress import tell_compilation
from .sources import digest_of

_KEPT = 8
"""Folders of a module's code that are kept, each of other sources, settings or versions."""
P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _tell(problem: str) -> None:
    """Warn of a problem once per process."""
    warnings.warn(problem, RuntimeWarning, stacklevel=2)


def _not_read(folder: object) -> None:
    _tell(f"compiled kernels kept in {folder} are damaged and compiled again, which takes up to half a minute.")


def _not_written() -> None:
    _tell(
        "compiled kernels cannot be kept on disk, and each process compiles them again, for up to half a minute; make "
        f"room in {user_folder()} and let it be written, or set NUMBA_CACHE_DIR to another folder."
    )


class _Files(IndexDataCacheFile):
    """Index and code of one function. A digest precedes the code, since damaged machine code would end the process.

    The code of each key has a file of its own. Numba numbers them, and two processes that compile variants of a closure
    at the same time give both the same number: one of them then runs the other's code.
    """

    def save(self, key: Any, data: Any) -> None:
        """Keep the code of a key; another process may do the same with any key at the same time."""
        digest = hashlib.sha256(self._dump(key)).hexdigest()[:24]  # type: ignore[no-untyped-call]
        name = self._index_name.removesuffix("nbi") + f"{digest}.nbc"
        self._save_data(name, data)
        overloads = self._load_index()
        overloads[key] = name
        self._save_index(overloads)  # type: ignore[no-untyped-call]

    def _load_index(self) -> dict[Any, str]:
        try:
            found = super()._load_index()  # type: ignore[no-untyped-call]
        except Exception:  # pickle raises exceptions of many types for a damaged file
            _not_read(self._cache_path)
            found = {}
        return found if isinstance(found, dict) else {}

    def _load_data(self, name: str) -> Any:
        raw = Path(self._data_path(name)).read_bytes()  # type: ignore[no-untyped-call]
        digest = raw[:32]
        code = raw[32:]
        if hashlib.sha256(code).digest() != digest:
            _not_read(self._cache_path)
            return None
        return pickle.loads(code)

    def _save_data(self, name: str, data: Any) -> None:
        code = self._dump(data)  # type: ignore[no-untyped-call]
        with self._open_for_write(self._data_path(name)) as file:  # type: ignore[no-untyped-call]
            file.write(hashlib.sha256(code).digest() + code)


class _PackageCache(FunctionCache):
    """Numba's disk cache in one folder for all copies of the package, by everything on which a function depends."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        impl = self._impl
        module = function.__module__
        closed = {each.py_func.__module__ for each in _closed(function) if isinstance(each, Dispatcher)}
        sources = digest_of(frozenset({module, *closed}))
        self._folder = Path(config.CACHE_DIR or user_folder() / "code")  # type: ignore[attr-defined]
        self._module = module.partition(".")[2] or module
        self._cache_path = impl.locator._cache_path = str(self._folder / f"{self._module}-{sources[:16]}")
        self._cache_file = _Files(self._cache_path, impl.filename_base, sources)  # type: ignore[no-untyped-call]

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """The key of a signature; what the function closes over is told by its name (`_tell_apart`).

        Numba's own key holds a number that each process draws anew for each compiled function that is closed over.
        """
        code = self._py_func.__code__
        plain = [value for value in code.co_consts if not isinstance(value, CodeType)]
        body = hashlib.sha256(code.co_code + repr((plain, code.co_names)).encode()).hexdigest()
        return sig, codegen.magic_tuple(), self._py_func.__qualname__, body

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load the code cached for a signature, or return None.

        Numba's own method first fills its registries, which takes several times as long and which only compiling needs.
        """
        try:
            rtsys.initialize(target_context)
            found = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
            if found is not None:
                with suppress(OSError):
                    os.utime(self._cache_path)
            return found
        except Exception:
            _not_read(self._cache_path)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache compiled code, where that is possible."""
        try:
            if not Path(self._cache_path).exists():
                _remove_old(self._folder, self._module)
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:
            _not_written()


def _remove_old(folder: Path, module: str) -> None:
    """Remove the folders of a module's code that were not loaded from for longest, until there is room for one more."""
    used = dict[Path, float]()
    for each in folder.glob(f"{module}-*"):
        with suppress(OSError):  # another process removed it
            used[each] = each.stat().st_mtime
    for old in sorted(used, key=lambda each: used[each])[: 1 - _KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _closed(function: Callable[..., Any]) -> list[Any]:
    """The values that a function closes over."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _tell_apart(function: Callable[..., Any]) -> None:
    """Let the name of a closure tell what it closes over: numbers, types and compiled functions.

    Numba names machine code by the function's name, its arguments and a number that each process counts anew. Where two
    processes compile variants of a closure, both may get the same name; a third that loads them, linked into their
    callers, runs one in place of the other, and writes past the end of arrays that are shorter than its own.
    """
    closed = _closed(function)
    if closed:
        told = [_told(each) for each in closed]
        function.__qualname__ += "_" + hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def _told(closed_over: Any) -> str:
    """A text that tells a value from any other that a function closes over."""
    if isinstance(closed_over, Dispatcher):
        return f"{closed_over.py_func.__module__}.{closed_over.py_func.__qualname__}"
    return repr(closed_over)


def compiled(*fastmath: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to be compiled with these LLVM fast-math flags; without nnan and ninf, NaN stays NaN."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _tell_apart(function)
        dispatcher: Any = njit(nogil=True, error_model="numpy", fastmath=set(fastmath))(function)
        try:
            dispatcher._cache = _PackageCache(function)
        except (RuntimeError, OSError):  # no folder for the cache can be written
            _not_written()
        return cast(Callable[P, R], dispatcher)

    return decorate


def emitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an intrinsic of Numba, whose result emits LLVM instructions; literal arguments arrive as literals."""
    return cast(Callable[..., Any], intrinsic(prefer_literal=True)(function))


def literal(value: Any) -> int:
    """The value of an intrinsic's argument that was passed as a literal."""
    return int(value.literal_value)


tell_compilation()
