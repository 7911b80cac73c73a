"""A loaded model that serves requests as they come, whoever asks, until it is closed."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from workbench.core.errors import CapacityError, EngineError, StoppedError
from workbench.core.result import Source, TokenLogprobs
from workbench.engine.devices.opening import ledger_told, open_driver
from workbench.engine.engine import Engine
from workbench.engine.lanes.process import Occupation, occupy
from workbench.engine.runnable import check_request, check_runnable
from workbench.scenario import Scenario
from workbench.schedules.base import Schedule
from workbench.serving import prepare, serve
from workbench.serving.iterations import Joined
from workbench.serving.loop import Called
from workbench.serving.prepared import Prepared
from workbench.workload import Request, Workload
from workbench.workload.stop_strings import stops
from workbench.workload.tokenizer import load_tokenizer

ROUND_REQUESTS, ROUND_ITERATIONS = 10_000, 100_000
"""Most requests that a round takes, and iterations in which it takes some: a round's records then take some 100 MB.

A round that takes none any more ends with its longest request, and the requests that wait begin the next one.
"""
_LOOK = 0.1
"""Seconds between two looks of a session that has nothing to do, for the end of Python."""


class End(enum.Enum):
    """Reason for which a request has ended; the values are OpenAI's."""

    STOP = "stop"
    """It sampled a stop token, or its tokens spell a text at which it stops."""
    LENGTH = "length"
    """It has its output length."""


class Told(NamedTuple):
    """A request's next token; `end` is there with its last one."""

    token: int
    logprobs: TokenLogprobs | None
    end: End | None


Tell = Callable[[Told | BaseException], object]
"""Takes each token of a request as it comes, or the error for which no further one will come.

It is called from a thread of the engine, which waits for it.
"""


@dataclass(eq=False)
class Ticket:
    """A request that a session serves, and its tokens so far."""

    request: Request
    tell: Tell
    asked: float
    tokens: list[int] = field(default_factory=list)
    number: int | None = None
    """Its number in the round under way, once that has taken it."""


