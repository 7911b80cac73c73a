"""Requests of a job on a loaded model: answers are handed on as they come, and a failure costs only who causes it."""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from workbench.core.errors import EngineError
from workbench.core.records import reason
from workbench.core.result import TokenLogprobs
from workbench.engine import End, Session, Told
from workbench.jobs.answers import Journal
from workbench.jobs.completions import AnswerWriter
from workbench.jobs.requests import Fault, Line

Answer = tuple[str, dict[str, Any]]
"""The id of a request, and the body of its answer."""
DEATHS = 3
"""Deaths of a process while a request was under way until it is served alone, and alone until it is set aside.

Kills at random moments do not meet one request so often, least of all alone.
"""
_LOOK = 0.5
"""Seconds between two looks at those under way, while no request ends."""
_IN_A_ROW = 3
"""Requests after one another with which, each alone, the engine fails until it is the engine that is at fault."""


@dataclass(eq=False)
class UnderWay:
    """A request that is served, and its tokens so far."""

    line: Line
    alone: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class _FailedError(Exception):
    """The engine failed; the cause says why."""


class Watcher:
    """Whoever is told of a job's requests; this one does nothing."""

    def loaded(self) -> None:
        """The model is loaded."""

    def ended(self, each: UnderWay) -> None:
        """The answer to a request was handed on."""

    def look(self, under_way: set[UnderWay]) -> None:
        """Time passes."""


class Answering:
    """Serves requests and hands their answers on. It is a context manager, whose end lets the model go.

    Parameters
    ----------
    load : callable
        Loads the model: for the first request, and again after it failed.
    writer : AnswerWriter
    commit : callable
        Takes answers as they come.
    journal : Journal
        Knows the requests during which a process died; those that may be the cause are served alone, at the end.
    watcher : Watcher
    """

    def __init__(
        self,
        load: Callable[[], Session],
        writer: AnswerWriter,
        commit: Callable[[Sequence[Answer]], object],
        journal: Journal,
        watcher: Watcher,
    ) -> None:
        self._load = load
        self._writer = writer
        self._commit = commit
        self._journal = journal
        self._watcher = watcher
        self._session: Session | None = None
        self._told: queue.SimpleQueue[tuple[UnderWay, End | BaseException]] = queue.SimpleQueue()
        self._under_way = set[UnderWay]()
        self._failed = 0  # requests after one another with which the engine failed

    def answer(self, lines: Iterable[Line], most: int) -> Iterator[Fault]:
        """Answer requests, so many at once; the faults of those with which the engine fails, or dies.

        Raises
        ------
        BaseException
            The engine's own error, if it fails with several in a row, each alone.
        """
        suspects = list[Line]()
        harmless = (line for line in lines if self._is_harmless(line, suspects))
        left = True
        while left:
            try:
                self._answer(harmless, most, alone=False)
                left = False
            except _FailedError as error:
                suspects += self._fail(error)
        yield from self._alone(suspects)

    def _is_harmless(self, line: Line, suspects: list[Line]) -> bool:
        """True unless a request was under way at so many deaths that it is one of the suspects."""
        if self._journal.begun[line.custom_id] < DEATHS:
            return True
        suspects.append(line)
        return False

    def _alone(self, lines: Sequence[Line]) -> Iterator[Fault]:
        for line in lines:
            if self._journal.alone[line.custom_id] >= DEATHS:
                yield _deadly(line)
                continue
            try:
                self._answer(iter([line]), 1, alone=True)
                self._failed = 0
            except _FailedError as error:
                self._failed += 1
                self._fail(error)
                if self._failed == _IN_A_ROW:
                    raise error.__cause__ or error from None
                yield _poison(line, error.__cause__ or error)

    def _fail(self, error: _FailedError) -> list[Line]:
        """Let the model go; the requests that were under way."""
        lines = sorted((each.line for each in self._under_way), key=lambda line: line.number)
        self._told = queue.SimpleQueue()  # nothing more is heard of them
        self._under_way.clear()
        self.close()
        if not lines:  # it cannot even be loaded
            raise error.__cause__ or error from None
        return lines

    def _answer(self, lines: Iterator[Line], most: int, *, alone: bool) -> None:
        for line in lines:
            self._ask(UnderWay(line, alone))
            while len(self._under_way) >= most:
                self._collect()
        while self._under_way:
            self._collect()

    def _ask(self, each: UnderWay) -> None:
        told = self._told
        wanted = each.line.asked.request.sampling.logprobs is not None

        def tell(news: Told | BaseException) -> None:
            if isinstance(news, BaseException):
                told.put((each, news))
                return
            each.tokens.append(news.token)
            if wanted and news.logprobs is not None:
                each.logprobs.append(news.logprobs)
            if news.end is not None:
                told.put((each, news.end))

        session = self._opened()
        self._journal.begin(each.line.custom_id, alone=each.alone)
        self._under_way.add(each)
        try:
            session.ask(each.line.asked.request, tell)
        except EngineError as error:
            raise _FailedError from (session.failure or error)

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._load()
            self._session.wait()
            self._watcher.loaded()
        return self._session

    def _collect(self) -> None:
        """Hand on the answers that are there, after waiting for one."""
        self._watcher.look(self._under_way)
        try:
            found = [self._told.get(timeout=_LOOK)]
        except queue.Empty:
            return
        while not self._told.empty():
            found.append(self._told.get())
        ended = [(each, end) for each, end in found if isinstance(end, End)]
        self._commit([(each.line.custom_id, self._body(each, end)) for each, end in ended])
        for each, _ in ended:
            self._under_way.remove(each)
            self._watcher.ended(each)
        for _, failure in found:
            if isinstance(failure, BaseException):
                raise _FailedError from failure

    def _body(self, each: UnderWay, end: End) -> dict[str, Any]:
        line = each.line
        identity = hashlib.sha256(line.custom_id.encode("utf-8")).hexdigest()[:24]
        return self._writer.answer(line.asked, identity, int(time.time()), each.tokens, each.logprobs, end)

    def close(self) -> None:
        """Let the model go."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Answering:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _deadly(line: Line) -> Fault:
    message = f"{DEATHS} processes died while they served this request alone; change the request."
    return Fault(line.number, line.custom_id, "engine_died", message)


def _poison(line: Line, error: BaseException) -> Fault:
    message = f"the engine failed while it served this request alone ({reason(error)}); change the request."
    return Fault(line.number, line.custom_id, "engine_failed", message)
