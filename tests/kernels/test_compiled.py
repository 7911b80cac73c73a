"""Compiled kernels that are kept on disk may only help: whatever happens to the files, the kernels work."""

import errno
import importlib
import os
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from numba.core import caching, config

from kernels_cpu import parameters
from kernels_cpu.codegen import compiled as module
from kernels_cpu.codegen import sources
from tests.damage import DAMAGES

SOURCE = "def kernel(x):\n    return 3 * x + 1\n"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, list[str]]]:
    """Decorate and call a kernel as a new process would; how often it was compiled, and what was said."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    found = types.ModuleType("kernels_here")
    monkeypatch.setitem(sys.modules, "kernels_here", found)

    def fresh(place: str = ".") -> tuple[int, list[str]]:
        file = tmp_path / place / "kernels_here.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(SOURCE)
        found.__file__ = str(file)
        exec(compile(SOURCE, str(file), "exec"), found.__dict__)
        module._tell.cache_clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            kernel = module.compiled()(found.kernel)
            assert kernel(2) == 7
            assert kernel(5) == 16
        return sum(kernel.stats.cache_misses.values()), [str(each.message) for each in said]

    yield fresh
    module._tell.cache_clear()


def kept(tmp_path: Path, ending: str) -> Path:
    (file,) = (tmp_path / "cache").rglob(f"*.{ending}")
    return file


def test_a_kernel_is_compiled_once(call) -> None:
    assert call() == (1, [])
    assert call() == (0, [])


def test_what_one_copy_of_the_sources_compiled_another_loads(call) -> None:
    assert call("here") == (1, [])
    assert call("there") == (0, [])


def test_other_sources_are_compiled_beside_what_is_kept(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies that differ in any file do not take each other's place."""
    call()
    with monkeypatch.context() as patch:
        patch.setattr(module, "digest_of", lambda modules: "0" * 64)
        assert call() == (1, [])
    assert call() == (0, [])


