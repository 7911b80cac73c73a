"""Kinds of layers, and their order in a model as repeated patterns."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from reprlib import repr as short


class LayerKind(enum.Enum):
    """One layer's attention and feed-forward network."""

    FULL = "full"
    """Attention to all earlier tokens, and experts."""
    WINDOWED = "windowed"
    """Attention to a sliding window, and experts."""
    DENSE = "dense"
    """Attention to all earlier tokens, and an ordinary feed-forward network."""
    DENSE_WINDOWED = "dense windowed"
    """Attention to a sliding window, and an ordinary feed-forward network."""

    @classmethod
    def of(cls, *, dense: bool, windowed: bool) -> LayerKind:
        """The kind with these two properties."""
        if dense:
            return cls.DENSE_WINDOWED if windowed else cls.DENSE
        return cls.WINDOWED if windowed else cls.FULL

    @property
    def dense(self) -> bool:
        """True if the layer has an ordinary feed-forward network instead of experts."""
        return self in (LayerKind.DENSE, LayerKind.DENSE_WINDOWED)

    @property
    def windowed(self) -> bool:
        """True if attention is limited to a sliding window."""
        return self in (LayerKind.WINDOWED, LayerKind.DENSE_WINDOWED)


Pattern = tuple[LayerKind, ...]
Layers = tuple[tuple[Pattern, int], ...]
"""Patterns of kinds, each with its number of repetitions: ``(((WINDOWED, FULL), 12),)`` are 24 layers."""


def unfold(layers: Layers) -> Pattern:
    """The kind of every layer, in order."""
    return tuple(kind for pattern, times in layers for kind in pattern * times)


def fold(kinds: Sequence[LayerKind]) -> Layers:
    """The layers as repeated patterns: at each place the pattern that covers most layers, and the shortest of those."""
    found: list[tuple[Pattern, int]] = []
    place = 0
    while place < len(kinds):
        rest = tuple(kinds[place:])
        lengths = range(1, len(rest) // 2 + 1)
        repeated = ((length, _repeats(rest, length)) for length in lengths)
        length, times = max(
            [(1, _repeats(rest, 1)), *((length, times) for length, times in repeated if times > 1)],
            key=lambda each: (each[0] * each[1], -each[0]),
        )
        found.append((rest[:length], times))
        place += length * times
    return tuple(found)


def _repeats(kinds: Pattern, length: int) -> int:
    """Number of times that the first `length` kinds follow one another."""
    times = 1
    while kinds[times * length : (times + 1) * length] == kinds[:length]:
        times += 1
    return times


def contradiction(layers: Layers, counts: Mapping[str, int]) -> str | None:
    """The fault of an order of layers, with its mend: it is malformed or contradicts the counts; None if it has none.

    Parameters
    ----------
    counts : mapping of str to int
        ``num_hidden_layers``, ``first_k_dense_replace`` and ``windowed_layers``.
    """
    try:
        kinds = unfold(layers)
    except (TypeError, ValueError):
        kinds = ()
    if not kinds or not all(isinstance(kind, LayerKind) for kind in kinds):
        return f"layers={short(layers)}; give patterns of LayerKind, and how often each is repeated"
    told = spelled(layers)
    found = {
        "num_hidden_layers": len(kinds),
        "first_k_dense_replace": sum(kind.dense for kind in kinds),
        "windowed_layers": sum(kind.windowed for kind in kinds),
    }
    for name, count in found.items():
        if count != counts[name]:
            return f"{name}={counts[name]} and {count} of them in layers={told}; correct one, or give layers=()"
    return None


def spelled(layers: Layers) -> str:
    """An order of layers in words: ``1 x dense, 12 x (windowed, full)``."""
    return ", ".join(f"{times} x {_one(pattern)}" for pattern, times in layers)


def _one(pattern: Pattern) -> str:
    names = ", ".join(kind.value for kind in pattern)
    return names if len(pattern) == 1 else f"({names})"
