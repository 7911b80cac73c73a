"""Requests from files: one JSON object per line, and the lines of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

from workbench.core.errors import WorkloadError
from workbench.core.records import is_file
from workbench.workload.request import Request, Sampling
from workbench.workload.tokenizer import Tokenizer

_NUMBER = (int, float)
_SAMPLING: dict[str, type | tuple[type, ...]] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": int,
    "stop_token_ids": list,
    "top_k": int,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "stop": list,
    "logprobs": int,
}
"""Keys of a `Sampling` in a line of JSON, and the types of their values."""


def lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file; only newlines end them, because a prompt may contain other separators.

    Raises
    ------
    WorkloadError
        If there is no such file, or it is no text.
    """
    if not is_file(path):
        raise WorkloadError(f"workload file {str(path)!r} does not exist; give the path of a text file.")
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"workload file {path.name} is not UTF-8 text ({error.reason}); convert it.") from error


def parse_request(where: str, line: str, output_len: int, tokenizer: Tokenizer) -> tuple[Request, float | None]:
    """The request of a line of JSON, and its arrival if the line has one.

    Raises
    ------
    WorkloadError
        If the line is malformed, or has text without a token; `where` names it.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where} is not valid JSON ({error}); write one object per line.") from error
    if not isinstance(entry, Mapping) or ("prompt" in entry) == ("tokens" in entry):
        raise WorkloadError(f"{where} must be an object with either 'prompt' (text) or 'tokens' (a list of ids).")
    unknown = set(entry).difference(("prompt", "tokens", "output_len", *_SAMPLING, "arrival"))
    if unknown:
        raise WorkloadError(f"{where} has the unknown key {sorted(unknown)[0]!r}; remove it.")
    if "prompt" in entry:
        prompt = _encode(_typed(entry, "prompt", str, where), tokenizer, where)
    else:
        prompt = tuple(_typed(entry, "tokens", list, where))
    if "output_len" in entry:
        output_len = _typed(entry, "output_len", int, where)
    arrival = _typed(entry, "arrival", (int, float), where) if "arrival" in entry else None
    sampling = _sampling(entry, where)
    try:
        return Request(prompt, output_len, sampling), arrival
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _encode(text: str, tokenizer: Tokenizer, where: str) -> tuple[int, ...]:
    try:
        return tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise WorkloadError(f"{where} has a prompt that is no UTF-8 ({error.reason}); correct it.") from None
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _sampling(entry: Mapping[str, Any], where: str) -> Sampling:
    given = {key: _typed(entry, key, kind, where) for key, kind in _SAMPLING.items() if key in entry}
    try:
        return Sampling(**given)
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _typed(entry: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
        names = kind.__name__ if isinstance(kind, type) else "number"
        raise WorkloadError(f"{where} has {key}={short(entry[key])}; it must be of type {names}.")
    return entry[key]
