"""Operations on tensors: by Numba for CPU tensors where it has the operation, else by torch or Triton.

Numba computes where no backend is named, no operand requires a gradient, and the tensors are in CPU memory and of a
type that its kernel takes; `kernels_triton` computes all else. Each call of Numba is an operator of torch, for
torch.compile, FakeTensor and vmap. On one AVX-512 core torch took 5 to 23 times as long for decodes of 512 to 1024
tokens; for rows of 4096 numbers 1.6 to 3 times at 64 rows of bf16 and 1 to 3 of fp32 (GeGLU the least), at 2048 rows 7
to 18 and 2 to 8. torch computes the operations for which it has kernels: LayerNorm, embedding, attention of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import kernels_cpu
import kernels_triton
from kernels_cpu import CodePath
from kernels_cpu.experts.in_place import COLUMNS
from kernels_cpu.experts.weights import ROWS
from kernels_cpu.machine.features import has
from kernels_triton import AttentionTiles, Routing
from kernels_triton.attention.mla_decode import check_latents
from kernels_triton.backend.operators import check_tensor, operator
from kernels_triton.moe.experts import LEFT_OUT, Activation, Weights, check_chosen
from kernels_triton.moe.fused_moe import check_moe
from workbench.kernels.packed_copies import packed_copy

_TORCH = "torch"
_ROWS = torch.float32, torch.bfloat16
_HEADS = *_ROWS, torch.float16
_VECTORS = kernels_cpu.features().path is not CodePath.PORTABLE
_MOST = 6 if has("amx-bf16") else 8 if has("avx512bf16") else float("inf")
"""Most pairs per expert with which Numba is faster than torch with weights in place, on a CPU that multiplies bf16; on
others it always is.

Activations in fp32, as they are for weights in place, against torch on two Zen 4 cores: 2.5 times as fast with 1 token
per expert, 1.6 to 1.9 with 8, 1.2 to 1.4 with 16, 0.9 with 32. On an Ice Lake Xeon, which has no such products,
`fused_moe` is 1.2 to 3 times as fast as torch with 1 to 64 per expert and twice as fast with 1024. On a Xeon with AMX,
1 and 2 threads: with 4, 6 and 8 per expert 1.0, 0.9 and 0.8 times as fast as torch where 8 experts have 2048 x 7168,
and 1.2 to 1.4, 1.0 to 1.3 and 0.9 to 1.1 where 128 have 2048 x 768.
"""
_COPY_FOR_MANY = not has("amx-bf16")
"""True if Numba is faster with a packed copy than torch with any number of pairs per expert; with AMX it is not.

Packed weights, with activations in bf16, on two Zen 4 cores against the faster of torch's two ways, 64 to 4096 tokens:
1.7, 1.4, 1.1 and 1.1 times as fast where 8 experts have 2048 x 7168, and 3.1, 1.9, 1.4 and 1.0 where 128 have
2048 x 768.
"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, backend: str | None = None) -> torch.Tensor:
    """Compute `rms_norm` of tensors."""
    if not _in_numba(backend, _ROWS, x, weight=weight):
        return kernels_triton.rms_norm(x, weight, eps=eps, backend=backend)
    out: torch.Tensor = _norm(x, weight, float(eps))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `add_rms_norm` of tensors."""
    if not _in_numba(backend, _ROWS, x, residual=residual, weight=weight):
        return kernels_triton.add_rms_norm(x, residual, weight, eps=eps, backend=backend)
    both: tuple[torch.Tensor, torch.Tensor] = _added_norm(x, residual, weight, float(eps))
    return both


def gated(x: torch.Tensor, *, activation: str = "swiglu", backend: str | None = None) -> torch.Tensor:
    """Compute `gated` of a tensor."""
    if not _in_numba(backend, _ROWS, x):
        return kernels_triton.gated(x, activation=activation, backend=backend)
    out: torch.Tensor = _gated(x, str(activation))
    return out


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute `rope` of tensors."""
    normed = {} if weight is None else {"weight": weight}
    if not _in_numba(backend, _ROWS, x, positions=positions, table=table, **normed):
        return kernels_triton.rope(
            x, positions, table, interleaved=interleaved, weight=weight, eps=eps, backend=backend
        )
    out: torch.Tensor = _rope(x, positions, table, bool(interleaved), weight, float(eps))
    return out


