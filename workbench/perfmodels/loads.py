"""Least seconds of each lane, of the host's memory and of shared cores, however the rows are split into calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.pipeline.layer_graph import EMBED, HEAD, Node, NodeKind
from workbench.pipeline.stack_graph import StackGraph
from workbench.serving.task_cost import ENDLESS, Pricer, TaskCost
from workbench.stages import PartRows, RowClass, Rows, Stage

DRAM = "DRAM bandwidth"
"""Name of the limit that the host's memory sets."""
CORES = "cores that both lanes share"
"""Name of the limit that a computer's cores set if they stand for both devices."""
SUMS = {"gpu": "all-reduce", "cpu": "reduce-scatter"}
"""Names of the time, within a lane's limit, in which its GPUs or sockets add up their partial sums."""
_PREFILL = Rows(prefill=1, pairs=1, emits=1)
_EXACT = 32  # from twice as many rows on, one call stands for all calls with up to 1/32 more rows
_KEPT = 24
"""Terms of limits, and rows of calls, that are kept for other scenarios with the same prices."""
_STAGES = 128
"""Stages and transfers whose calls are kept for other wirings and links where they cost the same."""

_HIGHER = 1 + 1e-12
"""A line that is not higher by this factor than others where these meet is left out."""

Seconds = Callable[[Rows], float]
Counts = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


class Crowd(NamedTuple):
    """Calls with `least` to `most` rows, and the tokens that the KV cache forces into calls of at most `most` rows.

    Attributes
    ----------
    least, most : int
    outputs, decodes : float
        Sum of min(1, most h / B) over all output tokens, and over those of decodes, where the token's sequence holds h
        of B blocks when it is made; or the sum of most / R, if that is more, where R sequences can run together: no
        more than the KV cache holds, and no more than the scheduler lets run.
    """

    least: int
    most: int
    outputs: float
    decodes: float


class Forced(NamedTuple):
    """The work that no order of tasks and no scheduler can avoid.

    Attributes
    ----------
    iterations : int
        Iterations that the KV cache, the longest output and the most running sequences force.
    prompts : int
        Iterations with prefills that the KV cache and the most running sequences force.
    shortest : int
        Least number of tokens of a sequence that decodes, its new one included.
    decodes : float
        Number of decodes if nothing is recomputed.
    crowds : tuple of Crowd
        Calls of up to as many rows as sequences can run together.
    """

    iterations: int
    prompts: int
    shortest: int
    decodes: float
    crowds: tuple[Crowd, ...]


def crowds(together: int, outputs: Counts, decodes: Counts, blocks: int) -> tuple[Crowd, ...]:
    """Calls of up to `together` rows; `outputs[h]` and `decodes[h]` count tokens of sequences that hold h blocks."""
    steps = [(least, min(most, together)) for least, most in _calls(together)]
    most = np.array([step[1] for step in steps])
    forced = (_tokens_forced(most, together, each, blocks) for each in (outputs, decodes))
    return tuple(Crowd(*step, *tokens) for step, *tokens in zip(steps, *forced, strict=True))


