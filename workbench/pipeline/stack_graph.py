"""A stack of layers as a graph: every layer's nodes, and the transfers of the residual stream between ranges."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from workbench.core.errors import PipelineError
from workbench.core.timeline import SUBSCRIPTS
from workbench.models import ModelConfig
from workbench.models.layers import LayerKind
from workbench.pipeline.algebra import Pipeline
from workbench.pipeline.layer_graph import EMBED, HEAD, TO_CPU, TO_GPU, WEIGHTS, LayerGraph, Node, NodeKind, layer_graph
from workbench.pipeline.stack import LayerRange, Stack
from workbench.stages import (
    ExpertSet,
    Op,
    Place,
    RowClass,
    Stage,
    combine,
    decode_attention,
    experts,
    kv,
    out_proj,
    prefill_attention,
    qkv,
    route,
)

_Nodes = tuple[Node | None, ...]
_WHOLE = (qkv, decode_attention, out_proj, route, experts, combine)
"""The operations of a whole layer for decodes, which one call can compute for few; see `StackGraph.is_whole`."""
_SUBSCRIPT = str.maketrans("0123456789", SUBSCRIPTS)


class Piece(NamedTuple):
    """Weights of one layer that are in one place: those of an operation, or of a set of its experts.

    Attributes
    ----------
    op : Op
    streamed : bool
        True if they are streamed to the GPU.
    members : tuple of int or None
        Experts of the layer that they are, in ascending order; None for all, and for other operations.
    """

    op: Op
    streamed: bool
    members: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class StackGraph:
    """The input of a schedule: the nodes of every layer for one part of a batch.

    Attributes
    ----------
    ranges : tuple of LayerRange
        Pipelines over ranges of layers, which cover all of them.
    layers : int
        Number of layers.
    model : ModelConfig or None
        The model, whose layers may be of several kinds; without one all are alike.
    resident : tuple of {Op: int}
        For each layer, what stays on the GPU of the operations whose weights `fetch` streams: a number of experts, or 1
        for all weights of another operation. Empty if nothing does; see `workbench.pipeline.shares`.
    kv_resident : frozenset of int
        Layers whose cache stays on the GPU although `fetch` streams that of the others.
    marks : tuple
        One entry per layer; layers with unequal entries share no nodes, because they are priced differently.
    graphs : tuple of LayerGraph
        The graph of every range; ranges of equal pipelines share it. The codes of the second and further graphs have
        a number behind the letter.
    """

    ranges: tuple[LayerRange, ...]
    layers: int
    model: ModelConfig | None = None
    resident: tuple[Mapping[Op, int], ...] = ()
    kv_resident: frozenset[int] = frozenset()
    marks: tuple[Hashable, ...] = ()
    graphs: tuple[LayerGraph, ...] = field(init=False)

    def __post_init__(self) -> None:
        known: dict[Pipeline, LayerGraph] = {}
        for each in self.ranges:
            if each.pipeline not in known:
                mark = str(len(known) + 1).translate(_SUBSCRIPT) if known else ""
                known[each.pipeline] = layer_graph(each.pipeline, mark)
        object.__setattr__(self, "graphs", tuple(known[each.pipeline] for each in self.ranges))

    # -------------------------------------------------------------------------------------------------- one layer

    def graph(self, layer: int) -> LayerGraph:
        """The graph of the range that a layer is in."""
        return self.graphs[self._range_of[layer]]

    def pipeline(self, layer: int) -> Pipeline:
        """The pipeline of a layer."""
        return self.graph(layer).pipeline

    def kind(self, layer: int) -> LayerKind | None:
        """Kind of a layer; None if all layers are of one kind that has the sizes of the model."""
        return self._kinds[layer] if self._kinds else None

    def at(self, layer: int) -> _Nodes:
        """Nodes of one layer, each in its place, with the stages and buffers that this layer has.

        A node stays in its place if the layer has none of its stages; it is None if the layer has no such node,
        because it is the last of its range and defers nothing.

        Raises
        ------
        PipelineError
            If there is no such layer.
        """
        if not 0 <= layer < self.layers:
            raise PipelineError(f"there is no layer {layer}; give one from 0 to {self.layers - 1}.")
        return self._nodes[layer]

    def node(self, layer: int, place: int) -> Node:
        """The node of a layer at one place of `LayerGraph.nodes`.

        Raises
        ------
        PipelineError
            If there is no such layer, or it has no such node; see `at`.
        """
        found = self.at(layer)[place]
        if found is None:
            raise PipelineError(f"layer {layer} has no node {place}: it is the last of its range and defers nothing.")
        return found

    def before(self, layer: int) -> Node | None:
        """The transfer that brings the residual stream to where a layer needs it; `layers` stands for the head."""
        held = self.graph(layer - 1).leaves if layer else frozenset({Place.GPU})
        wanted = self.graph(layer).enters if layer < self.layers else frozenset({Place.GPU})
        if wanted <= held:
            return None
        return TO_CPU if Place.CPU in wanted - held else TO_GPU

    def streamed(self, layer: int) -> tuple[int, ...]:
        """Nodes of a layer whose weights are streamed."""
        if not self.resident:
            return self.graph(layer).streamed
        if layer not in self._streamed:
            nodes = self.graph(layer).streamed
            self._streamed[layer] = tuple(node for node in nodes if self._streams_any(layer, node))
        return self._streamed[layer]

    def _streams_any(self, layer: int, node: int) -> bool:
        there = self.at(layer)[node]
        return there is not None and bool(self.wanted(there, layer, RowClass.ALL))

    def streams(self, stage: Stage, layer: int) -> bool:
        """True if weights of this stage of a layer are streamed to the GPU."""
        return any(piece.streamed for piece in self.pieces(stage, layer))

    def pieces(self, stage: Stage, layer: int) -> tuple[Piece, ...]:
        """The pieces of the weights of a stage of a layer; none for an operation without any.

        Of streamed experts that partly stay on the GPU, these are the first piece.
        """
        key = (stage, layer)
        if key not in self._pieces:
            self._pieces[key] = tuple(self._found_pieces(stage, layer))
        return self._pieces[key]

    def wanted(self, node: Node, layer: int, rows: RowClass | None) -> tuple[Piece, ...]:
        """The streamed pieces of a node of a layer that its stages compute with, each once, if there are such rows.

        Chosen experts are none of them: their transfers are nodes of their own.
        """
        classes = set(rows.classes if rows else ())
        stages = [stage for stage in node.stages if classes.intersection(stage.op.rows.classes)]
        stages = [stage for stage in stages if not self.pipeline(layer).streams_chosen(stage)]
        pieces = dict.fromkeys(piece for stage in stages for piece in self.pieces(stage, layer))
        return tuple(piece for piece in pieces if piece.streamed)

    def _found_pieces(self, stage: Stage, layer: int) -> Iterable[Piece]:
        op = stage.op.holder
        if not op.has_weights:
            return
        streamed = self.pipeline(layer).streams(stage)
        members = self._members(op, layer)
        if members == ():
            return
        kept = self.resident[layer].get(op, 0) if self.resident and streamed else 0
        if not kept or (members is None and op.plain is not experts):
            yield Piece(op, streamed and not kept, members)
            return
        every = self._every(op, layer)
        if kept >= len(every):
            yield Piece(op, False, members)
            return
        for name, some, moves in ((f":{kept}", every[:kept], False), (f"{kept}:", every[kept:], True)):
            yield Piece(experts[ExpertSet(name, (some,))], moves, some)

    def _members(self, op: Op, layer: int) -> tuple[int, ...] | None:
        return None if op.subset is None else self._every(op, layer)

    def _every(self, op: Op, layer: int) -> tuple[int, ...]:
        """The routed experts of a layer that an operation computes."""
        count = 0 if self.model is None else self.model.num_local_experts
        return tuple(range(count)) if op.subset is None else op.subset.of(layer, count)

    def kv_device(self, layer: int) -> Place:
        """Device that holds a layer's share of the KV cache."""
        return Place.GPU if layer in self.kv_resident else self.pipeline(layer).kv_device

    def is_whole(self, stages: Sequence[Stage], layer: int) -> bool:
        """True if these are all stages of a layer, in one place with their weights and the KV cache.

        They are the built-in ones of a layer without shared experts, and decodes have all of their experts at once.
        """
        if tuple(stages) != self.pipeline(layer).stages or self.kv_device(layer) is not stages[0].device:
            return False
        ops = tuple(stage.op for stage in stages if stage.op is not prefill_attention)
        late = any(stage.defer or stage.skip for stage in stages)
        return ops == _WHOLE and not late and not any(self.streams(stage, layer) for stage in stages)

    def stages(self, layer: int) -> list[Stage]:
        """The stages that one layer has, in order."""
        return self._in_layer(self.pipeline(layer).stages, layer)

    def missing(self, stage: Stage, layer: int) -> set[str]:
        """Buffers that a stage reads and that no stage before it writes in one layer of the model, though one could."""
        stages = self.pipeline(layer).stages
        before = stages[: stages.index(stage)]
        written = _written(self._in_layer(before, layer))
        return _written(before).intersection(stage.op.reads) - written

    # -------------------------------------------------------------------------------------------------- all layers

    @cached_property
    def alike(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each sort of layers that have the same nodes, and the number of layers of that sort."""
        counts: dict[int, list[int]] = {}
        for layer, nodes in enumerate(self._nodes):
            counts.setdefault(id(nodes), [layer, 0])[1] += 1
        return tuple((first, count) for first, count in counts.values())

    @property
    def fetches_kv(self) -> bool:
        """True if the KV cache of some layer is streamed to the GPU."""
        return any(self.fetches_kv_of(layer) for layer in range(self.layers))

    def fetches_kv_of(self, layer: int) -> bool:
        """True if the KV cache of a layer is streamed to the GPU."""
        return kv in self.pipeline(layer).fetches and layer not in self.kv_resident

    @cached_property
    def all_nodes(self) -> tuple[Node, ...]:
        """Every node that can occur in a plan, the implicit ones included; equal kinds of layers are told once."""
        entering, *between = [self.before(each.first) for each in self.ranges]
        graphs = {id(graph): graph for graph in self.graphs}
        inner = list(chain.from_iterable(graph.nodes for graph in graphs.values()))
        weights = [WEIGHTS] if any(graph.streamed for graph in self.graphs) else []
        listed = [EMBED, entering, *inner, *weights, *between, self.before(self.layers), HEAD]
        return tuple(dict.fromkeys(node for node in listed if node is not None))

    @property
    def labels(self) -> dict[str, str]:
        """Description of every node code."""
        return {node.code: node.describe() for node in self.all_nodes}

    def __str__(self) -> str:
        """The pipelines as a user would write them."""
        first = self.ranges[0]
        return str(first.pipeline) if len(self.ranges) == 1 else " + ".join(map(str, self.ranges))

    # ------------------------------------------------------------------------------------------------ worked out once

    @cached_property
    def _range_of(self) -> list[int]:
        found = list[int]()
        for number, each in enumerate(self.ranges):
            found += [number] * ((each.stop or 0) - each.first)
        return found

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer; empty if all are of one that has the sizes of the model."""
        if self.model is None:
            return ()
        kinds = self.model.layer_kinds
        return kinds if len(set(kinds)) > 1 or self.model.unlike else ()

    @cached_property
    def _streamed(self) -> dict[int, tuple[int, ...]]:
        """The streamed nodes of layers that were asked for; see `streamed`."""
        return {}

    @cached_property
    def _pieces(self) -> dict[tuple[Stage, int], tuple[Piece, ...]]:
        """Answers of `pieces` so far."""
        return {}

    @cached_property
    def _nodes(self) -> list[_Nodes]:
        made: dict[Hashable, _Nodes] = {}
        found = list[_Nodes]()
        for layer, number in enumerate(self._range_of):
            graph = self.graphs[number]
            last = layer + 1 == self.ranges[number].stop and graph.last != graph.nodes
            key = (id(graph), self.kind(layer), last, *self._own(layer))
            if key not in made:
                planned = graph.last if last else graph.nodes
                made[key] = tuple(node and self._present(node, layer) for node in planned)
            found.append(made[key])
        return found

    def _own(self, layer: int) -> tuple[Hashable, ...]:
        """Everything else that makes a layer unlike others of its range and kind."""
        subsets = [stage.op for stage in self.pipeline(layer).stages if stage.op.subset is not None]
        members = tuple(self._every(op, layer) for op in subsets) if self.model is not None else ()
        sizes = members if self.marks else tuple(map(len, members))
        kept = tuple((op.name, count) for op, count in self.resident[layer].items()) if self.resident else ()
        return sizes, kept, layer in self.kv_resident, self.marks[layer] if self.marks else None

    def _present(self, node: Node, layer: int) -> Node:
        """The node with the stages of one layer, and the buffers that these write and read."""
        if self.model is None:
            return node
        if node.kind in (NodeKind.KV_IN, NodeKind.KV_OUT):
            return replace(node, idle=True) if layer in self.kv_resident else replace(node)
        stages = tuple(self._in_layer(node.stages, layer))
        if node.kind is NodeKind.EXPERTS_IN:
            return replace(node, stages=stages, idle=not any(self.streams(stage, layer) for stage in stages))
        every = self.pipeline(layer).stages
        there = self.stages(layer)
        gone = _written(every) - _written(there)
        if node.kind is NodeKind.MOVE and len(there) < len(every):
            target = Place.CPU if node.lane == "d2h" else Place.GPU
            gone |= _needed(every, target) - _needed(there, target) - {"x"}  # the next layer may read x
        return replace(node, stages=stages, carries=tuple(rows for rows in node.carries if rows[0] not in gone))

    def _in_layer(self, stages: Sequence[Stage], layer: int) -> list[Stage]:
        """The given stages, without those that one layer of the model lacks."""
        model = self.model
        return [stage for stage in stages if model is None or stage.op.is_in(model, model.layer_kinds[layer])]


def stack_graph(
    what: Pipeline | Stack | Sequence[LayerRange], layers: int | ModelConfig, marks: tuple[Hashable, ...] = ()
) -> StackGraph:
    """The graph of a stack, of its ranges as `Stack.over` gives them, or of one pipeline for all layers.

    With a model, its layers have what their kinds have; with a number of layers, all are alike.

    Raises
    ------
    PipelineError
        If a pipeline cannot be a layer; see `workbench.pipeline.resolve`.
    """
    model = layers if isinstance(layers, ModelConfig) else None
    count = layers.num_hidden_layers if isinstance(layers, ModelConfig) else layers
    if isinstance(what, Pipeline):
        what = (LayerRange(what, 0, count),)
    ranges = what.over(count) if isinstance(what, Stack) else tuple(what)
    return StackGraph(ranges, count, model, marks=marks)


def _needed(stages: Iterable[Stage], device: Place) -> set[str]:
    """Buffers that stages on a device read."""
    return {buffer for stage in stages if stage.device is device for buffer, _ in stage.op.needs}


def _written(stages: Iterable[Stage]) -> set[str]:
    return {buffer for stage in stages for buffer in stage.op.writes}
