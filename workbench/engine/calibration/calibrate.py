"""Measures a model's operations on this computer, in their places: what `simulate` needs to predict `run` (law 10)."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.core.catalogue import cache_path
from workbench.core.errors import CapacityError
from workbench.core.kept import kept
from workbench.core.quiet import OTHERS, Noise, listening
from workbench.core.result import Source
from workbench.core.units import format_bytes
from workbench.engine.calibration.beside import BESIDE, Beside, beside
from workbench.engine.calibration.op_times import contention, op_times, per_unit, rest, spread, typical
from workbench.engine.calibration.timed import Pass, Shape, TimedEngine
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.opening import open_driver
from workbench.engine.engine import Engine
from workbench.engine.lanes.affinity import affinities
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.lane import Action, Job
from workbench.engine.lanes.process import occupy
from workbench.engine.model.few_rows import MOST
from workbench.engine.model.ops import RowLayout
from workbench.engine.runnable import card_takes, check_runnable
from workbench.hardware import Machine, usable_cores
from workbench.hardware.machine import Link
from workbench.hardware.profile import Contention, Cores, InOneCall, Losses, OpTime, Pace, Profile
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.scenario import Memory, Scenario
from workbench.scheduler.batch import Batch
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import CGOPipe, FastDecode, FlexGenS3, Schedule, Sequential, VSLPipe
from workbench.schedules.base import Step
from workbench.schedules.plan import Plan, Task
from workbench.serving import prepare, serve
from workbench.serving.capacity import ledger
from workbench.serving.prepared import Prepared, price
from workbench.serving.task_cost import profile_shape
from workbench.stages import (
    attention,
    combine,
    decode_attention,
    experts,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    weights,
)
from workbench.workload import Request, Sampling, Workload

# Odd numbers, because prompts and batches have them: attention of prompts whose lengths are powers of two took 0.6 to
# 0.8 of what it takes in runs (Zen 4). Up to `MOST` rows have kernels of their own, so times jump behind them.
PROMPTS = ((1, 1), (1, 5), (1, 17), (4, 9), (1, 61), (7, 11), (2, 67), (15, 17), (1, 250), (2, 253), (61, 17), (8, 131))
DECODES = (
    *((1, 251), (MOST, 67), (MOST + 1, 131), (15, 19), (15, 507), (21, 2039), (31, 131)),
    *((61, 17), (63, 253), (125, 131), (251, 67), (251, 190)),
)
SHAPES = (*(Shape(*prompts) for prompts in PROMPTS), *(Shape(0, 0, *decodes) for decodes in DECODES))
FEW = 40
"""With fewer rows, a further row may choose experts that no other row has, so times between points are not linear."""
TOGETHER = (
    Shape(0, 0, 8, 64),
    Shape(0, 0, 32, 128),
    Shape(0, 0, 128, 128),
    Shape(8, 32, 32, 64),
    Shape(0, 0, 128, 256),
)
"""What passes under a schedule in which both compute lanes work at the same time."""
WARM = (Shape(8, 8), Shape(0, 0, 64, 256), Shape(8, 128))
"""What passes before anything is timed."""
LAYERS = 4
"""Layers of a pass at least; with many small ones more, as many as no cache holds; the others are left out."""
BEYOND_CACHE = 96e6
"""Bytes of weights that no cache holds."""
SECONDS = 50.0
"""Rounds over all passes go on for so long: the computer's speed drifts by a tenth within seconds (Zen 4), so a time is
the mean of repetitions far apart."""
LEAST_ROUNDS = 3
"""Rounds that are made however long they take. The first call of a shape touches new memory: with one round, passes of
a 3 GB model were simulated 3 to 13 % too slow, with three rounds 0 to 6 % (`bench overlap`, two cores of a Xeon with
AMX)."""
LAYER_SECONDS = 5e-3
"""A layer's weights take so long to arrive where lanes shall rest, or both work meanwhile."""
LINKS = (0.2e9, 4e9)
"""Slowest and fastest link [B/s] with which they do; where nothing shall rest, it is the fastest."""
LISTENED = 0.5
"""Seconds for which a computer must be quiet before what was measured under load is measured again."""
_BLOCK = 16

