"""Routed experts: packed or in place by Numba, as matrices in torch and by Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import kernels_cpu
from kernels_cpu import CodePath, NodeExperts, PackedExperts
from workbench.kernels.arrays import computed, for_tensors

if TYPE_CHECKING:
    from kernels_cpu.arguments import Operand, SameKind

__all__ = ["fused_moe", "fused_moe_reference"]

Experts: TypeAlias = "PackedExperts | NodeExperts | tuple[Any, Any]"


def fused_moe(
    x: SameKind,
    experts: Experts,
    ids: Operand,
    weights: Operand,
    *,
    activation: str = "swiglu",
    gate_up_bias: Operand | None = None,
    down_bias: Operand | None = None,
    pages: Operand | None = None,
    exact: bool = False,
    threads: int | None = None,
    path: CodePath | None = None,
    out: SameKind | None = None,
    backend: str | None = None,
) -> SameKind:
    """The routed experts of one layer.

        out[t] = sum over j of weights[t, j] * (down[p] a(gate_up[p] x[t] + gate_up_bias[p]) + down_bias[p])
        p = pages[ids[t, j]]

    Packed experts are Numba's: threads pull blocks of 64 rows from one queue, each expert's weights are read once, sums
    are in fp32 and in the order given over j, and the result does not depend on the number of threads. A pair of
    matrices is Triton's on a GPU, three kernels after the sort; on the CPU Numba's for bf16, SwiGLU and no biases where
    it is faster, and torch's else. Either way the result is always the same.

    Activations stay fp32 with packed FP32 and BF16 weights, but where rounding them to bf16 pays: for an expert with
    more than 4 tokens on Zen with AVX512_BF16, with more than 32 where the CPU has matrix registers (AMX). With INT8
    and INT4 they are rounded to multiples of each group's largest magnitude over 127.

    Parameters
    ----------
    x : (T, M) fp32 with packed experts, else fp32, fp16 or bf16
        Normed hidden states: a numpy array, or a tensor, which for a pair may be on any device. A pair's operands are
        all arrays or all tensors.
    experts : PackedExperts, NodeExperts, or a pair (gate_up, down)
        From `pack_experts`, `experts_in_place` or `pack_by_node`; or gate_up (P, 2 F, M) and down (P, M, F) of x's type
        or Quantised: per page an expert's gates and then its ups, which take turns where the activation is
        "swiglu-clamped".
    ids : (T, k) int32 or int64, contiguous
        Experts of each token. On a GPU they are not checked: one that is out of range, or whose page is, makes its
        token's row NaN and no other.
    weights : (T, k) fp32, contiguous
        Their weights, as `route` gives them, and `with_shared` for experts that every token has.
    activation : "swiglu", "geglu" or "swiglu-clamped"
        What becomes of gate and up; packed experts have "swiglu" alone.
    gate_up_bias, down_bias : (P, 2 F) and (P, M) of x's type, optional
        Of a pair.
    pages : (E,) int32 or int64, optional
        Of a pair, the page of each expert; expert e is on page e unless given. Pages of experts that nobody chose are
        never read: they may be on their way still.
    exact : bool
        Keep activations in fp32 for any number of tokens with packed FP32 and BF16 weights: then a token's result
        depends on who else is in the batch by no more than the order in which its fp32 sums are taken.
    threads : int, optional
        Threads that share packed experts; the cores that this process may use unless given.
    path : CodePath, optional
        Code path for packed experts; this computer's own (`features`) unless given.
    out : (T, M) fp32, contiguous, optional
        Where to store the result of packed experts, apart from all that is read.
    backend : "triton", "triton-interpret" or "torch", optional
        For a pair; of arrays, as for CPU tensors. Triton on a GPU unless given, Numba or torch on the CPU and torch
        where an operand asks for a gradient.

    Returns
    -------
    (T, M) of x's kind and type
        `out` if given. Relative Frobenius error against float64, of a pair: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32;
        with the packed weights 1e-6; 5e-3 where activations are rounded to bf16, 2e-2 with INT8 and INT4, 3e-2 in rows
        of a few.

    Raises
    ------
    TypeError
        If an operand is of another kind, or dtypes do not go together.
    ValueError
        If shapes, memory layout or devices disagree, `out` overlaps an operand, an id or its page is out of range (on
        the CPU), or an argument is given that the kernel for these experts does not take.

    Examples
    --------
    >>> import numpy as np
    >>> gate_up, down = np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32)
    >>> x, ids, weights = np.full((1, 1), 2, np.float32), np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)
    >>> fused_moe(x, kernels_cpu.pack_experts(gate_up, down), ids, weights).round(4)
    array([[3.5232]], dtype=float32)
    >>> fused_moe(x, (gate_up, down), ids, weights).round(4)
    array([[3.5232]], dtype=float32)
    """
    turn = None if activation == "swiglu" else activation
    matrices = {"activation": turn, "gate_up_bias": gate_up_bias, "down_bias": down_bias, "pages": pages}
    if isinstance(experts, PackedExperts | NodeExperts):
        _refuse(matrices | {"backend": backend}, "packed experts", "leave it out, or pass experts=(gate_up, down)")
        return kernels_cpu.fused_moe(x, experts, ids, weights, exact=exact, threads=threads, path=path, out=out)
    gate_up, down = _pair(experts)
    numba = {"exact": exact or None, "threads": threads, "path": path, "out": out}
    _refuse(numba, "experts that are not packed", "leave it out, or pass what pack_experts returns")
    how: dict[str, Any] = matrices | {"activation": activation, "backend": backend}
    operands: tuple[Any, ...] = (x, gate_up, down, ids, weights)
    compute = for_tensors("fused_moe")
    found: SameKind = computed(compute, *operands, **how)
    return found


def fused_moe_reference(
    x: Operand,
    experts: Experts,
    ids: Operand,
    weights: Operand,
    *,
    activation: str = "swiglu",
    gate_up_bias: Operand | None = None,
    down_bias: Operand | None = None,
    pages: Operand | None = None,
) -> Any:
    """`fused_moe` in float64, the oracle of its tests: same operands, -> (T, M) float64.

    With the weights as packed, an array; of a pair of tensors a tensor.

    Examples
    --------
    >>> import numpy as np
    >>> experts = kernels_cpu.pack_experts(np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32))
    >>> fused_moe_reference(np.full((1, 1), 2.0), experts, np.zeros((1, 1), int), np.ones((1, 1))).round(4)
    array([[3.5232]])
    """
    turn = None if activation == "swiglu" else activation
    matrices = {"activation": turn, "gate_up_bias": gate_up_bias, "down_bias": down_bias, "pages": pages}
    if isinstance(experts, PackedExperts):
        _refuse(matrices, "packed experts", "leave it out, or pass experts=(gate_up, down)")
        return kernels_cpu.fused_moe_reference(x, experts, ids, weights)
    import kernels_triton

    compute: Any = kernels_triton.fused_moe_reference
    operands = (x, *_pair(experts), ids, weights)
    return computed(compute, *operands, **matrices | {"activation": activation})


def _refuse(arguments: dict[str, Any], what: str, mend: str) -> None:
    """Raise ValueError if an argument is given that the kernel does not take."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be left out for {what}, whose kernel does not take it: {mend}.")


def _pair(experts: object) -> tuple[Any, Any]:
    if not isinstance(experts, tuple) or len(experts) != 2 or hasattr(experts, "_fields"):
        raise TypeError(
            f"experts must be PackedExperts, NodeExperts or a pair (gate_up, down), not {type(experts).__name__}: "
            "pass what pack_experts returns, or both matrices."
        )
    return experts
