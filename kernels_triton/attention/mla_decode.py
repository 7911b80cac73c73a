"""Latent attention of one new token per sequence over a paged cache of latents, as the CPU kernel has it."""

from __future__ import annotations

import math
import numbers

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import FLOATS, INDEX, check_operand
from ..backend.operators import check_tensor, operator
from ..declarations import operation, reference_of, work_of
from ..moe.tiles import arch_of
from . import torch_path
from .decode import Cached, decode_attention_reference, launch
from .options import AttentionTiles, Options, attention_tiles, check_blocks, check_dim, check_heads, check_table


@operation
def mla_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    value_dim: int = 512,
    scale: float,
    tiles: AttentionTiles | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Multi-head latent attention of one new token per sequence, with absorbed projections (DeepSeek).

        out[s, h] = softmax(scale * q[s, h] . C[s]) C[s][:, :value_dim]

    All heads share one cached row per token: the compressed latent, which is also the value, then the rotated key.
    The kernels are those of `decode_attention`; where `value_dim` is the largest power of two in D, a program loads
    each row once for all its heads.

    Parameters
    ----------
    q : (B, H, D) fp32, fp16 or bf16; D >= 16 for Triton
        Absorbed queries: `value_dim` latent dims, then the rotated ones; D = 576 for DeepSeek-V2 and V3. Rows and heads
        may be strided.
    kv : (P, b, D) fp32, fp16 or bf16, contiguous
        The cache: b rows per block. Slots past a length are never read.
    table : (B, W) int32, contiguous
        Blocks of each sequence in order; entries past ceil(length / b) are never read.
    lengths : (B,) int32 or int64
        Tokens in each sequence [tokens], in 0 .. W b; the output is zero where there are none. On a GPU table and
        lengths are not checked.
    value_dim : int
        Number of leading dims of a row that are its value.
    scale : float
        Factor of the scores; it depends on the dims before absorption.
    tiles : AttentionTiles, optional
        Sizes of the Triton launch, by default from the table.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (B, H, value_dim) of q's type
        Relative Frobenius error against float64: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, an option or (on the CPU) a length or block is out of range, or
        the backend cannot compute here.

    Examples
    --------
    >>> kv, table = torch.full((1, 4, 24), 3.0), torch.zeros(1, 1, dtype=torch.int32)
    >>> mla_decode(torch.ones(1, 2, 24), kv, table, torch.tensor([1]), value_dim=16, scale=0.2)[0, 1, 0].item()
    3.0
    """
    check_heads("q", q)
    check_tensor("kv", kv)
    dim = q.shape[2]
    if kv.ndim != 3 or 0 in kv.shape[1:] or kv.shape[2] != dim:
        raise ValueError(f"kv must be (P, b, {dim}), not {tuple(kv.shape)}: pass the cache of the same model.")
    check_operand("kv", kv, tuple(kv.shape), FLOATS, q)
    check_table(table, q, len(q))
    check_operand("lengths", lengths, (len(q),), INDEX, q)
    check_latents(value_dim, scale, dim)
    chosen = choose_backend(backend, q, kv)
    check_dim("q", q, chosen)
    sizes = None if tiles is None else tiles.sizes
    out: torch.Tensor = _decode(q, kv, table, lengths, int(value_dim), float(scale), sizes, str(chosen))
    return out


def check_latents(value_dim: object, scale: object, dim: int) -> None:
    """Raise unless the options of `mla_decode` fit rows of so many dims.

    Raises
    ------
    TypeError
        If they are no numbers.
    ValueError
        If one is out of range.
    """
    if isinstance(value_dim, bool) or not isinstance(value_dim, numbers.Integral):
        raise TypeError(f"value_dim must be a whole number, not {value_dim!r}: pass an int.")
    if not 1 <= int(value_dim) <= dim:
        raise ValueError(
            f"value_dim must be in 1 .. {dim}, the dims of a row, not {value_dim}: pass the latent's width."
        )
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number, not {scale!r}: pass a float.")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale}: pass the factor of the scores before absorption.")


def _compute(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    value_dim: int,
    scale: float,
    tiles: list[int] | None,
    backend: str,
) -> torch.Tensor:
    options = Options(scale, None, None, None)
    both = _as_keys_and_values(kv)
    if q.device.type == "cpu":
        check_blocks(table, lengths, both, window=None, ahead=0)
    if backend == Backend.TORCH:
        return torch_path.decode(q, both, table, lengths, options)[:, :, :value_dim].contiguous()
    enter_mode(Backend(backend))
    chosen = AttentionTiles(*tiles) if tiles else attention_tiles("decode", arch_of(q.device), q.dtype, q.shape[2])
    cached = Cached(kv, kv.shape[1], heads=1, head_stride=0, value_offset=0, value_dim=value_dim)
    return launch(q, cached, table, lengths, options, chosen)


_decode = operator(
    "mla_decode", _compute, lambda q, _kv, _table, _lengths, value_dim, *_rest: q.new_empty(*q.shape[:2], value_dim)
)


def _as_keys_and_values(kv: torch.Tensor) -> torch.Tensor:
    """Rows (P, b, D) as the keys and the values of one head, (P, 1, 2, b, D), in the same memory."""
    return kv[:, None, None].expand(-1, 1, 2, -1, -1)


@work_of(mla_decode)
def mla_decode_work(
    heads: int, dim: int, value_dim: int, context: int, rows: int, kv_itemsize: int, itemsize: int
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 2 H (D + value_dim) context,  bytes = D kv_itemsize context + itemsize H (D + value_dim) rows

    Parameters
    ----------
    heads, dim, value_dim : int
        H, D and the dims of a value.
    context : int
        Sum of the lengths [tokens].
    rows : int
        B, the number of sequences; q is read once and out is written once.
    kv_itemsize, itemsize : int
        Size of a number of the cache, and of q [byte].

    Examples
    --------
    >>> mla_decode_work(128, 576, 512, context=1000, rows=2, kv_itemsize=2, itemsize=2)
    (278528000, 1709056)
    """
    width = dim + value_dim
    return 2 * heads * width * context, dim * kv_itemsize * context + itemsize * heads * width * rows


@reference_of(mla_decode)
def mla_decode_reference(
    q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *, value_dim: int = 512, scale: float
) -> torch.Tensor:
    """Compute `mla_decode` in float64, token by token, the oracle of its tests: -> (B, H, value_dim) float64.

    Examples
    --------
    >>> kv, one = torch.ones(1, 1, 24), torch.tensor([1])
    >>> q, table = torch.ones(1, 1, 24), torch.zeros(1, 1).int()
    >>> mla_decode_reference(q, kv, table, one, value_dim=16, scale=1.0)[0, 0, 0].item()
    1.0
    """
    return decode_attention_reference(q, _as_keys_and_values(kv), table, lengths, scale=scale)[:, :, :value_dim]
