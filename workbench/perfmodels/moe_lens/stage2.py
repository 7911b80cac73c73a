"""MoE-Lens, Equations 8 to 14: Stage 2, output tokens per second of a finite job with a paged KV cache."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from workbench.perfmodels.domain import Array, Number, at_least, plain, positive, whole, within
from workbench.scheduler.block_manager import block_iterations


class Eq12(enum.Enum):
    """Iterations of a job that the GPU limits."""

    PAPER = "paper"
    """As printed, clamped to 2g iterations. Its prologue counts more prefill tokens than the GPU can carry."""
    MENDED = "mended"
    """K (p + g) / n_it + g (1 - g / (2 (p + g))): full iterations, then a linear drain of g, which keeps the tokens."""


class Life(enum.Enum):
    """Iterations over which a sequence is charged for its KV blocks."""

    INCLUSIVE = "0..g"
    """g + 1, as printed."""
    EXCLUSIVE = "0..g-1"
    """g: the last token is never written to the cache."""


def blocks_over_life(prompt_len: Number, output_len: Number, block: Number, *, life: Life = Life.INCLUSIVE) -> Number:
    """KV blocks that a sequence holds, summed over its iterations [blocks x iterations].

        S(b) = sum over i of ceil((p + i) / b)

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens]. A fractional p is rounded up as the equation says, a fractional g interpolated.
    block : number or array
        b, whole [tokens].
    life : Life
        i runs from 0 to g as printed, or to g - 1, which is exact.

    Raises
    ------
    ValueError
        If p < 1, g < 1, or b is no whole number from 1.

    Notes
    -----
    MoE-Lens, Eq. 8. Blocks are taken when a sequence grows into them.
    """
    p = at_least("prompt_len", prompt_len, 1, "give tokens")
    g = at_least("output_len", output_len, 1, "give tokens")
    steps = g + 1 if life is Life.INCLUSIVE else g
    return plain(block_iterations(np.ceil(p), steps, whole("block", block, "give tokens")))


def admission_rate(
    prompt_len: Number, output_len: Number, kv_blocks: Number, block: Number, *, life: Life = Life.INCLUSIVE
) -> Number:
    """Sequences to admit per iteration so that the cache stays full and nothing is preempted: q = N / S(b).

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens].
    kv_blocks : number or array
        N, or infinity.
    block : number or array
        b [tokens].
    life : Life

    Raises
    ------
    ValueError
        If a length is out of its domain or one whole sequence does not fit N blocks.

    Notes
    -----
    MoE-Lens, Eq. 8. Equal lengths, or the means of lengths that do not vary much.
    """
    return plain(_admission(prompt_len, output_len, kv_blocks, block, life))


def _admission(prompt_len: Number, output_len: Number, kv_blocks: Number, block: Number, life: Life) -> Array:
    held = np.asarray(blocks_over_life(prompt_len, output_len, block, life=life))
    n = within("kv_blocks", kv_blocks, 1, np.inf, mend="give blocks")
    longest = np.ceil(prompt_len) + np.asarray(output_len) - 1
    if np.any(np.ceil(longest / block) > n):
        raise ValueError(
            "kv_blocks holds no whole sequence of p + g - 1 tokens; give more blocks or shorter sequences."
        )
    return np.asarray(n / held)


def overlapped_sequences(
    prompt_len: Number, output_len: Number, kv_blocks: Number, block: Number, *, life: Life = Life.INCLUSIVE
) -> Number:
    """Sequences that decode in parallel if prefill and decode overlap: g q [sequences].

    Parameters
    ----------
    prompt_len, output_len, kv_blocks, block, life
        As for `admission_rate`.

    Raises
    ------
    ValueError
        As `admission_rate`.

    Notes
    -----
    MoE-Lens, Eq. 9, left side. Whether it is above `separated_sequences` depends: with blocks of one token
    and the sum to g it is iff g^2 > 2p + g.
    """
    return plain(np.asarray(np.asarray(output_len) * _admission(prompt_len, output_len, kv_blocks, block, life)))


def separated_sequences(prompt_len: Number, output_len: Number, kv_blocks: Number, block: Number) -> Number:
    """Sequences of one batch if all prefill first and then all decode: floor(N / ceil((p + g) / b)) [sequences].

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens].
    kv_blocks, block : number or array
        N, and b [tokens].

    Raises
    ------
    ValueError
        If a length, N or b is out of its domain.

    Notes
    -----
    MoE-Lens, Eq. 9, right side, where N / (p + g) divides blocks by tokens. The blocks of the full length
    are set aside for every sequence.
    """
    p = at_least("prompt_len", prompt_len, 1, "give tokens")
    g = at_least("output_len", output_len, 1, "give tokens")
    n = at_least("kv_blocks", kv_blocks, 1, "give blocks")
    return plain(np.floor(n / np.ceil((p + g) / whole("block", block, "give tokens"))))


def separated_tok_s(
    prompt_len: Number,
    output_len: Number,
    requests: Number,
    kv_blocks: Number,
    *,
    block: Number,
    pass_seconds: Number,
    pass_tokens: Number,
) -> Number:
    """Output tokens per second of a job in batches that first prefill and then decode [tokens/s].

        It(B) = ceil(B / max(1, floor(n_it / p))) max(1, p / n_it) + (g - 1) max(1, B / n_it)
        T = K g / ((floor(K/B) It(B) + It(K mod B)) delta),    B = floor(N / ceil((p + g) / b)),    It(0) = 0

    Parameters
    ----------
    prompt_len, output_len, requests, kv_blocks : number or array
        p, g [tokens], K and N.
    block, pass_seconds, pass_tokens : number or array
        b [tokens], delta [s] and n_it [tokens/iteration].

    Raises
    ------
    ValueError
        If an argument is out of its domain or no sequence fits the cache.

    Notes
    -----
    The baseline of MoE-Lens' overlap of prefill and decode, at equal KV memory; the count of iterations is ours. No
    prompt is split: one of more than n_it tokens makes its iteration longer. A prefill emits the first token.
    """
    p = at_least("prompt_len", prompt_len, 1, "give tokens")
    g = at_least("output_len", output_len, 1, "give tokens")
    k = at_least("requests", requests, 1, "give requests")
    n = positive("pass_tokens", pass_tokens, "give tokens")
    batch = np.asarray(separated_sequences(p, g, kv_blocks, block))
    if np.any(batch < 1):
        raise ValueError("kv_blocks holds no whole sequence of p + g tokens; give more blocks or shorter sequences.")

    def iterations(sequences: Array) -> Array:
        prefill = np.ceil(sequences / np.maximum(1, np.floor(n / p))) * np.maximum(1, p / n)
        return np.where(sequences > 0, prefill + (g - 1) * np.maximum(1, sequences / n), 0.0)

    total = np.floor(k / batch) * iterations(batch) + iterations(np.asarray(k % batch))
    return plain(np.asarray(k * g / (total * positive("pass_seconds", pass_seconds, "give s"))))


@dataclass(frozen=True, eq=False)
class Stage2:
    """Stage 2's prediction for a job; numbers, or arrays where an argument was one.

    Attributes
    ----------
    admitted : number or array
        q, sequences per iteration in steady state if KV memory limits.
    memory_tok_s, gpu_tok_s : number or array
        T1 and T2, output tokens per second [tokens/s].
    proc_per_gen : number or array
        (p + g) / g, prompt and output tokens per output token.
    """

    admitted: Number
    memory_tok_s: Number
    gpu_tok_s: Number
    proc_per_gen: Number

    @property
    def gen_tok_s(self) -> Number:
        """Output tokens per second: T = min(T1, T2), Eq. 14 [tokens/s]."""
        return plain(np.minimum(self.memory_tok_s, self.gpu_tok_s))

    @property
    def proc_tok_s(self) -> Number:
        """Prompt and output tokens per second [tokens/s]."""
        return self.gen_tok_s * self.proc_per_gen


def stage2(
    prompt_len: Number,
    output_len: Number,
    requests: Number,
    kv_blocks: Number,
    *,
    block: Number,
    pass_seconds: Number,
    pass_tokens: Number,
    eq12: Eq12 = Eq12.MENDED,
    life: Life = Life.INCLUSIVE,
) -> Stage2:
    """Output tokens per second of a finite job with a paged KV cache.

        T1 = K g / ((K / q + g) delta)        KV memory limits
        T2 = K g / (It delta)                 the GPU limits
        T  = min(T1, T2)

    with It = max(g, K (p + g) / n_it + g (1 - g / (2 (p + g)))), or as printed, n_pre = n_it p / (p + g):
    It = 2 g + max(0, K p - g (n_pre + n_it) / 2) / n_pre.

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens].
    requests : number or array
        K, or infinity.
    kv_blocks : number or array
        N, or infinity.
    block : number or array
        b [tokens].
    pass_seconds : number or array
        delta [s].
    pass_tokens : number or array
        n_it, tokens that the GPU computes in that time; the paper's T_GPU in these equations.
    eq12 : Eq12
        MENDED, or as printed.
    life : Life
        INCLUSIVE as printed, or the exact sum.

    Returns
    -------
    Stage2
        Number where all arguments are numbers, else arrays of their common shape.

    Raises
    ------
    ValueError
        If an argument is out of its domain or one whole sequence does not fit the cache.

    Notes
    -----
    MoE-Lens, Eqs. 8 and 10 to 14. Every iteration takes delta; CPU attention and its share of DRAM are left
    out. It is a model and no bound: greedy admission beats it by up to 12 % where memory limits, and where q (p + g)
    is 0.8 to 1.4 times n_it with g > p it is up to 20 % above what greedy admission reaches.
    """
    q = _admission(prompt_len, output_len, kv_blocks, block, life)
    job = (prompt_len, output_len, requests, q)
    return stage2_at_rate(*job, pass_seconds=pass_seconds, pass_tokens=pass_tokens, eq12=eq12)


def stage2_at_rate(
    prompt_len: Number,
    output_len: Number,
    requests: Number,
    admitted: Number,
    *,
    pass_seconds: Number,
    pass_tokens: Number,
    eq12: Eq12 = Eq12.MENDED,
) -> Stage2:
    """Stage 2's prediction for a known rate of admission, such as that of a workload of unequal lengths; see `stage2`.

        T = min(K g / ((K / q + g) delta), K g / (It delta))

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g, or their means [tokens].
    requests : number or array
        K, or infinity.
    admitted : number or array
        q [sequences/iteration].
    pass_seconds, pass_tokens, eq12
        As for `stage2`.

    Raises
    ------
    ValueError
        If an argument is out of its domain.

    Notes
    -----
    MoE-Lens, Eqs. 10 to 14. Where lengths differ, the last request's drain is taken to be the mean one.
    """
    p = at_least("prompt_len", prompt_len, 1, "give tokens")
    g = at_least("output_len", output_len, 1, "give tokens")
    k = within("requests", requests, 1, np.inf, mend="give requests")
    q = within("admitted", admitted, 0, np.inf, mend="give sequences/iteration")
    n = positive("pass_tokens", pass_tokens, "give tokens")
    delta = positive("pass_seconds", pass_seconds, "give s")
    with np.errstate(divide="ignore"):  # without limit on memory and requests T1 is infinite; nothing admitted, zero
        memory = g / ((1 / q + g / k) * delta)
    gpu = g / (_gpu_iterations(p, g, k, n, eq12) * delta)
    shape = np.broadcast_shapes(memory.shape, gpu.shape)
    return Stage2(*(plain(np.broadcast_to(field, shape)) for field in (q, memory, gpu, (p + g) / g)))


def _gpu_iterations(p: Array, g: Array, k: Array, n: Array, eq12: Eq12) -> Array:
    """Iterations per request, It / K, which is finite for any number of requests."""
    if eq12 is Eq12.MENDED:
        drain = g * (1 - g / (2 * (p + g)))
        return np.maximum((p + g) / n + drain / k, g / k)
    prefill = n * p / (p + g)
    return 2 * g / k + np.maximum(0, p - g * (prefill + n) / (2 * k)) / prefill
