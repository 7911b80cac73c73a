"""Explanations, in words and figures, of the differences between bound, simulation and measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workbench.core.quiet import Noise
from workbench.core.result import Result, Source
from workbench.core.units import format_seconds
from workbench.perfmodels.bound import ARRIVAL
from workbench.perfmodels.loads import SUMS

_LANES = {
    "gpu": "the GPU",
    "cpu": "the CPU",
    "h2d": "the link to the GPU",
    "d2h": "the link to the host",
}
_NANOSECOND = 1e-9  # smaller differences are due to rounding
_MEASURED = (Source.MEASURED, Source.RECORDED)


def lane_of(binding: str) -> str:
    """The lane that a limit or a busiest lane is about ("h2d link" -> "h2d"), or "" for another limit."""
    first = binding.partition(" ")[0]
    return first if first in _LANES else ""


def in_words(binding: str) -> str:
    """A limit or busiest lane in words: ``the link to the GPU (h2d)``."""
    lane = lane_of(binding)
    return f"{_LANES[lane]}{f' ({lane})' if lane in ('h2d', 'd2h') else ''}" if lane else binding


def explain(results: Sequence[Result]) -> list[str]:
    """Sentences that explain the differences of results.

    Simulations and measurements are compared with their bound, and measurements also with their simulation. A
    prediction gets one sentence on its distance from all of these. The first sentences rank the schedules.
    """
    sentences = _rankings(results)
    for result in results:
        same = [other for other in results if other.same_question(result)]
        bounds = [other for other in same if other.source is Source.BOUND]
        simulated = [other for other in same if other.source is Source.SIMULATED]
        if result.source is Source.PREDICTED:
            sentences += _distances(result, [other for other in same if other.source is not Source.PREDICTED])
        if result.source in _MEASURED:
            sentences += [_against_simulation(result, other) for other in simulated]
        if result.source in (Source.SIMULATED, *_MEASURED):
            sentences += [_against_bound(result, other) for other in bounds]
    if _bound_passed(results):
        sentences.append(
            "processed tok/s counts tokens that are computed again after a preemption, of which a bound has none: it "
            "can be higher than the bound's, output tok/s cannot."
        )
    return sentences


def _rankings(results: Sequence[Result]) -> list[str]:
    """Sentences that name the fastest schedule, and its rate relative to the second one and to the first in the list.

    There is one sentence for each scenario and source with several schedules. Bounds and predictions are not ranked.
    """
    groups = dict[tuple[str, ...], list[Result]]()
    for result in results:
        if result.source in (Source.SIMULATED, *_MEASURED) and not result.stopped:
            key = (result.origin, result.model, result.machine, *(f"{k}: {v}" for k, v in result.facts.items()))
            groups.setdefault(key, []).append(result)
    rankings = []
    for group in groups.values():
        schedules = {result.schedule for result in group}
        if len(schedules) > 1 and all(result.generated for result in group):
            rankings.append(_ranking(group))
    return rankings


def _ranking(results: Sequence[Result]) -> str:
    best_of = {result.schedule: result for result in sorted(results, key=lambda result: result.gen_tok_s)}
    best, second, *_ = sorted(best_of.values(), key=lambda result: -result.gen_tok_s)
    told = f"{_capital(best.origin)}, {best.schedule} gives most, {best.gen_tok_s / second.gen_tok_s:.2f} times "
    told += second.schedule
    first = best_of[results[0].schedule]
    if first is best or first is second:
        return f"{told}, the next."
    return f"{told}, the next, and {best.gen_tok_s / first.gen_tok_s:.2f} times {first.schedule}."


def _bound_passed(results: Sequence[Result]) -> bool:
    """True if one of the results processes more tokens per second than its bound."""
    bounds = [result for result in results if result.source is Source.BOUND]
    return any(
        result.recomputed
        and result.source is not Source.PREDICTED
        and result.same_question(bound)
        and result.proc_tok_s > bound.proc_tok_s
        for result in results
        for bound in bounds
    )


def beyond_bound(result: Result, bound: Result) -> dict[str, float]:
    """Seconds by which a simulation or a run took longer than its bound, by cause; they add up to the difference.

    There are two causes, both of the lane that sets the bound, or of the busiest lane if none does: work beyond the
    least (recomputation, more iterations than needed, slower than assumed), and time in which the lane was idle.
    """
    if bound.binding == ARRIVAL:
        return {"until the last one was served": result.seconds - bound.seconds}
    lane = lane_of(bound.binding) or max(result.busy, key=lambda name: result.busy[name])
    busy = result.busy[lane]
    return {f"{lane} work beyond the least": busy - bound.seconds, f"{lane} waiting": result.seconds - busy}


def residual(measured: Result, simulated: Result) -> dict[str, float]:
    """Seconds by which a run took longer than its simulation, by cause; they add up to the whole difference.

    The causes are those of the lane that is busiest in the simulation: the work of its tasks, cores that others took
    from it while it worked, the time between iterations, and waiting for other lanes.

    Parameters
    ----------
    measured, simulated : Result
        Results of one scenario and schedule, both with every task in their timelines.
    """
    lane = max(simulated.busy, key=lambda name: simulated.busy[name])
    ours = _account(measured, lane)
    theirs = _account(simulated, lane)
    return {cause.format(lane=lane): ours[cause] - theirs[cause] for cause in ours}


def _account(result: Result, lane: str) -> dict[str, float]:
    """The seconds of a result, split up for one lane."""
    work = stolen = between = 0.0
    first = dict[int, float]()
    last = dict[int, float]()
    for span in result.timeline:
        first[span.iteration] = min(first.get(span.iteration, span.start), span.start)
        last[span.iteration] = max(last.get(span.iteration, span.end), span.end)
        if span.lane == lane:
            length = span.end - span.start
            own = length if math.isnan(span.cpu) or lane in ("h2d", "d2h") else min(span.cpu, length)
            work = work + own
            stolen = stolen + length - own
    between = result.seconds - sum(last[number] - first[number] for number in first)
    waiting = result.seconds - work - stolen - between
    return {
        "{lane} work": work,
        "core taken from {lane}": stolen,
        "between iterations": between,
        "{lane} waiting": waiting,
    }


def _against_bound(result: Result, bound: Result) -> str:
    what = result.source.value
    return (
        f"{result.schedule}: {what} {result.gen_tok_s:.4g} of at most {bound.gen_tok_s:.4g} output tok/s "
        f"({_percent(result.gen_tok_s / bound.gen_tok_s)}). {_capital(in_words(bound.binding))} sets the bound; "
        f"the {format_seconds(result.seconds - bound.seconds)} beyond it are {_signed(beyond_bound(result, bound))}, "
        f"in {_times(result.iterations / bound.iterations)} the least number of iterations.{_sums(bound)}"
    )


def _sums(bound: Result) -> str:
    """Sentences on the share of a lane's least time in which its GPUs or sockets add up partial sums; else empty."""
    told = ""
    for lane, name in SUMS.items():
        if (seconds := bound.limits.get(f"{lane} {name}")) is not None:
            share = seconds / bound.limits[f"{lane} compute"]
            told += f" {_capital(_LANES[lane])} spends {share:.0%} of its least time on the {name} between its parts."
    return told


