"""Weights on the host, resident weights, and the slots in which streamed weights arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from workbench.core.errors import EngineError
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.transfer import Copy, Transfer, bytes_of, copy_over
from workbench.engine.loading.load import load
from workbench.engine.loading.stored import FORMATS, Stored, format_of, host_memory, in_rows
from workbench.engine.loading.tensors import Tensors, operands
from workbench.models import ModelConfig
from workbench.pipeline.stack_graph import Piece, StackGraph
from workbench.schedules.plan import WHOLE, Page
from workbench.stages import Op, Place, Precision, RowClass, Stage, experts

_Held = dict[tuple[int, Op], Tensors]
"""Tensors by layer and operation."""
_Laid = tuple[list[Copy], _Held]
_Pair = tuple[torch.Tensor, torch.Tensor]
"""Bytes of a slot, and those of the host that come there."""
_Wanted = tuple[tuple[tuple[int, int], RowClass | None], ...]
"""Pairs of layer and node, each with the rows in the layer."""


class WeightStore:
    """The weights of a stack's operations on the host, each held once, here or where it stays.

    They are in the scenario's precision. Routed experts in fp32 or bf16 that a card computes are not packed; those in 4
    or 8 bits are brought into rows when they are pinned, or go to the card. Those that stay where the host computes are
    divided among its NUMA nodes. `control` may end the reading.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: Precision,
        stack: StackGraph,
        control: Control | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.model = model
        self.driver = driver or HostDriver()
        layers = range(stack.layers)
        wanted = [(layer, piece) for layer in layers for piece in _pieces(stack, stack.stages(layer), layer)]
        on_card = set[tuple[int, Op]]()
        if not self.driver.on_host:
            on_card = {(layer, piece.op) for layer in layers for piece in _pieces_of(stack, layer, Place.GPU)}
        streamed = {(layer, piece.op) for layer, piece in wanted if piece.streamed}
        every = [(layer, piece.op) for layer, piece in wanted]
        stay = {each for each in every if each not in on_card and each not in streamed}
        self.tables, self._held = load(model, precision, every, control or Control(), unpacked=on_card, by_node=stay)

    def pin(self, layer: int, op: Op) -> None:
        """Let the link read an operation's tensors in place, laid out as the gpu lane computes them."""
        held = self._held.pop((layer, op))
        aligned = {stored.key: stored.aligned for stored in held}
        tensors = self.for_gpu({stored.key: stored.tensor for stored in held})
        self._held[layer, op] = [  # rows of packed experts, whose keys are new, fill cache lines as their blocks do
            Stored(key, self.driver.pin(tensor), aligned=aligned.get(key, True)) for key, tensor in tensors.items()
        ]

    def for_gpu(self, tensors: Tensors) -> Tensors:
        """An operation's tensors as the gpu lane computes them: a card has experts in 4 and 8 bits in rows."""
        packed = "gate_up_blocks" in tensors and "gate_up_scales" in tensors
        return in_rows(tensors) if packed and not self.driver.on_host else tensors

    def sources(self, layer: int, op: Op) -> list[Stored]:
        """Every tensor of an operation."""
        return self._held[layer, op]

    def resident(self, layer: int, op: Op, *, keep: bool = False) -> Tensors:
        """An operation's tensors by name; they leave the store, and stay where it runs, unless `keep` is set."""
        found = self._held[layer, op] if keep else self._held.pop((layer, op))
        return {stored.key: stored.tensor for stored in found}


