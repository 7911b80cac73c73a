"""Paged decode of multi-head latent attention, with the projections absorbed."""

import numpy as np
from numpy.typing import NDArray

from ..arguments import (
    CACHED,
    STORAGES,
    Operand,
    SameKind,
    checked,
    contiguous,
    frozen,
    host_array,
    real,
    same_kind,
    whole,
)
from ..declarations import operation, reference_of
from ..machine.features import CodePath
from .decode import decode_attention_reference
from .operands import check_blocks, check_shapes, options_of, result_of
from .tasks import Cache, decode


@operation
def mla_decode(
    q: SameKind,
    kv: Operand,
    table: Operand,
    lengths: Operand,
    *,
    value_dim: int = 512,
    scale: float,
    threads: int | None = None,
    path: CodePath | None = None,
    out: SameKind | None = None,
) -> SameKind:
    """Multi-head latent attention of one new token per sequence, with absorbed projections (DeepSeek).

        out[s, h] = softmax(scale * q[s, h] . C[s]) C[s][:, :value_dim]

    All heads share one cached row per token: the compressed latent, which is also the value, then the rotated key.

    Parameters
    ----------
    q : (B, H, D) fp32, C-contiguous
        Absorbed queries: `value_dim` latent dims, then the rotated ones; D = 576 for DeepSeek-V2 and V3.
    kv : (P, b, D) fp32, fp16, torch.bfloat16, or uint16 that holds bfloat16 bits, C-contiguous
        The cache: b rows per block. Slots past a length are never read.
    table : (B, W) int32, C-contiguous
        Blocks of each sequence in order; entries past ceil(length / b) are never read.
    lengths : (B,) int32 or int64
        Tokens in each sequence [tokens], in 1 .. W * b.
    value_dim : int
        Number of leading dims of a row that are its value.
    scale : float
        Factor of the scores. There is no default, since it depends on the dims before absorption: 1 / sqrt(192) for
        DeepSeek-V2 and V3 without YaRN's factor.
    threads, path
        As of `decode_attention`.
    out : (B, H, value_dim) fp32, C-contiguous, optional
        Array that receives the result.

    Returns
    -------
    (B, H, value_dim) fp32
        `out` if given, else new: a tensor if `q` is one, else an array. Max abs error 2e-6 against float64 for operands
        of unit variance.

    Raises
    ------
    TypeError, ValueError
        As `decode_attention`.

    Examples
    --------
    >>> kv = np.zeros((1, 4, 3), np.float32)
    >>> kv[0, 0] = [3, 5, 7]
    >>> q, table = np.ones((1, 1, 3), np.float32), np.zeros((1, 1), np.int32)
    >>> mla_decode(q, kv, table, np.ones(1, np.int64), value_dim=2, scale=1.0)
    array([[[3., 5.]]], dtype=float32)
    """
    queries = contiguous("q", checked("q", q, "B H D", np.float32))
    cache = contiguous("kv", checked("kv", kv, "P b D", *CACHED))
    blocks = contiguous("table", checked("table", table, "B W", np.int32))
    spans = checked("lengths", lengths, "B", np.int32, np.int64).astype(np.int64)
    if not 1 <= whole("value_dim", value_dim) <= cache.shape[2]:
        raise ValueError(
            f"value_dim must be in 1 .. {cache.shape[2]}, the dims of a row, not {value_dim}: pass the latent's width."
        )
    both = np.broadcast_to(cache[:, None, None], (len(cache), 1, 2, *cache.shape[1:]))  # the row as K and as V
    check_shapes(queries, both, blocks, spans)
    check_blocks(blocks, spans, len(cache), cache.shape[1], window=None)
    result = result_of(out, queries, cache, blocks, value_dim)
    storage = STORAGES[cache.dtype.type]
    row = cache.shape[2] * storage.itemsize
    where = Cache(cache.ctypes.data, storage, cache.shape[1], cache.strides[0], row, 0, 0, kv_heads=1)
    options = options_of(queries.shape[1], queries.shape[2], real("scale", scale), None, None, None, threads, path)
    decode(frozen(queries), where, frozen(blocks), spans, result, **options)
    return same_kind(q, result) if out is None else out


@reference_of(mla_decode)
def mla_decode_reference(
    q: Operand, kv: Operand, table: Operand, lengths: Operand, *, value_dim: int = 512, scale: float
) -> NDArray[np.float64]:
    """Compute `mla_decode` in float64 with numpy, the oracle of its tests: same operands, -> (B, H, value_dim) float64.

    Examples
    --------
    >>> q, kv = np.ones((1, 1, 3)), np.arange(3, dtype=np.float32).reshape(1, 1, 3)
    >>> mla_decode_reference(q, kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64), value_dim=2, scale=1.0)
    array([[[0., 1.]]])
    """
    both = host_array("kv", kv)[:, None, None].repeat(2, axis=2)
    return decode_attention_reference(q, both, table, lengths, scale=scale)[..., :value_dim]
