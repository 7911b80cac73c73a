"""Files in the safetensors format, read by offset into memory of their reader's own: nothing of a file stays mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from workbench.core.errors import CheckpointError
from workbench.core.records import is_file, reason

STEP = 1 << 26
"""Bytes that are read between two looks for a stop request: a third of a second of a slow disk."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Types by their names in safetensors."""


class Entry(NamedTuple):
    """A tensor of a file.

    Attributes
    ----------
    dtype : torch.dtype or str
        Its type; the name of a type that is not read.
    shape : tuple of int
    begin : int
        Its place in the file [B].
    size : int
        Its length [B].
    """

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    begin: int
    size: int


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in its own memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A file of tensors, open until `close`; a context manager. Several threads may read it at once.

    A file that is replaced meanwhile is read as it was; one that is cut short gives an error.

    Parameters
    ----------
    path : Path
    check : callable, optional
        Called between pieces of a long read; it may raise.

    Raises
    ------
    CheckpointError
        If it is no such file, or truncated or damaged.
    """

    def __init__(self, path: Path, check: Callable[[], object] = lambda: None) -> None:
        if not is_file(path):  # opening a pipe would wait for a writer
            raise CheckpointError(f"{path} is no file, so it holds no weights; fetch it again.")
        self.path = path
        self._check = check
        with _told(path):
            self._file = path.open("rb", buffering=0)
            try:
                self.stamp = self._stamp()
                with safe_open(path, framework="pt"):  # the library checks the whole header
                    pass
                self._entries, self.metadata = self._header()
            except BaseException:
                self._file.close()
                raise

    def _stamp(self) -> str:
        stat = os.fstat(self._file.fileno())
        return f"{self.path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"

    def _header(self) -> tuple[dict[str, Entry], Mapping[str, str]]:
        length = int.from_bytes(self._file.read(8), "little")
        raw: dict[str, Any] = json.loads(self._file.read(length))
        metadata = raw.pop("__metadata__", {})
        entries = dict[str, Entry]()
        for name, told in raw.items():
            begin, end = told["data_offsets"]
            dtype = _DTYPES.get(told["dtype"], told["dtype"])
            entries[name] = Entry(dtype, tuple(told["shape"]), 8 + length + begin, end - begin)
        return entries, metadata

    @property
    def names(self) -> Collection[str]:
        """Names of its tensors."""
        return self._entries.keys()

    @property
    def unchanged(self) -> bool:
        """True if nothing has been written to the file since it was opened."""
        return self._stamp() == self.stamp

    def __getitem__(self, name: str) -> Entry:
        """Type and shape of a tensor, and where it is."""
        return self._entries[name]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor.

        Raises
        ------
        CheckpointError
            If tensors of its type are not read.
        """
        found = self._entries[name].dtype
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"tensor {name} of {self.path} is of type {found}, which is not read.")
        return found

    def read_into(self, name: str, out: torch.Tensor, begin: int = 0) -> None:
        """Read a tensor, or its bytes from `begin` on, into contiguous memory of its type until this is full.

        Raises
        ------
        CheckpointError
            If the file was cut short since it was opened, or cannot be read.
        """
        entry = self._entries[name]
        view = bytes_of(out)
        if begin + len(view) > entry.size:
            raise CheckpointError(f"tensor {name} of {self.path} has {entry.size} bytes, not {begin + len(view)}.")
        done = 0
        while done < len(view):
            self._check()
            with _told(self.path):
                count = os.preadv(self._file.fileno(), [view[done : done + STEP]], entry.begin + begin + done)
                if not count:
                    raise OSError(f"it ends within tensor {name}")
            done += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """Name the file in errors of reading it."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({reason(error)}); fetch it again.") from error
