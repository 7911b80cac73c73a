"""Seconds and bytes of tasks, from the declared work of their operations; shared by every reader that predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from workbench.cost import (
    CutRows,
    PartRows,
    Precision,
    Rows,
    Work,
    copy_seconds,
    least_seconds,
    measured_seconds,
    seconds,
)
from workbench.errors import ScenarioError
from workbench.hardware import Device
from workbench.models import ModelConfig
from workbench.plan import COMPUTE, WHOLE, Carry, Task, busy_seconds, lay_out, one_at_a_time
from workbench.profile import Cores, OpTime, Pace
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch
from workbench.segments import Kind, LayerGraph, Node
from workbench.stages import Device as Place
from workbench.stages import (
    RowClass,
    Stage,
    afterwards,
    at_once,
    buffer_bytes,
    decode_attention,
    embed_work,
    head_work,
)
from workbench.units import DTYPE_BYTES

# Where the longest task of a plan is shorter, a team of threads gains nothing, and beside another program its members
# wait for one another: regions of 1 ms then took up to 50 ms (2 Zen 4 cores).
TEAM_SECONDS = 1e-3
_MOST_STOLEN = 0.5  # share of a core that the movers take from a lane that wants it too
_NO_ROWS = Rows()
_ENDLESS = 1e12  # tokens of an iteration that no computer will see
_ENDS = {Kind.EMBED: "embed", Kind.HEAD: "head"}


class LaidOut(NamedTuple):
    """Tasks on their lanes, one value for each: start, end, time that it holds its lane, time of the host's memory [s].

    Where lanes share cores, what they do to one another is measured (`Cores`), and no time of memory is counted.
    `seconds` is the end of the last task that the iteration waits for, `runs_on` that of the transfer that may outlast
    it, or 0.
    """

    starts: list[float]
    ends: list[float]
    busy: list[float]
    dram: list[float]
    seconds: float
    runs_on: float


class _Kinds(NamedTuple):
    """Tasks that cost the same: the first of each kind, and the kind of every task. `tasks` are kept for their id."""

    first: list[Task]
    kind: list[int]
    tasks: Sequence[Task]

    @classmethod
    def of(cls, tasks: Sequence[Task], cut: CutRows | None) -> _Kinds:
        """Those of a plan, whose prefills may pass some layers only."""
        number: dict[tuple[object, ...], int] = {}
        first, kind = list[Task](), list[int]()
        for task in tasks:
            rows = None if cut is None or task.part is None else id(cut.at(task.place(cut.stack)))
            key = (task.pieces, task.carry, task.page, id(task.node), task.part, rows)
            if key not in number:
                number[key] = len(first)
                first.append(task)
            kind.append(number[key])
        return cls(first, kind, tasks)


class TaskCost:
    """Prices the tasks of one scenario."""

    def __init__(self, scenario: Scenario, graph: LayerGraph) -> None:
        self._model, self._machine, self._precision = scenario.model, scenario.machine, scenario.precision
        self._graph = graph
        self.profile = scenario.machine.profile(profile_shape(scenario.model, scenario.precision))
        self._kv_in = self._model.kv_elements * DTYPE_BYTES[self._precision.kv]
        self._kinds: dict[tuple[int, range | None], _Kinds] = {}
        self._carried = {id(node): self._carried_bytes(node) for node in graph.all_nodes}
        self._weights = self._streamed_weights(self._model)
        self._with_experts, self._without = (
            self._streamed_weights(replace(self._model, first_k_dense_replace=dense))
            for dense in (0, self._model.num_hidden_layers)
        )

    def _streamed_weights(self, model: ModelConfig) -> dict[int, float]:
        """Bytes of each streamed node in one layer of a model."""
        streams = self._graph.pipeline.streams
        return {
            index: sum(s.op.weight_bytes(model, self._precision) for s in self._graph.nodes[index].stages if streams(s))
            for index in self._graph.streamed
        }

    def _carried_bytes(self, node: Node) -> tuple[int, int]:
        """Bytes that a transfer moves per prefill row and per decode row."""
        sizes = [(buffer_bytes(buffer, self._model, self._precision, rows), rows) for buffer, rows in node.carries]
        return (
            sum(size for size, rows in sizes if rows is RowClass.PREFILL),
            sum(size for size, rows in sizes if rows is RowClass.DECODE),
        )

    @property
    def weights_per_layer(self) -> float:
        """Bytes streamed per layer and iteration."""
        return sum(self._weights.values())

    def weight_transfer(self, task: Task) -> float:
        """Bytes that one weight transfer moves, for a mean layer: all its pieces, or its page of them."""
        size = sum(self._weights[node] for _, node in task.pieces)
        if task.page is WHOLE:
            return size
        begin, end = task.page.cut(size)
        return end - begin

    def exact_transfer(self, pieces: Sequence[tuple[int, int]]) -> float:
        """Bytes of all pieces of one weight transfer, each layer as it is: with experts, or without."""
        dense = self._model.dense_layers
        return sum((self._without if layer < dense else self._with_experts)[node] for layer, node in pieces)

    def rows(self, batch: Batch) -> Rows:
        """What a batch puts on the stages of a mean layer; sliding windows cap pairs and context in some layers."""
        model = self._model
        if not model.windowed_layers:
            return batch.rows
        pairs = model.attended_below(batch.starts + batch.prefill_len).sum() - model.attended_below(batch.starts).sum()
        context, before = model.attended(batch.context + 1).sum(), model.attended(batch.starts).sum()
        return batch.rows._replace(pairs=float(pairs), context=float(context), before=float(before))

    def part(self, batch: Batch) -> PartRows:
        """What a part of a batch puts on the stages, place by place."""
        rows = self.rows(batch)
        if batch.cut is None:
            return rows
        others, passing = self.rows(batch.decodes_alone), rows._replace(emits=len(batch))
        head = rows if batch.at(batch.layers) is batch else others
        return CutRows(passing, others, head, batch.prefill_layers, batch.layers)

    def expert_bytes(self, parts: Sequence[Batch]) -> float:
        """Routed experts that an iteration reads, each chosen one once per layer and part, expected [B]."""
        model = self._model
        touched = 0.0
        for part in parts:
            passed = len(part.prefill_layers)
            touched += passed * model.touched_experts(len(part.decodes) + int(part.rows.prefill))
            if passed < model.num_hidden_layers:
                touched += (model.num_hidden_layers - passed) * model.touched_experts(len(part.decodes))
        return touched * model.moe_share * model.expert_params * self._precision.expert_bytes

    def work(self, stage: Stage, rows: Rows) -> Work:
        """What one stage does for these rows when its layer runs.

        Raises
        ------
        ScenarioError
            If the operation declares no work.
        """
        work = at_once(stage, rows, self._model, self._precision)
        if work is None:
            raise ScenarioError(
                f"op {stage.op.name!r} declares no work, so it cannot be priced; give Op(..., work=...)."
            )
        if stage.op.keeps_kv and stage.device is Place.GPU and self.decodes_at and stage.op == decode_attention:
            return work._replace(dtype=self.decodes_at)
        return work

    @cached_property
    def decodes_at(self) -> str | None:
        """Precision whose rate prices decode attention on a GPU that has no fp32 rate: that of the KV cache.

        Matrix units take 16-bit keys and values and sum in fp32, as MoE-Lightning's model has it too; the fp32 rate
        that the operation declares is that of the kernel for CPUs.
        """
        return None if "fp32" in dict(self._machine.gpu.flops) else self._precision.kv

    def transfer(self, node: Node, rows: Rows) -> float:
        """Bytes that a transfer of activations or KV moves for these rows in one layer."""
        if node.kind is Kind.KV_IN:
            return (rows.context - rows.decode + rows.before) * self._kv_in
        per_prefill, per_decode = self._carried[id(node)]
        return per_prefill * rows.prefill + per_decode * rows.decode

    def move(self, node: Node, rows: Rows) -> float:
        """Seconds of one transfer of activations or KV in one layer."""
        link = self._machine.link
        overhead = link.overhead if self.profile is None else self.profile.move
        return copy_seconds(self.transfer(node, rows), link.h2d if node.lane == "h2d" else link.d2h, overhead)

    def fetch(self, size: float) -> float:
        """Seconds of one transfer of weights."""
        link = self._machine.link
        return copy_seconds(size, link.h2d, link.overhead if self.profile is None else self.profile.fetch)

    def stage(self, stage: Stage, rows: Rows, threads: int = 0) -> float:
        """Seconds of one stage in one layer [s]: as measured on so many threads, or else by the roofline."""
        time = self._time(stage.op.name, threads)
        if time is not None:
            share = 1 - (stage.defer + stage.skip) / self._model.num_experts_per_tok
            return measured_seconds(time, _decoding(rows_of(stage, rows), share))
        return seconds(self.work(stage, rows), self._device(stage.device, threads))

    def afterwards(self, stage: Stage, rows: Rows, threads: int = 0) -> float:
        """Seconds of what one stage defers in one layer [s]."""
        time = self._time(stage.op.name, threads)
        if time is not None:
            share = stage.defer / self._model.num_experts_per_tok
            return measured_seconds(time, _decoding(Rows(decode=rows.decode, emits=rows.decode), share))
        work = afterwards(stage, rows, self._model, self._precision)
        return seconds(work, self._device(stage.device, threads))

    def least(self, stage: Stage, total: Rows, threads: int = 0) -> float:
        """Seconds of one stage in one layer for all of these rows, that no split into calls can beat [s]."""
        time = self._time(stage.op.name, threads)
        if time is not None:
            share = 1 - (stage.defer + stage.skip) / self._model.num_experts_per_tok
            return least_seconds(time, _decoding(rows_of(stage, total), share))
        return seconds(self.work(stage, total), self._device(stage.device, threads))

    def ends(self, kind: Kind, rows: Rows, threads: int = 0) -> float:
        """Seconds of the embedding or the head [s]."""
        return self._ends(kind, rows, threads, measured_seconds)

    def least_ends(self, kind: Kind, total: Rows, threads: int = 0) -> float:
        """As `least`, of the embedding or the head [s]."""
        return self._ends(kind, total, threads, least_seconds)

    def _ends(self, kind: Kind, rows: Rows, threads: int, measured: Callable[[OpTime, Rows], float]) -> float:
        time = self._time(_ENDS[kind], threads)
        if time is not None:
            return measured(time, Rows(prefill=rows.emits) if kind is Kind.HEAD else Rows(prefill=rows.tokens))
        work = embed_work if kind is Kind.EMBED else head_work
        return seconds(work(rows, self._model, self._precision), self._device(Place.GPU, threads))

    def _time(self, op: str, threads: int) -> OpTime | None:
        return self.profile.find(op, threads) if self.profile is not None and threads else None

    def _device(self, place: Place, threads: int) -> Device:
        """The device, its rates scaled to the threads if they are not those it was measured with."""
        device, cores = self._machine.gpu if place is Place.GPU else self._machine.cpu, self._machine.cores
        if cores is None or not threads:
            return device
        own = cores.gpu if place is Place.GPU else cores.cpu
        if threads == own:
            return device
        rates = tuple((dtype, rate * threads / own) for dtype, rate in device.flops)
        return replace(device, flops=rates, bandwidth=device.bandwidth * threads / own)

    def node(self, node: Node, rows: Rows, threads: int = 0) -> float:
        """Seconds of a node other than weights for these rows [s]."""
        if node.kind is Kind.SEGMENT:
            total = 0.0  # a loop, because a simulation spends much of its time here
            for stage in node.stages:
                total += self.stage(stage, rows, threads)
            return total
        if node.kind is Kind.DEFERRED:
            return sum(self.afterwards(stage, rows, threads) for stage in node.stages)
        if node.kind in _ENDS:
            return self.ends(node.kind, rows, threads)
        return self.move(node, rows)

    def pace(self, tasks: Sequence[Task], parts: Sequence[PartRows], cores: Cores) -> Pace:
        """How the lanes run during a plan on shared cores.

        Where compute tasks follow one another and gain by it, each has all cores, the movers' among them.
        Else each lane has its own, and the movers sit with the one that has less to do.
        """
        try:
            crowded = self.tasks(tasks, parts, Pace(cores.gpu, cores.cpu, "", 0.0, 0.0))
        except ScenarioError:  # an operation that declares no work can still run
            crowded = [1.0] * len(tasks)
        link = self._machine.link.h2d
        stolen = 0.0 if cores.spare else min(cores.mover * link, _MOST_STOLEN)
        drags = (cores.gpu_drag, cores.cpu_drag, cores.gpu_team_drag, cores.cpu_team_drag)
        gpu_drag, cpu_drag, *teams = (1 - 1 / (1 + drag * link) for drag in drags)
        whole = Pace(cores.alone, cores.alone, "", *teams)
        if one_at_a_time(tasks, crowded) and self._faster(tasks, parts, whole, crowded):
            return whole
        busy = busy_seconds(tasks, crowded)
        beside = "gpu" if busy["gpu"] < busy["cpu"] else "cpu"
        if beside == "gpu":
            gpu_drag = 1 - (1 - gpu_drag) * (1 - stolen)
        else:
            cpu_drag = 1 - (1 - cpu_drag) * (1 - stolen)
        return Pace(cores.gpu, cores.cpu, "" if cores.spare else beside, gpu_drag, cpu_drag)

    def _faster(self, tasks: Sequence[Task], parts: Sequence[PartRows], whole: Pace, crowded: Sequence[float]) -> bool:
        """True if compute tasks that have every core end sooner than those with their lane's own."""
        apart = _compute(tasks, crowded)
        if max(apart) < TEAM_SECONDS:
            return False
        return self.profile is None or sum(_compute(tasks, self.tasks(tasks, parts, whole))) < sum(apart)

    def lay_out(
        self, tasks: Sequence[Task], parts: Sequence[PartRows], packet: float, whole: Sequence[Task], carried: float
    ) -> LaidOut:
        """Play tasks of a plan; see `plan.lay_out`.

        The `whole` plan sets the pace; the transfer that the iteration before let run on takes `carried` seconds yet.
        """
        cores = self._machine.cores
        pace = None if cores is None else self.pace(whole, parts, cores)
        work = [
            carried if task.carry is Carry.IN else length
            for task, length in zip(tasks, self.tasks(tasks, parts, pace), strict=True)
        ]
        dram = self._dram(tasks, parts) if cores is None else [0.0] * len(tasks)
        if pace is None:
            drags = self._dram_drags(tasks, work, dram)
        else:
            of_lane = {"gpu": pace.gpu_drag, "cpu": pace.cpu_drag}
            drags = [of_lane.get(task.node.lane, 0.0) for task in tasks]
        starts, ends = lay_out(tasks, work, packet, drags)
        busy = [
            end - start if drag else length for start, end, length, drag in zip(starts, ends, work, drags, strict=True)
        ]
        carried_out = [end for task, end in zip(tasks, ends, strict=True) if task.carry is Carry.OUT]
        awaited = [end for task, end in zip(tasks, ends, strict=True) if task.carry is not Carry.OUT]
        return LaidOut(starts, ends, busy, dram, max(awaited), max(carried_out, default=0.0))

    def _dram_drags(self, tasks: Sequence[Task], work: Sequence[float], dram: Sequence[float]) -> list[float]:
        """Share of its progress that each task on the host loses while weights are read from the same DRAM.

        A task that needs the share u of the bandwidth runs at min(1, a / u), a being what the stream leaves, at least
        half: the two then share evenly.
        """
        left = max(1.0 - self._machine.link.h2d / self._machine.cpu.bandwidth, 0.5)
        return [
            max(0.0, 1.0 - left * seconds / traffic) if traffic and task.node.lane == "cpu" else 0.0
            for task, seconds, traffic in zip(tasks, work, dram, strict=True)
        ]

    def between(self, requests: float) -> float:
        """Seconds between two plans, for so many requests in the batch [s]."""
        return 0.0 if self.profile is None else self.profile.iteration + self.profile.request * requests

    def tasks(self, tasks: Sequence[Task], parts: Sequence[PartRows], pace: Pace | None = None) -> list[float]:
        """Seconds of every task of a plan whose parts have these rows; none for the rest of a carried transfer."""
        return self._each_kind(tasks, parts, lambda task, rows: self._price(task, rows, pace))

    def _dram(self, tasks: Sequence[Task], parts: Sequence[PartRows]) -> list[float]:
        """Seconds of the host memory's bandwidth that each task of a plan takes [s]."""

        def price(task: Task, rows: Rows) -> float:
            if task.carry is Carry.IN:
                return 0.0
            if task.part is None:
                return self.weight_transfer(task) / self._machine.cpu.bandwidth
            return self.host_bytes(task.node, rows) / self._machine.cpu.bandwidth

        return self._each_kind(tasks, parts, price)

    def _each_kind(
        self, tasks: Sequence[Task], parts: Sequence[PartRows], price: Callable[[Task, Rows], float]
    ) -> list[float]:
        """The price of every task, asked for once where tasks of several layers are the same."""
        cut = next((rows for rows in parts if isinstance(rows, CutRows)), None)
        key = (id(tasks), None if cut is None else cut.layers)
        if key not in self._kinds:
            self._kinds[key] = _Kinds.of(tasks, cut)
        prices = []
        for task in self._kinds[key].first:
            if task.part is None:
                prices.append(price(task, _NO_ROWS))
            else:
                rows = parts[task.part]
                prices.append(price(task, rows if isinstance(rows, Rows) else rows.at(task.place(rows.stack))))
        return [prices[kind] for kind in self._kinds[key].kind]

    def host_bytes(self, node: Node, rows: Rows) -> float:
        """Bytes that a node other than weights reads from or writes to the host's memory in one layer."""
        if node.kind is Kind.SEGMENT:
            on_host = node.stages if node.lane == "cpu" else ()
            return sum(self.work(stage, rows).bytes for stage in on_host)
        if node.kind is Kind.DEFERRED:
            return sum(afterwards(stage, rows, self._model, self._precision).bytes for stage in node.stages)
        return 0.0 if node.kind in _ENDS else self.transfer(node, rows)

    def _price(self, task: Task, rows: Rows, pace: Pace | None) -> float:
        if task.carry is Carry.IN:
            return 0.0
        if task.part is None:
            return self.fetch(self.weight_transfer(task))
        threads = 0 if pace is None else (pace.cpu if task.node.lane == "cpu" else pace.gpu)
        length = self.node(task.node, rows, threads)
        hand_over = self._machine.link.overhead if self.profile is None else self.profile.hand_over
        return length + hand_over if length and self._machine.cores and task.node.lane in COMPUTE else length

    def token_budget(self) -> float:
        """Tokens whose GPU work takes as long as one layer's weights take to stream; infinite if none do.

            n = (t_transfer - a) / c,    t_gpu(n) = a + c n    (MoE-Lens' pipeline profiler, SPEC 1.7)

        Where a fast link leaves room for few tokens or none, it is as many as keep the fixed time `a` of many tokens
        below a tenth: the link is hidden anyway, and smaller batches only repeat the fixed work.
        """
        transfer = self.fetch(self.weights_per_layer)
        if not transfer or self.gpu_seconds(_ENDLESS) < transfer:
            return float("inf")
        first = 1.0
        while self.gpu_seconds(first) < transfer:
            first *= 2
        slope = (self.gpu_seconds(2 * first) - self.gpu_seconds(first)) / first
        many = 4096.0
        per_token = (self.gpu_seconds(2 * many) - self.gpu_seconds(many)) / many
        amortised = 9 * (self.gpu_seconds(many) / per_token - many) if per_token else float("inf")
        balanced = (transfer - self.gpu_seconds(first)) / slope + first if slope else first
        return max(1.0, balanced, amortised)

    def gpu_seconds(self, tokens: float) -> float:
        """Seconds of one layer on the gpu lane, for prompts' tokens without their attention to one another [s]."""
        segments = [node for node in self._graph.nodes if node.kind is Kind.SEGMENT and node.lane == "gpu"]
        threads = 0 if self._machine.cores is None else self._machine.cores.gpu
        return sum(self.node(node, Rows(prefill=tokens), threads) for node in segments)


