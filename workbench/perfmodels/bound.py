"""The bound that no schedule can beat: the least load of each lane, in the iterations that the KV cache forces."""

from __future__ import annotations

import numpy as np

from workbench.core.result import Result, Source
from workbench.models import ModelConfig
from workbench.perfmodels.loads import Counts, Forced, Loads, crowds
from workbench.scenario import Scenario
from workbench.scheduler.block_manager import block_iterations
from workbench.schedules.base import Schedule
from workbench.serving import prepare
from workbench.serving.prepared import Prepared, facts
from workbench.stages import Rows
from workbench.workload import Workload

ARRIVAL = "the last arrival"
"""Name of the limit that the last arrival sets."""


def bound(scenario: Scenario, schedule: Schedule) -> Result:
    """Least time in which any order of tasks could serve the workload on this machine.

        n = max(ceil(sum of block-iterations / blocks), longest output)
        T = max over lanes of (work that the requests need, work that n iterations need, work that output tokens need
            when as many as the KV cache and the requests allow share each reading of weights), the last arrival

    See `workbench.perfmodels.loads.Loads` for the work of a lane. A scheduler may preempt and recompute: a prefill of c
    tokens then replaces a decode that would have read c KV entries. T is the least over all amounts of recomputation,
    so that it holds for every scheduler.

    The schedule is checked against the pipeline and named in the result; the bound does not depend on it.

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
    forced = least_forced(workload, scenario.kv_blocks, scenario.memory.kv_block)
    limits = _least_limits(prepared, workload, forced)
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
        iterations=forced.iterations,
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


def recomputed(rows: Rows, tokens: float, shortest: float) -> Rows:
    """The least rows that remain if prefills of `tokens` tokens in all replace decodes.

    A prefill of c tokens replaces a decode of a sequence of c tokens, which is at least `shortest`, and which would
    have read at most c KV entries. The quadratic term of the prefill's attention is left out, which can only lower the
    bound.
    """
    gone = min(rows.decode, tokens / shortest)
    context = max(0.0, rows.context - tokens)
    return rows._replace(prefill=rows.prefill + tokens, decode=rows.decode - gone, context=context)


def least_iterations(workload: Workload, blocks: int, block: int) -> int:
    """Least number of iterations that the KV cache and the longest output force."""
    held = int(block_iterations(workload.prompt_len, workload.output_len, block).sum())
    return max(-(-held // blocks), int(workload.output_len.max()))


def least_forced(workload: Workload, blocks: int, block: int) -> Forced:
    """The work that a workload's lengths and a KV cache of `blocks` blocks force."""
    prompt = workload.prompt_len
    output = workload.output_len
    fewest = np.sort(-(-prompt // block))
    together = int(fewest.cumsum().searchsorted(blocks, "right"))
    several = prompt[output > 1]
    shortest = int(several.min()) + 1 if len(several) else 1
    outputs = _held(prompt, output, block)
    decodes = outputs - np.bincount(-(-prompt // block), minlength=len(outputs))
    of_rows = crowds(together, outputs, decodes, blocks)
    with_prompts = -(-int(prompt.sum()) // (blocks * block))
    return Forced(least_iterations(workload, blocks, block), with_prompts, shortest, float(decodes.sum()), of_rows)


def _held(prompt: Counts, output: Counts, block: int) -> Counts:
    """Output tokens by the number of blocks, 0, 1, ..., that their sequence holds when they are made."""
    edges = block * np.arange(-(-int((prompt + output - 1).max()) // block) + 1)
    up_to = [int(np.clip(edge - prompt + 1, 0, output).sum()) for edge in edges]
    return np.diff(up_to, prepend=0)


def _least_limits(prepared: Prepared, workload: Workload, forced: Forced) -> dict[str, float]:
    """Limits of the lanes without recomputation, capped at the least that recomputation can make of the largest.

    The largest limit is taken to be unimodal in the amount of recomputation: terms of decodes fall with it, and terms
    of prefills rise.
    """
    loads = Loads(prepared, forced)

    def limits(tokens: float) -> dict[str, float]:
        def left(model: ModelConfig) -> Rows:
            rows = recomputed(total_rows(workload, model), tokens, forced.shortest)
            ratio = 1 if model.sparse is None else model.sparse.ratio
            return rows._replace(scanned=max(0.0, rows.scanned - tokens / ratio))

        return loads.limits(prepared.cost.by_kind(left))

    p = workload.prompt_len
    g = workload.output_len
    most = float(((g - 1) * (2 * p + g)).sum()) / 2  # tokens of the sequences of all decodes
    low = 0.0
    high = most
    while high - low > 1e-6 * most:
        third = (high - low) / 3
        if max(limits(low + third).values()) < max(limits(high - third).values()):
            high -= third
        else:
            low += third
    plain = limits(0.0)
    least = max(limits(low).values())
    return {name: min(value, least) for name, value in plain.items()}
