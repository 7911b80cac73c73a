"""Progress of a job, and the time that is left: simulated before it begins, and corrected by what was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from workbench.core.units import format_seconds
from workbench.jobs.answering import UnderWay, Watcher
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.simulate import simulate
from workbench.workload import Workload

_SAMPLE = 256
"""Most requests that are simulated; the time of more is in proportion to their tokens."""
_FORM = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_TICK = 1e-3
_TRUST = 0.02
"""Share of a job that has to be done until measurement and simulation count alike."""


@dataclass(frozen=True)
class Estimate:
    """The time that a job takes.

    Attributes
    ----------
    simulated : float
        Seconds of the whole job, simulated.
    done : float
        Share of its tokens that is done, from 0 to 1.
    elapsed : float
        Seconds that it has taken so far.
    """

    simulated: float
    done: float = 0.0
    elapsed: float = 0.0

    @property
    def factor(self) -> float:
        """Seconds measured per second simulated; 1 at the beginning, and measured alone towards the end."""
        return (_TRUST * self.simulated + self.elapsed) / ((_TRUST + self.done) * self.simulated)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.factor * (1 - self.done) * self.simulated

    def at(self, done: float, elapsed: float) -> Estimate:
        """The estimate once so much is done."""
        return replace(self, done=done, elapsed=elapsed)

    def __str__(self) -> str:
        how = f"simulated, x {self.factor:.2f} as measured" if self.done else "simulated"
        return f"{format_seconds(self.left)} left ({how})"


def simulated(scenario: Scenario, schedule: Schedule, prompts: Sequence[int], outputs: Sequence[int]) -> Estimate:
    """The estimate of requests of these lengths, all of which generate their whole output.

    Parameters
    ----------
    scenario : Scenario
        Its workload is left out.
    schedule : Schedule
    prompts, outputs : sequence of int
        Lengths of each request [tokens].
    """
    step = -(-len(prompts) // _SAMPLE)
    some = Workload.lengths(list(prompts[::step]), list(outputs[::step]))
    share = float(some.prompt_len.sum() + some.output_len.sum()) / (sum(prompts) + sum(outputs))
    return Estimate(simulate(scenario.on(workload=some), schedule).seconds / share)


class Progress(Watcher):
    """The bar of a job: requests, tokens per second, and the time that is left.

    Parameters
    ----------
    estimate : Estimate
    requests, before : int
        Requests in all, and those that were answered before.
    planned : int
        Tokens of all other prompts and, at most, of their answers.
    """

    def __init__(self, estimate: Estimate, requests: int, before: int, planned: int) -> None:
        self._estimate = estimate
        self._planned = planned
        self._done = 0
        self._began: float | None = None
        self.tokens = 0
        self._bar = tqdm(total=requests, initial=before, desc="generate", bar_format=_FORM, postfix=str(estimate))

    def loaded(self) -> None:
        """Count the time from here on; the model may be loaded again."""
        self._began = self._began or time.monotonic()

    def ended(self, each: UnderWay) -> None:
        """Count the request and its tokens."""
        self.tokens += len(each.tokens)
        self._done += each.line.asked.tokens
        self._bar.update()

    def set_aside(self) -> None:
        """A request is not served."""
        self._bar.total -= 1

    def look(self, under_way: set[UnderWay]) -> None:
        """Draw the bar; what requests under way have of their tokens counts."""
        elapsed = 0.0 if self._began is None else time.monotonic() - self._began
        generated = 0
        done = self._done
        for each in under_way:
            generated += len(each.tokens)
            done += len(each.line.asked.request.prompt) + len(each.tokens) if each.tokens else 0
        estimate = self._estimate.at(done / self._planned, elapsed)
        rate = (self.tokens + generated) / max(elapsed, _TICK)
        self._bar.set_postfix_str(f"{rate:.3g} tok/s, {estimate}", refresh=False)

    def close(self) -> None:
        """End the bar, which remains to be seen."""
        self._bar.close()
