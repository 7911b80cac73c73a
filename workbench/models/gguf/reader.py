"""The header of one GGUF file, read with the package `gguf`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType

_NUMBER = 8
"""Bytes of the length of a text."""
_ARRAY_HEAD = 12
"""Bytes of an array's type and length."""


class HeaderReader(GGUFReader):
    """`GGUFReader` that refuses to read past the end of a file, and steps over lists of texts.

    The reader of the package takes what lies behind the end for empty, and follows the length of an array there. It
    makes objects of every token of a vocabulary, which takes seconds.
    """

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError("it is cut off")
        return found

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        if kind is GGUFValueType.STRING:
            size = self._size_of_texts(int(orig_offs) + _ARRAY_HEAD, length)
            return _ARRAY_HEAD + size, [], [], [GGUFValueType.ARRAY, kind]
        if kind not in self.gguf_scalar_to_np:
            raise ValueError("it has an array of arrays")
        values = self._get(orig_offs + _ARRAY_HEAD, self.gguf_scalar_to_np[kind], length)
        return _ARRAY_HEAD + int(values.nbytes), [values], [0], [GGUFValueType.ARRAY, kind]

    def _size_of_texts(self, start: int, length: int) -> int:
        """Bytes of so many texts, each behind its length."""
        swapped = self.byte_order == "S"
        order: Literal["little", "big"] = "big" if swapped == bool(np.little_endian) else "little"
        view = self.data.data
        place = start
        for _ in range(length):
            place += _NUMBER + int.from_bytes(view[place : place + _NUMBER], order)
            if place > len(view):
                raise ValueError("it is cut off")
        return place - start
