"""Lines of a file of requests in OpenAI's batch format: each can be served, or is a fault with a name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from workbench.core.errors import RequestError, WorkloadError
from workbench.core.records import is_file
from workbench.jobs.bodies import Asked, BodyReader, Kind, is_utf8, parse_object

LONGEST_LINE = 16_000_000
"""Bytes of the longest line that is read."""
_LONGEST_ID = 512
_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """A request of a file, which can be served."""

    number: int
    custom_id: str
    asked: Asked
    raw: bytes


@dataclass(frozen=True)
class Fault:
    """A request of a file that is not served, and the reason.

    Attributes
    ----------
    number : int
        Line of the file, from 1 on.
    custom_id : str or None
        None where the line has none that can be read.
    code, message : str
        One word for programs, and one sentence.
    """

    number: int
    custom_id: str | None
    code: str
    message: str


def too_long(line: Line, most: int) -> Fault:
    """The fault of a request that has more tokens than there is room for."""
    error = line.asked.too_long(most)
    return Fault(line.number, line.custom_id, error.code, str(error))


def check_there(path: Path) -> None:
    """Refuse a file that is not there.

    Raises
    ------
    WorkloadError
        If there is no such file.
    """
    if not is_file(path):
        raise WorkloadError(f"requests file {str(path)!r} does not exist; give the path of a file with JSON lines.")


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a file that are not empty, with their numbers from 1 on; of one that is too long only the beginning."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            rest = line
            while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST_LINE + 1)
            if line.strip():
                yield number, line


class LineReader:
    """Reads the lines of one file, from the first to the last.

    Parameters
    ----------
    bodies : BodyReader
    """

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._first = dict[str, int]()

    @property
    def ids(self) -> KeysView[str]:
        """Ids of the lines that were read so far."""
        return self._first.keys()

    def read(self, number: int, raw: bytes) -> Line | Fault:
        """The request of a line, or its fault; of several with the same id, all but the first are faults."""
        custom_id = None
        try:
            if len(raw) > LONGEST_LINE:
                raise RequestError(f"the line is longer than {LONGEST_LINE} bytes; shorten it.", code="line_too_long")
            entry = parse_object(raw)
            custom_id = _id(entry)
            first = self._first.setdefault(custom_id, number)
            if first != number:
                raise RequestError(
                    f"lines {first} and {number} have the same custom_id {short(custom_id)}; give each its own.",
                    code="duplicate_custom_id",
                )
            body = entry.get("body")
            if not isinstance(body, Mapping):
                raise RequestError(f"body must be an object, not {short(body)}.")
            asked = self._bodies.read(_kind(entry, body), body, seed=seed_of(custom_id))
            return Line(number, custom_id, asked, raw)
        except RequestError as error:
            return Fault(number, custom_id, error.code, str(error))


def seed_of(custom_id: str) -> int:
    """The seed of a request that gives none: 63 bits of a digest of its id, so that a retry gives the same text."""
    return int.from_bytes(hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()[:8]) >> 1


def _id(entry: Mapping[str, Any]) -> str:
    found = entry.get("custom_id")
    if not (isinstance(found, str) and 0 < len(found) <= _LONGEST_ID):
        raise RequestError(
            f"custom_id must be a text of 1 to {_LONGEST_ID} characters, not {short(found)}.", code="missing_custom_id"
        )
    if not is_utf8(found):
        raise RequestError("custom_id is no UTF-8; correct it.", code="missing_custom_id")
    unknown = sorted(set(entry).difference(_KEYS))
    if unknown:
        raise RequestError(f"the key {short(unknown[0])} is unknown; a line has {', '.join(_KEYS)}.")
    return found


def _kind(entry: Mapping[str, Any], body: Mapping[str, Any]) -> Kind:
    """The kind of a request: that of its url, or else that of its body."""
    if entry.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, not {short(entry['method'])}.")
    url = entry.get("url", Kind.CHAT.value if "messages" in body else Kind.TEXT.value)
    known = [kind for kind in Kind if kind.value == url]
    if not known:
        raise RequestError(
            f"url must be {' or '.join(kind.value for kind in Kind)}, not {short(url)}.", code="invalid_url"
        )
    if body.get("stream"):
        raise RequestError("stream cannot be true in a file of requests; leave it out.")
    return known[0]