def route(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    renormalise: bool = False,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
    backend: str | None = None,
) -> Routing:
    """Compute `route` of tensors."""
    plain = scoring == "softmax" and bias is None and groups == kept_groups == 1
    if plain and _in_numba(backend, _ROWS, logits):
        return Routing(*_route(logits, k, bool(renormalise), float(scale)))
    return kernels_triton.route(
        logits,
        k,
        scoring=scoring,
        renormalise=renormalise,
        bias=bias,
        groups=groups,
        kept_groups=kept_groups,
        scale=scale,
        backend=backend,
    )


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    tiles: AttentionTiles | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute `decode_attention` of tensors."""
    optional = {} if sinks is None else {"sinks": sinks}
    numba = _in_numba(backend, _HEADS, q, kv=kv, table=table, lengths=lengths, **optional)
    if not numba or kv.dtype not in _HEADS:
        return kernels_triton.decode_attention(
            q,
            kv,
            table,
            lengths,
            scale=scale,
            window=window,
            sinks=sinks,
            softcap=softcap,
            tiles=tiles,
            backend=backend,
        )
    out: torch.Tensor = _decode(q, kv, table, lengths, scale, window, sinks, softcap)
    return out


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
    """Compute `mla_decode` of tensors."""
    if not _in_numba(backend, _HEADS, q, kv=kv, table=table, lengths=lengths) or kv.dtype not in _HEADS:
        return kernels_triton.mla_decode(
            q, kv, table, lengths, value_dim=value_dim, scale=scale, tiles=tiles, backend=backend
        )
    check_latents(value_dim, scale, kv.shape[-1])
    out: torch.Tensor = _mla_decode(q, kv, table, lengths, int(value_dim), float(scale))
    return out


def fused_moe(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: str = "swiglu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute `fused_moe` of tensors."""
    biased = gate_up_bias is not None or down_bias is not None
    if backend is None and activation == Activation.SWIGLU and not biased and _takes_experts(x, gate_up, down):
        check_moe(x, gate_up, down, ids, weights, None, None, pages)
        if _are_few(ids, gate_up, pages) or (pages is None and _COPY_FOR_MANY):
            out: torch.Tensor = _experts(x, gate_up, down, ids, weights, pages)
            return out
    return kernels_triton.fused_moe(
        x,
        gate_up,
        down,
        ids,
        weights,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        pages=pages,
        backend=backend,
    )


def _are_few(ids: torch.Tensor, gate_up: Weights, pages: torch.Tensor | None) -> bool:
    """True if Numba is faster than torch with weights in place."""
    return ids.numel() <= _MOST * (len(gate_up) if pages is None else len(pages))


def append_kv(
    kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str | None = None
) -> None:
    """Compute `append_kv` of tensors; Numba stores fp32 rows on the CPU."""
    numba = _in_numba(backend, (*_HEADS, torch.int8), kv, slots=slots, k=k, v=v)
    if numba and (kv.dtype is torch.int8 or k.dtype is v.dtype is torch.float32):
        _append(kv, slots, k, v)
    else:
        kernels_triton.append_kv(kv, slots, k, v, backend=backend)


def _in_numba(backend: str | None, dtypes: tuple[torch.dtype, ...], x: torch.Tensor, **others: torch.Tensor) -> bool:
    """True if Numba's kernel takes x; raises TypeError if so and another operand is no tensor."""
    if backend is not None or not isinstance(x, torch.Tensor):
        return False
    if x.device.type != "cpu" or x.dtype not in dtypes:
        return False
    for name, other in others.items():
        check_tensor(name, other)
    return True


def _takes_experts(x: torch.Tensor, gate_up: Weights, down: Weights) -> bool:
    """True if x and the weights have the type and layout that Numba's kernel takes."""
    if not _VECTORS or not isinstance(x, torch.Tensor):
        return False
    if x.device.type != "cpu" or x.dtype is not torch.bfloat16:
        return False
    return all(isinstance(matrices, torch.Tensor) and _fits(matrices) for matrices in (gate_up, down))


def _fits(matrices: torch.Tensor) -> bool:
    full_blocks = matrices.ndim == 3 and matrices.shape[1] % ROWS == 0 and matrices.shape[2] % COLUMNS == 0
    return full_blocks and matrices.dtype is torch.bfloat16 and matrices.is_contiguous()


def _compute_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return kernels_cpu.rms_norm(x, weight, eps=eps)


def _compute_added_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels_cpu.add_rms_norm(x, residual, weight, eps=eps)


def _compute_gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    return kernels_cpu.gated(x, activation=activation)


def _compute_rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    return kernels_cpu.rope(x, positions, table, interleaved=interleaved, weight=weight, eps=eps)


