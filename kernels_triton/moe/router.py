"""Router: the chosen experts of each token and their weights, from one logit per expert."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operators import check_tensor, operator
from ..declarations import operation, public, reference_of, work_of

_FLOOR = -1e38  # rank of NaN and -inf: below every number, above experts that are excluded
_NEAR = 0.02  # Phi-3.5-MoE's: twice its router_jitter_noise
_TINY = 1e-20  # DeepSeek's: avoids a division by zero where all scores underflow


class Scoring(enum.StrEnum):
    """Function from logits to scores: over all experts, or of each logit alone."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SPARSEMIXER = "sparsemixer"


_KNOWN = frozenset(Scoring)


@public
class Routing(NamedTuple):
    """Experts of each token, best first, and their weights: ids (T, k) int32, weights (T, k) fp32."""

    ids: torch.Tensor
    weights: torch.Tensor


@operation
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
    """Choose k experts per token.

        s = softmax(logits) or sigmoid(logits);  ids = the k experts with the largest s + bias in the kept groups
        weights = scale * s[ids],  divided by their sum if `renormalise`

    With "sparsemixer" (Phi-3.5-MoE; Liu et al., GRIN, 2024) each choice has a softmax of its own, over the experts that
    are left and whose logit l is near the best of these, m: (m - l) / max(|l|, m) <= 0.02.

    Mixtral, Qwen3: softmax, renormalise. GPT-OSS, Granite: the same, since a softmax over the chosen logits is the
    renormalised softmax over all. OLMoE, Qwen1.5: softmax. DeepSeek-V2: softmax, groups. DeepSeek-V3: sigmoid, bias,
    groups, renormalise. The computation is in fp32. Of equal experts, and of equal groups, the lowest index wins on
    every backend. NaN and -inf rank last, so that the ids of a token are always k different experts.

    Parameters
    ----------
    logits : (T, E) fp32, fp16 or bf16
        Rows may be strided, columns not.
    k : int
        Experts per token.
    scoring : "softmax", "sigmoid" or "sparsemixer"
        "sparsemixer" has neither bias nor groups, and does not renormalise; torch computes it on any device.
    renormalise : bool
        True if the weights of a token sum to `scale`.
    bias : (E,) fp32, optional
        Added to the scores for the choice only, not to the weights.
    groups, kept_groups : int
        Number of groups of E / `groups` consecutive experts, and of the best groups, from which experts are chosen. A
        group is as good as its best expert with softmax, as the sum of its two best with sigmoid.
    scale : float
        Factor of all weights.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    Routing
        ids (T, k) int32, best first; weights (T, k) fp32, relative error 1e-5 against float64.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes disagree, there are fewer than k experts to choose, or the backend cannot compute here.

    Examples
    --------
    >>> ids, weights = route(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2, renormalise=True)
    >>> ids.tolist(), weights.tolist()
    ([[1, 3]], [[0.5, 0.5]])
    """
    checked = _check(logits, k, scoring, renormalise, bias, groups, kept_groups)
    options = (int(k), str(checked), bool(renormalise), bias, int(groups), int(kept_groups), float(scale))
    return Routing(*_route(logits, *options, str(choose_backend(backend, logits, bias))))


