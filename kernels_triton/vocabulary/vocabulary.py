"""Embeddings of token ids, and logits of only the rows that sample."""

from __future__ import annotations

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import INDEX, check_indices, check_range
from ..backend.operators import operator
from ..declarations import operation, work_of
from ..moe.tiles import arch_of, tiles_for
from ..rows.rows import check_rows

_TILE = 1024
_HEAD_ROWS = 8192  # rows of the head converted to fp32 at once


@operation
def embed(ids: torch.Tensor, table: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Look up the embeddings of token ids.

        out[t] = table[ids[t]]

    Parameters
    ----------
    ids : (T,) int32 or int64
        In 0 .. V - 1; on a GPU they are not checked.
    table : (V, M) fp32, fp16 or bf16
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, M) of the table's type, exact

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, or (on the CPU) an id is out of range.

    Examples
    --------
    >>> embed(torch.tensor([1]), torch.tensor([[1.0], [2.0]]))
    tensor([[2.]])
    """
    check_rows("table", table)
    check_indices("ids", ids, INDEX, table)
    out: torch.Tensor = _embed(ids, table, str(choose_backend(backend, table)))
    return out


def _compute_rows(ids: torch.Tensor, table: torch.Tensor, backend: str) -> torch.Tensor:
    if table.device.type == "cpu":
        check_range("ids", ids, len(table), "correct them")
    if backend == Backend.TORCH:
        return table.index_select(0, ids)
    enter_mode(Backend(backend))
    from .jit_vocabulary import embed as kernel

    width = table.shape[1]
    out = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    if len(ids):
        kernel[(len(ids), -(-width // _TILE))](ids, table, out, table.stride(0), width, BLOCK=_TILE)
    return out


_embed = operator("embed", _compute_rows, lambda ids, table, _: table.new_empty(len(ids), table.shape[1]))


@operation
def sampled_logits(
    x: torch.Tensor, rows: torch.Tensor, head: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Compute the logits of the rows that sample, and of no others.

        out[r] = head x[rows[r]]

    Parameters
    ----------
    x : (T, M) fp32, fp16 or bf16
        Normed hidden states.
    rows : (R,) int32 or int64
        The last of each prompt, and every decode; on a GPU they are not checked.
    head : (V, M) of x's type
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (R, V) fp32
        Sums in fp32, not rounded in between: relative Frobenius error 1e-5 against float64.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, or (on the CPU) a row is out of range.

    Examples
    --------
    >>> sampled_logits(torch.tensor([[1.0], [2.0]]), torch.tensor([1]), torch.tensor([[3.0], [4.0]]))
    tensor([[6., 8.]])
    """
    check_rows("x", x)
    check_rows("head", head)
    if head.dtype is not x.dtype or head.shape[1] != x.shape[1] or head.device != x.device:
        raise ValueError(
            f"head must be (V, {x.shape[1]}) {x.dtype} on {x.device} as x, not {tuple(head.shape)} {head.dtype} on "
            f"{head.device}: pass one model's."
        )
    check_indices("rows", rows, INDEX, x)
    out: torch.Tensor = _logits(x, rows, head, str(choose_backend(backend, x, head)))
    return out


def _compute_logits(x: torch.Tensor, rows: torch.Tensor, head: torch.Tensor, backend: str) -> torch.Tensor:
    if x.device.type == "cpu":
        check_range("rows", rows, len(x), "correct them")
    if backend == Backend.TORCH:
        wide = x[rows.long()].float()
        return torch.cat([wide @ entries.float().T for entries in head.split(_HEAD_ROWS)], dim=1)
    enter_mode(Backend(backend))
    from .jit_vocabulary import logits as kernel

    tiles = tiles_for(arch_of(x.device), x.dtype, len(rows))
    out = torch.empty((len(rows), len(head)), dtype=torch.float32, device=x.device)
    if out.numel():
        count, size = out.shape
        own = tiles.plain
        grid = (-(-count // tiles.m) * -(-size // own.n),)
        kernel[grid](
            x,
            rows,
            head,
            out,
            count,
            size,
            x.shape[1],
            x.stride(0),
            head.stride(0),
            EVEN_K=x.shape[1] % own.k == 0,
            BLOCK_M=tiles.m,
            BLOCK_N=own.n,
            BLOCK_K=own.k,
            num_warps=own.warps,
            num_stages=own.stages,
        )
    return out


_logits = operator(
    "sampled_logits",
    _compute_logits,
    lambda x, rows, head, _: x.new_empty(len(rows), len(head), dtype=torch.float32),
)


@work_of(embed)
def embed_work(tokens: int, width: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]) = (0, 2 itemsize T M).

    Examples
    --------
    >>> embed_work(tokens=2, width=8, itemsize=2)
    (0, 64)
    """
    return 0, 2 * itemsize * tokens * width


@work_of(sampled_logits)
def sampled_logits_work(rows: int, width: int, vocabulary: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 2 R M V,  bytes = itemsize M (V + R) + 4 R V

    Examples
    --------
    >>> sampled_logits_work(rows=2, width=8, vocabulary=10, itemsize=2)
    (320, 272)
    """
    moved = itemsize * width * (vocabulary + rows) + 4 * rows * vocabulary
    return 2 * rows * width * vocabulary, moved