_APART = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
_STREAMED = fetch(weights) | _APART
_LATENT = fetch(experts.weights) | _APART
"""Prompts of latent attention want the weights of `qkv` and of `out_proj` at once."""
_RESIDENT = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
_RESIDENT_PIPELINES = {
    "resident": _RESIDENT,
    "halves": _APART,
    "crossed": _RESIDENT,
    "whole": gpu(qkv, attention, out_proj, moe),
}
_ALONE = ("streamed", "resident")
_TOGETHER = ("phases", "pages", "parts")
_KINDS: dict[str, Schedule] = {
    "streamed": Sequential(),
    "waiting": Sequential(),
    "resident": Sequential(),
    "phases": VSLPipe(),
    "pages": CGOPipe(),
    "parts": FlexGenS3(),
    "halves": FastDecode(),
    "crossed": FastDecode(),
}
"""Kinds of plans: lanes that work in turn without a rest, that rest while weights arrive, and that work at once.

Nothing is streamed in "resident" plans, whose lanes work in turn, and in "halves" and "crossed", whose lanes work at
once: the cpu lane at attention or at experts.
"""
_AT_ONCE = ("halves", "crossed")
_WHOLE = "whole"
"""Kind of plans whose gpu lane computes whole layers."""
_FEW_DECODES = (Shape(0, 0, 1, 67), Shape(0, 0, MOST, 67))
"""Decodes that pass layers in one call and stage by stage."""
_TURNS = 12
"""Times that they do so."""


def calibrate(
    model: ModelConfig,
    *,
    weights: str | None = None,
    kv: str | None = None,
    device: str | None = None,
    refresh: bool = False,
    watch: Callable[[float], object] = lambda _: None,
) -> Machine:
    """This computer with the times of a model's operations: what `simulate` needs to predict `run` closely.

    Plans are executed as a run executes them, with batches of several sizes: one task at a time with weights that have
    just arrived over the link, or that stay where they are; lanes that wait for weights; and both compute lanes at
    once, beside the link and without it. Every operation is timed in its place there, with each number of threads that
    its lane may have, or on the card where the gpu lane is computed there; so are transfers, hand-overs, the data mover
    beside computation and Python between two iterations. What others disturbed counts only where nothing else is. No
    workload is served and no throughput seen. The record is dated and kept for the next call; `save` it to load it
    elsewhere with `Machine.load`. One that was made under load says so, and is made again by the next call on a quiet
    computer.

    Parameters
    ----------
    model : ModelConfig
        From `wb.checkpoint`.
    weights, kv : str, optional
        Precision of weights and KV cache; the model's own if not given.
    device : "cpu" or "cuda", optional
        See `Machine.local`; by default a model that a card does not compute is for the CPU.
    refresh : bool
        Measure again.
    watch : callable (float) -> None
        Called before each plan with the share of the timed ones that is done; what it raises ends the calibration.

    Raises
    ------
    EngineError
        If the model has no weights here, or a card cannot compute it.
    ScenarioError
        As `Machine.local` does.
    """
    machine = Machine.local(device=device, refresh=refresh)
    scenario = _scenario(machine, model, weights, kv)
    if device is None and machine.has_card and not card_takes(prepare(scenario, Sequential())):
        return calibrate(model, weights=weights, kv=kv, device="cpu", refresh=refresh, watch=watch)
    shape = profile_shape(model, scenario.precision)

    made = list[Machine]()

    def measure() -> Machine:
        check_runnable(prepare(scenario, Sequential()), on_card=machine.has_card)
        with occupy(f"a calibration for {model.name!r}") as control:
            bench = _Bench(scenario, machine, control, watch)
            try:
                found = bench.measure(shape)
            finally:
                bench.close()
        if found.profiles[0].others > OTHERS:
            told = Noise(found.profiles[0].others)
            print(f"calibrated while {told}; the next call on a quiet computer measures again.", file=sys.stderr)
        made.append(found)
        return found

    path = _record_path(machine, shape)
    what = f"the calibration for {model.name!r}"
    known = kept(path, measure, load=Machine.load, save=Machine.save, what=what, refresh=refresh)
    if not made and known.profiles[0].others > OTHERS and _quiet():
        return kept(path, measure, load=Machine.load, save=Machine.save, what=what, refresh=True)
    return known


