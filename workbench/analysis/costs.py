"""Costs of the stages and transfers of a pipeline in a typical iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.core.display import html_table
from workbench.core.units import format_bytes, format_seconds
from workbench.pipeline import Element, Fork, Path, Pipeline, Stack, located, resolve
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.scenario import Scenario
from workbench.schedules import Sequential
from workbench.serving.prepared import Prepared, Typical, price
from workbench.stages import Move, PartRows, Place, Stage, experts, kv, shared_experts

_BASELINE = Sequential()


@dataclass(frozen=True)
class Cost:
    """One stage or transfer of one range of layers; all figures are of one layer, mean over the layers of the range.

    Attributes
    ----------
    place : int
        Number of the range.
    path : Path
        Position in the pipeline of the range; empty for what `fetch` streams.
    what : str
        The stage or transfer as it is written, or the streamed tensors.
    lane : str
        "gpu", "cpu", "h2d" or "d2h".
    weights : float
        Weights that a stage reads [B].
    moved : float
        Bytes that a transfer moves.
    flops : float
        Operations of a stage, deferred ones too [FLOP].
    seconds : float
        Time on its lane [s].
    share : float
        Part that it takes of the time that its lane works on layers in the iteration, from 0 to 1; embedding and head,
        which stand around the layers, are left out.
    streamed : float
        Weights of a stage that come over the link in each iteration [B].
    """

    place: int
    path: Path
    what: str
    lane: str
    weights: float
    moved: float
    flops: float
    seconds: float
    share: float = 0.0
    streamed: float = 0.0


class Costs(NamedTuple):
    """The costs of all stages and transfers, in the order of the pipeline; see `costs`.

    Attributes
    ----------
    decodes, prefills : float
        Decode tokens and prompt tokens of the typical iteration.
    lanes : dict of {str: float}
        Time that each lane works in it, over all layers, without embedding and head [s].
    """

    entries: tuple[Cost, ...]
    decodes: float
    prefills: float
    lanes: dict[str, float]

    def at(self, place: int, path: Path) -> Cost:
        """The cost of one element of one range."""
        return next(cost for cost in self.entries if (cost.place, cost.path) == (place, path))

    def rows(self) -> list[tuple[str, ...]]:
        """One row of text per stage and transfer."""
        return [
            (
                cost.what,
                cost.lane,
                format_bytes(cost.weights or cost.moved),
                f"{cost.flops / 1e9:,.3g}" if cost.flops else "",
                format_seconds(cost.seconds),
                f"{cost.share:.0%}",
            )
            for cost in self.entries
        ]

    def _repr_html_(self) -> str:
        headings = ("stage or transfer", "lane", "weights or moved", "GFLOP", "time per layer", "of its lane")
        return html_table(self.rows(), headings)


def costs(scenario: Scenario) -> Costs:
    """Price every stage and transfer of one layer in a typical iteration.

    In it the cache is full, or all requests run if it holds them, and the requests are of all ages alike. Its tasks run
    one after the other and whole. Shared experts that the pipeline does not place count with the routed ones, or with
    `combine` where these are in several stages.

    Raises
    ------
    WorkbenchError
        If the scenario cannot be priced.

    Examples
    --------
    >>> costs(scenario)  # doctest: +SKIP
    """
    prepared = price(scenario, _BASELINE)
    rows = prepared.cost.by_kind(Typical.of(scenario, _BASELINE).rows)
    given = scenario.pipeline if isinstance(scenario.pipeline, Stack) else scenario.pipeline[:]
    ranges = zip(given.over(prepared.layers), scenario.stack, strict=True)
    found = list[Cost]()
    for place, (own, resolved) in enumerate(ranges):
        layers = range(own.first, own.stop or 0)
        found += _of_range(prepared, rows, place, own.pipeline, resolved.pipeline, layers)
    counts = [len(range(each.first, each.stop or 0)) for each in scenario.stack]
    lanes = defaultdict[str, float](float)
    for cost in found:
        lanes[cost.lane] += counts[cost.place] * cost.seconds
    shared = tuple(
        replace(cost, share=counts[cost.place] * cost.seconds / lanes[cost.lane]) if cost.seconds else cost
        for cost in found
    )
    first = rows.at(0)
    return Costs(shared, first.decode, first.prefill, dict(lanes))


def _of_range(
    prepared: Prepared, rows: PartRows, place: int, own: Pipeline, resolved: Pipeline, layers: range
) -> Iterator[Cost]:
    """The costs of one range of layers, whose pipeline with its shared experts is `resolved`."""
    groups = _alike(prepared, layers)
    cost = _Pricing(prepared, rows, groups)
    carries = dict(resolve(resolved).carries)
    late = list[Stage]()
    before = list[Cost]()
    rest = list(_elements(own.chain))
    for path, element in _elements(resolved.chain):
        expected = rest[0][1] if rest else None
        if isinstance(element, Stage) and element.op.plain is shared_experts and not _is(expected, element):
            late.append(element)
            if before and before[-1].what.startswith((f"gpu({experts.name}", f"cpu({experts.name}")):
                before[-1] = _together(before[-1], cost.stages(place, before[-1].path, late))
                late = []
            continue
        own_path, written = rest.pop(0)
        if isinstance(element, Move):
            lane = "d2h" if element.target is Place.CPU else "h2d"
            node = Node(NodeKind.MOVE, "", lane, carries=carries[path])
            before.append(cost.transfer(place, own_path, str(written), node))
        else:
            before.append(cost.stages(place, own_path, [element, *late]))
            late = []
    yield from before
    yield from cost.fetches(place)


def _is(expected: Element | None, element: Stage) -> bool:
    """True if the user's own element is this stage, perhaps in another form."""
    return isinstance(expected, Stage) and expected.op.plain is element.op.plain


