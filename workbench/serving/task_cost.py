"""Seconds and bytes of operations and transfers, from their declared work; shared by every reader that predicts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import count as numbers

from workbench.core.errors import ScenarioError
from workbench.core.units import DTYPE_BYTES
from workbench.hardware import Device, Link, Machine
from workbench.hardware.profile import Losses, OpTime
from workbench.models import ModelConfig
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.pipeline.stack_graph import Piece, StackGraph
from workbench.scheduler.batch import Batch
from workbench.schedules.plan import WHOLE, Task
from workbench.stages import (
    Chosen,
    CutRows,
    KindRows,
    Op,
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
    experts,
    head,
    least_seconds,
    measured_seconds,
    reduce_scatter_seconds,
    seconds,
)
from workbench.workload import UNIFORM, Routing

Price = tuple[float, float]
"""Time [s], and bytes read from and written to the host's memory meanwhile [B].

Where operations were measured, so was the lanes' effect on one another, and the bytes are 0.
"""
Pricer = Callable[[Rows], Price]
_Measured = Callable[[OpTime, Rows, float], float]
ENDLESS = 1e12
"""More tokens than any iteration has."""
_ANSWERS = 16
"""Answers that a pricer keeps: at least one for each part of a batch."""
_KEPT = 64
"""Numbers of models on machines that are kept."""
_UNUSED = numbers()
_ANY_LINK = Link(1.0, 1.0)
_ENDS = {NodeKind.EMBED: Stage(embed, Place.GPU), NodeKind.HEAD: Stage(head, Place.GPU)}


class TaskCost:
    """Prices the tasks of a stack on a machine, each layer as what it is: of its pipeline, and of its kind."""

    def __init__(
        self, stack: StackGraph, model: ModelConfig, machine: Machine, precision: Precision, routing: Routing
    ) -> None:
        self._model = model
        self._machine = machine
        self._precision = precision
        self._stack = stack
        self.profile = machine.profile(profile_shape(model, precision))
        kinds = dict.fromkeys(stack.kind(layer) for layer in range(stack.layers))
        self._models = {kind: self._model if kind is None else self._model.of_kind(kind) for kind in kinds}
        graphs = {} if self.profile else {id(graph): graph for graph in stack.graphs}
        self._summed = {key: _summed(graph.pipeline.stages, self._model) for key, graph in graphs.items()}
        self._routing = routing
        self._given = _number(model, machine, precision, routing)
        self._of_stages = _number(model, _that_computes(machine), precision, routing)
        self._marks: dict[Hashable, int] = {}
        self._unused = numbers()
        self._pricers: dict[Hashable, Pricer] = {}  # of stages that several sorts of layers have
        self._shares: dict[tuple[int, tuple[int, ...]], Chosen] = {}  # of layers and experts
        self._weights: dict[tuple[int, int, RowClass | None], float] = {}  # by sort of layer, node, and rows

    # --------------------------------------------------------------------------------------------- rows of a batch

    def part(self, batch: Batch) -> PartRows:
        """Rows of one part of a batch at the stages, layer by layer."""
        if self.plain:
            return _rows_of_part(batch, self._model)
        return self.by_kind(lambda model: _rows_of_part(batch, model))

    @property
    def plain(self) -> bool:
        """True if the rows of whole prompts are those of the batch at every layer."""
        return not (self._model.windowed_layers or self._model.unlike or self._model.sparse)

    def by_kind(self, count: Callable[[ModelConfig], Rows | CutRows]) -> PartRows:
        """Rows layer by layer, from a function that counts them for a model whose layers are all of one kind."""
        if not (self._model.unlike or 0 < self._model.windowed_layers < self._model.num_hidden_layers):
            return count(self._model)
        kinds = list(self._models)
        places = tuple(kinds.index(self._stack.kind(layer)) for layer in range(self._stack.layers))
        return KindRows(tuple(count(self._models[kind]) for kind in kinds), places)

    # -------------------------------------------------------------------------------------------------------- bytes

    @cached_property
    def weights_per_layer(self) -> float:
        """Bytes streamed per layer and iteration with rows of both classes, mean over the layers."""
        return sum(self.layer_weights(layer) for layer in range(self._stack.layers)) / self._stack.layers

    @cached_property
    def losses(self) -> Losses | None:
        """Time that the plans lose between tasks and by contention, as measured; None without a profile."""
        if self.profile is None:
            return None
        attends = any(stage.device is Place.CPU and stage.op.keeps_kv for stage in self._every_stage)
        return self.profile.losses(streams=self._streams, attends=attends)

    @property
    def _streams(self) -> bool:
        """True if weights of any layer are streamed, all of them or those of chosen experts."""
        sorts = (layer for layer, _ in self._stack.alike)
        return any(self._stack.streams(stage, layer) for layer in sorts for stage in self._stack.stages(layer))

    @property
    def _every_stage(self) -> Iterator[Stage]:
        """The stages of all kinds of layers."""
        for layer, _ in self._stack.alike:
            yield from self._stack.stages(layer)

    def model_at(self, layer: int) -> ModelConfig:
        """The model whose layers are all like this one."""
        return self._models[self._stack.kind(layer)]

    def layer_weights(self, layer: int, rows: RowClass | None = RowClass.ALL) -> float:
        """Bytes of a layer's streamed weights that such rows are computed with."""
        return sum(self._node_weights(layer, node, rows) for node in self._stack.streamed(layer))

    def weight_transfer(self, task: Task, parts: Sequence[PartRows] | None = None) -> float:
        """Bytes that one weight transfer moves, or its page of them, if the parts have these rows.

        Without parts, and for the next iteration, it moves all weights.
        """
        size = sum(
            self._node_weights(*pair, rows) for pair, rows in zip(task.weights_of, present(task, parts), strict=True)
        )
        if task.page is WHOLE:
            return size
        begin, end = task.page.cut(size)
        return end - begin

    def exact_transfer(self, weights_of: Sequence[tuple[int, int]], rows: RowClass = RowClass.ALL) -> float:
        """Bytes of the weights of these (layer, node) pairs that such rows are computed with."""
        return sum(self._node_weights(layer, node, rows) for layer, node in weights_of)

    def _node_weights(self, layer: int, index: int, rows: RowClass | None) -> float:
        """Bytes of one node's streamed weights that such rows are computed with."""
        nodes = self._stack.at(layer)
        key = (id(nodes), index, rows)
        if key not in self._weights:
            node = nodes[index]
            pieces = () if node is None else self._stack.wanted(node, layer, rows)
            model = self.model_at(layer)
            self._weights[key] = sum(piece.op.weight_bytes(model, self._precision, layer) for piece in pieces)
        return self._weights[key]

    def transfer(self, node: Node, rows: Rows, layer: int = 0) -> float:
        """Bytes that a transfer of activations or KV moves for these rows in one layer."""
        return 0.0 if node.idle else self._moved(node, layer)(rows)

    def _fetched_kv(self, layer: int, rows: Rows) -> float:
        """Bytes of the KV of one layer that these rows read, without their own."""
        each = self.model_at(layer).kv_elements * DTYPE_BYTES[self._precision.kv]
        return (rows.context - rows.decode + rows.before) * each

    def _per_row(self, node: Node, layer: int) -> tuple[float, float]:
        """Bytes that a transfer of activations moves per prefill row and per decode row."""
        model = self.model_at(layer)
        sizes = [(buffer_bytes(buffer, model, self._precision, rows), rows) for buffer, rows in node.carries]
        prefill = sum(size for size, rows in sizes if rows is RowClass.PREFILL)
        decode = sum(size for size, rows in sizes if rows is RowClass.DECODE)
        return prefill, decode

    def host_bytes(self, node: Node, rows: Rows, layer: int = 0) -> float:
        """Bytes that a node other than weights reads from or writes to the host's memory in one layer."""
        return self.pricer(node, layer=layer)(rows)[1]

    def expert_bytes(self, parts: Sequence[Batch]) -> float:
        """Expected bytes of routed experts that an iteration reads: each chosen one once per stage and part [B]."""
        return self.experts_read(
            [
                (int(part.rows.prefill), len(part.decodes), None if part.cut is None else part.prefill_layers)
                for part in parts
            ]
        )

    def experts_read(self, parts: Sequence[tuple[float, float, range | None]]) -> float:
        """See `expert_bytes`; of each part prefill tokens, decodes, and the layers that prefills pass if cut."""
        each = self._model.num_experts_per_tok
        total = 0.0
        for prefill, decodes, cut in parts:
            for op, layers, chosen in self._reading:
                fewer = decodes if op.rows is not RowClass.PREFILL else 0
                more = fewer + (prefill if op.rows is not RowClass.DECODE else 0)
                passed = len(layers)
                if cut is not None:
                    passed = sum(layer in cut for layer in layers)
                    total += (len(layers) - passed) * chosen.touched(fewer, each)
                total += passed * chosen.touched(more, each)
        return total * self._model.expert_params * experts.bytes_each(self._model, self._precision)

    @cached_property
    def _reading(self) -> list[tuple[Op, list[int], Chosen]]:
        """Operations that compute routed experts, with the layers of one sort that have them and what they get."""
        layers: dict[int, list[int]] = {}
        for layer in range(self._stack.layers):
            layers.setdefault(id(self._stack.at(layer)), []).append(layer)
        found = list[tuple[Op, list[int], Chosen]]()
        for alike in layers.values():
            for stage in self._stack.stages(alike[0]):
                if stage.op.plain is experts:
                    found.append((stage.op, alike, self._chosen(stage.op, alike[0])))
        return found

    def _chosen(self, op: Op, layer: int) -> Chosen:
        """The expected share of a layer's routing that an operation of routed experts gets."""
        model = self._model
        every = model.num_local_experts
        members = range(every) if op.subset is None else op.subset.of(layer, every)
        key = (layer, tuple(members))
        if key not in self._shares:
            touched = self._routing.touching(model, layer, members)
            self._shares[key] = Chosen(self._routing.share(model, layer, members), touched)
        return self._shares[key]

    # ------------------------------------------------------------------------------------------------------ seconds

    def pricer(self, node: Node, threads: int = 0, layer: int = 0) -> Pricer:
        """The function that prices a node other than weights for any rows of one layer, on `threads` threads.

        Raises
        ------
        ScenarioError
            If an operation declares no work and was not measured.
        """
        if node.lane in ("h2d", "d2h"):
            return self._move(node, layer)
        if node.kind in _ENDS:
            return self._end(node.kind, threads)
        stage = self._late if node.kind is NodeKind.DEFERRED else self._stage
        stages = [stage(each, threads, layer) for each in node.stages]
        on_host = node.lane == "cpu"

        def price(rows: Rows) -> Price:
            total = 0.0
            size = 0.0
            for stage in stages:
                length, moved = stage(rows)
                total += length
                size += moved
            return total, size if on_host else 0.0

        return self._in_one_call(price, node, threads, layer) if self.is_in_one_call(node, layer) else price

    def is_in_one_call(self, node: Node, layer: int) -> bool:
        """True if a node has all stages of a layer, and few decodes were measured to pass them in one call."""
        measured = self.profile is not None and self.profile.in_one_call is not None
        return measured and node.kind is NodeKind.SEGMENT and self._stack.is_whole(node.stages, layer)

    def _in_one_call(self, one_by_one: Pricer, node: Node, threads: int, layer: int) -> Pricer:
        """The pricer less what one call saves, but never less than the least times of the stages add up to."""
        measured = None if self.profile is None else self.profile.in_one_call
        least = self.least_of(node, threads, layer)

        def price(rows: Rows) -> Price:
            length, size = one_by_one(rows)
            saved = measured.saves(rows.prefill, rows.decode, rows.context) if measured is not None else 0.0
            return max(length - saved, least(rows)[0]) if saved else length, size

        return price

    def least_of(self, node: Node, threads: int = 0, layer: int = 0) -> Pricer:
        """The pricer of all calls of a node's stages in one layer, as `least`."""
        stages = [self.least(each, threads, layer) for each in node.stages]
        return lambda rows: (sum(stage(rows)[0] for stage in stages), 0.0)

    def _move(self, node: Node, layer: int) -> Pricer:
        """The pricer of a transfer of activations, KV or chosen experts in one layer."""
        link = self._machine.link
        rate = link.h2d if node.lane == "h2d" else link.d2h
        overhead = link.overhead if self.losses is None else self.losses.move
        if node.idle:
            return lambda rows: (0.0, 0.0)
        size_of = self._moved(node, layer)

        def price(rows: Rows) -> Price:
            size = size_of(rows)
            return copy_seconds(size, rate, overhead), size

        return price

    def _moved(self, node: Node, layer: int) -> Callable[[Rows], float]:
        """The bytes that a transfer of activations, KV or chosen experts moves."""
        if node.kind is NodeKind.KV_IN:
            return partial(self._fetched_kv, layer)
        if node.kind is NodeKind.EXPERTS_IN:
            return partial(self._chosen_experts, node.stages, layer)
        per_prefill, per_decode = self._per_row(node, layer)
        recurrence = self.model_at(layer).recurrence
        if recurrence is None or ("k", RowClass.PREFILL) not in node.carries:
            return lambda rows: per_prefill * rows.prefill + per_decode * rows.decode
        state = recurrence.state * DTYPE_BYTES["fp32"]  # in the place of the keys and values of a prompt
        return lambda rows: per_prefill * rows.prefill + per_decode * rows.decode + state * (rows.emits - rows.decode)

    def _chosen_experts(self, stages: Sequence[Stage], layer: int, rows: Rows) -> float:
        """Expected bytes of the streamed experts that rows are routed to in one layer."""
        each = self._model.num_experts_per_tok
        total = 0.0
        for stage in stages:
            tokens = rows_of(stage, rows).tokens
            for piece in self._stack.pieces(stage, layer):
                if piece.streamed:
                    whole = piece.op.weight_bytes(self.model_at(layer), self._precision, layer)
                    count = piece.op.members(self._model, layer)
                    touched = self._chosen(piece.op, layer).touched(tokens, each)
                    total += whole * touched / count if count else 0.0
        return total

    def _stage(self, stage: Stage, threads: int, layer: int, measured: _Measured = measured_seconds) -> Pricer:
        """The pricer of one stage in one layer: as measured on `threads` threads, or else by the roofline."""
        if measured is not measured_seconds or len(self._stack.alike) == 1:
            return self._new_stage(stage, threads, layer, measured)
        key = (threads, self._stage_key(stage, layer))
        if key not in self._pricers:
            self._pricers[key] = _remembering(self._new_stage(stage, threads, layer, measured))
        return self._pricers[key]

    def mark(self, node: Node, layer: int) -> int:
        """A number that nodes share which cost the same with equal rows."""
        return self._marks.setdefault(self.price_key(node, layer), next(self._unused))

    def price_key(self, node: Node, layer: int) -> Hashable:
        """A mark that is equal for nodes that cost the same for a batch; layers of unlike kinds have unlike rows."""
        pieces = tuple[Piece, ...]()
        if node.kind is NodeKind.EXPERTS_IN:
            pieces = tuple(piece for stage in node.stages for piece in self._stack.pieces(stage, layer))
        stages = tuple(self._stage_key(stage, layer) for stage in node.stages)
        at_once = self.is_in_one_call(node, layer)
        return node.kind, node.lane, node.carries, node.idle, stages, pieces, at_once, self._stack.kind(layer)

    def call_key(self, what: Stage | Node, layer: int) -> Hashable:
        """A mark that is equal for stages, and for nodes, of any wiring that cost the same with equal rows."""
        if isinstance(what, Stage):
            return self._of_stages, self._stage_key(what, layer)
        if what.kind in _ENDS:
            return self._of_stages, what.kind
        return self._given, self.price_key(what, layer), self.losses

    def _stage_key(self, stage: Stage, layer: int) -> Hashable:
        """A mark that is equal for stages of layers that cost the same with equal rows."""
        routed: Hashable = None
        if stage.op.plain is experts:
            routed = (stage.op.members(self._model, layer), self._routing.mark(layer))
            if self._routing != UNIFORM:
                routed = (routed, stage.op.subset, layer)
        summed = self._adds_up(stage, layer)
        return stage, self._stack.kind(layer), self._resident(stage, layer), summed, routed

    def _new_stage(self, stage: Stage, threads: int, layer: int, measured: _Measured) -> Pricer:
        """See `_stage`."""
        time = self._time(stage.op.plain.name, threads, self._resident(stage, layer))
        if time is None:
            price = self._roofline(self._work(stage, layer), self._device(stage.device, threads), layer)
            return self._added_up(stage, price, layer)
        share = 1 - (stage.defer + stage.skip) / self._model.num_experts_per_tok
        of_set = self._share_of_whole(stage, layer, measured)
        return lambda rows: (of_set(rows) * measured(time, rows_of(stage, rows), share), 0.0)

    def _share_of_whole(self, stage: Stage, layer: int, measured: _Measured) -> Callable[[Rows], float]:
        """Time of some of the routed experts over that of all, which was measured.

        A call takes their share of the pairs or of the experts that are read, whichever is larger. The least time
        counts the share of the pairs alone, which no call falls below.
        """
        if stage.op.subset is None:
            return lambda rows: 1.0
        chosen = self._chosen(stage.op, layer)
        whole = self._chosen(experts, layer)
        each = self._model.num_experts_per_tok
        if measured is least_seconds:
            return lambda rows: chosen.share

        def share(rows: Rows) -> float:
            tokens = rows_of(stage, rows).tokens
            return max(chosen.share, chosen.touched(tokens, each) / whole.touched(tokens, each)) if tokens else 0.0

        return share

    def _late(self, stage: Stage, threads: int, layer: int) -> Pricer:
        """The pricer of the work that one stage defers in one layer."""
        time = self._time(stage.op.name, threads, self._resident(stage, layer))
        if time is None:
            work = afterwards(stage, self._chosen(stage.op, layer))
            price = self._roofline(work, self._device(stage.device, threads), layer)
            late = self._added_up(stage, price, layer)
            return lambda rows: late(Rows(decode=rows.decode))
        share = stage.defer / self._model.num_experts_per_tok
        return lambda rows: (
            measured_seconds(time, Rows(decode=rows.decode, emits=rows.decode), share),
            0.0,
        )

    def _end(self, kind: NodeKind, threads: int, measured: _Measured = measured_seconds) -> Pricer:
        """The pricer of the embedding or the head."""
        stage = _ENDS[kind]
        time = self._time(stage.op.name, threads)
        if time is not None:
            last = kind is NodeKind.HEAD
            return lambda rows: (measured(time, Rows(prefill=rows.emits if last else rows.tokens), 1.0), 0.0)
        price = self._roofline(self._work(stage, 0), self._device(stage.device, threads))
        return lambda rows: (price(rows)[0], 0.0)

    def _roofline(self, work: WorkFunction, device: Device, layer: int = 0) -> Pricer:
        model = self.model_at(layer)
        precision = self._precision

        def price(rows: Rows) -> Price:
            done = work(rows, model, precision)
            return seconds(done, device), done.bytes

        return price

    def _added_up(self, stage: Stage, price: Pricer, layer: int) -> Pricer:
        """The pricer plus the time in which GPUs or sockets add up their partial sums."""
        if not self.adding_up(stage, Rows(decode=1), layer):
            return price

        def with_sum(rows: Rows) -> Price:
            length, size = price(rows)
            return length + self.adding_up(stage, rows, layer), size

        return with_sum

    def adding_up(self, stage: Stage, rows: Rows, layer: int = 0) -> float:
        """Time in which the GPUs or sockets of a device add up their partial sums of a stage in one layer [s].

        Every GPU gets the whole sum, with which it computes on; a socket keeps its share, which all can read. It is 0
        where operations were measured, because their times contain it.
        """
        on_gpu = stage.device is Place.GPU
        device = self._machine.gpu if on_gpu else self._machine.cpu
        if self.profile or device.between is None:
            return 0.0
        if not self._adds_up(stage, layer):
            return 0.0
        tokens = rows_of(stage, rows).tokens
        size = tokens * self._model.hidden_size * DTYPE_BYTES[self._precision.weights]
        return (2 if on_gpu else 1) * reduce_scatter_seconds(size, device.count, device.between)

    def _adds_up(self, stage: Stage, layer: int) -> bool:
        """True if the partial sums of GPUs or sockets are added up after this stage of a layer."""
        if not self._summed:
            return False
        return (stage.op.name, stage.device) in self._summed[id(self._stack.graph(layer))]

    def _work(self, stage: Stage, layer: int) -> WorkFunction:
        """Work of a stage when its layer runs; for decode attention on a GPU, in the precision that prices it there."""
        usual = stage.op.plain is not experts or (stage.op.subset is None and self._routing == UNIFORM)
        work = at_once(stage, None if usual else self._chosen(stage.op, layer))
        if work is None:
            raise ScenarioError(
                f"op {stage.op.name!r} declares no work, so it cannot be priced; give Op(..., work=...)."
            )
        dtype = self.decodes_at
        if dtype is None or stage.device is not Place.GPU or stage.op != decode_attention:
            return work
        return lambda *given: work(*given)._replace(dtype=dtype)

    def flops(self, stage: Stage, rows: Rows, layer: int = 0) -> float:
        """FLOP of a stage for these rows in one layer, of those experts that it does not defer."""
        return self._work(stage, layer)(rows_of(stage, rows), self.model_at(layer), self._precision).flops

    @property
    def decodes_at(self) -> str | None:
        """Precision that prices decode attention on a GPU without an fp32 rate: that of the KV cache; else None.

        Matrix units take 16-bit keys and values and sum in fp32, as in MoE-Lightning's model. The operation declares
        fp32, which is right for the kernel for CPUs.
        """
        return None if "fp32" in dict(self._machine.gpu.flops) else self._precision.kv

    def _time(self, op: str, threads: int, resident: bool = False) -> OpTime | None:
        return None if self.profile is None else self.profile.find(op, threads, resident=resident)

    def _resident(self, stage: Stage, layer: int) -> bool:
        """True if a stage has weights and no transfer brings them."""
        return stage.op.has_weights and not self._stack.streams(stage, layer)

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

    def node(self, node: Node, rows: Rows, threads: int = 0, layer: int = 0) -> float:
        """Time of a node other than weights for these rows in one layer [s]."""
        return self.pricer(node, threads, layer)(rows)[0]

    def call(self, stage: Stage, threads: int = 0, layer: int = 0) -> Pricer:
        """The pricer of one call of a stage in one layer, including the experts that it defers."""
        price = self._stage(stage, threads, layer)
        if not stage.defer:
            return price
        late = self._late(stage, threads, layer)

        def both(rows: Rows) -> Price:
            at_once = price(rows)
            afterwards = late(rows)
            return at_once[0] + afterwards[0], at_once[1] + afterwards[1]

        return both

    def least(self, stage: Stage, threads: int = 0, layer: int = 0) -> Pricer:
        """The pricer of all calls of a stage in one layer: the least for the rows of all, however they are split."""
        return self._stage(stage, threads, layer, least_seconds)

    def least_ends(self, kind: NodeKind, threads: int = 0) -> Pricer:
        """The pricer of all calls of the embedding or the head, as `least`."""
        return self._end(kind, threads, least_seconds)

    def fetch(self, size: float) -> float:
        """Time of one transfer of weights [s]."""
        link = self._machine.link
        return copy_seconds(size, link.h2d, link.overhead if self.profile is None else self.profile.fetch)

    @cached_property
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
        """Time of a layer on the gpu lane for prompt tokens, without their attention to one another, mean [s]."""
        rows = Rows(prefill=tokens)
        total = sum(count * price(rows)[0] for count, price in self._segments_on_gpu)
        return total / self._stack.layers

    @cached_property
    def _segments_on_gpu(self) -> list[tuple[int, Pricer]]:
        """The prices of the segments of the gpu lane, each with the number of layers that have it."""
        threads = 0 if self._machine.cores is None else self._machine.cores.gpu
        found = list[tuple[int, Pricer]]()
        for layer, count in self._stack.alike:
            for node in self._stack.at(layer):
                if node is not None and node.kind is NodeKind.SEGMENT and node.lane == "gpu":
                    found.append((count, self.pricer(node, threads, layer)))
        return found


