"""Answers of a job, in a file of their own: each is there for good once it is committed, whatever happens then."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from reprlib import repr as short
from types import TracebackType
from typing import Any, BinaryIO

from workbench.core.errors import WorkloadError
from workbench.jobs.bodies import parse_object
from workbench.jobs.requests import Fault

try:
    import fcntl
except ImportError:  # Windows: two jobs on one file are not kept apart there
    fcntl = None  # type: ignore[assignment]


def errors_path(out: Path) -> Path:
    """The file of the faults of a job, beside that of its answers."""
    return out.with_suffix(f".errors{out.suffix or '.jsonl'}")


_BEGIN = b'{"id":"batch_req_'
"""Begin of every line that is written, by which half a line is known."""


def json_line(value: object) -> bytes:
    """One line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


class Answers:
    """The file of a job's answers, which belongs to one job at a time.

    A job that was killed may have left half a line at its end, which is dropped. It is a context manager.

    Parameters
    ----------
    path : Path
        The file, which is made unless it is there.
    fingerprint : str
        See `LLM.fingerprint`: answers of other models do not stand in the same file.

    Raises
    ------
    WorkloadError
        If another job writes to the file, or it holds something else than answers of this model, each once.

    Attributes
    ----------
    ids : set of str
        Ids of the requests that are answered.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self.ids = set[str]()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b", buffering=0)
        try:
            self._lock()
            self._recover(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Refuse a second job on this file; the system takes the lock back however the process ends."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkloadError(
                f"another job writes to {str(self._path)!r}; wait for it, or give another file for the answers."
            ) from None

    def _recover(self, fingerprint: str) -> None:
        kept = 0
        self._file.seek(0)
        with self._path.open("rb") as whole:
            for number, line in enumerate(whole, 1):
                if not line.endswith(b"\n") and line.startswith(_BEGIN[: len(line)]):
                    break
                self._take(number, line, fingerprint)
                kept += len(line)
        self._file.truncate(kept)
        self._sync_folder()

    def _take(self, number: int, line: bytes, fingerprint: str) -> None:
        try:
            entry = parse_object(line)
            custom_id = entry["custom_id"]
            made_by = entry["response"]["body"]["system_fingerprint"]
            known = custom_id in self.ids
        except (WorkloadError, KeyError, TypeError):
            raise WorkloadError(
                f"line {number} of {str(self._path)!r} is no answer of a job; give another file for the answers."
            ) from None
        if made_by != fingerprint or known:
            problem = f"was made by {made_by}, not by {fingerprint}" if made_by != fingerprint else "is there twice"
            raise WorkloadError(
                f"the answer in line {number} of {str(self._path)!r} {problem}; give another file for the answers."
            )
        self.ids.add(custom_id)

    def _sync_folder(self) -> None:
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def check_asked(self, asked: Container[str], requests: Path) -> None:
        """Refuse answers to others than these requests.

        Raises
        ------
        WorkloadError
            If there is one.
        """
        for custom_id in self.ids:
            if custom_id not in asked:
                raise WorkloadError(
                    f"{str(self._path)!r} has the answer to {short(custom_id)}, for which {str(requests)!r} does not "
                    "ask; give another file for the answers."
                )

    def commit(self, bodies: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Keep bodies of answers by the ids of their requests; once this returns they are there for good."""
        answered = dict(bodies)
        left = b"".join(json_line(_success(*pair)) for pair in answered.items())
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())
        self.ids.update(answered)

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _success(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """A line of an answer, in OpenAI's format."""
    response = {"status_code": 200, "request_id": body["id"], "body": body}
    return {"id": f"batch_req_{body['id']}", "custom_id": custom_id, "response": response, "error": None}


class Faults:
    """The file of the requests that are set aside, written anew by each start of a job.

    Parameters
    ----------
    path : Path
        The file; it is there only if a request was set aside.

    Attributes
    ----------
    count : int
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        path.unlink(missing_ok=True)

    def add(self, fault: Fault) -> None:
        """Write a fault down."""
        self.count += 1
        error = {"code": fault.code, "message": fault.message, "line": fault.number}
        line = {"id": f"batch_req_line{fault.number}", "custom_id": fault.custom_id, "response": None, "error": error}
        with self._path.open("ab") as file:
            file.write(json_line(line))


class Journal:
    """The requests that were begun and not answered, for each start of a job that died.

    A request that takes the process with it would do so at every start. What was under way when it died is known from
    here: each line has the id of a request that was begun, beside others or alone.

    Parameters
    ----------
    path : Path
    others : sequence of Path
        Further journals to read: those of engines that serve requests of the same job.

    Attributes
    ----------
    begun, alone : Counter of str
        Times that each request was begun, beside others and alone, before this start.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._path = path
        self.begun = Counter[str]()
        self.alone = Counter[str]()
        for file in {path, *others}:
            for entry in _entries(file):
                (self.alone if entry.get("alone") else self.begun)[str(entry.get("id"))] += 1
        self._file = path.open("ab", buffering=0)
        self._file.write(b"\n")  # ends a line that was half written

    def begin(self, custom_id: str, *, alone: bool) -> None:
        """Write down that a request is begun."""
        self._file.write(json_line({"id": custom_id, "alone": alone}))

    def close(self, *, finished: bool) -> None:
        """End the journal; that of a finished job is removed."""
        self._file.close()
        if finished:
            self._path.unlink(missing_ok=True)


def _entries(journal: Path) -> Iterator[dict[str, Any]]:
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    for line in lines:
        try:
            yield parse_object(line)
        except WorkloadError:  # empty, or half written
            continue
