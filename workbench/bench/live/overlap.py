"""Gain from overlap: steady decode passes under VSLPipe with three and two weight slots, CGOPipe and Sequential."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from workbench.bench import record
from workbench.bench.live.sim import smallest
from workbench.core.errors import WorkbenchError
from workbench.core.quiet import listening
from workbench.engine import calibrate, make_checkpoint, run
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver
from workbench.engine.engine import Engine
from workbench.hardware import Machine
from workbench.models import ModelConfig, checkpoint
from workbench.perfmodels.loads import Forced, Loads, crowds
from workbench.pipeline import Pipeline, fetch
from workbench.reproductions.moe_lens import VSL as LAYER
from workbench.scenario import Memory, Scenario
from workbench.scheduler.batch import NONE, Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import CGOPipe, Schedule, Sequential, VSLPipe
from workbench.schedules.base import Step
from workbench.schedules.plan import COMPUTE, busy_seconds
from workbench.serving import Clock, prepare
from workbench.serving.prepared import Prepared
from workbench.simulate.clock import TaskClock
from workbench.stages import experts
from workbench.workload import Request, Workload

VSL = VSLPipe(weight_slots=3)
TWO_SLOTS = VSLPipe()
PREFETCH = Sequential(prefetch=True)
PLAIN = Sequential()
PAGED = CGOPipe()
EXPERTS_STREAMED = fetch(experts.weights) | Pipeline(LAYER.chain)
"""Pipeline for CGOPipe, whose attention weights stay on the GPU as in MoE-Lightning.

If they were streamed, the first segment would wait for the last page of all.
"""
STEADY = 6
"""Passes that count in a round; the pass before them loads the first weights, the one after them loads none."""
ROUNDS = 6
"""Most rounds; they end earlier once every schedule has as many undisturbed passes as requested."""
KV_SHARE = 0.7
"""Share of the host memory for the KV cache; weights and activations need the rest."""
BLOCK = 16


@dataclass
class ScheduleTimes:
    """Times of one schedule: bound, simulated and measured seconds per steady pass, and busy seconds of each lane.

    Bound and simulated are means over several calibrations of the computer.
    """

    schedule: Schedule
    bounds: list[float]
    simulations: list[float]
    measured: list[float] = field(default_factory=list)
    busy: list[dict[str, float]] = field(default_factory=list)
    dropped: int = 0

    @property
    def bound(self) -> float:
        """Mean of the bounds."""
        return mean(self.bounds)

    @property
    def simulated(self) -> float:
        """Mean of the simulated times."""
        return mean(self.simulations)

    def predict_again(self, other: ScheduleTimes) -> None:
        """Add what another calibration predicts."""
        self.bounds += other.bounds
        self.simulations += other.simulations

    def unmeasured(self) -> ScheduleTimes:
        """The same predictions, with nothing measured."""
        return ScheduleTimes(self.schedule, self.bounds, self.simulations)

    def note(self, seconds: float, busy: dict[str, float]) -> None:
        """Record an undisturbed pass."""
        self.measured.append(seconds)
        self.busy.append(busy)

    @property
    def seconds(self) -> float:
        """Median of the undisturbed passes."""
        return median(self.measured)

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the time in which each lane was busy."""
        return {lane: self._busy_seconds(lane) / sum(self.measured) for lane in self.busy[0]}

    def _busy_seconds(self, lane: str) -> float:
        return sum(busy[lane] for busy in self.busy)


