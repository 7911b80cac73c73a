"""Memory for what is read at random: with small pages the translation of addresses is part of the price."""

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ..declarations import public

_HUGE = 1 << 21


@public
def empty_in_huge_pages(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array for a KV pool or weights, on a boundary of 2 MiB and in huge pages where the system grants them.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : data type
        Of numpy; for bf16 take uint16 and view it in torch.

    Returns
    -------
    ndarray
        Zeros, whose pages are not mapped before they are touched.

    Examples
    --------
    >>> pool = empty_in_huge_pages((32, 8, 2, 64, 128), np.uint16)
    >>> pool.shape, pool.ctypes.data % (1 << 21)
    ((32, 8, 2, 64, 128), 0)
    """
    kind = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    count = math.prod(shape)
    memory = _mapped(count * kind.itemsize + _HUGE)
    whole = np.frombuffer(memory, np.int8)
    first = -whole.ctypes.data % _HUGE
    return whole[first : first + count * kind.itemsize].view(kind).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
