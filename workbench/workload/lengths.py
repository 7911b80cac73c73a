"""Distributions of lengths: those fitted to the published statistics of a data set, and histograms of one's own."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workbench.core.errors import WorkloadError
from workbench.core.records import is_file
from workbench.core.units import is_number, is_whole

Lengths = npt.NDArray[np.int64]
Counts = Mapping[int, float] | Mapping[tuple[int, int], float]
"""Counts by prompt length, or by pair of prompt and output length."""

_LONGEST = 2**40
"""Most tokens of one request: sums over a workload then stay far within 64 bits."""

_QUANTILE = 3.0902
"""The 99.9 % quantile of the standard normal distribution."""


def whole_lengths(given: object, what: str) -> Lengths:
    """Check one length or several, given in any form [tokens].

    Raises
    ------
    WorkloadError
        If they are no whole numbers of at most 2**40.
    """
    try:
        found = np.asarray(given)
    except ValueError:  # rows of unlike length
        found = np.empty((0, 0))
    whole = found.dtype.kind in "iu" or not found.size
    if not whole or found.ndim > 1 or (found.size and found.max() > _LONGEST):
        raise WorkloadError(
            f"{what} lengths must be whole numbers of at most 2**40, not {given!r}; give one or a list."
        )
    return found.astype(np.int64)


class LengthDistribution(Protocol):
    """A distribution from which lengths are drawn."""

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        """Draw `count` lengths, each at least 1 [tokens]."""


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution with this mean, whose 99.9 % quantile is the maximum; larger values are drawn again.

    Parameters
    ----------
    mean, maximum : float
        Mean and maximum [tokens]. Truncating lowers the mean by less than 1 %.

    Raises
    ------
    WorkloadError
        If the mean is not between 0 and the maximum, or the maximum is over 118 times the mean.
    """

    mean: float
    maximum: float

    def __post_init__(self) -> None:
        if not 0 < self.mean < self.maximum < self.mean * math.exp(_QUANTILE**2 / 2):
            raise WorkloadError(
                f"no log-normal has the mean {self.mean} and the maximum {self.maximum}; "
                "give a maximum above the mean and below 118 times it."
            )

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        """See `LengthDistribution.draw`."""
        sigma = _QUANTILE - math.sqrt(_QUANTILE**2 - 2 * math.log(self.maximum / self.mean))
        location = math.log(self.mean) - sigma**2 / 2
        drawn = np.exp(generator.normal(location, sigma, count))
        while (beyond := drawn > self.maximum).any():
            drawn[beyond] = np.exp(generator.normal(location, sigma, int(beyond.sum())))
        return _whole(drawn)

    def __str__(self) -> str:
        return f"log-normal of mean {self.mean:g}, at most {self.maximum:g}"


@dataclass(frozen=True)
class Gamma:
    """A gamma distribution with this mean and standard deviation; values beyond a maximum are drawn again.

    Parameters
    ----------
    mean, deviation : float
        Mean and standard deviation [tokens].
    maximum : float, optional
        Largest length [tokens].

    Raises
    ------
    WorkloadError
        If mean or deviation is not positive, or the maximum not above the mean.
    """

    mean: float
    deviation: float
    maximum: float = math.inf

    def __post_init__(self) -> None:
        if not (0 < self.mean < self.maximum and 0 < self.deviation < math.inf):
            raise WorkloadError(
                f"no gamma distribution has mean {self.mean}, deviation {self.deviation} and maximum {self.maximum}; "
                "give positive ones, the maximum above the mean."
            )

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        """See `LengthDistribution.draw`."""
        shape = (self.mean / self.deviation) ** 2
        drawn = generator.gamma(shape, self.mean / shape, count)
        while (beyond := drawn > self.maximum).any():
            drawn[beyond] = generator.gamma(shape, self.mean / shape, int(beyond.sum()))
        return _whole(drawn)

    def __str__(self) -> str:
        cut = f", at most {self.maximum:g}" if math.isfinite(self.maximum) else ""
        return f"gamma of mean {self.mean:g} and deviation {self.deviation:g}{cut}"