class WeightBuffer:
    """Slots for streamed weights. A transfer takes the slot that was filled longest ago, and its pages share that slot.

    Parameters
    ----------
    slot_bytes : float
        Size of the largest transfer [B].
    """

    def __init__(self, store: WeightStore, stack: StackGraph, slot_bytes: float, slots: int) -> None:
        self._store = store
        self._stack = stack
        self._driver = store.driver
        self._slots = [_memory(round(slot_bytes), store.driver) for _ in range(slots)]
        self._holds: list[_Held] = [{} for _ in range(slots)]
        self._turn = 0
        self._known: dict[tuple[int, _Wanted, Page], _Laid] = {}

    @property
    def bytes(self) -> int:
        """GPU memory that the slots take [B]."""
        return sum(slot.nbytes for slot in self._slots)

    @property
    def laid(self) -> list[_Held]:
        """Tensors of every transfer so far, as operations find them in the slots."""
        return [held for _, held in self._known.values()]

    def transfer(
        self,
        weights_of: Sequence[tuple[int, int]],
        page: Page = WHOLE,
        present: Sequence[RowClass | None] | None = None,
    ) -> Transfer:
        """The transfer of the weights of these (layer, node) pairs, or of one page of them, into the next slot.

        Of each pair those come that rows of the class that is `present` in its layer are computed with, by default all.
        They have arrived with the last page.
        """
        if not page.number:
            self._turn = (self._turn + 1) % len(self._slots)
            self._holds[self._turn] = {}
        turn = self._turn
        rows = (RowClass.ALL,) * len(weights_of) if present is None else present
        copies, held = self._laid(turn, tuple(zip(weights_of, rows, strict=True)), page)

        def arrived() -> None:
            self._holds[turn] = held

        return Transfer(copies, arrived if page.number + 1 == page.pages else None)

    def _laid(self, turn: int, wanted: _Wanted, page: Page) -> _Laid:
        """Copies of a transfer into a slot, and the tensors that operations find there; worked out once.

        The mover needs both at every transfer. Working them out holds the GIL that the compute lanes need: 0.75 ms for
        31 tensors (Zen 4).
        """
        key = (turn, wanted, page)
        if key not in self._known:
            streamed = list[tuple[int, Op, Stored]]()
            for (layer, node), rows in wanted:
                found = self._stack.at(layer)[node]
                for piece in self._stack.wanted(found, layer, rows) if found else ():
                    streamed += [(layer, piece.op, each) for each in self._store.sources(layer, piece.op)]
            streamed.sort(key=lambda each: (not each[2].aligned, -each[2].tensor.dtype.itemsize))
            laid = list[_Pair]()
            held = _Held()
            place = 0
            for layer, op, stored in streamed:
                view, place = self._lay(turn, stored, place, laid)
                held.setdefault((layer, op), {})[stored.key] = view
            begin, end = (int(edge) for edge in page.cut(place))
            copies = [copy_over(self._driver, *pair) for pair in _between(laid, begin, end)]
            self._known[key] = copies, held
        return self._known[key]

    def _lay(self, turn: int, stored: Stored, place: int, laid: list[_Pair]) -> tuple[torch.Tensor, int]:
        """Lay a tensor into a slot from a place on: its view there, and the place behind it."""
        source = bytes_of(stored.tensor)
        end = place + len(source)
        there = self._slots[turn][place:end]
        laid.append((there, source))
        return there.view(stored.tensor.dtype).view(stored.tensor.shape), end

    def get(self, layer: int, op: Op) -> Tensors:
        """The weights of an operation, which must have arrived.

        Where several slots hold them, those that came last: an older copy may be overwritten while the operation runs.

        Raises
        ------
        EngineError
            If they are in no slot: the plan did not wait for them, or overwrote them.
        """
        newest = self._turn
        for age in range(len(self._slots)):
            held = self._holds[newest - age]
            if (layer, op) in held:
                return held[layer, op]
        raise EngineError(f"the weights of {op} of layer {layer} are in no slot; the schedule's plan is wrong.")


def _memory(size: int, driver: Driver) -> torch.Tensor:
    """Bytes where the gpu lane computes."""
    if driver.on_host:
        return host_memory((size,), torch.uint8)
    return torch.empty(size, dtype=torch.uint8, device=driver.device)


def _between(laid: Sequence[_Pair], begin: int, end: int) -> Iterator[_Pair]:
    """Of bytes that fill a slot one behind the other, those between two bytes of the slot, cut at both."""
    place = 0
    for target, source in laid:
        low = max(begin - place, 0)
        high = min(end - place, len(target))
        if low < high:
            yield target[low:high], source[low:high]
        place += len(target)


def _kept(model: ModelConfig, stack: StackGraph) -> set[tuple[Op, str]]:
    """Operands that stay in fp32, by operation and key."""
    found = set()
    for layer in range(stack.layers):
        for op in (stage.op for stage in stack.stages(layer) if stage.op.plain is not experts):
            wanted = operands(op, model, layer)
            found |= {(op, operand.key) for operand in wanted if operand.sources[0].kept}
    return found


def _pieces(stack: StackGraph, stages: Iterable[Stage], layer: int) -> list[Piece]:
    """The pieces of the weights of some stages of a layer, each once."""
    return list(dict.fromkeys(piece for stage in stages for piece in stack.pieces(stage, layer)))


def _pieces_of(stack: StackGraph, layer: int, place: Place) -> list[Piece]:
    """The pieces of the weights with which one compute lane computes a layer."""
    return _pieces(stack, (stage for stage in stack.stages(layer) if stage.device is place), layer)


