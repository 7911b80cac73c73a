"""Live runs of a view: one at a time, or one after the other for a sweep, watched by a thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from workbench.core.errors import WorkbenchError
from workbench.core.result import Result
from workbench.core.units import format_seconds
from workbench.engine import LiveRun, RunState, start
from workbench.schedules import Schedule
from workbench.serving import Progress
from workbench.widgets.parts.monitor import CHANNELS, Monitor
from workbench.widgets.parts.words import digits
from workbench.widgets.state.controls import Slider
from workbench.widgets.state.offered import why_not
from workbench.widgets.state.settings import Settings

Plain = dict[str, Any]
PERIOD = 1 / 8  # seconds between two updates
_HISTORY = 479  # samples: with the newest a minute
IDLE: Plain = {"state": "none", "can": False, "why": "", "text": "", "share": 0.0}


class Planned(NamedTuple):
    """One run, alone or of a sweep; `simulated` is its rate in the simulation, NaN without one [output tokens/s]."""

    settings: Settings
    title: str
    simulated: float = math.nan


class Runs:
    """Starts, watches and stops live runs.

    Messages come on any thread and only control the run. Its thread publishes the state eight times a second, also
    while cells of the notebook are busy.

    Parameters
    ----------
    show : callable (Plain) -> None
        Shows the state of the run.
    sample : callable (list, bool) -> None
        Shows new samples of the gauges; the flag says that they replace all earlier ones.
    ended : callable (Settings, Result) -> None
        Called with each run that gave a result, and its settings.
    quiet : callable () -> None
        Called between two runs; waits until nothing else takes the cores.
    """

    def __init__(
        self,
        show: Callable[[Plain], None],
        sample: Callable[[list[Any], bool], None],
        ended: Callable[[Settings, Result], None],
        quiet: Callable[[], None],
    ) -> None:
        self._show = show
        self._sample = sample
        self._ended = ended
        self._quiet = quiet
        self._busy = False
        self._run: LiveRun | None = None
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._why = ""
        self._samples: list[Any] = []
        self._last = dict(IDLE)

    @property
    def busy(self) -> bool:
        """True while runs are going on."""
        return self._busy

    def allow(self, why: str) -> None:
        """Set the reason why the present settings cannot run; an empty text allows them."""
        self._why = why
        if not self.busy:
            self._publish(self._last)

    def begin(self, planned: Sequence[Planned]) -> None:
        """Run these settings one after the other in the background, unless runs are going on."""
        with self._lock:
            if self.busy or self._why or not planned:
                return
            self._stopped.clear()
            self._busy = True
            self._publish(self._last)
            self._thread = threading.Thread(target=self._follow, args=[planned], name="view-runs", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Hold the run."""
        if self._run is not None:
            self._run.pause()

    def resume(self) -> None:
        """Let a paused run go on."""
        if self._run is not None:
            self._run.resume()

    def stop(self) -> None:
        """End the run and start none of those that are planned; what was served and measured stays."""
        self._stopped.set()
        if self._run is not None:
            self._run.stop()

    def wait(self, timeout: float) -> None:
        """Wait until no run is left, at most so long [s]."""
        if self._thread is not None:
            self._thread.join(timeout)

    def resend(self) -> None:
        """Show the samples so far to a page that was opened or loaded again."""
        self._sample(list(self._samples), True)

    def _follow(self, planned: Sequence[Planned]) -> None:
        self._run_all(planned)
        self._busy = False
        self._publish(self._last)

    def _run_all(self, planned: Sequence[Planned]) -> None:
        for number, (settings, title, simulated) in enumerate(planned):
            if number:
                self._quiet()
            if self._stopped.is_set():
                return
            of = f"run {number + 1} of {len(planned)}: {title}. " if len(planned) > 1 else ""
            try:
                self._run = start(settings.live(), settings.schedule)
                self._watch(self._run, of, simulated)
                if self._run.state is not RunState.FAILED:
                    self._ended(settings, self._run.wait())
            except WorkbenchError as error:
                self._publish({**self._last, "state": "failed", "text": f"{of}{error}"})
                return
            except Exception as error:  # an exception of this thread would not be shown
                self._publish({**self._last, "state": "failed", "text": f"{of}{type(error).__name__}: {error}"})
                return

    def _watch(self, run: LiveRun, of: str, simulated: float) -> None:
        monitor = Monitor()
        self._samples = []
        self._sample([], True)
        seconds = 0.0
        over = False
        pause = threading.Event()
        while not over:
            pause.wait(PERIOD)
            over = run.state.ended  # read before the progress, so that the last update has the final figures
            progress = run.progress
            if progress.iterations and progress.seconds > seconds:
                seconds = progress.seconds
                values, texts, notes = zip(*monitor.read(progress), strict=True)
                sample = [seconds, values, texts, notes]
                self._samples = [*self._samples[-_HISTORY:], sample]
                self._sample([sample], False)
            self._publish(_told(run, progress, of, simulated))

    def _publish(self, told: Plain) -> None:
        self._last = told
        can = not self._why and not self.busy
        channels = [channel._asdict() for channel in CHANNELS]
        self._show({**told, "can": can, "why": self._why, "channels": channels})


def _told(run: LiveRun, progress: Progress, of: str, simulated: float) -> Plain:
    """The state of a run for the browser."""
    state = run.state
    time = format_seconds(progress.seconds) if progress.seconds else "0 s"
    text = f"{of}{progress.emitted:,} of {progress.total:,} output tokens in {time}, iteration {progress.iterations:,}"
    if progress.emitted and not math.isnan(simulated):
        text += f": {digits(progress.emitted / progress.seconds)} tokens/s, {digits(simulated)} simulated"
    if state is RunState.FAILED and run.error is not None:
        text = f"{of}{run.error}"
    return {"state": state.value, "text": text, "share": progress.emitted / max(1, progress.total)}


def swept(settings: Settings, axis: Slider, points: int, schedules: Sequence[Schedule]) -> list[tuple[str, Settings]]:
    """Settings of the runs of a sweep, with their titles: at so many positions of a slider, under each schedule.

    Settings that do not go together are left out.
    """
    found = list[tuple[str, Settings]]()
    for label, at in spread(axis, settings, points):
        for schedule in schedules:
            each = at.on(schedule=schedule)
            if not why_not(each):
                found.append((f"{axis.label} {label}, {schedule.name}", each))
    return found


def spread(axis: Slider, settings: Settings, points: int) -> list[tuple[str, Settings]]:
    """Settings at so many positions of a slider, evenly over those that work, with their labels."""
    steps = axis.steps(settings)
    works = [step for step in steps if not why_not(axis.write(settings, step.value))]
    if len(works) <= points:
        chosen = works
    else:
        chosen = [works[round(place * (len(works) - 1) / max(1, points - 1))] for place in range(points)]
    return [(step.label, axis.write(settings, step.value)) for step in chosen]
