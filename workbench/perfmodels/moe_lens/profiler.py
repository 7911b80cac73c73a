"""MoE-Lens' pipeline profiler: the GPU's time over the tokens of a pass, and the tokens hidden behind the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.core.result import Result
from workbench.perfmodels.domain import Array, Number, at_least, plain, positive


@dataclass(frozen=True)
class GpuTime:
    """The GPU's time for a pass of n tokens [s]: t(n) = fixed + per_token n."""

    fixed: float
    per_token: float

    def tokens_within(self, seconds: Number) -> Number:
        """Tokens whose GPU time is hidden behind a transfer: n_real = (t_transfer - a) / c [tokens].

        Parameters
        ----------
        seconds : number or array
            t_transfer, of the same layers as the fit [s].

        Raises
        ------
        ValueError
            If the transfer is no longer than the fixed time: nothing is hidden behind it.

        Notes
        -----
        MoE-Lens, pipeline profiler.
        """
        transfer = positive("seconds", seconds, "give s")
        if np.any(transfer <= self.fixed):
            raise ValueError(
                f"seconds={float(transfer.min()):g} is within the {self.fixed:g} s that the GPU takes for no token at "
                "all; give a longer transfer, or larger batches whatever the link."
            )
        return plain((transfer - self.fixed) / self.per_token)


def fit_gpu_time(tokens: Sequence[float] | Array, seconds: Sequence[float] | Array) -> GpuTime:
    """Least-squares line through GPU times at several numbers of tokens.

        t(n) = a + c n

    Parameters
    ----------
    tokens, seconds : sequence or array (points,)
        n [tokens] and t [s], for one layer or for any other section of a pass.

    Returns
    -------
    GpuTime
        a [s] and c [s/token].

    Raises
    ------
    ValueError
        If there are not two different numbers of tokens, or the time does not rise with them.

    Notes
    -----
    MoE-Lens, pipeline profiler. Take points around `tokens_to_saturate`: with few tokens not every expert is
    read, and the line bends.
    """
    n = at_least("tokens", tokens, 0, "give tokens")
    t = at_least("seconds", seconds, 0, "give s")
    if n.ndim != 1 or n.shape != t.shape or len(np.unique(n)) < 2:
        raise ValueError(
            f"fit_gpu_time needs one time for each of two or more different numbers of tokens, not {n.size} tokens "
            f"and {t.size} times; measure at more sizes of batch."
        )
    centred = n - n.mean()
    slope = float(centred @ t / (centred @ centred))
    if slope <= 0:
        raise ValueError("GPU time does not rise with the tokens; measure at more tokens, or repeat more often.")
    return GpuTime(float(t.mean() - slope * n.mean()), slope)


def profile_points(result: Result) -> tuple[Array, Array]:
    """Tokens of every iteration of a result, and the busy time of its gpu lane [s]: points for `fit_gpu_time`.

    Parameters
    ----------
    result : Result
        A result with every task in its timeline, as `run` and ``simulate(..., detail=Detail.TASK)`` give it.

    Returns
    -------
    tokens, seconds : array (iterations,)
        Tokens, and times of all layers, embedding and head: compare them with the time of a whole pass.

    Raises
    ------
    ValueError
        If the timeline has no tasks of a gpu lane.
    """
    spans = [span for span in result.timeline if span.lane == "gpu"]
    if not spans:
        raise ValueError(
            "profile_points needs the tasks of the gpu lane; give the result of run, or of simulate with Detail.TASK."
        )
    tokens = (result.steps.array("prefill") + result.steps.array("decode")).astype(np.float64)
    numbers = [span.iteration for span in spans]
    lengths = [span.end - span.start for span in spans]
    busy = np.zeros(len(tokens))
    np.add.at(busy, numbers, lengths)
    return tokens, busy
