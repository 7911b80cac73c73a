"""The examples in the kernels' docstrings are true."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["ceilings", "expert_mlp", "expert_nodes", "expert_weights", "features", "flash_decode", "kv_cache"]
)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"kernels_cpu.{name}"))
    assert found.attempted
    assert not found.failed
