"""Live runs of a view: one at a time, or one after the other for a sweep, watched by a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.core.errors import WorkbenchError
from workbench.core.result import Result
from workbench.core.units import format_seconds
from workbench.schedules import Schedule
from workbench.serving import Progress
from workbench.widgets.parts.monitor import CHANNELS, Monitor
from workbench.widgets.parts.words import digits, roughly
from workbench.widgets.state.controls import KV_ON_GPU, WEIGHTS_ON_GPU, Slider
from workbench.widgets.state.figures import Plain
from workbench.widgets.state.offered import unfit
from workbench.widgets.state.pace import Pace
from workbench.widgets.state.settings import Settings

if TYPE_CHECKING:
    from workbench.engine import LiveRun

PERIOD = 1 / 8  # seconds between two updates
_NEAR = 16  # times more or less than the present value, within which a sweep measures
_SHARES = (WEIGHTS_ON_GPU, KV_ON_GPU)  # they go from 0 to 1
_HISTORY = 479  # samples: with the newest a minute
HELD = "Settings and wiring stay as they are while a run is going on; press Stop first."
IDLE: Plain = {
    "state": "none",
    "can": False,
    "why": "",
    "text": "",
    "share": 0.0,
    "ended": None,  # time of day in seconds since 1970
    "here": "",
    "stale": False,
}


class Planned(NamedTuple):
    """One run, alone or of a sweep."""

    settings: Settings
    title: str


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
        Called before each run; waits until nothing else takes the cores.
    simulated : callable (Settings, bool) -> float
        Rate of the settings in the simulation, NaN without one [output tokens/s]; the flag asks for a quick answer.
    over : callable () -> None
        Called once the last run has ended, however it ended.
    """

    def __init__(
        self,
        show: Callable[[Plain], None],
        sample: Callable[[list[Any], bool], None],
        ended: Callable[[Settings, Result], None],
        quiet: Callable[[], None],
        simulated: Callable[[Settings, bool], float],
        over: Callable[[], None],
    ) -> None:
        self._show = show
        self._sample = sample
        self._ended = ended
        self._quiet = quiet
        self._simulated = simulated
        self._over = over
        self._busy = False
        self._run: LiveRun | None = None
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._why = ""
        self._here = ""
        self._now: Settings | None = None
        self._ran: Settings | None = None
        self._samples: list[Any] = []
        self._last = dict(IDLE)

    @property
    def busy(self) -> bool:
        """True while runs are going on."""
        return self._busy

    def allow(self, settings: Settings, why: str, here: str = "") -> None:
        """Set the present settings, the reason why they cannot run, and the words of a button that makes them run here.

        An empty reason allows them. What was measured at other settings is shown as such.
        """
        self._now = settings
        self._why = why
        self._here = here
        if not self.busy:
            self._publish(self._last)

    def begin(self, planned: Callable[[], Sequence[Planned]]) -> None:
        """Plan and run settings one after the other in the background, unless runs are going on or none can begin."""
        with self._lock:
            if self.busy or self._why:
                return
            self._stopped.clear()
            self._busy = True
            self._clear()
            self._publish({**IDLE, "state": "loading"})
            thread = threading.Thread(target=self._follow, args=[planned], name="view-runs", daemon=True)
            thread.start()

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

    def resend(self) -> None:
        """Show the samples so far to a page that was opened or loaded again."""
        self._sample(list(self._samples), True)

    def _follow(self, planned: Callable[[], Sequence[Planned]]) -> None:
        try:
            self._run_all(planned())
        except Exception as error:  # an exception of this thread would not be shown
            self._last = {**IDLE, "state": "failed", "text": f"{type(error).__name__}: {error}"}
        finally:
            self._busy = False
            self._publish(self._last)
            self._over()

    def _run_all(self, planned: Sequence[Planned]) -> None:
        from workbench.engine import start  # it brings torch, which takes longer to import than all that a view shows

        pace = self._pace(planned)
        for number, (settings, _) in enumerate(planned):
            began = time.perf_counter()
            simulated = prediction_of(settings, self._simulated(settings, False))
            self._quiet()
            if self._stopped.is_set():
                if number == 0:
                    self._last = {**self._last, "state": "stopped", "text": "before the run began"}
                return
            self._ran = settings
            of = partial(_place_of, planned, number, pace, began)
            try:
                self._run = start(settings.live(), settings.schedule)
                if self._stopped.is_set():  # while it started
                    self._run.stop()
                self._watch(self._run, of, simulated)
                if self._run.progress.iterations and not _has_failed(self._run):
                    self._ended(settings, self._run.wait())
                    pace.end(number, time.perf_counter() - began)
            except WorkbenchError as error:
                self._publish({**self._last, "state": "failed", "text": f"{of(True)}{error}"})
            except Exception as error:  # an exception of this thread would not be shown
                self._publish({**self._last, "state": "failed", "text": f"{of(True)}{type(error).__name__}: {error}"})
                return

    def _pace(self, planned: Sequence[Planned]) -> Pace:
        """The pace of runs by their simulations, which is told before the first of several begins."""
        if len(planned) < 2:
            return Pace([math.nan] * len(planned))
        pace = Pace([self._simulated_seconds(each.settings) for each in planned])
        left = pace.left(0)
        about = "" if math.isnan(left) else f"about {roughly(left)} for "
        self._publish({**IDLE, "state": "loading", "text": f"{about}{len(planned)} runs"})
        return pace

    def _simulated_seconds(self, settings: Settings) -> float:
        rate = math.nan if self._stopped.is_set() else self._simulated(settings, True)
        return seconds_at(settings, rate)

    def _watch(self, run: LiveRun, of: Callable[[bool], str], simulated: str) -> None:
        monitor = Monitor()
        begin = time.perf_counter()
        self._clear()
        seconds = 0.0
        over = False
        pause = threading.Event()
        while not over:
            pause.wait(PERIOD)
            over = run.state.ended  # read before the progress, so that the last update has the final figures
            progress = run.progress
            if progress.iterations and (over or progress.seconds > seconds):
                seconds = max(seconds, progress.seconds)
                values, texts, notes = zip(*monitor.read(progress), strict=True)
                sample = [seconds, values, texts, notes]
                self._samples = [*self._samples[-_HISTORY:], sample]
                self._sample([sample], False)
            self._publish(_told(run, progress, of(over), monitor.rate, simulated, time.perf_counter() - begin))

    def _clear(self) -> None:
        """Take the samples of the run before away."""
        self._samples = []
        self._sample([], True)

    def _publish(self, told: Plain) -> None:
        self._last = told
        can = not self._why and not self.busy
        channels = [channel._asdict() for channel in CHANNELS]
        held = HELD if self.busy else ""
        stale = not self.busy and self._ran is not None and self._ran != self._now
        now = {"can": can, "why": self._why, "here": self._here, "held": held, "stale": stale}
        self._show({**told, **now, "channels": channels})


