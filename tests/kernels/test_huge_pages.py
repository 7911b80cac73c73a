"""Memory in huge pages: what it is, and that nothing else shares it."""

import numpy as np
import pytest

from kernels_cpu import empty_in_huge_pages


@pytest.mark.parametrize("shape", [0, 1, (3, 5), (2, 1 << 20)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_it_is_zero_whole_writable_and_on_a_boundary(shape, dtype):
    found = empty_in_huge_pages(shape, dtype)
    assert found.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert found.dtype == dtype
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert not found.any()
    assert not found.size or found.ctypes.data % (1 << 21) == 0


def test_two_arrays_share_nothing():
    one, other = empty_in_huge_pages(1 << 20, np.uint8), empty_in_huge_pages(1 << 20, np.uint8)
    one[:] = 7
    assert not other.any()
    assert not np.shares_memory(one, other)
