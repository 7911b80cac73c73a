"""Requests of a job on a loaded model: answers are committed as they come, and a failure costs only who causes it."""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from workbench.core.errors import EngineError
from workbench.core.records import reason
from workbench.core.result import TokenLogprobs
from workbench.engine import End, Session, Told
from workbench.jobs.answers import Answers, Journal
from workbench.jobs.completions import AnswerWriter
from workbench.jobs.progress import Bar
from workbench.jobs.requests import Fault, Line

_LOOK = 0.5
"""Seconds between two drawings of the progress."""
_IN_A_ROW = 3
"""Requests after one another with which, each alone, the engine fails until it is the engine that is at fault."""


@dataclass(eq=False)
class UnderWay:
    """A request that is served, and its tokens so far."""

    line: Line
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class _FailedError(Exception):
    """The engine failed; the cause says why."""


class Answering:
    """Serves requests and commits their answers.

    Parameters
    ----------
    load : callable
        Loads the model.
    writer : AnswerWriter
    answers : Answers
    journal : Journal
    bar : Bar
    """

    def __init__(
        self, load: Callable[[], Session], writer: AnswerWriter, answers: Answers, journal: Journal, bar: Bar
    ) -> None:
        self._load = load
        self._writer = writer
        self._answers = answers
        self._journal = journal
        self._bar = bar
        self._told: queue.SimpleQueue[tuple[UnderWay, End | BaseException]] = queue.SimpleQueue()
        self._under_way = set[UnderWay]()

    def together(self, lines: Iterator[Line], most: int) -> list[Line]:
        """Answer requests, so many at once; those under way when the engine failed, of which one may be the cause."""
        suspects = list[Line]()
        left = True
        while left:
            with self._load() as session:
                session.wait()
                self._bar.begin()
                try:
                    self._answer(session, lines, most, alone=False)
                    left = False
                except _FailedError as error:
                    if not self._under_way:
                        raise error.__cause__ or error from None
                    suspects += self._forget()
        return suspects

    def alone(self, lines: list[Line]) -> Iterator[Fault]:
        """Answer requests one after the other; the faults of those with which the engine fails.

        Raises
        ------
        BaseException
            The engine's own error, if it fails with several in a row.
        """
        waiting = iter(lines)
        failed = 0
        left = bool(lines)
        while left:
            before = len(self._answers.ids)
            with self._load() as session:
                session.wait()
                self._bar.begin()
                try:
                    self._answer(session, waiting, 1, alone=True)
                    left = False
                except _FailedError as error:
                    cause = error.__cause__ or error
                    failed = 1 if len(self._answers.ids) > before else failed + 1
                    if failed == _IN_A_ROW:
                        raise cause from None
                    yield from (_poison(line, cause) for line in self._forget())

    def _forget(self) -> list[Line]:
        """Forget the requests under way, and what is still told of them."""
        self._told = queue.SimpleQueue()
        lines = [each.line for each in self._under_way]
        self._under_way.clear()
        return sorted(lines, key=lambda line: line.number)

    def _answer(self, session: Session, lines: Iterator[Line], most: int, *, alone: bool) -> None:
        for line in lines:
            self._ask(session, line, alone=alone)
            while len(self._under_way) >= most:
                self._collect()
        while self._under_way:
            self._collect()

    def _ask(self, session: Session, line: Line, *, alone: bool) -> None:
        asked = UnderWay(line)
        told = self._told
        wanted = line.asked.request.sampling.logprobs is not None

        def tell(each: Told | BaseException) -> None:
            if isinstance(each, BaseException):
                told.put((asked, each))
                return
            asked.tokens.append(each.token)
            if wanted and each.logprobs is not None:
                asked.logprobs.append(each.logprobs)
            if each.end is not None:
                told.put((asked, each.end))

        self._journal.begin(line.custom_id, alone=alone)
        self._under_way.add(asked)
        try:
            session.ask(line.asked.request, tell)
        except EngineError as error:
            raise _FailedError from (session.failure or error)

    def _collect(self) -> None:
        """Commit the answers that are there, after waiting for one."""
        while True:
            self._bar.draw(sum(len(each.tokens) for each in self._under_way), map(_share, self._under_way))
            try:
                found = [self._told.get(timeout=_LOOK)]
                break
            except queue.Empty:
                continue
        while not self._told.empty():
            found.append(self._told.get())
        failures = [end for _, end in found if isinstance(end, BaseException)]
        ended = [(each, end) for each, end in found if isinstance(end, End)]
        self._answers.commit((each.line.custom_id, self._body(each, end)) for each, end in ended)
        for each, _ in ended:
            self._under_way.remove(each)
            self._bar.done(len(each.tokens), each.line.tokens)
        if failures:
            raise _FailedError from failures[0]

    def _body(self, each: UnderWay, end: End) -> dict[str, object]:
        line = each.line
        identity = hashlib.sha256(line.custom_id.encode("utf-8")).hexdigest()[:24]
        return self._writer.answer(line.asked, identity, int(time.time()), each.tokens, each.logprobs, end)


def _share(each: UnderWay) -> int:
    """Tokens of a prompt and its answer so far."""
    return len(each.line.asked.request.prompt) + len(each.tokens) if each.tokens else 0


def _poison(line: Line, error: BaseException) -> Fault:
    message = f"the engine failed while it served this request alone ({reason(error)}); change the request."
    return Fault(line.number, line.custom_id, "engine_failed", message)