def _quiet() -> bool:
    """True if other processes leave this computer's cores alone now."""
    with listening() as noise:
        time.sleep(LISTENED)
    return noise.quiet


def _record_path(machine: Machine, shape: str) -> Path:
    """Its name changes with the computer's own record, which changes with versions, and with the model's shape."""
    key = f"calibration 23|{machine.host}|{machine.measured}|{shape}"
    return cache_path(f"calibration-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")


def _scenario(machine: Machine, model: ModelConfig, weights_in: str | None, kv_in: str | None) -> Scenario:
    """Some layers of the model, which cross the link one after the other; room for the largest shape."""
    shapes = (*SHAPES, *TOGETHER, *WARM)
    tokens = max(shape.tokens + shape.requests * _BLOCK for shape in shapes)
    longest = max(shape.length for shape in shapes)
    random = np.random.default_rng(0)
    prompts = random.integers(0, model.vocab_size, (max(shape.requests for shape in shapes), longest)).tolist()
    whole = Scenario(
        _pipeline("streamed", model),
        model=model,
        machine=machine,
        memory=Memory(float(tokens * model.kv_bytes_per_token(kv_in or model.dtype)), _BLOCK, weights_in, kv_in),
        workload=Workload.of([Request(tuple(prompt), 8, Sampling()) for prompt in prompts]),
        scheduler=ResourceAware(),
    )
    size = price(whole, Sequential()).cost.weights_per_layer
    layers = min(model.num_hidden_layers, max(LAYERS, math.ceil(BEYOND_CACHE / size)))
    positions = max(model.max_position_embeddings, *(shape.held for shape in shapes))  # small models have fewer
    few = replace(model.first(layers), max_position_embeddings=positions)
    kept = float(tokens * few.kv_bytes_per_token(kv_in or model.dtype))
    if not machine.has_card:  # whose link is as fast as it is: nothing else uses it
        rate = min(max(size / LAYER_SECONDS, LINKS[0]), LINKS[1], machine.link.h2d, machine.link.d2h)
        machine = machine.limit(link=rate)
    return whole.on(model=few, machine=machine, memory=replace(whole.memory, kv_capacity=kept))


def _pipeline(kind: str, model: ModelConfig) -> Pipeline:
    """The pipeline of a kind of plans."""
    return _RESIDENT_PIPELINES.get(kind, _LATENT if model.kv_lora_rank else _STREAMED)


