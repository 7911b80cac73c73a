"""The benchmark of the CPU kernels: contenders compute the same, shares of the roof are what they say."""

import numpy as np
import pytest

from workbench.bench import cpu
from workbench.bench.cpu import Round
from workbench.bench.cpu_work import Attention, Case, Experts, Layer, Work, random_pool


@pytest.fixture(scope="module")
def attention() -> Attention:
    return Attention(Case("small", np.array([100, 64, 3]), 4), random_pool(4 * 8 * 2 * 64 * 128))


@pytest.fixture(scope="module")
def experts() -> Experts:
    pool = random_pool(6 * 64 * 96)
    return Experts(3, Layer(pool, model=64, inner=96))


@pytest.mark.parametrize("name", ["attention", "experts"])
def test_the_contenders_compute_the_same(name, request):
    work: Work = request.getfixturevalue(name)
    found = {}
    for contender, compute in work.contenders.items():
        for _ in range(2):  # the experts take turns
            compute(2)
        found[contender] = work.out.copy()
    size = np.abs(found["ours"]).max()
    assert size > 0.1
    np.testing.assert_allclose(found["portable"], found["ours"], rtol=0, atol=4e-6 * size)
    np.testing.assert_allclose(found["torch"], found["ours"], rtol=0, atol=3e-2 * size)  # bf16 all through


def test_the_roof_is_the_slower_of_reading_and_multiplying(attention, experts):
    kv_bytes, flops = 167 * 8 * 128 * 2 * 2, 167 * 32 * 128 * 4
    assert Round(1, 1e9, 1e15, {}).roof(attention) == pytest.approx(kv_bytes / 1e9)
    assert Round(1, 1e15, 1e9, {}).roof(attention) == pytest.approx(flops / 0.85e9)
    assert Round(1, 1e9, 1e15, {}).roof(experts) == pytest.approx(3 * 64 * 96 * 2 / 1e9)
    assert Round(1, 1e15, 1e9, {}).roof(experts) == pytest.approx(3 * 3 * 2 * 64 * 96 / 0.65e9)


def test_shares_and_ratios_are_of_the_same_round(attention):
    slow = {("small", "ours"): 2.0, ("small", "portable"): 6.0, ("small", "torch"): 4.0}
    fast = {key: value / 2 for key, value in slow.items()}
    read = attention.bytes / 1.0  # one second for all of it
    rounds = [Round(1, read, 1e15, slow), Round(1, 2 * read, 1e15, fast), Round(1, 2 * read, 1e15, fast)]
    said: list[str] = []
    ratios = cpu._report([attention], rounds, said.append)
    assert ratios["small, 1 threads: of the roof"] == {"median": 0.5, "min": 0.5, "max": 0.5, "runs": 3}
    assert ratios["small, 1 threads: times as fast as portable"]["median"] == 3
    assert ratios["small, 1 threads: times as fast as torch"]["median"] == 2
    assert "1 of 3 rounds slow" in said[0]


def test_the_pool_is_aligned_and_finite():
    pool = random_pool(5_000_000)
    assert pool.size == 5_000_000
    assert pool.ctypes.data % (1 << 21) == 0
    assert np.isfinite((pool.astype(np.uint32) << 16).view(np.float32)).all()
