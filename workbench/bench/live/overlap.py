"""What overlap gains: steady decode passes under VSLPipe with three weight slots and two, CGOPipe, and Sequential."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from workbench.bench import record
from workbench.bench.live.sim import smallest
from workbench.core.errors import WorkbenchError
from workbench.core.quiet import listening
from workbench.engine import calibrate, make_checkpoint, run
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

VSL, TWO_SLOTS, PREFETCH, PLAIN = VSLPipe(weight_slots=3), VSLPipe(), Sequential(prefetch=True), Sequential()
PAGED = CGOPipe()
EXPERTS_STREAMED = fetch(experts.weights) | Pipeline(LAYER.chain)
"""MoE-Lightning keeps the attention's weights on the GPU: its first segment would wait for the last page of all."""
STEADY = 6
"""Passes of a round that count; one before them brings the first weights, one after them needs no more."""
ROUNDS = 6
"""Most rounds, until every schedule has as many undisturbed passes as asked for."""
KV_SHARE = 0.7
"""Of the host memory; weights and activations need the rest."""
BLOCK = 16


@dataclass
class Contender:
    """One schedule: seconds per steady pass, least, simulated and measured, and how long each lane was busy."""

    schedule: Schedule
    bound: float
    simulated: float
    measured: list[float] = field(default_factory=list)
    busy: list[dict[str, float]] = field(default_factory=list)
    dropped: int = 0

    def note(self, seconds: float, busy: dict[str, float]) -> None:
        """An undisturbed pass."""
        self.measured.append(seconds)
        self.busy.append(busy)

    @property
    def seconds(self) -> float:
        """Median of the undisturbed passes."""
        return median(self.measured)

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the time in which each lane was busy."""
        return {lane: sum(busy[lane] for busy in self.busy) / sum(self.measured) for lane in self.busy[0]}


class Bench:
    """`rows` decodes that each read `context` KV entries, on a link of `rate` B/s; None lets both be balanced."""

    def __init__(
        self, model: ModelConfig, machine: Machine, rows: int, context: int | None, rate: float | None
    ) -> None:
        self._model, self._machine, self._rows = model, machine, rows
        self.context = context or self._balanced_context()
        self.rate = rate or self._balanced_rate()

    def _balanced_context(self) -> int:
        """KV entries per decode at which the cpu lane has as much to do as the gpu lane, or as many as there may be."""
        room = (
            int(KV_SHARE * self._machine.cpu.memory / self._model.kv_bytes_per_token(self._model.dtype) / self._rows)
            - 2 * BLOCK
        )
        low, high = BLOCK, min(room, self._model.max_position_embeddings - STEADY - 2)
        while high - low > BLOCK:
            middle = (low + high) // 2
            lanes = self._lanes(middle)
            low, high = (middle, high) if lanes["cpu"] < lanes["gpu"] else (low, middle)
        return low

    def _balanced_rate(self) -> float:
        """Link rate at which a pass's weights take as long as its busier compute lane."""
        cost = prepare(self.scenario(self.context, None), VSL).cost
        weights = cost.weights_per_layer * self._model.num_hidden_layers
        lanes = self._lanes(self.context)
        return min(weights / max(lanes["gpu"], lanes["cpu"]), self._machine.link.h2d)

    def _lanes(self, context: int) -> dict[str, float]:
        """Seconds of the compute lanes in a pass under VSLPipe, each on its own cores and alone."""
        prepared, cores = prepare(self.scenario(context, None), VSL), self._machine.cores
        plan = prepared.lowering.plan(self.batch(context), Step.MIDDLE)
        parts = [part.rows for part in plan.parts]
        pace = prepared.plans.pace(plan.tasks, parts, cores) if cores is not None else None
        busy = busy_seconds(plan.tasks, prepared.plans.tasks(plan.tasks, parts, pace))
        return {lane: busy[lane] for lane in COMPUTE}

    def scenario(self, context: int, rate: float | None, schedule: Schedule = VSL) -> Scenario:
        """Requests whose prompts are as long as the context."""
        random = np.random.default_rng(0)
        prompts = random.integers(0, self._model.vocab_size, (self._rows, context)).tolist()
        blocks = self._rows * (-(-(context + STEADY + 2) // BLOCK))
        return Scenario(
            EXPERTS_STREAMED if schedule is PAGED else LAYER,
            model=self._model,
            machine=self._machine if rate is None else self._machine.limit(link=rate),
            memory=Memory(blocks * BLOCK * self._model.kv_bytes_per_token(self._model.dtype), BLOCK),
            workload=Workload.of([Request(tuple(prompt), STEADY + 2) for prompt in prompts], name="steady decodes"),
            scheduler=ResourceAware(),
        )

    def batch(self, context: int) -> Batch:
        """All requests, each with `context` tokens in the cache."""
        everyone = np.arange(self._rows)
        return Batch(NONE, NONE, everyone, np.full(self._rows, context), self._model.num_hidden_layers)

    def passes(self, prepared: Prepared, clock: Clock) -> Iterator[tuple[float, dict[str, float]]]:
        """Begin, and yield the seconds and busy lanes of each steady pass when it has ended."""
        blocks = BlockManager(prepared.scenario.kv_blocks, BLOCK, self._rows, self.context + STEADY + 2)
        everyone = np.arange(self._rows)
        blocks.allocate(everyone, np.full(self._rows, BLOCK))
        for _ in range(prepared.scenario.kv_blocks // self._rows - 1):
            blocks.append(everyone)  # in turn, so that each sequence's blocks lie apart
        clock.begin(blocks)
        for number, step in enumerate([Step.FIRST, *[Step.MIDDLE] * STEADY, Step.LAST]):
            begin = clock.now
            busy = clock.execute(prepared.lowering.plan(self.batch(self.context + number), step), number, step)
            if step is Step.MIDDLE:
                yield clock.now - begin, busy

    def simulated(self, schedule: Schedule) -> Contender:
        """A schedule with its bound and its simulation."""
        prepared = prepare(self.scenario(self.context, self.rate, schedule), schedule)
        rows = self.batch(self.context + 1 + STEADY // 2).rows
        seconds = median(seconds for seconds, _ in self.passes(prepared, TaskClock(prepared)))
        all_decode = np.array([0, self._rows])  # each holds as much of the cache as another
        alone = Loads(
            prepared,
            Forced(1, rows.context / rows.decode, rows.decode, crowds(self._rows, all_decode, all_decode, self._rows)),
        )
        return Contender(schedule, max(alone.limits(rows).values()), seconds)

    def measure(self, contender: Contender) -> None:
        """One round: each pass counts unless it was disturbed."""
        prepared = prepare(self.scenario(self.context, self.rate, contender.schedule), contender.schedule)
        engine = Engine(prepared)
        try:
            passes = self.passes(prepared, engine)
            for _ in range(STEADY):
                with listening() as noise:
                    seconds, busy = next(passes)
                if noise.quiet:
                    contender.note(seconds, busy)
                else:
                    contender.dropped += 1
        finally:
            engine.close()


def bench_overlap(
    name: str,
    *,
    rows: int,
    context: int | None,
    rate: float | None,
    repeats: int,
    json: Path | None,
    say: Callable[[str], None] = record.say,
) -> list[Contender]:
    """Measure VSLPipe against CGOPipe and Sequential with and without weight prefetch, interleaved; all also simulated.

    Every steady pass is a repetition. The KV that the decodes read is put in place as zeros, not prefilled: prompts of
    that length would take minutes.

    Raises
    ------
    WorkbenchError
        If some schedule had no undisturbed repetition.
    """
    model = checkpoint(make_checkpoint(name))
    run(*smallest(model))
    machine = calibrate(model, refresh=True)
    bench = Bench(model, machine, rows, context, rate)
    contenders = [bench.simulated(schedule) for schedule in (VSL, TWO_SLOTS, PREFETCH, PAGED, PLAIN)]
    say(f"{machine.name}, calibrated {machine.measured}")
    say(f"{name}, {rows} decodes that read {bench.context} KV entries each, link {bench.rate / 1e9:.2f} GB/s")
    for turn in range(ROUNDS):
        missing = [contender for contender in contenders if len(contender.measured) < repeats]
        if not missing:
            break
        for number in np.random.default_rng(turn).permutation(len(missing)).tolist():
            bench.measure(missing[number])
        counts = ", ".join(f"{c.schedule.name} {len(c.measured)} of {len(c.measured) + c.dropped}" for c in contenders)
        say(f"round {turn + 1}: undisturbed passes: {counts}")
    if none := [contender for contender in contenders if not contender.measured]:
        raise WorkbenchError(f"other programs disturbed every pass of {none[0].schedule.name}; close them.")
    ratios = _ratios(contenders)
    _print(contenders, ratios, say)
    if json is not None:
        record.write(json, machine, ratios, [_row(contender) for contender in contenders])
    return contenders


def _ratios(contenders: Sequence[Contender]) -> dict[str, dict[str, float]]:
    """Speeds of the first contender, relative to its simulation and to the others: of the medians, and the extremes."""
    fast, *others = contenders
    ratios = {f"{fast.schedule.name}: measured / simulated speed": _ratio([fast.simulated], fast.measured)}
    for slow in others:
        ratios[f"{fast.schedule.name} / {slow.schedule.name}, speed"] = _ratio(slow.measured, fast.measured)
    return ratios


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    return {
        "median": median(above) / median(below),
        "min": min(above) / max(below),
        "max": max(above) / min(below),
        "runs": len(below),
    }


def _print(
    contenders: Sequence[Contender], ratios: Mapping[str, Mapping[str, float]], say: Callable[[str], None]
) -> None:
    say(f"{'seconds per pass':26}  bound  simulated  measured (range)        simulated, bound / measured  lanes busy")
    for c in contenders:
        lanes = ", ".join(f"{lane} {share:.0%}" for lane, share in c.utilisation.items() if share)
        spread = f"{c.seconds:.3f} ({min(c.measured):.3f} to {max(c.measured):.3f})"
        shares = f"{c.simulated / c.seconds:.2f}, {c.bound / c.seconds:.2f}"
        say(f"{c.schedule.name:26}  {c.bound:.3f}  {c.simulated:9.3f}  {spread:22}  {shares:>27}  {lanes}")
    for what, seen in ratios.items():
        say(f"{what}: {seen['median']:.2f} of the medians ({seen['min']:.2f} to {seen['max']:.2f})")


def _row(contender: Contender) -> dict[str, Any]:
    return {
        "schedule": contender.schedule.name,
        "bound": contender.bound,
        "simulated": contender.simulated,
        "measured": contender.measured,
        "utilisation": contender.utilisation,
        "dropped": contender.dropped,
    }
