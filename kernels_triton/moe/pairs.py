"""Pairs of token and expert in order by expert, each expert's run padded to whole blocks: what a grouped GEMM walks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operators import check_tensor

# Beyond so many pairs a sort reads less than one pass per expert does. Not measured on a GPU yet.
_MOST_BY_SCANNING = 1 << 16
_STEP = 1024  # pairs that a program looks at together


class Blocks(NamedTuple):
    """Blocks of rows of one expert each; only the first `rows` entries, and their blocks, are ever read.

    pairs (capacity,): pair t k + j of each row, or T k where the row is padding; int32, int64 where that is too small.
    experts (capacity / block,) int32: expert of each block. rows (1,) int64: rows in use.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    rows: torch.Tensor


def sort_pairs(ids: torch.Tensor, experts: int, block: int, *, backend: str | None = None) -> Blocks:
    """Order the pairs by expert and, within one, by token; deterministic, on the device, without waiting for it.

    Parameters
    ----------
    ids : (T, k) int32 or int64, contiguous
        Experts of each token, in [0, experts); pairs outside come last, as those of an expert of number E.
    experts : int
        E.
    block : int
        Rows per block, a power of two.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors and torch for others.

    Returns
    -------
    Blocks
        Each expert's run begins at a block.

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
    made = _allocate(ids, experts, block)
    if chosen is Backend.TORCH or (chosen is Backend.TRITON and ids.numel() > _MOST_BY_SCANNING):
        return _by_sorting(ids.reshape(-1), experts, block, made)
    enter_mode(chosen)
    return _by_scanning(ids.reshape(-1), experts, block, made)


def _allocate(ids: torch.Tensor, experts: int, block: int) -> Blocks:
    """Room for the worst case, which is known without looking at the ids: every expert's last block all but empty."""
    n = ids.numel()
    blocks = -(-(n + min(experts + 1, n) * (block - 1)) // block)
    kind = torch.int32 if blocks * block < 2**31 else torch.int64
    return Blocks(
        torch.empty(blocks * block, dtype=kind, device=ids.device),
        torch.empty(blocks, dtype=torch.int32, device=ids.device),
        torch.zeros(1, dtype=torch.int64, device=ids.device),
    )


def _by_scanning(ids: torch.Tensor, experts: int, block: int, made: Blocks) -> Blocks:
    from ..backend.mode import triton
    from .jit_pairs import count_pairs, place_pairs

    counts = torch.empty(experts + 1, dtype=torch.int64, device=ids.device)
    if ids.numel():
        grid, width = (experts + 1,), triton.next_power_of_2(experts + 1)
        count_pairs[grid](ids, counts, ids.numel(), experts, BLOCK=_STEP)
        place_pairs[grid](ids, counts, *made, ids.numel(), experts, ROWS=block, BLOCK=_STEP, BLOCK_E=width)
    return made


def _by_sorting(ids: torch.Tensor, experts: int, block: int, made: Blocks) -> Blocks:
    known = (ids >= 0) & (ids < experts)
    ordered, order = ids.long().where(known, experts).sort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ordered, torch.ones_like(ordered))
    blocks = (counts + block - 1) // block
    ends = blocks.cumsum(0)
    gaps = (ends - blocks) * block - (counts.cumsum(0) - counts)  # rows of padding before each expert's run
    made.pairs.fill_(ids.numel())
    made.pairs[torch.arange(ids.numel(), device=ids.device) + gaps[ordered]] = order.to(made.pairs.dtype)
    made.experts.copy_(torch.searchsorted(ends, torch.arange(len(made.experts), device=ids.device), right=True))
    made.rows.copy_(ends[-1:] * block)
    return made
