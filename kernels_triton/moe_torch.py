"""Grouped products in plain torch: one matrix product per expert that was chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from .experts import Activation, Weights, activate, check_chosen, matrix_on


class Run(NamedTuple):
    """Rows [begin, end) of the pairs in order by expert, all of the expert on `page`."""

    page: int
    begin: int
    end: int


def _sorted(ids: torch.Tensor, pages: torch.Tensor | None, held: int) -> tuple[list[int], list[Run]]:
    """Pairs in order by expert, and each expert's run.

    In plain Python: right after the weights of a layer have gone through the caches, one call of torch or numpy that
    sorts or counts 8 numbers takes 100 µs, and this 40 (Zen 4).
    """
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        pairs.setdefault(expert, []).append(pair)
    check_chosen(pairs, pages, held)
    order: list[int] = []
    runs = []
    for expert in sorted(pairs):
        page = expert if pages is None else int(pages[expert])
        runs.append(Run(page, len(order), len(order) + len(pairs[expert])))
        order += pairs[expert]
    return order, runs


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
) -> torch.Tensor:
    """One row per pair, (T k, N), as `grouped_gemm` defines it."""
    order, runs = _sorted(ids, pages, matrices.shape[0])
    sources = [pair // ids.shape[1] for pair in order] if x.ndim == 2 else order
    rows = x.flatten(0, -2)[torch.tensor(sources, dtype=torch.int64, device=x.device)]
    out = x.new_empty(ids.numel(), matrices.shape[1])
    for page, begin, end in runs:
        out[torch.tensor(order[begin:end], device=x.device)] = _product(rows[begin:end], matrices, bias, page)
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
) -> torch.Tensor:
    """The routed experts' weighted sum, (T, M), as `fused_moe` defines it.

    The sum is torch's embedding bag, whose bags are a token's rows: 5 ms where index_add_ takes 70 (1024 tokens, 8
    experts each, 2048 columns of bf16, two Zen 4 cores). The weights stay fp32.
    """
    order, runs = _sorted(ids, pages, gate_up.shape[0])
    places = [0] * len(order)
    for row, pair in enumerate(order):
        places[pair] = row
    bags = torch.tensor(places, dtype=torch.int64, device=x.device).view(ids.shape)
    pairs = torch.tensor(order, dtype=torch.int64, device=x.device)
    rows, factors = x[pairs // ids.shape[1]], weights.reshape(-1, 1)[pairs]
    answers = torch.empty_like(rows)
    for page, begin, end in runs:
        inner = activate(_product(rows[begin:end], gate_up, biases[0], page), activation)
        answer = _product(inner, down, biases[1], page)
        torch.mul(answer, factors[begin:end], out=answers[begin:end])
    return functional.embedding_bag(bags, answers, mode="sum")
