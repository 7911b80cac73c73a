"""The examples in the kernels' docstrings are true."""

import doctest
import importlib

import pytest

CPU = ["ceilings", "expert_mlp", "expert_nodes", "expert_weights", "features", "flash_decode", "gated", "kv_cache"]
CPU += ["mla_decode", "rms_norm", "rope"]
TRITON = ["backend", "experts", "fused_moe", "grouped_gemm", "operators", "pairs", "router", "tiles", "tuning"]
TRITON += [
    "attention",
    "ceilings",
    "decode_attention",
    "gated",
    "kv_layout",
    "layer_norm",
    "prefill_attention",
    "rms_norm",
    "rope",
]
TRITON += ["rope_table", "rows", "sampling", "vocabulary"]
MODULES = [f"kernels_cpu.{m}" for m in CPU] + [f"kernels_triton.{m}" for m in TRITON] + ["workbench.cpu_twins"]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed
