"""Explanations in words: what limits the results, by how much, what would help, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workbench.analysis.limits import MEASURED, PLAYED, bound_of, has_tasks, limits_in_words, rivals
from workbench.analysis.wording import GAIN, LANES, capital, in_words, lane_of, listed, percent, times
from workbench.core.quiet import Noise
from workbench.core.result import Result, Source
from workbench.core.units import SECONDS, alike, format_seconds, four_digits
from workbench.perfmodels.bound import ARRIVAL
from workbench.perfmodels.loads import SUMS

_ORDER = ((Source.PUBLISHED,), (Source.BOUND,), (Source.PREDICTED,), (Source.SIMULATED,), MEASURED)
"""Sources in the order in which a headline is about them, the last one first."""


def headline(results: Sequence[Result], *, hardware: bool = True) -> str:
    """The sentence that matters most: what limits the best result, by how much, and what would help.

    The best is the fastest measurement, or else the fastest simulation, prediction, bound or published result. The
    sentence tells what its busiest lane waited for if its timeline has every task: that of `run`, or of
    ``simulate(..., detail=Detail.TASK)``.

    Parameters
    ----------
    results : sequence of Result
    hardware : bool
        Tell what faster hardware would give with the same batches; `shadow_prices` tells it for batches that adapt.

    Raises
    ------
    ValueError
        If there are no results.
    """
    if not results:
        raise ValueError("headline needs at least one Result, as bound, simulate or run return them.")
    return limits_in_words(_best(results), results, hardware=hardware)


def explain(results: Sequence[Result], *, hardware: bool = True) -> list[str]:
    """Sentences on what limits results and why they differ, beginning with the `headline`; none without results.

    The schedules are ranked. Then follows each result, the best one first: a measurement is compared with its
    simulation, a prediction with all other results of its scenario and schedule, and of each simulation and measurement
    that has a bound it is told what limits it. `hardware` is that of `headline`.
    """
    if not results:
        return []
    best = _best(results)
    sentences = [headline(results, hardware=hardware), *_rankings(results)]
    for result in sorted(results, key=lambda result: result is not best):
        same = [other for other in results if other.same_question(result)]
        if result.source is Source.PREDICTED:
            sentences += _distances(result, [other for other in same if other.source is not Source.PREDICTED])
        if result.source in MEASURED:
            for simulated in (other for other in same if other.source is Source.SIMULATED):
                sentences += [_against_simulation(result, simulated), *_outside(result, simulated)]
        bound = bound_of(result, results)
        if bound is not None and result.source in PLAYED:
            sentences += [] if result is best else [limits_in_words(result, results, hardware=hardware)]
            sentences += _sums(bound)
    if _bound_passed(results):
        sentences.append(
            "Processed tok/s count tokens that are computed again after a preemption and can be above the bound's, "
            "which counts each token once; output tok/s cannot."
        )
    return list(dict.fromkeys(sentences))


def _best(results: Sequence[Result]) -> Result:
    """The fastest measurement, or else the fastest simulation, and so on in `_ORDER`."""
    return max(results, key=lambda result: (_rank(result), result.gen_tok_s))


def _rank(result: Result) -> int:
    """Place of a result's source in `_ORDER`."""
    return next(place for place, sources in enumerate(_ORDER) if result.source in sources)


def _rankings(results: Sequence[Result]) -> list[str]:
    """Sentences that name the fastest schedule, and its rate relative to the second one and to the first in the list.

    There is one sentence for each scenario and source with several schedules. Bounds and predictions are not ranked.
    """
    rankings = dict[str, None]()
    for result in results:
        group = rivals(result, results)
        several = len({other.schedule for other in group}) > 1
        if result.source in PLAYED and not result.stopped and several and all(other.generated for other in group):
            rankings[_ranking(group)] = None
    return list(rankings)


def _ranking(results: Sequence[Result]) -> str:
    best_of = {result.schedule: result for result in sorted(results, key=lambda result: result.gen_tok_s)}
    best, second, *_ = sorted(best_of.values(), key=lambda result: -result.gen_tok_s)
    begin = f"Of the {len(best_of)} schedules that were {best.origin}, {best.schedule} is the fastest"
    if best.gen_tok_s < GAIN * min(result.gen_tok_s for result in best_of.values()):
        return f"{begin}, and all are within {100 * (GAIN - 1):.0f} % of it."
    compared = dict.fromkeys((second.schedule, results[0].schedule))
    told = [_relative(best, best_of[name]) for name in compared if name != best.schedule]
    return f"{begin}: {listed(told)}."


def _relative(best: Result, other: Result) -> str:
    ratio = best.gen_tok_s / other.gen_tok_s
    if ratio < GAIN:
        return f"less than {100 * (GAIN - 1):.0f} % faster than {other.schedule}"
    return f"{times(ratio)} as fast as {other.schedule}"


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
    from it while it worked, the time between iterations, and waiting for other lanes. What others take from a lane of
    several threads, or of a card, is not known and counts as work.

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


def _sums(bound: Result) -> list[str]:
    """Sentences on the share of a lane's least time in which its GPUs or sockets add up partial sums."""
    told = []
    for lane, name in SUMS.items():
        if (seconds := bound.limits.get(f"{lane} {name}")) is not None:
            share = percent(seconds / bound.limits[f"{lane} compute"])
            told.append(f"{capital(LANES[lane])} spends {share} of its least time on the {name} between its parts.")
    return told