def test_of_code_of_other_sources_the_latest_is_kept(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders() -> set[str]:
        return {each.name.rpartition("-")[2] for each in (tmp_path / "cache").glob("kernels_here-*")}

    def compiled(number: int) -> int:
        monkeypatch.setattr(module, "digest_of", lambda modules: str(number) * 64)
        return call()[0]

    for number in range(module._KEPT):
        assert compiled(number) == 1
        (folder,) = (tmp_path / "cache").glob(f"kernels_here-{number}*")
        os.utime(folder, (number, number))
    assert compiled(0) == 0  # which makes it the latest
    assert compiled(8) == compiled(9) == 1
    assert folders() == {str(number) * 16 for number in (0, 3, 4, 5, 6, 7, 8, 9)}


FILES = [file for file in sources.PACKAGE.glob("*/*.py") if file.stem != "__init__"]
MODULES = sorted(file.relative_to(sources.PACKAGE) for file in FILES)


@pytest.mark.parametrize("file", MODULES, ids=str)
def test_what_a_module_uses_is_among_what_its_code_depends_on(file: Path) -> None:
    name = ".".join(("kernels_cpu", *file.with_suffix("").parts))
    needed = {".".join(each.relative_to(sources.PACKAGE).with_suffix("").parts) for each in sources._needed(name)}
    for used in vars(importlib.import_module(name)).values():
        of = getattr(used, "py_func", used)
        where = of.__name__ if isinstance(of, types.ModuleType) else str(getattr(of, "__module__", ""))
        if where.startswith("kernels_cpu."):
            assert where.removeprefix("kernels_cpu.") in needed, (name, where)


def test_code_depends_on_what_its_module_imports_and_on_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit of RoPE compiles no attention again, one of what both are made of compiles both."""
    package = tmp_path / "kernels_cpu"
    shutil.copytree(sources.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "PACKAGE", package)

    def digests() -> tuple[str, str, str]:
        for cached in (sources.digest_of, sources._read, sources._needed, sources._imports):
            cached.cache_clear()
        names = ("kernels_cpu.attention.tasks", "kernels_cpu.rows.rope", "another.module")
        attention, rope, other = (sources.digest_of(frozenset({name})) for name in names)
        return attention, rope, other

    def changed_by(edited: str) -> list[bool]:
        before = digests()
        with (package / edited).open("a") as file:
            file.write("# edited\n")
        return [old != new for old, new in zip(before, digests(), strict=True)]

    assert changed_by("rows/rope.py") == [False, True, True]
    assert changed_by("attention/partials.py") == [True, False, True]
    assert changed_by("codegen/vector_ir.py") == [True, True, True]
    assert changed_by("experts/nodes.py") == [False, False, True]
    before = digests()
    other = parameters().having("attention", "level", 1)
    monkeypatch.setattr("kernels_cpu.machine.parameters.parameters", lambda: other)
    assert [old != new for old, new in zip(before, digests(), strict=True)] == [True, False, True]
    monkeypatch.setattr(numba, "__version__", "0.0")
    assert all(old != new for old, new in zip(before, digests(), strict=True))
    monkeypatch.undo()
    digests()


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(damage: str, ending: str, call, tmp_path: Path) -> None:
    call()
    DAMAGES[damage](kept(tmp_path, ending))
    compiled, said = call()
    assert compiled == 1
    assert len(said) <= 2
    assert all("compiled kernels" in each for each in said)
    if damage != "a folder":
        assert call() == (0, [])
    else:
        assert call()[0] == 1


def test_every_byte_of_a_file_may_be_wrong(call, tmp_path: Path) -> None:
    """At places all over both files; none ends the process, and each is mended."""
    call()
    for ending in ("nbi", "nbc"):
        size = kept(tmp_path, ending).stat().st_size
        for place in range(0, size, max(1, size // 25)):
            file = kept(tmp_path, ending)
            raw = bytearray(file.read_bytes())
            raw[min(place, len(raw) - 1)] ^= 0xFF
            file.write_bytes(raw)
            call()
            for stale in (tmp_path / "cache").rglob("*.nb*"):  # a wrong name in the index leads to a second file
                stale.unlink()
            call()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_disk_is_told_once(number: int, call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", fail)
    compiled, (said,) = call()
    assert compiled == 1
    assert "set NUMBA_CACHE_DIR" in said


NOWHERE = """
import warnings
from numba.core import caching

def fail(self):
    raise OSError(30, "Read-only file system")

caching._CacheLocator.ensure_cache_path = fail
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import numpy as np, torch
    from workbench.kernels import rms_norm, append_kv
    kv, row = np.zeros((1, 2, 2, 16, 8), np.float32), np.ones((1, 2, 8), np.float32)
    append_kv(kv, np.zeros(1, np.int64), row, row)
    assert kv.sum() == 32
ours = [str(each.message) for each in said if "compiled kernels" in str(each.message)]
assert len(ours) == 1, ours
"""


def test_the_kernels_work_where_no_folder_can_be_written() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", NOWHERE], cwd=root, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_variants_that_two_processes_compile_at_once_keep_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has seen what the other keeps when it chooses a file."""
    files = [module._Files(str(tmp_path), "kernel", "sources") for _ in range(2)]
    monkeypatch.setattr(module._Files, "_load_index", lambda self: {})
    for number, file in enumerate(files):
        file.save(("key", number), f"code {number}")
    monkeypatch.undo()
    assert len(list(tmp_path.glob("*.nbc"))) == 2
    for number, file in enumerate(files):
        file.save(("key", number), f"code {number}")
        assert file.load(("key", number)) == f"code {number}"


VARIANTS = """
import functools
import math
import sys

import numpy as np
from numba.extending import overload

from kernels_cpu.codegen.compiled import compiled, literal


@functools.cache
def variant(size):
    @compiled()
    def fill(out):  # too long to become a part of its caller
        for x in range(size):
            out[x] = size
            for y in range(x):
                out[x] += math.erf(math.sin(x)) * math.lgamma(y + 1) + math.tanh(math.cos(y)) * math.gamma(x % 5 + 1)
                out[x] = math.atan2(out[x], math.expm1(y % 3)) + math.log1p(abs(math.erfc(out[x]))) + size
    return fill


def of_size(size, out):
    raise NotImplementedError


@overload(of_size, strict=False, prefer_literal=True)
def _of_size(size, out):
    fill = variant(literal(size))

    def filled(size, out):
        fill(out)
        fill(out[::-1][::-1])

    return filled


@functools.cache
def caller(size):
    @compiled()
    def call(out):
        of_size(size, out)
    return call


for size in map(int, sys.argv[1:]):
    out = np.zeros(9)
    call = caller(size)
    call(out)
    print(np.count_nonzero(out), sum(call.stats.cache_hits.values()))
"""


CLOSED_OVER = VARIANTS.replace("def caller(size):\n", "def caller(size):\n    fill = variant(size)\n").replace(
    "of_size(size, out)\n    return call", "fill(out)\n    return call"
)
"""The same with callers that close over the compiled functions."""


@pytest.mark.parametrize("text", [VARIANTS, CLOSED_OVER], ids=["overloaded", "closed over"])
def test_variants_that_two_processes_kept_are_told_apart_by_a_third(text: str, tmp_path: Path) -> None:
    """Both processes count what they compile from one on; the third links what they kept by the name of its code."""
    file = tmp_path / "variants.py"
    file.write_text(text)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}

    def told(*sizes: str) -> list[str]:
        command = [sys.executable, str(file), *sizes]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()

    assert [told("3"), told("5")] == [["3 0"], ["5 0"]]
    assert told("3", "5") == ["3 1", "5 1"]
    assert told("5", "3") == ["5 1", "3 1"]


def test_the_name_of_a_closure_tells_what_it_closes_over() -> None:
    """Numbers, types and other closures; a function that closes over nothing keeps its own name."""

    def made(number: object, kind: object) -> Callable[[float], object]:
        def kernel(x: float) -> object:
            return number, kind, x

        return kernel

    def name(*closed: object) -> str:
        return str(module.compiled()(made(*closed)).py_func.__qualname__)

    inner, other = (module.compiled()(made(number, int)) for number in (1, 2))
    every = [name(1, int), name(2, int), name(1, float), name(inner, int), name(other, int)]
    assert len(set(every)) == len(every)
    assert name(1, int) == every[0]
    assert name(module.compiled()(made(1, int)), int) == name(inner, int)


LOADED = """
import sys

import numpy as np

from kernels_cpu.codegen.compiled import compiled


@compiled()
def doubled(values):
    return values + values  # a new array, which Numba's runtime makes


print(doubled(np.ones(3)).sum(), sum(doubled.stats.cache_hits.values()), "numba.np.arraymath" in sys.modules)
"""


def test_what_is_loaded_needs_no_registries_which_take_several_times_as_long_to_fill(tmp_path: Path) -> None:
    file = tmp_path / "loaded.py"
    file.write_text(LOADED)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(file)]
    runs = [subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout.split() for run in runs] == [["6.0", "0", "True"], ["6.0", "1", "False"]]
