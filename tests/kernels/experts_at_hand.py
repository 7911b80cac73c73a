"""Small layers of experts for the tests of both backends."""

from typing import Any

import torch

from kernels_triton import fused_moe, fused_moe_reference, quantise

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def layer(T: int, M: int, F: int, E: int, k: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """Operands of `fused_moe`; every token's experts are different ones."""
    torch.manual_seed(seed)
    return {
        "x": torch.randn(T, M).to(dtype),
        "gate_up": (torch.randn(E, 2 * F, M) / M**0.5).to(dtype),
        "down": (torch.randn(E, M, F) / F**0.5).to(dtype),
        "ids": torch.stack([torch.randperm(E)[:k] for _ in range(T)]) if T else torch.empty(0, k, dtype=torch.int64),
        "weights": torch.rand(T, k),
    }


def quantised(case: dict[str, Any], kind: torch.dtype, group: int | None) -> dict[str, Any]:
    """The same layer with quantised weights."""
    return case | {name: quantise(case[name], kind, group) for name in ("gate_up", "down")}


def with_biases(case: dict[str, Any]) -> dict[str, Any]:
    """The same layer with biases."""
    E, M, _ = case["down"].shape
    both, dtype = case["gate_up"].shape[1], case["x"].dtype
    return case | {"gate_up_bias": torch.randn(E, both).to(dtype), "down_bias": torch.randn(E, M).to(dtype)}


def paged(case: dict[str, Any], spare: int = 2) -> dict[str, Any]:
    """The same layer in shuffled pages; spare ones, and those of experts that nobody chose, hold NaN."""
    E = case["gate_up"].shape[0]
    pages = torch.randperm(E + spare)[:E]
    moved = {}
    for name in ("gate_up", "down"):
        held = torch.full((E + spare, *case[name].shape[1:]), torch.nan, dtype=case[name].dtype)
        for expert in case["ids"].unique().tolist():
            held[pages[expert]] = case[name][expert]
        moved[name] = held
    return case | moved | {"pages": pages}


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((found.double() - want).norm() / want.norm().clamp(min=1e-30))


def check(case: dict[str, Any], backend: str) -> None:
    """`fused_moe` is as near to float64 as its documentation says; a few small rows may be off by half as much again.

    Rounding errors average out over many numbers only, and may meet a sum that is small by cancellation.
    """
    dtype = case["x"].dtype
    found = fused_moe(**case, backend=backend)
    slack = 1.5 if backend == "torch" and case["ids"].numel() < 8 else 1.0
    assert found.dtype is dtype
    assert error(found, fused_moe_reference(**case)) <= slack * LIMITS[dtype]
