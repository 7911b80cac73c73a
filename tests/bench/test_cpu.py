"""The benchmark of CPU attention: contenders compute the same, shares of the roof are what they say."""

import numpy as np
import pytest

from workbench.bench import cpu
from workbench.bench.cpu import Batch, Case, Round

CASE = Case("small", np.array([100, 64, 3]), 4)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch(CASE, cpu._random_pool(4 * cpu.HEADS * 2 * cpu.BLOCK * cpu.DIM))


def test_the_contenders_compute_the_same(batch):
    batch.ours(2)
    want = batch.out.copy()
    assert np.abs(want).max() > 0.1
    batch.portable(1)
    np.testing.assert_allclose(batch.out, want, rtol=0, atol=2e-6)
    batch.eager(1)
    np.testing.assert_allclose(batch.out, want, rtol=0, atol=3e-2)  # bf16 all through


def test_the_roof_is_the_slower_of_reading_and_multiplying(batch):
    kv_bytes, flops = 167 * 8 * 128 * 2 * 2, 167 * 32 * 128 * 4
    assert Round(1, 1e9, 1e15, {}).roof(batch) == pytest.approx(kv_bytes / 1e9)
    assert Round(1, 1e15, 1e9, {}).roof(batch) == pytest.approx(flops / 0.85e9)


def test_shares_and_ratios_are_of_the_same_round(batch):
    slow = {("small", "ours"): 2.0, ("small", "portable"): 6.0, ("small", "eager"): 4.0}
    fast = {key: value / 2 for key, value in slow.items()}
    read = batch.kv_bytes / 1.0  # one second for all of it
    rounds = [Round(1, read, 1e15, slow), Round(1, 2 * read, 1e15, fast), Round(1, 2 * read, 1e15, fast)]
    said: list[str] = []
    ratios = cpu._report([batch], rounds, said.append)
    assert ratios["small, 1 threads: of the roof"] == {"median": 0.5, "min": 0.5, "max": 0.5, "runs": 3}
    assert ratios["small, 1 threads: times as fast as portable"]["median"] == 3
    assert ratios["small, 1 threads: times as fast as eager"]["median"] == 2
    assert "1 of 3 rounds slow" in said[0]


def test_the_pool_is_aligned_and_finite():
    pool = cpu._random_pool(5_000_000)
    assert pool.size == 5_000_000
    assert pool.ctypes.data % (1 << 21) == 0
    assert np.isfinite((pool.astype(np.uint32) << 16).view(np.float32)).all()
