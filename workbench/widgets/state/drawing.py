"""A worker that computes and publishes everything that follows the settings, the chosen schedule first."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from workbench.analysis.explain import explain
from workbench.analysis.shadow_prices import ShadowPrices
from workbench.core.errors import StoppedError
from workbench.core.result import Result
from workbench.core.timeline import Timeline
from workbench.plots import middle
from workbench.schedules import Schedule
from workbench.simulate.loading import loader
from workbench.widgets.parts.newest import Newest
from workbench.widgets.state.controls import KV_CAPACITY, SLIDERS, Slider
from workbench.widgets.state.figures import Plain, figure, line, memories, priced, tracks
from workbench.widgets.state.ladders import outward
from workbench.widgets.state.pace import Earlier
from workbench.widgets.state.predictions import Predictions, Refused
from workbench.widgets.state.runs import is_near, seconds_at
from workbench.widgets.state.settings import Settings, kv_bytes_per_token

POINTS = 11  # points of a curve
_SHOWING = 0.08  # seconds in which a page shows the first figures; what is computed meanwhile takes cores from it
_PATIENCE = 0.25  # seconds between two pictures of curves that are not complete
_UNITS = {"kv_capacity": "B", "gpu_memory": "B", "link": "B/s", "weights_on_gpu": "%", "kv_on_gpu": "%"}
_LINEAR = ("weights_on_gpu", "kv_on_gpu", "micro_batches")
_NEXT = 2 ** (1 / 4)  # a step of a ladder
_NEVER = 10**9  # collections of younger garbage before one of all

EMPTY: Plain = {
    "figures": {
        "problem": "",
        "searching": False,
        "sample": "",
        "rows": [],
        "ledger": [],
        "explain": [],
        "prices": [],
        "prices_of": "",
        "pending": True,
    },
    "lanes": {"tracks": [], "labels": {}, "colours": {}, "naming": ""},
    "curves": {
        "x": {"label": "", "unit": "", "log": True},
        "y": {"label": "output tokens/s"},
        "at": 1.0,
        "takes": {},
        "paced": "",
        "chosen": "",
        "lines": [],
        "busy": True,
        "axis": KV_CAPACITY.name,
        "axes": [],
    },
}
"""What is shown before anything is drawn."""
Measured = Sequence[tuple[Settings, Result]]


class Drawing:
    """Computes figures, lanes, curves and explanations of the newest settings, and publishes each as it is ready.

    Parameters
    ----------
    predictions : Predictions
    schedules : callable (Settings) -> sequence of Schedule
        The schedules that are compared; those that do not take the wiring are told with the reason.
    measured : callable () -> sequence of (Settings, Result)
        What was measured so far.
    pinned : callable () -> sequence of (str, Settings)
        Names and settings whose lanes stand below those of the settings that are drawn.
    earlier : callable () -> Earlier
        The pace of the last run.
    check : callable (Settings) -> None
        Called once the settings' own pictures are drawn, with time to find what does not go together with them.
    publish : callable (**parts) -> None
        Called with what the browser draws of "figures", "lanes" and "curves", by their names.
    """

    def __init__(
        self,
        predictions: Predictions,
        schedules: Callable[[Settings], Sequence[Schedule]],
        measured: Callable[[], Measured],
        pinned: Callable[[], Sequence[tuple[str, Settings]]],
        earlier: Callable[[], Earlier],
        check: Callable[[Settings], None],
        publish: Callable[..., None],
    ) -> None:
        self._predictions = predictions
        self._schedules = schedules
        self._measured = measured
        self._pinned = pinned
        self._earlier = earlier
        self._check = check
        self._publish = publish
        self._axis: Slider = KV_CAPACITY
        self._shown: list[Plain] = []
        self._drawn: Settings | None = None
        self._worker = Newest(self._follow, "view-drawing", lambda: _GARBAGE.all_again(self))

    def put(self, settings: Settings) -> None:
        """Compute these settings next, and drop what is computed of earlier ones."""
        self._worker.put(settings)

    def over(self, name: str) -> None:
        """Draw the curves over another setting."""
        self._axis = next((slider for slider in SLIDERS if slider.name == name), KV_CAPACITY)
        self._shown = []  # they stand over another setting

    def wait(self, timeout: float) -> bool:
        """Wait until all is drawn; return False if that takes longer than `timeout` [s]."""
        return self._worker.wait(timeout)

    def cancel(self) -> None:
        """Drop what is being computed."""
        self._worker.cancel()

    def close(self) -> None:
        """End the thread."""
        self._worker.close()

    def _follow(self, settings: Settings, overtaken: Callable[[], bool]) -> None:
        """Draw, without a collection of all garbage, which takes 0.2 s; there is time for one at rest."""
        _GARBAGE.recent_alone(self)
        try:
            self._draw(settings, overtaken)
        except StoppedError:  # newer settings are drawn next
            pass
        except Exception as error:  # an exception of this thread would not be shown
            problem = f"{type(error).__name__}: {error}"
            self._publish(figures={**EMPTY["figures"], "problem": problem, "pending": False})

    def _draw(self, settings: Settings, overtaken: Callable[[], bool]) -> None:
        """Draw in the order in which a reader looks: the chosen schedule, its lanes, the others, the curves.

        Long simulations come as samples first, and as a whole once nothing else is left to do.

        Raises
        ------
        StoppedError
            If these settings are overtaken.
        """
        chosen = settings.schedule
        if self._drawn is None or (self._drawn.model, self._drawn.machine) != (settings.model, settings.machine):
            self._shown = []  # they are of another model, or another machine
        self._drawn = settings
        simulation = partial(self._predictions.simulation, until=overtaken)
        found: dict[str, Result | Refused] = {chosen.name: simulation(settings, chosen, soon=True)}
        refused = isinstance(found[chosen.name], Refused)
        figures = self._figures(settings, found, None, searched=not refused)
        lanes = self._lanes(settings)
        if refused:  # a first point is somewhere else, and what would fit takes a search
            self._publish(figures=figures, lanes=lanes)
            self._publish(curves=self._first_curves(settings, overtaken, of="bound"))
            self._publish(figures=self._figures(settings, found, None))
            self._publish(curves=self._first_curves(settings, overtaken, of=chosen.name))
        else:
            curves = self._first_curves(settings, overtaken, of=chosen.name)
            self._publish(figures=figures, curves=curves, lanes=lanes)
        self._worker.pause(_SHOWING)
        if overtaken():
            return
        self._check(settings)
        schedules = self._schedules(settings)
        sampled = False
        for soon in (True, False):
            found = {}
            for schedule in sorted(schedules, key=lambda each: each != chosen):
                found[schedule.name] = simulation(settings, schedule, soon=soon)
                if overtaken():
                    return
            prices = None if soon else self._predictions.prices(settings, overtaken)
            self._publish(figures=self._figures(settings, found, prices))
            if soon:
                sampled = any(_sample(each, settings.requests) for each in found.values())
                self._curves(settings, overtaken, more=sampled)
            elif sampled:  # the points at the present value are of all requests now
                self._curves(settings, overtaken, again=True)

    def _figures(
        self,
        settings: Settings,
        found: dict[str, Result | Refused],
        prices: ShadowPrices | Refused | None,
        *,
        searched: bool = True,
    ) -> Plain:
        """The figures: of the chosen schedule alone until those of the others are found, and prices last.

        `prices` is None as long as they are not computed. Unless `searched`, reasons do not say what would fit.
        """
        predictions = self._predictions
        chosen = settings.schedule
        bound = predictions.bound(settings)
        simulated = found[chosen.name]
        rows = [] if isinstance(bound, Refused) else [figure(bound, "bound", bound, chosen=False)]
        for schedule in self._schedules(settings):
            result = found.get(schedule.name)
            if result is None:
                rows.append({"name": schedule.name, "source": "simulated", "chosen": False, "why": "", "pending": True})
            else:
                rate = self._rate_of_sample(settings.on(schedule=schedule), result)
                rows.append(
                    figure(result, schedule.name, bound, chosen=schedule == chosen, rate=rate, searched=searched)
                )
        runs = self._beside(settings)
        rows += [figure(run, run.schedule, bound, chosen=False) for run in runs]
        sample = _sample(simulated, settings.requests)
        results = [each for each in (bound, simulated) if isinstance(each, Result)]
        results += [run for run in runs if run.schedule == chosen.name]
        return {
            "problem": simulated.told(searched=searched) if isinstance(simulated, Refused) else "",
            "searching": not searched,
            "sample": sample,
            "rows": rows,
            "ledger": memories(predictions.ledger(settings)),
            "explain": [] if sample else explain(results, hardware=False),  # prices tell of it
            "prices": priced(prices) if isinstance(prices, ShadowPrices) else [],
            "prices_of": prices.base.source.value if isinstance(prices, ShadowPrices) else "",
            "pending": prices is None,
        }

    def _rate_of_sample(self, settings: Settings, found: Result | Refused) -> float | None:
        """The rate of all requests for which a sample stands; None for a simulation of all of them."""
        if isinstance(found, Refused) or not _sample(found, settings.requests):
            return None
        return self._predictions.of_all(found, settings)

    def _lanes(self, settings: Settings) -> Plain:
        """The middle of the last run at these settings, as simulated and as measured; else what is simulated.

        Below stands a typical iteration of each variant that is pinned.
        """
        runs = [run for at, run in self._measured() if at == settings]
        name = settings.schedule.name
        played = self._predictions.played(settings) if runs else self._predictions.lanes(settings)
        titled: list[tuple[str, Timeline]] = []
        if isinstance(played, Timeline) and runs:
            measured = runs[-1].timeline
            first, last = middle(measured)
            where = f"{name}, iterations {first} to {last - 1}{_computed(settings)}"
            titled = [(f"simulated: {where}", played.window(first, last))]
            titled += [(f"measured: {where}", measured.window(first, last))]
        elif isinstance(played, Timeline):
            titled = [(f"{name}, a typical iteration{_computed(settings)}", played)]
        for variant, other in self._pinned():
            lanes = self._predictions.lanes(other) if other != settings else None
            if isinstance(lanes, Timeline):
                titled.append((f"pinned {variant}{_computed(other)}", lanes))
        return tracks(titled)

    # ------------------------------------------------------------------------------------------------------- curves

    def _first_curves(self, settings: Settings, overtaken: Callable[[], bool], *, of: str) -> Plain:
        """Bound and chosen schedule, as soon as one of them has a point: at the present value or next to it."""
        points = _Points({}, defaultdict(list), {})
        for points in self._points(settings, overtaken, ()):
            if of in points.of:
                break
        return self._drawn_curves(settings, points, busy=True)

    def _curves(
        self, settings: Settings, overtaken: Callable[[], bool], *, again: bool = False, more: bool = False
    ) -> None:
        """Draw bound and schedules over one setting; `again`, with most points known, not before all are.

        The curves stay busy if there is `more` to draw.
        """
        due = math.inf if again else time.monotonic() + _PATIENCE
        points = _Points({}, defaultdict(list), {})
        others = [each for each in self._schedules(settings) if each != settings.schedule]
        for points in self._points(settings, overtaken, others if loader().there else ()):
            if time.monotonic() > due:
                self._publish(curves=self._drawn_curves(settings, points, busy=True))
                due = time.monotonic() + _PATIENCE
        drawn = self._drawn_curves(settings, points, busy=False)
        self._shown = [each for each in drawn["lines"] if each["kind"] != "measured"]
        self._publish(curves={**drawn, "busy": more})

    def _drawn_over(self, settings: Settings) -> Slider:
        """The setting over which curves are drawn."""
        return self._axis if len(self._axis.steps(settings)) > 1 else KV_CAPACITY

    def _points(
        self, settings: Settings, overtaken: Callable[[], bool], others: Sequence[Schedule]
    ) -> Iterator[_Points]:
        """The points of curves, one more of each at a time, outward from the present value.

        The chosen schedule and the bound are complete before the others begin.

        Raises
        ------
        StoppedError
            If these settings are overtaken.
        """
        axis = self._drawn_over(settings)
        values = tuple(step.value for step in axis.steps(settings))
        places = outward(tuple(range(1, len(values) + 1)), axis.at(settings) + 1, POINTS)
        points = _Points({}, defaultdict(list), {})
        for drawn in ([settings.schedule], others) if others else ([settings.schedule],):
            for place in places:
                number = int(place) - 1
                at = settings if number == axis.at(settings) else axis.write(settings, values[number])
                where = drawn_at(axis, at)
                if settings.schedule in drawn and isinstance(bound := self._predictions.bound(at), Result):
                    points.of.setdefault("bound", []).append((where, bound.gen_tok_s))
                    yield points  # the simulation takes longer
                for schedule in drawn:
                    under = at if schedule == settings.schedule else _under(axis, at, schedule)
                    if under is not None:
                        self._add_point(points, schedule.name, under, where, overtaken, small=at is settings)
                yield points
                if overtaken():
                    raise StoppedError("the curves were overtaken.")

    def _add_point(
        self, points: _Points, name: str, at: Settings, where: float, overtaken: Callable[[], bool], *, small: bool
    ) -> None:
        """Add the simulation at some settings to the curve of a name; one of too few requests if it may be `small`.

        The table of figures has the one at the present settings in any case.
        """
        found = self._predictions.simulation(at, at.schedule, soon=True, until=overtaken)
        if isinstance(found, Refused) or (not small and self._predictions.is_small(found, at)):
            return
        if _sample(found, at.requests):
            points.sampled[name].append(where)
        rate = self._predictions.of_all(found, at)
        points.of.setdefault(name, []).append((where, rate))
        if rate > 0:
            points.seconds.setdefault(name, []).append((where, seconds_at(at, rate)))

    def _drawn_curves(self, settings: Settings, points: _Points, *, busy: bool) -> Plain:
        """The curves so far; while they are not complete, with the last complete ones behind them."""
        axis = self._drawn_over(settings)
        lines = [
            {**line(name, points.kind(name), found), "sampled": list(points.sampled.get(name, ()))}
            for name, found in points.of.items()
        ]
        runs = defaultdict[str, list[tuple[float, float]]](list)
        for at, run in self._measured():
            if _differ_in(axis, at, settings):
                runs[self._curve_of(axis, at, settings)].append((drawn_at(axis, at), run.gen_tok_s))
        lines += [line(name, "measured", found) for name, found in runs.items()]
        stale = [{**old, "stale": True} for old in self._shown] if busy else []
        earlier = self._earlier()
        simulated = points.takes(drawn_at(axis, settings), [each.name for each in self._schedules(settings)])
        return {
            "x": {"label": axis.label, "unit": _UNITS.get(axis.name, ""), "log": axis.name not in _LINEAR},
            "y": {"label": "output tokens/s"},
            "at": drawn_at(axis, settings),
            "unlimited": _unlimited(axis, settings),
            "takes": {name: earlier.seconds(each) for name, each in simulated.items()},
            "paced": str(earlier),
            "chosen": settings.schedule.name,
            "lines": [*stale, *lines],
            "busy": busy,
            "axis": axis.name,
            "axes": [{"value": each.name, "label": each.label} for each in SLIDERS if len(each.steps(settings)) > 1],
        }

    def _curve_of(self, axis: Slider, at: Settings, settings: Settings) -> str:
        """The name of the curve on which a measurement lies: its schedule's, as it is offered at the settings."""
        same = (each for each in self._schedules(settings) if _under(axis, at, each) == at)
        return next((each.name for each in same), at.schedule.name)

    def _beside(self, settings: Settings) -> list[Result]:
        """The last measurement at these settings under each schedule."""
        runs = (run for at, run in self._measured() if at.on(schedule=settings.schedule) == settings)
        return list({run.schedule: run for run in runs}.values())


