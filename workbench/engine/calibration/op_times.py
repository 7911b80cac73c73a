"""From the seconds of operations, seen in passes through the layers, to the times that `simulate` takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression, nnls

from workbench.engine.calibration.timed import Call, Pass
from workbench.engine.model.few_rows import MOST
from workbench.hardware.profile import Contention, Cores, OpTime
from workbench.stages import BUILT_IN, Rows, measured_seconds

TOLD = 0.25
"""Least share of a lane's time beside the other compute lane: with less, growth is lost in the times' errors."""
FEWEST = 3
"""Least number of other lanes' tasks: with fewer, a lane's waits are lost in the times' errors."""
NEAR = 1.1
"""Numbers of tokens that differ by a smaller factor are one point: their times differ by noise, and the line through
the last two points would extrapolate it."""
LEAST_SPREAD = 0.05
"""Least relative standard deviation of computing that an interval assumes: computers drift in the minutes between
calibration and run. Of 44 predictions for four models, half were within 3.6 %, nine of ten within 9.2 % (two Zen 4
cores, `data/measured/sim-odd-zen4.json`), and 38 in the interval that follows."""
_OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_SIDE = 1.645
"""Standard deviations to either side of the middle that hold 90 % of a normal distribution."""


def op_times(calls: Sequence[Call]) -> tuple[OpTime, ...]:
    """The times of every operation, from calls while no other lane worked."""
    found: dict[tuple[str, int, bool], Seen] = {}
    for call in calls:
        key = _key(call)
        found.setdefault(key, Seen(*key)).note(call.rows, own_seconds(call))
    return tuple(seen.time() for seen in found.values())


def rest(passes: Sequence[Pass], ops: Sequence[OpTime]) -> float:
    """Seconds that plans take longer whose lanes wait for weights: caches are cold when these have come."""
    times = _by_key(ops)

    def longer(one: Pass) -> float:
        return sum(own_seconds(call) - measured_seconds(times[_key(call)], call.rows) for call in one.calls)

    return max(0.0, typical([longer(one) for one in passes]))


def _by_key(ops: Sequence[OpTime]) -> dict[tuple[str, int, bool], OpTime]:
    return {(time.op, time.threads, time.resident): time for time in ops}


def own_seconds(call: Call) -> float:
    """A thread's own seconds where there is one, since nobody can steal those."""
    return call.cpu if call.threads == 1 else call.wall


def contention(passes: Sequence[Pass], ops: Sequence[OpTime], cores: Cores, link: float) -> Contention:
    """Slowdown of the compute lanes by what else works, from plans in which both work, beside a stream or without one.

        t_own = t_alone (1 + s q + f b),    t = t_own + stolen + n w

    t_own is the time of the lane's own thread, s the slowdown by the stream, which works for the share q of the plan,
    f the share of the lane's time in which the other one worked, and n the tasks of other lanes that ran meanwhile.
    b and w are medians over the plans in which f and n are large enough to tell them from the times' own errors. Of a
    team of threads, and of lanes that share a core, t_own is the time by the clock less what is stolen, and w is 0.
    """
    times = _by_key(ops)
    slowed = {"gpu": cores.gpu_slowdown * link, "cpu": cores.cpu_slowdown * link}
    apart = cores.gpu + cores.cpu <= cores.alone
    growths = dict[str, float]()
    waits = dict[str, float]()
    for lane, slowdown in slowed.items():
        growth = list[float]()
        wait = list[float]()
        for one in passes:
            mine = [call for call in one.calls if call.lane == lane]
            computed = sum(call.wall for call in mine) - _stolen(one, lane, cores, link)
            own = computed
            count = one.tasks_beside(lane)
            if apart and all(call.threads == 1 for call in mine):
                own = sum(map(own_seconds, mine))
                if count >= FEWEST:
                    wait.append((computed - own) / count)
            share = one.beside_the_other(lane)
            if share >= TOLD:
                alone = sum(measured_seconds(times[_key(call)], call.rows) for call in mine)
                streaming = min(1.0, one.busy("h2d") / one.seconds)
                growth.append((own / alone - 1 - slowdown * streaming) / share)
        growths[lane] = max(0.0, median(growth)) if growth else 0.0
        waits[lane] = max(0.0, median(wait)) if wait else 0.0
    return Contention(growths["gpu"], growths["cpu"], waits["gpu"], waits["cpu"])


def _stolen(one: Pass, lane: str, cores: Cores, link: float) -> float:
    """Seconds that the movers take from a lane. They share the cores of the cpu lane if no core is spare."""
    if lane != "cpu" or cores.spare:
        return 0.0
    return cores.stolen(link) * one.both_work(lane, "h2d")


def spread(passes: Sequence[Sequence[Pass]], ops: Sequence[OpTime]) -> tuple[float, float]:
    """90 % interval of a run's computing over what the operations' times say, from repetitions of several plans.

    The times' own error is how far the mean of a plan's repetitions is off, by the median of all plans; the computer's
    drift, how far the repetitions of one round, all plans together, are.
    """
    times = _by_key(ops)
    off = []
    for repeated in passes:
        off.append([_ratio(one, times) for one in repeated])
    means = np.array([np.mean(ratios) for ratios in off])
    error = _OF_NORMAL * float(np.median(np.abs(means - np.median(means))))
    rounds = []
    for number in range(len(off[0])):
        of_round = [ratios[number] for ratios in off if number < len(ratios)]
        rounds.append(np.mean(of_round))
    deviation = max(LEAST_SPREAD, float(np.hypot(error, np.std(rounds))))
    return float(np.exp(-_SIDE * deviation)), float(np.exp(_SIDE * deviation))


