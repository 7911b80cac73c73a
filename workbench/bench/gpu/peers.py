"""Baselines of the gpu lane's kernels: torch's own, and liger-kernel's where it can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Peers = dict[str, Callable[[], object]]


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prompts: int) -> Peers:
    """Causal SDPA over prompts of one length."""
    queries, keys, values = (rows.unflatten(0, (prompts, -1)).transpose(1, 2) for rows in (q, k, v))
    attend = functional.scaled_dot_product_attention
    return {"SDPA": lambda: attend(queries, keys, values, is_causal=True, enable_gqa=True)}


def decode(q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, length: int) -> Peers:
    """SDPA over a copy of the cache in the layout that it needs; the copy is not timed."""
    if not q.is_cuda:
        return {}
    rows = kv[table.long()].permute(3, 0, 2, 1, 4, 5).flatten(3, 4)[:, :, :, :length].contiguous()
    one = q[:, :, None]
    attend = functional.scaled_dot_product_attention
    return {"SDPA": lambda: attend(one, rows[0], rows[1], enable_gqa=True)}


def latents(
    q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, length: int, *, value_dim: int, scale: float
) -> Peers:
    """SDPA over a copy of the latents, one row after the other; the copy is not timed."""
    if not q.is_cuda:
        return {}
    rows = kv[table.long()].flatten(1, 2)[:, None, :length].contiguous()
    values = rows[..., :value_dim]
    one = q[:, :, None]
    attend = functional.scaled_dot_product_attention
    return {"SDPA": lambda: attend(one, rows, values, scale=scale, enable_gqa=True)}


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Peers:
    """A loop over the experts, grouped products of sorted rows, and liger-kernel's fused layer."""
    if not x.is_cuda:
        return {}
    order = ids.flatten().long().argsort(stable=True)
    rows = order // ids.shape[1]
    counts = torch.bincount(ids.flatten().long(), minlength=len(gate_up))
    ends = counts.cumsum(0).int()
    scales = weights.flatten()[order, None]
    spans = counts.tolist()
    peers: Peers = {"torch loop": lambda: _loop(x, gate_up, down, rows, spans, scales)}
    if hasattr(torch, "_grouped_mm"):
        peers["grouped_mm"] = lambda: _grouped(x, gate_up, down, rows, ends, scales)
    liger = _liger("fused_moe", "LigerFusedMoEFunction")
    if liger is not None:
        peers["liger"] = lambda: liger.apply(x, gate_up, down, ids, weights)
    return peers


def _loop(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor,
    spans: list[int],
    scales: torch.Tensor,
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    low = 0
    for expert, count in enumerate(spans):
        if count:
            mine = rows[low : low + count]
            gate, up = functional.linear(x[mine], gate_up[expert]).chunk(2, dim=1)
            answer = functional.linear(functional.silu(gate) * up, down[expert])
            out.index_add_(0, mine, answer * scales[low : low + count])
        low += count
    return out.to(x.dtype)


def _grouped(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    multiply: Any = torch._grouped_mm
    gate, up = multiply(x[rows], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
    answer = multiply(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = torch.zeros_like(x, dtype=torch.float32)
    return out.index_add_(0, rows, answer * scales).to(x.dtype)


def rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, added: bool) -> Peers:
    """Liger-kernel's RMSNorm, with the residual's sum before it if `added`."""
    if not x.is_cuda:
        return {}
    if added:
        liger = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
        return {} if liger is None else {"liger": lambda: liger.apply(x, residual, weight, 1e-5)}
    liger = _liger("rms_norm", "LigerRMSNormFunction")
    return {} if liger is None else {"liger": lambda: liger.apply(x, weight, 1e-5)}


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Peers:
    """Liger-kernel's LayerNorm."""
    liger = _liger("layer_norm", "LigerLayerNormFunction") if x.is_cuda else None
    return {} if liger is None else {"liger": lambda: liger.apply(x, weight, bias, 1e-5)}


def gated(x: torch.Tensor, activation: str) -> Peers:
    """Liger-kernel's SwiGLU, or its GeGLU with tanh; each half of the input has to be contiguous."""
    name = {"swiglu": "LigerSiLUMulFunction", "geglu": "LigerGELUMulFunction"}[activation]
    liger = _liger(activation, name) if x.is_cuda else None
    gates, ups = (half.contiguous() for half in x.chunk(2, dim=1))
    return {} if liger is None else {"liger": lambda: liger.apply(gates, ups)}


def _liger(module: str, name: str) -> Any:
    """A function of liger-kernel, or None where it is not installed."""
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name, None)
    except ImportError:
        return None
