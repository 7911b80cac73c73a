"""Norms, gates and rotations: by Numba for arrays and CPU tensors of types that it takes, else by torch or Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kernels_cpu
from workbench.kernels.arrays import computed, directly, for_tensors

if TYPE_CHECKING:
    from kernels_cpu.arguments import Operand, SameKind

__all__ = ["add_rms_norm", "gated", "rms_norm", "rope"]


def rms_norm(
    x: SameKind, weight: Operand, *, eps: float = 1e-5, threads: int | None = None, backend: str | None = None
) -> SameKind:
    """Normalise each row to unit mean square and scale it.

        out[t] = weight * round(x[t] / sqrt(mean(x[t]^2) + eps))

    Rounded once to x's type and then scaled, as in Hugging Face's Mixtral.

    Parameters
    ----------
    x : (T, M) fp32, fp16 or bf16; a numpy array, or a tensor on any device
        uint16 arrays hold bfloat16 bits. Rows may be strided, the numbers of a row not.
    weight : (M,) of x's kind and type
    eps : float
    threads : int, optional
        Most threads on the CPU, by default the number of cores that this process may use.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton on a GPU, Numba for fp32 and bf16 on the CPU, torch for others and where an operand requires a
        gradient. With a backend, arrays are taken as CPU tensors of the same memory.

    Returns
    -------
    (T, M) of x's kind and type
        Relative error against float64: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes, memory layout or devices disagree, or an argument is given that the kernel for these operands
        does not take.

    Examples
    --------
    >>> rms_norm(np.array([[3, 4]], np.float32), np.array([1, 2], np.float32), eps=0.0).round(4)
    array([[0.8485, 2.2627]], dtype=float32)
    """
    if not _half(x, threads) and directly(x, {"threads": threads}, {"backend": backend}, weight):
        return kernels_cpu.rms_norm(x, weight, eps=eps, threads=threads)
    out: SameKind = computed(for_tensors("rms_norm"), x, weight, eps=eps, backend=backend)
    return out


def add_rms_norm(
    x: SameKind,
    residual: Operand,
    weight: Operand,
    *,
    eps: float = 1e-5,
    threads: int | None = None,
    backend: str | None = None,
) -> tuple[SameKind, SameKind]:
    """Add a sublayer's output to the residual stream and normalise the sum, in one pass over memory.

        total[t] = round(x[t] + residual[t]);  out[t] = rms_norm(total[t])

    Parameters
    ----------
    x, residual : (T, M) fp32, fp16 or bf16, both of one type
    weight : (M,) of the same type
    eps, threads, backend
        As of `rms_norm`.

    Returns
    -------
    out, total : (T, M) of x's kind and type

    Raises
    ------
    TypeError, ValueError
        As `rms_norm`.

    Examples
    --------
    >>> x, two = np.array([[1, 2]], np.float32), np.full((1, 2), 2, np.float32)
    >>> out, total = add_rms_norm(x, two, np.ones(2, np.float32), eps=0.0)
    >>> out.round(4), total
    (array([[0.8485, 1.1314]], dtype=float32), array([[3., 4.]], dtype=float32))
    """
    if not _half(x, threads) and directly(x, {"threads": threads}, {"backend": backend}, residual, weight):
        return kernels_cpu.add_rms_norm(x, residual, weight, eps=eps, threads=threads)
    both: tuple[SameKind, SameKind] = computed(
        for_tensors("add_rms_norm"), x, residual, weight, eps=eps, backend=backend
    )
    return both


def gated(
    x: SameKind, *, activation: str = "swiglu", threads: int | None = None, backend: str | None = None
) -> SameKind:
    """Multiply each row's activated gates with its up projections.

        out[t] = a(x[t, :F]) * x[t, F:],  a(g) = g sigmoid(g) or g Phi(g)

    Parameters
    ----------
    x : (T, 2 F) fp32, fp16 or bf16; a numpy array, or a tensor on any device
        Gates, then up projections. uint16 arrays hold bfloat16 bits. Rows may be strided, the numbers of a row not.
    activation : "swiglu" or "geglu"
    threads, backend
        As of `rms_norm`.

    Returns
    -------
    (T, F) of x's kind and type
        Relative error against float64: 4e-3 in bf16, 5e-4 in fp16, 1e-6 in fp32.

    Raises
    ------
    TypeError
        If x has another dtype.
    ValueError
        If shape or memory layout is another, the activation is unknown, or the kernel for x does not take an argument.

    Examples
    --------
    >>> gated(np.array([[2, 3]], np.float32)).round(4)
    array([[5.2848]], dtype=float32)
    """
    if not _half(x, threads) and directly(x, {"threads": threads}, {"backend": backend}):
        return kernels_cpu.gated(x, activation=activation, threads=threads)
    out: SameKind = computed(for_tensors("gated"), x, activation=activation, backend=backend)
    return out


def rope(
    x: SameKind,
    positions: Operand,
    table: Operand,
    *,
    interleaved: bool = False,
    weight: Operand | None = None,
    eps: float = 1e-6,
    threads: int | None = None,
    backend: str | None = None,
) -> SameKind:
    """Rotate pairs of every head's first R dims by an angle that grows with the token's position.

        (a, b) -> (a cos - b sin, b cos + a sin),  a = y[i], b = y[i + R / 2]

    y is x, or x normalised per head to unit mean square and scaled by `weight` (Qwen3's qk-norm). The other D - R dims
    are not rotated. Computed in fp32 and rounded once.

    Parameters
    ----------
    x : (T, H, D) fp32, fp16 or bf16; a numpy array, or a tensor on any device
        Rows and heads may be strided, as in a slice of a fused qkv. uint16 arrays hold bfloat16 bits.
    positions : (T,) int32 or int64
        Below P; on a GPU they are not checked.
    table : (P, R) fp32, contiguous
        From `rope_table`: cosines of the R / 2 angles of each position, then sines; R <= D.
    interleaved : bool
        True if pairs are neighbours, y[2 i] and y[2 i + 1] (GPT-J, DeepSeek).
    weight : (D,) of x's type, optional
    eps : float
        Epsilon of the norm.
    threads, backend
        As of `rms_norm`.

    Returns
    -------
    (T, H, D) of x's kind and type, contiguous
        Relative Frobenius error against float64 with the same table: 4e-3 in bf16, 5e-4 in fp16, 1e-6 in fp32.

    Raises
    ------
    TypeError, ValueError
        As `rms_norm`, and if a position is out of range on the CPU.

    Examples
    --------
    A quarter of a turn.

    >>> x, table = np.array([[[1, 0]]], np.float32), np.array([[0, 1]], np.float32)
    >>> rope(x, np.zeros(1, np.int64), table)
    array([[[0., 1.]]], dtype=float32)
    """
    options: dict[str, Any] = {"interleaved": interleaved, "weight": weight, "eps": eps}
    if not _half(x, threads) and directly(x, {"threads": threads}, {"backend": backend}, positions, table, weight):
        return kernels_cpu.rope(x, positions, table, **options, threads=threads)
    out: SameKind = computed(for_tensors("rope"), x, positions, table, **options, backend=backend)
    return out


def _half(x: object, threads: int | None) -> bool:
    """True for an array of fp16, which Numba's kernels of rows do not take."""
    return isinstance(x, np.ndarray) and x.dtype == np.float16 and threads is None