def _compute(tasks: Sequence[Task], seconds: Sequence[float]) -> list[float]:
    return [length for task, length in zip(tasks, seconds, strict=True) if task.node.lane in COMPUTE]


def profile_shape(model: ModelConfig, precision: Precision) -> str:
    """What a profile's times hold for: the shapes of a model's layers, and the precision."""
    kept = [precision.weights, *dict.fromkeys(dtype for dtype in (precision.experts, precision.others) if dtype)]
    return f"{model.shape}; weights {' '.join(kept)}, KV {precision.kv}"


def _decoding(rows: Rows, share: float) -> Rows:
    """Rows of which each decode has only a share of its experts computed, priced as so many fewer."""
    return rows if share == 1 else rows._replace(decode=share * rows.decode)


def rows_of(stage: Stage, rows: Rows) -> Rows:
    """The rows that a stage's operation takes; one that keeps the KV cache appends those of all."""
    if stage.op.rows is RowClass.ALL or stage.op.keeps_kv:
        return rows._replace(pairs=0.0) if stage.op.keeps_kv else rows
    if stage.op.rows is RowClass.PREFILL:
        return rows._replace(decode=0, context=0, emits=rows.emits - rows.decode)
    return Rows(decode=rows.decode, context=rows.context, emits=rows.decode)