@lru_cache(maxsize=_KEPT)
def _number(model: ModelConfig, machine: Machine, precision: Precision, routing: Routing) -> int:
    """A number that only equal ones share, for keys: these take long to hash."""
    return next(_UNUSED)


def _that_computes(machine: Machine) -> Machine:
    """The machine with any link and any GPU memory, on neither of which the time of a stage depends."""
    return replace(machine, link=_ANY_LINK, throttled=False, gpu=replace(machine.gpu, memory=1.0))


def _rows_of_part(batch: Batch, model: ModelConfig) -> Rows | CutRows:
    """Rows of one part of a batch at the layers of a model of one kind."""
    rows = _rows(batch, model)
    if batch.cut is None:
        return rows
    others = _rows(batch.decodes_alone, model)
    passing = rows._replace(emits=len(batch))
    head = rows if batch.at(batch.layers) is batch else others
    return CutRows(passing, others, head, batch.prefill_layers, batch.layers)


def _rows(batch: Batch, model: ModelConfig) -> Rows:
    """Rows of a batch at the stages of a layer; a sliding window or an index caps pairs and context."""
    if not (model.windowed_layers or model.sparse):
        return batch.rows
    pairs = model.attended_below(batch.starts + batch.prefill_len).sum() - model.attended_below(batch.starts).sum()
    context = model.attended(batch.context + 1).sum()
    before = model.attended(batch.starts).sum()
    scored = model.indexed(batch.rows.pairs)
    scanned = model.indexed(batch.rows.context)
    return batch.rows._replace(
        pairs=float(pairs), context=float(context), before=float(before), scored=scored, scanned=scanned
    )


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


