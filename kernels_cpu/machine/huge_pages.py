"""Memory in huge pages for data that is read at random, since with small pages address translation costs time."""

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ..declarations import public

_HUGE = 1 << 21


@public
def empty_in_huge_pages(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array for a KV pool or weights, aligned to 2 MiB and in huge pages where the system provides them.

    Only pages that it fills are huge. Its memory goes back to the system when it is dropped.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : data type
        A dtype of numpy; for bf16 pass uint16 and view the array in torch.

    Returns
    -------
    ndarray
        Zeros. A page is mapped when it is first touched.

    Examples
    --------
    >>> pool = empty_in_huge_pages((32, 8, 2, 64, 128), np.uint16)
    >>> pool.shape, pool.ctypes.data % (1 << 21)
    ((32, 8, 2, 64, 128), 0)
    """
    element = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    size = math.prod(shape) * element.itemsize
    memory = _mapped(size + _HUGE)
    whole = np.frombuffer(memory, np.int8)
    first = -whole.ctypes.data % _HUGE
    full = size // _HUGE * _HUGE  # the rest is in small pages and takes no more memory than is asked for
    if full and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, first, full)
    return whole[first : first + size].view(element).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    """Anonymous memory; private where the system tells the difference, for shared memory gets no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
