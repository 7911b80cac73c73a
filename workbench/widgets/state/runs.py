"""Live runs of a view: one at a time, or one after the other for a sweep, watched by a thread; and calibrations."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.core.errors import StoppedError, WorkbenchError
from workbench.core.quiet import NoiseMeter
from workbench.core.result import Result
from workbench.core.units import format_seconds
from workbench.hardware import Machine
from workbench.pipeline import Pipeline, Stack
from workbench.schedules import Schedule
from workbench.serving import Progress
from workbench.widgets.parts.monitor import CHANNELS, Monitor
from workbench.widgets.parts.words import digits, roughly
from workbench.widgets.state.controls import KV_ON_GPU, WEIGHTS_ON_GPU, Slider
from workbench.widgets.state.figures import Plain, under_load
from workbench.widgets.state.offered import calibration_of, unfit
from workbench.widgets.state.pace import Course, Earlier, Pace, times
from workbench.widgets.state.settings import Settings

if TYPE_CHECKING:
    from workbench.engine import LiveRun
    from workbench.engine.engine import UnderWay

PERIOD = 1 / 8  # seconds between two updates
_CALM = 1.0  # seconds between two updates of a calibration, whose times they disturb
_NEAR = 16  # times more or less than the present value, within which a sweep measures
_SHARES = (WEIGHTS_ON_GPU, KV_ON_GPU)  # they go from 0 to 1
_NOTABLE = 0.05  # share of the cores from which on other programs are told
_SLOW = 1.1  # times the simulated time from which on a run is told to take longer
_LONG = 1.0  # seconds from which on the time since the start is told, and the layer of a later iteration
_HISTORY = 479  # samples: with the newest a minute
HELD = "Settings and wiring stay as they are while {} is going on; press Stop first."
IDLE: Plain = {
    "state": "none",
    "can": False,
    "why": "",
    "text": "",
    "share": 0.0,
    "ended": None,  # time of day in seconds since 1970
    "here": "",
    "stale": "",
    "again": False,
    "sweeping": False,
    "swept": "",
    "calibrate": "",
    "calibrating": False,
    "noted": "",
}
_ACTIVE = ("loading", "running", "paused")


class Planned(NamedTuple):
    """One run, alone or of a sweep."""

    settings: Settings
    title: str


class Seen(NamedTuple):
    """A look at a run, some time after its start [s]."""

    under_way: UnderWay | None
    progress: Progress
    elapsed: float


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
        self._offer = ""
        self._calibrating = False
        self._noted = ""
        self._now: Settings | None = None
        self._ran: Settings | None = None
        self._wirings: list[Pipeline | Stack] = []  # of the runs that have ended
        self._again = False
        self._sweeping = False
        self._swept = ""
        self._earlier = Earlier()
        self._samples: list[Any] = []
        self._last = dict(IDLE)

    @property
    def busy(self) -> bool:
        """True while runs are going on."""
        return self._busy

    @property
    def earlier(self) -> Earlier:
        """The pace of the last run."""
        return self._earlier

    def allow(self, settings: Settings, why: str, here: str = "", calibrate: str = "") -> None:
        """Set the present settings, the reason why they cannot run, and the words of buttons.

        One makes them run here, and one calibrates this computer. An empty reason allows the settings. What was
        measured at other settings is shown as such.
        """
        self._now = settings
        self._why = why
        self._here = here
        self._offer = calibrate
        self._again = settings.pipeline in self._wirings
        if not self.busy:
            self._noted = ""
            self._publish(self._last)

    def begin(self, planned: Callable[[], Sequence[Planned]], *, sweeping: bool = False) -> None:
        """Plan and run settings one after the other in the background, unless runs are going on or none can begin."""
        with self._lock:
            if self.busy or self._why:
                return
            self._sweeping = sweeping
            self._swept = ""
            self._clear()
            self._launch(lambda: self._run_all(planned()))

    def calibrate(self, settings: Settings, made: Callable[[Machine], None], *, again: bool = False) -> None:
        """Calibrate this computer for a model in the background, unless runs are going on; it is stopped as they are.

        `made` is called with the calibrated machine; `again` measures although there is a record.
        """
        with self._lock:
            if self.busy:
                return
            self._calibrating = True
            shown = self._last
            self._launch(lambda: self._follow_calibration(settings, made, again, shown))

    def _launch(self, work: Callable[[], None]) -> None:
        """Do work in the background that nothing else may go on beside."""
        self._stopped.clear()
        self._busy = True
        self._noted = ""
        self._publish({**IDLE, "state": "loading"})
        threading.Thread(target=self._follow, args=[work], name="view-runs", daemon=True).start()

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
        if self.busy:
            self._display(self._last)

    def resend(self) -> None:
        """Show the samples so far to a page that was opened or loaded again."""
        self._sample(list(self._samples), True)

    def _follow(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # an exception of this thread would not be shown
            self._last = {**IDLE, "state": "failed", "text": f"{type(error).__name__}: {error}"}
        finally:
            self._busy = False
            self._calibrating = False
            self._publish(self._last)
            self._over()

    def _follow_calibration(
        self, settings: Settings, made: Callable[[Machine], None], again: bool, shown: Plain
    ) -> None:
        """Calibrate; then what was shown before is shown again, with a note on how it went."""
        self._prepare("waiting for the figures")
        self._quiet()
        self._prepare("loading the model")
        from workbench.engine import calibrate  # it brings torch

        began = time.perf_counter()
        due = 0.0

        def watch(share: float) -> None:
            nonlocal due
            if self._stopped.is_set():
                raise StoppedError("the calibration was stopped.")
            gone = time.perf_counter() - began
            if gone >= due:
                due = gone + _CALM
                about = f", about {roughly(gone * (1 - share) / share)} left" if 0 < share < 1 else ""
                text = f"timing operations of {settings.model.name}{about}"
                self._publish({**IDLE, "state": "loading", "text": text, "share": share})

        machine = settings.machine
        kind = {"weights": settings.memory.weights, "kv": settings.memory.kv}
        device = "cuda" if machine.has_card else "cpu"
        try:
            machine = calibrate(settings.model, **kind, device=device, refresh=again, watch=watch)
            if self._stopped.is_set():
                raise StoppedError("the calibration was stopped.")
            self._earlier = Earlier()  # what was simulated before is not what is simulated from here on
            made(machine)
            load = under_load(machine.profiles[0].others)
            self._noted = f"Calibrated for {settings.model.name}{load and ', '}{load}."
        except StoppedError:
            self._noted = "The calibration was stopped."
        except WorkbenchError as error:
            self._noted = f"The calibration failed: {error}"
        self._last = shown

    def _run_all(self, planned: Sequence[Planned]) -> None:
        if "workbench.engine" not in sys.modules:
            self._prepare("loading torch")
        from workbench.engine import start  # it brings torch, which takes longer to import than all that a view shows

        if not planned:
            self._last = IDLE
            self._swept = "found no value at which it could run"
            return
        pace = self._pace(planned)
        kept = 0
        for number, (settings, _) in enumerate(planned):
            before = self._last
            of = partial(_place_of, planned, number, pace)
            self._prepare(f"{of(0.0)}simulating the run")
            rate = self._simulated(settings, False)
            simulated = prediction_of(settings, rate)
            self._prepare(f"{of(0.0)}waiting for the figures")
            self._quiet()
            if self._stopped.is_set():
                self._swept = f"stopped before {_run_of(planned, number)}; {_points(kept)} kept"
                stopped = {**self._last, "state": "stopped", "text": "before the run began"}
                self._last = before if number else stopped
                return
            self._ran = settings
            try:
                live = settings.live()
                wait = float(next(iter(live.workload.arrival), 0.0))
                course = Course(int(live.workload.prompt_len.sum()), seconds_at(settings, rate), wait)
                self._run = start(live, settings.schedule)
                if self._stopped.is_set():  # while it started
                    self._run.stop()
                self._watch(self._run, of, simulated, course)
                self._note(self._run, settings, course)
                if self._run.progress.iterations and not _has_failed(self._run):
                    result = self._run.wait()
                    self._ended(settings, result)
                    kept += not result.stopped
                    pace.end(number, course.taken)
            except WorkbenchError as error:
                self._publish({**self._last, "state": "failed", "text": f"{of(math.nan)}{error}"})
            except Exception as error:  # an exception of this thread would not be shown
                text = f"{of(math.nan)}{type(error).__name__}: {error}"
                self._publish({**self._last, "state": "failed", "text": text})
                self._swept = f"failed in {_run_of(planned, number)}; {_points(kept)} kept"
                return
            how = "stopped in" if self._stopped.is_set() else "ended with"
            self._swept = f"{how} {_run_of(planned, number)}; {_points(kept)} kept"
            if self._stopped.is_set():
                return

    def _prepare(self, text: str) -> None:
        """Tell what is done before a run."""
        self._publish({**IDLE, "state": "loading", "text": text})

    def _note(self, run: LiveRun, settings: Settings, course: Course) -> None:
        """Note that a run of a wiring has ended, and its pace; of one that was stopped it is the least."""
        if settings.pipeline not in self._wirings:
            self._wirings.append(settings.pipeline)
        self._again = True
        if math.isnan(course.whole) or _has_failed(run):
            return
        least = self._earlier if self._stopped.is_set() else Earlier(0.0, 0.0)
        self._earlier = Earlier(max(course.before, least.start), max(course.whole, least.slower))

    def _pace(self, planned: Sequence[Planned]) -> Pace:
        """The pace of runs by their simulations, which is told before the first of several begins."""
        if len(planned) < 2:
            return Pace([math.nan] * len(planned))
        pace = Pace([self._expected_seconds(each.settings) for each in planned])
        left = pace.left(0)
        about = "" if math.isnan(left) else f"about {roughly(left)} for "
        self._prepare(f"{about}{len(planned)} runs")
        return pace

    def _expected_seconds(self, settings: Settings) -> float:
        rate = math.nan if self._stopped.is_set() else self._simulated(settings, True)
        return self._earlier.seconds(seconds_at(settings, rate))

    def _watch(self, run: LiveRun, of: Callable[..., str], simulated: str, course: Course) -> None:
        monitor = Monitor()
        noise = NoiseMeter()
        began = time.perf_counter()
        self._clear()
        seconds = 0.0
        over = False
        pause = threading.Event()
        while not over:
            pause.wait(PERIOD)
            over = run.state.ended  # read before the progress, so that the last update has the final figures
            seen = Seen(run.under_way, run.progress, time.perf_counter() - began)
            progress = seen.progress
            if progress.iterations and (over or progress.seconds > seconds):
                seconds = max(seconds, progress.seconds)
                values, texts, notes = zip(*monitor.read(progress, ended=over), strict=True)
                sample = [seconds, values, texts, notes]
                self._samples = [*self._samples[-_HISTORY:], sample]
                self._sample([sample], False)
            course.note(*seen)
            left = course.left if progress.iterations else 0.0  # tasks of a first iteration do not tell it
            place = of(math.nan if over else course.taken, left)
            self._publish(_told(run, seen, course, noise, place, f"{digits(monitor.rate)} tokens/s", simulated))

    def _clear(self) -> None:
        """Take the samples of the run before away."""
        self._samples = []
        self._sample([], True)

    def _publish(self, told: Plain) -> None:
        self._last = told
        self._display(told)

    def _display(self, told: Plain) -> None:
        can = not self._why and not self.busy
        channels = [channel._asdict() for channel in CHANNELS]
        held = HELD.format("a calibration" if self._calibrating else "a run") if self.busy else ""
        stale = "" if self.busy else self._stale()
        now = {"can": can, "why": self._why, "here": self._here, "held": held, "stale": stale, "again": self._again}
        calibration = {"calibrate": self._offer, "calibrating": self._calibrating, "noted": self._noted}
        sweeping = self._sweeping and self.busy and not self._calibrating
        swept = self._swept if self._sweeping and not self.busy else ""
        stopping = self.busy and self._stopped.is_set() and told["state"] in _ACTIVE
        state = "stopping" if stopping else told["state"]
        sweep = {"sweeping": sweeping, "swept": swept}
        self._show({**told, **now, **calibration, **sweep, "state": state, "channels": channels})

    def _stale(self) -> str:
        """Words for what has changed since the last run; empty if nothing has."""
        if self._ran is None or self._now is None or self._ran == self._now:
            return ""
        return "at other settings" if self._ran.pipeline == self._now.pipeline else "of another wiring"


def prediction_of(settings: Settings, rate: float) -> str:
    """The simulated rate of a run in words, behind the rate so far; empty where there is none."""
    if math.isnan(rate):
        return ""
    how = "" if calibration_of(settings.scenario()) is not None else ", without a calibration"
    return f"; {digits(rate)} simulated for the whole run{how}"


def seconds_at(settings: Settings, rate: float) -> float:
    """Time that all requests take at a rate [output tokens/s]; NaN where that is unknown [s]."""
    return settings.requests * settings.output_len / rate if rate > 0 else math.nan


def _run_of(planned: Sequence[Planned], number: int) -> str:
    return f"run {number + 1} of {len(planned)}"


def _points(number: int) -> str:
    return f"{number} point{'' if number == 1 else 's'}"


def _place_of(planned: Sequence[Planned], number: int, pace: Pace, gone: float, more: float = 0.0) -> str:
    """The place of a run among several, and the time that is left for all of them.

    The run has gone on for so long, NaN once it has ended, and needs at least so much more [s].
    """
    if len(planned) < 2:
        return ""
    left = math.nan if math.isnan(gone) else pace.left(number, gone, more)
    about = "" if math.isnan(left) else f", about {roughly(left)} left"
    return f"{_run_of(planned, number)}{about}: {planned[number].title}. "


def _has_failed(run: LiveRun) -> bool:
    from workbench.engine import RunState  # by now it is there

    return run.state is RunState.FAILED


def _told(run: LiveRun, seen: Seen, course: Course, noise: NoiseMeter, of: str, rate: str, simulated: str) -> Plain:
    """The state of a run for the browser."""
    state = run.state
    under_way = seen.under_way
    progress = seen.progress
    taken = format_seconds(progress.seconds) if progress.seconds else "0 s"
    text = f"{of}{progress.emitted:,} of {progress.total:,} output tokens in {taken}, iteration {progress.iterations:,}"
    if not progress.iterations:
        first = _first(run, seen, course, noise)
        text = f"{of}{first[:1].upper()}{first[1:]}" if of else first
    if progress.emitted:
        so_far = "" if state.ended else " so far"
        text += f": {rate}{so_far}{simulated}"
    if progress.iterations and under_way is not None and under_way.seconds > _LONG:
        text += f"; iteration {under_way.iteration:,}: {_at_work(under_way)}"
    if progress.iterations and state.value == "stopped":
        text += "; it is not kept, since it was stopped"
    if _has_failed(run):
        text = f"{of}{run.error}"
    ended = time.time() if state.ended else None
    return {**IDLE, "state": state.value, "text": text, "share": course.share, "ended": ended}


def _first(run: LiveRun, seen: Seen, course: Course, noise: NoiseMeter) -> str:
    """The course of a run until its first iteration has ended."""
    if run.state.ended:
        where = "in" if course.worked else "before"
        return f"after {seen.elapsed:.0f} s, {where} the first iteration; nothing was measured"
    under_way = seen.under_way
    doing = run.phase or "checking the run"
    if under_way is not None:
        doing = f"iteration 1: {_at_work(under_way)}"
    since = f", {seen.elapsed:.0f} s" if seen.elapsed > _LONG else ""
    return f"{doing}{since}{_slow(course, noise)}"


def _at_work(under_way: UnderWay) -> str:
    """Prompt tokens and layer of an iteration."""
    prompts = f"{under_way.prefill:,} prompt tokens, " if under_way.prefill else ""
    return f"{prompts}layer {under_way.layer} of {under_way.layers}"


def _slow(course: Course, noise: NoiseMeter) -> str:
    """Words for a run that has taken longer than its simulation, and for other programs; empty for another."""
    if not course.slower >= _SLOW:
        return ""
    others = noise.hear().others
    taking = f"; other programs take {others:.0%} of the cores" if others >= _NOTABLE else ""
    return f"; so far {times(course.slower)} times as long as the whole run is simulated to take{taking}"


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