class Weights:
    """Weights of every stage: resident, or in the buffer."""

    def __init__(
        self,
        store: WeightStore,
        stack: StackGraph,
        slot_bytes: float,
        slots: int,
        control: Control,
    ) -> None:
        streaming = any(stack.streamed(layer) for layer in range(stack.layers))
        self.buffer = WeightBuffer(store, stack, slot_bytes, slots) if streaming else None
        self._stack = stack
        self._store = store
        self._resident: dict[Place, _Held] = {place: {} for place in Place}
        self._kept = _kept(store.model, stack)
        self.gpu_bytes = self.buffer.bytes if self.buffer is not None else 0
        for layer in range(stack.layers):
            control.check()
            stages = stack.stages(layer)
            pieces = _pieces(stack, stages, layer)
            streamed = {piece.op for piece in pieces if piece.streamed}
            on_gpu = {piece.op for piece in _pieces_of(stack, layer, Place.GPU) if not piece.streamed}
            on_cpu = {piece.op for piece in _pieces_of(stack, layer, Place.CPU) if not piece.streamed}
            for op in streamed:
                store.pin(layer, op)
            for op in dict.fromkeys(piece.op for piece in pieces if not piece.streamed):
                tensors = store.resident(layer, op, keep=op in streamed)
                if op in on_gpu:
                    laid_out = store.for_gpu(tensors)
                    there = {key: tensor.to(store.driver.device) for key, tensor in laid_out.items()}
                    self.gpu_bytes += sum(tensor.nbytes for tensor in there.values())
                    self._resident[Place.GPU][layer, op] = there
                if op in on_cpu:
                    self._resident[Place.CPU][layer, op] = tensors

    def precision(self, kv: str) -> Precision:
        """Number formats of the weights with which operations compute, beside that of the KV cache."""
        streamed = self.buffer.laid if self.buffer is not None else []
        every = [(op, tensors) for held in (*self._resident.values(), *streamed) for (_, op), tensors in held.items()]
        for layer in range(self._stack.layers):
            chosen = (s for s in self._stack.stages(layer) if self._stack.pipeline(layer).streams_chosen(s))
            every += [(stage.op, tensors) for stage in chosen for _, tensors in self.on_host(layer, stage)]
        routed = {format_of(tensors) for op, tensors in every if op.plain is experts}
        unrouted = [(op, key, one) for op, held in every if op.plain is not experts for key, one in held.items()]
        others = {FORMATS[tensor.dtype] for op, key, tensor in unrouted if (op, key) not in self._kept}
        others = others or {form for form, _ in routed}
        if len(others) != 1 or len(routed) > 1:
            raise EngineError(f"weights are held in {others or 'no precision'} and {routed}; this is a bug.")
        (weights,) = others
        form, group = routed.pop() if routed else (weights, None)
        return Precision(weights, kv, form if form != weights else None, group=group)

    def get(self, layer: int, stage: Stage) -> Tensors:
        """The weights of a stage in one layer; none for an operation without any."""
        pieces = self._stack.pieces(stage, layer)
        return self.of_piece(layer, pieces[0], stage.device) if pieces else {}

    def pieces(self, layer: int, stage: Stage) -> list[tuple[tuple[int, ...] | None, Tensors]]:
        """The weights of a stage of routed experts in one layer: of each piece its experts, or None for all of them.

        Those that come once they are chosen are left out; see `on_host`.
        """
        chosen = self._stack.pipeline(layer).streams_chosen(stage)
        pieces = [piece for piece in self._stack.pieces(stage, layer) if not (chosen and piece.streamed)]
        return [(piece.members, self.of_piece(layer, piece, stage.device)) for piece in pieces]

    def on_host(self, layer: int, stage: Stage) -> list[tuple[tuple[int, ...] | None, Tensors]]:
        """The weights on the host of a stage's experts in one layer that are streamed, as `pieces` gives others."""
        found = list[tuple[tuple[int, ...] | None, Tensors]]()
        for piece in self._stack.pieces(stage, layer):
            if piece.streamed:
                found.append((piece.members, self._store.resident(layer, piece.op, keep=True)))
        return found

    def of_piece(self, layer: int, piece: Piece, place: Place) -> Tensors:
        """The weights of one piece of a layer, which must have arrived if they are streamed."""
        if self.buffer is not None and piece.streamed:
            return self.buffer.get(layer, piece.op)
        return self._resident[place][layer, piece.op]
