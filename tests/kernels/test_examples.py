"""The examples in the kernels' docstrings are true."""

import doctest
import importlib

import pytest

MODULES = [
    "kernels_cpu.attention.decode",
    "kernels_cpu.attention.kv_cache",
    "kernels_cpu.attention.mla_decode",
    "kernels_cpu.ceilings",
    "kernels_cpu.experts.fused_moe",
    "kernels_cpu.experts.nodes",
    "kernels_cpu.experts.weights",
    "kernels_cpu.machine.features",
    "kernels_cpu.rows.gated",
    "kernels_cpu.rows.rms_norm",
    "kernels_cpu.rows.rope",
    "kernels_triton.attention.decode",
    "kernels_triton.attention.kv_layout",
    "kernels_triton.attention.options",
    "kernels_triton.attention.prefill",
    "kernels_triton.backend.backend",
    "kernels_triton.backend.ceilings",
    "kernels_triton.backend.operators",
    "kernels_triton.moe.experts",
    "kernels_triton.moe.fused_moe",
    "kernels_triton.moe.grouped_gemm",
    "kernels_triton.moe.pairs",
    "kernels_triton.moe.router",
    "kernels_triton.moe.tiles",
    "kernels_triton.moe.tuning",
    "kernels_triton.rows.gated",
    "kernels_triton.rows.layer_norm",
    "kernels_triton.rows.rms_norm",
    "kernels_triton.rows.rope",
    "kernels_triton.rows.rope_table",
    "kernels_triton.rows.rows",
    "kernels_triton.vocabulary.sampling",
    "kernels_triton.vocabulary.vocabulary",
    "workbench.kernels.attention",
    "workbench.kernels.moe",
    "workbench.kernels.rows",
]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed
