"""The model in memory, the lanes, and what each task of a plan does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.engine.checkpoint import TORCH_DTYPES
from workbench.engine.kv_cache import FetchedKV, KVCache
from workbench.engine.lanes import Copy, Executor, Job, Transfer
from workbench.engine.ops import BUILT_IN, Ops, Part
from workbench.engine.sampler import choose
from workbench.engine.weights import Weights, WeightStore, as_numpy
from workbench.errors import CapacityError, EngineError
from workbench.plan import LANES, Plan, Task
from workbench.scheduler.batch import Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.schedules.base import Step
from workbench.segments import Kind, Node
from workbench.serving import Prepared, slot_bytes
from workbench.stages import Device, RowClass, Stage, buffer_row
from workbench.timeline import Span, Timeline
from workbench.units import format_bytes

Key = tuple[Device, int, str]
"""Device, part and buffer."""


class Engine:
    """The wall clock: a `Clock` whose plans are executed.

    Loading happens here, before the clock starts. `close` ends the threads, whatever happened.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, scenario = prepared, prepared.scenario
        self._model, self._graph = scenario.model, prepared.lowering.graph
        store = WeightStore(self._model, scenario.precision.weights)
        slots = prepared.lowering.schedule.weight_slots
        self._weights = Weights(store, self._graph, slot_bytes(prepared), slots)
        self._embedding = store.table("model.embed_tokens.weight")
        tied = self._model.tie_word_embeddings
        self._norm, self._head = (
            store.table("model.norm.weight"),
            self._embedding if tied else store.table("lm_head.weight"),
        )
        self._cache = KVCache(self._model, scenario.kv_blocks, scenario.memory.kv_block, scenario.precision.kv)
        self._ops = Ops(self._model)
        self._check_gpu_memory()
        self._requests = scenario.workload.requests
        self._tokens = [list(request.prompt) for request in self._requests]
        self._buffers: dict[Key, torch.Tensor] = {}
        self._fetched: dict[int, FetchedKV] = {}
        self._ran: set[tuple[str, Device]] = set()
        self._warm_up()
        self._bar = tqdm(total=int(scenario.workload.output_len.sum()), unit="tok", desc="run", delay=1, mininterval=1)
        self.now, self.timeline = 0.0, Timeline(labels=self._graph.labels)
        self._zero = time.perf_counter()
        link = scenario.machine.link
        self._executor = Executor(
            link.h2d,
            link.d2h,
            throttled=scenario.machine.throttled,
            packet_seconds=prepared.lowering.schedule.packet_seconds,
        )

    def _check_gpu_memory(self) -> None:
        """Enforce the limit on the weights and KV that were really allocated; activations are not counted."""
        taken = self._weights.gpu_bytes + self._norm.nbytes
        taken += self._cache.pool.nbytes if self._graph.pipeline.kv_device is Device.GPU else 0
        taken += self._embedding.nbytes + (0 if self._head is self._embedding else self._head.nbytes)
        self._gpu_bytes, limit = taken, self._prepared.scenario.machine.gpu.memory
        if taken > limit:
            raise CapacityError(f"{format_bytes(taken)} were allocated on the GPU, its limit is {format_bytes(limit)}.")

    def _warm_up(self) -> None:
        """Compile, and read every streamed weight once, before the clock starts: neither is charged to a lane."""
        model = self._model
        rows = torch.zeros(1, model.kv_size)
        self._cache.append(0, np.zeros(1, dtype=np.int64), rows, rows)
        one = Part(
            [],
            torch.zeros(1, dtype=torch.int64),
            np.zeros(1, np.int64),
            np.zeros((1, 1), np.int32),
            np.ones(1, np.int64),
        )
        self._cache.attend(0, one, torch.zeros(1, model.q_size))
        if self._weights.buffer:
            asked = [task.pieces for task in self._prepared.lowering.tasks(model.num_hidden_layers, Step.MIDDLE)]
            for pieces in filter(None, asked):
                for target, source in self._weights.buffer.transfer(pieces).copies:
                    np.copyto(target, source)

    @property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        """The tokens generated for each request."""
        pairs = zip(self._tokens, self._requests, strict=True)
        return tuple(tuple(tokens[len(request.prompt) :]) for tokens, request in pairs)

    def close(self) -> None:
        """End the lanes' threads."""
        self._executor.close()
        self._bar.close()

    # ------------------------------------------------------------------------------------------------- the clock

    def begin(self, blocks: BlockManager) -> None:
        """See `Clock.begin`."""
        self._blocks = blocks
        self._zero = time.perf_counter()

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        self._buffers.clear()
        parts = [self._part(batch) for batch in plan.parts]
        actions = [self._action(task, plan.parts, parts) for task in plan.tasks]
        jobs = self._executor.run(plan.tasks, actions)
        self._check_bytes(jobs, plan)
        self._bar.update(sum(len(batch) for batch in plan.parts))
        self.now = time.perf_counter() - self._zero
        return self._record(jobs, number)

    def _record(self, jobs: list[Job], number: int) -> dict[str, float]:
        busy = dict.fromkeys(LANES, 0.0)
        for job in jobs:
            lane = job.task.node.lane
            for start, end in job.spans:
                busy[lane] += end - start
                span = Span(lane, job.task.name, start - self._zero, end - self._zero, number, job.cpu)
                self.timeline.spans.append(span)
        return busy

    def _part(self, batch: Batch) -> Part:
        size, table = self._blocks.block_size, self._blocks.table
        lengths = batch.prefill_len
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = np.concatenate((np.arange(int(lengths.sum())) - first, batch.context))
        owners = np.concatenate((np.repeat(batch.prefills, lengths), batch.decodes))
        slots = table[owners, positions // size].astype(np.int64) * size + positions % size
        held = batch.context + 1
        width = -(-int(held.max(initial=1)) // size)
        return Part(lengths.tolist(), torch.from_numpy(positions), slots, table[batch.decodes, :width], held)

    # ------------------------------------------------------------------------------------------ what tasks do

    def _action(self, task: Task, batches: tuple[Batch, ...], parts: list[Part]) -> Callable[[], Transfer | None]:
        if task.part is None:
            return lambda: self._weights.buffer.transfer(task.pieces) if self._weights.buffer else None
        part, number = parts[task.part], task.part
        if not part.rows:
            return lambda: None
        return {
            Kind.EMBED: lambda: self._embed(number, batches[number], part),
            Kind.HEAD: lambda: self._emit(number, batches[number], part),
            Kind.SEGMENT: lambda: self._compute(task, part),
            Kind.MOVE: lambda: self._move(task.node, number, part),
            Kind.KV_IN: lambda: self._fetch_kv(task, part),
            Kind.KV_OUT: lambda: self._store_kv(task, part),
        }[task.node.kind]

    def _embed(self, number: int, batch: Batch, part: Part) -> None:
        ids: list[int] = []
        for request, length in zip(batch.prefills.tolist(), part.prefill_len, strict=True):
            ids += self._tokens[request][:length]
        ids += [self._tokens[request][-1] for request in batch.decodes.tolist()]
        self._buffers[Device.GPU, number, "x"] = self._embedding[torch.tensor(ids)]

    def _emit(self, number: int, batch: Batch, part: Part) -> None:
        x = self._buffers[Device.GPU, number, "x"][part.last_rows]
        logits = torch.nn.functional.linear(self._ops.norm(x, self._norm), self._head).float()
        for row, request in enumerate(batch.requests.tolist()):
            made = len(self._tokens[request]) - len(self._requests[request].prompt)
            self._tokens[request].append(choose(logits[row], self._requests[request].sampling, made))

    def _compute(self, task: Task, part: Part) -> None:
        lane = Device(threading.current_thread().name.removeprefix("lane-"))
        for stage in task.node.stages:
            self._ran.add((stage.op.name, lane))
            if stage.op.keeps_kv:
                self._attend(task, stage, part)
            elif _rows(stage.op.rows, part).stop > _rows(stage.op.rows, part).start:
                self._operate(task, stage, part)

    def _operate(self, task: Task, stage: Stage, part: Part) -> None:
        device, number, rows = stage.device, task.part or 0, _rows(stage.op.rows, part)
        read = {buffer: self._buffers[device, number, buffer][rows] for buffer in stage.op.reads}
        if stage.op.run is not None:
            written = self._own(stage, stage.op.run(**read), rows.stop - rows.start)
        else:
            answer = BUILT_IN[stage.op.name](self._ops, part, read, self._weights.get(task.layer, stage))
            written = answer if isinstance(answer, tuple) else (answer,)
        for buffer, tensor in zip(stage.op.writes, written, strict=True):
            if stage.op.rows is RowClass.ALL:
                self._buffers[device, number, buffer] = tensor
            else:
                self._place((device, number, buffer), part, tensor)[rows] = tensor

    def _own(self, stage: Stage, answer: object, rows: int) -> tuple[torch.Tensor, ...]:
        """What a user's operation wrote, checked, and copied: it may have returned what it read."""
        answers = answer if isinstance(answer, tuple) else (answer,)
        if len(answers) != len(stage.op.writes):
            raise EngineError(
                f"{stage} returned {len(answers)} results and writes {len(stage.op.writes)} buffers "
                f"({', '.join(stage.op.writes)}); return one tensor for each."
            )
        for buffer, tensor in zip(stage.op.writes, answers, strict=True):
            width, precision = buffer_row(buffer, self._model, self._prepared.scenario.precision)
            dtype = TORCH_DTYPES[precision]
            found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            if found != ((rows, width), dtype):
                raise EngineError(
                    f"{stage} wrote {buffer} as {found}; return a tensor of shape {(rows, width)}, {dtype}."
                )
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in answers)

    def _place(self, key: Key, part: Part, like: torch.Tensor) -> torch.Tensor:
        """A buffer for all rows of a part, of which some are about to be written."""
        shape = (part.rows, *like.shape[1:])
        if key not in self._buffers or self._buffers[key].shape != shape:
            self._buffers[key] = torch.empty(shape, dtype=like.dtype)
        return self._buffers[key]

    def _attend(self, task: Task, stage: Stage, part: Part) -> None:
        number, decodes = task.part or 0, slice(part.prefill, part.rows)
        q, k, v = (self._buffers.get((stage.device, number, buffer)) for buffer in "qkv")
        fetched = self._fetched.pop(number, None)
        if k is None or v is None:
            raise EngineError(f"{stage} found no keys and values on the {stage.device.value}; the plan is wrong.")
        if fetched is None:
            self._cache.append(task.layer, part.slots, k, v)
        if q is None or not len(part.lengths):
            return
        if fetched is None:
            out = self._cache.attend(task.layer, part, q[decodes])
        else:
            out = fetched.attend(part, q[decodes], k[decodes], v[decodes])
        self._place((stage.device, number, "attn"), part, out)[decodes] = out

    def _move(self, node: Node, number: int, part: Part) -> Transfer:
        target = Device.CPU if node.lane == "d2h" else Device.GPU
        copies: list[Copy] = []
        for buffer, row_class in node.carries:
            rows = _rows(row_class, part)
            if rows.stop > rows.start:
                source = self._buffers[target.other, number, buffer]
                there = self._place((target, number, buffer), part, source)
                copies.append((as_numpy(there[rows]), as_numpy(source[rows])))
        return Transfer(copies)

    def _fetch_kv(self, task: Task, part: Part) -> Transfer | None:
        if not len(part.lengths):
            return None
        wanted = self._gpu_bytes + self._cache.fetched_bytes(part) + sum(f.pool.nbytes for f in self._fetched.values())
        limit = self._prepared.scenario.machine.gpu.memory
        if wanted > limit:
            raise CapacityError(
                f"the KV of {len(part.lengths)} decodes brings the GPU to {format_bytes(wanted)}, its limit is "
                f"{format_bytes(limit)}. Use more micro_batches, a smaller token_budget or more GPU memory."
            )
        self._fetched[task.part or 0], transfer = self._cache.fetch(task.layer, part)
        return transfer

    def _store_kv(self, task: Task, part: Part) -> Transfer:
        number = task.part or 0
        new = [self._buffers[Device.GPU, number, buffer] for buffer in "kv"]
        there = [torch.empty_like(tensor) for tensor in new]
        copies = [(as_numpy(a), as_numpy(b)) for a, b in zip(there, new, strict=True)]
        return Transfer(copies, lambda: self._cache.append(task.layer, part.slots, *there))

    # ---------------------------------------------------------------------------------- what ran is what was asked

    def _check_bytes(self, jobs: list[Job], plan: Plan) -> None:
        cost = self._prepared.cost
        for job in jobs:
            task = job.task
            if task.node.kind is Kind.WEIGHTS:
                asked = cost.weight_transfer(task.pieces)
            elif task.node.kind in (Kind.MOVE, Kind.KV_IN, Kind.KV_OUT) and task.part is not None:
                asked = cost.transfer(task.node, plan.parts[task.part].rows)
            else:
                continue
            if job.bytes != asked:
                raise EngineError(
                    f"task {task.name} moved {job.bytes} bytes where the plan says {asked:.0f}; this is a bug."
                )

    def read_back(self) -> None:
        """Compare placement, precision and KV capacity that ran with those asked for.

        Raises
        ------
        EngineError
            If they differ.
        """
        scenario = self._prepared.scenario
        precision = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        asked = {
            "placement": {(stage.op.name, stage.device) for stage in scenario.pipeline.stages},
            "KV blocks and tokens per block": (scenario.kv_blocks, scenario.memory.kv_block),
            "precision of weights and KV": tuple(scenario.precision),
        }
        ran = {
            "placement": self._ran,
            "KV blocks and tokens per block": (self._cache.pool.shape[1], self._cache.block_size),
            "precision of weights and KV": (precision[self._weights.dtype], precision[self._cache.pool.dtype]),
        }
        for what, wanted in asked.items():
            if ran[what] != wanted:
                raise EngineError(f"{what}: {wanted} was asked for, {ran[what]} ran; this is a bug.")


def _rows(row_class: RowClass, part: Part) -> slice:
    first = part.prefill if row_class is RowClass.DECODE else 0
    return slice(first, part.prefill if row_class is RowClass.PREFILL else part.rows)
