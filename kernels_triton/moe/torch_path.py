"""Grouped products in plain torch: one matrix product per expert that was chosen."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch.nn import functional

from ..backend.products import has_products, product
from .experts import LEFT_OUT, Activation, Weights, activate, check_chosen, matrix_on


class Segment(NamedTuple):
    """Rows [begin, end) of the sorted pairs, all of the expert on `page`."""

    page: int
    begin: int
    end: int


_FEW = 512
"""Most pairs that plain Python sorts: with caches full of a layer's weights, one call of torch or numpy that sorts or
counts 8 numbers takes 100 µs, Python 40 µs (Zen 4)."""
_TOGETHER = 2048
"""Most pairs of several experts that are gathered, multiplied, activated and summed together, since each operation
starts with cold caches. With groups of 256, 64 tokens with 8 of 128 experts of 2048 x 768 take 15 % less time (bf16,
Zen 4)."""
_ALONE = 32
"""An expert with more pairs is computed alone. Routing gives it another number of rows each time, for which oneDNN
compiles a kernel: in groups, 1500 tokens with 2 of 8 experts of 1024 x 7168 took 1.33 times as long as alone, 500
tokens 1.37 times, 64 tokens 1.02 times (bf16, one core of a Xeon with AMX)."""
_FILLED = 8
"""The rows of such an expert are padded with zeros to a multiple of so many in bf16."""


def _sorted(ids: torch.Tensor, pages: torch.Tensor | None, held: int) -> tuple[torch.Tensor, list[Segment]]:
    """Sort the pairs by expert; return their order and each expert's segment, without those of experts left out."""
    sort = _sort_few if ids.numel() <= _FEW else _sort_many
    order, counts = sort(ids.reshape(-1))
    check_chosen(counts, pages, held)
    segments = []
    parts = []
    begin = 0
    for (expert, count), pairs in zip(counts.items(), order.split([*counts.values()]), strict=True):
        page = expert if pages is None else int(pages[expert])
        if page == LEFT_OUT:
            continue
        segments.append(Segment(page, begin, begin + count))
        parts.append(pairs)
        begin += count
    return (order if len(parts) == len(counts) else torch.cat([order[:0], *parts])), segments


def _sort_few(ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    """Order of the pairs, and the number of pairs of each expert, by plain Python."""
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.tolist()):
        pairs.setdefault(expert, []).append(pair)
    experts = sorted(pairs)
    order = list(chain.from_iterable(pairs[expert] for expert in experts))
    counts = {expert: len(pairs[expert]) for expert in experts}
    return torch.tensor(order, dtype=torch.int64, device=ids.device), counts


def _sort_many(ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    """Order of the pairs, and the number of pairs of each expert, by torch."""
    ordered, order = ids.sort(stable=True)
    experts, counts = ordered.unique_consecutive(return_counts=True)
    return order, dict(zip(experts.tolist(), counts.tolist(), strict=True))


def _groups(segments: list[Segment], most: int) -> list[list[Segment]]:
    """Group neighbouring segments: each group is a single segment, or has at most `most` pairs of experts with few."""
    groups: list[list[Segment]] = []
    for segment in segments:
        small = segment.end - segment.begin <= _ALONE
        before = groups[-1] if groups else []
        if before and small and before[-1].end - before[-1].begin <= _ALONE and segment.end - before[0].begin <= most:
            before.append(segment)
        else:
            groups.append([segment])
    return groups


def _product(rows: torch.Tensor, matrices: Weights, bias: torch.Tensor | None, segments: list[Segment]) -> torch.Tensor:
    """Multiply the rows of neighbouring segments, each with the matrix on its page; one segment has all rows."""
    if isinstance(matrices, torch.Tensor) and bias is None and _fits_grouped(rows, matrices, segments):
        return _grouped(rows, matrices, segments)
    products = []
    counts = [segment.end - segment.begin for segment in segments] if len(segments) > 1 else [len(rows)]
    for segment, own in zip(segments, rows.split(counts), strict=True):
        page_bias = None if bias is None else bias[segment.page]
        products.append(product(own, matrix_on(matrices, segment.page, rows.dtype), page_bias))
    return products[0] if len(products) == 1 else torch.cat(products)


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Rows of one expert, padded with zeros to a multiple of `_FILLED` where oneDNN multiplies them."""
    missing = -len(rows) % _FILLED
    by_onednn = rows.is_cpu and rows.dtype is torch.bfloat16 and len(rows) > _ALONE
    return functional.pad(rows, (0, 0, 0, missing)) if missing and by_onednn else rows


def _fits_grouped(rows: torch.Tensor, matrices: torch.Tensor, segments: list[Segment]) -> bool:
    """True if torch's grouped product takes the operands: several experts in bf16, aligned, with rising pages."""
    if rows.dtype is not torch.bfloat16 or rows.is_cuda or not has_products(rows.dtype):
        return False
    pages = [segment.page for segment in segments]
    if len(pages) < 2 or pages != sorted(pages):
        return False
    return all(stride % 8 == 0 for stride in (*matrices.stride()[:2], matrices.shape[1], rows.stride(0)))


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
    """Compute `_product` by one call of torch; pages between those of the experts have no rows and are not read."""
    first = segments[0].page
    last = segments[-1].page
    counts = [0] * (last + 1 - first)
    for page, begin, end in segments:
        counts[page - first] += end - begin  # experts may share a page
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    found: torch.Tensor = functional.grouped_mm(rows, matrices[first : last + 1].mT, offs=ends)
    return found


def multiply(
    x: torch.Tensor,
    matrices: Weights,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    pages: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `grouped_gemm` of checked operands, one row per pair: -> (T k, N)."""
    order, segments = _sorted(ids, pages, matrices.shape[0])
    rows = x.flatten(0, -2).index_select(0, order // ids.shape[1] if x.ndim == 2 else order)
    out = x.new_zeros(ids.numel(), matrices.shape[1])
    for segment in segments:
        own = slice(segment.begin, segment.end)
        answer = _product(_filled(rows[own]), matrices, bias, [segment])
        out.index_copy_(0, order[own], answer[: segment.end - segment.begin])
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
    """Compute `fused_moe` of checked operands: -> (T, M).

    Each expert's rows are added to the fp32 sums at once, in the order of the experts: a buffer of all rows would cost
    5 % of the time of 4096 tokens for new memory (8 experts of 2048 x 768 each, bf16, Zen 4).
    """
    pairs, segments = _sorted(ids, pages, gate_up.shape[0])
    tokens = pairs // ids.shape[1]
    factors = weights.reshape(-1, 1).index_select(0, pairs)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    most = 0 if x.is_cuda else _TOGETHER  # on a GPU, index_add_ of one token twice has no fixed order
    for group in _groups(segments, most):
        begin = group[0].begin
        end = group[-1].end
        group_tokens = tokens[begin:end]
        rows = x.index_select(0, group_tokens)
        rows = _filled(rows) if len(group) == 1 else rows
        both = _product(rows, gate_up, biases[0], group)
        answer = _product(activate(both, activation), down, biases[1], group)
        out.index_add_(0, group_tokens, answer[: end - begin] * factors[begin:end])
    return out.to(x.dtype)
