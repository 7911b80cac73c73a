"""Settings of a checkpoint for generation: tokens with which a text ends, and how tokens are sampled."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as short
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.records import is_file, read_json
from workbench.core.units import is_number, is_whole
from workbench.models.config import ModelConfig
from workbench.models.huggingface import folder_of

_FILES = ("generation_config.json", "config.json")
"""Files that may name the tokens, the one that is heard first in front."""


_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
"""Settings whose names and meanings are those of `Sampling`."""


def eos_token_ids(model: ModelConfig | str | Path) -> tuple[int, ...]:
    """End-of-sequence tokens of a checkpoint, from its ``generation_config.json``, or else its ``config.json``.

    No request ends with them by itself: ``workload.stopping(at=wb.eos_token_ids(model))`` asks for it.

    Parameters
    ----------
    model : ModelConfig or str or Path
        A checkpoint, or its folder.

    Raises
    ------
    CheckpointError
        If the model has no folder, a file is damaged, or neither names such a token.
    """
    folder = folder_of(model)
    if folder is None:
        raise CheckpointError(f"model {short(str(model))} is no checkpoint with files; give the token ids themselves.")
    for file in (folder / name for name in _FILES):
        found = _eos(file) if is_file(file) else None
        if found is not None:
            return found
    raise CheckpointError(
        f"checkpoint {folder.name!r} names no eos_token_id in {' or '.join(_FILES)}; give the token ids themselves."
    )


def sampling_defaults(model: ModelConfig | str | Path) -> dict[str, float]:
    """Values of ``top_k``, ``top_p``, ``min_p`` and ``repetition_penalty`` that ``generation_config.json`` gives.

    Parameters
    ----------
    model : ModelConfig or str or Path
        A checkpoint, or its folder.

    Raises
    ------
    CheckpointError
        If the file is damaged, or a value is no number.
    """
    folder = model.path if isinstance(model, ModelConfig) else Path(model)
    file = None if folder is None else folder / _FILES[0]
    if file is None or not is_file(file):
        return {}
    given = _object(file)
    found = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    for name, value in found.items():
        if not (is_whole(value) if name == "top_k" else is_number(value)):
            raise CheckpointError(f"{file} has {name}={short(value)}; it must be a number.")
    return found


def _object(file: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty if the file holds another value."""
    try:
        raw = read_json(file)
    except ValueError as error:
        raise CheckpointError(f"{error}; restore it from where the model came.") from error
    return raw if isinstance(raw, dict) else {}


def _eos(file: Path) -> tuple[int, ...] | None:
    """The tokens that a file names; None if it names none."""
    found = _object(file).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(is_whole(token) and 0 <= token < 2**63 for token in ids):
        raise CheckpointError(f"{file} has eos_token_id={short(found)}; it must be a token id or a list of them.")
    return tuple(ids) or None