def _whole(drawn: npt.NDArray[np.float64]) -> Lengths:
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True)
class Histogram:
    """Lengths of requests with their counts.

    Attributes
    ----------
    lengths : tuple of tuple of int
        Prompt length, or prompt and output length, of every row [tokens].
    counts : tuple of float
    """

    lengths: tuple[tuple[int, ...], ...]
    counts: tuple[float, ...]

    @classmethod
    def of(cls, table: Counts) -> Histogram:
        """Make a histogram of counts by prompt length, or by (prompt, output).

        Raises
        ------
        WorkloadError
            If it is empty, keys are of both kinds, a length is no whole number from 1 on, or counts are no counts.
        """
        rows = [(key if isinstance(key, tuple) else (key,), count) for key, count in table.items()]
        return cls(tuple(lengths for lengths, _ in rows), tuple(count for _, count in rows))

    @classmethod
    def read(cls, path: str | Path) -> Histogram:
        """Read a CSV file whose first line names its columns: prompt, count and, if they are known, output.

        Raises
        ------
        WorkloadError
            If the file does not exist, lacks a column or has a malformed row; the line is named.
        """
        path = Path(path)
        if not is_file(path):
            raise WorkloadError(f"histogram {str(path)!r} does not exist; give the path of a CSV file.")
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = _rows(csv.DictReader(file, skipinitialspace=True), path.name)
        except (UnicodeDecodeError, csv.Error) as error:
            raise WorkloadError(f"{path.name} is no CSV file in UTF-8 ({error}); convert it.") from error
        return cls(tuple(lengths for lengths, _ in rows), tuple(count for _, count in rows))

    def __post_init__(self) -> None:
        if not self.lengths:
            raise WorkloadError("a histogram needs at least one length; give some.")
        if len({len(row) for row in self.lengths}) > 1 or len(self.lengths[0]) not in (1, 2):
            raise WorkloadError("a histogram has either prompt lengths or (prompt, output) pairs; give one kind.")
        for row, count in zip(self.lengths, self.counts, strict=True):
            if not all(is_whole(length) and 1 <= length <= _LONGEST for length in row):
                raise WorkloadError(f"a histogram has the length {row}; give whole numbers from 1 on, up to 2**40.")
            if not (is_number(count) and 0 <= count < math.inf):
                raise WorkloadError(f"a histogram has {row} {count!r} times; give counts that are not negative.")
        if not max(self.counts) > 0:
            raise WorkloadError("a histogram counts nothing; give at least one positive count.")

    @property
    def knows_outputs(self) -> bool:
        """True if it has output lengths too."""
        return len(self.lengths[0]) == 2

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        """Draw `count` rows, shape (count, 1 or 2), with probabilities in proportion to their counts."""
        weights = np.array(self.counts, dtype=np.float64) / max(self.counts)  # their sum may be beyond floats
        chosen = generator.choice(len(weights), size=count, p=weights / weights.sum())
        return np.array(self.lengths, dtype=np.int64)[chosen]


def _rows(reader: csv.DictReader[str], file: str) -> list[tuple[tuple[int, ...], float]]:
    names = list(reader.fieldnames or [])
    if sorted(names) not in (["count", "prompt"], ["count", "output", "prompt"]):
        raise WorkloadError(
            f"{file} has the columns {', '.join(names) or 'of an empty file'}; "
            "its first line must be prompt,count or prompt,output,count."
        )
    kept = [name for name in ("prompt", "output") if name in names]
    return [_row(row, kept, f"{file}:{reader.line_num}") for row in reader]


def _row(row: Mapping[str, str], columns: Sequence[str], where: str) -> tuple[tuple[int, ...], float]:
    try:
        if len(row) > len(columns) + 1:
            raise ValueError("too many values")
        return tuple(int(row[name]) for name in columns), float(row["count"])
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"{where} is no row of {', '.join(columns)} and count ({error}); correct it.") from error
