"""The state behind a view: what was wired and set, its history, pinned variants and runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from workbench.core.errors import PipelineError, ScheduleError, WorkbenchError
from workbench.core.result import Result
from workbench.core.units import DTYPE_BYTES
from workbench.hardware import Machine
from workbench.pipeline import Pipeline, Stack
from workbench.scenario import Scenario
from workbench.schedules import Overlap, Schedule
from workbench.serving.capacity import STREAMED, streaming
from workbench.serving.ledger import Change, Ledger
from workbench.stages import ExpertSet, Op
from workbench.widgets.state.controls import TOKEN_BUDGET, Controls, Slider
from workbench.widgets.state.drawing import EMPTY, Drawing
from workbench.widgets.state.figures import Plain
from workbench.widgets.state.offered import (
    calibration_of,
    can_calibrate,
    in_held_formats,
    on_this_computer,
    runnable,
    shortened,
    too_long,
    why_not_live,
    with_this_machine,
)
from workbench.widgets.state.predictions import Predictions, Refused
from workbench.widgets.state.runs import Planned, Runs, swept
from workbench.widgets.state.settings import Settings
from workbench.widgets.state.variants import Variants
from workbench.widgets.state.wirings import Wirings

Message = Mapping[str, Any]
POINTS = 5
"""Values of the setting that a sweep goes along."""
_DURING_RUNS = frozenset({"pause", "resume", "stop", "ready", "keep", "axis", "pin", "unpin"})
"""Messages that are answered while runs are going on."""
_STEPS = 200
"""Steps of the history."""
_RUNS = 64
"""Measured runs that are kept."""
_BUDGET = 8192
"""Tokens of an iteration that is offered where longer ones leave little memory for the KV cache."""
_MUCH = 4
"""Factor of a change from which on changes of two settings are offered too."""
_PATIENCE = 60.0  # seconds that a run waits at most until the drawing has stopped
_BRIEF = 30.0
"""Time that a run on this computer takes by its simulation, where the view chooses the number of requests [s]."""
_FEW = 1000
"""Most requests of such a run, so that its first iteration, with all prompts that fit, is over soon."""


class _Moment(NamedTuple):
    """A moment of the history: the settings, and the schedule that returns once a wiring takes it again."""

    settings: Settings
    wanted: Schedule


class Studio:
    """Answers messages of a view and publishes what it shows. It knows nothing of widgets.

    Parameters
    ----------
    scenario : Scenario
        What the view begins with.
    schedules : sequence of Schedule
        Schedules that stand first among those offered; the first is chosen.
    names : mapping of str to Op or ExpertSet
        The user's own operations and sets of experts, by the names of their variables.
    publish : callable (**parts) -> None
        Called from several threads, one at a time, with what some parts show, by their names.
    sample : callable (list, bool) -> None
        Called with new samples of a run's gauges; see `Runs`.
    keep : callable (str) -> None
        Called with the scenario as a picture holds it, where a picture is saved; see `told`.
    """

    def __init__(
        self,
        scenario: Scenario,
        schedules: Sequence[Schedule],
        names: Mapping[str, Op | ExpertSet],
        publish: Callable[..., None],
        sample: Callable[[list[Any], bool], None],
        keep: Callable[[str], None],
    ) -> None:
        self._lock = threading.RLock()
        self._out = publish
        self._keep = keep
        self.settings = Settings.of(scenario, schedules[0])
        self._wanted = schedules[0]
        self._past: list[_Moment] = []
        self._future: list[_Moment] = []
        self._sliding = ""
        self._fixes: dict[int, Settings] = {}
        self._numbers = count()
        self._controls: Plain = {}
        self._unread: tuple[Pipeline | Stack, Plain] | None = None  # a wiring, and code beside it that is none
        self.measured: list[tuple[Settings, Result]] = []
        self.predictions = Predictions()
        self.controls = Controls(self.settings, tuple(schedules))
        self.wirings = Wirings(names)
        self.variants = Variants(self.predictions, lambda: self.measured)
        self.runs = Runs(
            lambda told: self._publish("live", told), sample, self._ran, self._at_rest, self._simulated, self._over
        )
        self.drawing = Drawing(
            self.predictions,
            self.controls.schedules,
            lambda: self.measured,
            self.variants.named,
            lambda: self.runs.earlier,
            self._check,
            self._publish_drawn,
        )
        self._out(**EMPTY)
        self._show()

    def close(self) -> None:
        """Stop runs and end all threads."""
        self.runs.stop()
        self.drawing.close()
        self.predictions.forget()

    def answer(self, message: Message) -> None:
        """Do what a message says; one that is not known, or of no use any more, changes nothing.

        While runs are going on, settings and wiring stay as they are; see `runs.HELD`.
        """
        verb = message.get("do")
        act = getattr(self, f"_on_{verb}", None)
        with self._lock:
            if self.runs.busy and verb not in _DURING_RUNS:
                return
            if act is not None:
                act(message)
            elif verb in self.wirings.verbs:
                now = self.settings
                wired = self.wirings.edit(now.pipeline, message, now.model)
                opened = self.controls.schedule_named(str(message["name"])) if verb == "open" else None
                self._wire(wired, opened or self._wanted)

    def told(self) -> str:
        """The scenario as JSON, for a picture to hold; empty if it cannot be, or cannot be written."""
        try:
            return json.dumps(self.settings.scenario().to_dict())
        except WorkbenchError:
            return ""

    # ------------------------------------------------------------------------------------------------------ showing

    def _publish(self, name: str, value: Any) -> None:
        with self._lock:
            self._out(**{name: value})

    def _publish_drawn(self, **parts: Any) -> None:
        """Publish what was drawn; figures that have a problem come with changes that mend it, once these are found."""
        with self._lock:
            figures = parts.get("figures")
            if figures and figures["problem"]:
                parts["figures"] = {**figures, "mends": [] if figures["searching"] else self._mends()}
            self._out(**parts)

    def _show(self) -> None:
        """Publish everything that follows at once, and let the rest be drawn.

        The rest begins to be computed meanwhile: compiled simulations run beside Python. Options are greyed as far as
        that is known, and the others a little later.
        """
        with self._lock:
            now = self.settings
            self.drawing.put(now)
            self._controls = self._told_controls(now, self.predictions.refused_before)
            self._out(
                settings=self._controls,
                wiring=self._wiring(),
                code=self._code(now.pipeline),
                variants=self.variants.plain(),
            )
            fault = self.wirings.fault(now.pipeline, now.model)
            away = why_not_live(now)
            here = runnable(now, self.controls.models, self.controls.this_computer) if away else None
            again = " again" if self._is_calibrated(now) else ""
            self.runs.allow(
                now,
                fault[1].text if fault is not None else away or self._incomplete() or self._why_not(),
                f"Use {here.name} on this computer, with requests for it" if here is not None else "",
                f"Calibrate{again} (1 to 2 min)" if self._can_calibrate() else "",
            )

    def _code(self, pipeline: Pipeline | Stack) -> Plain:
        """The code of a wiring; what was typed and is no pipeline stays until the wiring changes."""
        if self._unread is not None and self._unread[0] == pipeline:
            return self._unread[1]
        self._unread = None
        return self.wirings.code(pipeline)

    def _check(self, settings: Settings) -> None:
        """Publish the controls with the reasons why options do not go together with some settings."""
        checked = self._told_controls(settings, self.predictions.refused)
        with self._lock:
            if settings == self.settings and checked != self._controls:
                self._controls = checked
                self._out(settings=checked)

    def _told_controls(self, settings: Settings, refused: Callable[[Settings], Refused | None]) -> Plain:
        """The controls, with notes: on the lanes of this computer, and on a schedule that stands in for another."""
        told = self.controls.plain(settings, refused)
        told["uncalibrated"] = settings.machine.is_local and not self._is_calibrated(settings)
        named = {one["name"]: one for group in told["groups"] for one in group["controls"]}
        if settings.machine.shares_cores:
            named["machine"]["note"] = "Its CPU computes both lanes, each on half of the cores; the link is a copy."
        if type(self._wanted) is not type(settings.schedule):
            named["schedule"]["note"] = f"in the place of {self._wanted.name}, until the wiring is one that it takes"
        return told

    def _is_calibrated(self, settings: Settings) -> bool:
        """True if the times of the model's operations on the machine were measured."""
        scenario = self.predictions.scenario(settings)
        return isinstance(scenario, Scenario) and calibration_of(scenario) is not None

    def _can_calibrate(self) -> bool:
        """True where a calibration is offered; see `can_calibrate`."""
        scenario = self.predictions.scenario(self.settings)
        return isinstance(scenario, Scenario) and can_calibrate(scenario) and not why_not_live(self.settings)

    def _incomplete(self) -> str:
        """The reason why the layers cannot run, if they lack an operation; empty if they lack none."""
        missing = self.wirings.missing(self.settings.pipeline)
        those = "these are" if len(missing) > 1 else "this one is"
        return f"A run needs every operation of a layer, and {those} missing: {', '.join(missing)}." if missing else ""

    def _why_not(self) -> str:
        """The reason why the present settings make no scenario that the schedule takes, or an empty text."""
        scenario = self.predictions.scenario(self.settings)
        found = scenario if isinstance(scenario, Refused) else self.predictions.refused(self.settings)
        return found.why if found else ""

    def _takes(self, settings: Settings) -> bool:
        """False if the schedule needs another shape of pipeline, or fewer micro-batches."""
        found = self.predictions.refused(settings)
        return found is None or not isinstance(found.error, ScheduleError)

    def _wiring(self) -> Plain:
        """The wiring with its costs, and the steps that can be undone."""
        now = self.settings
        costs = self.predictions.costs(now) if self.wirings.fault(now.pipeline, now.model) is None else None
        known = None if isinstance(costs, Refused) else costs
        shown = self.wirings.plain(now.pipeline, now.model, known)
        return {**shown, "undo": len(self._past), "redo": len(self._future)}

    # ------------------------------------------------------------------------------------------------------- history

    def _change(self, settings: Settings, sliding: str = "", wanted: Schedule | None = None) -> None:
        """Go to other settings; moves of one slider in a row are one step of the history.

        Unless another schedule is wanted, it is that of the settings.
        """
        if settings == self.settings:
            return
        if not (sliding and sliding == self._sliding):
            self._past = [*self._past[-_STEPS + 1 :], _Moment(self.settings, self._wanted)]
        self._sliding = sliding
        self._future.clear()
        self.settings = settings
        self._wanted = wanted or settings.schedule
        self._show()

    def _wire(self, pipeline: Pipeline | Stack, wanted: Schedule) -> None:
        """Go to another wiring, under the wanted schedule or one that takes it."""
        self._unread = None
        settings = self.settings.on(pipeline=pipeline, schedule=wanted)
        if self.wirings.fault(pipeline, settings.model) is None and not self._takes(settings):
            settings = settings.on(schedule=Overlap())
        self._change(settings, wanted=wanted)

    def _on_option(self, message: Message) -> None:
        """Set an option of a card; a value that it cannot have is refused beside its field, and the old one stays."""
        now = self.settings
        try:
            wired = self.wirings.edit(now.pipeline, message, now.model)
        except PipelineError as error:
            self._out(wiring={**self._wiring(), "refused": str(error)})
        else:
            self._wire(wired, self._wanted)

    def _on_undo(self, _: Message) -> None:
        if self._past:
            self._future.append(_Moment(self.settings, self._wanted))
            self._go_to(self._past.pop())

    def _on_redo(self, _: Message) -> None:
        if self._future:
            self._past.append(_Moment(self.settings, self._wanted))
            self._go_to(self._future.pop())

    def _go_to(self, moment: _Moment) -> None:
        self.settings, self._wanted = moment
        self._sliding = ""
        self._show()

    # ------------------------------------------------------------------------------------------------------- settings

    def _on_set(self, message: Message) -> None:
        control = self.controls[str(message["name"])]
        found = control.moved(self.settings, message["value"])
        wanted = self._wanted if found.schedule == self.settings.schedule else found.schedule
        self._change(found, sliding=control.name if isinstance(control, Slider) else "", wanted=wanted)

    def _on_axis(self, message: Message) -> None:
        self.drawing.over(str(message["name"]))
        self.drawing.put(self.settings)

    def _on_code(self, message: Message) -> None:
        text = str(message["text"])
        try:
            pipeline = self.wirings.read(text)
        except WorkbenchError as error:
            line = error.line or 0 if isinstance(error, PipelineError) else 0
            told = {"text": text, "error": str(error), "line": line}
            self._unread = self.settings.pipeline, told
            self._out(code=told)
            return
        if pipeline == self.settings.pipeline:
            self._unread = None
            self._out(code={"text": text, "error": "", "line": 0})
        else:
            self._wire(pipeline, self._wanted)

    def _mends(self) -> list[Plain]:
        """Changes of the settings that make everything fit, the nearest first."""
        scenario = self.predictions.scenario(self.settings)
        self._fixes = {}
        if isinstance(scenario, Refused):
            shorter = shortened(self.settings) if too_long(self.settings) else None
            return [] if shorter is None else [self._fix(shorter, f"Use {_lengths(shorter)}")]
        told = list[Plain]()
        ledger = self.predictions.ledger(self.settings)
        if isinstance(ledger, Refused):
            if not self._takes(self.settings):
                overlap = self.settings.on(schedule=Overlap())
                return [self._fix(overlap, "Use the schedule Overlap, which takes any wiring")]
            return [self._fix(fixed, f"Use {words}") for words, fixed in self._in_known_precision()]
        single = list(_possible(self.settings, ledger))
        for change, fixed in single:
            told.append(self._fix(fixed, f"Use {change.words} (now {change.now})"))
        if not single:
            told += self._after(self._streamed())
        if all(change.factor > _MUCH for change, _ in single):
            told += self._after(self._in_shorter_iterations())
        return told

    def _in_known_precision(self) -> Iterator[tuple[str, Settings]]:
        """The settings with weights and KV in the first precision that the GPU computes in, in words too."""
        now = self.settings
        for dtype in (known for known, _ in now.machine.gpu.flops if known in DTYPE_BYTES):
            fixed = now.on(memory=replace(now.memory, weights=dtype, kv=dtype))
            if fixed != now and self.predictions.refused(fixed) is None:
                yield f"{dtype} weights and KV", fixed
                return

    def _streamed(self) -> Iterator[tuple[str, Settings]]:
        """The settings with weights streamed that stay on the GPU now, in words too."""
        now = self.settings
        for item, words in STREAMED:
            pipeline = streaming(now.pipeline, item)
            if pipeline != now.pipeline:
                yield words, now.on(pipeline=pipeline)

    def _in_shorter_iterations(self) -> Iterator[tuple[str, Settings]]:
        """The settings with fewer tokens in an iteration, in words too, where the scheduler lets them be chosen."""
        now = self.settings
        if TOKEN_BUDGET.steps(now) and TOKEN_BUDGET.read(now) > _BUDGET:
            yield f"a token budget of {_BUDGET:,}", TOKEN_BUDGET.write(now, _BUDGET)

    def _after(self, steps: Iterator[tuple[str, Settings]]) -> list[Plain]:
        """The first of some changes with which another one makes everything fit, and the other one with it."""
        for words, first in steps:
            ledger = self.predictions.ledger(first)
            possible = () if isinstance(ledger, Refused) else _possible(first, ledger)
            for change, fixed in possible:
                return [self._fix(fixed, f"Use {words} and {change.words} (now {change.now})")]
        return []

    def _fix(self, settings: Settings, label: str) -> Plain:
        """Offer a change under a number that no other one has."""
        number = next(self._numbers)
        self._fixes[number] = settings
        return {"id": number, "label": label}

    def _on_fix(self, message: Message) -> None:
        fixed = self._fixes.get(int(message["id"]))
        if fixed is not None:
            self._change(fixed)

    # ---------------------------------------------------------------------------------------------------- variants

    def _on_pin(self, _: Message) -> None:
        self.variants.pin(self.settings, self.wirings.code(self.settings.pipeline)["text"])
        self._show_variants()

    def _on_keep(self, _: Message) -> None:
        self._keep(self.told())

    def _on_unpin(self, message: Message) -> None:
        self.variants.unpin(int(message["id"]))
        self._show_variants()

    def _show_variants(self) -> None:
        """Publish the variants that are pinned, and let their lanes be drawn, during a run after it."""
        self._out(variants=self.variants.plain())
        if not self.runs.busy:
            self.drawing.put(self.settings)

    def _on_recall(self, message: Message) -> None:
        settings = self.variants.settings(int(message["id"]))
        if settings is not None:
            self._change(settings)

    # --------------------------------------------------------------------------------------------------------- runs

    def _on_start(self, _: Message) -> None:
        now = self.settings
        self.runs.begin(lambda: [Planned(now, now.schedule.name)])

    def _on_here(self, _: Message) -> None:
        """Go to this computer, a model that it has and a run that is over soon."""
        now = self.settings
        here = self.controls.this_computer
        model = runnable(now, self.controls.models, here)
        if model is None:
            return
        chosen = now if model == now.model else self.controls["model"].write(now, model)
        if self.wirings.fault(now.pipeline, model) is not None:  # requests suit the wiring that its mends lead to
            chosen = chosen.on(pipeline=self.wirings.mended(now.pipeline, model), schedule=Overlap())
        chosen = in_held_formats(chosen)
        found = on_this_computer(chosen, here)
        if found is None:
            shortest = with_this_machine(chosen, here).on(prompt_len=1, output_len=1)
            refused = self.predictions.refused(shortest)
            small = f"{model.name} does not fit this computer in this wiring; choose another model."
            self.runs.allow(now, refused.why if refused is not None else small)
            return
        rate = self.predictions.rate(found, found.schedule, soon=True)
        few = int(_BRIEF * rate / found.output_len) if rate > 0 else found.requests
        fewer = found.on(requests=min(found.requests, _FEW, max(1, few)))
        suited = shortened(fewer) or found  # the longest of a few may be longer beside the same mean
        self._change(suited.on(pipeline=now.pipeline, schedule=now.schedule))

    def _on_calibrate(self, _: Message) -> None:
        if self._can_calibrate():
            self.runs.calibrate(self.settings, self._calibrated, again=self._is_calibrated(self.settings))

    def _calibrated(self, machine: Machine) -> None:
        """Go to this computer with the times of the model's operations."""
        shapes = {profile.shape for profile in machine.profiles}
        others = (each for each in self.controls.this_computer.profiles if each.shape not in shapes)
        machine = replace(machine, profiles=(*machine.profiles, *others))
        with self._lock:
            self.controls.offer(machine)
            self._change(self.settings.on(machine=machine))

    def _simulated(self, settings: Settings, soon: bool) -> float:
        """Rate of the simulation at these settings; NaN without one [output tokens/s]."""
        return self.predictions.rate(settings, settings.schedule, soon=soon)

    def _over(self) -> None:
        """Draw what was left undrawn while runs were going on."""
        self.drawing.put(self.settings)

    def _on_pause(self, _: Message) -> None:
        self.runs.pause()

    def _on_resume(self, _: Message) -> None:
        self.runs.resume()

    def _on_stop(self, _: Message) -> None:
        self.runs.stop()

    def _on_sweep(self, message: Message) -> None:
        """Run some values of one setting, over which the curves are then drawn, under each schedule that it names."""
        now = self.settings
        axis = self.controls[str(message["x"])]
        if not isinstance(axis, Slider):
            return
        self._on_axis({"name": axis.name})
        names = [str(name) for name in message.get("schedules", [])] or [now.schedule.name]
        schedules = [each for each in self.controls.schedules(now) if each.name in names]
        points = int(message.get("points", POINTS))
        self.runs.begin(lambda: swept(now, axis, points, schedules), sweeping=True)

    def _on_ready(self, _: Message) -> None:
        self.runs.resend()

    def _ran(self, settings: Settings, result: Result) -> None:
        """Keep what was measured, and show it beside what was predicted."""
        if not result.stopped:
            with self._lock:
                self.measured = [*self.measured[-_RUNS + 1 :], (settings, result)]
            self._publish("variants", self.variants.plain())
        self.drawing.put(self.settings)

    def _at_rest(self) -> None:
        """Stop drawing: the cores belong to the next run."""
        self.drawing.cancel()
        self.drawing.wait(_PATIENCE)


def _lengths(settings: Settings) -> str:
    return f"prompts of {settings.prompt_len:,} and outputs of {settings.output_len:,} tokens (mean)"


def _possible(settings: Settings, ledger: Ledger) -> Iterator[tuple[Change, Settings]]:
    """The changes of a ledger that controls can make, with the settings that they give."""
    for change in ledger.changes:
        fixed = _changed(settings, change.scenario, change.schedule)
        machine = change.scenario.machine
        if fixed.limited.gpu.memory >= machine.gpu.memory and fixed.limited.cpu == machine.cpu:
            yield change, fixed  # no control gives a machine more memory than it has


def _changed(settings: Settings, scenario: Scenario, schedule: Schedule) -> Settings:
    """The settings with the pipeline, memory, machine, requests and schedule of a scenario that fits."""
    found = Settings.of(scenario, schedule)
    if found.kv_tokens != settings.kv_tokens:
        settings = settings.on(kv_tokens=found.kv_tokens, suited=False)
    return settings.with_options(schedule).on(
        pipeline=scenario.pipeline,
        memory=found.memory,
        scheduler=found.scheduler,
        gpu_memory=min(scenario.machine.gpu.memory, settings.machine.gpu.memory),
    )