def _compute_route(logits: torch.Tensor, k: int, renormalise: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels_cpu.route(logits, k, renormalise=renormalise, scale=scale)


def _compute_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend by Numba's kernel, whose cache has the same blocks."""
    attend = partial(kernels_cpu.decode_attention, scale=scale, window=window, sinks=sinks, softcap=softcap)
    return _attended(attend, q, kv, table, lengths, q.shape[-1])


def _compute_mla(
    q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, value_dim: int, scale: float
) -> torch.Tensor:
    attend = partial(kernels_cpu.mla_decode, value_dim=value_dim, scale=scale)
    return _attended(attend, q, kv, table, lengths, value_dim)


def _attended(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Attend by a wrapper of Numba's package, which takes no sequence of no token; these give zeros."""
    queries = q.float().contiguous()
    filled = lengths != 0
    fits = lengths.shape == table.shape[:1] == q.shape[:1]
    if not fits or bool(filled.all()):  # Numba's wrapper raises for shapes that disagree
        return attend(queries, kv, table, lengths).to(q.dtype)
    out = torch.zeros((*q.shape[:2], width), dtype=q.dtype)
    out[filled] = attend(queries[filled], kv, table[filled], lengths[filled]).to(q.dtype)
    return out


def _compute_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor | None,
) -> torch.Tensor:
    """Compute experts by Numba's kernel; each token's sum is in the given order."""
    in_words = gate_up.data_ptr() % 4 == down.data_ptr() % 4 == 0  # Numba's kernel reads words of two numbers
    left_out = pages is not None and bool((pages == LEFT_OUT).any())
    experts = packed_copy(gate_up, down, ids) if in_words and pages is None else None
    if not in_words or left_out or (experts is None and not _are_few(ids, gate_up, pages)):
        return kernels_triton.fused_moe(x, gate_up, down, ids, weights, pages=pages, backend=_TORCH)
    chosen = ids  # checked by Numba's wrapper
    if pages is not None:
        check_chosen(set(ids.flatten().tolist()), pages, len(gate_up))
        chosen = pages[ids]
    if experts is None:
        experts = kernels_cpu.experts_in_place(gate_up, down)
    return kernels_cpu.fused_moe(x, experts, chosen, weights, threads=torch.get_num_threads())


def _compute_append(kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    kernels_cpu.append_kv(kv, slots, k, v)


def _registered(
    name: str,
    compute: Callable[..., Any],
    formula: Callable[..., Any],
    shaped: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register the operator of `compute`: gradients, and by default shapes, are those of the formula."""
    return operator(f"{name}_in_numba", compute, shaped or formula, formula=formula)


_norm = _registered(
    "rms_norm", _compute_norm, lambda x, weight, eps: kernels_triton.rms_norm(x, weight, eps=eps, backend=_TORCH)
)
_added_norm = _registered(
    "add_rms_norm",
    _compute_added_norm,
    lambda x, residual, weight, eps: kernels_triton.add_rms_norm(x, residual, weight, eps=eps, backend=_TORCH),
)
_gated = _registered(
    "gated", _compute_gated, lambda x, activation: kernels_triton.gated(x, activation=activation, backend=_TORCH)
)
_rope = _registered(
    "rope",
    _compute_rope,
    lambda x, positions, table, interleaved, weight, eps: kernels_triton.rope(
        x, positions, table, interleaved=interleaved, weight=weight, eps=eps, backend=_TORCH
    ),
)
_route = _registered(
    "route",
    _compute_route,
    lambda logits, k, renormalise, scale: kernels_triton.route(
        logits, k, renormalise=renormalise, scale=scale, backend=_TORCH
    ),
)
_decode = _registered(
    "decode_attention",
    _compute_decode,
    lambda q, kv, table, lengths, scale, window, sinks, softcap: kernels_triton.decode_attention(
        q, kv, table, lengths, scale=scale, window=window, sinks=sinks, softcap=softcap, backend=_TORCH
    ),
    lambda q, *_rest: q.new_empty(q.shape),
)
_mla_decode = _registered(
    "mla_decode",
    _compute_mla,
    lambda q, kv, table, lengths, value_dim, scale: kernels_triton.mla_decode(
        q, kv, table, lengths, value_dim=value_dim, scale=scale, backend=_TORCH
    ),
    lambda q, _kv, _table, _lengths, value_dim, _scale: q.new_empty(*q.shape[:2], value_dim),
)
_experts = _registered(
    "fused_moe",
    _compute_experts,
    lambda x, gate_up, down, ids, weights, pages: kernels_triton.fused_moe(
        x, gate_up, down, ids, weights, pages=pages, backend=_TORCH
    ),
)
_append = operator("append_kv_in_numba", _compute_append, lambda *_: None, written=("kv",))
