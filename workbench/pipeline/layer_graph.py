"""One layer as a graph: segments of consecutive stages on one device, the moves between them, and KV transfers."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.core.errors import PipelineError
from workbench.pipeline.algebra import Pipeline, Resolved, resolve
from workbench.pipeline.elements import BufferRows, Element, Fork, Path
from workbench.stages import Move, Place, RowClass, Stage, kv


class NodeKind(enum.Enum):
    """Kind of work that a node's tasks do."""

    EMBED = "embed"
    SEGMENT = "segment"
    DEFERRED = "deferred"
    MOVE = "move"
    WEIGHTS = "weights"
    KV_IN = "kv in"
    KV_OUT = "kv out"
    EXPERTS_IN = "experts in"
    HEAD = "head"


@dataclass(frozen=True)
class Node:
    """A segment or a transfer of one layer, for one micro-batch.

    Attributes
    ----------
    code : str
        Letter that names its tasks in a printed plan.
    lane : str
        "gpu", "cpu", "d2h" or "h2d".
    stages : tuple of Stage
        Stages that a segment computes, or whose chosen experts a transfer brings.
    carries : tuple of (buffer, RowClass)
        Rows of buffers that a transfer moves.
    after : tuple of int
        Nodes of the same layer that it waits for; a node without any waits for the previous layer.
    streamed : bool
        True if weights of its stages are streamed.
    idle : bool
        True for a transfer of KV in a layer whose cache is on the GPU, and of chosen experts in one that streams none.
    """

    kind: NodeKind
    code: str
    lane: str
    stages: tuple[Stage, ...] = ()
    carries: tuple[BufferRows, ...] = ()
    after: tuple[int, ...] = ()
    streamed: bool = False
    idle: bool = False

    def describe(self) -> str:
        """Operations of a segment, or buffers of a transfer (``q@decode k v``)."""
        if self.kind is NodeKind.SEGMENT:
            return " ".join(f"{s.op.name}{f'({chr(44).join(s.options)})' if s.options else ''}" for s in self.stages)
        if self.kind is NodeKind.EXPERTS_IN:
            return " ".join(s.op.chosen.name for s in self.stages)
        if self.kind is NodeKind.DEFERRED:
            return " ".join(f"{s.op.name}, {s.defer} of each token" for s in self.stages)
        carried: dict[str, set[RowClass]] = {}
        for buffer, rows in self.carries:
            carried.setdefault(buffer, set()).add(rows)
        every = set(RowClass.ALL.classes)
        words = [b if classes == every else f"{b}@{next(iter(classes)).value}" for b, classes in carried.items()]
        return " ".join(words) or self.kind.value


EMBED = Node(NodeKind.EMBED, "E", "gpu")
HEAD = Node(NodeKind.HEAD, "Z", "gpu")
WEIGHTS = Node(NodeKind.WEIGHTS, "W", "h2d")
_X = tuple(("x", rows) for rows in RowClass.ALL.classes)
TO_CPU = Node(NodeKind.MOVE, "R", "d2h", carries=_X)
TO_GPU = Node(NodeKind.MOVE, "L", "h2d", carries=_X)
"""The transfers of the residual stream that a stack makes of itself, where a range of layers needs it elsewhere."""
_LETTERS = {"gpu": "ABFGIJ", "cpu": "CDMNOP", "d2h": "QTUVYd", "h2d": "HXabce"}


@dataclass(frozen=True)
class LayerGraph:
    """The nodes of one layer for one part of a batch, which every layer of a pipeline's range and every part repeats.

    Attributes
    ----------
    nodes : tuple of Node
        Nodes in an order that respects `Node.after`.
    sinks : tuple of int
        Nodes that the next layer's first nodes wait for.
    enters, leaves : frozenset of Place
        Devices on which the residual stream must be before the layer, and on which it is after the layer.
    last : tuple of Node or None
        The nodes of the range's last layer: it defers nothing, and computes at once what other layers compute
        afterwards.
    """

    pipeline: Pipeline
    nodes: tuple[Node, ...]
    sinks: tuple[int, ...]
    enters: frozenset[Place]
    leaves: frozenset[Place]
    last: tuple[Node | None, ...]

    @property
    def streamed(self) -> tuple[int, ...]:
        """Nodes whose weights are streamed."""
        return tuple(index for index, node in enumerate(self.nodes) if node.streamed)


def layer_graph(pipeline: Pipeline, mark: str = "") -> LayerGraph:
    """Merge a pipeline into segments and resolve its transfers; `mark` stands behind the letters of its node codes.

    Raises
    ------
    PipelineError
        If the pipeline cannot be a layer; see `workbench.pipeline.resolve`.
    """
    resolved = resolve(pipeline)
    builder = _Builder(resolved, mark)
    sinks = builder.add(pipeline.chain, ())
    sinks += tuple(index for index, node in enumerate(builder.nodes) if node.kind is NodeKind.KV_OUT)
    last = tuple(map(_deferring_nothing, builder.nodes))
    return LayerGraph(pipeline, tuple(builder.nodes), sinks, resolved.enters, resolved.leaves, last)


