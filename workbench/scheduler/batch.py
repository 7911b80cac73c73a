"""Who is in one iteration: rectangles of tokens by layers, kept in columns because a batch can have thousands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.cost import Rows

Ids = npt.NDArray[np.int64]
NONE: Ids = np.empty(0, dtype=np.int64)
NONE.flags.writeable = False


class Rectangle(NamedTuple):
    """Tokens `start` up to `stop` of one request through `layers`; `emits` if the last one samples a token."""

    request: int
    start: int
    stop: int
    layers: range
    emits: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """Rectangles of one iteration, or of one part of it: first those that prefill, then those that decode.

    Every rectangle passes all `layers` and emits one token. A prefill covers positions 0 to `prefill_len`; a decode
    covers the one position `context`, the number of tokens already in its KV cache.

    Attributes
    ----------
    prefills, prefill_len, decodes, context : ndarray int64
        Requests and lengths of each class.
    layers : int
    """

    prefills: Ids
    prefill_len: Ids
    decodes: Ids
    context: Ids
    layers: int

    def __len__(self) -> int:
        return len(self.prefills) + len(self.decodes)

    def __iter__(self) -> Iterator[Rectangle]:
        layers = range(self.layers)
        for request, length in zip(self.prefills.tolist(), self.prefill_len.tolist(), strict=True):
            yield Rectangle(request, 0, length, layers, True)
        for request, position in zip(self.decodes.tolist(), self.context.tolist(), strict=True):
            yield Rectangle(request, position, position + 1, layers, True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    @cached_property
    def rows(self) -> Rows:
        """What this batch puts on the stages."""
        decode, lengths = len(self.decodes), self.prefill_len
        prefill = int(lengths.sum()) if len(lengths) else 0
        pairs = (int(lengths @ lengths) + prefill) // 2 if len(lengths) else 0
        context = int(self.context.sum()) + decode if decode else 0
        return Rows(prefill, decode, pairs, context, len(self))

    @property
    def requests(self) -> Ids:
        """All requests, prefills first."""
        return np.concatenate((self.prefills, self.decodes))

    def __repr__(self) -> str:
        return f"Batch({self.describe()})"

    def describe(self) -> str:
        """``9 prefill + 4 decode tokens of 6 requests``."""
        rows = self.rows
        return f"{rows.prefill:g} prefill + {rows.decode:g} decode tokens of {len(self)} requests"
