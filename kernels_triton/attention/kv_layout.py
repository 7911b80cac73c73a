"""Copies of keys and values into and out of the paged cache, on the cache's device."""

from __future__ import annotations

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import FLOATS, check_indices, check_operand, check_range
from ..backend.operators import check_tensor, operator
from ..declarations import operation, work_of

_TILE = 2048  # numbers of K, and of V, per program


@operation
def append_kv(
    kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str | None = None
) -> None:
    """Store one K row and one V row per token into slots of a paged cache, in place.

        kv[slot // b, h, 0, slot % b] = k[t, h];  kv[slot // b, h, 1, slot % b] = v[t, h];  slot = slots[t]

    Numbers are rounded to the nearest of the cache's type. No slot may occur twice.

    Parameters
    ----------
    kv : (P, K, 2, b, D) fp32, fp16 or bf16, contiguous
        The cache, as of `decode_attention`; written in place.
    slots : (T,) int64
        block * b + offset of each row, in 0 .. P b - 1; on a GPU they are not checked.
    k, v : (T, K, D) fp32, fp16 or bf16, both of one type; rows may be strided as in a slice of a fused qkv
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors and torch for others.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, an operand overlaps the cache or requires a gradient, or (on the
        CPU) a slot is out of range or occurs twice.

    Examples
    --------
    >>> kv = torch.zeros(2, 1, 2, 4, 1)
    >>> append_kv(kv, torch.tensor([5]), torch.full((1, 1, 1), 3.0), torch.full((1, 1, 1), 7.0))
    >>> kv[1, 0, :, 1, 0].tolist()
    [3.0, 7.0]
    """
    _check(kv, slots)
    shape = (len(slots), kv.shape[1], kv.shape[4])
    for name, rows in (("k", k), ("v", v)):
        check_tensor(name, rows)
        if rows.dtype not in FLOATS or rows.dtype is not k.dtype:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, k and v alike, not {rows.dtype}: convert it.")
        if tuple(rows.shape) != shape or rows.device != kv.device or not rows[:1].is_contiguous():
            raise ValueError(
                f"{name} must be {shape} on {kv.device} with rows of contiguous numbers, not {tuple(rows.shape)} on "
                f"{rows.device}: copy or move it."
            )
    _scatter(kv, slots, k, v, str(choose_backend(backend, kv, k, v)))


def _store(kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str) -> None:
    _check_slots(kv, slots)
    _check_apart(kv, slots=slots, k=k, v=v)
    if kv.device.type == "cpu" and len(slots.unique()) != len(slots):
        raise ValueError(f"slots must differ, not {slots.tolist()}: pass the last row of each slot alone.")
    if backend != Backend.TORCH:
        _launch(Backend(backend), kv, slots, k, v, out=False)
        return
    page = slots // kv.shape[3]
    offset = slots % kv.shape[3]
    kv[page, :, 0, offset] = k.to(kv.dtype)
    kv[page, :, 1, offset] = v.to(kv.dtype)


_scatter = operator("append_kv", _store, lambda *_: None, written=("kv",))


@operation
def gather_kv(
    kv: torch.Tensor, slots: torch.Tensor, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values that `append_kv` stored into slots of a paged cache, one row per slot.

    Parameters
    ----------
    kv : (P, K, 2, b, D) fp32, fp16 or bf16, contiguous
    slots : (T,) int64
        As of `append_kv`, but a slot may occur twice.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, K, D), (T, K, D) of kv's type

    Raises
    ------
    TypeError, ValueError
        As `append_kv`.

    Examples
    --------
    >>> kv = torch.arange(8.0).reshape(1, 1, 2, 4, 1)
    >>> [rows.flatten().tolist() for rows in gather_kv(kv, torch.tensor([3, 0]))]
    [[3.0, 0.0], [7.0, 4.0]]
    """
    _check(kv, slots)
    rows: tuple[torch.Tensor, torch.Tensor] = _gather(kv, slots, str(choose_backend(backend, kv)))
    return rows


def _fetch(kv: torch.Tensor, slots: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_slots(kv, slots)
    if backend == Backend.TORCH:
        _, heads, _, size, dim = kv.shape
        first = slots // size * (2 * heads * size) + slots % size  # the key of the first head, in rows of D numbers
        keys = first[:, None] + torch.arange(0, 2 * heads * size, 2 * size, device=kv.device)
        cells = kv.view(-1, dim)
        k, v = (cells.index_select(0, rows.flatten()).view(-1, heads, dim) for rows in (keys, keys + size))
        return k, v
    k, v = _rows(kv, slots)
    _launch(Backend(backend), kv, slots, k, v, out=True)
    return k, v


def _rows(kv: torch.Tensor, slots: torch.Tensor, *_rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate keys and values of these slots."""
    shape = (len(slots), kv.shape[1], kv.shape[4])
    return kv.new_empty(shape), kv.new_empty(shape)


_gather = operator("gather_kv", _fetch, _rows)


def _check(kv: torch.Tensor, slots: torch.Tensor) -> None:
    check_tensor("kv", kv)
    if kv.ndim != 5 or kv.shape[2] != 2 or 0 in kv.shape[1:]:
        raise ValueError(f"kv must be (P, K, 2, b, D), not {tuple(kv.shape)}: reshape the cache.")
    check_operand("kv", kv, tuple(kv.shape), FLOATS, kv)
    check_indices("slots", slots, (torch.int64,), kv)


def _check_slots(kv: torch.Tensor, slots: torch.Tensor) -> None:
    if kv.device.type == "cpu":
        check_range("slots", slots, len(kv) * kv.shape[3], "pass block * b + offset of allocated blocks")


def _check_apart(kv: torch.Tensor, **read: torch.Tensor) -> None:
    """Raise ValueError if the cache overlaps an operand that is read while the cache is stored."""
    low, high = _bounds(kv)
    for name, tensor in read.items():
        begin, end = _bounds(tensor)
        if low < end and begin < high:
            raise ValueError(f"kv must not overlap {name}, which is read while kv is stored: pass a copy of {name}.")


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the first byte behind it."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _launch(
    backend: Backend, kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: bool
) -> None:
    enter_mode(backend)
    from .jit_kv_layout import move_kv

    _, heads, _, size, dim = kv.shape
    wide = 1 << (heads * dim - 1).bit_length()
    if len(slots):
        move_kv[(len(slots), -(-wide // _TILE))](
            kv,
            slots,
            k,
            v,
            kv.stride(0),
            k.stride(0),
            v.stride(0),
            HEADS=heads,
            SIZE=size,
            DIM=dim,
            OUT=out,
            BLOCK=min(wide, _TILE),
        )


@work_of(gather_kv)
def gather_kv_work(kv_heads: int, head_dim: int, rows: int, kv_itemsize: int, itemsize: int) -> tuple[int, int]:
    """Work that a call of `gather_kv` or `append_kv` declares: (flops [flop], bytes [byte]).

        flops = 0,  bytes = 2 K D (kv_itemsize + itemsize) T

    Examples
    --------
    >>> gather_kv_work(kv_heads=8, head_dim=128, rows=2, kv_itemsize=2, itemsize=2)
    (0, 16384)
    """
    return 0, 2 * kv_heads * head_dim * (kv_itemsize + itemsize) * rows
