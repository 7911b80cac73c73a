"""Measures a model's operations on this computer, one at a time: what `simulate` needs to predict `run` (law 10)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.catalogue import cache_path
from workbench.cost import Rows, measured_seconds
from workbench.engine.beside import BESIDE, Beside, beside
from workbench.engine.card import card_rates
from workbench.engine.control import Control
from workbench.engine.engine import Engine
from workbench.engine.forward import Forward
from workbench.engine.lanes import Executor, Job, Transfer
from workbench.engine.op_times import Seen, typical
from workbench.engine.ops import Part
from workbench.engine.process import occupy
from workbench.engine.runnable import check_runnable
from workbench.engine.sampler import choose_all
from workbench.engine.seats import seats
from workbench.hardware import Machine, usable_cores
from workbench.kept import kept
from workbench.memory import Memory
from workbench.models import ModelConfig
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.plan import Plan, Task
from workbench.prepared import Prepared
from workbench.profile import Cores, OpTime, Pace, Profile
from workbench.quiet import listening
from workbench.result import Source
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential
from workbench.segments import EMBED, HEAD, WEIGHTS, Kind, Node
from workbench.serving import prepare, serve
from workbench.stages import decode_attention, moe, out_proj, prefill_attention, qkv, weights
from workbench.task_cost import profile_shape, rows_of
from workbench.workload import Request, Sampling, Workload


class Shape(NamedTuple):
    """What passes through the layers: prompts of one length, or decodes that read so many KV entries each."""

    prompts: int = 0
    length: int = 0
    decodes: int = 0
    held: int = 0

    @property
    def rows(self) -> Rows:
        """What it puts on the stages."""
        pairs = self.prompts * self.length * (self.length + 1) / 2
        return Rows(
            self.prompts * self.length, self.decodes, pairs, self.decodes * self.held, self.prompts + self.decodes
        )


PROMPTS = ((1, 1), (1, 4), (1, 16), (4, 8), (1, 64), (8, 8), (2, 64), (16, 16), (1, 256), (2, 256), (64, 16), (8, 128))
DECODES = ((1, 256), (4, 64), (16, 16), (16, 512), (32, 128), (64, 16), (64, 256), (128, 128), (256, 64), (256, 192))
SHAPES = (*(Shape(*prompts) for prompts in PROMPTS), *(Shape(0, 0, *decodes) for decodes in DECODES))
LAYERS = 4
"""Layers of a pass; the others of the model are left out."""
ROUNDS = 4
"""Undisturbed passes of each shape. They are far apart, because the computer's speed drifts within seconds."""
SECONDS = 75.0
"""Another round is begun if it will probably end within this time."""
STREAM = 2e9
"""Link rate [B/s] at which weights arrive before a layer."""
_BLOCK = 16


def calibrate(
    model: ModelConfig, *, weights: str | None = None, kv: str | None = None, refresh: bool = False
) -> Machine:
    """This computer with the times of a model's operations: what `simulate` needs to predict `run` closely.

    Batches of several sizes pass through some layers whose weights have just arrived over the link. Every operation is
    timed alone in its place there, with each number of threads that its lane may have; so are transfers, the data mover
    beside computation, Python between two iterations and, for the record, what a GPU and its link can do. What others
    disturbed is made again while there is time. No workload is served and no throughput seen. The record is dated and
    kept for the next call; `save` it to load it elsewhere with `Machine.load`.

    Parameters
    ----------
    model : ModelConfig
        From `wb.checkpoint`.
    weights, kv : str, optional
        Precision of weights and KV cache; the model's own if not given.
    refresh : bool
        Measure again.

    Raises
    ------
    EngineError
        If the model has no weights here.
    """
    machine = Machine.local(refresh=refresh)
    scenario = _scenario(machine, model, weights, kv)
    shape = profile_shape(model, scenario.precision)

    def measure() -> Machine:
        prepared = prepare(scenario, Sequential())
        check_runnable(prepared)
        with occupy(f"a calibration for {model.name!r}") as control:
            bench = _Bench(prepared, control)
            try:
                return bench.measure(machine, shape)
            finally:
                bench.close()

    path, what = _record_path(machine, shape), f"the calibration for {model.name!r}"
    return kept(path, measure, load=Machine.load, save=Machine.save, what=what, refresh=refresh)


