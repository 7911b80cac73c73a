"""The requests of other settings, made of those that are given: more or fewer of them, longer or shorter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.models import ModelConfig
from workbench.workload import AT_ONCE, Request, Times, Workload
from workbench.workload.lengths import Lengths


def resized(given: Workload, requests: int, prompt_len: int, output_len: int) -> Workload:
    """So many requests with these mean lengths, whose lengths are spread as the given ones are.

    Without a change it is the given workload. Else requests repeat in their order or are cut off, lengths are scaled,
    and token ids and known ends are kept only where lengths stay as they are.
    """
    if (requests, prompt_len, output_len) == sizes(given):
        return given
    chosen = np.arange(requests) % len(given)
    prompts = _scaled(given.prompt_len, prompt_len)[chosen]
    outputs = _scaled(given.output_len, output_len)[chosen]
    same = (prompt_len, output_len) == sizes(given)[1:]
    return replace(
        given,
        prompt_len=prompts,
        output_len=outputs,
        requests=tuple(given.requests[place] for place in chosen) if same and given.requests else (),
        arrival=_arrivals(given, requests),
        ends=given.ends[chosen] if same and len(given.ends) else given.ends[:0],
    )


def thinned(given: Workload, requests: int) -> Workload:
    """So many of the requests, evenly from the first to the last, which are all there at the start."""
    chosen = np.unique(np.linspace(0, len(given) - 1, requests).round().astype(np.int64))
    return replace(
        given,
        prompt_len=given.prompt_len[chosen],
        output_len=given.output_len[chosen],
        requests=(),
        arrival=AT_ONCE,
        ends=given.ends[chosen] if len(given.ends) else given.ends,
    )


def sizes(workload: Workload) -> tuple[int, int, int]:
    """Number of requests, and the means of prompt and output lengths, rounded [tokens]."""
    return len(workload), round(workload.prompt_len.mean()), round(workload.output_len.mean())


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
    """Lengths with another mean, at least one token each; unchanged ones if the mean is the rounded one of these."""
    now = lengths.mean()
    if mean == round(now):
        return lengths
    scaled: Lengths = np.maximum(1, np.rint(lengths * (mean / now))).astype(np.int64)
    return scaled


def _arrivals(given: Workload, requests: int) -> Times:
    """Arrivals at the rate of the given ones: cut off, or repeated one after the other."""
    if not len(given.arrival):
        return AT_ONCE
    rounds, chosen = np.divmod(np.arange(requests), len(given))
    period = given.arrival[-1] * len(given) / max(1, len(given) - 1)
    repeated: Times = given.arrival[chosen] + rounds * period
    return repeated