def _deferring_nothing(node: Node) -> Node | None:
    """The node of the last layer, which defers nothing; None for one that computes deferred work only."""
    if node.kind is NodeKind.DEFERRED:
        return None
    stages = tuple(replace(stage, defer=0) if stage.defer else stage for stage in node.stages)
    return replace(node, stages=stages) if stages != node.stages else node


class _Builder:
    """Collects the nodes of a chain."""

    def __init__(self, resolved: Resolved, mark: str) -> None:
        self.nodes: list[Node] = []
        self._mark = mark
        self._pipeline = resolved.pipeline
        self._carries = dict(resolved.carries)
        self._codes: dict[str, Iterator[str]] = {lane: iter(letters) for lane, letters in _LETTERS.items()}

    def add(self, chain: tuple[Element, ...], after: tuple[int, ...], path: Path = ()) -> tuple[int, ...]:
        """Append a chain's nodes, and return the indices of the last ones."""
        run: list[Stage] = []
        for index, element in enumerate(chain):
            if run and not (isinstance(element, Stage) and element.device is run[0].device):
                after = self._segment(run, after)
                run = []
            if isinstance(element, Stage):
                run.append(element)
            elif isinstance(element, Move):
                after = self._move(element, (*path, index), after)
            else:
                after = self._fork(element, (*path, index), after)
        return self._segment(run, after) if run else after

    def _segment(self, run: list[Stage], after: tuple[int, ...]) -> tuple[int, ...]:
        """Append the segments of stages in a row on one device.

        Chosen experts come once all before them has been computed. Where KV is streamed, attention is a segment of its
        own: the stages before and behind it need not wait for the KV. Prompt attention belongs to it, because it reads
        the cache for earlier chunks of a prompt.
        """
        chosen = next((place for place, stage in enumerate(run) if self._pipeline.streams_chosen(stage)), None)
        if chosen is not None:
            after = self._segment(run[:chosen], after) if chosen else after
            arriving = self._append(Node(NodeKind.EXPERTS_IN, self._code("h2d"), "h2d", (run[chosen],), after=after))
            return self._with_chosen(run[chosen:], (*after, *arriving))
        keeper = next((place for place, stage in enumerate(run) if stage.op.keeps_kv), None)
        if keeper is None or kv not in self._pipeline.fetches:
            return self._computed(run, after)
        first = next(place for place, stage in enumerate(run) if stage.op.keeps_kv or stage.op.reads_past)
        after = self._computed(run[:first], after)
        reader = self._computed(
            run[first : keeper + 1], (*after, *self._append(Node(NodeKind.KV_IN, f"K{self._mark}", "h2d")))
        )
        new_kv = tuple((buffer, rows) for buffer in ("k", "v") for rows in RowClass.ALL.classes)
        self._append(Node(NodeKind.KV_OUT, f"S{self._mark}", "d2h", carries=new_kv, after=reader))
        return self._computed(run[keeper + 1 :], reader)

    def _with_chosen(self, run: list[Stage], after: tuple[int, ...]) -> tuple[int, ...]:
        """Append the segment of a stage whose chosen experts have come, and all behind it on its device."""
        others = [place for place, stage in enumerate(run) if place and self._pipeline.streams_chosen(stage)]
        end = min([*others, len(run)])
        after = self._computed(run[:end], after)
        return self._segment(run[end:], after) if end < len(run) else after

    def _computed(self, run: list[Stage], after: tuple[int, ...]) -> tuple[int, ...]:
        if not run:
            return after
        lane = run[0].device.value
        pipeline = self._pipeline
        streamed = any(pipeline.streams(stage) and not pipeline.streams_chosen(stage) for stage in run)
        index = self._append(Node(NodeKind.SEGMENT, self._code(lane), lane, tuple(run), after=after, streamed=streamed))
        late = tuple(stage for stage in run if stage.defer)
        if late:  # nothing in this layer waits for it, and the next layer's experts follow it on their lane
            self._append(Node(NodeKind.DEFERRED, self._code(lane), lane, late, after=index))
        return index

    def _move(self, move: Move, path: Path, after: tuple[int, ...]) -> tuple[int, ...]:
        lane = "d2h" if move.target is Place.CPU else "h2d"
        order = {buffer: number for number, (buffer, _) in reversed(list(enumerate(self._carries[path])))}
        carries = tuple(sorted(self._carries[path], key=lambda rows: (order[rows[0]], rows[1].value != "prefill")))
        return self._append(Node(NodeKind.MOVE, self._code(lane), lane, carries=carries, after=after))

    def _fork(self, fork: Fork, path: Path, after: tuple[int, ...]) -> tuple[int, ...]:
        ends = [self.add(arm, after, (*path, number)) for number, arm in enumerate(fork.arms)]
        return tuple(index for end in ends for index in end)

    def _append(self, node: Node) -> tuple[int]:
        self.nodes.append(node)
        return (len(self.nodes) - 1,)

    def _code(self, lane: str) -> str:
        code = next(self._codes[lane], None)
        if code is None:
            raise PipelineError(f"a layer can have at most {len(_LETTERS[lane])} separate {lane} tasks; merge some.")
        return f"{code}{self._mark}"