def _together(one: Cost, other: Cost) -> Cost:
    """Two costs of one lane as one."""
    sums = {name: getattr(one, name) + getattr(other, name) for name in ("weights", "flops", "seconds", "streamed")}
    return replace(one, **sums)


def _elements(chain: tuple[Element, ...]) -> Iterator[tuple[Path, Stage | Move]]:
    """The stages and moves of a chain with their paths; the arms of a fork follow one another."""
    for path, element in located(chain):
        if not isinstance(element, Fork):
            yield path, element


def _alike(prepared: Prepared, layers: range) -> list[tuple[int, float]]:
    """Layers of a range that cost the same: one of them, and their share of the range."""
    stack = prepared.lowering.stack
    kinds = dict[object, list[int]]()
    for layer in layers:
        kinds.setdefault((id(stack.at(layer)), stack.kind(layer)), []).append(layer)
    return [(alike[0], len(alike) / len(layers)) for alike in kinds.values()]


class _Pricing:
    """Mean costs over the layers of a range."""

    def __init__(self, prepared: Prepared, rows: PartRows, groups: Sequence[tuple[int, float]]) -> None:
        self._cost = prepared.cost
        self._stack = prepared.lowering.stack
        self._precision = prepared.scenario.precision
        self._rows = rows
        self._groups = groups
        cores = prepared.scenario.machine.cores
        self._threads = {"gpu": 0, "cpu": 0} if cores is None else {"gpu": cores.gpu, "cpu": cores.cpu}

    def stages(self, place: int, path: Path, stages: Sequence[Stage]) -> Cost:
        """Stages of one device as one cost, under the name of the first."""
        sizes = dict.fromkeys(("weights", "flops", "seconds", "streamed"), 0.0)
        lane = stages[0].device.value
        for layer, share in self._groups:
            rows = self._rows.at(layer)
            there = self._stack.stages(layer)
            for stage in stages:
                if stage not in there:
                    continue  # layers of this kind have no such operation
                size = stage.op.weight_bytes(self._cost.model_at(layer), self._precision, layer)
                sizes["weights"] += share * size
                if stage.op.work is not None:
                    sizes["flops"] += share * self._cost.flops(replace(stage, defer=0), rows, layer)
                sizes["seconds"] += share * self._cost.call(stage, self._threads[lane], layer)(rows)[0]
                sizes["streamed"] += share * sum(
                    piece.op.weight_bytes(self._cost.model_at(layer), self._precision, layer)
                    for piece in self._stack.pieces(stage, layer)
                    if piece.streamed
                )
        return Cost(place, path, str(stages[0]), lane, moved=0.0, **sizes)

    def transfer(self, place: int, path: Path, what: str, node: Node) -> Cost:
        """A transfer of activations or KV."""
        return self._moving(place, path, what, [(node, layer, share) for layer, share in self._groups])

    def _moving(self, place: int, path: Path, what: str, nodes: Sequence[tuple[Node, int, float]]) -> Cost:
        """A transfer that is a node of these layers, each with its share of the range."""
        moved = sum(share * self._cost.transfer(node, self._rows.at(layer), layer) for node, layer, share in nodes)
        time = sum(share * self._cost.node(node, self._rows.at(layer), 0, layer) for node, layer, share in nodes)
        return Cost(place, path, what, nodes[0][0].lane, 0.0, moved, 0.0, time)

    def fetches(self, place: int) -> Iterator[Cost]:
        """Streams of `fetch`: weights that are known before the batch, chosen experts, and KV both ways."""
        streamed = sum(share * self._cost.layer_weights(layer) for layer, share in self._groups)
        if streamed:
            time = sum(share * self._cost.fetch(self._cost.layer_weights(layer)) for layer, share in self._groups)
            yield Cost(place, (), "weights", "h2d", 0.0, streamed, 0.0, time)
        kinds = {NodeKind.EXPERTS_IN: "chosen experts", NodeKind.KV_IN: kv.name, NodeKind.KV_OUT: f"new {kv.name}"}
        found = dict[tuple[NodeKind, int], list[tuple[Node, int, float]]]()
        for layer, share in self._groups:
            for index, node in enumerate(self._stack.at(layer)):
                if node is not None and node.kind in kinds:
                    found.setdefault((node.kind, index), []).append((node, layer, share))
        for (kind, _), there in found.items():
            yield self._moving(place, (), kinds[kind], there)
