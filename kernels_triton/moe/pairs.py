"""Pairs of token and expert, sorted by expert and padded to whole blocks per expert, for the grouped GEMM."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operators import check_tensor

# With more pairs a sort reads less than one pass per expert. Not measured on a GPU yet.
_MOST_BY_SCANNING = 1 << 16
_STEP = 1024  # pairs that a program reads at once


class Blocks(NamedTuple):
    """Blocks of rows, each of one expert; only the first `rows` entries and their blocks are read.

    pairs (capacity,) int32, or int64 where that is too small: pair t k + j of each row, or T k where it is padding.
    experts (capacity / block,) int32: expert of each block. rows (1,) int64: number of rows in use.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    rows: torch.Tensor


def sort_pairs(ids: torch.Tensor, experts: int, block: int, *, backend: str | None = None) -> Blocks:
    """Sort the pairs by expert and then by token: deterministic, on the device, without synchronisation.

    Parameters
    ----------
    ids : (T, k) int32 or int64, contiguous
        Experts of each token, in [0, experts); pairs with an id out of range come last, as those of an expert E.
    experts : int
        E.
    block : int
        Rows per block, a power of two.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors and torch for others.

    Returns
    -------
    Blocks
        The rows of each expert begin at a block.

    Raises
    ------
    ValueError
        If the backend cannot compute here.

    Examples
    --------
    >>> pairs, owners, rows = sort_pairs(torch.tensor([[1], [0], [1]]), experts=2, block=2)
    >>> pairs[: int(rows)].tolist(), owners[: int(rows) // 2].tolist()
    ([1, 3, 0, 2], [0, 1])
    """
    check_tensor("ids", ids)
    chosen = choose_backend(backend, ids)
    sorted_blocks = _allocate(ids, experts, block)
    if chosen is Backend.TORCH or (chosen is Backend.TRITON and ids.numel() > _MOST_BY_SCANNING):
        return _by_sorting(ids.reshape(-1), experts, block, sorted_blocks)
    enter_mode(chosen)
    return _by_scanning(ids.reshape(-1), experts, block, sorted_blocks)


def _allocate(ids: torch.Tensor, experts: int, block: int) -> Blocks:
    """Allocate for the worst case of any ids: every expert's last block has a single pair."""
    n = ids.numel()
    blocks = -(-(n + min(experts + 1, n) * (block - 1)) // block)
    kind = torch.int32 if blocks * block < 2**31 else torch.int64
    return Blocks(
        ids.new_empty(blocks * block, dtype=kind),
        ids.new_empty(blocks, dtype=torch.int32),
        ids.new_empty(1, dtype=torch.int64),
    )


def _by_scanning(ids: torch.Tensor, experts: int, block: int, sorted_blocks: Blocks) -> Blocks:
    """Fill the blocks with one pass over the ids per expert."""
    from ..backend.mode import triton
    from .jit_pairs import count_pairs, place_pairs

    counts = ids.new_empty(experts + 1, dtype=torch.int64)
    if ids.numel():
        grid = (experts + 1,)
        width = triton.next_power_of_2(experts + 1)
        count_pairs[grid](ids, counts, ids.numel(), experts, BLOCK=_STEP)
        place_pairs[grid](ids, counts, *sorted_blocks, ids.numel(), experts, ROWS=block, BLOCK=_STEP, BLOCK_E=width)
    else:
        sorted_blocks.rows.zero_()
    return sorted_blocks


def _by_sorting(ids: torch.Tensor, experts: int, block: int, sorted_blocks: Blocks) -> Blocks:
    """Fill the blocks with torch's stable sort."""
    known = (ids >= 0) & (ids < experts)
    ordered, order = ids.long().where(known, experts).sort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ordered, torch.ones_like(ordered))
    blocks = (counts + block - 1) // block
    ends = blocks.cumsum(0)
    gaps = (ends - blocks) * block - (counts.cumsum(0) - counts)  # rows of padding before each expert's rows
    rows = torch.arange(ids.numel(), device=ids.device) + gaps[ordered]
    sorted_blocks.pairs.fill_(ids.numel())
    sorted_blocks.pairs[rows] = order.to(sorted_blocks.pairs.dtype)
    numbers = torch.arange(len(sorted_blocks.experts), device=ids.device)
    sorted_blocks.experts.copy_(torch.searchsorted(ends, numbers, right=True))
    sorted_blocks.rows.copy_(ends[-1:] * block)
    return sorted_blocks