class Session:
    """A loaded model that serves requests as they come, in a thread of its own, until it is closed.

    Requests are served in rounds by the serving loop of `run`, on one loaded model. A round begins with whoever waits,
    others join it, and it ends when nobody is left, or once it has taken so many that its records would grow large.
    Every method may be called from any thread. It is a context manager, whose end closes it.

    Parameters
    ----------
    scenario : Scenario
        Its workload is served by nobody: it tells for how many requests at once, and of what lengths, memory is
        planned. All weights are resident.
    schedule : Schedule

    Raises
    ------
    EngineError
        If model, machine or workload cannot be run, or a live run is under way in this process.
    WorkbenchError
        As `run` does.
    """

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        prepared = prepare(scenario, schedule)
        check_runnable(prepared, on_card=scenario.machine.has_card)
        self._prepared = prepared
        self._longest = int((scenario.workload.prompt_len + scenario.workload.output_len).max())
        self._desk = _Desk(prepared)
        self._loaded = threading.Event()
        self._occupation: Occupation = occupy(f"a session with {scenario.model.name!r}")
        try:
            self._driver = open_driver(scenario.machine, on_card=scenario.machine.has_card)
        except BaseException:
            self._occupation.end()
            raise
        self._thread = threading.Thread(target=self._work, name="session", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._occupation.end()
            raise

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self._longest

    @property
    def used_blocks(self) -> int:
        """KV blocks that requests hold."""
        return self._desk.engine.used_blocks if self._desk.engine is not None else 0

    @property
    def blocks(self) -> int:
        """KV blocks in all."""
        return self._prepared.scenario.kv_blocks

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the session; None while it is open, or was closed."""
        return self._desk.failure

    def wait(self) -> None:
        """Wait until the model is loaded; requests may be asked before.

        Raises
        ------
        BaseException
            The error that ended the session meanwhile.
        """
        self._loaded.wait()
        if self.failure is not None:
            raise self.failure

    def ask(self, request: Request, tell: Tell) -> Ticket:
        """Let a request be served behind those that wait.

        Parameters
        ----------
        request : Request
        tell : callable
            Called with each of its tokens, and with the error if the session ends before the request does.

        Raises
        ------
        EngineError
            If the session has ended, or the model does not know a token.
        CapacityError
            If prompt and output together are longer than `longest`.
        WorkloadError
            If it is no request.
        """
        Workload.of([request])  # which checks it
        check_request(0, request, self._prepared.scenario.model)
        if len(request.prompt) + request.output_len > self._longest:
            raise CapacityError(
                f"a request of {len(request.prompt)} + {request.output_len} tokens is too long for this session, whose "
                f"memory is planned for {self._longest}; shorten it, or open a session with a larger longest=."
            )
        return self._desk.ask(Ticket(request, tell, time.monotonic()))

    def cancel(self, ticket: Ticket) -> None:
        """Let a request get no further token; its KV blocks are free with the next iteration."""
        self._desk.cancel(ticket)

    def close(self) -> None:
        """End the session; whoever is still served is told so."""
        self._occupation.control.stop()
        self._desk.wake()
        self._thread.join()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            with ledger_told(self._prepared):
                self._serve()
        except StoppedError:
            pass
        except BaseException as error:  # told to all who wait: a thread must not die silently
            failure = error
        finally:
            self._occupation.end()
            self._desk.end(failure)
            self._loaded.set()

    def _serve(self) -> None:
        control = self._occupation.control
        engine = Engine(self._prepared, control, self._desk, self._desk, self._driver)
        try:
            self._desk.engine = engine
            self._loaded.set()
            while True:
                self._desk.await_somebody(control.check)
                self._round(engine)
        finally:
            self._desk.engine = None
            engine.close()

    def _round(self, engine: Engine) -> None:
        self._desk.begin()
        try:
            result = serve(self._prepared, engine, Source.MEASURED)
        except StoppedError:
            self._occupation.control.check()
            return  # everybody was cancelled before the first iteration
        if not result.stopped:
            engine.forward.read_back()


class _Desk:
    """Tickets of a session: those that wait, and those of the round under way by their numbers.

    To the engine it is what other threads ask of a run, and who listens to the tokens.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._planned = tuple(range(len(prepared.scenario.workload)))
        self._model = prepared.scenario.model
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting = deque[Ticket]()
        self._served = dict[int, Ticket]()
        self._cancelled = list[int]()
        self._ended = False
        self.begin()

    # ---------------------------------------------------------------------------------------------- of any thread

    def ask(self, ticket: Ticket) -> Ticket:
        """See `Session.ask`."""
        with self._changed:
            if self._ended:
                raise EngineError(f"the session has ended ({self.failure or 'it was closed'}); open another.")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """See `Session.cancel`."""
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif ticket.number is not None and self._served.pop(ticket.number, None) is not None:
                self._cancelled.append(ticket.number)

    def wake(self) -> None:
        """Let a session that has nothing to do look whether it was closed."""
        with self._changed:
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------- of the session's thread

    def await_somebody(self, check: Callable[[], None]) -> None:
        """Wait until a request waits; `check` raises once the session is closed."""
        with self._changed:
            while not self._waiting:
                check()
                self._changed.wait(_LOOK)
        check()

    def begin(self) -> None:
        """Begin a round."""
        with self._changed:
            self._cancelled = list(self._planned)  # those for whom memory is planned
            self._count = len(self._planned)
            self._iterations = 0
            self._began = time.monotonic()

    def end(self, failure: BaseException | None) -> None:
        """Tell everybody that the session has ended."""
        with self._changed:
            self._ended = True
            self.failure = failure
            left = [*self._served.values(), *self._waiting]
            self._served.clear()
            self._waiting.clear()
        for ticket in left:
            ticket.tell(failure or StoppedError("the session was closed."))

    # ------------------------------------------------------------------------------------------------- of the engine

    @property
    def waiting(self) -> bool:
        """See `Calls.waiting`."""
        return bool(self._waiting or self._cancelled)

    @property
    def _open(self) -> bool:
        """True while the round takes requests."""
        return self._count - len(self._planned) < ROUND_REQUESTS and self._iterations < ROUND_ITERATIONS

    def take(self) -> Called:
        """See `Calls.take`; it is called once for each iteration, whose spans nobody will look at."""
        if self.engine is not None:
            self.engine.timeline.spans.clear()
        joined = list[Joined]()
        with self._changed:
            self._iterations += 1
            while self._waiting and self._open:
                ticket = self._waiting.popleft()
                ticket.number = self._count
                self._served[self._count] = ticket
                self._count += 1
                joined.append(Joined(ticket.request, max(0.0, ticket.asked - self._began)))
            cancelled = tuple(self._cancelled)
            self._cancelled.clear()
        return Called(tuple(joined), cancelled)

    def close_if_none(self) -> bool:
        """See `Calls.close_if_none`; whoever waits then begins the next round."""
        with self._changed:
            return not (self._waiting and self._open)

    def add(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See `Listener.add`."""
        for number, token in pairs:
            ticket = self._served.get(number)
            if ticket is None or self.engine is None:  # it was cancelled during this iteration
                continue
            ticket.tokens.append(token)
            end = self._end(ticket)
            if end is not None:
                with self._changed:
                    self._served.pop(number, None)
            ticket.tell(Told(token, self.engine.latest_logprobs(number), end))

    def _end(self, ticket: Ticket) -> End | None:
        """The reason for which a request ends with its latest token; None if it goes on."""
        if stops(ticket.tokens, ticket.request.sampling, lambda: load_tokenizer(self._model)):
            return End.STOP
        return End.LENGTH if len(ticket.tokens) == ticket.request.output_len else None
