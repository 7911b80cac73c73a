"""The model in memory: computes every node of a plan on the buffers of a batch's parts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from tqdm.auto import tqdm

from workbench.core.errors import EngineError
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver, HostStream
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.transfer import Copy, Transfer, copy_over
from workbench.engine.loading.checkpoint import TORCH_DTYPES
from workbench.engine.loading.stored import FORMATS, smallest
from workbench.engine.loading.tensors import Tensors
from workbench.engine.model import few_rows
from workbench.engine.model.few_rows import FewRows
from workbench.engine.model.kv_cache import FetchedKV, KVCache
from workbench.engine.model.latent import SPLIT, ByClass, LatentCache, LatentOps
from workbench.engine.model.operations import OPERATIONS
from workbench.engine.model.ops import Ops, RowLayout, added
from workbench.engine.model.routed import Group, RoutedExperts
from workbench.engine.model.weights import Weights, WeightStore
from workbench.engine.model.whole_layers import Run, Whole, WholeLayers
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.scheduler.batch import Batch
from workbench.schedules.base import Step
from workbench.schedules.plan import WHOLE, Page
from workbench.serving.capacity import ledger, positions
from workbench.serving.prepared import Prepared
from workbench.stages import Place, RowClass, Stage, buffer_row, experts, out_proj, prefill_attention, qkv

Key = tuple[Place, int, str]
"""Device, number of the part, and name of the buffer."""


class Forward:
    """Weights, KV cache and buffers of one scenario.

    A method works on one part of a batch, in one layer; none starts a thread. In all of them `part` is the number of
    the part and `layout` tells where its rows are. `decodes` counts the decode tokens of all plans so far.
    """

    def __init__(self, prepared: Prepared, control: Control | None = None, driver: Driver | None = None) -> None:
        self._prepared = prepared
        scenario = prepared.scenario
        self._control = control or Control()
        self._driver = driver or HostDriver()
        self._stream = self._driver.stream("gpu")
        self._model = scenario.model
        self._stack = prepared.lowering.stack
        latent = bool(self._model.kv_lora_rank)
        kind = LatentOps if latent else Ops
        cache = LatentCache if latent else KVCache
        self._compile(kind, cache)  # before anything is loaded: the code stays with the process when the model goes
        self._control.phase = "reading the weights"
        store = WeightStore(self._model, scenario.precision, self._stack, self._control, self._driver)
        slots = prepared.lowering.schedule.weight_slots
        self._weights = Weights(store, self._stack, prepared.slot_bytes, slots, self._control)
        self._tables = store.tables
        workload = scenario.workload
        longest = int((workload.prompt_len + workload.output_len).max()) - 1  # the last token is never read
        held = positions(scenario)
        host = kind(self._model, self._control, self._tables, longest, held)
        self._ops = host
        if not self._driver.on_host:
            self._ops = kind(self._model, self._control, self._tables, longest, held, self._driver.device)
        self._few = FewRows(self._model, host.angles, self._tables)
        places = {Place.GPU: self._ops, Place.CPU: host}
        layers = range(self._model.num_hidden_layers)
        self._layers = {place: ops.of_layers() for place, ops in places.items()}
        self.routed = RoutedExperts(self._model, self._layers, self._weights, self._few, self._driver)
        self._missing = {
            (stage.op, layer): self._stack.missing(stage, layer)
            for layer in range(self._stack.layers)
            for stage in self._stack.pipeline(layer).stages
        }
        self._buffers: dict[Key, torch.Tensor] = {}
        self._of_no_stream: set[Key] = set()
        self._placing = threading.Lock()
        self._fetched: dict[tuple[int, int], FetchedKV] = {}  # by layer and part
        self._hidden: dict[int, dict[Place, torch.Tensor]] = {}  # rows of in-flight prefills, by request
        self._ran: set[tuple[int, str, Place]] = set()  # layers, their operations and the devices that computed them
        self._called: dict[tuple[tuple[int, ...], Place], Whole] = {}  # whole layers, and the device that computed them
        self.decodes = 0
        size = scenario.memory.kv_block
        there = [layer for layer in layers if self._stack.kv_device(layer) is Place.GPU]
        kept = scenario.precision.kv
        self._cache = cache(
            self._model, scenario.kv_blocks, size, kept, self._control, driver=self._driver, on_gpu=there
        )
        self._whole = WholeLayers(self._layers, self._weights, self._few, self._cache, self._stack, self._driver)
        self._ledger = ledger(prepared).gpu
        self._check_gpu_memory()

    def _compile(self, kind: type[Ops], cache: type[KVCache]) -> None:
        """Compile the kernels of a run, so that no lane is charged for it; a bar shows the progress."""
        self._control.phase = "compiling the kernels"
        model = self._model
        precision = self._prepared.scenario.precision
        dtype = TORCH_DTYPES[precision.weights]
        routed = smallest(model, precision)
        ops = kind(model, self._control, positions=1, held=1)
        one = cache(model, 1, self._prepared.scenario.memory.kv_block, precision.kv, self._control)
        with tqdm(desc="compile kernels", delay=1, leave=False) as bar:
            for _ in ops.warm_up(dtype):
                self._control.check()
                bar.update()
            ops.warm_up_experts(dtype, routed)
            bar.update()
            few_rows.warm_up(model, ops.angles, dtype, routed)
            bar.update()
            self._control.check()
            one.warm_up(dtype)
            if self._stack.fetches_kv:
                one.fetch(0, RowLayout.smallest())[1].make(HostStream())

    def _check_gpu_memory(self) -> None:
        """Check that the bytes allocated for weights and KV are those of the ledger, which stays within the limit."""
        taken = self._weights.gpu_bytes + sum(table.nbytes for table in self._tables.values())
        on_gpu = (self._stack.kv_device(layer) is Place.GPU for layer in range(self._stack.layers))
        taken += sum(pool.nbytes for pool, there in zip(self._cache.pools, on_gpu, strict=True) if there)
        expected = sum(self._ledger[name] for name in ("weights", "weight slots", "KV cache"))
        if taken != round(expected):  # where layers differ, the ledger's mean of them is no whole number
            raise EngineError(
                f"{taken} bytes were allocated on the GPU for weights and KV where the ledger says {expected:.0f}; "
                "this is a bug."
            )

    def warm_up(self) -> None:
        """Read every streamed weight once, so that no lane is charged for it."""
        if self._weights.buffer:
            self._control.phase = "warming up the streamed weights"
            for task in self._prepared.lowering.tasks(Step.MIDDLE):
                if task.weights_of:
                    self._control.check()
                    self._weights.buffer.transfer(task.weights_of, task.page).make(self._driver.stream("h2d"))
        self._control.phase = "waiting for the first request"

    def let_go(self) -> None:
        """Free the model's memory, though the frames of an error may still hold this object; it is of no more use."""
        self._whole.let_go()
        for held in (self._weights.buffer, self._weights, self._cache, self.routed, self._few, self._whole, self):
            if held is not None:
                vars(held).clear()

    def begin(self, batches: Sequence[Batch], layouts: Sequence[RowLayout]) -> None:
        """Begin an iteration: forget the buffers of the last one, and put back the rows of in-flight prefills."""
        self._buffers.clear()
        self._of_no_stream.clear()
        for part, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
            self.decodes += len(layout.lengths)
            self._resume(part, layout, batch)
            if not self._driver.on_host:
                layout.on(self._driver.device).bring()

    def embed(self, part: int, ids: Sequence[int]) -> None:
        """Token ids -> x (T, M) of a part; they follow the rows of in-flight prefills, if there are any."""
        rows = self._ops.embed(ids)
        x = self._buffers.get((Place.GPU, part, "x"))
        if x is None:
            self._buffers[Place.GPU, part, "x"] = rows
        else:
            x[len(x) - len(ids) :] = rows

    def _resume(self, part: int, layout: RowLayout, batch: Batch) -> None:
        """Put the rows of in-flight prefills back where they were when the last iteration ended."""
        if batch.prefill_layers.start == 0:
            for request in batch.prefills.tolist():  # rows that are left belong to a prefill that was preempted
                self._hidden.pop(request, None)
            return
        hidden = [self._hidden.pop(request) for request in batch.prefills.tolist()]
        for device in {device for one in hidden for device in one}:
            rows = torch.cat([one[device] for one in hidden])
            self._place((device, part, "x"), layout, rows)[: layout.prefill] = rows

    def keep(self, part: int, layout: RowLayout, batch: Batch) -> None:
        """Keep the rows of prefills that have not passed the last layer."""
        if not len(batch.prefills) or batch.prefill_layers.stop == batch.layers:
            return
        for device in Place:
            x = self._buffers.get((device, part, "x"))
            if x is not None:
                of_prefill = x[: layout.prefill].split(layout.prefill_len)
                for request, rows in zip(batch.prefills.tolist(), of_prefill, strict=True):
                    self._hidden.setdefault(request, {})[device] = rows.clone()

    def forget(self, requests: Iterable[int]) -> None:
        """Drop the rows of prefills that nobody waits for any more."""
        for request in requests:
            self._hidden.pop(request, None)

    def experts_read(self) -> float:
        """Bytes of the experts that rows were routed to since the last call, each once per layer, part and stage."""
        return self.routed.touched() * self._model.expert_params * self._prepared.scenario.precision.expert_bytes

    def logits(self, part: int, layout: RowLayout) -> torch.Tensor:
        """x (T, M) of the rows that emit -> logits (requests, V) fp32."""
        x = self._buffers[Place.GPU, part, "x"]
        if layout.skipped or layout.prefill:
            x = x[layout.on(self._driver.device).last_rows]
        held = self._few.logits if len(x) and self._driver.on_host else None
        if held is None or not held.takes(len(x)):
            return self._ops.logits(x)
        return cast("torch.Tensor", held.compute(layout, {"x": x}))

    def transfer_weights(
        self, weights_of: Sequence[tuple[int, int]], present: Sequence[RowClass | None], page: Page = WHOLE
    ) -> Transfer | None:
        """The transfer of the weights of these (layer, node) pairs, or of one page of them, into the next slot.

        `present` are the rows in each pair's layer: only weights that these are computed with come.
        """
        return self._weights.buffer.transfer(weights_of, page, present) if self._weights.buffer else None

    def wholes(self, run: Run, layout: RowLayout) -> list[Whole]:
        """The calls that compute layers of a run at once; the stages of the others are computed one by one."""
        return self._whole.of(run, layout)

    def compute_layers(self, whole: Whole, part: int, layout: RowLayout) -> npt.NDArray[np.float64]:
        """Compute all stages of some layers in one call; the times at which each ended. See `compute`."""
        self._control.check()
        self._called[whole.layers, _lane(whole.device)] = whole
        key = (whole.device, part, "x")
        rows = layout.rows_of(RowClass.ALL)
        x, gates, ends = whole.call(_rows(self._buffers[key], rows), layout.few, threads=torch.get_num_threads())
        if layout.skipped:
            self._place(key, layout, x)[rows] = x
        else:
            self._put(key, x)
        self.routed.count_few(whole.layers, gates)
        return ends

    def compute(self, stage: Stage, layer: int, part: int, layout: RowLayout) -> None:
        """Compute one stage of a part, on the device whose lane calls; raises StoppedError after a stop request."""
        self._control.check()
        self._ran.add((layer, stage.op.name, _lane(stage.device)))
        if stage.op.keeps_kv:
            self._attend(stage, layer, part, layout)
        elif layout.has(stage.op.rows):
            self._operate(stage, layer, part, layout)

    def _operate(self, stage: Stage, layer: int, part: int, layout: RowLayout) -> None:
        device, op = stage.device, stage.op
        rows = layout.rows_of(op.rows)
        missing = self._missing[op, layer]
        there = (buffer for buffer in op.reads if buffer not in missing)
        read = {buffer: _rows(self._buffers[device, part, buffer], rows) for buffer in there}
        if op.reads_past and layout.before.any():
            read |= self._before(layer, part, layout, read["k"].dtype)
        if op.run is not None:
            given = {"weights": self._weights.get(layer, stage)} if op.tensors else {}
            written = self._own(stage, op.run(**read, **given), rows.stop - rows.start)
        elif op.plain is experts:
            written = (self._experts(stage, layer, part, layout, read),)
        else:
            written = self._built_in(stage, layer, layout, read)
        whole = op.rows is RowClass.ALL and not layout.skipped
        for buffer, tensor in zip(op.writes, written, strict=True):
            if whole:
                self._put((device, part, buffer), tensor)
            else:
                self._place((device, part, buffer), layout, tensor)[rows] = tensor

    def _put(self, key: Key, tensor: torch.Tensor) -> None:
        """Make a tensor the buffer of a key; of the one before, what no stream made is kept until it is read no more.

        Memory that the gpu lane's stream made is used again in the stream's order.
        """
        if key in self._of_no_stream:
            self._of_no_stream.discard(key)
            self._stream.keep(self._buffers[key])
        self._buffers[key] = tensor

    def _before(self, layer: int, part: int, layout: RowLayout, dtype: torch.dtype) -> Tensors:
        """Keys and values of the tokens before the chunks, from the cache or from the blocks fetched of it."""
        fetched = self._fetched.get((layer, part))
        k, v = self._cache.before(layer, layout) if fetched is None else fetched.before(layout)
        return {"k_before": k.to(dtype), "v_before": v.to(dtype)}

    def _built_in(self, stage: Stage, layer: int, layout: RowLayout, read: Tensors) -> tuple[torch.Tensor, ...]:
        compute = getattr(self._layers[stage.device][layer], OPERATIONS[stage.op.plain])
        weights = self._weights_of(stage, layer)
        by_numba = stage.device is Place.CPU or self._driver.on_host
        few = self._few.of(compute, weights, layout.rows) if by_numba else None
        answer = few.compute(layout, read) if few else compute(layout, read, weights)
        return answer if isinstance(answer, tuple) else (answer,)

    def _weights_of(self, stage: Stage, layer: int) -> Tensors:
        """The weights of a stage; prompt attention expands latents with those of the projections around it."""
        if stage.op is not prefill_attention or not self._model.kv_lora_rank:
            return self._weights.get(layer, stage)
        around = {other.op: other for other in self._stack.pipeline(layer).stages}
        keys = self._weights.get(layer, around[qkv])
        values = self._weights.get(layer, around[out_proj])
        return {"up_k": keys["up_k"], "up_v": values["up_v"]}

    def _experts(self, stage: Stage, layer: int, part: int, layout: RowLayout, read: Tensors) -> torch.Tensor:
        """Output of the routed experts that compute at once, plus the late output of the layer before for decodes."""
        device = stage.device
        classes = stage.op.rows.classes
        first = layout.prefill if RowClass.PREFILL in classes else 0
        prefills = slice(0, first)
        decodes = slice(first, len(read["h"]))
        h = read["h"]
        gates = read["gates"]
        now = self._model.num_experts_per_tok - stage.defer - stage.skip
        if now == self._model.num_experts_per_tok:
            both = stage.op.rows is RowClass.ALL
            groups = [Group(h, gates, layout.on(h.device).decodes if both else int(stage.op.rows is RowClass.DECODE))]
        else:
            groups = [Group(h[prefills], gates[prefills], 0), Group(h[decodes], _columns(gates[decodes], 0, now), 1)]
        outputs = [self.routed.compute(stage, layer, part, layout, group) for group in groups]
        self.routed.drop(stage, layer, part)
        self.routed.count(stage, layer, groups, "at once")
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        late = self._buffers.pop((device, part, "pending"), None)
        if late is not None:
            out[decodes] = added(out[decodes], late)
        if stage.defer:
            for buffer in ("h", "gates"):  # the next layer may write its own before the deferred experts are computed
                self._buffers[device, part, f"late_{buffer}"] = read[buffer][decodes].clone()
        return out

    def compute_late(self, stage: Stage, layer: int, part: int, layout: RowLayout) -> None:
        """Compute the lowest-scored experts that a stage deferred; their output is added one layer later."""
        device = stage.device
        last = self._model.num_experts_per_tok - stage.skip
        h, gates = (self._buffers.pop((device, part, f"late_{buffer}")) for buffer in ("h", "gates"))
        deferred = Group(h, _columns(gates, last - stage.defer, last), 1)
        self._buffers[device, part, "pending"] = self.routed.compute(stage, layer, part, layout, deferred)
        self.routed.count(stage, layer, [deferred], "late")

    def _own(self, stage: Stage, answer: object, rows: int) -> tuple[torch.Tensor, ...]:
        """Check the output of a user's operation, and copy it: it may share memory with what the operation read."""
        answers = answer if isinstance(answer, tuple) else (answer,)
        if len(answers) != len(stage.op.writes):
            raise EngineError(
                f"{stage} returned {len(answers)} results and writes {len(stage.op.writes)} buffers "
                f"({', '.join(stage.op.writes)}); return one tensor for each."
            )
        where = self._driver.device if stage.device is Place.GPU else torch.device("cpu")
        for buffer, tensor in zip(stage.op.writes, answers, strict=True):
            width, precision = buffer_row(buffer, self._model, self._prepared.scenario.precision)
            dtype = TORCH_DTYPES[precision]
            found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            if found != ((rows, width), dtype):
                raise EngineError(
                    f"{stage} wrote {buffer} as {found}; return a tensor of shape {(rows, width)}, {dtype}."
                )
            if tensor.device != where:
                raise EngineError(
                    f"{stage} wrote {buffer} on {tensor.device}; return it on {where}, where it reads its buffers."
                )
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in answers)

    def _place(self, key: Key, layout: RowLayout, like: torch.Tensor) -> torch.Tensor:
        """The buffer for all rows of a part, some of which are about to be written; made if there is none."""
        with self._placing:  # two lanes may write rows of unlike classes at once
            held = self._buffers.get(key)
            if self._model.kv_lora_rank and key[2] in SPLIT:
                found = self._place_by_class(key, layout, held)
            else:
                found = self._memory(key, key[0], held, (layout.skipped + layout.rows, *like.shape[1:]), like.dtype)
            if found is not held and key[0] is Place.GPU:
                self._put(key, found)
                self._of_no_stream.add(key)
            else:
                self._buffers[key] = found
            return found

    def _memory(
        self, key: Hashable, place: Place, held: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The held memory, if it has this shape and the link can read it on the host; else other memory of this key."""
        fitting = held if held is not None and held.shape == shape else None
        if place is Place.GPU:
            return self._driver.empty(shape, dtype) if fitting is None else fitting
        if fitting is not None and self._driver.is_pinned(fitting):
            return fitting
        found = self._driver.pinned(key, shape, dtype)
        return found if fitting is None else found.copy_(fitting)  # other rows may have been written already

    def _place_by_class(self, key: Key, layout: RowLayout, held: torch.Tensor | None) -> torch.Tensor:
        """See `_place`, for a buffer whose rows of prompts and decodes differ."""
        precision = self._prepared.scenario.precision
        counts = {RowClass.PREFILL: layout.skipped + layout.prefill, RowClass.DECODE: len(layout.lengths)}
        parts = [held.prefill, held.decode] if isinstance(held, ByClass) else [None, None]
        made = list[torch.Tensor]()
        for part, (row_class, count) in zip(parts, counts.items(), strict=True):
            width, form = buffer_row(key[2], self._model, precision, row_class)
            made.append(self._memory((key, row_class), key[0], part, (count, width), TORCH_DTYPES[form]))
        if held is not None and all(part is one for part, one in zip(parts, made, strict=True)):
            return held
        return cast("torch.Tensor", ByClass(*made))

    def _attend(self, stage: Stage, layer: int, part: int, layout: RowLayout) -> None:
        decodes = layout.rows_of(RowClass.DECODE)
        rows = layout.rows_of(RowClass.ALL)
        q = self._buffers.get((stage.device, part, "q"))
        k = self._buffers.get((stage.device, part, "k"))
        v = self._buffers.get((stage.device, part, "v"))
        fetched = self._fetched.pop((layer, part), None)
        if fetched is not None:
            self._stream.keep(fetched)
        if k is None or v is None:
            raise EngineError(f"{stage} found no keys and values on the {stage.device.value}; the plan is wrong.")
        if fetched is None and stage.device is self._stack.kv_device(layer):  # else the link stores them
            self._cache.append(layer, layout, _rows(k, rows), _rows(v, rows))
        if q is None or not len(layout.lengths):
            return
        how = self._layers[stage.device][layer].attention
        if fetched is None:
            out = self._cache.attend(layer, layout, _rows(q, decodes), how)
        else:
            out = fetched.attend(layout, q[decodes], k[decodes], v[decodes], how)
        if decodes == rows and not layout.skipped:
            self._put((stage.device, part, "attn"), out)
        else:
            self._place((stage.device, part, "attn"), layout, out)[decodes] = out

    def moves_nothing(self, node: Node, layout: RowLayout) -> bool:
        """True for a transfer that has no rows of a part to move."""
        if node.kind is NodeKind.MOVE:
            return not any(layout.has(row_class) for _, row_class in node.carries)
        if node.idle:
            return True
        if node.kind is NodeKind.EXPERTS_IN:
            return not any(layout.has(stage.op.rows) for stage in node.stages)
        if node.kind is NodeKind.KV_IN:
            return not len(layout.lengths) and not layout.before.any()
        return False

    def move(self, node: Node, part: int, layout: RowLayout) -> Transfer:
        """The transfer of a node's buffers to the other device."""
        target = Place.CPU if node.lane == "d2h" else Place.GPU
        copies: list[Copy] = []
        for buffer, row_class in node.carries:
            if layout.has(row_class):
                rows = layout.rows_of(row_class)
                source = self._buffers[target.other, part, buffer]
                there = self._place((target, part, buffer), layout, source)
                sent = source[rows] if target is Place.CPU else self._sendable((part, buffer, row_class), source[rows])
                copies.append(copy_over(self._driver, there[rows], sent))
        return Transfer(copies)

    def _sendable(self, key: tuple[int, str, RowClass], rows: torch.Tensor) -> torch.Tensor:
        """Rows on the host in memory from which the link copies: their own, or that of these rows of the part."""
        if self._driver.is_pinned(rows):
            return rows
        sent = self._driver.pinned(("sent", *key), rows.shape, rows.dtype)
        return sent.copy_(rows)

    def fetch_kv(self, layer: int, part: int, layout: RowLayout) -> Transfer:
        """The transfer of the KV that a part reads to the GPU.

        Raises
        ------
        EngineError
            If it is more than the ledger says.
        """
        held = list(self._fetched.values())  # a copy, because the gpu lane drops what it has read meanwhile
        wanted = self._cache.fetched_bytes(layout) + sum(fetched.pool.nbytes for fetched in held)
        if wanted > self._ledger["fetched KV"]:
            raise EngineError(
                f"the KV of {len(layout.lengths)} decodes brings {wanted} bytes to the GPU where the ledger says at "
                f"most {self._ledger['fetched KV']:.0f}; this is a bug."
            )
        self._fetched[layer, part], transfer = self._cache.fetch(layer, layout)
        return transfer

    def fetch_experts(self, node: Node, layer: int, part: int, layout: RowLayout) -> Transfer:
        """The transfer of the experts that a part's tokens chose to the GPU.

        Raises
        ------
        EngineError
            If they are more than the ledger says.
        """
        copies = list[Copy]()
        for stage in node.stages:
            gates = self._buffers[Place.GPU, part, "gates"][layout.rows_of(stage.op.rows)]
            copies += self.routed.fetch(stage, layer, part, gates)
        held = self.routed.fetched_bytes()
        if held > self._ledger["fetched experts"]:
            raise EngineError(
                f"chosen experts take {held} bytes on the GPU where the ledger says at most "
                f"{self._ledger['fetched experts']:.0f}; this is a bug."
            )
        return Transfer(copies)

    def store_kv(self, layer: int, part: int, layout: RowLayout) -> Transfer:
        """The transfer of a part's new keys and values to the cache on the host."""
        new = [self._buffers[Place.GPU, part, buffer][layout.rows_of(RowClass.ALL)] for buffer in "kv"]
        there = [
            self._driver.pinned((name, part), rows.shape, rows.dtype) for name, rows in zip("kv", new, strict=True)
        ]
        copies = [copy_over(self._driver, to, rows) for to, rows in zip(there, new, strict=True)]
        return Transfer(copies, lambda: self._cache.append(layer, layout, *there))

    def read_back(self) -> None:
        """Compare placement, precision and KV capacity that ran with those of the scenario.

        Raises
        ------
        EngineError
            If they differ.
        """
        scenario = self._prepared.scenario
        expected = {
            "placement": self._placement(),
            "KV blocks and tokens per block": (scenario.kv_blocks, scenario.memory.kv_block),
            "precision of weights and KV": scenario.precision,
            "experts of decodes": self._choices(),
        }
        ran = {
            "placement": self._ran | self._ran_whole(),
            "KV blocks and tokens per block": (len(self._cache.pools[0]), self._cache.block_size),
            "precision of weights and KV": self._weights.precision(FORMATS[self._cache.pools[0].dtype]),
            "experts of decodes": +self.routed.of_decodes,
        }
        for what, wanted in expected.items():
            if ran[what] != wanted:
                raise EngineError(f"{what}: {wanted} was asked for, {ran[what]} ran; this is a bug.")

    def _computing(self) -> Iterator[tuple[int, Stage]]:
        """Every layer with each stage that it computes when its turn is."""
        for layer in range(self._stack.layers):
            for node in self._stack.at(layer):
                if node is not None and node.kind is NodeKind.SEGMENT:
                    yield from ((layer, stage) for stage in node.stages)

    def _placement(self) -> set[tuple[int, str, Place]]:
        """Expected layers, operations and devices that compute them."""
        return {(layer, stage.op.name, stage.device) for layer, stage in self._computing()}

    def _ran_whole(self) -> set[tuple[int, str, Place]]:
        """Layers that were computed in one call with others, their operations and the devices."""
        return {(*op, device) for (_, device), whole in self._called.items() for op in whole.ops}

    def _choices(self) -> Counter[str]:
        """Expected counts of experts of decodes, computed at once and one layer late."""
        found = Counter[str]()
        counted = set[int]()
        for layer, stage in self._computing():
            if stage.op.plain is experts and layer not in counted:
                counted.add(layer)
                chosen = self._model.num_experts_per_tok - stage.skip
                found["at once"] += self.decodes * (chosen - stage.defer)
                found["late"] += self.decodes * stage.defer
        return +found


def _rows(buffer: torch.Tensor | ByClass, rows: slice) -> torch.Tensor:
    """Some rows of a buffer; of all rows the buffer itself, since torch takes 50 us to begin a slice in cold caches."""
    if isinstance(buffer, torch.Tensor) and rows == slice(0, buffer.shape[0]):
        return buffer
    return cast("torch.Tensor", buffer[rows])


def _columns(gates: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Of gates (T, 2 k), experts `first` to `last` - 1 of every row and their weights."""
    return torch.cat([half[:, first:last] for half in gates.chunk(2, dim=-1)], dim=-1)


def _lane(device: Place) -> Place:
    """The device whose lane calls; for a caller that is no lane, the one that it computes on."""
    name = threading.current_thread().name
    return Place(name.removeprefix("lane-")) if name.startswith("lane-") else device