def _record_path(machine: Machine, shape: str) -> Path:
    """Its name changes with the computer's own record, which changes with versions, and with the model's shape."""
    key = f"calibration 7|{machine.host}|{machine.measured}|{shape}"
    return cache_path(f"calibration-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")


def _scenario(machine: Machine, model: ModelConfig, weights_in: str | None, kv_in: str | None) -> Scenario:
    """Weights and activations cross the link, decode attention is the CPU's; room for the largest shape."""
    tokens = max(int(shape.rows.prefill + shape.decodes * (shape.held + _BLOCK)) for shape in SHAPES)
    attention = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load
    return Scenario(
        fetch(weights) | attention >> gpu(out_proj, moe),
        model=model,
        machine=machine.limit(link=min(STREAM, machine.link.h2d, machine.link.d2h)),
        memory=Memory(tokens * model.kv_bytes_per_token(kv_in or model.dtype), _BLOCK, weights=weights_in, kv=kv_in),
        workload=Workload.of([Request((1,) * 8, 8, Sampling())] * 64),
        scheduler=ResourceAware(),
    )


class _Call(NamedTuple):
    """An operation as it was timed in a pass."""

    op: str
    threads: int
    rows: Rows
    seconds: float


@dataclass
class _Passes:
    """Passes of one shape on one number of threads: those that counted, and those that others disturbed."""

    quiet: list[list[_Call]] = field(default_factory=list)
    disturbed: list[list[_Call]] = field(default_factory=list)

    @property
    def kept(self) -> list[list[_Call]]:
        """What times are taken from."""
        return self.quiet or self.disturbed


class _Hollow(Engine):
    """An engine whose tasks do nothing: what remains is the lanes' hand-over and Python between plans."""

    def _action(self, task: Task, batches: tuple[Batch, ...], parts: list[Part]) -> Callable[[], Transfer | None]:
        return lambda: None

    def _check_bytes(self, jobs: list[Job], plan: Plan) -> None:
        pass