def _against_simulation(measured: Result, simulated: Result) -> str:
    """The sentence on a run and its simulation: the seconds between them by cause, and what would help."""
    lane = max(simulated.busy, key=lambda name: simulated.busy[name])
    detailed = has_tasks(measured) and has_tasks(simulated)
    events: tuple[str, ...]
    if detailed:
        causes = residual(measured, simulated)
        events = (
            *("worked {}", "was without its cores {}"),
            *("was idle {} between iterations", "waited {} for other parts"),
        )
    else:
        busy = measured.busy.get(lane, 0.0) - simulated.busy[lane]
        causes = {f"{lane} work": busy, f"{lane} idle": measured.seconds - simulated.seconds - busy}
        events = ("worked {}", "was idle {}")
    total, (foreseen, *seconds) = alike([simulated.seconds, *causes.values()], SECONDS)
    told = [event.format(_more(amount)) for event, amount in zip(events, seconds, strict=True) if _some(amount)]
    why = f": {in_words(lane)} {listed(told)}" if told else ""
    mend = _mend(measured, simulated, causes) if detailed and total != foreseen else ""
    return (
        f"{measured.schedule} took {total} where {foreseen} were simulated ({measured.source.value} "
        f"{four_digits(measured.gen_tok_s)} of {four_digits(simulated.gen_tok_s)} simulated output tok/s, "
        f"{percent(simulated.seconds / measured.seconds)}){why}{mend}{_disturbed(measured)}."
    )


def _more(amount: str) -> str:
    """A difference in words: ``0.5 s more`` or ``0.5 s less``."""
    return f"{amount.removeprefix('-')} {'less' if amount.startswith('-') else 'more'}"


def _some(amount: str) -> bool:
    return any(digit in amount for digit in "123456789")


def _mend(measured: Result, simulated: Result, causes: Mapping[str, float]) -> str:
    """A mend of the largest cause for which a run took longer; empty if it is as fast as simulated or none is known."""
    if measured.seconds < GAIN * simulated.seconds:
        return ""
    lane = max(simulated.busy, key=lambda name: simulated.busy[name])
    work, stolen, between, _ = causes.values()
    largest = max(causes.values())
    if largest == work:
        known = simulated.facts.get("measured", "catalogue") != "catalogue"
        again = "calibrate(refresh=True) measures them again" if known else "calibrate() measures them"
        ratio = 1 + work / simulated.busy[lane]
        return f"; its tasks took {times(ratio)} as long as expected, and {again}"
    if largest == stolen:
        return "; run it again while no other program uses them"
    if largest == between and measured.iterations:
        each = format_seconds(between / measured.iterations)
        return f"; that is {each} more per iteration, and larger batches need fewer iterations"
    return _waited(measured, simulated)


def _waited(measured: Result, simulated: Result) -> str:
    """The other lane whose work exceeds the simulation's most; empty if none does by much."""
    lane = max(simulated.busy, key=lambda name: simulated.busy[name])
    ratios = {
        name: measured.busy.get(name, 0.0) / busy for name, busy in simulated.busy.items() if busy and name != lane
    }
    slowest = max(ratios, key=lambda name: measured.busy.get(name, 0.0) - simulated.busy[name], default="")
    if not slowest or ratios[slowest] < GAIN:
        return ""
    return f"; {in_words(slowest)} worked {times(ratios[slowest])} as long as expected"


def _disturbed(measured: Result) -> str:
    if Noise(measured.others).quiet:
        return ""
    return f"; other programs took {percent(measured.others)} of the cores meanwhile, so run it again without them"


def _outside(measured: Result, simulated: Result) -> list[str]:
    """A sentence with advice for a run outside the simulation's interval; none if it is inside or there is none."""
    low, high = simulated.interval or (0.0, math.inf)
    if low <= measured.gen_tok_s <= high:
        return []
    when = simulated.facts.get("measured", "")[:10]
    load = simulated.facts.get("calibrated", "")
    return [
        f"{measured.schedule} was {measured.source.value} outside the simulation's 90 % interval, {four_digits(low)} "
        f"to {four_digits(high)} output tok/s: the model of its tasks misses something, or the computer runs otherwise "
        f"than when it was calibrated{f' ({when})' if when else ''}{f' {load}' if load else ''}; run it again, or "
        "calibrate with refresh=True."
    ]


def _distances(predicted: Result, others: Sequence[Result]) -> list[str]:
    """Ratio of a prediction to every other result of its scenario and schedule, and the resource that limits it."""
    if not others:
        return []
    told = [_distance(predicted, other) for other in others]
    return [
        f"{predicted.predictor or 'A model'} predicts {four_digits(predicted.gen_tok_s)} output tok/s for "
        f"{predicted.schedule}, {listed(told)}; in its equations {in_words(predicted.binding)} limits."
    ]


def _distance(predicted: Result, other: Result) -> str:
    ratio = predicted.gen_tok_s / other.gen_tok_s
    if other.source is Source.BOUND:
        beyond = ", more than is possible" if ratio > 1 else ""
        return f"{percent(ratio)} of the bound ({four_digits(other.gen_tok_s)}{beyond})"
    apart = f"{100 * abs(ratio - 1):.1f} % {'more' if ratio > 1 else 'less'}"
    return f"{apart} than was {other.source.value} ({four_digits(other.gen_tok_s)})"
