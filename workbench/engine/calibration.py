"""Measures a model's operations on this computer, one at a time: what `simulate` needs to predict `run` (law 10)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.catalogue import cache_path
from workbench.cost import Rows, measured_seconds
from workbench.engine.engine import Engine
from workbench.engine.forward import Forward
from workbench.engine.lanes import Executor, Job, Transfer, seats
from workbench.engine.ops import Part
from workbench.engine.runnable import check_runnable
from workbench.engine.sampler import choose_all
from workbench.hardware import Machine, usable_cores
from workbench.memory import Memory
from workbench.models import ModelConfig
from workbench.pipeline import fetch, gpu
from workbench.plan import Plan, Task
from workbench.profile import Cores, OpTime, Pace, Profile
from workbench.result import Source
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential
from workbench.segments import EMBED, WEIGHTS
from workbench.serving import Prepared, prepare, serve
from workbench.stages import decode_attention, moe, out_proj, prefill_attention, qkv, weights
from workbench.task_cost import profile_shape
from workbench.workload import Request, Sampling, Workload

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
EMITS = (1, 4, 16, 64, 256)
PROMPTS = ((16, 8), (4, 8), (8, 32), (4, 128), (2, 256), (1, 512))  # (number, length)
DECODES = ((4, 16), (64, 16), (16, 256), (64, 128), (128, 64), (32, 512))  # (number, KV entries of each)
STREAM = 2e9  # bytes per second that stream beside an operation while its slow-down is measured
_BLOCK = 16


class Bar(Protocol):
    """What is told that a step is done."""

    def update(self) -> object:
        """One more."""


def calibrate(
    model: ModelConfig, *, weights: str | None = None, kv: str | None = None, refresh: bool = False
) -> Machine:
    """This computer with the times of a model's operations: what `simulate` needs to predict `run` closely.

    Every operation is timed alone and warm, on one layer's real weights and hidden states, at several numbers of rows
    and with the threads its lane may have; so are the data mover, alone and beside computation, and Python between two
    iterations. No workload is served and no throughput seen. The record is dated and kept for the next call; `save` it
    to load it elsewhere with `Machine.load`.

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
    path = _record_path(machine, shape)
    if refresh or not path.exists():
        prepared = prepare(scenario, Sequential())
        check_runnable(prepared)
        bench = _Bench(prepared)
        try:
            bench.measure(shape).save(path)
        finally:
            bench.close()
    return Machine.load(path)


def _record_path(machine: Machine, shape: str) -> Path:
    """Its name changes with the computer's own record, which changes with versions, and with the model's shape."""
    key = f"calibration 1|{machine.host}|{machine.measured}|{shape}"
    return cache_path(f"calibration-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")


def _scenario(machine: Machine, model: ModelConfig, weights_in: str | None, kv_in: str | None) -> Scenario:
    """Everything on the gpu lane, so that no move is needed between operations; room for the largest batch below."""
    tokens = 2 * max(max(ROWS), *(count * (held + _BLOCK) for count, held in DECODES))
    requests = [Request((1,) * 8, 8, Sampling())] * 64
    return Scenario(
        fetch(weights) | gpu(qkv, prefill_attention, decode_attention, out_proj, moe),
        model=model,
        machine=machine,
        memory=Memory(tokens * model.kv_bytes_per_token(kv_in or model.dtype), _BLOCK, weights=weights_in, kv=kv_in),
        workload=Workload.of(requests),
        scheduler=ResourceAware(),
    )


class _Hollow(Engine):
    """An engine whose tasks do nothing: what remains is the lanes' hand-over and Python between plans."""

    def _action(self, task: Task, batches: tuple[Batch, ...], parts: list[Part]) -> Callable[[], Transfer | None]:
        return lambda: None

    def _check_bytes(self, jobs: list[Job], plan: Plan) -> None:
        pass


