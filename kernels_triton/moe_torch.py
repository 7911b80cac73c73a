"""Grouped products in plain torch: one matrix product per expert that was chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from .experts import Activation, Weights, activate, matrix_on


class Run(NamedTuple):
    """Rows [begin, end) of the pairs in order by expert, all of the expert on `page`."""

    page: int
    begin: int
    end: int


def _sorted(ids: torch.Tensor, pages: torch.Tensor | None, experts: int) -> tuple[torch.Tensor, list[Run]]:
    """Pairs in order by expert, and each expert's run that is not empty."""
    flat = ids.reshape(-1)
    order = flat.sort(stable=True).indices
    ends = flat.bincount(minlength=experts).cumsum(0).tolist()
    held = range(experts) if pages is None else pages.tolist()
    runs = zip(held, [0, *ends[:-1]], ends, strict=True)
    return order, [Run(page, begin, end) for page, begin, end in runs if begin < end]


def _product(rows: torch.Tensor, matrices: Weights, bias: torch.Tensor | None, page: int) -> torch.Tensor:
    """rows (n, C) times one page's matrix."""
    own = None if bias is None else bias[page]
    return functional.linear(rows, matrix_on(matrices, page, rows.dtype), own)


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
    order, runs = _sorted(ids, pages, experts)
    rows = x.flatten(0, -2)[order // ids.shape[1] if x.ndim == 2 else order]
    out = x.new_empty(ids.numel(), matrices.shape[1])
    for page, begin, end in runs:
        out[order[begin:end]] = _product(rows[begin:end], matrices, bias, page)
    return out if weights is None else (out * weights.reshape(-1, 1)).to(x.dtype)


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
    """The routed experts' weighted sum, (T, M), as `fused_moe` defines it.

    The sum is torch's embedding bag, whose bags are a token's rows: 8 ms where multiplying and adding take 120
    (1024 tokens, 8 experts each, 2048 columns of bf16, two Zen 4 cores).
    """
    order, runs = _sorted(ids, pages, experts)
    rows = x[order // ids.shape[1]]
    answers = torch.empty_like(rows)
    for page, begin, end in runs:
        inner = activate(_product(rows[begin:end], gate_up, biases[0], page), activation)
        answers[begin:end] = _product(inner, down, biases[1], page)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    factors = weights.to(x.dtype)
    return functional.embedding_bag(places.view(ids.shape), answers, mode="sum", per_sample_weights=factors)
