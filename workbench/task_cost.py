"""Seconds and bytes of tasks, from the declared work of their operations; shared by every reader that predicts."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.cost import Rows, Work, copy_seconds, seconds
from workbench.errors import ScenarioError
from workbench.hardware import Device
from workbench.plan import Task
from workbench.scenario import Scenario
from workbench.segments import Kind, LayerGraph, Node
from workbench.stages import RowClass, Stage, buffer_bytes, embed_work, head_work
from workbench.units import DTYPE_BYTES


class TaskCost:
    """Prices the tasks of one scenario."""

    def __init__(self, scenario: Scenario, graph: LayerGraph) -> None:
        self._model, self._machine, self._precision = scenario.model, scenario.machine, scenario.precision
        self._graph = graph
        self._kv_in = 2 * self._model.kv_size * DTYPE_BYTES[self._precision.kv]
        self._carried = {id(node): self._carried_bytes(node) for node in graph.all_nodes}
        self._weights = {index: self._node_weights(graph.nodes[index]) for index in graph.streamed}

    def _node_weights(self, node: Node) -> float:
        streamed = [stage for stage in node.stages if self._graph.pipeline.streams(stage)]
        return sum(stage.op.weight_bytes(self._model, self._precision) for stage in streamed)

    def _carried_bytes(self, node: Node) -> tuple[int, int]:
        """Bytes that a transfer moves per prefill row and per decode row."""
        sizes = [(buffer_bytes(buffer, self._model, self._precision), rows) for buffer, rows in node.carries]
        return (
            sum(size for size, rows in sizes if rows is RowClass.PREFILL),
            sum(size for size, rows in sizes if rows is RowClass.DECODE),
        )

    @property
    def weights_per_layer(self) -> float:
        """Bytes streamed per layer and iteration."""
        return sum(self._weights.values())

    def weight_transfer(self, pieces: Sequence[tuple[int, int]]) -> float:
        """Bytes of one weight transfer."""
        return sum(self._weights[node] for _, node in pieces)

    def work(self, stage: Stage, rows: Rows) -> Work:
        """What one stage does for these rows in one layer.

        Raises
        ------
        ScenarioError
            If the operation declares no work.
        """
        if stage.op.work is None:
            raise ScenarioError(
                f"op {stage.op.name!r} declares no work, so it cannot be priced; give Op(..., work=...)."
            )
        return stage.op.work(rows, self._model, self._precision)

    def transfer(self, node: Node, rows: Rows) -> float:
        """Bytes that a transfer of activations or KV moves for these rows in one layer."""
        if node.kind is Kind.KV_IN:
            return (rows.context - rows.decode) * self._kv_in
        per_prefill, per_decode = self._carried[id(node)]
        return per_prefill * rows.prefill + per_decode * rows.decode

    def device(self, node: Node) -> Device:
        """The device whose lane runs a segment."""
        return self._machine.gpu if node.lane == "gpu" else self._machine.cpu

    def copy(self, lane: str, size: float) -> float:
        """Seconds of one transfer on a link lane."""
        link = self._machine.link
        return copy_seconds(size, link.h2d if lane == "h2d" else link.d2h, link.overhead)

    def node(self, node: Node, rows: Rows) -> float:
        """Seconds of a node other than weights for these rows [s]."""
        if node.kind is Kind.SEGMENT:
            return seconds([self.work(stage, rows) for stage in node.stages], self.device(node))
        if node.kind in (Kind.EMBED, Kind.HEAD):
            work = embed_work if node.kind is Kind.EMBED else head_work
            return seconds([work(rows, self._model, self._precision)], self._machine.gpu)
        return self.copy(node.lane, self.transfer(node, rows))

    def tasks(self, tasks: Sequence[Task], parts: Sequence[Rows]) -> list[float]:
        """Seconds of every task of a plan whose parts have these rows."""
        known: dict[tuple[object, ...], float] = {}
        result = []
        for task in tasks:
            key = (id(task.node), task.part) if task.part is not None else task.pieces
            price = known.get(key)
            if price is None:
                price = known[key] = self._price(task, parts)
            result.append(price)
        return result

    def _price(self, task: Task, parts: Sequence[Rows]) -> float:
        if task.part is None:
            return self.copy(task.node.lane, self.weight_transfer(task.pieces))
        return self.node(task.node, parts[task.part])

    def token_budget(self) -> float:
        """Tokens whose GPU work takes as long as one layer's weights take to stream; infinite if none do.

        n = (t_transfer - a) / c with t_gpu(n) = a + c n fitted at two counts (MoE-Lens' pipeline profiler, SPEC 1.7).
        """
        transfer = self.copy("h2d", self.weights_per_layer)
        segments = [node for node in self._graph.nodes if node.kind is Kind.SEGMENT and node.lane == "gpu"]

        def gpu_seconds(tokens: float) -> float:
            return sum(self.node(node, Rows(prefill=tokens)) for node in segments)

        if not transfer:
            return float("inf")
        first = 1.0
        while gpu_seconds(first) < transfer:
            first *= 2
        second = 2 * first
        slope = (gpu_seconds(second) - gpu_seconds(first)) / first
        return max(1.0, (transfer - gpu_seconds(first)) / slope + first)
