"""`run` and `start`: the wall clock executes every plan on the real model."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from tqdm.auto import tqdm

from workbench.core.errors import CapacityError, EngineError, StoppedError, WorkloadError
from workbench.core.quiet import listening
from workbench.core.result import Result, Source
from workbench.core.timeline import Timeline
from workbench.core.units import is_whole
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver
from workbench.engine.devices.opening import ledger_told, open_driver
from workbench.engine.engine import Engine, UnderWay
from workbench.engine.inbox import Inbox
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.process import Occupation, occupy
from workbench.engine.runnable import check_request, check_runnable
from workbench.engine.token_log import TokenLog
from workbench.kernels import features
from workbench.scenario import Scenario
from workbench.schedules.base import Schedule
from workbench.serving import Progress, prepare, serve
from workbench.serving.prepared import Prepared
from workbench.workload import Request, Workload


def run(scenario: Scenario, schedule: Schedule, *, alongside: bool = False, device: str | None = None) -> Result:
    """Serve the workload on this computer, with the model's weights, and measure.

    Parameters
    ----------
    scenario : Scenario
        A scenario whose model is a `wb.checkpoint`, whose machine is `wb.Machine.local`, and whose requests have token
        ids.
    schedule : Schedule
    alongside : bool
        Run beside another live run of this process, and share its cores.
    device : "cpu" or "cuda", optional
        What computes the gpu lane: some of the cores, or the NVIDIA card that torch sees first. By default the card
        where the scenario's machine has one.

    Returns
    -------
    Result
        A result with source MEASURED, the generated tokens of every request and a timeline of every task.

    Raises
    ------
    EngineError
        If model, machine or workload cannot be run, another live run is under way, or the settings that ran differ
        from those of the scenario.
    WorkbenchError
        As `simulate` does.
    """
    prepared, on_card = _checked(scenario, schedule, device, alongside)
    with _occupy(prepared, alongside=alongside) as control:
        return _run(prepared, control, open_driver(prepared.scenario.machine, on_card=on_card))


def _checked(scenario: Scenario, schedule: Schedule, device: str | None, alongside: bool) -> tuple[Prepared, bool]:
    """The prepared scenario, after the checks that this device can execute it, and whether that is a card."""
    if device not in (None, "cpu", "cuda"):
        raise EngineError(f"run has no device {device!r}; give device='cpu' or 'cuda'.")
    prepared = prepare(scenario, schedule)
    on_card = prepared.scenario.machine.has_card if device is None else device == "cuda"
    if alongside and on_card:
        raise EngineError("a run on a card has it for itself; leave alongside out, or give device='cpu'.")
    check_runnable(prepared, on_card=on_card)
    return prepared, on_card


def _run(prepared: Prepared, control: Control, driver: Driver) -> Result:
    with ledger_told(prepared):
        return _served(prepared, Engine(prepared, control, driver=driver))


def _served(prepared: Prepared, engine: Engine) -> Result:
    try:
        total = int(prepared.scenario.workload.generated_len.sum())
        with tqdm(total=total, unit="tok", desc="run", delay=1, mininterval=1) as bar:

            def draw(progress: Progress) -> None:
                bar.total = progress.total
                bar.update(progress.emitted - bar.n)

            return _measure(prepared, engine, draw)
    finally:
        engine.close()


def _occupy(prepared: Prepared, *, alongside: bool) -> Occupation:
    what = f"a live run of {prepared.lowering.schedule.name} on {prepared.scenario.model.name!r}"
    return occupy(what, alongside=alongside)


def _measure(prepared: Prepared, engine: Engine, watch: Callable[[Progress], object]) -> Result:
    with listening() as noise:
        result = serve(prepared, engine, Source.MEASURED, watch)
    if not result.stopped:
        engine.forward.read_back()
    return replace(
        result,
        tokens=engine.generated,
        logprobs=engine.logprobs,
        expert_counts=engine.expert_counts,
        others=noise.others,
        backend=_backend(engine.driver),
    )


def _backend(driver: Driver) -> str:
    by_numba = f"Numba ({features().path.name.lower()}) and torch"
    if driver.on_host:
        return f"both lanes on the CPU, by {by_numba}"
    return f"gpu lane on {driver.name}, by Triton and torch; cpu lane by {by_numba}"


def start(scenario: Scenario, schedule: Schedule, *, alongside: bool = False, device: str | None = None) -> LiveRun:
    """Start `run` in the background and return at once; it can be watched, paused and stopped, and ends with Python.

    Raises
    ------
    WorkbenchError
        As `run` does, for everything that can be known before the model is loaded.
    """
    prepared, on_card = _checked(scenario, schedule, device, alongside)
    occupation = _occupy(prepared, alongside=alongside)
    try:
        driver = open_driver(prepared.scenario.machine, on_card=on_card)
    except BaseException:
        occupation.end()
        raise
    return LiveRun(prepared, occupation, driver)


class RunState(enum.Enum):
    """Progress of a live run."""

    LOADING = "loading"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """True if the run has ended, for whatever reason."""
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


class LiveRun:
    """A run in its own daemon thread. Every method may be called from any thread, and all but `wait` return at once.

    The iterator of `stream` waits for tokens; the run waits for no one.

    Attributes
    ----------
    error : BaseException or None
        The error that made the run fail.
    """

    def __init__(self, prepared: Prepared, occupation: Occupation, driver: Driver | None = None) -> None:
        scenario = prepared.scenario
        self._driver = driver or HostDriver()
        self.error: BaseException | None = None
        self._progress = Progress(total=int(scenario.workload.generated_len.sum()), blocks=scenario.kv_blocks)
        self._prepared = prepared
        self._occupation = occupation
        self._log = TokenLog()
        self._inbox = Inbox(len(scenario.workload))
        self._engine: Engine | None = None
        self._result: Result | None = None
        self._lock = threading.RLock()
        self._wanted = RunState.RUNNING
        self._thread = threading.Thread(target=self._serve, name="live-run", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            occupation.control.stop()
            if not self._thread.is_alive():  # else it ends by itself
                occupation.end()
            raise

    def _serve(self) -> None:
        try:
            with ledger_told(self._prepared):
                self._serve_on(Engine(self._prepared, self._occupation.control, self._log, self._inbox, self._driver))
        except BaseException as error:  # shown by `state` and raised by `wait`: a thread must not die silently
            self.error = error
        finally:
            self._inbox.close()
            self._occupation.end()
            self._log.end()

    def _serve_on(self, engine: Engine) -> None:
        try:
            with self._lock:
                self._engine = engine
                self._obey()
            self._result = _measure(self._prepared, engine, self._watch)
        finally:
            engine.close()

    def _watch(self, progress: Progress) -> None:
        self._progress = progress

    def _obey(self) -> None:
        engine = self._engine
        if self._wanted is RunState.STOPPED:
            self._occupation.control.stop()
        elif engine is not None:
            (engine.pause if self._wanted is RunState.PAUSED else engine.resume)()

    def _want(self, state: RunState) -> None:
        with self._lock:
            if self._wanted is not RunState.STOPPED:
                self._wanted = state
                self._obey()

    def pause(self) -> None:
        """Let no further task start and no time pass."""
        self._want(RunState.PAUSED)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._want(RunState.RUNNING)

    def stop(self) -> None:
        """End the run within about a second, or after a user's own operation; results so far remain."""
        self._want(RunState.STOPPED)

    def add(self, request: Request) -> int:
        """Let a further request be served, behind those that wait; its number, which is the next one.

        Raises
        ------
        EngineError
            If the run has ended, as it does when all its requests are served, or the model does not know a token.
        CapacityError
            If the prompt, or prompt and output together, are longer than the longest of the workload, for which the
            memory was planned.
        WorkloadError
            If it is no request.
        """
        scenario = self._prepared.scenario
        Workload.of([request])  # which checks it
        check_request(self._inbox.requests, request, scenario.model)
        longest = int(scenario.workload.prompt_len.max())
        most = int((scenario.workload.prompt_len + scenario.workload.output_len).max())
        if len(request.prompt) > longest or len(request.prompt) + request.output_len > most:
            raise CapacityError(
                f"a request of {len(request.prompt)} + {request.output_len} tokens is too long for this run, which was "
                f"planned for prompts of {longest} and {most} tokens in all; start a run with one so long."
            )
        engine = self._engine
        return self._inbox.join(request, 0.0 if engine is None else max(0.0, engine.watch.now))

    def cancel(self, request: int) -> None:
        """Let a request get no further token, by its number in the workload; its KV blocks are free at once.

        Its tokens so far remain. It counts from the next iteration on, and not for a request that has ended.

        Raises
        ------
        WorkloadError
            If the run has no such request.
        """
        most = self._inbox.requests - 1
        if not (is_whole(request) and 0 <= request <= most):
            raise WorkloadError(f"the run has no request {request!r}; give a number from 0 to {most}.")
        self._inbox.cancel(int(request))

    @property
    def state(self) -> RunState:
        """The state of the run."""
        if self._thread.is_alive():
            if self._engine is None:
                return RunState.LOADING
            return RunState.PAUSED if self._wanted is RunState.PAUSED else RunState.RUNNING
        if self.error is not None and not isinstance(self.error, StoppedError):
            return RunState.FAILED
        return RunState.FINISHED if self._result is not None and not self._result.stopped else RunState.STOPPED

    @property
    def progress(self) -> Progress:
        """Progress: tokens as of the last iteration, seconds and lanes as of now."""
        engine = self._engine
        progress = self._progress
        if engine is None or not self._thread.is_alive() or not progress.iterations:
            return progress
        return replace(progress, seconds=engine.watch.now, busy=engine.busy())

    def stream(self) -> Iterator[tuple[int, int]]:
        """Every token as it comes, from the first one on: the number of its request, and its id.

        Tokens of one request come in their order. The iterator waits for the next token and ends when the run does, for
        whatever reason; `wait` then says how. There may be several, each with all tokens.
        """
        return self._log.follow()

    @property
    def phase(self) -> str:
        """Words for what the run does before its first iteration; empty at first."""
        return self._occupation.control.phase

    @property
    def under_way(self) -> UnderWay | None:
        """The iteration under way; None between two, and before the first."""
        engine = self._engine
        return None if engine is None or not self._thread.is_alive() else engine.under_way()

    @property
    def timeline(self) -> Timeline:
        """The spans so far."""
        seen = self._engine.timeline if self._engine is not None else Timeline()
        return Timeline(list(seen.spans), seen.labels)

    def wait(self, timeout: float | None = None) -> Result:
        """The result, once the run has ended; for a stopped run, of the iterations made until then.

        Raises
        ------
        TimeoutError
            If it has not ended within `timeout` seconds.
        EngineError
            If it was stopped before the first iteration ended.
        BaseException
            The error that made it fail.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the run has not ended within {timeout} s; stop it, or wait longer.")
        if isinstance(self.error, StoppedError):
            raise EngineError("the run was stopped before its first iteration ended; nothing was measured.")
        if self.error is not None:
            raise self.error
        if self._result is None:
            raise EngineError("the run ended without a result; this is a bug.")
        return self._result
