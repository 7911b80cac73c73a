"""Layered Prefill: groups of layers instead of chunks of tokens; the expert traffic of both, and their energy."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from workbench.perfmodels.coverage import Coverage
from workbench.perfmodels.domain import Number, at_least, positive


def layer_groups(prompt: ArrayLike, layers: ArrayLike, *, granularity: ArrayLike = 512) -> Number:
    """Number of layer groups that a prompt's prefill is cut into [groups].

        G(L) = min(n_layers, max(1, ceil(L / granularity)))

    Parameters
    ----------
    prompt : array_like
        L, tokens of all requests that are prefilled together.
    layers : array_like
        n_layers.
    granularity : array_like
        Tokens x layers per iteration, in units of one whole pass; the paper's 512, or 256 or 1024.

    Raises
    ------
    ValueError
        If L < 0, or layers or granularity below 1.

    Notes
    -----
    Layered Prefill section 4.4, clamped: as printed G exceeds the number of layers above granularity x layers tokens.
    """
    length = at_least("prompt", prompt, 0, mend="give tokens")
    most = at_least("layers", layers, 1, mend="give decoder layers")
    size = at_least("granularity", granularity, 1, mend="give tokens, for example 512")
    groups: Number = np.minimum(most, np.maximum(1.0, np.ceil(length / size)))
    return groups


def chunked_iteration(full: ArrayLike, decode: ArrayLike, chunk: ArrayLike, coverage: Coverage) -> Number:
    """Expert bytes of one iteration in which a chunk passes all layers with the decode batch [B]: full c(n_d + chunk).

    Parameters
    ----------
    full : array_like
        All routed experts of all layers [B].
    decode, chunk : array_like
        Decode and prefill tokens; chunk 0 is an iteration of decodes alone.
    coverage : Coverage
        c, share of a layer's experts that a number of tokens touches.

    Raises
    ------
    ValueError
        If a size or a number of tokens is negative.

    Notes
    -----
    Layered Prefill section 3.1. Reads from GPU memory, each distinct expert once per layer and iteration.
    """
    size = at_least("full", full, 0, mend="give bytes")
    tokens = at_least("decode", decode, 0, mend="give tokens") + at_least("chunk", chunk, 0, mend="give tokens")
    return size * coverage(tokens)


def layered_iteration(
    full: ArrayLike, decode: ArrayLike, prompt: ArrayLike, groups: ArrayLike, coverage: Coverage
) -> Number:
    """Expert bytes of one iteration in which a prompt passes one of G groups of layers [B].

        full (c(n_d + L) / G + (1 - 1 / G) c(n_d))

    Parameters
    ----------
    full : array_like
        All routed experts of all layers [B].
    decode, prompt : array_like
        n_d and L [tokens].
    groups : array_like
        G.
    coverage : Coverage

    Raises
    ------
    ValueError
        If a size or a number of tokens is negative, or G < 1.

    Notes
    -----
    Layered Prefill section 4.2. Groups are taken as equal.
    """
    share = 1.0 / at_least("groups", groups, 1, mend="use layer_groups")
    mixed = chunked_iteration(full, decode, prompt, coverage)
    return share * mixed + (1.0 - share) * chunked_iteration(full, decode, 0, coverage)


def iteration_ratio(groups: ArrayLike, decode: ArrayLike, coverage: Coverage) -> Number:
    """Expert traffic of a layered iteration over that of a chunked one [1]: 1 / G + (1 - 1 / G) c(n_d).

    Raises
    ------
    ValueError
        If G < 1 or n_d < 0.

    Notes
    -----
    Assumes that prompt and chunk each touch all experts.
    """
    share = 1.0 / at_least("groups", groups, 1, mend="use layer_groups")
    return share + (1.0 - share) * coverage(at_least("decode", decode, 0, mend="give tokens"))


def prefill_traffic(
    full: float,
    prompt: int,
    decode: float,
    coverage: Coverage,
    *,
    chunk: int | None = 512,
    layers: int = 1,
    granularity: int = 512,
) -> tuple[float, int]:
    """Expert bytes [B] and iterations of one prompt's prefill beside a steady decode batch.

    Parameters
    ----------
    full : float
        All routed experts of all layers [B].
    prompt, decode : int, float
        L and n_d [tokens].
    coverage : Coverage
    chunk : int, optional
        Tokens per chunk; None leaves the prompt whole.
    layers, granularity : int
        Each chunk passes ``layer_groups(chunk, layers, granularity)`` groups of layers; one layer is no layering.

    Returns
    -------
    (float, int)

    Raises
    ------
    ValueError
        If prompt, chunk, layers or granularity is below 1, or decode or full negative.

    Notes
    -----
    Layered Prefill sections 4.2 and 4.3. Chunked prefill is ``chunk=512, layers=1``; layered prefill ``chunk=None,
    layers=n``; both together, for prompts longer than granularity x layers, ``chunk=granularity * n, layers=n``.
    """
    length = int(at_least("prompt", prompt, 1, mend="give tokens"))
    size = length if chunk is None else int(at_least("chunk", chunk, 1, mend="give tokens, or None"))
    total = 0.0
    iterations = 0
    for start in range(0, length, size):
        tokens = min(size, length - start)
        groups = int(layer_groups(tokens, layers, granularity=granularity))
        total += groups * float(layered_iteration(full, decode, tokens, groups, coverage))
        iterations += groups
    return total, iterations


def mean_power(joules_per_token: ArrayLike, rate: ArrayLike, tokens: ArrayLike) -> Number:
    """Power that an energy per token implies [W]: energy [J/token] x rate [requests/s] x tokens per request.

    Raises
    ------
    ValueError
        If one of them is negative.

    Notes
    -----
    Tokens are prompt and output ones, as Layered Prefill divides its energy by both.
    """
    energy = at_least("joules_per_token", joules_per_token, 0, mend="give J, not mJ")
    requests = at_least("rate", rate, 0, mend="give requests per second")
    return energy * requests * at_least("tokens", tokens, 0, mend="give prompt plus output tokens")


def mean_decode_batch(rate: ArrayLike, output: ArrayLike, tbt: ArrayLike) -> Number:
    """Sequences that decode at a time, by Little's law [sequences]: rate x output tokens x time between tokens.

    Raises
    ------
    ValueError
        If one of them is negative.
    """
    arrivals = at_least("rate", rate, 0, mend="give requests per second")
    tokens = at_least("output", output, 0, mend="give tokens per request")
    return arrivals * tokens * at_least("tbt", tbt, 0, mend="give seconds between tokens")


def relative_change(new: ArrayLike, old: ArrayLike) -> Number:
    """Relative change of a figure [1]: new / old - 1, negative if it fell.

    Raises
    ------
    ValueError
        If the old figure is not positive.
    """
    return np.asarray(new, dtype=np.float64) / positive("old", old, "give the figure compared with") - 1.0