class _Garbage:
    """Collections of recent garbage alone, until all drawings of the process are at rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_work = set[Drawing]()
        self._thresholds = gc.get_threshold()

    def recent_alone(self, drawing: Drawing) -> None:
        """Put off collections of all garbage."""
        with self._lock:
            if not self._at_work:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(*self._thresholds[:2], _NEVER)
            self._at_work.add(drawing)

    def all_again(self, drawing: Drawing) -> None:
        """Collect all garbage now and as often as before, once no drawing is at work any more.

        Where collections are off, as during a run, none is made now; thresholds that were set meanwhile stay.
        """
        with self._lock:
            if drawing not in self._at_work:
                return
            self._at_work.remove(drawing)
            if self._at_work:
                return
            if gc.get_threshold()[2] == _NEVER:
                gc.set_threshold(*self._thresholds)
        if gc.isenabled():
            gc.collect()


_GARBAGE = _Garbage()


class _Points(NamedTuple):
    """Points of curves by the names of their schedules or the bound.

    Attributes
    ----------
    of : dict of str to list of (float, float)
        Places on the axis, and rates [output tokens/s].
    sampled : dict of str to list of float
        Places on the axis where a schedule's point is of a sample of the requests.
    seconds : dict of str to list of (float, float)
        Places on the axis, and the times that runs take there [s].
    """

    of: dict[str, list[tuple[float, float]]]
    sampled: defaultdict[str, list[float]]
    seconds: dict[str, list[tuple[float, float]]]

    def takes(self, at: float, schedules: Sequence[str]) -> dict[str, float]:
        """Mean simulated time of a run under each schedule, around a place on the axis as a sweep measures it [s].

        A schedule without a point counts as the mean of the others; none is told if none has one.
        """
        means = dict[str, float]()
        for name, found in self.seconds.items():
            near = [seconds for x, seconds in found if is_near(x, at)]
            if near:
                means[name] = sum(near) / len(near)
        usual = sum(means.values()) / max(1, len(means))
        return {name: means.get(name, usual) for name in schedules} if means else {}

    def kind(self, name: str) -> str:
        """Kind of a curve: the bound, simulations of all requests, or some of samples."""
        if name == "bound":
            return "bound"
        return "sample" if name in self.sampled else "simulated"


def _under(axis: Slider, at: Settings, schedule: Schedule) -> Settings | None:
    """Settings under another schedule, which takes their value on the axis if that is one of its options.

    None if it has the option and not this value.
    """
    under = at.on(schedule=schedule)
    value = axis.read(at)
    if axis.read(under) == value:
        return under
    values = [step.value for step in axis.steps(under)]
    if not values:
        return under
    return axis.write(under, value) if value in values else None


def _unlimited(axis: Slider, settings: Settings) -> float | None:
    """The place of no limit on an axis, a step behind the largest one; None where there is always a limit."""
    finite = [step.value for step in axis.steps(settings) if not math.isinf(step.value)]
    return float(finite[-1] * _NEXT) if len(finite) < len(axis.steps(settings)) else None


def drawn_at(axis: Slider, settings: Settings) -> float:
    """The place of a setting on its axis."""
    value = float(axis.read(settings))
    unlimited = _unlimited(axis, settings)
    if math.isinf(value) and unlimited is not None:
        return unlimited
    if axis is KV_CAPACITY:
        return value * kv_bytes_per_token(settings.memory, settings.model)
    return 100 * value if _UNITS.get(axis.name) == "%" else value


def _computed(settings: Settings) -> str:
    """Words behind the title of lanes for what computes the gpu lane, where that is no GPU."""
    return ", gpu computed by the CPU" if settings.machine.shares_cores else ""


def _sample(simulated: Result | Refused, of: int) -> str:
    """A sample in words; empty for a simulation of all requests."""
    if isinstance(simulated, Refused) or simulated.facts["requests"] == str(of):
        return ""
    return f"{int(simulated.facts['requests']):,} of {of:,} requests"


def _differ_in(axis: Slider, one: Settings, other: Settings) -> bool:
    """True if two settings differ in nothing but one setting and the schedule."""
    if not (axis.steps(one) and axis.steps(other)):
        return False
    return axis.write(one.on(schedule=other.schedule), axis.read(other)) == other