def _compute(
    logits: torch.Tensor,
    k: int,
    scoring: str,
    renormalise: bool,
    bias: torch.Tensor | None,
    groups: int,
    kept_groups: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if scoring == Scoring.SPARSEMIXER:
        return _sparsemixer(logits.float(), k, scale)
    compute = _torch if backend == Backend.TORCH else _triton
    if backend != Backend.TORCH:
        enter_mode(Backend(backend))
    return compute(logits, k, Scoring(scoring), renormalise, bias, groups, kept_groups, scale)


def _shaped(logits: torch.Tensor, k: int, *_rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(logits), k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


_route = operator("route", _compute, _shaped)


@operation
def with_shared(routing: Routing, experts: Sequence[int], weights: torch.Tensor | None = None) -> Routing:
    """Add shared experts, which every token has, to the chosen ones, so that one call of `fused_moe` computes all.

    The shared experts' weights are pages of the same buffer. DeepSeek's shared expert, n times as wide as a routed one,
    has n pages, each with a slice of its gates, ups and down columns.

    Parameters
    ----------
    routing : Routing
        From `route`.
    experts : sequence of int
        Numbers of the shared experts, above those of the routed ones.
    weights : (T,) fp32, optional
        Weight of the shared experts in each token, such as Qwen's sigmoid gate; by default 1.

    Returns
    -------
    Routing
        ids (T, k + n) int32, weights (T, k + n) fp32; the shared experts come last.

    Raises
    ------
    ValueError
        If ids and weights disagree, or there is not one weight per token.

    Examples
    --------
    >>> ids, weights = with_shared(route(torch.tensor([[0.0, 2.0]]), 1, renormalise=True), [2, 3])
    >>> ids.tolist(), weights.tolist()
    ([[1, 2, 3]], [[1.0, 1.0, 1.0]])
    """
    for name, tensor in (("routing.ids", routing.ids), ("routing.weights", routing.weights)):
        check_tensor(name, tensor)
    if weights is not None:
        check_tensor("weights", weights)
    if routing.ids.ndim != 2 or routing.ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"routing.ids must be (T, k) int32 or int64, not {tuple(routing.ids.shape)} {routing.ids.dtype}: pass what "
            "route returns."
        )
    if routing.weights.shape != routing.ids.shape or routing.weights.dtype is not torch.float32:
        raise ValueError(
            f"routing.weights must be {tuple(routing.ids.shape)} fp32 as its ids, not {tuple(routing.weights.shape)} "
            f"{routing.weights.dtype}: pass what route returns."
        )
    tokens = len(routing.ids)
    added = len(experts)
    ones = routing.weights.new_ones(tokens) if weights is None else weights
    if ones.shape != (tokens,) or ones.dtype is not torch.float32:
        raise ValueError(
            f"weights must be ({tokens},) fp32, one per token, not {tuple(ones.shape)} {ones.dtype}: convert them."
        )
    ids = torch.cat((routing.ids, routing.ids.new_tensor(experts).expand(tokens, added)), 1)
    all_weights = torch.cat((routing.weights, ones[:, None].expand(-1, added)), 1)
    return Routing(ids, all_weights)


def _check(
    logits: torch.Tensor,
    k: int,
    scoring: str,
    renormalise: bool,
    bias: torch.Tensor | None,
    groups: int,
    kept_groups: int,
) -> Scoring:
    check_tensor("logits", logits)
    if bias is not None:
        check_tensor("bias", bias)
    if scoring not in _KNOWN:
        known = ", ".join(map(repr, map(str, Scoring)))
        raise ValueError(f"scoring must be one of {known}, not {scoring!r}: leave it out for 'softmax'.")
    if scoring == Scoring.SPARSEMIXER and (renormalise or bias is not None or (groups, kept_groups) != (1, 1)):
        raise ValueError("scoring 'sparsemixer' has neither renormalise nor bias nor groups: leave them out.")
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must have shape (T, E) with E >= 1, not {tuple(logits.shape)}: reshape them.")
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"logits must be fp32, fp16 or bf16, not {logits.dtype}: convert them before the call.")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError("logits must have contiguous columns: call .contiguous() first.")
    experts = logits.shape[1]
    if not 1 <= kept_groups <= groups or experts % groups:
        raise ValueError(
            f"groups must part {experts} experts evenly and kept_groups be in [1, {groups}], not {groups} and "
            f"{kept_groups}: leave them out for no limit."
        )
    if not 1 <= k <= kept_groups * (experts // groups):
        most = kept_groups * (experts // groups)
        raise ValueError(f"k must be in [1, {most}], the experts in the choice, not {k}: choose fewer.")
    if bias is not None and (bias.shape != (experts,) or bias.dtype is not torch.float32 or not bias.is_contiguous()):
        raise ValueError(
            f"bias must be ({experts},) fp32, contiguous, not {tuple(bias.shape)} {bias.dtype}: convert it."
        )
    if bias is not None and bias.device != logits.device:
        raise ValueError(f"bias must be on {logits.device} as logits, not on {bias.device}: move it.")
    return Scoring(scoring)


def _triton(
    logits: torch.Tensor,
    k: int,
    scoring: Scoring,
    renormalise: bool,
    bias: torch.Tensor | None,
    groups: int,
    kept_groups: int,
    scale: float,
) -> Routing:
    from ..backend.mode import triton
    from .jit_router import route as kernel

    tokens, experts = logits.shape
    ids = logits.new_empty((tokens, k), dtype=torch.int32)
    weights = logits.new_empty((tokens, k), dtype=torch.float32)
    power = triton.next_power_of_2
    if tokens:
        kernel[(tokens,)](
            logits,
            bias,
            ids,
            weights,
            logits.stride(0),
            scale,
            K=k,
            GROUPS=groups,
            SIZE=experts // groups,
            KEPT=kept_groups,
            SIGMOID=scoring is Scoring.SIGMOID,
            RENORMALISE=renormalise,
            BIASED=bias is not None,
            BLOCK_G=power(groups),
            BLOCK_S=power(experts // groups),
            BLOCK_K=power(k),
            num_warps=1 if experts <= 256 else 4,
        )
    return Routing(ids, weights)


def _torch(
    logits: torch.Tensor,
    k: int,
    scoring: Scoring,
    renormalise: bool,
    bias: torch.Tensor | None,
    groups: int,
    kept_groups: int,
    scale: float,
) -> Routing:
    rank = logits.float()
    scores = rank.sigmoid() if scoring is Scoring.SIGMOID else rank.softmax(dim=1)
    if groups > 1 or bias is not None:  # else rank logits: rounded scores could tie, differently by backend
        rank = scores if bias is None else scores + bias
    rank = rank.nan_to_num(nan=_FLOOR, neginf=_FLOOR)
    if groups > 1:
        best = rank.unflatten(1, (groups, -1)).topk(min(2, rank.shape[1] // groups), dim=2).values
        strength = best.sum(2) if scoring is Scoring.SIGMOID else best[:, :, 0]
        kept = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, _best(strength, kept_groups), True)
        rank = rank.masked_fill(~kept.repeat_interleave(rank.shape[1] // groups, dim=1), -torch.inf)
    ids = _best(rank, k)
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _TINY)
    return Routing(ids.int(), weights * scale)


def _sparsemixer(logits: torch.Tensor, k: int, scale: float) -> Routing:
    logits = logits.nan_to_num(nan=_FLOOR, neginf=_FLOOR)
    left = logits
    ids = []
    weights = []
    for _ in range(k):
        chosen = _best(left, 1)
        best = left.gather(1, chosen)
        far = (best - logits) / torch.maximum(logits.abs(), best) > _NEAR
        weights.append(left.masked_fill(far, -torch.inf).softmax(dim=1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, -torch.inf)
    return Routing(torch.cat(ids, 1).int(), torch.cat(weights, 1) * scale)


def _best(rank: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k largest values of each row, best first; of equal values the first, unlike topk.

    Only rows with equal values are sorted: topk takes 12 ms where a stable sort of all rows takes 40 (4096 x 128,
    k = 8, two Zen 4 cores).
    """
    values, ids = rank.topk(min(k + 1, rank.shape[1]), dim=1)
    equal = values[:, 1:] == values[:, :-1]
    if bool(equal.any()):
        rows = equal.any(dim=1)
        ids[rows] = rank[rows].argsort(dim=1, descending=True, stable=True)[:, : ids.shape[1]]
    return ids[:, :k]


@work_of(route)
def route_work(tokens: int, experts: int, chosen: int, logit_itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]); comparisons are not counted.

        flops = 4 T E,  bytes = logit_itemsize T E + 8 T k

    Parameters
    ----------
    tokens, experts, chosen : int
        T, E and k.
    logit_itemsize : int
        Size of a logit [byte].

    Examples
    --------
    >>> route_work(tokens=2, experts=8, chosen=2, logit_itemsize=4)
    (64, 96)
    """
    return 4 * tokens * experts, logit_itemsize * tokens * experts + 8 * tokens * chosen


@reference_of(route)
def route_reference(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    renormalise: bool = False,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
) -> Routing:
    """Compute `route` in float64 by sorting, the oracle of its tests; weights are in float64.

    Examples
    --------
    >>> route_reference(torch.tensor([[0.0, 0.0]]), 1).weights.tolist()
    [[0.5]]
    """
    wide = logits.double()
    if scoring == "sparsemixer":
        return _sparsemixer_reference(wide, k, scale)
    scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(dim=1)
    rank = (scores if bias is None else scores + bias.double()).unflatten(1, (groups, -1))
    ordered = rank.sort(dim=2, descending=True).values
    strength = ordered[:, :, :2].sum(2) if scoring == "sigmoid" else ordered[:, :, 0]
    excluded = strength.argsort(dim=1, descending=True, stable=True)[:, kept_groups:]
    rank = rank.scatter(1, excluded[:, :, None].expand(-1, -1, rank.shape[2]), -torch.inf).flatten(1)
    ids = rank.argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(dim=1, keepdim=True) if renormalise else weights
    return Routing(ids.int(), weights * scale)


def _sparsemixer_reference(logits: torch.Tensor, k: int, scale: float) -> Routing:
    """One token and one choice at a time."""
    ids = torch.zeros(len(logits), k, dtype=torch.int32)
    weights = torch.zeros(len(logits), k, dtype=torch.float64)
    for token, row in enumerate(logits.tolist()):
        left = dict(enumerate(row))
        for place in range(k):
            chosen = max(left, key=lambda expert: (left[expert], -expert))
            best = left[chosen]
            near = [value for value in left.values() if (best - value) / max(abs(value), best) <= _NEAR]
            ids[token, place] = chosen
            weights[token, place] = scale / sum(math.exp(value - best) for value in near)
            del left[chosen]
    return Routing(ids, weights)