def _against_simulation(measured: Result, simulated: Result) -> str:
    ratio = measured.gen_tok_s / simulated.gen_tok_s
    missing = measured.seconds - simulated.seconds
    start = (
        f"{measured.schedule}: {measured.source.value} {measured.gen_tok_s:.4g} of {simulated.gen_tok_s:.4g} simulated "
        f"output tok/s ({ratio:.0%}), {missing:+.3g} s."
    )
    if not Noise(measured.others).quiet:
        start += f" Others took {measured.others:.0%} of the cores meanwhile."
    start += _outside(measured, simulated)
    if _has_tasks(measured) and _has_tasks(simulated):
        return f"{start} By cause: {_signed(residual(measured, simulated))}."
    lanes = {lane: measured.busy.get(lane, 0.0) - busy for lane, busy in simulated.busy.items()}
    worst = max(lanes, key=lambda lane: abs(lanes[lane]))
    longest = max(measured.busy, key=lambda lane: measured.busy[lane])
    idle = 1 - measured.busy[longest] / measured.seconds
    return (
        f"{start} The {worst} lane worked {measured.busy[worst]:.3g} s where "
        f"{simulated.busy[worst]:.3g} s were predicted ({lanes[worst]:+.3g} s); "
        f"the busiest lane, {longest}, was idle {idle:.0%} of the time."
    )


def _outside(measured: Result, simulated: Result) -> str:
    """Advice for a run outside the simulation's interval; empty if the run is inside or there is no interval."""
    low, high = simulated.interval or (0.0, math.inf)
    if low <= measured.gen_tok_s <= high:
        return ""
    when = simulated.facts.get("measured", "")[:10]
    load = simulated.facts.get("calibrated", "")
    return (
        f" That is outside the 90 % interval, {low:.4g} to {high:.4g}: the model of its tasks misses something, or the "
        f"computer runs otherwise than when it was calibrated{f' ({when})' if when else ''}"
        f"{f' {load}' if load else ''}; run again, or calibrate with refresh=True."
    )


def _distances(predicted: Result, others: Sequence[Result]) -> list[str]:
    """Ratio of a prediction to every other result of its scenario and schedule, and the resource that binds in each."""
    if not others:
        return []
    told = ", ".join(_distance(predicted, other) for other in others)
    return [
        f"{predicted.schedule}: {predicted.predictor or 'a model'} predicts {predicted.gen_tok_s:.4g} output tok/s, "
        f"{told}; {in_words(predicted.binding)} binds in it."
    ]


def _distance(predicted: Result, other: Result) -> str:
    ratio = predicted.gen_tok_s / other.gen_tok_s
    if other.source is Source.BOUND:
        beyond = ", more than can be" if ratio > 1 else ""
        return f"{ratio:.0%} of the bound{beyond}"
    return f"{abs(ratio - 1):.1%} {'above' if ratio > 1 else 'below'} what was {other.source.value}"


def _has_tasks(result: Result) -> bool:
    """True if the timeline has every task, not one span per iteration."""
    return bool(result.timeline) and not any(span.lane == "step" for span in result.timeline)


def _signed(causes: Mapping[str, float]) -> str:
    told = {cause: seconds if abs(seconds) >= _NANOSECOND else 0.0 for cause, seconds in causes.items()}
    return ", ".join(
        f"{cause} {'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}" for cause, seconds in told.items()
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{100 * share:.2g}%"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio < 1000 else f"{ratio:,.0f} times"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
