"""Seconds and bytes of operations and transfers, from their declared work; shared by every reader that predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from workbench.core.errors import ScenarioError
from workbench.core.units import DTYPE_BYTES
from workbench.hardware import Device
from workbench.hardware.profile import OpTime
from workbench.models import ModelConfig
from workbench.pipeline.layer_graph import LayerGraph, Node, NodeKind
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch
from workbench.schedules.plan import WHOLE, Task
from workbench.stages import (
    CutRows,
    PartRows,
    Place,
    Precision,
    RowClass,
    Rows,
    Stage,
    WorkFunction,
    afterwards,
    at_once,
    buffer_bytes,
    copy_seconds,
    decode_attention,
    embed,
    head,
    least_seconds,
    measured_seconds,
    reduce_scatter_seconds,
    seconds,
)

Price = tuple[float, float]
"""Time [s], and bytes read from and written to the host's memory meanwhile [B].

Where lanes share cores, their effect on one another is measured, and the bytes are 0.
"""
Pricer = Callable[[Rows], Price]
_Measured = Callable[[OpTime, Rows], float]
ENDLESS = 1e12
"""More tokens than any iteration has."""
_ENDS = {NodeKind.EMBED: Stage(embed, Place.GPU), NodeKind.HEAD: Stage(head, Place.GPU)}


class TaskCost:
    """Prices the tasks of one scenario."""

    def __init__(self, scenario: Scenario, graph: LayerGraph) -> None:
        self._model = scenario.model
        self._machine = scenario.machine
        self._precision = scenario.precision
        self._graph = graph
        self.profile = scenario.machine.profile(profile_shape(scenario.model, scenario.precision))
        self._summed = set[tuple[str, Place]]() if self.profile else _summed(graph.pipeline.stages, self._model)
        self._kv_in = self._model.kv_elements * DTYPE_BYTES[self._precision.kv]
        self._carried = {id(node): self._carried_bytes(node) for node in graph.all_nodes}
        self._weights = self._streamed_weights(self._model)
        every = self._model.num_hidden_layers
        self._with_experts = self._streamed_weights(replace(self._model, first_k_dense_replace=0, layers=()))
        self._without = self._streamed_weights(replace(self._model, first_k_dense_replace=every, layers=()))

    def _streamed_weights(self, model: ModelConfig) -> dict[int, float]:
        """Bytes of each streamed node in one layer of a model."""
        streams = self._graph.pipeline.streams
        found = {}
        for index in self._graph.streamed:
            streamed = [stage.op for stage in self._graph.nodes[index].stages if streams(stage)]
            found[index] = sum(op.weight_bytes(model, self._precision) for op in streamed)
        return found

    def _carried_bytes(self, node: Node) -> tuple[int, int]:
        """Bytes that a transfer moves per prefill row and per decode row."""
        sizes = [(buffer_bytes(buffer, self._model, self._precision, rows), rows) for buffer, rows in node.carries]
        return (
            sum(size for size, rows in sizes if rows is RowClass.PREFILL),
            sum(size for size, rows in sizes if rows is RowClass.DECODE),
        )

    # --------------------------------------------------------------------------------------------- rows of a batch

    def rows(self, batch: Batch) -> Rows:
        """Rows of a batch at the stages of a mean layer; sliding windows cap pairs and context in some layers."""
        model = self._model
        if not model.windowed_layers:
            return batch.rows
        pairs = model.attended_below(batch.starts + batch.prefill_len).sum() - model.attended_below(batch.starts).sum()
        context = model.attended(batch.context + 1).sum()
        before = model.attended(batch.starts).sum()
        return batch.rows._replace(pairs=float(pairs), context=float(context), before=float(before))

    def part(self, batch: Batch) -> PartRows:
        """Rows of one part of a batch at the stages, layer by layer."""
        rows = self.rows(batch)
        if batch.cut is None:
            return rows
        others = self.rows(batch.decodes_alone)
        passing = rows._replace(emits=len(batch))
        head = rows if batch.at(batch.layers) is batch else others
        return CutRows(passing, others, head, batch.prefill_layers, batch.layers)

    # -------------------------------------------------------------------------------------------------------- bytes

    @property
    def weights_per_layer(self) -> float:
        """Bytes streamed per layer and iteration."""
        return sum(self._weights.values())

    def weight_transfer(self, task: Task) -> float:
        """Bytes that one weight transfer moves: the weights of its nodes in a mean layer, or its page of them."""
        return _of_page(sum(self._weights[node] for _, node in task.weights_of), task)

    def moved_weights(self, task: Task) -> float:
        """Bytes that one weight transfer moves, each layer as it is."""
        return _of_page(self.exact_transfer(task.weights_of), task)

    def exact_transfer(self, weights_of: Sequence[tuple[int, int]]) -> float:
        """Bytes of the weights of these (layer, node) pairs, each layer as it is: with experts or without."""
        kinds = self._model.layer_kinds
        sizes = []
        for layer, node in weights_of:
            of_kind = self._without if kinds[layer].dense else self._with_experts
            sizes.append(of_kind[node])
        return sum(sizes)

    def transfer(self, node: Node, rows: Rows, absent: AbstractSet[str] = frozenset()) -> float:
        """Bytes that a transfer of activations or KV moves for these rows in a layer without the `absent` buffers."""
        if node.kind is NodeKind.KV_IN:
            return (rows.context - rows.decode + rows.before) * self._kv_in
        per_prefill, per_decode = self._carried[id(node)]
        if absent:
            carries = tuple(carried for carried in node.carries if carried[0] not in absent)
            per_prefill, per_decode = self._carried_bytes(replace(node, carries=carries))
        return per_prefill * rows.prefill + per_decode * rows.decode

    def host_bytes(self, node: Node, rows: Rows) -> float:
        """Bytes that a node other than weights reads from or writes to the host's memory in one layer."""
        return self.pricer(node)(rows)[1]

    def expert_bytes(self, parts: Sequence[Batch]) -> float:
        """Expected bytes of routed experts that an iteration reads: each chosen one once per layer and part [B]."""
        model = self._model
        touched = 0.0
        for part in parts:
            passed = len(part.prefill_layers)
            touched += passed * model.touched_experts(len(part.decodes) + int(part.rows.prefill))
            if passed < model.num_hidden_layers:
                touched += (model.num_hidden_layers - passed) * model.touched_experts(len(part.decodes))
        return touched * model.moe_share * model.expert_params * self._precision.expert_bytes

    # ------------------------------------------------------------------------------------------------------ seconds

    def pricer(self, node: Node, threads: int = 0) -> Pricer:
        """The function that prices a node other than weights for any rows of one layer, on `threads` threads.

        Raises
        ------
        ScenarioError
            If an operation declares no work and was not measured.
        """
        if node.lane in ("h2d", "d2h"):
            return lambda rows: self._move(node, rows)
        if node.kind in _ENDS:
            return self._end(node.kind, threads)
        stage = self._late if node.kind is NodeKind.DEFERRED else self._stage
        stages = [stage(each, threads) for each in node.stages]
        on_host = node.lane == "cpu"

        def price(rows: Rows) -> Price:
            total = 0.0
            size = 0.0
            for stage in stages:
                length, moved = stage(rows)
                total += length
                size += moved
            return total, size if on_host else 0.0

        return price

    def _move(self, node: Node, rows: Rows) -> Price:
        """Price of a transfer of activations or KV in one layer."""
        link = self._machine.link
        size = self.transfer(node, rows)
        overhead = link.overhead if self.profile is None else self.profile.move
        return copy_seconds(size, link.h2d if node.lane == "h2d" else link.d2h, overhead), size

    def _stage(self, stage: Stage, threads: int, measured: _Measured = measured_seconds) -> Pricer:
        """The pricer of one stage in one layer: as measured on `threads` threads, or else by the roofline."""
        time = self._time(stage.op.name, threads, self._resident(stage))
        if time is None:
            return self._added_up(stage, self._roofline(self._work(stage), self._device(stage.device, threads)))
        share = 1 - (stage.defer + stage.skip) / self._model.num_experts_per_tok
        return lambda rows: (measured(time, _decoding(rows_of(stage, rows), share)), 0.0)

    def _late(self, stage: Stage, threads: int) -> Pricer:
        """The pricer of the work that one stage defers in one layer."""
        time = self._time(stage.op.name, threads, self._resident(stage))
        if time is None:
            late = self._added_up(stage, self._roofline(afterwards(stage), self._device(stage.device, threads)))
            return lambda rows: late(Rows(decode=rows.decode))
        share = stage.defer / self._model.num_experts_per_tok
        return lambda rows: (
            measured_seconds(time, _decoding(Rows(decode=rows.decode, emits=rows.decode), share)),
            0.0,
        )

    def _end(self, kind: NodeKind, threads: int, measured: _Measured = measured_seconds) -> Pricer:
        """The pricer of the embedding or the head."""
        stage = _ENDS[kind]
        time = self._time(stage.op.name, threads)
        if time is not None:
            last = kind is NodeKind.HEAD
            return lambda rows: (measured(time, Rows(prefill=rows.emits if last else rows.tokens)), 0.0)
        price = self._roofline(self._work(stage), self._device(stage.device, threads))
        return lambda rows: (price(rows)[0], 0.0)

    def _roofline(self, work: WorkFunction, device: Device) -> Pricer:
        model = self._model
        precision = self._precision

        def price(rows: Rows) -> Price:
            done = work(rows, model, precision)
            return seconds(done, device), done.bytes

        return price

    def _added_up(self, stage: Stage, price: Pricer) -> Pricer:
        """The pricer plus the time in which GPUs or sockets add up their partial sums."""
        if not self.adding_up(stage, Rows(decode=1)):
            return price

        def with_sum(rows: Rows) -> Price:
            length, size = price(rows)
            return length + self.adding_up(stage, rows), size

        return with_sum

    def adding_up(self, stage: Stage, rows: Rows) -> float:
        """Time in which the GPUs or sockets of a device add up their partial sums of a stage in one layer [s].

        Every GPU gets the whole sum, with which it computes on; a socket keeps its share, which all can read. It is 0
        where operations were measured, because their times contain it.
        """
        on_gpu = stage.device is Place.GPU
        device = self._machine.gpu if on_gpu else self._machine.cpu
        if device.between is None or (stage.op.name, stage.device) not in self._summed:
            return 0.0
        size = rows.tokens * self._model.hidden_size * DTYPE_BYTES[self._precision.weights]
        return (2 if on_gpu else 1) * reduce_scatter_seconds(size, device.count, device.between)

    def _work(self, stage: Stage) -> WorkFunction:
        """Work of a stage when its layer runs; for decode attention on a GPU, in the precision that prices it there."""
        work = at_once(stage)
        if work is None:
            raise ScenarioError(
                f"op {stage.op.name!r} declares no work, so it cannot be priced; give Op(..., work=...)."
            )
        dtype = self.decodes_at
        if dtype is None or stage.device is not Place.GPU or stage.op != decode_attention:
            return work
        return lambda *given: work(*given)._replace(dtype=dtype)

    @property
    def decodes_at(self) -> str | None:
        """Precision that prices decode attention on a GPU without an fp32 rate: that of the KV cache; else None.

        Matrix units take 16-bit keys and values and sum in fp32, as in MoE-Lightning's model. The operation declares
        fp32, which is right for the kernel for CPUs.
        """
        return None if "fp32" in dict(self._machine.gpu.flops) else self._precision.kv

    def _time(self, op: str, threads: int, resident: bool = False) -> OpTime | None:
        return self.profile.find(op, threads, resident=resident) if self.profile is not None and threads else None

    def _resident(self, stage: Stage) -> bool:
        """True if a stage has weights and no transfer brings them."""
        return stage.op.has_weights and not self._graph.pipeline.streams(stage)

    def _device(self, place: Place, threads: int) -> Device:
        """The device, with its rates scaled to `threads` if it was measured with another number."""
        device = self._machine.gpu if place is Place.GPU else self._machine.cpu
        cores = self._machine.cores
        if cores is None or not threads:
            return device
        own = cores.gpu if place is Place.GPU else cores.cpu
        if threads == own:
            return device
        rates = tuple((dtype, rate * threads / own) for dtype, rate in device.flops)
        return replace(device, flops=rates, bandwidth=device.bandwidth * threads / own)

    def node(self, node: Node, rows: Rows, threads: int = 0) -> float:
        """Time of a node other than weights for these rows in one layer [s]."""
        return self.pricer(node, threads)(rows)[0]

    def call(self, stage: Stage, threads: int = 0) -> Pricer:
        """The pricer of one call of a stage in one layer, including the experts that it defers."""
        price = self._stage(stage, threads)
        if not stage.defer:
            return price
        late = self._late(stage, threads)

        def both(rows: Rows) -> Price:
            at_once = price(rows)
            afterwards = late(rows)
            return at_once[0] + afterwards[0], at_once[1] + afterwards[1]

        return both

    def least(self, stage: Stage, total: Rows, threads: int = 0) -> float:
        """Least time of one stage in one layer for all of these rows, however they are split into calls [s]."""
        return self._stage(stage, threads, least_seconds)(total)[0]

    def least_ends(self, kind: NodeKind, total: Rows, threads: int = 0) -> float:
        """Least time of the embedding or the head, as `least` [s]."""
        return self._end(kind, threads, least_seconds)(total)[0]

    def fetch(self, size: float) -> float:
        """Time of one transfer of weights [s]."""
        link = self._machine.link
        return copy_seconds(size, link.h2d, link.overhead if self.profile is None else self.profile.fetch)

    def token_budget(self) -> float:
        """Tokens whose GPU work takes as long as one layer's weights take to stream; infinite if none do.

            n = (t_transfer - a) / c,    t_gpu(n) = a + c n    (MoE-Lens' pipeline profiler)

        If the link is so fast that this is few tokens or none, it is the number of tokens with which the GPU spends
        less than a tenth of its time on reading weights and on fixed costs: the link is hidden in any case, and smaller
        batches only repeat that work.
        """
        transfer = self.fetch(self.weights_per_layer)
        if not transfer or self.gpu_seconds(ENDLESS) < transfer:
            return float("inf")
        first = 1.0
        while self.gpu_seconds(first) < transfer:
            first *= 2
        slope = (self.gpu_seconds(2 * first) - self.gpu_seconds(first)) / first
        balanced = (transfer - self.gpu_seconds(first)) / slope + first if slope else first
        return max(1.0, balanced, self._amortising_tokens())

    def _amortising_tokens(self) -> float:
        """Tokens from which on nine tenths of the GPU's time are proportional to them, to a thousandth."""
        per_token = self.gpu_seconds(ENDLESS) / ENDLESS
        few = 1.0
        enough = 1.0
        while 0.9 * self.gpu_seconds(enough) > per_token * enough:
            few = enough
            enough = 2 * enough
        while enough - few > 1e-3 * enough:
            middle = (few + enough) / 2
            few, enough = (middle, enough) if 0.9 * self.gpu_seconds(middle) > per_token * middle else (few, middle)
        return enough

    def gpu_seconds(self, tokens: float) -> float:
        """Time of one layer on the gpu lane for prompt tokens, without their attention to one another [s]."""
        segments = [node for node in self._graph.nodes if node.kind is NodeKind.SEGMENT and node.lane == "gpu"]
        threads = 0 if self._machine.cores is None else self._machine.cores.gpu
        return sum(self.node(node, Rows(prefill=tokens), threads) for node in segments)


