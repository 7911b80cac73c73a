"""The bound that no schedule can beat: the least load of each lane, in the iterations that the KV cache forces."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np

from workbench.core.result import Result, Source
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.perfmodels.loads import Counts, Forced, Loads, crowds
from workbench.pipeline.stack_graph import StackGraph
from workbench.scenario import Scenario
from workbench.scheduler.base import most_running
from workbench.scheduler.block_manager import block_iterations
from workbench.schedules.base import Schedule
from workbench.serving import prepare
from workbench.serving.prepared import facts
from workbench.serving.task_cost import TaskCost
from workbench.stages import Rows
from workbench.workload import Workload

ARRIVAL = "the last arrival"
"""Name of the limit that the last arrival sets."""
_TRIED = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Amounts of recomputation that are tried first, as shares of the most."""
_STEP = 3e-7
"""Least distance of two amounts that are tried, as a share of the most; the best is found to within three."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Share of the interval that a step of a golden-section search keeps."""
_BOUNDS = 16
"""Limits that are kept for other schedules of the same scenario."""
_WORKLOADS = 4
"""Workloads whose blocks are kept for other scenarios with the same requests."""


def bound(scenario: Scenario, schedule: Schedule, *, tokens: float = math.inf) -> Result:
    """Least time in which any order of tasks could serve the workload on this machine.

        n = max(ceil(sum of block-iterations / blocks), longest output, ceil(output tokens / most running sequences))
        T = max over lanes of (work that the requests need, work that n iterations need, work that output tokens need
            when as many as the KV cache, the requests and the scheduler's `max_running` allow share each reading of
            weights), the last arrival

    See `workbench.perfmodels.loads.Loads` for the work of a lane. A scheduler may preempt and recompute: a prefill of c
    tokens then replaces a decode that would have read c KV entries. T is the least over all amounts of recomputation,
    so that it holds for every scheduler that lets no more sequences run.

    The schedule is checked against the pipeline and named in the result; the bound does not depend on it.

    Parameters
    ----------
    scenario : Scenario
    schedule : Schedule
    tokens : float
        Most tokens of an iteration, if the bound is to hold only for schedulers that keep to it; n is then at least all
        tokens over it, and iterations with prompts are at least the prompts' tokens over it.

    Returns
    -------
    Result
        A result with source BOUND; `limits` has the time of each limit [s].

    Notes
    -----
    For MoE-Lens' pipeline and equal lengths this is T <= min(N g / S, n_it g / (p + g - 1)) / delta in output tokens
    per second, where S is the exact block-iterations of one request and n_it is the tokens that the GPU computes
    while one pass of weights streams. The host's memory is a limit of its own: the cpu lane and both directions of the
    link share its bandwidth. Where lanes share a computer's cores, those cores are a limit instead.
    """
    prepared = prepare(scenario, schedule)
    workload = scenario.workload.as_served
    stack = prepared.lowering.stack
    blocks = scenario.kv_blocks
    block = scenario.memory.kv_block
    running = most_running(scenario.scheduler)
    limits = dict(_least_limits(prepared.cost, stack, scenario.machine, workload, blocks, block, running, tokens))
    if len(workload.arrival):
        limits[ARRIVAL] = float(workload.arrival[-1])
    return Result(
        source=Source.BOUND,
        schedule=prepared.lowering.schedule.name,
        model=scenario.model.name,
        machine=scenario.machine.name,
        seconds=max(limits.values()),
        generated=int(workload.output_len.sum()),
        processed=int((workload.prompt_len + workload.output_len - 1).sum()),
        iterations=least_iterations(workload, blocks, block, running, tokens),
        limits=limits,
        facts=facts(scenario, prepared),
    )


def total_rows(workload: Workload, model: ModelConfig) -> Rows:
    """Rows of all requests at a layer of a model whose layers are of one kind, if nothing is computed twice."""
    p = workload.prompt_len
    g = workload.output_len
    pairs = model.attended_below(p)
    context = model.attended_below(p + g - 1) - pairs
    every = p + g - 1
    of_prefill = float((p * (p + 1)).sum()) / 2
    of_decode = float((every * (every + 1)).sum()) / 2 - of_prefill
    scored, scanned = model.indexed(of_prefill), model.indexed(of_decode)
    sums = (float(pairs.sum()), float(context.sum()), int(g.sum()))
    return Rows(int(p.sum()), int((g - 1).sum()), *sums, scored=scored, scanned=scanned)


