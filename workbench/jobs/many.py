"""A file of requests on many machines: the engine as an actor of Ray Data, which begins it again where it dies.

Ray's own checkpoint knows the requests whose answers are written. Whoever dies, driver included, the same job begun
again goes on from there; at the end the answers come into the one file, each once.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import Any

from workbench.core.errors import EngineError
from workbench.engine import Session
from workbench.jobs.answering import Answer, Answering, Watcher
from workbench.jobs.answers import Answers, Journal
from workbench.jobs.bodies import BodyReader
from workbench.jobs.completions import AnswerWriter
from workbench.jobs.llm import LLM
from workbench.jobs.requests import Fault, Line, LineReader
from workbench.jobs.room import Room
from workbench.schedules import Sequential

_ROWS = 4
"""Requests of a block, times those that run at once; a block is the most that is lost with an engine."""
_SPARE_CPUS = 4
"""Slots for Ray's own tasks. Engines take none; with fewer than two beside them Ray Data waits without end."""
_STORE = 200_000_000
"""Bytes of Ray's object store on this computer, which holds requests and answers alone."""


class Engine:
    """An engine as Ray Data calls it: a table of requests in, a table of answers out.

    Parameters
    ----------
    llm : LLM
    room : Room
    longest : int
        Most tokens of a request.
    max_tokens : int
        Most tokens of an answer where the request says nothing.
    journals : Path
        Folder in which engines write down the requests that they begin.
    """

    def __init__(self, llm: LLM, room: Room, longest: int, max_tokens: int, journals: Path) -> None:
        self._bodies = BodyReader(llm, max_tokens=max_tokens)
        self._together = room.together
        self._answers = list[Answer]()
        journal = Journal(journals / uuid.uuid4().hex, list(journals.iterdir()))
        load = partial(Session, room.planned(llm, longest), Sequential())
        self._work = Answering(load, AnswerWriter(llm), self._answers.extend, journal, Watcher())

    def __call__(self, requests: Any) -> Any:
        """Answer some requests.

        Parameters
        ----------
        requests : pyarrow.Table
            Columns ``custom_id``, ``number`` and ``raw``: id, line number and line of each request.

        Returns
        -------
        pyarrow.Table
            Columns ``custom_id``, ``number``, ``body`` (the answer's, as JSON), ``code`` and ``message`` (those of a
            fault); what a request does not have is null.
        """
        self._answers.clear()
        rows = requests.to_pylist()
        faults = list(self._work.answer(self._lines(rows), 2 * self._together))
        numbers = {row["custom_id"]: row["number"] for row in rows}
        found: list[dict[str, Any]] = [
            {"custom_id": custom_id, "number": numbers[custom_id], "body": json.dumps(body)}
            for custom_id, body in self._answers
        ]
        for fault in faults:
            found.append(
                {
                    "custom_id": fault.custom_id,
                    "number": fault.number,
                    "code": fault.code,
                    "message": fault.message,
                }
            )
        return _table(found, _ANSWERED)

    def _lines(self, rows: Iterable[dict[str, Any]]) -> Iterator[Line]:
        reader = LineReader(self._bodies)  # a request that is served again is no duplicate of itself
        for row in rows:
            found = reader.read(row["number"], row["raw"])
            if isinstance(found, Line):
                yield found


_ASKED = {"custom_id": "string", "number": "int64", "raw": "binary"}
_ANSWERED = {"custom_id": "string", "number": "int64", "body": "string", "code": "string", "message": "string"}


def _table(rows: list[dict[str, Any]], columns: dict[str, str]) -> Any:
    import pyarrow

    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in columns.items()])
    return pyarrow.Table.from_pylist(rows, schema)


class Cluster:
    """Engines on the machines of a cluster of Ray.

    Parameters
    ----------
    llm : LLM
    room : Room
        That of each engine.
    longest : int
        Most tokens of a request.
    max_tokens : int
        Most tokens of an answer where the request says nothing.
    engines : int
        Most engines.

    Attributes
    ----------
    tokens : int
        Tokens generated.
    """

    def __init__(self, llm: LLM, room: Room, longest: int, max_tokens: int, engines: int) -> None:
        self._given = (llm, room, longest, max_tokens)
        self._rows = _ROWS * room.together
        self._engines = engines
        self.tokens = 0

    def answer(self, lines: Iterator[Line], answers: Answers, folder: Path) -> Iterator[Fault]:
        """Answer requests, and commit the answers; the faults of those with which an engine fails, or dies.

        Parameters
        ----------
        lines : iterator of Line
        answers : Answers
        folder : Path
            Where every machine reads requests and writes answers; it is removed at the end.

        Raises
        ------
        EngineError
            If Ray is missing.
        """
        _connect()
        asked = folder / "requests"
        rmtree(asked, ignore_errors=True)
        for path in (asked, folder / "journals"):
            path.mkdir(parents=True, exist_ok=True)
        self._write(lines, asked)
        self._run(asked, folder)
        yield from self._gather(folder / "answers", answers)
        rmtree(folder)

    def _write(self, lines: Iterator[Line], asked: Path) -> None:
        """Write requests into files of as many as a block has."""
        from pyarrow import parquet

        number = 0
        while block := list(islice(lines, self._rows)):
            rows = [{"custom_id": line.custom_id, "number": line.number, "raw": line.raw} for line in block]
            parquet.write_table(_table(rows, _ASKED), asked / f"{number:08}.parquet")
            number += 1

    def _run(self, asked: Path, folder: Path) -> None:
        import ray.data
        from ray.data.checkpoint import CheckpointConfig

        context = ray.data.DataContext.get_current()
        context.checkpoint_config = CheckpointConfig(
            id_column="custom_id", checkpoint_path=str(folder / "checkpoint"), delete_checkpoint_on_success=False
        )
        try:
            blocks = sum(1 for _ in asked.iterdir())
            requests = ray.data.read_parquet(str(asked), override_num_blocks=blocks)
            requests.repartition(target_num_rows_per_block=self._rows).map_batches(
                Engine,
                fn_constructor_args=(*self._given, folder / "journals"),
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=self._engines),
                num_cpus=0,
                scheduling_strategy="SPREAD",
            ).write_parquet(str(folder / "answers"))
        finally:
            context.checkpoint_config = None

    def _gather(self, made: Path, answers: Answers) -> Iterator[Fault]:
        """Commit the answers that engines wrote; the faults beside them."""
        from pyarrow import parquet

        for file in sorted(made.glob("*.parquet")):
            rows = parquet.read_table(file, columns=list(_ANSWERED)).to_pylist()
            new = {row["custom_id"]: json.loads(row["body"]) for row in rows if row["body"] is not None}
            fresh = {custom_id: body for custom_id, body in new.items() if custom_id not in answers.ids}
            answers.commit(fresh.items())
            self.tokens += sum(body["usage"]["completion_tokens"] for body in fresh.values())
            for row in rows:
                if row["body"] is None:
                    yield Fault(row["number"], row["custom_id"], row["code"], row["message"])


def _connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, or begin one on this computer, unless the user has."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray.data
    except ModuleNotFoundError as error:
        raise EngineError(
            "several engines need Ray; pip install 'moe-workbench[ray]', or leave engines out."
        ) from error
    if ray.is_initialized():
        return
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=_SPARE_CPUS, include_dashboard=False, object_store_memory=_STORE)
    with suppress(OSError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)  # it is readable for all as Ray makes it