def _calls(rows: int) -> Iterator[tuple[int, int]]:
    """Least and most rows of the calls that one call stands for, up to `rows` rows."""
    least = 1
    while least <= rows:
        most = least + max(0, least // _EXACT - 1)
        yield least, most
        least = most + 1


def _tokens_forced(most: Counts, together: int, tokens: Counts, blocks: int) -> list[float]:
    """The tokens that the KV cache forces into calls of at most so many rows, see `Crowd`.

    Tokens whose sequence holds blocks / most blocks or more count in full.
    """
    before = np.concatenate(([0], (tokens * np.arange(len(tokens))).cumsum()))
    count = np.concatenate(([0], tokens.cumsum()))
    full = np.minimum(-(-blocks // most), len(tokens))
    shared = most * before[full] / blocks + (count[-1] - count[full])
    found: list[float] = np.maximum(shared, most / together * float(count[-1])).tolist()
    return found


class Loads:
    """Least seconds of each limit for any rows that a scenario has to serve.

    Every stage c of a layer is called once for each part of each iteration, and a call does not cost less if it has
    further rows. So a call with n decodes costs at least min(n, m) g(m) for every m, where g(m) is the least c(k) / k
    of k <= m decodes alone. These decodes are at most R and hold at most all B blocks, so that min(n, m) is at least
    n m / R, and at least the sum of min(1, m h / B) over them. The same holds for output tokens: each is made by one
    row that passes every layer, a decode or the last row of a prefill. If s(m) is the larger of the two sums over all
    iterations, a stage takes at least

        max(c(all rows), iterations c(one row), g(m) s(m) of the decodes, g(m) s(m) of the output tokens)

    for every m. If a lane may have several numbers of threads, each term is that of the fastest.
    """

    def __init__(self, cost: TaskCost, stack: StackGraph, machine: Machine, forced: Forced) -> None:
        shared = machine.shares_cores
        self._fixed = {"gpu compute": 0.0, "cpu compute": 0.0, "d2h link": 0.0, "h2d link": 0.0}
        self._fixed |= {CORES if shared else DRAM: 0.0}
        for layer, count in stack.alike:
            with_prompts = min(forced.prompts, forced.iterations)
            of_prompts = cost.layer_weights(layer, RowClass.PREFILL)
            of_any = min(of_prompts, cost.layer_weights(layer, RowClass.DECODE))
            for size, times in ((of_prompts, with_prompts), (of_any, forced.iterations - with_prompts)):
                self._fixed["h2d link"] += count * times * cost.fetch(size)
                if not shared:
                    self._fixed[DRAM] += count * times * size / machine.cpu.bandwidth
        self._terms = defaultdict[str, list[tuple[int, Seconds]]](list)
        for term in _terms(cost, stack, machine):
            self._terms[term.limit].append((term.layer, term.seconds(forced)))

    def limits(self, total: PartRows) -> dict[str, float]:
        """Seconds of each limit for these rows, over all iterations [s]."""
        limits = dict(self._fixed)
        for name, terms in self._terms.items():
            seconds = sum(term(total.at(layer)) for layer, term in terms)
            limits[name] = limits.get(name, 0.0) + seconds
        return limits


@lru_cache(maxsize=_KEPT)
def _terms(cost: TaskCost, stack: StackGraph, machine: Machine) -> tuple[_Term, ...]:
    """The terms of the limits of all scenarios that share these prices."""
    return tuple(_Terms(cost, stack, machine).found)


class _Terms:
    """Finds the terms of every limit: each stage and transfer of every sort of layers."""

    def __init__(self, cost: TaskCost, stack: StackGraph, machine: Machine) -> None:
        self.found = list[_Term]()
        self._cost = cost
        self._cores = machine.cores
        self._shared = machine.shares_cores
        self._bandwidth = machine.cpu.bandwidth
        for layer, count in stack.alike:
            for node in stack.at(layer):
                if node is not None:
                    self._add_node(node, layer, count)
        for place in range(1, stack.layers):
            move = stack.before(place)
            if move is not None:
                self._add_node(move, place, 1)
        for end in (EMBED, HEAD):
            ways = [_Way(_time(cost.least_ends(end.kind, n)), _time(cost.pricer(end, n))) for n in self._threads("gpu")]
            self._add_compute("gpu", ways, end, 0, 1)

    def _add_node(self, node: Node, layer: int, times: int) -> None:
        """Add a node of `times` layers; deferred experts are counted with those that their stage computes at once."""
        if self._cost.is_in_one_call(node, layer):
            self._add_whole(node, layer, times)
        elif node.kind is NodeKind.SEGMENT:
            for stage in node.stages:
                self._add_stage(stage, layer, times)
        elif node.kind is not NodeKind.DEFERRED:
            self._add_move(node, layer, times)

    def _add_whole(self, node: Node, layer: int, times: int) -> None:
        """Add the stages of `times` layers that few decodes pass in one call."""
        cost = self._cost
        ways = [
            _Way(_time(cost.least_of(node, n, layer)), _time(cost.pricer(node, n, layer)))
            for n in self._threads(node.lane)
        ]
        self._add_compute(node.lane, ways, node, layer, times)

    def _add_stage(self, stage: Stage, layer: int, times: int) -> None:
        """Add a stage in `times` layers."""
        cost = self._cost
        lane = stage.device.value
        at_once = replace(stage, defer=0)
        ways = [
            _Way(_time(cost.least(at_once, n, layer)), _time(cost.call(stage, n, layer))) for n in self._threads(lane)
        ]
        self._add_compute(lane, ways, stage, layer, times)
        if lane == "cpu" and not self._shared:
            threads, *_ = self._threads(lane)
            reading = (self._reading(cost.call(each, threads, layer)) for each in (at_once, stage))
            self._add(DRAM, [_Way(*reading)], stage, layer, times)
        added = partial(cost.adding_up, stage, layer=layer)
        if added(Rows(decode=1, emits=1)):
            self._add(f"{lane} {SUMS[lane]}", [_Way(added, added)], stage, layer, times)

    def _add_move(self, node: Node, layer: int, times: int) -> None:
        """Add a transfer in `times` layers; one end of it is the host's memory."""
        price = self._cost.pricer(node, layer=layer)
        self._add(f"{node.lane} link", [_Way(_time(price), _time(price))], node, layer, times)
        if not self._shared:
            self._add(DRAM, [_Way(self._reading(price), self._reading(price))], node, layer, times)

    def _add_compute(self, lane: str, ways: Sequence[_Way], what: Stage | Node, layer: int, times: int) -> None:
        """Add a computation of a lane in `times` layers, on each number of threads that the lane may have."""
        self._add(f"{lane} compute", ways, what, layer, times)
        if self._shared and self._cores is not None:
            every = max(self._cores.alone, self._cores.gpu + self._cores.cpu)
            shares = [count / every for count in self._threads(lane)]
            self._add(CORES, [way.times(share) for way, share in zip(ways, shares, strict=True)], what, layer, times)

    def _add(self, limit: str, ways: Sequence[_Way], what: Stage | Node, layer: int, times: int) -> None:
        known = _known_calls(limit, self._cost.call_key(what, layer))
        self.found.append(_Term(limit, tuple(ways), layer, times, self._cost.model_at(layer), known))

    def _threads(self, lane: str) -> tuple[int, ...]:
        """Numbers of threads that a lane may have; 0 if it has a device of its own."""
        cores = self._cores
        if cores is None:
            return (0,)
        own = cores.gpu if lane == "gpu" else cores.cpu
        return (own, cores.alone) if self._shared else (own,)

    def _reading(self, price: Pricer) -> Seconds:
        """Time of the host's memory for the bytes of a price."""
        return lambda rows: price(rows)[1] / self._bandwidth


class _Way(NamedTuple):
    """One way to compute something: the least time for any split of the rows into calls, and the time of one call."""

    least: Seconds
    call: Seconds

    def times(self, share: float) -> _Way:
        """The same times a share."""
        return _Way(lambda rows: share * self.least(rows), lambda rows: share * self.call(rows))


_Known = dict[Rows, tuple[float, ...]]
"""Times of the calls of a stage or transfer, with multiples of a row."""


@lru_cache(maxsize=_STAGES)
def _known_calls(limit: str, key: Hashable) -> _Known:
    """The calls found so far of a stage or transfer with this key, on one limit."""
    return {}


def _time(price: Pricer) -> Seconds:
    return lambda rows: price(rows)[0]


class _Term:
    """The load of one stage or transfer, in `times` layers alike, on one limit."""

    def __init__(
        self, limit: str, ways: tuple[_Way, ...], layer: int, times: int, model: ModelConfig, known: _Known
    ) -> None:
        self.limit = limit
        self.layer = layer
        self._ways = ways
        self._times = times
        self._model = model
        self._cheapest = known

    def seconds(self, forced: Forced) -> Seconds:
        """The function that gives the least time for any rows [s]."""
        rarest = Rows(decode=1, context=self._model.least_attended(forced.shortest), emits=1)
        most = np.array([crowd.most for crowd in forced.crowds])
        of_decode = self._calls(rarest, len(most))
        of_prefill = self._calls(_PREFILL, len(most))
        decode = np.minimum.accumulate(of_decode / most)
        prefill = np.minimum.accumulate(of_prefill / most)
        decodes = np.array([crowd.decodes for crowd in forced.crowds])
        outputs = np.array([crowd.outputs for crowd in forced.crowds])
        one = float(min(of_decode[0], of_prefill[0]))
        fixed = max(forced.iterations * one, float((np.minimum(decode, prefill) * outputs).max()))
        highest = _highest(decode, decodes, forced.decodes)
        ways = self._ways
        times = self._times

        def seconds(total: Rows) -> float:
            whole = min([way.least(total) for way in ways])
            recomputed = forced.decodes - total.decode
            return times * max(whole, fixed, *[price * (count - recomputed) for price, count in highest])

        return seconds

    def _calls(self, row: Rows, crowds: int) -> Times:
        """Least time of a call with the fewest rows of each of the first so many crowds; the times found are kept."""
        found = self._cheapest.get(row, ())
        if len(found) < crowds:
            found = (*found, *map(self._least_call, _multiples(row, crowds)[len(found) :]))
            if row not in self._cheapest and len(self._cheapest) >= _KEPT:
                self._cheapest.clear()
            self._cheapest[row] = found  # at once, for other threads read and add meanwhile
        return np.array(found[:crowds])

    def _least_call(self, rows: Rows) -> float:
        """Time of one call in the fastest way."""
        return min(way.call(rows) for way in self._ways)


def _highest(prices: Times, counts: Times, most: float) -> list[tuple[float, float]]:
    """Price and count of each line price (count - x) that is the highest somewhere from x = 0 to `most`.

    The highest is a convex function, so that a line that is the highest at both ends of an interval is so between them.
    """
    found = dict[int, None]()

    def search(low: float, first: int, high: float, last: int) -> None:
        found.update({first: None, last: None})
        if first == last or prices[first] == prices[last]:
            return
        at = (prices[first] * counts[first] - prices[last] * counts[last]) / (prices[first] - prices[last])
        if not low < at < high:
            return
        heights = prices * (counts - at)
        between = int(heights.argmax())
        if heights[between] > heights[first] * _HIGHER:
            search(low, first, at, between)
            search(at, between, high, last)

    search(0.0, int((prices * counts).argmax()), most, int((prices * (counts - most)).argmax()))
    return [(float(prices[line]), float(counts[line])) for line in found]


@lru_cache(maxsize=_KEPT)
def _multiples(row: Rows, crowds: int) -> list[Rows]:
    """As many of a row as there are at least in each of the first so many crowds."""
    found = list[Rows]()
    for least, _ in islice(_calls(int(ENDLESS)), crowds):
        found.append(Rows(*(least * value for value in row)))
    return found