def _resident_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes of passes with resident weights: all shapes with few rows, and every second one."""
    return [shape for number, shape in enumerate(shapes) if shape.rows.tokens <= FEW or number % 2]


def _follows_its_like(shape: Shape) -> bool:
    """True for few decodes: a run has many such iterations in a row, and code and data are in the caches then."""
    return not shape.prompts and shape.rows.tokens <= FEW


@dataclass
class _Passes:
    """Passes of one shape on one number of threads: those that counted, and those that others disturbed."""

    quiet: list[Pass] = field(default_factory=list)
    disturbed: list[Pass] = field(default_factory=list)

    @property
    def kept(self) -> list[Pass]:
        """The passes that a calibration is read from."""
        return self.quiet or self.disturbed


_What = tuple[str, int, Shape]
"""Kind of plan, threads and shape."""


def _kept(passes: Mapping[_What, _Passes], kind: str, threads: int = 0) -> list[Pass]:
    """The passes of a kind that a calibration is read from: all, or those on so many threads."""
    found = list[Pass]()
    for (name, count, _), seen in passes.items():
        if name == kind and count == (threads or count):
            found += seen.kept
    return found


class _Hollow(Engine):
    """An engine whose tasks do nothing, and that notes how long each plan was in its hands."""

    def __init__(self, prepared: Prepared, driver: Driver) -> None:
        super().__init__(prepared, driver=driver)
        self.executing: list[float] = []

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        begin = self.watch.now
        busy = super().execute(plan, number, step)
        self.executing.append(self.watch.now - begin)
        return busy

    def _action(self, task: Task, parts: tuple[Batch, ...], layouts: list[RowLayout]) -> Action | None:
        return lambda: None

    def _check_bytes(self, jobs: list[Job], plan: Plan) -> None:
        pass


def _kinds(machine: Machine) -> dict[str, Schedule]:
    """Kinds of plans that are timed: on a card none with resident experts on the GPU, which no other plan times."""
    return {kind: schedule for kind, schedule in _KINDS.items() if kind not in _AT_ONCE or not machine.has_card}


def _check_card_memory(plans: Iterable[Prepared], machine: Machine) -> None:
    """Refuse a model whose plans, which are all on the card at once, need more memory than it has."""
    needed = sum(ledger(each).gpu.total for each in plans)
    if machine.has_card and needed > machine.gpu.memory:
        raise CapacityError(
            f"calibrating on {machine.gpu.name} takes {format_bytes(needed)} of its {format_bytes(machine.gpu.memory)} "
            "of memory; simulate with the rates of Machine.local(device='cuda')."
        )


class _Bench:
    """Times operations in plans that engines execute."""

    def __init__(
        self, scenario: Scenario, machine: Machine, control: Control, watch: Callable[[float], object]
    ) -> None:
        self._machine = machine
        self._control = control
        self._watch = watch
        self._share = 0.0  # of the timed passes, that is done
        self._scenario = scenario
        self._model = scenario.model
        self._cores = scenario.machine.cores or Cores.of(usable_cores())
        self._random = np.random.default_rng(0)
        self._noise: list[Noise] = []
        self._engines: dict[str, TimedEngine] = {}
        prepared = {kind: prepare(here, schedule) for kind, here, schedule in self._plans()}
        if not machine.has_card:  # beside one, whole layers of the cpu lane are not timed
            at_once = self._whole_plan()
            prepared |= {} if at_once is None else {_WHOLE: at_once}
        _check_card_memory(prepared.values(), machine)
        try:
            for kind, each in prepared.items():
                self._engines[kind] = TimedEngine(each, self._driver())
        except BaseException:
            self.close()
            raise

    def _plans(self) -> Iterator[tuple[str, Scenario, Schedule]]:
        """The scenario and the schedule of each kind of plans."""
        machine = self._machine
        fastest = min(LINKS[1], machine.link.h2d, machine.link.d2h)
        for kind, schedule in _kinds(machine).items():
            here = self._scenario.on(pipeline=_pipeline(kind, self._model))
            if kind == "streamed" and not machine.has_card:
                here = here.on(machine=machine.limit(link=fastest))
            yield kind, here, schedule

    def _whole_plan(self) -> Prepared | None:
        """Plans of whole layers; None for a model that has none."""
        prepared = prepare(self._scenario.on(pipeline=_pipeline(_WHOLE, self._model)), Sequential())
        stack = prepared.lowering.stack
        return prepared if stack.is_whole(stack.stages(0), 0) else None

    def _driver(self) -> Driver:
        """The device of an engine's gpu lane."""
        return open_driver(self._machine, on_card=self._machine.has_card)

    def close(self) -> None:
        """End every thread."""
        for engine in self._engines.values():
            engine.close()

    def measure(self, shape: str) -> Machine:
        """The machine with a profile of this model."""
        cores = self._cores
        threads = sorted({cores.gpu or cores.cpu, cores.cpu, cores.alone})
        wanted: list[_What] = [("streamed", count, each) for count in threads for each in SHAPES]
        wanted += [("resident", count, each) for count in threads for each in _resident_shapes(SHAPES)]
        both = [kind for kind in ("waiting", *_TOGETHER, *_AT_ONCE) if kind in self._engines]
        wanted += [(kind, threads[0], each) for kind in both for each in TOGETHER]
        passes = {what: _Passes() for what in wanted}
        self._fill(passes)
        cores, rates = self._beside_card() if self._machine.has_card else self._streaming()
        outside = self._outside()
        alone = [seen.kept for (kind, *_), seen in passes.items() if kind in _ALONE]
        of_kind = {kind: _kept(passes, kind) for kind in _KINDS}
        waiting = of_kind["waiting"]
        streamed = _kept(passes, "streamed", threads[0])
        resident = _kept(passes, "resident", threads[0])
        ops = op_times([call for kept in alone for one in kept for call in one.calls])
        whole = [one for kind in ("waiting", "pages", "parts") for one in of_kind[kind]]  # no transfer outlasts them
        iteration, request, task = self._between(outside, whole)
        together = [one for kind in _TOGETHER for one in of_kind[kind]]
        losses = self._losses(streamed, waiting, contention(together, ops, cores, self._link.h2d))
        profile = Profile(
            shape,
            ops,
            iteration=iteration,
            request=request,
            task=task,
            dispatch=losses.dispatch,
            move=losses.move,
            fetch=self._fetch(waiting),
            rest=rest(waiting, ops) / self._model.num_hidden_layers,
            contention=losses.contention,
            resident=self._resident_losses(resident, of_kind, ops),
            spread=spread(alone, ops),
            in_one_call=self._in_one_call(),
            others=self._others(passes),
        )
        today = datetime.now(UTC).isoformat(timespec="seconds")
        rates = (*self._machine.rates, *rates)
        return replace(self._machine, cores=cores, profiles=(profile,), rates=rates, measured=today)

    def _fill(self, passes: dict[_What, _Passes]) -> None:
        """Rounds over all passes, each in an order of its own, for as long as another will probably end in time."""
        for kind, count in dict.fromkeys((kind, count) for kind, count, _ in passes):
            for shape in WARM:
                self._pass(kind, count, shape)
        every = list(passes)
        taken = 0.0
        rounds = 0
        begun = time.perf_counter()
        until = begun + SECONDS
        with tqdm(desc="calibrate", delay=1) as bar:
            while rounds < LEAST_ROUNDS or time.perf_counter() + taken <= until:
                begin = time.perf_counter()
                bar.total = len(every) * max(LEAST_ROUNDS, rounds + 1)
                for place, number in enumerate(self._random.permutation(len(every)).tolist(), 1):
                    what = every[number]
                    if _follows_its_like(what[-1]):
                        self._pass(*what)
                    with listening() as noise:
                        seen = self._pass(*what)
                    self._noise.append(noise)
                    (passes[what].quiet if noise.quiet else passes[what].disturbed).append(seen)
                    bar.update()
                    now = time.perf_counter()
                    in_time = (now - begun) / (max(now, until) - begun)
                    self._share = min(in_time, (rounds + place / len(every)) / LEAST_ROUNDS)
                taken = time.perf_counter() - begin
                rounds += 1

    def _pace(self, threads: int) -> Pace:
        """Each compute lane has so many threads; the movers have the spare cores, or else those of the cpu lane.

        A card leaves the gpu lane one thread, which issues to it.
        """
        if self._machine.has_card:
            return Pace(1, threads, "" if self._cores.spare else "gpu", 0.0, 0.0)
        return Pace(threads, threads, "" if self._cores.spare else "cpu", 0.0, 0.0)

    def _pass(self, kind: str, threads: int, shape: Shape) -> Pass:
        self._control.check()
        self._watch(self._share)
        engine = self._engines[kind]
        engine.pace = self._pace(threads)
        return engine.make(shape)

    def _others(self, passes: dict[_What, _Passes]) -> float:
        """Share of the cores that others took, if they disturbed what the times had to be taken from."""
        if all(seen.quiet for seen in passes.values()):
            return 0.0
        return float(np.mean([noise.others for noise in self._noise]))

    @property
    def _link(self) -> Link:
        """The link of all plans but the streamed ones."""
        return self._scenario.machine.link

    def _losses(self, passes: Sequence[Pass], moving: Sequence[Pass], slower: Contention) -> Losses:
        """Losses of plans in hand-overs and in transfers of activations, as in passes whose tasks follow one another.

        A transfer's time beyond its bytes is that of the passes in `moving`.
        """
        moves = [beyond for one in moving for beyond in self._beyond_bytes(one, weights=False)]
        linked = typical([wait for one in passes for wait in one.waits(("h2d", "d2h"))])
        handed = typical([wait for one in passes for wait in one.waits(("gpu", "cpu"))])
        beyond = median(one.beyond_operations for one in passes)
        return Losses(max(0.0, handed + beyond), max(0.0, typical(moves) + linked), slower)

    def _resident_losses(
        self, in_turn: Sequence[Pass], of_kind: Mapping[str, Sequence[Pass]], ops: Sequence[OpTime]
    ) -> Losses:
        """Losses of plans that stream nothing; a card has no times of lanes that work at once in such plans."""
        slower = {kind: contention(of_kind[kind], ops, self._cores, 0.0) for kind in _AT_ONCE}
        losses = self._losses(in_turn, in_turn, slower["halves"])
        return replace(losses, experts=slower["crossed"] if of_kind["crossed"] else None)

    def _in_one_call(self) -> InOneCall | None:
        """The time that layers in one call save few decodes; None where no layer of the model is computed so.

        It is less than times drift by from round to round, so it comes from passes with and without them by turns.
        """
        engine = self._engines.get(_WHOLE)
        calls = [] if engine is None else engine.calls_of_layers()
        if engine is None or not calls:
            return None
        engine.pace = self._pace(self._cores.alone)
        quiet = list[float]()
        every = list[float]()
        for turn in range(_TURNS + 1):
            for shape in _FEW_DECODES:
                with listening() as noise:
                    saved = self._saved(engine, shape)
                if turn:  # the first one touches new memory
                    every.append(saved)
                    quiet += [saved] if noise.quiet else []
        each = median(quiet or every) / self._model.num_hidden_layers
        return InOneCall(max(0.0, each), MOST, min(call.read_alone for call in calls))

    def _saved(self, engine: TimedEngine, shape: Shape) -> float:
        """Seconds by which a pass with layers in one call is faster than one without, hand-overs between tasks too."""
        self._control.check()
        self._watch(1.0)
        seconds = list[float]()
        for in_one_call in (False, True):
            engine.in_one_call = in_one_call
            engine.make(shape)
            seen = engine.make(shape)
            seconds.append(seen.seconds - sum(call.wall for call in seen.calls if call.op in ("embed", "head")))
        return seconds[0] - seconds[1]

    def _fetch(self, passes: Sequence[Pass]) -> float:
        """Seconds that a transfer of weights takes beyond its bytes."""
        return max(0.0, typical([beyond for one in passes for beyond in self._beyond_bytes(one, weights=True)]))

    def _beyond_bytes(self, one: Pass, *, weights: bool) -> list[float]:
        """Seconds beyond their bytes that transfers took, of weights or of activations."""
        rates = {"h2d": self._link.h2d, "d2h": self._link.d2h}
        return [move.seconds - move.size / rates[move.lane] for move in one.moves if move.weights == weights]

    # ----------------------------------------------------------------------------------------------- the lanes

    def _streaming(self) -> tuple[Cores, tuple[tuple[str, float], ...]]:
        """Core time of the mover, and how much slower experts and attention are while it streams beside them."""
        prompts = Shape(4, 64)
        decodes = Shape(0, 0, 64, 256)
        cores = self._cores
        gpu = self._beside("experts", prompts, cores.gpu)
        cpu = self._beside("decode_attention", decodes, cores.gpu)
        teams = [
            self._beside("experts", prompts, cores.alone),
            self._beside("decode_attention", decodes, cores.alone),
        ]
        slowdowns = [max(0.0, found.beside / found.alone - 1) / BESIDE for found in (gpu, cpu, *teams)]
        kv = self._kv_bytes(decodes)
        stream = f"beside a stream of {BESIDE / 1e9:g} GB/s"
        rates = (
            ("mover, core-seconds per GB", gpu.mover * 1e9),
            (f"experts {stream} on another core, relative time", gpu.beside / gpu.alone),
            (f"attention {stream} on another core, relative time", cpu.beside / cpu.alone),
            (f"experts on all cores {stream}, relative time", teams[0].beside / teams[0].alone),
            (f"attention on all cores {stream}, relative time", teams[1].beside / teams[1].alone),
            ("attention alone, KV GB/s", kv / cpu.alone / 1e9),
            (f"attention {stream}, KV GB/s", kv / cpu.beside / 1e9),
            ("DRAM sequential read on one core, GB/s", self._sequential_read() / 1e9),
        )
        shared = replace(cores, mover=gpu.mover, gpu_slowdown=slowdowns[0], cpu_slowdown=slowdowns[1])
        return replace(shared, gpu_team_slowdown=slowdowns[2], cpu_team_slowdown=slowdowns[3]), rates

    def _beside(self, op: str, shape: Shape, threads: int) -> Beside:
        """One operation of the last layer of a pass, again and again, alone and beside a stream."""
        engine = self._engines["streamed"]
        self._pass("streamed", threads, shape)
        stage = next(stage for stage in self._scenario.stages if stage.op.name == op)
        layout = engine.layout(shape)
        layer = self._model.num_hidden_layers - 1
        action = lambda: engine.forward.compute(stage, layer, 0, layout)  # noqa: E731
        own_seconds = lambda job: job.cpu if threads == 1 else job.end - job.start  # noqa: E731
        places = affinities(self._pace(threads), self._engines["streamed"].cores)
        driver = self._driver()
        if driver.on_host:
            return beside(op, action, places, own_seconds, driver=driver)
        try:
            places |= {"gpu": places["cpu"]}
            return beside(op, action, places, own_seconds, driver=driver, rate=self._machine.link.h2d)
        finally:
            driver.close()

    def _kv_bytes(self, shape: Shape) -> float:
        """Bytes of the KV cache that attention of a shape's decodes reads in one layer."""
        whole = shape.rows.context * self._model.kv_bytes_per_token(self._scenario.precision.kv)
        return whole / self._model.num_hidden_layers

    def _beside_card(self) -> tuple[Cores, tuple[tuple[str, float], ...]]:
        """The slowdown of attention on the CPU while weights go to the card."""
        decodes = Shape(0, 0, 64, 256)
        found = self._beside("decode_attention", decodes, self._cores.cpu)
        slower = found.beside / found.alone
        rate = self._machine.link.h2d
        rates = (
            ("attention beside copies to the card, relative time", slower),
            ("attention alone, KV GB/s", self._kv_bytes(decodes) / found.alone / 1e9),
        )
        return replace(self._cores, cpu_slowdown=max(0.0, slower - 1) / rate), rates

    def _sequential_read(self) -> float:
        numbers = torch.ones(1 << 26)
        seen = []
        for _ in range(5):
            begin = time.thread_time()
            torch.dot(numbers, numbers)
            seen.append(time.thread_time() - begin)
        return numbers.nbytes / median(seen)

    def _between(self, outside: tuple[float, float], passes: Sequence[Pass]) -> tuple[float, float, float]:
        """Seconds between two plans, fixed, per request and per task: in the engine, and outside of it."""
        features = [(1.0, one.requests, len(one.spans)) for one in passes]
        iteration, request, task = per_unit(features, [one.around for one in passes])
        return iteration + outside[0], request + outside[1], task

    def _outside(self) -> tuple[float, float]:
        """Seconds of an iteration outside of the engine, fixed and per request; of plans whose tasks do nothing."""
        few = self._hollow(4)
        many = self._hollow(64)
        request = max(0.0, (many - few) / 60)
        return max(0.0, few - 4 * request), request

    def _hollow(self, requests: int) -> float:
        workload = Workload.of([Request((1,) * 8, 8, Sampling())] * requests)
        prepared = prepare(self._scenario.on(workload=workload), Sequential())
        engine = _Hollow(prepared, self._driver())
        try:
            result = serve(prepared, engine, Source.MEASURED)
        finally:
            engine.close()
        return median(whole - inside for whole, inside in zip(result.steps.seconds, engine.executing, strict=True))