def prediction_of(settings: Settings, rate: float) -> str:
    """The simulated rate of a run in words, behind the rate so far; empty where there is none."""
    if math.isnan(rate):
        return ""
    how = "" if settings.machine.profiles else ", without a calibration (wb.calibrate)"
    return f"; {digits(rate)} simulated for the whole run{how}"


def seconds_at(settings: Settings, rate: float) -> float:
    """Time that all requests take at a rate [output tokens/s]; NaN where that is unknown [s]."""
    return settings.requests * settings.output_len / rate if rate > 0 else math.nan


def _place_of(planned: Sequence[Planned], number: int, pace: Pace, began: float, ended: bool) -> str:
    """The place of a run among several, and until it has ended the time that is left for all of them."""
    if len(planned) < 2:
        return ""
    left = math.nan if ended else pace.left(number, time.perf_counter() - began)
    about = "" if math.isnan(left) else f", about {roughly(left)} left"
    return f"run {number + 1} of {len(planned)}{about}: {planned[number].title}. "


def _has_failed(run: LiveRun) -> bool:
    from workbench.engine import RunState  # by now it is there

    return run.state is RunState.FAILED


def _told(run: LiveRun, progress: Progress, of: str, rate: float, simulated: str, elapsed: float) -> Plain:
    """The state of a run for the browser, which began some seconds ago."""
    state = run.state
    taken = format_seconds(progress.seconds) if progress.seconds else "0 s"
    text = f"{of}{progress.emitted:,} of {progress.total:,} output tokens in {taken}, iteration {progress.iterations:,}"
    if not progress.iterations:
        text = f"{of}no iteration has ended after {elapsed:.0f} s; the first one has the most prompts"
    if progress.emitted:
        so_far = "" if state.ended else " so far"
        text += f": {digits(rate)} tokens/s{so_far}{simulated}"
    if _has_failed(run):
        text = f"{of}{run.error}"
    ended = time.time() if state.ended else None
    return {"state": state.value, "text": text, "share": progress.emitted / max(1, progress.total), "ended": ended}


def swept(settings: Settings, axis: Slider, points: int, schedules: Sequence[Schedule]) -> list[Planned]:
    """Runs of a sweep: at so many positions of a slider, under each schedule.

    Settings that do not go together, or do not fit the memories, are left out.
    """
    found = list[Planned]()
    for label, value in spread(axis, settings, points):
        for schedule in schedules:
            under = settings.on(schedule=schedule)
            if not axis.steps(under):
                continue
            each = axis.write(under, value)
            if not unfit(each):
                found.append(Planned(each, f"{axis.label} {label}, {each.schedule.name}"))
    return found


def spread(axis: Slider, settings: Settings, points: int) -> list[tuple[str, Any]]:
    """So many positions of a slider as labels and values, evenly over those near the present value that work.

    The present value itself, if it works, takes the place of the nearest one.
    """
    steps = axis.steps(settings)
    if not steps:
        return []
    now = axis.at(settings)
    present = axis.read(settings)
    centre = min(max(present, steps[0].value), steps[-1].value)
    near = [x for x, step in enumerate(steps) if axis in _SHARES or is_near(step.value, centre)]
    works = [x for x in near if not unfit(axis.write(settings, steps[x].value))]
    if len(works) > points:
        works = [works[round(place * (len(works) - 1) / max(1, points - 1))] for place in range(points)]
    found = [(steps[x].label, steps[x].value) for x in works]
    if works and not unfit(settings):
        nearest = min(range(len(works)), key=lambda place: abs(works[place] - now))
        own = steps[now].label if steps[now].value == present else axis.told(settings)
        found[nearest] = (own, present)
    return found


def is_near(value: float, centre: float) -> bool:
    """True within a factor of `_NEAR`, and for values that have none."""
    if not (value > 0 and centre > 0) or math.isinf(value) or math.isinf(centre):
        return True
    return 1 / _NEAR <= value / centre <= _NEAR