class _Bench:
    """Times actions as tasks of one-task plans, on the engine's own lanes."""

    def __init__(self, prepared: Prepared, control: Control) -> None:
        scenario = prepared.scenario
        self._prepared, self._model = prepared, scenario.model
        self._cores = scenario.machine.cores or Cores.of(usable_cores())
        self._stages = {stage.op.name: stage for stage in scenario.pipeline.stages}
        self._graph, self._rate = prepared.lowering.graph, scenario.machine.link.h2d
        self._random = np.random.default_rng(0)
        count = self._model.num_hidden_layers
        self._layers = sorted({round(layer) for layer in np.linspace(0, count - 1, min(count, LAYERS))})
        self._calls: list[_Call] = []
        self._moves: list[float] = []
        self._fetches: list[float] = []
        self._forward = Forward(prepared, control)
        self._forward.warm_up()
        self._executor = Executor(self._rate, self._rate, throttled=True, packet_seconds=1e-3, control=control)

    def close(self) -> None:
        """End every thread."""
        self._executor.close()
        self._forward.close()

    def measure(self, machine: Machine, shape: str) -> Machine:
        """The machine with a profile of this model."""
        cores = self._cores
        threads = sorted({cores.gpu, cores.cpu, cores.alone})
        passes = {(count, shape): _Passes() for count in threads for shape in SHAPES}
        with tqdm(total=ROUNDS * len(passes) + 2, desc="calibrate", delay=1) as bar:
            self._fill(passes, bar.update)
            self._seat(cores.gpu)
            cores, rates = self._streaming()
            bar.update()
            hand_over, iteration, request = self._between()
            bar.update()
        calls = [calls for each in passes.values() for calls in each.kept]
        ops = _times(calls)
        overheads = (iteration, request, hand_over, typical(self._moves), typical(self._fetches))
        today = datetime.now(UTC).isoformat(timespec="seconds")
        profile = Profile(shape, ops, *overheads, _spread(calls, ops))
        return replace(machine, cores=cores, profiles=(profile,), rates=(*rates, *card_rates()), measured=today)

    def _fill(self, passes: Mapping[tuple[int, Shape], _Passes], counted: Callable[[], object]) -> None:
        """Rounds over what lacks undisturbed passes, until nothing does or the time is over."""
        missing, taken, until = list(passes), 0.0, time.perf_counter() + SECONDS
        while missing and (begin := time.perf_counter()) + taken < until:
            for count in sorted({count for count, _ in missing}):
                self._seat(count)
                shapes = [shape for threads, shape in missing if threads == count]
                for number in self._random.permutation(len(shapes)).tolist():
                    seen = passes[count, shapes[number]]
                    with listening() as noise:
                        calls = self._pass(shapes[number], count)
                    (seen.quiet if noise.quiet else seen.disturbed).append(calls)
                    if noise.quiet:
                        counted()
            missing = [what for what, seen in passes.items() if len(seen.quiet) < ROUNDS]
            taken = time.perf_counter() - begin

    def _seat(self, threads: int) -> None:
        pace = Pace(threads, threads, "cpu", 0.0, 0.0)
        self._executor.seat(seats(pace, self._cores))
        self._one_thread = threads == 1

    def _job(self, node: Node, action: Callable[[], object]) -> Job:
        return self._executor.run([Task(node, 0, 0)], [action])[0]

    def _seconds(self, job: Job) -> float:
        """A thread's own seconds where there is one, since nobody can steal those."""
        return job.cpu if self._one_thread else job.end - job.start

    # ----------------------------------------------------------------------------------------------- operations

    def _pass(self, shape: Shape, threads: int) -> list[_Call]:
        """Embedding, layers and head for one batch; every stage a task of its own."""
        forward, part, rows = self._forward, self._part(shape), shape.rows
        forward.clear()
        self._calls = []
        ids = self._random.integers(0, self._model.vocab_size, part.rows).tolist()
        self._time("embed", threads, EMBED, Rows(prefill=rows.tokens), lambda: forward.embed(0, ids))
        for layer in self._layers:
            self._fetch(layer)
            for node in self._graph.nodes:
                if node.kind is Kind.MOVE:
                    self._move(node, part)
                for stage in node.stages:
                    work = lambda stage=stage, layer=layer: forward.compute(stage, layer, 0, part)  # noqa: E731
                    self._time(stage.op.name, threads, node, rows_of(stage, rows), work)
        greedy, made = [Sampling()] * int(rows.emits), [0] * int(rows.emits)
        choose = lambda: choose_all(forward.logits(0, part), greedy, made)  # noqa: E731
        self._job(HEAD, choose)  # logits are large: iterations of one size find their memory mapped
        self._time("head", threads, HEAD, Rows(prefill=rows.emits), choose)
        return self._calls

    def _time(self, op: str, threads: int, node: Node, rows: Rows, work: Callable[[], object]) -> None:
        self._calls.append(_Call(op, threads, rows, self._seconds(self._job(node, work))))

    def _fetch(self, layer: int) -> None:
        pieces = tuple((layer, node) for node in self._graph.streamed)
        task = Task(WEIGHTS, layer, None, pieces=pieces, bulk=True)
        job = self._executor.run([task], [lambda: self._forward.transfer_weights(pieces)])[0]
        self._fetches.append(job.end - job.start - job.bytes / self._rate)

    def _move(self, node: Node, part: Part) -> None:
        job = self._job(node, lambda: self._forward.move(node, 0, part))
        if job.bytes:
            self._moves.append(job.end - job.start - job.bytes / self._rate)

    def _part(self, shape: Shape) -> Part:
        """Prompts in slots of their own; decodes that read blocks in random order."""
        if shape.prompts:
            positions = np.tile(np.arange(shape.length), shape.prompts)
            lengths, nobody = [shape.length] * shape.prompts, np.zeros((0, 1), np.int32)
            places = torch.from_numpy(positions)
            return Part(lengths, places, np.arange(len(positions)), nobody, np.zeros(0, np.int64))
        width = -(-shape.held // _BLOCK)
        table = self._random.permutation(shape.decodes * width).reshape(-1, width).astype(np.int32)
        held = np.full(shape.decodes, shape.held)
        slots = table[:, -1].astype(np.int64) * _BLOCK + (held - 1) % _BLOCK
        return Part([], torch.from_numpy(held - 1), slots, table, held)

    # ----------------------------------------------------------------------------------------------- the lanes

    def _streaming(self) -> tuple[Cores, tuple[tuple[str, float], ...]]:
        """Core time of the mover, and how much slower experts and attention are while it streams beside them."""
        prompts, decodes, cores = Shape(4, 64), Shape(0, 0, 64, 256), self._cores
        seen = {}
        for threads in {cores.gpu, cores.alone}:
            self._seat(threads)
            seen[threads] = [
                self._beside(op, shape) for op, shape in (("experts", prompts), ("decode_attention", decodes))
            ]
        (gpu, cpu), teams = seen[cores.gpu], seen[cores.alone]
        drags = [max(0.0, found.beside / found.alone - 1) / BESIDE for found in (gpu, cpu, *teams)]
        kv = decodes.rows.context * self._model.kv_bytes_per_token(self._prepared.scenario.precision.kv)
        kv /= self._model.num_hidden_layers
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
        shared = replace(cores, mover=gpu.mover, gpu_drag=drags[0], cpu_drag=drags[1])
        return replace(shared, gpu_team_drag=drags[2], cpu_team_drag=drags[3]), rates

    def _beside(self, op: str, shape: Shape) -> Beside:
        self._pass(shape, self._cores.gpu if self._one_thread else self._cores.alone)
        part, stage, layer = self._part(shape), self._stages[op], self._layers[-1]
        action = lambda: self._forward.compute(stage, layer, 0, part)  # noqa: E731
        lanes = {name: lane.seat for name, lane in self._executor.lanes.items()}
        return beside(op, action, lanes, self._seconds)

    def _sequential_read(self) -> float:
        numbers = torch.ones(1 << 26)
        read = lambda: torch.dot(numbers, numbers)  # noqa: E731
        return numbers.nbytes / median(self._seconds(self._job(EMBED, read)) for _ in range(5))

    def _between(self) -> tuple[float, float, float]:
        """Seconds per hand-over, and between two plans: fixed and per request; from plans whose tasks do nothing."""
        few, many = self._hollow(4), self._hollow(64)
        request = max(0.0, (many[1] - few[1]) / 60)
        return few[0], max(0.0, few[1] - 4 * request), request

    def _hollow(self, requests: int) -> tuple[float, float]:
        """Seconds per task of a chain, and between two plans."""
        workload = Workload.of(self._prepared.scenario.workload.requests[:requests])
        prepared = prepare(self._prepared.scenario.on(workload=workload), Sequential())
        engine = _Hollow(prepared)
        try:
            result = serve(prepared, engine, Source.MEASURED)
        finally:
            engine.close()
        tasks, gaps = [], []
        for number, seconds in enumerate(result.steps.seconds):
            window = engine.timeline.window(number, number + 1)
            tasks.append(window.seconds / sum(1 for _ in window))
            gaps.append(seconds - window.seconds)
        return median(tasks), median(gaps)


def _times(passes: Sequence[Sequence[_Call]]) -> tuple[OpTime, ...]:
    """The times of every operation."""
    found: dict[tuple[str, int], Seen] = {}
    for op, threads, rows, seconds in (call for calls in passes for call in calls):
        found.setdefault((op, threads), Seen(op, threads)).note(rows, seconds)
    return tuple(seen.time() for seen in found.values())


def _spread(passes: Sequence[Sequence[_Call]], ops: Sequence[OpTime]) -> tuple[float, float]:
    """How far whole passes were from what the operations' times say: the computer's drift, and the fit's errors."""
    times = {(time.op, time.threads): time for time in ops}
    ratios = []
    for calls in passes:
        said = sum(measured_seconds(times[op, threads], rows) for op, threads, rows, _ in calls)
        ratios.append(sum(call.seconds for call in calls) / said)
    low, high = np.percentile(ratios, (5, 95))
    return min(1.0, float(low)), max(1.0, float(high))
