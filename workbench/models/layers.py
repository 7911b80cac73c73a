"""Kinds of layers, and their order in a model as repeated patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Counted:
    """Weights of one layer, tensor by tensor, by the operation that reads them [elements].

    Attributes
    ----------
    qkv, out_proj, route : int
        Matrices before the mixing of tokens, behind it, and of the router.
    unrouted : int
        Matrices of shared experts, or of an ordinary feed-forward network.
    expert : int
        Matrices of one routed expert; 0 if the layer has none.
    expert_vectors : int
        Biases of all routed experts.
    vectors : int
        All else: norms, other biases, convolutions.
    """

    qkv: int
    out_proj: int
    route: int = 0
    unrouted: int = 0
    expert: int = 0
    expert_vectors: int = 0
    vectors: int = 0


@dataclass(frozen=True)
class Recurrence:
    """A state of fixed size in the place of keys and values: linear attention, a state space or a short convolution.

    Attributes
    ----------
    name : str
    state : int
        Elements that a sequence keeps, in fp32.
    macs : float
        Multiply-adds per token.
    taken, given : int
        Elements per token that the projections before it write, and that it hands on.
    """

    name: str
    state: int
    macs: float
    taken: int
    given: int


@dataclass(frozen=True)
class Sparse:
    """Attention to some of the earlier tokens, which an index chooses, or to summaries of several tokens.

    Attributes
    ----------
    top : int
        Entries that a query attends to at most, beside the window; 0 for all.
    ratio : int
        Tokens that one entry stands for.
    window : int
        Last tokens that a query attends to besides, one by one; 0 for none.
    keys : int
        Elements of the index' key of an entry.
    macs : int
        Multiply-adds of the index per query token and entry.
    """

    top: int = 0
    ratio: int = 1
    window: int = 0
    keys: int = 0
    macs: int = 0

    @property
    def value(self) -> str:
        """The entries in words: ``top 512 of 4 tokens each, window 128``."""
        words = [f"top {self.top}" if self.top else "all"]
        words += [f"of {self.ratio} tokens each"] if self.ratio > 1 else []
        near = f", window {self.window}" if self.window else ""
        return " ".join(words) + near

    def attended(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Entries that one query token attends to in a context of so many tokens."""
        entries = tokens / self.ratio
        chosen = np.minimum(entries, self.top) if self.top else entries
        attended: npt.NDArray[np.float64] = np.minimum(tokens, self.window) + chosen
        return attended

    def attended_below(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sum of `attended` over contexts of 1 up to so many tokens."""
        few = np.minimum(tokens, self.top * self.ratio) if self.top else tokens
        chosen = few * (few + 1) / (2 * self.ratio) + (tokens - few) * self.top
        inside = np.minimum(tokens, self.window)
        near = inside * (inside + 1) / 2 + (tokens - inside) * self.window
        total: npt.NDArray[np.float64] = chosen + near
        return total


@dataclass(frozen=True)
class Own:
    """Fields of a model that the layers of a kind have otherwise; None for those of the model.

    Attributes
    ----------
    num_attention_heads, num_key_value_heads, head_dim, v_head_dim : int, optional
    q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim : int, optional
    sliding_window : int, optional
    counted : Counted, optional
    recurrence : Recurrence, optional
    sparse : Sparse, optional
    formats : tuple of (str, float), optional
    """

    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    sliding_window: int | None = None
    counted: Counted | None = None
    recurrence: Recurrence | None = None
    sparse: Sparse | None = None
    formats: tuple[tuple[str, float], ...] | None = None

    def given(self) -> dict[str, Any]:
        """The fields that are not those of the model."""
        values = {known.name: getattr(self, known.name) for known in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class LayerKind:
    """One layer's attention and feed-forward network.

    Attributes
    ----------
    dense : bool
        True if the layer has an ordinary feed-forward network instead of experts.
    windowed : bool
        True if attention is limited to a sliding window, or to the chunk that a token is in.
    own : Own
        Sizes that differ from those of the model.
    """

    dense: bool = False
    windowed: bool = False
    own: Own = Own()

    FULL: ClassVar[LayerKind]
    WINDOWED: ClassVar[LayerKind]
    DENSE: ClassVar[LayerKind]
    DENSE_WINDOWED: ClassVar[LayerKind]

    @classmethod
    def of(cls, *, dense: bool, windowed: bool) -> LayerKind:
        """The kind with these two properties, and the sizes of the model."""
        if dense:
            return cls.DENSE_WINDOWED if windowed else cls.DENSE
        return cls.WINDOWED if windowed else cls.FULL

    @property
    def value(self) -> str:
        """The kind in words: ``dense`` without experts, its attention if not full, and bits of its own per weight."""
        words = ["dense"] if self.dense else []
        if self.own.recurrence is not None:
            words.append(self.own.recurrence.name)
        elif self.own.sparse is not None:
            words.append(self.own.sparse.value)
        elif self.windowed:
            words.append("windowed")
        formats = dict(self.own.formats or ())
        bits = 8 * formats.get("shared_experts" if self.dense else "experts", 0.0)
        told = " ".join(words) or "full"
        return f"{told} {bits:.3g}-bit" if bits else told


LayerKind.FULL = LayerKind()
LayerKind.WINDOWED = LayerKind(windowed=True)
LayerKind.DENSE = LayerKind(dense=True)
LayerKind.DENSE_WINDOWED = LayerKind(dense=True, windowed=True)


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
