"""Options, tile sizes and checks that attention of prompts and of decodes share, and one row of it in float64."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..backend.backend import Backend
from ..backend.operands import FLOATS, check_operand
from ..backend.operators import check_tensor
from ..declarations import public

_LOG2E = 1 / math.log(2)
_LEAST_DIM = 16  # the smallest operand of a matrix instruction


@public
class Prefix(NamedTuple):
    """Tokens of sequences that are cached before their first query.

    kv (P, K, 2, b, D) fp32, fp16 or bf16: the paged cache; table (B, W) int32: blocks of each sequence in order;
    lengths (B,) int32 or int64: cached tokens of each, 0 where there are none.
    """

    kv: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class Options:
    """Options that change the scores.

    Attributes
    ----------
    scale : float
    window : int or None
        Number of last tokens that a query sees, including its own.
    sinks : Tensor (H,) fp32, or None
    softcap : float or None
    """

    scale: float
    window: int | None
    sinks: torch.Tensor | None
    softcap: float | None

    @classmethod
    def checked(
        cls,
        q: torch.Tensor,
        scale: float | None,
        window: int | None,
        sinks: torch.Tensor | None,
        softcap: float | None,
    ) -> Options:
        """Check the options for queries (.., H, D) and fill in the default scale.

        Raises
        ------
        ValueError
            If one is out of range, or there is not one sink per head.
        """
        heads, dim = q.shape[1:]
        factor = 1 / math.sqrt(dim) if scale is None else float(scale)
        if not math.isfinite(factor):
            raise ValueError(f"scale must be finite, not {scale}: leave it out for 1 / sqrt(D).")
        if window is not None and window < 1:
            raise ValueError(f"window must be >= 1 token, not {window}: leave it out to attend to every token.")
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"softcap must be positive, not {softcap}: leave it out for scores as they are.")
        if sinks is not None:
            check_operand("sinks", sinks, (heads,), (torch.float32,), q)
        whole = None if window is None else int(window)
        return cls(factor, whole, sinks, None if softcap is None else float(softcap))

    @property
    def operands(self) -> tuple[float, int | None, torch.Tensor | None, float | None]:
        """The fields in order, as operands of an operator of torch."""
        return self.scale, self.window, self.sinks, self.softcap

    @property
    def factors(self) -> tuple[float, float]:
        """Factors `scale` and `cap` of the kernels, whose scores are to the base 2; a soft-cap is computed by tanh."""
        if self.softcap is None:
            return self.scale * _LOG2E, 0.0
        return 2 * self.scale / self.softcap * _LOG2E, self.softcap * _LOG2E

    @property
    def constants(self) -> dict[str, Any]:
        """Constants that the kernels are compiled for."""
        return {"WINDOW": self.window or 0, "CAPPED": self.softcap is not None}


def check_heads(name: str, rows: torch.Tensor) -> None:
    """Raise unless `rows` is (T, heads, dim) with contiguous heads.

    Raises
    ------
    TypeError
        If the dtype is none of fp32, fp16 and bf16.
    ValueError
        If shape or memory layout is another.
    """
    check_tensor(name, rows)
    if rows.dtype not in FLOATS:
        raise TypeError(f"{name} must be fp32, fp16 or bf16, not {rows.dtype}: convert it before the call.")
    if rows.ndim != 3 or 0 in rows.shape[1:]:
        raise ValueError(f"{name} must be (T, heads, dim), not {tuple(rows.shape)}: reshape it.")
    if rows.stride(2) != 1 and rows.shape[2] > 1:
        raise ValueError(f"{name} must have the numbers of a head together: call .contiguous() first.")


def check_dim(name: str, rows: torch.Tensor, backend: Backend) -> None:
    """Raise ValueError if heads (T, heads, dim) are smaller than the kernels of a backend take."""
    if backend is not Backend.TORCH and rows.shape[2] < _LEAST_DIM:
        raise ValueError(
            f"{name} must be (T, heads, dim) with a dim >= {_LEAST_DIM} for backend {str(backend)!r}, not "
            f"{tuple(rows.shape)}: pass backend='torch'."
        )


def check_cache(kv: torch.Tensor, table: torch.Tensor, q: torch.Tensor, rows: int) -> None:
    """Raise unless `kv` (P, K, 2, b, D) matches queries (.., H, D), and `table` has one row per sequence.

    Raises
    ------
    TypeError
        If a dtype is another.
    ValueError
        If shape, memory layout or device is another.
    """
    check_tensor("kv", kv)
    heads, dim = q.shape[1:]
    if kv.ndim != 5 or kv.shape[2] != 2 or 0 in kv.shape[1:] or kv.shape[4] != dim or heads % kv.shape[1]:
        raise ValueError(
            f"kv must be (P, K, 2, b, {dim}) with {heads} a multiple of K, not {tuple(kv.shape)}: pass the cache of "
            "the same model."
        )
    check_operand("kv", kv, tuple(kv.shape), FLOATS, q)
    check_table(table, q, rows)


def check_table(table: torch.Tensor, q: torch.Tensor, rows: int) -> None:
    """Raise unless `table` is (rows, W) int32 on the device of `q`.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If shape, memory layout or device is another.
    """
    check_tensor("table", table)
    if table.ndim != 2 or table.shape[0] != rows:
        raise ValueError(f"table must be ({rows}, W), one row per sequence, not {tuple(table.shape)}: pass one batch.")
    check_operand("table", table, tuple(table.shape), (torch.int32,), q)


def check_blocks(table: torch.Tensor, lengths: torch.Tensor, kv: torch.Tensor, window: int | None, ahead: int) -> None:
    """Raise unless every block that is read exists; the first query is `ahead` tokens behind the last cached one.

    Raises
    ------
    ValueError
        If one does not, naming the first, or if the table has no room for a length.
    """
    size = kv.shape[3]
    room = table.shape[1] * size
    for s, length in enumerate(lengths.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"lengths[{s}] must be in [0, {room}], not {length}: widen the table.")
        low = 0 if window is None else max(0, length + ahead - window)
        if low >= length:
            continue
        for column in range(low // size, -(-length // size)):
            if not 0 <= table[s, column] < len(kv):
                raise ValueError(
                    f"table[{s}, {column}] must be a block of kv in [0, {len(kv)}), not {int(table[s, column])}: "
                    "allocate the block first."
                )


@public
@dataclass(frozen=True)
class AttentionTiles:
    """Sizes of a launch: queries and keys per tile, warps, stages, and cached tokens per program of a decode."""

    m: int
    n: int
    warps: int
    stages: int
    chunk: int = 0

    @property
    def sizes(self) -> list[int]:
        """The fields in order, as an operand of an operator of torch."""
        return list(astuple(self))


@functools.cache
def attention_table() -> list[dict[str, Any]]:
    """The rows of `attention_tiles.json`, in order."""
    path = Path(__file__).with_name("attention_tiles.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def attention_tiles(kind: str, arch: int, dtype: torch.dtype, dim: int) -> AttentionTiles:
    """Look up the sizes of "prefill" or "decode" for an architecture (0: the interpreter), dtype and head dim.

    Raises
    ------
    LookupError
        If the table has nothing for such heads.

    Examples
    --------
    >>> attention_tiles("decode", 0, torch.bfloat16, 64).m
    16
    """
    bits = "fp32" if dtype is torch.float32 else "16-bit"
    for row in sorted(attention_table(), key=lambda row: -int(row["arch"])):
        if kind in row and row["arch"] <= arch and row["dtype"] in (bits, "any") and dim <= row["most_dim"]:
            return AttentionTiles(*row[kind])
    raise LookupError(f"attention_tiles.json has no row for {dtype} heads of {dim} on sm_{arch}: add one.")


def head_blocks(dim: int, value_dim: int) -> dict[str, int]:
    """Split a head into its largest power of two and the rest, since tiles are powers of two: 192 = 128 + 64.

    Examples
    --------
    >>> head_blocks(192, 128)
    {'D_MAIN': 128, 'REST': 64, 'BLOCK_REST': 64, 'DV': 128, 'BLOCK_DV': 128}
    """
    main = 1 << (dim.bit_length() - 1)
    rest = dim - main
    return {"D_MAIN": main, "REST": rest, "BLOCK_REST": power(rest), "DV": value_dim, "BLOCK_DV": power(value_dim)}


def power(size: int) -> int:
    """The next power of two, at least 16 as matrix instructions need; 0 for 0."""
    return max(16, 1 << (size - 1).bit_length()) if size else 0


def reference_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """Attend with one query (H, D) to all of k (S, K, D) and v (S, K, Dv) in float64, head by head: -> (H, Dv)."""
    out = torch.zeros(len(q), v.shape[2], dtype=torch.float64)
    for head in range(len(q) if len(k) else 0):
        shared = head // (len(q) // k.shape[1])
        scores = k[:, shared].double() @ q[head].double() * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        sink = [] if options.sinks is None else [options.sinks[head : head + 1].double()]
        weights = torch.cat([scores, *sink]).softmax(dim=0)[: len(k)]
        out[head] = weights @ v[:, shared].double()
    return out
