"""From the seconds of operations, seen in passes through the layers, to the times that `simulate` takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression, nnls

from workbench.cost import Rows, measured_seconds
from workbench.profile import OpTime


class Seen:
    """Seconds of one operation on one number of threads, with the rows that it was given."""

    def __init__(self, op: str, threads: int) -> None:
        self.op, self.threads = op, threads
        self._rows: list[Rows] = []
        self._seconds: list[float] = []

    def note(self, rows: Rows, seconds: float) -> None:
        """One call."""
        if rows.tokens:
            self._rows.append(rows)
            self._seconds.append(seconds)

    def time(self) -> OpTime:
        """What was seen, as a function of the rows."""
        if self.op == "prefill_attention":
            return self._prefill()
        if self.op == "decode_attention":
            return self._decode()
        return self._by_tokens([True] * len(self._rows))

    def _by_tokens(self, counts: Sequence[bool]) -> OpTime:
        """Time against tokens, from those calls that count; it never falls."""
        groups = defaultdict[float, list[float]](list)
        for rows, seconds, count in zip(self._rows, self._seconds, counts, strict=True):
            if count:
                groups[rows.tokens].append(seconds)
        tokens = sorted(groups)
        rising = isotonic_regression([typical(groups[number]) for number in tokens]).x
        return OpTime(self.op, self.threads, tuple(map(float, tokens)), tuple(rising.tolist()))

    def _prefill(self) -> OpTime:
        """Per prompt, per token and per query-key pair."""
        features = [[rows.emits, rows.prefill, rows.pairs] for rows in self._rows]
        prompt, token, pair = _fit(features, self._seconds)
        most = max(rows.prefill for rows in self._rows)
        line = ((1.0, most), (token, token * most))
        return OpTime(self.op, self.threads, *line, per_prompt=prompt, per_pair=pair)

    def _decode(self) -> OpTime:
        """Appending new rows, as seen without decodes; then per call, per decode and per KV entry."""
        append = self._by_tokens([not rows.decode for rows in self._rows])
        decodes = [(rows, s) for rows, s in zip(self._rows, self._seconds, strict=True) if rows.decode]
        features = [[1.0, rows.decode, rows.context] for rows, _ in decodes]
        rest = [max(0.0, s - measured_seconds(append, Rows(prefill=rows.tokens))) for rows, s in decodes]
        call, decode, entry = _fit(features, rest)
        times = (append.tokens, append.seconds)
        return OpTime(self.op, self.threads, *times, decoding=call, per_decode=decode, per_context=entry)


def typical(seconds: Sequence[float]) -> float:
    """Mean without the fastest and the slowest tenth: a run adds calls up, so the mean is what it sees."""
    cut = len(seconds) // 10
    return float(np.mean(sorted(seconds)[cut : len(seconds) - cut]))


def _fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of least relative squares, none negative."""
    wide: npt.NDArray[np.float64] = np.array(features, dtype=float)
    target = np.array(seconds)
    weight = 1 / np.maximum(target, target.max() * 1e-3 or 1.0)
    scale = wide.max(axis=0) + (wide.max(axis=0) == 0)
    found, _ = nnls(wide / scale * weight[:, None], target * weight)
    return tuple((found / scale).tolist())