def _ratio(one: Pass, times: Mapping[tuple[str, int, bool], OpTime]) -> float:
    """Logarithm of the seconds of a plan's operations over what their times say."""
    said = sum(measured_seconds(times[_key(call)], call.rows) for call in one.calls)
    return float(np.log(sum(map(own_seconds, one.calls)) / said))


def _key(call: Call) -> tuple[str, int, bool]:
    return call.op, call.threads, call.resident


class Seen:
    """Seconds of one operation on one number of threads, with the rows that it was given."""

    def __init__(self, op: str, threads: int, resident: bool = False) -> None:
        self.op = op
        self.threads = threads
        self._resident = resident
        self._rows: list[Rows] = []
        self._seconds: list[float] = []

    def note(self, rows: Rows, seconds: float) -> None:
        """One call."""
        if rows.tokens:
            self._rows.append(rows)
            self._seconds.append(seconds)

    def time(self) -> OpTime:
        """The seconds as a function of the rows."""
        op = BUILT_IN.get(self.op)
        if op is not None and op.reads_past:
            return self._prefill()
        if op is not None and op.keeps_kv:
            return self._decode()
        return replace(self._by_tokens([True] * len(self._rows)), resident=self._resident)

    def _by_tokens(self, counts: Sequence[bool]) -> OpTime:
        """Time against tokens, from those calls that count; it never falls. Numbers near one another are one point."""
        groups = defaultdict[float, list[float]](list)
        for rows, seconds, count in zip(self._rows, self._seconds, counts, strict=True):
            if count:
                groups[rows.tokens].append(seconds)
        near = _near(groups)
        tokens = [float(np.mean(numbers)) for numbers in near]
        typicals = {number: typical(seconds) for number, seconds in groups.items()}
        means = list[float]()
        for numbers in near:
            means.append(float(np.mean([typicals[number] for number in numbers])))
        rising = isotonic_regression(means).x
        few = MOST if self.threads else 0.0
        return OpTime(self.op, self.threads, tuple(tokens), tuple(rising.tolist()), few=few)

    def _prefill(self) -> OpTime:
        """Per call, per prompt, per token and per query-key pair."""
        features = [[1.0, rows.emits, rows.prefill, rows.pairs] for rows in self._rows]
        call, prompt, token, pair = per_unit(features, self._seconds)
        most = max(rows.prefill for rows in self._rows)
        line = ((1.0, most), (call + token, call + token * most))
        return OpTime(self.op, self.threads, *line, per_prompt=prompt, per_pair=pair)

    def _decode(self) -> OpTime:
        """Storing new rows, as seen without decodes; calls with decodes by their number, and per KV entry."""
        store = self._by_tokens([not rows.decode for rows in self._rows])
        seen = [(rows, seconds) for rows, seconds in zip(self._rows, self._seconds, strict=True) if rows.decode]
        near = _near({rows.decode for rows, _ in seen})
        counts = [numbers[0] for numbers in near]
        features = list[list[float]]()
        for rows, _ in seen:
            steps = [float(rows.decode >= count) for count in counts]
            features.append([*steps, rows.context])
        *longer, entry = per_unit(features, [seconds for _, seconds in seen])
        rising = tuple(np.cumsum(longer).tolist())
        return replace(store, per_context=entry, decodes=tuple(counts), decode_seconds=rising)


def _near(numbers: Iterable[float]) -> list[list[float]]:
    """Rising groups of numbers that differ by less than the factor `NEAR` from the first of their group."""
    groups = list[list[float]]()
    for number in sorted(numbers):
        if groups and number < NEAR * groups[-1][0]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def typical(seconds: Sequence[float]) -> float:
    """Mean without the fastest and the slowest tenth: a run adds calls up, so the mean is what it sees.

    Of three or more values, at least the fastest and the slowest are left out.
    """
    cut = min(max(1, len(seconds) // 10), (len(seconds) - 1) // 2)
    return float(np.mean(sorted(seconds)[cut : len(seconds) - cut]))


def per_unit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of least relative squares, none negative: seconds per unit of each feature.

    Repetitions count by their typical time: relative squares of single ones would follow the fastest.
    """
    repeated = defaultdict[tuple[float, ...], list[float]](list)
    for each, took in zip(features, seconds, strict=True):
        repeated[tuple(each)].append(took)
    wide: npt.NDArray[np.float64] = np.array(list(repeated), dtype=float)
    target = np.array([typical(took) for took in repeated.values()])
    weight = 1 / np.maximum(target, target.max() * 1e-3 or 1.0)
    scale = wide.max(axis=0) + (wide.max(axis=0) == 0)
    found, _ = nnls(wide / scale * weight[:, None], target * weight)
    return tuple((found / scale).tolist())
