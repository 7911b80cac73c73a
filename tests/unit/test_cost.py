"""What work costs: rooflines and copies."""

import pytest

from tests.builders import small_machine
from workbench.cost import Rows, Work, copy_seconds, expected_experts, seconds

GPU = small_machine(gpu=1e9, hbm=1e6).gpu
SLOW_START = small_machine(gpu=1e9, hbm=1e6, overhead=0.5).gpu


def test_an_operation_takes_as_long_as_its_slower_side():
    assert seconds([Work(2e9, 1e6)], GPU) == 2.0
    assert seconds([Work(1e9, 3e6)], GPU) == 3.0


def test_operations_run_one_after_the_other():
    assert seconds([Work(2e9, 0), Work(0, 3e6)], GPU) == 5.0


def test_every_operation_pays_the_fixed_time_and_an_empty_one_nothing():
    assert seconds([Work(1e9, 0), Work(), Work(1e9, 0)], SLOW_START) == 3.0
    assert seconds([Work()], SLOW_START) == 0
    assert seconds([], SLOW_START) == 0


def test_each_precision_has_its_rate():
    from dataclasses import replace

    device = replace(GPU, flops=(("bf16", 2e9), ("fp32", 1e9)))
    assert seconds([Work(2e9, 0, "bf16")], device) == 1.0
    assert seconds([Work(2e9, 0, "fp32")], device) == 2.0


def test_a_copy_takes_its_bytes_and_the_fixed_time():
    assert copy_seconds(6e9, 2e9) == 3.0
    assert copy_seconds(6e9, 2e9, 0.25) == 3.25
    assert copy_seconds(0, 2e9, 0.25) == 0


def test_rows_add_component_by_component():
    assert Rows(1, 2, 3, 4, 5).plus(Rows(10, 20, 30, 40, 50)) == Rows(11, 22, 33, 44, 55)
    assert Rows(1, 2).tokens == 3


def test_experts_touched_by_uniform_tokens():
    """MoE-CAP: E (1 - (1 - k/E)^T)."""
    assert expected_experts(8, 2, 1) == pytest.approx(2)
    assert expected_experts(8, 2, 2) == pytest.approx(3.5)
    assert expected_experts(8, 2, 10_000) == pytest.approx(8)
    assert expected_experts(8, 2, 0) == 0
    assert expected_experts(128, 8, 32) / 128 == pytest.approx(0.873, abs=1e-3)