class _Bench:
    """Times actions as tasks of one-task plans, on the engine's own lanes."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._model = prepared, prepared.scenario.model
        self._cores = prepared.scenario.machine.cores or Cores.of(usable_cores())
        self._stages = prepared.scenario.pipeline.stages
        self._random = np.random.default_rng(0)
        self._forward = Forward(prepared)
        self._forward.warm_up()
        self._executor = Executor(STREAM, STREAM, throttled=True, packet_seconds=1e-3)
        self._weights = tuple(node for node in prepared.lowering.graph.streamed)

    def close(self) -> None:
        """End every thread."""
        self._executor.close()
        self._forward.close()

    def measure(self, shape: str) -> Machine:
        """The machine with a profile of this model."""
        machine, cores = self._prepared.scenario.machine, self._cores
        threads = sorted({cores.gpu, cores.cpu, cores.alone})
        with tqdm(total=len(threads) * (len(ROWS) + 3) + 2, desc="calibrate", delay=1) as bar:
            ops = tuple(op for count in threads for op in self._ops(count, bar))
            self._seat(cores.gpu)
            cores, rates = self._streaming(cores)
            bar.update()
            iteration, request = self._between()
            bar.update()
        today = datetime.now(UTC).isoformat(timespec="seconds")
        profile = Profile(shape, ops, iteration, request)
        return replace(machine, cores=cores, profiles=(profile,), rates=rates, measured=today)

    def _seat(self, threads: int) -> None:
        pace = Pace(threads, threads, "cpu", 0.0, 0.0)
        self._executor.seat(seats(pace, self._cores))
        self._one_thread = threads == 1

    def _time(self, action: Callable[[], object], repeats: int = 1) -> float:
        """Seconds of an action on the gpu lane: the thread's own where there is one, since nobody can steal those."""
        task = Task(EMBED, 0, 0)
        jobs = [self._executor.run([task], [action])[0] for _ in range(repeats)]
        return median(job.cpu if self._one_thread else job.end - job.start for job in jobs)

    # ------------------------------------------------------------------------------------------------- operations

    def _ops(self, threads: int, bar: Bar) -> Iterator[OpTime]:
        self._seat(threads)
        seen: dict[str, list[float]] = {stage.op.name: [] for stage in self._stages}
        for rows in ROWS:
            times = self._layers(self._prompts(max(1, rows // 64), min(rows, 64)), 3 if rows <= 256 else 2)
            for op, seconds in times.items():
                seen[op].append(median(seconds))
            bar.update()
        for op, seconds in seen.items():
            if op not in ("prefill_attention", "decode_attention"):
                yield OpTime(op, threads, ROWS, _rising(seconds))
        yield self._prefill(threads)
        bar.update()
        yield self._decode(threads, _rising(seen["decode_attention"]))
        bar.update()
        yield from self._ends(threads)
        bar.update()

    def _prompts(self, count: int, length: int) -> Part:
        """A part of `count` prompts of `length` tokens."""
        lengths = np.full(count, length)
        positions = np.tile(np.arange(length), count)
        slots = np.arange(count * length)
        return Part(lengths.tolist(), torch.from_numpy(positions), slots, np.zeros((0, 1), np.int32), lengths[:0])

    def _decodes(self, count: int, held: int) -> Part:
        """A part of `count` decodes that read `held` KV entries each, from blocks in random order."""
        width = -(-held // _BLOCK)
        table = self._random.permutation(count * width).reshape(count, width).astype(np.int32)
        lengths = np.full(count, held)
        slots = table[:, -1].astype(np.int64) * _BLOCK + (held - 1) % _BLOCK
        return Part([], torch.from_numpy(lengths - 1), slots, table, lengths)

    def _layers(self, part: Part, passes: int) -> dict[str, list[float]]:
        """Seconds of every stage on real hidden states, in three layers, twice for each time that weights arrive."""
        seen: dict[str, list[float]] = {stage.op.name: [] for stage in self._stages}
        last = self._model.num_hidden_layers - 1
        for _ in range(passes):
            self._forward.embed(0, self._random.integers(0, self._model.vocab_size, part.rows).tolist())
            for layer in sorted({0, last // 2, last}):
                self._load(layer)
                for _ in range(2):
                    for stage in self._stages:
                        work = lambda stage=stage, layer=layer: self._forward.compute(stage, layer, 0, part)  # noqa: E731
                        seen[stage.op.name].append(self._time(work))
        return seen

    def _load(self, layer: int) -> None:
        transfer = self._forward.transfer_weights(tuple((layer, node) for node in self._weights))
        if transfer is not None:
            for target, source in transfer.copies:
                np.copyto(target, source)
            if transfer.arrived:
                transfer.arrived()

    def _attention(self, name: str, part: Part) -> float:
        """Seconds of one attention stage of the first layer."""
        self._forward.embed(0, self._random.integers(0, self._model.vocab_size, part.rows).tolist())
        self._load(0)
        project, attend = (next(s for s in self._stages if s.op.name == op) for op in ("qkv", name))
        self._time(lambda: self._forward.compute(project, 0, 0, part))
        return self._time(lambda: self._forward.compute(attend, 0, 0, part), 5)

    def _prefill(self, threads: int) -> OpTime:
        """Per prompt, per token and per pair, fitted."""
        features, seconds = [], []
        for count, length in PROMPTS:
            features.append([count, count * length, count * length * (length + 1) / 2])
            seconds.append(self._attention("prefill_attention", self._prompts(count, length)))
        prompt, token, pair = _positive_fit(features, seconds)
        return OpTime("prefill_attention", threads, (1, 1024), (token, 1024 * token), per_prompt=prompt, per_pair=pair)

    def _decode(self, threads: int, append: tuple[float, ...]) -> OpTime:
        """Per call, per decode and per KV entry, fitted to what remains beside appending the new rows."""
        stored = OpTime("decode_attention", threads, ROWS, append)
        features, seconds = [], []
        for count, held in DECODES:
            taken = self._attention("decode_attention", self._decodes(count, held))
            features.append([1.0, count, count * held])
            seconds.append(max(0.0, taken - measured_seconds(stored, Rows(prefill=count))))
        call, decode, entry = _positive_fit(features, seconds)
        return replace(stored, decoding=call, per_decode=decode, per_context=entry)

    def _ends(self, threads: int) -> Iterator[OpTime]:
        forward, vocabulary = self._forward, self._model.vocab_size
        embed, head = [], []
        for rows in ROWS:
            ids = self._random.integers(0, vocabulary, rows).tolist()
            embed.append(self._time(lambda ids=ids: forward.embed(0, ids), 5))  # type: ignore[misc]
        for rows in EMITS:
            forward.embed(0, self._random.integers(0, vocabulary, rows).tolist())
            part, greedy = self._prompts(rows, 1), [Sampling()] * rows
            work = lambda part=part, greedy=greedy: choose_all(forward.logits(0, part), greedy, [0] * len(greedy))  # noqa: E731
            head.append(self._time(work, 5))
        yield OpTime("embed", threads, ROWS, _rising(embed))
        yield OpTime("head", threads, EMITS, _rising(head))

    # ------------------------------------------------------------------------------------------------- the lanes

    def _streaming(self, cores: Cores) -> tuple[Cores, tuple[tuple[str, float], ...]]:
        """Core time of the mover, and how much slower experts and attention are while it streams on another core."""
        many = self._prompts(4, 64)
        self._layers(many, 1)
        self._load(0)
        experts = next(stage for stage in self._stages if stage.op.name == "experts")
        attend = next(stage for stage in self._stages if stage.op.name == "decode_attention")
        alone, beside, mover = self._beside(lambda: self._forward.compute(experts, 0, 0, many))
        gpu_drag = max(0.0, beside / alone - 1) / STREAM
        readers = self._decodes(64, 256)
        self._attention("decode_attention", readers)
        quiet, loud, _ = self._beside(lambda: self._forward.compute(attend, 0, 0, readers))
        cpu_drag = max(0.0, loud / quiet - 1) / STREAM
        attention = 64 * 256 * self._model.kv_bytes_per_token(self._prepared.scenario.precision.kv)
        rates = (
            ("mover, core-seconds per GB", mover * 1e9),
            ("experts beside a stream of 2 GB/s, relative time", beside / alone),
            ("attention beside a stream of 2 GB/s, relative time", loud / quiet),
            ("attention alone, KV GB/s", attention / self._model.num_hidden_layers / quiet / 1e9),
            ("attention beside a stream of 2 GB/s, KV GB/s", attention / self._model.num_hidden_layers / loud / 1e9),
            ("DRAM sequential read on one core, GB/s", self._sequential_read() / 1e9),
        )
        return replace(cores, mover=mover, gpu_drag=gpu_drag, cpu_drag=cpu_drag), rates

    def _beside(self, action: Callable[[], object]) -> tuple[float, float, float]:
        """Seconds of an action alone and beside a stream, interleaved; core-seconds per byte of the stream."""
        source = np.ones(1 << 28, np.int8)
        target = np.ones_like(source)
        alone, beside, mover = [], [], []
        for _ in range(5):
            alone.append(self._time(action))
            tasks = [Task(WEIGHTS, 0, None, bulk=True), *[Task(EMBED, 0, 0)] * max(1, int(0.1 / alone[0]))]
            tasks = [tasks[0], *(replace(task, after=(i,) if i else ()) for i, task in enumerate(tasks[1:]))]
            stream = Transfer([(target, source)])
            jobs = self._executor.run(tasks, [lambda stream=stream: stream, *[action] * (len(tasks) - 1)])  # type: ignore[misc]
            under_way = [job for job in jobs[1:] if job.end <= jobs[0].end]
            beside += [job.cpu if self._one_thread else job.end - job.start for job in under_way]
            mover.append(jobs[0].cpu / jobs[0].bytes)
        return median(alone), median(beside), median(mover)

    def _sequential_read(self) -> float:
        numbers = torch.ones(1 << 26)
        return numbers.nbytes / self._time(lambda: torch.dot(numbers, numbers), 5)

    def _between(self) -> tuple[float, float]:
        """Seconds between two plans, fixed and per request, from plans whose tasks do nothing."""
        gaps = [self._gap(count) for count in (4, 64)]
        request = max(0.0, (gaps[1] - gaps[0]) / 60)
        return max(0.0, gaps[0] - 4 * request), request

    def _gap(self, requests: int) -> float:
        workload = Workload.of(self._prepared.scenario.workload.requests[:requests])
        prepared = prepare(self._prepared.scenario.on(workload=workload), Sequential())
        engine = _Hollow(prepared)
        try:
            result = serve(prepared, engine, Source.MEASURED)
        finally:
            engine.close()
        gaps = []
        for number, seconds in enumerate(result.steps.seconds):
            window = engine.timeline.window(number, number + 1)
            gaps.append(seconds - window.seconds)
        return median(gaps)


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """More rows never take less time: noise is ironed out."""
    return tuple(np.maximum.accumulate(seconds).tolist())


def _positive_fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Least relative squares with coefficients that are not negative, by leaving out those that would be."""
    wide, target = np.array(features, dtype=float), np.array(seconds)
    scale = np.maximum(target, target.max() * 1e-3)
    kept = list(range(wide.shape[1]))
    while kept:
        found = np.linalg.lstsq(wide[:, kept] / scale[:, None], target / scale, rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    answer = np.zeros(wide.shape[1])
    answer[kept] = found
    return tuple(answer.tolist())
