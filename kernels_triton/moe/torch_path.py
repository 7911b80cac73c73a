"""Grouped products in plain torch: one matrix product per expert that was chosen."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import functional

from .experts import Activation, Weights, activate, check_chosen, matrix_on


class Run(NamedTuple):
    """Rows [begin, end) of the pairs in order by expert, all of the expert on `page`."""

    page: int
    begin: int
    end: int


_FEW = 512
"""Pairs up to which plain Python sorts: right after the weights of a layer have gone through the caches, one call of
torch or numpy that sorts or counts 8 numbers takes 100 µs, and Python 40 (Zen 4)."""
_TOGETHER = 2048
"""Pairs of several experts up to which they are gathered, multiplied, activated and added up together, since each
operation starts with cold caches: 64 tokens with 8 of 128 experts of 2048 x 768 take 15 % less time with 256 (bf16,
Zen 4). On a Xeon with AMX, whose products are faster, 2048 in place of 256: 3 % less time with 512 to 4096 tokens and 2
of 8 experts of 2048 x 7168, 8 % less with 512 tokens and the smaller experts, 3 % more with 4096; 8192 take 4096 tokens
and the larger experts 1.3 times as long."""


def _sorted(ids: torch.Tensor, pages: torch.Tensor | None, held: int) -> tuple[torch.Tensor, list[Run]]:
    """Pairs in order by expert, and each expert's run."""
    order, counts = (_of_few if ids.numel() <= _FEW else _of_many)(ids.reshape(-1))
    check_chosen(counts, pages, held)
    runs, begin = [], 0
    for expert, count in counts.items():
        runs.append(Run(expert if pages is None else int(pages[expert]), begin, begin + count))
        begin += count
    return order, runs


def _of_few(ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.tolist()):
        pairs.setdefault(expert, []).append(pair)
    order = [pair for expert in sorted(pairs) for pair in pairs[expert]]
    return torch.tensor(order, dtype=torch.int64, device=ids.device), {e: len(pairs[e]) for e in sorted(pairs)}


def _of_many(ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    ordered, order = ids.sort(stable=True)
    experts, counts = ordered.unique_consecutive(return_counts=True)
    return order, dict(zip(experts.tolist(), counts.tolist(), strict=True))


def _groups(runs: list[Run], most: int) -> list[list[Run]]:
    """Neighbouring runs, of `most` pairs together where it is more than one."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups and run.end - groups[-1][0].begin <= most:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _product(rows: torch.Tensor, matrices: Weights, bias: torch.Tensor | None, runs: list[Run]) -> torch.Tensor:
    """Rows of neighbouring runs, each times the matrix on its page."""
    if isinstance(matrices, torch.Tensor) and bias is None and _fits_grouped(rows, matrices, runs):
        return _grouped(rows, matrices, runs)
    first, parts = runs[0].begin, []
    for page, begin, end in runs:
        own = None if bias is None else bias[page]
        matrix = matrix_on(matrices, page, rows.dtype)
        parts.append(functional.linear(rows[begin - first : end - first], matrix, own))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fits_grouped(rows: torch.Tensor, matrices: torch.Tensor, runs: list[Run]) -> bool:
    """Whether torch's own loop over experts takes these: several in bf16, aligned, on pages in rising order."""
    pages = [run.page for run in runs]
    aligned = all(stride % 8 == 0 for stride in (*matrices.stride()[:2], matrices.shape[1], rows.stride(0)))
    return len(pages) > 1 and pages == sorted(pages) and aligned and rows.dtype is torch.bfloat16 and not rows.is_cuda


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, runs: list[Run]) -> torch.Tensor:
    """`_product` without Python between the experts; pages in between have no rows and are not read."""
    first, last = runs[0].page, runs[-1].page
    counts = [0] * (last + 1 - first)
    for page, begin, end in runs:
        counts[page - first] += end - begin  # experts may share a page
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    product: torch.Tensor = functional.grouped_mm(rows, matrices[first : last + 1].mT, offs=ends)
    return product


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
    rows = x.flatten(0, -2).index_select(0, order // ids.shape[1] if x.ndim == 2 else order)
    out = x.new_empty(ids.numel(), matrices.shape[1])
    for run in runs:
        out.index_copy_(0, order[run.begin : run.end], _product(rows[run.begin : run.end], matrices, bias, [run]))
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

    Answers are added up in fp32 as they come, in the order of the experts: a buffer of all of them would cost 5 % of
    the time of 4096 tokens in fresh pages (8 experts of 2048 x 768 each, bf16, Zen 4).
    """
    pairs, runs = _sorted(ids, pages, gate_up.shape[0])
    tokens, factors = pairs // ids.shape[1], weights.reshape(-1, 1).index_select(0, pairs)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for group in _groups(runs, 0 if x.is_cuda else _TOGETHER):  # on a GPU, adding a token twice in a call has no order
        begin, end = group[0].begin, group[-1].end
        own = tokens[begin:end]
        inner = activate(_product(x.index_select(0, own), gate_up, biases[0], group), activation)
        out.index_add_(0, own, _product(inner, down, biases[1], group) * factors[begin:end])
    return out.to(x.dtype)
