"""The dashboard's live panel: buttons, progress and gauges of one run at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ipywidgets as w

from workbench.core.display import escaped
from workbench.core.errors import WorkbenchError
from workbench.core.units import format_seconds
from workbench.engine import LiveRun, RunState
from workbench.serving import Progress
from workbench.widgets.parts.monitor import CHANNELS, Monitor
from workbench.widgets.parts.strip import Strip
from workbench.widgets.parts.words import alert

PERIOD = 1 / 8  # seconds between two updates
_BARS = {RunState.FINISHED: "success", RunState.PAUSED: "warning", RunState.FAILED: "danger"}


class LivePanel(w.VBox):  # type: ignore[misc]
    """Start, Pause and Stop, a progress bar and gauges.

    Clicks come on any thread and only control the run. `show` derives all that is displayed from the run's state, under
    a lock; a thread calls it eight times a second while a run is live, also while cells of the notebook are busy. It
    waits for no answer from a browser: there may be none, or several.

    Parameters
    ----------
    start : callable
        Starts a run, or raises a WorkbenchError that is then shown.
    ended : callable
        Called with a run that has ended, before the next can be started.
    hold : callable
        Called with True while a run of the settings is shown, so that they must not change, and then with False.
    """

    def __init__(
        self, start: Callable[[], LiveRun], ended: Callable[[LiveRun], None], hold: Callable[[bool], None]
    ) -> None:
        self._start_run = start
        self._ended = ended
        self._hold = hold
        self.run: LiveRun | None = None
        self._watched = False
        self._obstacle = ""
        self._failure = ""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self.start = _button("Start", "play", "Run these settings on this computer", self._on_start)
        self.pause = _button("Pause", "pause", "Hold the run, or let it go on", self._on_pause)
        self.stop = _button("Stop", "stop", "End the run; what was served so far is kept", self._on_stop)
        self.bar = w.IntProgress(layout=w.Layout(flex="0 0 200px"))
        self.status = w.HTML()
        self.status.add_class("wb-status")
        self.strip = Strip(CHANNELS)
        row = w.HBox([self.start, self.pause, self.stop, self.bar, self.status], layout=w.Layout(flex_flow="row wrap"))
        super().__init__([row, self.strip])
        self.show()

    def allow(self, obstacle: str) -> None:
        """Set the reason why the current settings cannot run live; an empty text allows them."""
        with self._lock:
            self._obstacle = obstacle
            self._failure = ""
            self.show()

    def shut(self) -> None:
        """Stop the run and the thread that watches it."""
        self._closed.set()
        if self.run is not None:
            self.run.stop()

    def _on_start(self, _: object) -> None:
        with self._lock:
            if self._watched:
                return
            self._failure = ""
            try:
                self.run = self._start_run()
            except WorkbenchError as error:
                self._failure = alert(error)
            else:
                self._watched = True
                threading.Thread(target=self._watch, args=[self.run], name="dashboard-live", daemon=True).start()
            self.show()

    def _on_pause(self, _: object) -> None:
        if self.run is not None:
            if self.run.state is RunState.PAUSED:
                self.run.resume()
            else:
                self.run.pause()
            self.show()

    def _on_stop(self, _: object) -> None:
        if self.run is not None:
            self.run.stop()
            self.show()

    def _watch(self, run: LiveRun) -> None:
        monitor = Monitor()
        self.strip.clear()
        try:
            ended = False
            seconds = 0.0
            while not ended and not self._closed.wait(PERIOD):
                ended = run.state.ended  # read before the progress, so that the last update has the final figures
                progress = run.progress
                if progress.iterations and progress.seconds > seconds:
                    seconds = progress.seconds
                    self.strip.add(seconds, monitor.read(progress))
                self.show()
            if not self._closed.is_set():
                self._ended(run)
        except Exception as error:  # an exception of this thread would not be shown
            self._failure = alert(error)
        finally:
            with self._lock:
                self._watched = False
                self.show()

    def show(self) -> None:
        """Update buttons, bar and status from the run."""
        with self._lock:
            run = self.run
            state = run.state if run is not None else None
            live = state is not None and not state.ended
            self._hold(self._watched)
            self.start.disabled = self._watched or bool(self._obstacle)
            self.pause.disabled = self.stop.disabled = not live
            paused = state is RunState.PAUSED
            self.pause.description, self.pause.icon = ("Resume", "play") if paused else ("Pause", "pause")
            if run is not None and state is not None:
                self.bar.max = max(1, run.progress.total)
                self.bar.value = run.progress.emitted
                self.bar.bar_style = _BARS.get(state, "")
            self.status.value = self._failure or status(state, run, self._obstacle)


def status(state: RunState | None, run: LiveRun | None, obstacle: str) -> str:
    """Describe the state of the run in one line, or the reason why there is none."""
    if obstacle and (state is None or state.ended):
        return escaped(f"Cannot run live: {obstacle}.")
    if run is None or state is None:
        return "No run yet: press Start."
    if state is RunState.FAILED and run.error is not None:
        return alert(run.error)
    return f"<b>{state.value}</b> &nbsp;{_figures(run.progress)}"


def _figures(progress: Progress) -> str:
    time = format_seconds(progress.seconds) if progress.seconds else "0 s"
    return f"{progress.emitted:,} of {progress.total:,} output tokens in {time}, iteration {progress.iterations:,}"


def _button(label: str, icon: str, tooltip: str, act: Callable[[object], None]) -> w.Button:
    button = w.Button(description=label, icon=icon, tooltip=tooltip, layout=w.Layout(flex="0 0 96px"))
    button.on_click(act)
    button.add_class(f"wb-{label.lower()}")
    return button
