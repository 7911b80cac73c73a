"""Router and routed experts: by Numba, and by torch and Triton what it has no kernel for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import kernels_cpu
from kernels_cpu import CodePath, NodeExperts, PackedExperts
from workbench.kernels.arrays import computed, directly, for_tensors

if TYPE_CHECKING:
    from kernels_cpu.arguments import Operand, SameKind
    from kernels_triton import Routing

__all__ = ["fused_moe", "fused_moe_reference", "route"]

Experts: TypeAlias = "PackedExperts | NodeExperts | tuple[Any, Any]"


def route(
    logits: Operand,
    k: int,
    *,
    scoring: str = "softmax",
    renormalise: bool = False,
    bias: Operand | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
    threads: int | None = None,
    backend: str | None = None,
) -> Routing:
    """Choose k experts per token.

        s = softmax(logits) or sigmoid(logits);  ids = the k experts with the largest s + bias in the kept groups
        weights = scale * s[ids],  divided by their sum if `renormalise`

    With "sparsemixer" (Phi-3.5-MoE; Liu et al., GRIN, 2024) each choice has a softmax of its own, over the experts that
    are left and whose logit l is near the best of these, m: (m - l) / max(|l|, m) <= 0.02.

    Mixtral, Qwen3: softmax, renormalise. GPT-OSS, Granite: the same, since a softmax over the chosen logits is the
    renormalised softmax over all. OLMoE, Qwen1.5: softmax. DeepSeek-V2: softmax, groups. DeepSeek-V3: sigmoid, bias,
    groups, renormalise. The computation is in fp32. Of equal experts, and of equal groups, the lowest index wins on
    every backend. NaN and -inf rank last, so that the ids of a token are always k different experts.

    Parameters
    ----------
    logits : (T, E) fp32, fp16 or bf16; a numpy array, or a tensor on any device
        uint16 arrays hold bfloat16 bits. Rows may be strided, columns not.
    k : int
        Experts per token.
    scoring : "softmax", "sigmoid" or "sparsemixer"
        "sparsemixer" has neither bias nor groups, and does not renormalise; torch computes it on any device.
    renormalise : bool
        True if the weights of a token sum to `scale`.
    bias : (E,) fp32, optional
        Added to the scores for the choice only, not to the weights.
    groups, kept_groups : int
        Number of groups of E / `groups` consecutive experts, and of the best groups, from which experts are chosen. A
        group is as good as its best expert with softmax, as the sum of its two best with sigmoid.
    scale : float
        Factor of all weights.
    threads : int, optional
        Most threads on the CPU, for softmax without bias and groups.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton on a GPU; on the CPU Numba for fp32 and bf16, softmax and neither bias nor groups, and torch
        for others and where an operand requires a gradient. With a backend, arrays are taken as CPU tensors.

    Returns
    -------
    Routing
        ids (T, k) int32, best first; weights (T, k) fp32, relative error 1e-5 against float64.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes disagree, there are fewer than k experts to choose, or an argument is given that the kernel for these
        operands does not take.

    Examples
    --------
    >>> import numpy as np
    >>> ids, weights = route(np.array([[0, 2, 1, 2]], np.float32), 2, renormalise=True)
    >>> ids, weights
    (array([[1, 3]], dtype=int32), array([[0.5, 0.5]], dtype=float32))
    """
    if threads is None or not directly(logits, {"threads": threads}, {"backend": backend}):
        found: Routing = computed(
            for_tensors("route"),
            logits,
            k,
            scoring=scoring,
            renormalise=renormalise,
            bias=bias,
            groups=groups,
            kept_groups=kept_groups,
            scale=scale,
            backend=backend,
        )
        return found
    if scoring != "softmax" or bias is not None or (groups, kept_groups) != (1, 1):
        raise ValueError("scoring, bias and groups must be left out for a call with threads: leave threads out.")
    import kernels_triton

    both: Any = kernels_cpu.route(logits, k, renormalise=renormalise, scale=scale, threads=threads)
    return kernels_triton.Routing(*both)


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
    """Compute the routed experts of one layer.

        out[t] = sum over j of weights[t, j] * (down[p] a(gate_up[p] x[t] + gate_up_bias[p]) + down_bias[p])
        p = pages[ids[t, j]]

    Numba computes packed experts: threads take blocks of 64 rows from one queue, each expert's weights are read once,
    sums over j are in fp32 and in the given order, and the result does not depend on the number of threads. A pair of
    matrices is computed by Triton on a GPU, with three kernels after the sort; on the CPU by Numba for bf16, SwiGLU and
    no biases where it is faster, and else by torch. All of them are deterministic.

    Numba reads a pair of tensors in place. At the fourth call with the same ones, without `pages`, it packs them if at
    least half of the computer's memory stays free, and later calls read that copy as they read packed weights: results
    may change within the errors below. The copy is freed with the weights and made again after a write to the tensors
    that are passed. Writes through `data`, numpy or a pointer are noticed if they change a sample of 64 numbers of a
    matrix that the call uses.

    With packed FP32 and BF16 weights activations stay fp32, except where rounding them to bf16 is faster: for an expert
    with more than a few tokens on Zen with AVX512_BF16 and where the CPU has matrix registers (AMX).
    With all other formats they are rounded to multiples of each group's largest magnitude over 127.

    Parameters
    ----------
    x : (T, M) fp32 or bf16 with packed experts, else fp32, fp16 or bf16
        Normed hidden states: a numpy array, or a tensor, which for a pair may be on any device. A pair's operands are
        all arrays or all tensors.
    experts : PackedExperts, NodeExperts, or a pair (gate_up, down)
        From `pack_experts`, `pack_int4`, `pack_mxfp4`, `experts_of_blocks`, `experts_in_place` or `experts_by_node`; or
        gate_up (P, 2 F, M) and down (P, M, F) of x's type or Quantised: per page an expert's gates and then its ups,
        which alternate where the activation is "swiglu-clamped".
    ids : (T, k) int32 or int64, contiguous
        Experts of each token. On a GPU they are not checked: one that is out of range, or whose page is, makes its
        token's row NaN and no other.
    weights : (T, k) fp32, contiguous
        Weights of these experts, from `route`, or from `with_shared` with experts that every token has.
    activation : "swiglu", "geglu" or "swiglu-clamped"
        Function of gate and up projection; not "geglu" for packed experts.
    gate_up_bias, down_bias : (P, 2 F) and (P, M) of x's type, optional
        Biases; of packed experts both or none, of fp32 or bf16.
    pages : (E,) int32 or int64, optional
        Page of each expert of a pair, by default page e for expert e; -1 for an expert that is computed elsewhere and
        adds nothing. Pages of experts that no token chose are never read: their transfer may still be under way.
    exact : bool
        Keep activations in fp32 for any number of tokens with packed FP32 and BF16 weights: other tokens of the batch
        then change a token's result only by the order of its fp32 sums.
    threads : int, optional
        Number of threads for packed experts, by default that of the cores that this process may use.
    path : CodePath, optional
        Code path for packed experts, by default this computer's (`features`).
    out : (T, M) of x's type, contiguous, optional
        Memory for the result of packed experts, which must not overlap an operand.
    backend : "triton", "triton-interpret" or "torch", optional
        For a pair; arrays are taken as CPU tensors. By default Triton on a GPU, Numba or torch on the CPU, and torch
        where an operand requires a gradient.

    Returns
    -------
    (T, M) of x's kind and type
        `out` if given. Relative Frobenius error against float64, of a pair: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32;
        with the packed weights 1e-6; 5e-3 where activations are rounded to bf16, 2e-2 with formats that have scales,
        3e-2 in rows of a few; for x in bf16 3e-3 more.

    Raises
    ------
    TypeError
        If an operand is of another kind, or dtypes disagree.
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
    if isinstance(experts, PackedExperts | NodeExperts):
        others = {"pages": pages, "backend": backend}
        _refuse(others, "packed experts", "leave it out, or pass experts=(gate_up, down)")
        return kernels_cpu.fused_moe(
            x,
            experts,
            ids,
            weights,
            activation=activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            exact=exact,
            threads=threads,
            path=path,
            out=out,
        )
    gate_up, down = _pair(experts)
    packed_only = {"exact": exact or None, "threads": threads, "path": path, "out": out}
    _refuse(packed_only, "experts that are not packed", "leave it out, or pass what pack_experts returns")
    operands: tuple[Any, ...] = (x, gate_up, down, ids, weights)
    found: SameKind = computed(
        for_tensors("fused_moe"),
        *operands,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        pages=pages,
        backend=backend,
    )
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
    """Compute `fused_moe` in float64, the oracle of its tests: -> (T, M) float64.

    The result is an array for packed experts, computed with the packed weights, and a tensor for a pair of tensors.

    Examples
    --------
    >>> import numpy as np
    >>> experts = kernels_cpu.pack_experts(np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32))
    >>> fused_moe_reference(np.full((1, 1), 2.0), experts, np.zeros((1, 1), int), np.ones((1, 1))).round(4)
    array([[3.5232]])
    """
    options: dict[str, Any] = {
        "activation": activation,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    if isinstance(experts, PackedExperts):
        _refuse({"pages": pages}, "packed experts", "leave it out, or pass experts=(gate_up, down)")
        return kernels_cpu.fused_moe_reference(x, experts, ids, weights, **options)
    import kernels_triton

    compute: Any = kernels_triton.fused_moe_reference
    operands = (x, *_pair(experts), ids, weights)
    return computed(compute, *operands, **options | {"pages": pages})


def _refuse(arguments: dict[str, Any], experts: str, remedy: str) -> None:
    """Raise ValueError if an argument is given that the kernel does not take."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be left out for {experts}, whose kernel does not take it: {remedy}.")


def _pair(experts: object) -> tuple[Any, Any]:
    if not isinstance(experts, tuple) or len(experts) != 2 or hasattr(experts, "_fields"):
        raise TypeError(
            f"experts must be PackedExperts, NodeExperts or a pair (gate_up, down), not {type(experts).__name__}: "
            "pass what pack_experts returns, or both matrices."
        )
    return experts
