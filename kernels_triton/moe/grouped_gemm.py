"""Grouped GEMM: the products of each token with the matrices of its experts, one row per pair."""

from __future__ import annotations

import functools
import itertools

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import FLOATS
from ..backend.operators import check_tensor, operator
from ..declarations import operation, reference_of, work_of
from . import torch_path
from .experts import (
    LEFT_OUT,
    Activation,
    Quantised,
    Weights,
    check_pages,
    check_routing,
    check_weights,
    join_weights,
    matrix_on,
    split_weights,
)
from .pairs import Blocks, sort_pairs
from .tiles import Tiles, arch_of, tiles_for

_UNQUANTISED = 1 << 30  # columns of a group without scales: more than a matrix has
_ACTIVATIONS = {Activation.SWIGLU: 1, Activation.GEGLU: 2, Activation.CLAMPED: 3}


@operation
def grouped_gemm(
    x: torch.Tensor,
    matrices: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply each token with the matrices of its experts.

        out[t, j] = weights[t, j] * (matrices[p] x[t] + bias[p]),  p = pages[ids[t, j]],  x[t, j] where x has three axes

    Sums are in fp32 and rounded once. Offsets are 64 bits wide.

    Parameters
    ----------
    x : (T, K) or (T, k, K) fp32, fp16 or bf16, contiguous columns
        One row per token, or one per pair.
    matrices : (P, N, K) of x's type, or Quantised
        One page per expert.
    ids : (T, k) int32 or int64, contiguous
        Experts of each token. On a GPU they are not checked: one that is out of range, or whose page is, makes its
        pair's row NaN and no other.
    weights : (T, k) fp32, contiguous, optional
        Factors of the rows, by default 1.
    bias : (P, N) of x's type, optional
    pages : (E,) int32 or int64, optional
        Page of each expert, by default page e for expert e; -1 for an expert whose rows are zero. Pages of experts that
        no token chose are never read.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, k, N) of x's type
        Relative Frobenius error against float64: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes, memory layout or devices disagree, an id or its page is out of range (torch), or the backend cannot
        compute here.

    Examples
    --------
    >>> grouped_gemm(torch.ones(1, 2), torch.arange(8.0).reshape(2, 2, 2), torch.tensor([[1, 0]]))
    tensor([[[ 9., 13.],
             [ 1.,  5.]]])
    """
    check_tensor("ids", ids)
    check_input("x", x, ids.shape[1] if ids.ndim == 2 else 0)
    check_routing(ids, weights, x)
    check_weights("matrices", matrices, x, "N", x.shape[-1])
    check_bias("bias", bias, matrices, x)
    check_pages(pages, matrices.shape[0], x)
    values, scales = split_weights(matrices)
    chosen = choose_backend(backend, x, values, scales, weights, bias)
    out: torch.Tensor = _grouped(x, values, scales, ids, weights, bias, pages, str(chosen))
    return out


def _compute(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    pages: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    matrices = join_weights(values, scales)
    chosen = Backend(backend)
    if chosen is Backend.TORCH:
        rows = torch_path.multiply(x, matrices, bias, ids, weights, pages)
    else:
        enter_mode(chosen)
        experts = len(values) if pages is None else len(pages)
        tiles = tiles_for(arch_of(x.device), values.dtype, ids.numel() / experts)
        blocks = sort_pairs(ids, experts, tiles.m, backend=chosen)
        rows = launch(x, matrices, bias, ids, weights, pages, None, blocks, tiles.m, tiles.plain)
    return rows.view(*ids.shape, matrices.shape[1])


def _shaped(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, *_rest: object
) -> torch.Tensor:
    return x.new_empty(*ids.shape, values.shape[1])


_grouped = operator("grouped_gemm", _compute, _shaped)


def check_input(name: str, x: torch.Tensor, chosen: int) -> None:
    """Raise unless x has contiguous rows, one per token or one per pair of `chosen`.

    Raises
    ------
    TypeError
        If x has another dtype.
    ValueError
        If its shape or memory layout is another.
    """
    check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be fp32, fp16 or bf16, not {x.dtype}: convert it before the call.")
    shaped = x.ndim == 2 or (x.ndim == 3 and x.shape[1] == chosen)
    if not shaped or x.shape[-1] == 0:
        raise ValueError(f"{name} must be (T, K) or (T, {chosen}, K), not {tuple(x.shape)}: reshape it.")
    if (x.stride(-1) != 1 and x.shape[-1] > 1) or (x.ndim == 3 and not x.is_contiguous()):
        raise ValueError(f"{name} must have contiguous columns, and lie together where it has three axes: copy it.")


def check_bias(name: str, bias: torch.Tensor | None, matrices: Weights, x: torch.Tensor) -> None:
    """Raise unless there is one bias per row of `matrices`, or none at all.

    Raises
    ------
    ValueError
        If shape, dtype, memory layout or device is another.
    """
    if bias is None:
        return
    check_tensor(name, bias)
    want = (matrices.shape[0], matrices.shape[1])
    if tuple(bias.shape) != want or bias.dtype is not x.dtype or not bias.is_contiguous() or bias.device != x.device:
        raise ValueError(
            f"{name} must be {want} {x.dtype}, contiguous and on {x.device}, not {tuple(bias.shape)} {bias.dtype} on "
            f"{bias.device}: convert it."
        )


def launch(
    x: torch.Tensor,
    matrices: Weights,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    pages: torch.Tensor | None,
    activation: Activation | None,
    blocks: Blocks,
    block: int,
    tiles: Tiles,
) -> torch.Tensor:
    """Run the Triton kernel over sorted pairs: -> (T k, N); with an activation N is half the matrices' rows."""
    from ..backend.mode import TensorDescriptor
    from .jit_grouped import grouped

    values, scales = split_weights(matrices)
    rows = matrices.shape[1] // (2 if activation else 1)
    columns = matrices.shape[2]
    out = x.new_empty(ids.numel(), rows)
    bits, group, step = _steps(matrices, tiles.k)
    if not ids.numel():
        return out
    stored = step // 2 if bits == 4 else step
    tma = tiles.tma and activation is not Activation.CLAMPED and _has_descriptor(values)
    grouped[(_programs(blocks, rows, tiles, x.device),)](
        x,
        TensorDescriptor(values, values.shape, values.stride(), [1, tiles.n, stored]) if tma else values,
        values if scales is None else scales,
        bias,
        weights,
        out,
        *blocks,
        pages,
        ids.numel(),
        rows,
        columns,
        matrices.shape[0] if pages is None else len(pages),
        matrices.shape[0],
        x.stride(-2),
        *values.stride()[:2],
        *((0, 0) if scales is None else scales.stride()[:2]),
        0 if bias is None else bias.stride(0),
        out.stride(0),
        SHARE=ids.shape[1] if x.ndim == 2 else 1,
        ACTIVATION=_ACTIVATIONS[activation] if activation else 0,
        BITS=bits,
        GROUP=group,
        PAGED=pages is not None,
        BIASED=bias is not None,
        WEIGHTED=weights is not None,
        EVEN_K=columns % step == 0,
        BLOCK_M=block,
        BLOCK_N=tiles.n,
        BLOCK_K=step,
        GROUP_M=tiles.group,
        TMA=tma,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def _programs(blocks: Blocks, rows: int, tiles: Tiles, device: torch.device) -> int:
    """Number of programs: one per tile, or fewer that share all tiles."""
    programs = blocks.experts.shape[0] * -(-rows // tiles.n)
    return min(programs, tiles.per_sm * _processors(device)) if tiles.per_sm else programs


@functools.cache
def _processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 2 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _has_descriptor(values: torch.Tensor) -> bool:
    """True if the copy engine takes these pages: they and their rows begin at multiples of 16 bytes."""
    page, row, _ = values.stride()
    itemsize = values.element_size()
    return all(place % 16 == 0 for place in (values.data_ptr(), itemsize * page, itemsize * row))


def _steps(matrices: Weights, most: int) -> tuple[int, int, int]:
    """Bits (0 for plain weights), group size, and columns per step, so that no step crosses the end of a group."""
    if not isinstance(matrices, Quantised):
        return 0, _UNQUANTISED, most
    bits = 4 if matrices.values.dtype is torch.uint8 else 8
    group = matrices.group
    columns = matrices.shape[2]
    step = most
    while group != columns and group % step:
        step //= 2
    return bits, group, step


@work_of(grouped_gemm)
def grouped_gemm_work(
    rows: int, columns: int, tokens: int, chosen: int, touched: int, weight_bytes: float, itemsize: int
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 2 N K T k,  bytes = weight_bytes N K E_touched + itemsize (K T + N T k)

    Parameters
    ----------
    rows, columns : int
        N and K.
    tokens, chosen, touched : int
        T, k, and the number of different experts that were chosen.
    weight_bytes : float
        Size of one weight with its share of a scale: 0.625 for 4 bits in groups of 32 with fp32 scales [byte].
    itemsize : int
        Size of a number of x [byte].

    Examples
    --------
    >>> grouped_gemm_work(rows=4, columns=2, tokens=1, chosen=2, touched=2, weight_bytes=2, itemsize=2)
    (32, 52)
    """
    moved = weight_bytes * rows * columns * touched + itemsize * tokens * (columns + rows * chosen)
    return 2 * rows * columns * tokens * chosen, round(moved)


@reference_of(grouped_gemm)
def grouped_gemm_reference(
    x: torch.Tensor,
    matrices: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `grouped_gemm` in float64, pair by pair, the oracle of its tests: -> (T, k, N) float64.

    Examples
    --------
    >>> grouped_gemm_reference(torch.ones(1, 2), torch.ones(1, 1, 2), torch.zeros(1, 1).long()).item()
    2.0
    """
    out = torch.zeros(*ids.shape, matrices.shape[1], dtype=torch.float64)
    tokens, chosen = ids.shape
    for t, j in itertools.product(range(tokens), range(chosen)):
        page = int(ids[t, j]) if pages is None else int(pages[ids[t, j].long()])
        if pages is not None and page == LEFT_OUT:
            continue
        matrix = matrix_on(matrices, page, torch.float64)
        row = x[t].double() if x.ndim == 2 else x[t, j].double()
        out[t, j] = matrix @ row + (0 if bias is None else bias[page].double())
        out[t, j] *= 1 if weights is None else weights[t, j].double()
    return out
