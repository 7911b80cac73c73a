"""What no schedule can beat: the load of each lane, and the iterations that the KV cache forces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from workbench.cost import Rows
from workbench.models import ModelConfig
from workbench.prepared import Prepared, facts
from workbench.profile import Cores
from workbench.result import Result, Source
from workbench.scenario import Scenario
from workbench.scheduler.block_manager import block_iterations
from workbench.schedules.base import Schedule
from workbench.segments import Kind
from workbench.serving import prepare
from workbench.workload import Workload

ARRIVAL = "the last arrival"
"""Name of the limit that requests set which come late."""
DRAM = "DRAM bandwidth"
"""Name of the limit that the host's memory sets."""
SUMS = {"gpu": "all-reduce", "cpu": "reduce-scatter"}
"""What a lane's limit is called that is part of its own: adding up what each of its GPUs or sockets has."""
_ONE_TOKEN = (Rows(prefill=1, pairs=1, emits=1), Rows(decode=1, context=1, emits=1))


def bound(scenario: Scenario, schedule: Schedule) -> Result:
    """Least time in which any order of tasks could serve the workload on this machine.

        n = max(ceil(sum of block-iterations / blocks), longest output)
        T = max over lanes of (work that the requests need, work that n iterations need), the last arrival

    A scheduler may preempt and recompute: then one prefill of c tokens stands for a decode that would have read c KV
    entries. T is the least over how much is recomputed, so that it holds for every scheduler.

    The schedule is checked against the pipeline and named in the result; the bound does not depend on it.

    Returns
    -------
    Result
        With source BOUND; `limits` has the seconds of each limit.

    Notes
    -----
    For MoE-Lens' pipeline and equal lengths this is T <= min(N g / S, n_it g / (p + g - 1)) / delta in output tokens
    per second, S the exact block-iterations of one request and n_it the tokens that the GPU computes
    while one pass of weights streams. The host's memory is a limit of its own: what the cpu lane and both directions
    of the link read and write there passes one bandwidth. Where lanes share a computer's cores instead, those cores
    are the limit.
    """
    prepared = prepare(scenario, schedule)
    iterations = least_iterations(scenario.workload, scenario.kv_blocks, scenario.memory.kv_block)
    workload = scenario.workload
    limits = _least_limits(prepared, workload, iterations)
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
        iterations=iterations,
        limits=limits,
        facts=facts(scenario, prepared),
    )


def total_rows(workload: Workload, model: ModelConfig) -> Rows:
    """What all requests put on the stages of a mean layer when nothing is computed twice."""
    p, g = workload.prompt_len, workload.output_len
    pairs = model.attended_below(p)
    context = model.attended_below(p + g - 1) - pairs
    return Rows(int(p.sum()), int((g - 1).sum()), float(pairs.sum()), float(context.sum()), int(g.sum()))


def recomputed(rows: Rows, context: float, shortest: float) -> Rows:
    """The least that is left to do when decodes that read `context` KV entries are replaced by prefills.

    Each has a context of at least `shortest`, so at most context / shortest decodes go; the quadratic part of their
    prefill attention is left out, which can only lower the bound.
    """
    gone = min(rows.decode, context / shortest)
    return rows._replace(prefill=rows.prefill + context, decode=rows.decode - gone, context=rows.context - context)


def least_iterations(workload: Workload, blocks: int, block: int) -> int:
    """Iterations that the KV cache and the longest output force."""
    held = int(block_iterations(workload.prompt_len, workload.output_len, block).sum())
    return max(-(-held // blocks), int(workload.output_len.max()))


def _least_limits(prepared: Prepared, workload: Workload, iterations: int) -> dict[str, float]:
    """Limits of the lanes if nothing is recomputed, capped at what the best recomputing could make of the largest.

    The largest limit is unimodal in how much is recomputed: lanes of attention and its transfers gain, the others lose.
    """
    model = prepared.scenario.model
    total, several = total_rows(workload, model), workload.output_len > 1
    if not several.any():
        return lane_limits(prepared, total, iterations)
    shortest = float(model.attended(workload.prompt_len[several].min() + 1))

    def limits(context: float) -> dict[str, float]:
        return lane_limits(prepared, recomputed(total, context, shortest), iterations)

    low, high = 0.0, total.context
    while high - low > 1e-6 * total.context:
        third = (high - low) / 3
        if max(limits(low + third).values()) < max(limits(high - third).values()):
            high -= third
        else:
            low += third
    plain, least = limits(0.0), max(limits(low).values())
    return {name: min(value, least) for name, value in plain.items()}


def lane_limits(prepared: Prepared, total: Rows, iterations: int) -> dict[str, float]:
    """Least seconds of each lane for these rows in so many iterations: with every core it can have.

    Where lanes share a computer's cores, those of all cores too; else those of the host's memory.
    """
    cost, layers, cores = prepared.cost, prepared.layers, prepared.scenario.machine.cores
    limits = {"gpu compute": 0.0, "cpu compute": 0.0, "d2h link": 0.0, "h2d link": 0.0}
    shared, sums = 0.0, {"gpu": 0.0, "cpu": 0.0}

    def compute(lane: str, least: Callable[..., float], times: int) -> None:
        nonlocal shared
        seconds = {
            threads: _least(partial(least, threads=threads), total, iterations) * times
            for threads in _threads(cores, lane)
        }
        limits[f"{lane} compute"] += min(seconds.values())
        shared += min(value * threads for threads, value in seconds.items())

    for node in prepared.lowering.graph.undeferred:
        if node.kind is Kind.SEGMENT:
            for stage in node.stages:
                compute(node.lane, partial(cost.least, stage), layers)
                sums[node.lane] += _least(partial(cost.adding_up, stage), total, iterations) * layers
        else:
            limits[f"{node.lane} link"] += cost.node(node, total) * layers
    for kind in (Kind.EMBED, Kind.HEAD):
        compute("gpu", partial(cost.least_ends, kind), 1)
    limits["h2d link"] += cost.fetch(cost.weights_per_layer) * layers * iterations
    if cores is None:
        limits[DRAM] = _host_bytes(prepared, total, iterations) / prepared.scenario.machine.cpu.bandwidth
    else:
        limits["cores that both lanes share"] = shared / max(cores.alone, cores.gpu + cores.cpu)
    limits |= {f"{lane} {SUMS[lane]}": seconds for lane, seconds in sums.items() if seconds}
    return limits


def _host_bytes(prepared: Prepared, total: Rows, iterations: int) -> float:
    """What the cpu lane and the link cannot but read from and write to the host's memory [B]."""
    cost = prepared.cost
    of_layer = cost.weights_per_layer * iterations
    for node in prepared.lowering.graph.undeferred:
        of_layer += _least(partial(cost.host_bytes, node), total, iterations)
    return of_layer * prepared.layers


def _threads(cores: Cores | None, lane: str) -> tuple[int, ...]:
    """Numbers of threads that a lane may have; 0 where it has a device of its own."""
    return (0,) if cores is None else (cores.gpu if lane == "gpu" else cores.cpu, cores.alone)


def _least(least: Callable[[Rows], float], total: Rows, iterations: int) -> float:
    """All rows at once, or the least that every iteration asks for."""
    return max(least(total), iterations * min(map(least, _ONE_TOKEN)))
