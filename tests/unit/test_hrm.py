"""The hierarchical roofline: continuity at its turning points, arrays, and the L4's printed numbers."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.papers.hrm_cases import PUBLISHED
from workbench.perfmodels.moe_lightning.hrm import (
    balance_point,
    first_turning_point,
    local_performance,
    performance,
    second_turning_point,
)

rates = st.floats(1e9, 1e15)


@given(rates, rates, rates)
def test_at_p1_both_levels_are_equally_fast_and_below_it_the_far_one_wins(flops, bandwidth, link):
    if link >= bandwidth:
        with pytest.raises(ValueError, match="no turning point P1"):
            first_turning_point(far_flops=flops, far_bandwidth=bandwidth, link=link)
        return
    assume(link < 0.99 * bandwidth)  # nearer than rounding tells apart
    point = first_turning_point(far_flops=flops, far_bandwidth=bandwidth, link=link)
    assert link * point == pytest.approx(local_performance(point, flops=flops, bandwidth=bandwidth))
    for side in (0.5, 2):
        stays = local_performance(side * point, flops=flops, bandwidth=bandwidth)
        assert (link * side * point < stays) == (side < 1)


@given(st.floats(0.01, 1e4), rates, rates, rates)
def test_performance_rises_up_to_p2_and_is_flat_beyond(intensity, flops, bandwidth, link):
    near = {"flops": flops, "bandwidth": bandwidth, "link": link}
    point = second_turning_point(intensity, **near)
    roof = local_performance(intensity, flops=flops, bandwidth=bandwidth)
    assert performance(intensity, point, **near) == pytest.approx(roof)
    assert performance(intensity, 0.5 * point, **near) == pytest.approx(roof / 2)
    assert performance(intensity, 2 * point, **near) == roof


@given(st.floats(0.01, 1e4), rates, rates)
def test_at_the_balance_point_link_and_memory_deliver_the_same(intensity, bandwidth, link):
    assert link * balance_point(intensity, bandwidth=bandwidth, link=link) == pytest.approx(bandwidth * intensity)
    bound_by_memory = {"flops": math.nextafter(bandwidth * intensity, math.inf), "bandwidth": bandwidth, "link": link}
    assert balance_point(intensity, bandwidth=bandwidth, link=link) == second_turning_point(
        intensity, **bound_by_memory
    )


def test_roofline_takes_arrays_and_refuses_what_is_outside():
    near = {"flops": 1e14, "bandwidth": 3e11, "link": np.array([1e10, 2e10])}
    both = performance(np.array([[1.0], [1000.0]]), 50.0, **near)
    assert both.tolist() == [
        [performance(intensity, 50.0, **(near | {"link": link})) for link in (1e10, 2e10)] for intensity in (1.0, 1e3)
    ]
    with pytest.raises(ValueError, match="flops must be above 0 and finite, not 0; give FLOP/s"):
        local_performance(1.0, flops=0, bandwidth=1e9)
    with pytest.raises(ValueError, match="intensity must be at least 0 and finite, not -1"):
        balance_point(-1.0, bandwidth=1e9, link=1e9)


def test_of_the_l4_plot_p2_is_at_600_flop_per_byte_and_9_6_tflops():
    plot = PUBLISHED["roofline"]
    near = {"flops": plot["gpu_flops"], "bandwidth": plot["gpu_bandwidth"]}
    intensity = plot["micro_batch"] * 2 / 8
    assert second_turning_point(intensity, **near, link=plot["link"]) == pytest.approx(600)
    assert local_performance(intensity, **near) == pytest.approx(9.6e12)