class Bench:
    """Steady decodes: `rows` sequences that each read `context` KV entries, on a link of `rate` B/s.

    If `context` or `rate` is None, it is chosen so that the lanes are balanced. `driver` makes the device of the gpu
    lane. Engines have room for other settings too, pairs of rows and context, if `room` names them: benchmarks with the
    same room can be measured on one engine.
    """

    def __init__(
        self,
        model: ModelConfig,
        machine: Machine,
        rows: int,
        context: int | None,
        rate: float | None,
        driver: Callable[[], Driver] = HostDriver,
        room: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.model = model
        self._machine = machine
        self._rows = rows
        self._driver = driver
        self._room = room
        self._prepared: dict[Schedule, Prepared] = {}
        self.context = context or self._balanced_context()
        self.rate = rate or self._balanced_rate()

    def _balanced_context(self) -> int:
        """KV entries per decode at which the cpu lane takes as long as the gpu lane, or the most that are possible."""
        entry = self.model.kv_bytes_per_token(self.model.dtype)
        room = int(KV_SHARE * self._machine.cpu.memory / entry / self._rows) - 2 * BLOCK
        low = BLOCK
        high = min(room, self.model.max_position_embeddings - STEADY - 2)
        while high - low > BLOCK:
            middle = (low + high) // 2
            lanes = self._lanes(middle)
            if lanes["cpu"] < lanes["gpu"]:
                low = middle
            else:
                high = middle
        return low

    def _balanced_rate(self) -> float:
        """Link rate at which a pass's weights take as long as its busier compute lane."""
        cost = prepare(self.scenario(self.context, None), VSL).cost
        weights = cost.weights_per_layer * self.model.num_hidden_layers
        lanes = self._lanes(self.context)
        return min(weights / max(lanes["gpu"], lanes["cpu"]), self._machine.link.h2d)

    def _lanes(self, context: int) -> dict[str, float]:
        """Seconds of each compute lane in a pass under VSLPipe, on its own cores and without the other lane."""
        prepared = prepare(self.scenario(context, None), VSL)
        cores = self._machine.cores
        plan = prepared.lowering.plan(self.batch(context), Step.MIDDLE)
        rows = [part.rows for part in plan.parts]
        pace = prepared.plans.pace(plan.tasks, rows, cores) if cores is not None else None
        busy = busy_seconds(plan.tasks, prepared.plans.tasks(plan.tasks, rows, pace))
        return {lane: busy[lane] for lane in COMPUTE}

    def scenario(self, context: int, rate: float | None, schedule: Schedule = VSL) -> Scenario:
        """Scenario of requests whose prompts are as long as the context, the longest that there is room for."""
        random = np.random.default_rng(0)
        settings = self._room or ((self._rows, context),)
        rows = max(rows for rows, _ in settings)
        longest = max(context for _, context in settings)
        prompts = random.integers(0, self.model.vocab_size, (rows, longest)).tolist()
        blocks = max(rows * _blocks(context) for rows, context in settings)
        return Scenario(
            EXPERTS_STREAMED if schedule is PAGED else LAYER,
            model=self.model,
            machine=self._linked(rate),
            memory=Memory(blocks * BLOCK * self.model.kv_bytes_per_token(self.model.dtype), BLOCK),
            workload=Workload.of([Request(tuple(prompt), STEADY + 2) for prompt in prompts], name="steady decodes"),
            scheduler=ResourceAware(token_budget=max(rows, longest)),
        )

    def _linked(self, rate: float | None) -> Machine:
        """The machine with its link slowed to a rate, if that is slower."""
        link = self._machine.link
        return self._machine if rate is None or rate >= min(link.h2d, link.d2h) else self._machine.limit(link=rate)

    def batch(self, context: int) -> Batch:
        """Batch of all requests, each with `context` tokens in the cache."""
        everyone = np.arange(self._rows)
        return Batch(NONE, NONE, everyone, np.full(self._rows, context), self.model.num_hidden_layers)

    def passes(
        self, prepared: Prepared, clock: Clock, steady: int | None = None
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Execute all passes; yield the seconds of each steady pass and the busy seconds of its lanes."""
        blocks = BlockManager(prepared.scenario.kv_blocks, BLOCK, self._rows, self.context + STEADY + 2)
        everyone = np.arange(self._rows)
        blocks.allocate(everyone, np.full(self._rows, BLOCK))
        for _ in range(_blocks(self.context) - 1):
            blocks.append(everyone)  # one block per sequence at a time, so that a sequence's blocks are not adjacent
        clock.begin(blocks)
        for number, step in enumerate([Step.FIRST, *[Step.MIDDLE] * (steady or STEADY), Step.LAST]):
            begin = clock.now
            busy = clock.execute(prepared.lowering.plan(self.batch(self.context + number), step), number, step)
            if step is Step.MIDDLE:
                yield clock.now - begin, busy

    def prepared(self, schedule: Schedule) -> Prepared:
        """The decodes under a schedule."""
        if schedule not in self._prepared:
            self._prepared[schedule] = prepare(self.scenario(self.context, self.rate, schedule), schedule)
        return self._prepared[schedule]

    def simulated(self, schedule: Schedule) -> ScheduleTimes:
        """Bound and simulated time of a schedule."""
        prepared = self.prepared(schedule)
        rows = self.batch(self.context + 1 + STEADY // 2).rows
        seconds = median(seconds for seconds, _ in self.passes(prepared, TaskClock(prepared)))
        all_decode = np.array([0, self._rows])  # all hold equal shares of the cache
        together = crowds(self._rows, all_decode, all_decode, self._rows)
        of = prepared.cost, prepared.lowering.stack, prepared.scenario.machine
        alone = Loads(*of, Forced(1, 0, round(rows.context / rows.decode), rows.decode, together))
        return ScheduleTimes(schedule, [max(alone.limits(rows).values())], [seconds])

    def on(self, machine: Machine) -> Bench:
        """The same decodes on the same link, with another calibration of the computer."""
        return Bench(self.model, machine, self._rows, self.context, self.rate, self._driver, self._room)

    @contextmanager
    def engine(self, schedule: Schedule) -> Iterator[Engine]:
        """An engine for a schedule, closed at the end."""
        engine = Engine(self.prepared(schedule), driver=self._driver())
        try:
            yield engine
        finally:
            engine.close()

    def warm_up(self, schedule: Schedule, engine: Engine) -> None:
        """Execute each kind of pass once: that compiles kernels."""
        for _ in self.passes(self.prepared(schedule), engine, steady=1):
            pass

    def measure(self, times: ScheduleTimes, engine: Engine, *, disturbed: bool = False) -> None:
        """Measure one round; passes that other programs disturbed are dropped, unless `disturbed` ones count too."""
        passes = self.passes(self.prepared(times.schedule), engine)
        for _ in range(STEADY):
            with listening() as noise:
                seconds, busy = next(passes)
            if noise.quiet or disturbed:
                times.note(seconds, busy)
            else:
                times.dropped += 1
        for _ in passes:  # the last one loads no weights for another
            pass


def _blocks(context: int) -> int:
    """Blocks of a sequence behind all passes."""
    return -(-(context + STEADY + 2) // BLOCK)


def bench_overlap(
    name: str,
    *,
    rows: int,
    context: int | None,
    rate: float | None,
    repeats: int,
    json: Path | None,
    say: Callable[[str], None] = record.say,
) -> list[ScheduleTimes]:
    """Measure VSLPipe, CGOPipe and Sequential with and without weight prefetch, interleaved, and simulate them.

    The computer is calibrated before and after, since its speed may change meanwhile. Every steady pass is a
    repetition. The decodes read a KV cache of zeros instead of prefilled prompts, whose prefill would take minutes.

    Raises
    ------
    WorkbenchError
        If some schedule had no undisturbed repetition.
    """
    model = checkpoint(make_checkpoint(name))
    run(*smallest(model))
    machine = calibrate(model, device="cpu", refresh=True)
    bench = Bench(model, machine, rows, context, rate)
    compared = [bench.simulated(schedule) for schedule in (VSL, TWO_SLOTS, PREFETCH, PAGED, PLAIN)]
    say(f"{machine.name}, calibrated {machine.measured}")
    say(f"{name}, {rows} decodes that read {bench.context} KV entries each, link {bench.rate / 1e9:.2f} GB/s")
    for turn in range(ROUNDS):
        missing = [times for times in compared if len(times.measured) < repeats]
        if not missing:
            break
        for number in np.random.default_rng(turn).permutation(len(missing)).tolist():
            with bench.engine(missing[number].schedule) as engine:
                bench.measure(missing[number], engine)
        counts = [f"{one.schedule.name} {len(one.measured)} of {len(one.measured) + one.dropped}" for one in compared]
        say(f"round {turn + 1}: undisturbed passes: {', '.join(counts)}")
    if none := [times for times in compared if not times.measured]:
        raise WorkbenchError(f"other programs disturbed every pass of {none[0].schedule.name}; close them.")
    _predict_again(bench, compared, say)
    ratios = ratios_of(compared)
    table(compared, ratios, say)
    if json is not None:
        record.write(json, machine, ratios, [row(times) for times in compared])
    return compared


def _predict_again(bench: Bench, compared: Sequence[ScheduleTimes], say: Callable[[str], None]) -> None:
    """Calibrate the computer once more, and add what that predicts; without it, the first prediction stays."""
    try:
        after = bench.on(calibrate(bench.model, device="cpu", refresh=True))
    except WorkbenchError as error:
        say(f"predicted by the calibration before alone; that after failed: {error}")
        return
    for times in compared:
        times.predict_again(after.simulated(times.schedule))
        first, second = times.simulations
        say(f"{times.schedule.name}: simulated {first:.4f} s by the calibration before, {second:.4f} s by that after")


def ratios_of(compared: Sequence[ScheduleTimes]) -> dict[str, dict[str, float]]:
    """Speed of the first schedule relative to its simulation and to the baselines: of the medians and the extremes."""
    first, *baselines = compared
    name = first.schedule.name
    ratios = {f"{name}: measured / simulated speed": _ratio([first.simulated], first.measured)}
    for baseline in baselines:
        ratios[f"{name} / {baseline.schedule.name}, speed"] = _ratio(baseline.measured, first.measured)
    return ratios


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    return {
        "median": median(above) / median(below),
        "min": min(above) / max(below),
        "max": max(above) / min(below),
        "runs": len(below),
    }


def table(
    compared: Sequence[ScheduleTimes], ratios: Mapping[str, Mapping[str, float]], say: Callable[[str], None]
) -> None:
    """Print bound, simulated and measured seconds of a pass of each schedule, and the ratios."""
    heads = "bound  simulated  measured (range)            simulated, bound / measured  lanes busy"
    say(f"{'seconds per pass':26}  {heads}")
    for one in compared:
        lanes = ", ".join(f"{lane} {share:.0%}" for lane, share in one.utilisation.items() if share)
        spread = f"{one.seconds:.4f} ({min(one.measured):.4f} to {max(one.measured):.4f})"
        shares = f"{one.simulated / one.seconds:.2f}, {one.bound / one.seconds:.2f}"
        say(f"{one.schedule.name:26}  {one.bound:.4f}  {one.simulated:9.4f}  {spread:26}  {shares:>27}  {lanes}")
    for what, seen in ratios.items():
        say(f"{what}: {seen['median']:.2f} of the medians ({seen['min']:.2f} to {seen['max']:.2f})")


def row(times: ScheduleTimes) -> dict[str, Any]:
    """The row of a record."""
    return {
        "schedule": times.schedule.name,
        "bound": times.bound,
        "simulated": times.simulated,
        "simulations": times.simulations,
        "measured": times.measured,
        "utilisation": times.utilisation,
        "dropped": times.dropped,
    }
