"""Checks of the operands and options that all decodes share."""

import math
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, check_apart, checked, contiguous, real, whole, writeable
from ..machine.features import CodePath, code_path
from ..threads.team import team_size

_WIDEST = 2**62  # tokens: longer than any sequence, and length - window does not overflow 64 bits


def check_shapes(q: NDArray[Any], kv: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any]) -> None:
    """Raise ValueError unless q (B, H, D), kv (P, K, 2, b, D), table (B, W) and lengths (B,) match."""
    rows, heads, dim = q.shape
    if kv.shape[2] != 2 or 0 in kv.shape[1:]:
        raise ValueError(f"kv must have shape (P, K, 2, b, D) with K, b and D >= 1, not {kv.shape}: reshape the cache.")
    if kv.shape[4] != dim:
        raise ValueError(f"kv must have the head dim of q, {dim}, not {kv.shape[4]}: pass q and kv of one model.")
    if heads == 0 or heads % kv.shape[1]:
        raise ValueError(
            f"q must have a multiple of the {kv.shape[1]} KV heads of kv, not {heads}: pass q and kv of one model."
        )
    for name, array in (("table", table), ("lengths", lengths)):
        if array.shape[0] != rows:
            raise ValueError(
                f"{name} must have one row per row of q, {rows}, not {array.shape[0]}: pass the same batch."
            )


def check_blocks(table: NDArray[Any], lengths: NDArray[Any], blocks: int, block: int, window: int | None) -> None:
    """Raise ValueError unless all lengths are in range and every block table entry that is read names a block."""
    short = lengths < 1
    if short.any():
        row = short.argmax()
        raise ValueError(f"lengths[{row}] must be >= 1, not {lengths[row]}: leave sequences without tokens out.")
    room = table.shape[1] * block
    over = lengths > room
    if over.any():
        row = over.argmax()
        raise ValueError(
            f"lengths[{row}] must be <= {room}, the tokens that a table row holds, not {lengths[row]}: widen the table."
        )
    start = np.arange(table.shape[1]) * block
    used = (start < lengths[:, None]) & (start + block > lengths[:, None] - (window or room))
    bad = used & ((table < 0) | (table >= blocks))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"table[{row}, {column}] must be a block of kv in [0, {blocks}), not {table[row, column]}: "
            "allocate the block before decoding."
        )


def result_of(
    out: Operand | None,
    q: NDArray[Any],
    kv: NDArray[Any],
    table: NDArray[Any],
    dim: int,
    scales: NDArray[Any] | None = None,
    sinks: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """`out`, checked, or a new array (B, H, dim); `out` may overlap no other operand, but may be q itself."""
    shape = (*q.shape[:2], dim)
    if out is None:
        return np.empty(shape, np.float32)
    result = writeable("out", checked("out", out, "B H D", np.float32))
    if result.shape != shape:
        raise ValueError(f"out must have the shape {shape} of the result, not {result.shape}: leave it out.")
    is_q = result.ctypes.data == q.ctypes.data and dim == q.shape[2]  # each row of q is read before its out is stored
    check_apart("out", result, q=None if is_q else q, kv=kv, table=table, scales=scales, sinks=sinks)
    return result


class Options(TypedDict):
    """Options of `decode` beside its operands."""

    scale: float
    window: int | None
    cap: float | None
    sinks: NDArray[np.float32] | None
    threads: int
    path: CodePath


def options_of(
    heads: int,
    dim: int,
    scale: float | None,
    window: int | None,
    sinks: Operand | None,
    softcap: float | None,
    threads: int | None,
    path: CodePath | None,
) -> Options:
    """Check the options of a decode of some query heads and fill in defaults.

    Raises
    ------
    TypeError, ValueError
        If one is of another type or out of range.
    """
    factor = 1 / math.sqrt(dim) if scale is None else real("scale", scale)
    if not math.isfinite(factor):
        raise ValueError(f"scale must be finite, not {scale}: leave it out for 1 / sqrt(D).")
    if window is not None and whole("window", window) < 1:
        raise ValueError(f"window must be >= 1 token, not {window}: leave it out to attend to every token.")
    if softcap is not None and not 0 < real("softcap", softcap) < math.inf:
        raise ValueError(f"softcap must be positive, not {softcap}: leave it out for scores as they are.")
    taken = None if sinks is None else contiguous("sinks", checked("sinks", sinks, "H", np.float32))
    if taken is not None and taken.size != heads:
        raise ValueError(f"sinks must have one score per head of q, {heads}, not {taken.size}: pass (H,).")
    return Options(
        scale=factor,
        window=None if window is None else min(window, _WIDEST),
        cap=softcap,
        sinks=taken,
        threads=team_size(threads),
        path=code_path(path),
    )
