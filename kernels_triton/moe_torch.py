"""Grouped products in plain torch: one matrix product per expert that was chosen."""

from __future__ import annotations

import torch
from torch.nn import functional

from .experts import Activation, Weights, activate, matrix_on


def _runs(
    ids: torch.Tensor, pages: torch.Tensor | None, experts: int
) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Pairs in order by expert, and (page, begin, end) of each expert's run that is not empty."""
    order = ids.reshape(-1).sort(stable=True).indices
    ends = ids.reshape(-1).bincount(minlength=experts).cumsum(0).tolist()
    held = range(experts) if pages is None else pages.tolist()
    runs = zip(held, [0, *ends[:-1]], ends, strict=True)
    return order, [(page, begin, end) for page, begin, end in runs if begin < end]


def multiply(
    x: torch.Tensor,
    matrices: Weights,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    pages: torch.Tensor | None,
    experts: int,
) -> torch.Tensor:
    """One row per pair, (T k, N), as `grouped_gemm` defines it."""
    order, runs = _runs(ids, pages, experts)
    rows = x.flatten(0, -2)
    sources = order // ids.shape[1] if x.ndim == 2 else order
    out = x.new_empty(ids.numel(), matrices.shape[1])
    for page, begin, end in runs:
        own = functional.linear(rows[sources[begin:end]], matrix_on(matrices, page, x.dtype), _row(bias, page))
        out[order[begin:end]] = own
    return out if weights is None else (out * weights.reshape(-1, 1)).to(x.dtype)


def _row(bias: torch.Tensor | None, page: int) -> torch.Tensor | None:
    return None if bias is None else bias[page]


def experts_of(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: Activation,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    pages: torch.Tensor | None,
    experts: int,
) -> torch.Tensor:
    """The routed experts' weighted sum, (T, M), as `fused_moe` defines it."""
    order, runs = _runs(ids, pages, experts)
    tokens, factors = order // ids.shape[1], weights.reshape(-1)[order]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for page, begin, end in runs:
        mine = tokens[begin:end]
        both = functional.linear(x[mine], matrix_on(gate_up, page, x.dtype), _row(biases[0], page))
        answer = functional.linear(activate(both, activation), matrix_on(down, page, x.dtype), _row(biases[1], page))
        out.index_add_(0, mine, answer * factors[begin:end, None])
    return out.to(x.dtype)
