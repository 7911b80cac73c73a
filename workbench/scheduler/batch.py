"""The batch of one iteration: rectangles of tokens by layers, kept in columns because there can be thousands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.stages import Rows

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NONE: Ids = np.empty(0, dtype=np.int64)
NONE.flags.writeable = False


class Rectangle(NamedTuple):
    """Tokens from `start` up to before `stop` of one request, in `layers`; `emits` if the last samples a token."""

    request: int
    start: int
    stop: int
    layers: range
    emits: bool


class Cut(NamedTuple):
    """The chunk of its prompt that each prefill of a batch computes: tokens from `start` on, through these layers.

    `emits` is true where the chunk brings the prompt's last token to the end of the model, which samples a token.
    """

    start: Ids
    layers: range
    emits: Flags


class Hint(NamedTuple):
    """Division of a batch into `parts` that its scheduler proposes: `part` of each request, prefills first."""

    part: Ids
    parts: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Rectangles of one iteration, or of one of the parts that it is split into: first the prefills, then the decodes.

    A prefill covers `prefill_len` positions: the whole prompt through all layers, unless a `cut` says otherwise. A
    decode covers the one position `context`, the number of tokens already in its KV cache, passes all layers and emits.

    Attributes
    ----------
    prefills, prefill_len, decodes, context : ndarray int64
        Requests and lengths of each class.
    layers : int
    cut : Cut or None
        One chunk for each prefill; None if all are whole prompts.
    hint : Hint or None
        The split that the scheduler proposes.
    """

    prefills: Ids
    prefill_len: Ids
    decodes: Ids
    context: Ids
    layers: int
    cut: Cut | None = None
    hint: Hint | None = None

    def __len__(self) -> int:
        return len(self.prefills) + len(self.decodes)

    def __iter__(self) -> Iterator[Rectangle]:
        columns = (self.prefills, self.starts, self.starts + self.prefill_len, self.emits)
        for request, start, stop, emits in zip(*(column.tolist() for column in columns), strict=True):
            yield Rectangle(request, start, stop, self.prefill_layers, emits)
        for request, position in zip(self.decodes.tolist(), self.context.tolist(), strict=True):
            yield Rectangle(request, position, position + 1, range(self.layers), True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def starts(self) -> Ids:
        """First position of each prefill."""
        return np.zeros_like(self.prefill_len) if self.cut is None else self.cut.start

    @property
    def prefill_layers(self) -> range:
        """Layers that the prefills pass."""
        return range(self.layers) if self.cut is None else self.cut.layers

    @property
    def emits(self) -> Flags:
        """Mask of the prefills that sample a token."""
        return np.ones(len(self.prefills), dtype=np.bool_) if self.cut is None else self.cut.emits

    @cached_property
    def emitting(self) -> Ids:
        """The requests that sample a token, prefills first."""
        return self.requests if self.cut is None else np.concatenate((self.prefills[self.cut.emits], self.decodes))

    @property
    def leaving(self) -> int:
        """Prefill tokens that pass the last layer."""
        return int(self.rows.prefill) if self.prefill_layers.stop == self.layers else 0

    def at(self, place: int) -> Batch:
        """The batch at a layer, at the embedding (-1) or at the head (`layers`): with its prefills or without.

        Prefills are embedded in the iteration that passes layer 0, and reach the head in that which passes the last.
        """
        nearest = min(max(place, 0), self.layers - 1)
        return self if self.cut is None or nearest in self.cut.layers else self.decodes_alone

    @cached_property
    def decodes_alone(self) -> Batch:
        """The batch without its prefills."""
        return self.take(NONE, slice(None))

    def take(self, prefills: Ids, decodes: Ids | slice) -> Batch:
        """The batch of the prefills and decodes at these places."""
        cut = self.cut
        hint = self.hint
        if cut is not None and len(prefills):
            cut = Cut(cut.start[prefills], cut.layers, cut.emits[prefills])
        if hint is not None:
            first, rest = np.split(hint.part, [len(self.prefills)])
            hint = Hint(np.concatenate((first[prefills], rest[decodes])), hint.parts)
        return Batch(
            self.prefills[prefills],
            self.prefill_len[prefills],
            self.decodes[decodes],
            self.context[decodes],
            self.layers,
            cut if len(prefills) else None,
            hint,
        )

    @cached_property
    def rows(self) -> Rows:
        """Rows that this batch gives the stages of a layer that its prefills pass, and `emits` for the head."""
        requests = len(self.prefills)
        decode = len(self.decodes)
        lengths = self.prefill_len
        prefill = int(lengths.sum()) if requests else 0
        pairs = (int(lengths @ lengths) + prefill) // 2 if requests else 0
        context = int(self.context.sum()) + decode if decode else 0
        if self.cut is None:
            return Rows(prefill, decode, pairs, context, requests + decode)
        before = int(self.cut.start.sum())
        pairs += int(self.cut.start @ lengths)
        return Rows(prefill, decode, pairs, context, decode + int(np.count_nonzero(self.cut.emits)), before)

    @property
    def requests(self) -> Ids:
        """All requests, prefills first."""
        return np.concatenate((self.prefills, self.decodes))

    def __repr__(self) -> str:
        return f"Batch({self.describe()})"

    def describe(self) -> str:
        """``9 prefill + 4 decode tokens of 6 requests``, and the layers of the prefills if they do not pass all."""
        rows = self.rows
        passed = self.prefill_layers
        some = f", prefills in layers {passed.start} to {passed.stop - 1}" if len(passed) < self.layers else ""
        return f"{rows.prefill:g} prefill + {rows.decode:g} decode tokens of {len(self)} requests{some}"
