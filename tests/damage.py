"""Every way in which a file that is kept can be spoilt, for the law that such a file may only help."""

import shutil
from collections.abc import Callable
from pathlib import Path


def _flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    path.write_bytes(raw)


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def _no_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder was")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2]),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "a bit flipped": _flipped,
    "a folder": _directory,
}
JSON_DAMAGES: dict[str, Callable[[Path], object]] = {
    **{name: damage for name, damage in DAMAGES.items() if name != "a bit flipped"},  # which may still be a record
    **{text: lambda path, text=text: path.write_text(text) for text in ("null", "3", "[]", "{}", '{"name": 1}')},
    "deep": lambda path: path.write_text("[" * 100_000),
    "no folder": _no_folder,
}