def rows_of(stage: Stage, rows: Rows) -> Rows:
    """The rows that a stage takes; one that keeps the KV cache takes all rows and stores their keys and values."""
    if stage.op.rows is RowClass.ALL or stage.op.keeps_kv:
        return rows._replace(pairs=0.0) if stage.op.keeps_kv else rows
    if stage.op.rows is RowClass.PREFILL:
        return rows._replace(decode=0, context=0, emits=rows.emits - rows.decode)
    return Rows(decode=rows.decode, context=rows.context, emits=rows.decode)


def _remembering(price: Pricer) -> Pricer:
    """The pricer, which keeps its last few answers: in an iteration many layers ask for the same rows."""
    known: dict[Rows, Price] = {}

    def priced(rows: Rows) -> Price:
        found = known.get(rows)
        if found is None:
            if len(known) >= _ANSWERS:
                known.clear()
            found = known[rows] = price(rows)
        return found

    return priced


def present(task: Task, parts: Sequence[PartRows] | None) -> tuple[RowClass | None, ...]:
    """The rows in each layer whose weights a transfer brings: all without parts, and for the next iteration."""
    if parts is None or task.for_next:
        return (RowClass.ALL,) * len(task.weights_of)
    found = list[RowClass | None]()
    for layer, _ in task.weights_of:
        there = [rows.at(layer) for rows in parts]
        prefill = any(rows.prefill for rows in there)
        found.append(RowClass.of(prefill=prefill, decode=any(rows.decode for rows in there)))
    return tuple(found)
