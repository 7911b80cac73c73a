"""The examples in the kernels' docstrings are true."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "kernels_cpu.ceilings",
        "kernels_cpu.expert_mlp",
        "kernels_cpu.features",
        "kernels_cpu.flash_decode",
        "kernels_cpu.kv_cache",
    ],
)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"kernels_cpu.{name}"))
    assert found.attempted
    assert not found.failed
