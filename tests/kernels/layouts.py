"""Where operands may lie: any order, strides, alignment and overlap, as arrays or tensors in memory of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PLAIN, REPEATED = "plain", "repeated"
TENSORS = (PLAIN, "odd element", "odd byte", "apart", "permuted", "every other", REPEATED)
ARRAYS = (*TENSORS, "field", "flipped", "read-only", "swapped bytes")
LINE = 64
POISON = 0xFF
"""Of which every byte of a NaN may consist."""
BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
"""What numpy holds in place of the types that it lacks."""


@dataclass(frozen=True)
class Place:
    """An operand somewhere in memory.

    memory (n,) uint8: all of what was allocated; array: the operand in it, bfloat16 as bits; dtype: its type in torch.
    """

    memory: NDArray[np.uint8]
    array: NDArray[Any]
    dtype: torch.dtype

    def value(self) -> torch.Tensor:
        """A copy of its numbers, as a contiguous tensor."""
        return copied(self.array).view(self.dtype)

    def given(self, kind: str) -> Any:
        """What is passed: an array, or a tensor of the same memory."""
        return self.array if kind == "array" else torch.from_numpy(self.array).view(self.dtype)


def copied(array: NDArray[Any]) -> torch.Tensor:
    """A contiguous tensor of the numbers of any array; `numpy.array` keeps odd strides where there are no numbers."""
    own = np.empty(array.shape, array.dtype.newbyteorder("="))
    own[...] = array
    return torch.from_numpy(own)


def raw(value: torch.Tensor) -> NDArray[Any]:
    """The numbers of a tensor as numpy holds them."""
    return value.view(BITS.get(value.dtype, value.dtype)).numpy()


def allocated(size: int) -> NDArray[np.uint8]:
    """Poisoned bytes that begin on a cache line, with a line behind them."""
    room = np.full(size + 2 * LINE, POISON, np.uint8)
    begin = -room.ctypes.data % LINE
    return room[begin : begin + size + LINE]


def placed(value: torch.Tensor, layout: str, random: Random) -> Place:
    """`value` in memory of its own; a repeated one has its first row everywhere."""
    bits = raw(value)
    most = math.prod(size + 1 for size in value.shape) * 2  # the largest of the layouts
    memory = allocated((most + 2) * (bits.itemsize + 1))
    array = _view(memory, bits.dtype, bits.shape, layout, random)
    if layout == REPEATED and bits.ndim and len(bits):
        array[0] = bits[0]
        array = np.broadcast_to(array[0], bits.shape)
    else:
        array[...] = bits
    array.flags.writeable = layout not in (REPEATED, "read-only")
    return Place(memory, array, value.dtype)


def _view(
    memory: NDArray[np.uint8], kind: np.dtype[Any], shape: tuple[int, ...], layout: str, random: Random
) -> NDArray[Any]:
    def plain(shape: tuple[int, ...], offset: int = 0, kind: Any = kind) -> NDArray[Any]:
        return np.ndarray(shape, kind, buffer=memory, offset=offset)

    axis = random.randrange(len(shape)) if shape else 0
    match layout:
        case "odd element":
            return plain(shape, kind.itemsize)
        case "odd byte":
            return plain(shape, 1)
        case "swapped bytes":
            return plain(shape, kind=kind.newbyteorder())
        case "apart" if shape:
            return plain((*shape[:-1], shape[-1] + 1))[..., : shape[-1]]
        case "every other" if shape:
            return plain((*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]))[
                (slice(None),) * axis + (slice(0, None, 2),)
            ]
        case "flipped" if shape:
            return np.flip(plain(shape), axis)
        case "permuted" if shape:
            order = random.sample(range(len(shape)), len(shape))
            return plain(tuple(shape[a] for a in order)).transpose(np.argsort(order))
        case "field" if shape:
            return plain(shape[:1], kind=np.dtype([("own", kind, shape[1:]), ("odd", np.uint8)]))["own"]
    return plain(shape)


def overlapping(host: torch.Tensor, guest: torch.Tensor, random: Random, *, guest_counts: bool) -> tuple[Place, Place]:
    """Two operands in one piece of memory: the guest begins anywhere in the host, or right behind it.

    The numbers of the one that counts are stored last.
    """
    sizes = [max(1, value.numel()) * value.element_size() for value in (host, guest)]
    memory = allocated(sum(sizes))
    step = max(host.element_size(), guest.element_size())
    offset = random.choice((0, 0, step, sizes[0] // 2 // step * step, random.randrange(sizes[0] // step + 1) * step))
    both = []
    for value, begin in ((host, 0), (guest, offset)):
        bits = raw(value)
        both.append((np.ndarray(bits.shape, bits.dtype, buffer=memory, offset=begin), bits))
    for array, bits in both if guest_counts else reversed(both):
        array[...] = bits
    return tuple(Place(memory, array, value.dtype) for (array, _), value in zip(both, (host, guest), strict=True))
