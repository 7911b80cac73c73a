"""The requests of other settings, made of those that are given: more or fewer of them, longer or shorter."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.errors import WorkloadError
from workbench.core.units import is_whole
from workbench.models import ModelConfig
from workbench.workload.lengths import Lengths
from workbench.workload.request import Request
from workbench.workload.workload import AT_ONCE, Times, Workload

_KEPT = 32
"""Workloads that are kept for other scenarios with as many requests of the same lengths."""


class Sizes(NamedTuple):
    """Number and mean lengths of requests, in place of which others can be asked for.

    Attributes
    ----------
    requests : int
        Number of requests: the first ones, or all of them again and again.
    prompt_len : int
        Mean length of the prompts, whose spread stays [tokens].
    output_len : int
        Mean length of the outputs, whose spread stays [tokens].
    """

    requests: int
    prompt_len: int
    output_len: int


def sizes(workload: Workload) -> Sizes:
    """Number of requests, and the means of prompt and output lengths, rounded [tokens]."""
    return Sizes(len(workload), *workload.mean_len)


def resized(given: Workload, requests: int, prompt_len: int, output_len: int) -> Workload:
    """So many requests with these mean lengths, whose lengths are spread as the given ones are.

    Without a change it is the given workload. Else requests repeat in their order or are cut off, lengths are scaled
    unless their mean is that of the given ones, and token ids and known ends are kept only where lengths stay as they
    are.

    Raises
    ------
    WorkloadError
        If one of the numbers is no whole number from 1 on.
    """
    asked = Sizes(requests, prompt_len, output_len)
    for what, number in asked._asdict().items():
        if not is_whole(number) or number < 1:
            raise WorkloadError(f"{what} of a workload must be a whole number from 1 on, not {number!r}.")
    return given if asked == sizes(given) else _resized(given, asked)


@lru_cache(maxsize=_KEPT)
def _resized(given: Workload, asked: Sizes) -> Workload:
    now = sizes(given)
    places = np.arange(asked.requests) % len(given)
    prompts, outputs = given.prompt_len[places], given.output_len[places]
    same = asked[1:] == now[1:]
    return replace(
        given,
        prompt_len=prompts if asked.prompt_len == now.prompt_len else _scaled(prompts, asked.prompt_len),
        output_len=outputs if asked.output_len == now.output_len else _scaled(outputs, asked.output_len),
        requests=tuple(given.requests[place] for place in places) if same and given.requests else (),
        arrival=_arrivals(given, asked.requests),
        ends=given.ends[places] if same and len(given.ends) else given.ends[:0],
    )


def chosen(given: Workload, places: npt.NDArray[np.int64]) -> Workload:
    """The requests at some places alone, with their arrivals and ends."""
    return replace(
        given,
        prompt_len=given.prompt_len[places],
        output_len=given.output_len[places],
        requests=tuple(given.requests[place] for place in places) if given.requests else (),
        arrival=given.arrival[places] if len(given.arrival) else given.arrival,
        ends=given.ends[places] if len(given.ends) else given.ends,
    )


def thinned(given: Workload, requests: int) -> Workload:
    """So many of the requests, evenly from the first to the last, which are all there at the start."""
    places = np.unique(np.linspace(0, len(given) - 1, requests).round().astype(np.int64))
    return chosen(replace(given, requests=(), arrival=AT_ONCE), places)


def with_tokens(workload: Workload, model: ModelConfig) -> Workload:
    """The workload with token ids: its own if the model knows them all, or else seeded random ones of these lengths."""
    if workload.requests and max(max(request.prompt) for request in workload.requests) < model.vocab_size:
        return workload
    generator = np.random.default_rng(0)
    lengths = zip(workload.prompt_len.tolist(), workload.output_len.tolist(), strict=True)
    made = tuple(
        Request(tuple(generator.integers(model.vocab_size, size=prompt).tolist()), output) for prompt, output in lengths
    )
    return replace(workload, requests=made, synthetic=True)


def _scaled(lengths: Lengths, mean: int) -> Lengths:
    """Lengths in the same proportions, at least one token each, with exactly this mean."""
    count = len(lengths)
    rising = np.sort(lengths)
    ones = np.arange(count)  # so many of the shortest get one token, and the others share the rest
    factors = (mean * count - ones) / np.cumsum(rising[::-1])[::-1]
    factor = factors[int((factors * rising >= 1 - 1e-9).argmax())]
    exact = np.maximum(1.0, factor * lengths)
    whole: Lengths = np.floor(exact + 1e-9).astype(np.int64)
    missing = mean * count - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:missing]] += 1
    return whole


def _arrivals(given: Workload, requests: int) -> Times:
    """Arrivals at the rate of the given ones: cut off, or repeated one after the other."""
    if not len(given.arrival):
        return AT_ONCE
    rounds, chosen = np.divmod(np.arange(requests), len(given))
    period = given.arrival[-1] * len(given) / max(1, len(given) - 1)
    repeated: Times = given.arrival[chosen] + rounds * period
    return repeated
