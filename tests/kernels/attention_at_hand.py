"""Small sequences and caches for the tests of both backends; what nobody may read holds NaN."""

from typing import Any

import torch

from kernels_triton import (
    Prefix,
    decode_attention,
    decode_attention_reference,
    mla_decode,
    mla_decode_reference,
    prefill_attention,
    prefill_attention_reference,
)
from tests.kernels.experts_at_hand import LIMITS, error


def cache(lengths: list[int], K: int, b: int, D: int, dtype: torch.dtype, window: int | None = None, after: int = 0):
    """A paged cache in shuffled blocks; slots past a length, and blocks before the window, are poisoned."""
    needed = [-(-length // b) for length in lengths]
    width = max([1, *needed])
    order = torch.randperm(sum(needed) + 2).int()
    kv = torch.full((sum(needed) + 2, K, 2, b, D), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    used = 0
    for s, length in enumerate(lengths):
        low = 0 if window is None else max(0, length + after - window)
        for column in range(needed[s]):
            block = int(order[used])
            used += 1
            filled = min(b, length - column * b)
            if column * b + filled > low:
                table[s, column] = block
                kv[block, :, :, :filled] = torch.randn(K, 2, filled, D).to(dtype)
    return kv, table


def prompts(lengths: list[int], H: int, K: int, D: int, dtype: torch.dtype, Dv: int | None = None) -> dict[str, Any]:
    """Operands of `prefill_attention`: q, k and v are slices of one projection, as from a model."""
    torch.manual_seed(len(lengths))
    tokens, dims = sum(lengths), (H * D, K * D, K * (Dv or D))
    q, k, v = (torch.randn(tokens, sum(dims)) * 2).to(dtype).split(dims, dim=1)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = {"q": q.unflatten(1, (H, D)), "k": k.unflatten(1, (K, D)), "v": v.unflatten(1, (K, -1))}
    return rows | {"starts": starts}


def with_prefix(
    case: dict[str, Any], lengths: list[int], b: int, kv_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """The same prompts behind cached tokens."""
    _, K, D = case["k"].shape
    kv, table = cache(lengths, K, b, D, kv_dtype or case["q"].dtype, case.get("window"), after=1)
    return case | {"prefix": Prefix(kv, table, torch.tensor(lengths, dtype=torch.int64))}


def check_prefill(case: dict[str, Any], backend: str) -> None:
    """`prefill_attention` is as near to float64 as its documentation says."""
    found, want = prefill_attention(**case, backend=backend), prefill_attention_reference(**case)
    assert found.dtype is case["q"].dtype
    assert error(found, want) <= LIMITS[found.dtype]


def decodes(
    lengths: list[int],
    H: int,
    K: int,
    b: int,
    D: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """Operands of `decode_attention`."""
    torch.manual_seed(len(lengths))
    kv, table = cache(lengths, K, b, D, kv_dtype or dtype, window)
    q = (torch.randn(len(lengths), H + 1, D) * 2).to(dtype)[:, 1:]
    return {"q": q, "kv": kv, "table": table, "lengths": torch.tensor(lengths, dtype=torch.int64), "window": window}


def check_decode(case: dict[str, Any], backend: str) -> None:
    """`decode_attention` is as near to float64 as its documentation says."""
    found, want = decode_attention(**case, backend=backend), decode_attention_reference(**case)
    assert found.dtype is case["q"].dtype
    assert error(found, want) <= LIMITS[found.dtype]


def latents(
    lengths: list[int], H: int, b: int, D: int, value_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Operands of `mla_decode`."""
    case = decodes(lengths, H, 1, b, D, dtype, kv_dtype)
    kv = case["kv"][:, 0, 0].contiguous()
    of_sequences = {name: case[name] for name in ("q", "table", "lengths")}
    return of_sequences | {"kv": kv, "value_dim": value_dim, "scale": 0.1}


def check_mla_decode(case: dict[str, Any], backend: str) -> None:
    """`mla_decode` is as near to float64 as its documentation says."""
    found, want = mla_decode(**case, backend=backend), mla_decode_reference(**case)
    assert found.dtype is case["q"].dtype
    assert error(found, want) <= LIMITS[found.dtype]
