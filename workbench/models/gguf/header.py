"""Metadata and tensors of a model in GGUF, of one file or of several parts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.errors import CheckpointError
from workbench.core.records import is_file, reason

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_TOKENIZER = "tokenizer."
_DAMAGE = (ValueError, LookupError, ArithmeticError, TypeError, OSError)
"""Errors of the package `gguf` with files that are no GGUF, damaged, or of types that it does not know."""


class Tensor(NamedTuple):
    """One tensor of a file.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Elements of a row first, then the number of rows: (inputs, outputs), or (inputs, outputs, experts).
    bytes : int
        Its size in the file.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def weights(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a model.

    Attributes
    ----------
    name : str
        Name of the file, without its suffix and the number of its part.
    values : mapping of str to value
        Metadata, without those of the tokenizer and without lists of texts.
    tensors : mapping of str to Tensor
    """

    name: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_header(path: Path) -> Header:
    """The header of a GGUF file, with the tensors of all its parts if it is one of several; no weights are read.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or the package `gguf` is.
    """
    files = _parts(path)
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for file in files:
        own, found = _read(file)
        _check_part(file, own, len(files))
        values = values or own
        twice = [name for name in found if name in tensors]
        if twice:
            raise CheckpointError(f"{str(file)!r} has {twice[0]}, as another of its parts does; copy the parts anew.")
        tensors |= found
    told = values.get("split.tensors.count", len(tensors))
    if told != len(tensors):
        raise CheckpointError(
            f"the {len(files)} parts of {str(path)!r} have {len(tensors)} tensors, not {told}; copy them anew."
        )
    split = _PART.fullmatch(path.name)
    return Header(split["stem"] if split else path.stem, values, tensors)


def _parts(path: Path) -> list[Path]:
    """All files of a model, in order."""
    split = _PART.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    files = [path.with_name(f"{split['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    missing = [file.name for file in files if not is_file(file)]
    if missing or not files:
        raise CheckpointError(
            f"{str(path)!r} is one of {count} parts, of which {missing[0] if missing else path.name} is missing; copy "
            "all parts into one folder."
        )
    return files


def _check_part(file: Path, values: Mapping[str, Any], count: int) -> None:
    told = values.get("split.count") or 1
    if told != count:
        raise CheckpointError(
            f"{str(file)!r} is one of {told} parts by its metadata, and of {count} by its name; give it the name that "
            "it was published under."
        )


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of one file."""
    if not is_file(file):
        raise CheckpointError(f"{str(file)!r} does not exist; give a GGUF file.")
    try:
        from workbench.models.gguf.reader import HeaderReader
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{str(file)!r} is read with the package {error.name}, which is missing; "
            "pip install 'moe-workbench[models]'."
        ) from error
    try:
        reader = HeaderReader(file)
        values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith(_TOKENIZER)}
        found = [Tensor(one.name, tuple(map(int, one.shape)), int(one.n_bytes)) for one in reader.tensors]
        counts = [int(one.n_elements) for one in reader.tensors]
    except _DAMAGE as error:
        raise CheckpointError(
            f"{str(file)!r} is no GGUF file that can be read ({reason(error)}); copy it anew, or update the package "
            "gguf if the file's types are newer."
        ) from error
    for tensor, count in zip(found, counts, strict=True):
        if tensor.weights != count:
            raise CheckpointError(f"{str(file)!r} has the tensor {tensor.name} of impossible size; copy it anew.")
    return values, {tensor.name: tensor for tensor in found}