def _of_page(size: float, task: Task) -> float:
    """The bytes of a weight transfer's page."""
    if task.page is WHOLE:
        return size
    begin, end = task.page.cut(size)
    return end - begin


def _summed(stages: Sequence[Stage], model: ModelConfig) -> set[tuple[str, Place]]:
    """Stages after which the GPUs or sockets of a device add up their partial sums, if every matrix is split over them.

    The partial sums of routed and shared experts are added up after `combine`, if that is on their device: one addition
    serves both. Partial sums of the residual stream are added up at once.
    """

    def adder(stage: Stage) -> Stage:
        written = set(stage.op.writes) - {"x"}
        for other in stages:
            if other.device is stage.device and not other.op.in_parts and written & set(other.op.reads):
                return other
        return stage

    return {(adder(s).op.name, s.device) for s in stages if s.op.in_parts and s.op.elements(model)}


def profile_shape(model: ModelConfig, precision: Precision) -> str:
    """Key of the times in a profile: the shapes of a model's layers, and the precision."""
    kept = [precision.weights, *dict.fromkeys(dtype for dtype in (precision.experts, precision.others) if dtype)]
    return f"{model.shape}; weights {' '.join(kept)}, KV {precision.kv}"


def _decoding(rows: Rows, share: float) -> Rows:
    """Rows whose decodes have only a share of their experts computed; they are priced as a share of the decodes."""
    return rows if share == 1 else rows._replace(decode=share * rows.decode)


def rows_of(stage: Stage, rows: Rows) -> Rows:
    """The rows that a stage takes; one that keeps the KV cache takes all rows and stores their keys and values."""
    if stage.op.rows is RowClass.ALL or stage.op.keeps_kv:
        return rows._replace(pairs=0.0) if stage.op.keeps_kv else rows
    if stage.op.rows is RowClass.PREFILL:
        return rows._replace(decode=0, context=0, emits=rows.emits - rows.decode)
    return Rows(decode=rows.decode, context=rows.context, emits=rows.decode)
