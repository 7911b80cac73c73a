"""Why the bound, the simulation and the measurement differ, in words and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.result import Result, Source


def explain(results: Sequence[Result]) -> list[str]:
    """One sentence for each simulation beside its bound, and for each measurement beside its simulation."""
    sentences = []
    for result in results:
        if result.source is Source.BOUND:
            continue
        for reference in results:
            if reference.same_question(result):
                if reference.source is Source.BOUND and result.source is Source.SIMULATED:
                    sentences.append(_against_bound(result, reference))
                if reference.source is Source.SIMULATED and result.source in (Source.MEASURED, Source.RECORDED):
                    sentences.append(_against_simulation(result, reference))
    return sentences


def residual(measured: Result, simulated: Result) -> dict[str, float]:
    """Seconds by which a run took longer than its simulation, by cause; they add up to the whole difference.

    Both are accounted on the lane that the simulation keeps busiest: its tasks' own work, the core that others took
    from it while it worked, the time between iterations, and waiting for other lanes.

    Parameters
    ----------
    measured, simulated : Result
        Of one scenario and schedule, both with every task in their timelines.
    """
    lane = max(simulated.busy, key=lambda name: simulated.busy[name])
    ours, theirs = _account(measured, lane), _account(simulated, lane)
    return {cause.format(lane=lane): ours[cause] - theirs[cause] for cause in ours}


def _account(result: Result, lane: str) -> dict[str, float]:
    """The seconds of a result, split up for one lane."""
    work = stolen = between = 0.0
    first, last = dict[int, float](), dict[int, float]()
    for span in result.timeline:
        first[span.iteration] = min(first.get(span.iteration, span.start), span.start)
        last[span.iteration] = max(last.get(span.iteration, span.end), span.end)
        if span.lane == lane:
            length = span.end - span.start
            own = length if math.isnan(span.cpu) or lane in ("h2d", "d2h") else min(span.cpu, length)
            work, stolen = work + own, stolen + length - own
    between = result.seconds - sum(last[number] - first[number] for number in first)
    waiting = result.seconds - work - stolen - between
    return {
        "{lane} work": work,
        "core taken from {lane}": stolen,
        "between iterations": between,
        "{lane} waiting": waiting,
    }


def _against_bound(simulated: Result, bound: Result) -> str:
    share = simulated.gen_tok_s / bound.gen_tok_s
    lane, busy = max(simulated.utilisation.items(), key=lambda item: item[1])
    extra = simulated.iterations / bound.iterations
    return (
        f"{simulated.schedule}: simulated {simulated.gen_tok_s:.4g} of at most {bound.gen_tok_s:.4g} output tok/s "
        f"({share:.0%}). The bound is the {bound.binding}; the simulated {lane} lane is busy {busy:.0%} of the time, "
        f"in {extra:.3g} times the least number of iterations."
    )


def _against_simulation(measured: Result, simulated: Result) -> str:
    ratio = measured.gen_tok_s / simulated.gen_tok_s
    missing = measured.seconds - simulated.seconds
    lanes = {lane: measured.busy.get(lane, 0.0) - busy for lane, busy in simulated.busy.items()}
    worst = max(lanes, key=lambda lane: abs(lanes[lane]))
    longest = max(measured.busy, key=lambda lane: measured.busy[lane])
    idle = 1 - measured.busy[longest] / measured.seconds
    return (
        f"{measured.schedule}: measured {measured.gen_tok_s:.4g} of {simulated.gen_tok_s:.4g} simulated output tok/s "
        f"({ratio:.0%}), {missing:+.3g} s. The {worst} lane worked {measured.busy[worst]:.3g} s where "
        f"{simulated.busy[worst]:.3g} s were predicted ({lanes[worst]:+.3g} s); "
        f"the busiest lane, {longest}, was idle {idle:.0%} of the time."
    )