def recomputed(rows: Rows, model: ModelConfig, tokens: float, shortest: float) -> Rows:
    """The least rows that remain if prefills of `tokens` tokens in all replace decodes.

    A prefill of c tokens replaces a decode of a sequence of c tokens, which is at least `shortest`, and which would
    have read at most c KV entries. The quadratic term of the prefill's attention is left out, which can only lower the
    bound.
    """
    gone = min(rows.decode, tokens / shortest)
    context = max(0.0, rows.context - tokens)
    ratio = 1 if model.sparse is None else model.sparse.ratio
    scanned = max(0.0, rows.scanned - tokens / ratio)
    return rows._replace(prefill=rows.prefill + tokens, decode=rows.decode - gone, context=context, scanned=scanned)


def least_iterations(
    workload: Workload, blocks: int, block: int, running: float = math.inf, tokens: float = math.inf
) -> int:
    """Least number of iterations that the KV cache, the longest output and the most running sequences force.

    A running sequence emits at most one token per iteration, and no iteration has more than `tokens` tokens.
    """
    held = _held(workload, block)
    of_outputs = math.ceil(int(held.outputs.sum()) / running)
    of_tokens = math.ceil((held.prompts + float(held.decodes.sum())) / tokens)
    return max(-(-held.iterations // blocks), held.longest, of_outputs, of_tokens)


def least_forced(
    workload: Workload, blocks: int, block: int, running: float = math.inf, tokens: float = math.inf
) -> Forced:
    """The work that a workload's lengths, a KV cache, the most running sequences and the most tokens force."""
    held = _held(workload, block)
    in_cache = int(held.fewest.searchsorted(blocks, "right"))
    together = int(min(in_cache, running))
    of_rows = crowds(together, held.outputs, held.decodes, blocks)
    at_once = min(blocks * block, tokens)
    with_prompts = max(math.ceil(held.prompts / at_once), math.ceil(len(workload) / running))
    iterations = least_iterations(workload, blocks, block, running, tokens)
    return Forced(iterations, with_prompts, held.shortest, float(held.decodes.sum()), of_rows)


class _Held(NamedTuple):
    """KV blocks that the requests of a workload hold, and their lengths.

    Attributes
    ----------
    fewest : ndarray (requests,) int64
        Blocks of so many of the shortest prompts together.
    iterations : int
        Block-iterations of all requests.
    outputs, decodes : ndarray int64
        Output tokens, and decodes, by the number of blocks, 0, 1, ..., that their sequence holds when they are made.
    prompts : int
        Tokens of all prompts.
    shortest : int
        Least number of tokens of a sequence that decodes, its new one included.
    longest : int
        Tokens of the longest output.
    """

    fewest: Counts
    iterations: int
    outputs: Counts
    decodes: Counts
    prompts: int
    shortest: int
    longest: int


@lru_cache(maxsize=_WORKLOADS)
def _held(workload: Workload, block: int) -> _Held:
    prompt = workload.prompt_len
    output = workload.output_len
    several = prompt[output > 1]
    outputs = _outputs(prompt, output, block)
    return _Held(
        fewest=np.sort(-(-prompt // block)).cumsum(),
        iterations=int(block_iterations(prompt, output, block).sum()),
        outputs=outputs,
        decodes=outputs - np.bincount(-(-prompt // block), minlength=len(outputs)),
        prompts=int(prompt.sum()),
        shortest=int(several.min()) + 1 if len(several) else 1,
        longest=int(output.max()),
    )


def _outputs(prompt: Counts, output: Counts, block: int) -> Counts:
    """Output tokens by the number of blocks, 0, 1, ..., that their sequence holds when they are made."""
    most = -(-int((prompt + output - 1).max()) // block)
    size = block * most + 1
    longer = np.bincount(prompt, minlength=size + 1) - np.bincount(prompt + output, minlength=size + 1)
    up_to = longer.cumsum()[:size].cumsum()  # of sequences of so many tokens when they are made, or fewer
    return np.diff(up_to[::block], prepend=0)


@lru_cache(maxsize=_BOUNDS)
def _least_limits(
    cost: TaskCost,
    stack: StackGraph,
    machine: Machine,
    workload: Workload,
    blocks: int,
    block: int,
    running: float,
    tokens: float,
) -> dict[str, float]:
    """Limits of the lanes without recomputation, capped at the least that recomputation can make of the largest.

    The largest limit is taken to be unimodal in the amount of recomputation: terms of decodes fall with it, and terms
    of prefills rise.
    """
    forced = least_forced(workload, blocks, block, running, tokens)
    loads = Loads(cost, stack, machine, forced)
    once = cache(partial(total_rows, workload))

    def limits(again: float) -> dict[str, float]:
        def left(model: ModelConfig) -> Rows:
            return recomputed(once(model), model, again, forced.shortest)

        return loads.limits(cost.by_kind(left))

    p = workload.prompt_len
    g = workload.output_len
    most = float(((g - 1) * (2 * p + g)).sum()) / 2  # tokens of the sequences of all decodes
    plain = limits(0.0)
    least = _least(limits, plain, most)
    return {name: min(value, least) for name, value in plain.items()}


class _Tried(NamedTuple):
    """The limits at an amount of recomputation."""

    at: float
    limits: dict[str, float]

    @property
    def name(self) -> str:
        """Name of the largest limit."""
        return max(self.limits, key=self.limits.__getitem__)

    @property
    def largest(self) -> float:
        """The largest limit [s]."""
        return max(self.limits.values())


def _least(limits: Callable[[float], dict[str, float]], plain: dict[str, float], most: float) -> float:
    """Least value that the largest limit has for amounts of recomputation from 0, where limits are `plain`, to `most`.

    It is taken to be unimodal: where it is not, what is found is a least among its neighbours, which is too high.
    Recomputation seldom gains anything, so that a search begins only if one of the amounts in `_TRIED` does.
    """
    tried = [_Tried(0.0, plain), *(_Tried(share * most, limits(share * most)) for share in _TRIED)]
    lowest = min(range(len(tried)), key=lambda place: tried[place].largest)
    if not lowest:
        return tried[0].largest
    right = tried[min(lowest + 1, len(tried) - 1)]
    return _searched(limits, tried[lowest - 1], tried[lowest], right, _STEP * most).largest


def _searched(
    limits: Callable[[float], dict[str, float]], left: _Tried, best: _Tried, right: _Tried, step: float
) -> _Tried:
    """The least of a unimodal function between `left` and `right`, of which `best` is the least that is known.

    The largest limits on both sides are nearly straight lines, so that the search goes on where these meet; where two
    such steps do not halve the interval, it takes the golden section of the larger side.
    """
    widths = [math.inf, math.inf]
    while (width := right.at - left.at) > 3 * step:
        at = _meeting(left, best, right)
        if at is None or width > widths[-2] / 2:
            larger = right if right.at - best.at > best.at - left.at else left
            at = best.at + (1 - _GOLDEN) * (larger.at - best.at)
        if abs(at - best.at) < step:
            at = best.at + (step if right.at - best.at > best.at - left.at else -step)
        widths.append(width)
        tried = _Tried(at, limits(at))
        if tried.largest < best.largest:
            left, best, right = (best, tried, right) if at > best.at else (left, tried, best)
        elif at > best.at:
            right = tried
        else:
            left = tried
    return best


def _meeting(left: _Tried, best: _Tried, right: _Tried) -> float | None:
    """Amount at which the falling limit and the rising one meet, as straight lines through two points each.

    Beside `best` these are the limit that is the largest there, and the largest at the end to which that one falls.
    """
    name = best.name
    end = right if best.limits[name] > right.limits[name] else left
    other = end.name
    if end.at == best.at or name == other:
        return None
    gap = best.limits[name] - best.limits[other]
    closing = gap + end.limits[other] - end.limits[name]
    return best.at + gap / closing * (end.at - best.at) if closing > 0 else None
