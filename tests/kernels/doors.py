"""The table of doors: every op of `workbench.kernels` with operands to draw, its formula in float64 and its limits.

`draw` makes operands as contiguous CPU tensors and says nothing about memory; `layouts.py` puts them anywhere.
What no one may read is NaN, or a block that there is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch

import kernels_cpu
from kernels_cpu import CodePath, Format
from kernels_triton import Draws, Linear, Prefix, Quantised, Routing, quantise
from kernels_triton.moe.grouped_gemm import grouped_gemm_reference
from kernels_triton.vocabulary.sampling import uniform
from tests.kernels.layouts import raw
from workbench import kernels
from workbench.kernels import collected

Operands: TypeAlias = dict[str, Any]
Answer: TypeAlias = tuple[torch.Tensor, ...]

FP32, FP16, BF16 = FLOATS = torch.float32, torch.float16, torch.bfloat16
ONCE = {FP32: 1e-6, FP16: 5e-4, BF16: 4e-3}
"""Relative Frobenius error of numbers that are rounded once."""
TWICE = {FP32: 1e-5, FP16: 1e-3, BF16: 8e-3}


@dataclass(frozen=True)
class Door:
    """One op: how to draw its operands, how to call it, and what it is to give.

    Attributes
    ----------
    draw : Random -> operands by name; a "backend" among them is the backend asked for
    call : operands -> what the op returns
    formula : operands -> what is to be returned, and then what is to be in the operands that are written
    limit : operands -> relative Frobenius error of what is returned and written
    written : operands that the op stores into
    kinds : what the op takes: "tensor", "array" or both
    backends : those that a "backend" may name; none where the op has no such choice
    """

    draw: Callable[[Random], Operands]
    call: Callable[..., Any]
    formula: Callable[..., Answer]
    limit: Callable[[Operands], float]
    written: frozenset[str] = frozenset()
    kinds: tuple[str, ...] = ("tensor",)
    backends: tuple[str | None, ...] = ()


def numbers(random: Random, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def maybe(random: Random, name: str, make: Callable[[], Any]) -> Operands:
    """An operand that may be left out."""
    return {name: make()} if random.random() < 0.4 else {}


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same in float64."""
    return tensor.double()


# Norms, gates and rotations

WIDTHS = (1, 2, 7, 16, 33, 64)


def _rows(random: Random, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int, torch.dtype]:
    return random.choice((0, 1, 2, 5)), random.choice(WIDTHS), random.choice(dtypes)


def _norm(dtypes: tuple[torch.dtype, ...], *more: str) -> Callable[[Random], Operands]:
    def draw(random: Random) -> Operands:
        T, M, dtype = _rows(random, dtypes)
        rows = {name: numbers(random, dtype, T, M, scale=3) for name in ("x", *more)}
        return rows | {"weight": numbers(random, dtype, M)} | maybe(random, "eps", lambda: 1e-3)

    return draw


def _layer_norm(random: Random) -> Operands:
    """Not of a row of one or two, whose difference from their mean cancels."""
    T, _, dtype = _rows(random, FLOATS)
    M = random.choice(WIDTHS[2:])
    operands = {"x": numbers(random, dtype, T, M, scale=3), "weight": numbers(random, dtype, M)}
    shift = maybe(random, "bias", lambda: numbers(random, operands["x"].dtype, operands["x"].shape[1]))
    return operands | shift


def _linear(random: Random) -> Operands:
    T, C, dtype = _rows(random, FLOATS)
    R = random.choice((0, 1, 3, 40))
    operands = {"x": numbers(random, dtype, T, C), "weight": numbers(random, dtype, R, C)}
    return operands | maybe(random, "bias", lambda: numbers(random, dtype, R))


def _gated(dtypes: tuple[torch.dtype, ...]) -> Callable[[Random], Operands]:
    def draw(random: Random) -> Operands:
        T, F, dtype = _rows(random, dtypes)
        return {"x": numbers(random, dtype, T, 2 * F, scale=3), "activation": random.choice(("swiglu", "geglu"))}

    return draw


def _rope(dtypes: tuple[torch.dtype, ...]) -> Callable[[Random], Operands]:
    def draw(random: Random) -> Operands:
        T, _, dtype = _rows(random, dtypes)
        H, D, R = random.choice(((1, 2, 2), (3, 16, 16), (2, 24, 12), (5, 17, 8)))
        operands = {
            "x": numbers(random, dtype, T, H, D),
            "positions": torch.tensor([random.randrange(50) for _ in range(T)], dtype=_index(random)),
            "table": kernels.rope_table(R, 50),
            "interleaved": random.random() < 0.5,
        }
        return operands | maybe(random, "weight", lambda: numbers(random, dtype, D))

    return draw


def _index(random: Random) -> torch.dtype:
    return random.choice((torch.int32, torch.int64))


def _added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> Answer:
    total = x + residual  # rounded to their type, as the op says
    return kernels.rms_norm_reference(total, weight, eps=eps), wide(total)


def _table(dims: int, positions: int, theta: float = 10000.0, scaling: Any = None) -> Answer:
    turns = theta ** (-torch.arange(0, dims, 2).double() / dims)
    angles = torch.arange(positions).double()[:, None] * turns / (1 if scaling is None else scaling.factor)
    return (torch.cat((angles.cos(), angles.sin()), 1),)


def _draw_table(random: Random) -> Operands:
    scaling = maybe(random, "scaling", lambda: Linear(random.choice((2.0, 4.0))))
    return {"dims": random.choice((2, 8, 64)), "positions": random.choice((0, 1, 60))} | scaling


# Attention


def cache(random: Random, lengths: list[int], K: int, b: int, D: int, dtype: torch.dtype, low: list[int]) -> Answer:
    """A paged cache and its table: some blocks belong to several sequences, what no one may read is poisoned."""
    needed = [-(-length // b) for length in lengths]
    blocks, width = sum(needed) + 2, max([1, *needed])
    kv = torch.full((blocks, K, 2, b, D), torch.nan).to(dtype)
    table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    shared = random.random() < 0.4
    order = random.sample(range(blocks), blocks)
    for s, length in enumerate(lengths):
        for column in range(needed[s]):
            filled = min(b, length - column * b)
            if column * b + filled <= low[s]:
                continue
            block = order[column] if shared else order.pop()
            table[s, column] = block
            kv[block, :, :, :filled] = _cells(random, dtype, K, 2, filled, D)
    return kv, table


def _cells(random: Random, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.int8:
        return numbers(random, FP32, *shape, scale=40).clamp(-127, 127).to(dtype)
    return numbers(random, dtype, *shape)


def _options(random: Random, H: int) -> Operands:
    made: Operands = {}
    made |= maybe(random, "window", lambda: random.choice((1, 3, 20)))
    made |= maybe(random, "sinks", lambda: numbers(random, FP32, H))
    made |= maybe(random, "softcap", lambda: 3.0)
    return made | maybe(random, "scale", lambda: 0.3)


def _sizes(random: Random) -> tuple[int, int, int, int]:
    """Of three heads that share one, whose code other tests compile too."""
    return random.choice(((3, 1, 4, 16), (6, 2, 3, 16), (6, 2, 8, 16)))


def _window_begins(options: Operands, lengths: list[int], ahead: int = 0) -> list[int]:
    window = options.get("window")
    return [0 if window is None else max(0, length + ahead - window) for length in lengths]


def _numba_decode(random: Random) -> Operands:
    H, K, b, D = _sizes(random)
    options = _options(random, H)
    lengths = [random.choice((1, 2, 7, 20)) for _ in range(random.choice((0, 1, 2, 3)))]
    dtype = random.choice((*FLOATS, torch.int8))
    kv, table = cache(random, lengths, K, b, D, dtype, _window_begins(options, lengths))
    operands = {"q": numbers(random, FP32, len(lengths), H, D), "kv": kv, "table": table}
    operands["lengths"] = torch.tensor(lengths, dtype=_index(random))
    if dtype is torch.int8:
        operands["scales"] = numbers(random, FP32, *kv.shape[:4], scale=0.02)
    operands |= maybe(random, "out", lambda: torch.full(operands["q"].shape, torch.nan))
    return operands | options | _threads(random)


def _mla_decode(random: Random) -> Operands:
    lengths = [random.choice((0, 1, 2, 9)) for _ in range(random.choice((0, 1, 3)))]
    H, (D, values) = 2, random.choice(((24, 16), (32, 24), (16, 16)))
    kv, table = cache(random, lengths, 1, 4, D, random.choice(FLOATS), [0] * len(lengths))
    return {
        "q": numbers(random, random.choice(FLOATS), len(lengths), H, D),
        "kv": kv[:, 0, 0].contiguous(),
        "table": table,
        "lengths": torch.tensor(lengths, dtype=_index(random)),
        "value_dim": values,
        "scale": 0.2,
    }


def _numba_mla_decode(random: Random) -> Operands:
    lengths = [random.choice((1, 2, 9)) for _ in range(random.choice((0, 1, 3)))]
    H, D, values = 2, 24, 16
    kv, table = cache(random, lengths, 1, 4, D, random.choice(FLOATS), [0] * len(lengths))
    operands = {
        "q": numbers(random, FP32, len(lengths), H, D),
        "kv": kv[:, 0, 0].contiguous(),
        "table": table,
        "lengths": torch.tensor(lengths, dtype=_index(random)),
        "value_dim": values,
        "scale": 0.2,
    }
    return operands | maybe(random, "out", lambda: torch.full((len(lengths), H, values), torch.nan)) | _threads(random)


def _threads(random: Random) -> Operands:
    return maybe(random, "threads", lambda: random.choice((1, 2, 3))) | maybe(random, "path", lambda: CodePath.PORTABLE)


def _without(formula: Callable[..., Any], *names: str) -> Callable[..., Answer]:
    """A formula that the named operands do not change."""

    def answer(**operands: Any) -> Answer:
        found = formula(**{name: value for name, value in operands.items() if name not in names})
        return tuple(torch.as_tensor(part) for part in (found if isinstance(found, tuple) else (found,)))

    return answer


def _into_out(formula: Callable[..., Answer]) -> Callable[..., Answer]:
    """The answer, and once more where it is stored into `out`."""

    def answer(**operands: Any) -> Answer:
        found = formula(**operands)
        return found * 2 if "out" in operands else found

    return answer


def _decode_attention(random: Random) -> Operands:
    H, K, b, D = _sizes(random)
    options = _options(random, H)
    lengths = [random.choice((0, 1, 2, 7, 20)) for _ in range(random.choice((0, 1, 2, 3)))]
    kv, table = cache(random, lengths, K, b, D, random.choice(FLOATS), _window_begins(options, lengths))
    q = numbers(random, random.choice(FLOATS), len(lengths), H, D)
    return {"q": q, "kv": kv, "table": table, "lengths": torch.tensor(lengths, dtype=_index(random))} | options


def _prefill_attention(random: Random) -> Operands:
    H, K, b, D = _sizes(random)
    options, dtype, index = _options(random, H), random.choice(FLOATS), _index(random)
    lengths = [random.choice((0, 1, 3, 9)) for _ in range(random.choice((0, 1, 2, 3)))]
    T, starts = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).to(index)
    operands = {
        "q": numbers(random, dtype, T, H, D),
        "k": numbers(random, dtype, T, K, D),
        "v": numbers(random, dtype, T, K, D),
        "starts": starts,
    }
    if random.random() < 0.5:
        before = [random.choice((0, 1, 6)) for _ in lengths]
        kv, table = cache(random, before, K, b, D, random.choice(FLOATS), _window_begins(options, before, 1))
        operands["prefix"] = Prefix(kv, table, torch.tensor(before, dtype=index))
    return operands | options


# The paged cache


def _slots(random: Random, P: int, b: int, T: int, *, repeated: bool) -> torch.Tensor:
    room = range(P * b)
    return torch.tensor(random.choices(room, k=T) if repeated else random.sample(room, T), dtype=torch.int64)


def _numba_append(random: Random) -> Operands:
    P, K, b, D = random.choice(((3, 2, 4, 8), (2, 1, 3, 5), (4, 1, 8, 1)))
    dtype, T = random.choice((*FLOATS, torch.int8)), random.choice((0, 1, 2, 6))
    rows = {name: numbers(random, FP32, T, K, D) for name in ("k", "v")}
    scales = {"scales": numbers(random, FP32, P, K, 2, b).abs()} if dtype is torch.int8 else {}
    slots = _slots(random, P, b, T, repeated=random.random() < 0.3)
    return {"kv": _cells(random, dtype, P, K, 2, b, D), "slots": slots} | rows | scales


def _appended(
    kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor | None = None
) -> Answer:
    after, factors = wide(kv), None if scales is None else wide(scales)
    for slot, rows in zip(slots.tolist(), torch.stack((k, v), 2), strict=True):
        page, offset = divmod(slot, kv.shape[3])
        if factors is not None:
            largest = rows.abs().amax(2, keepdim=True)
            factors[page, :, :, offset] = (largest / 127).double()[..., 0]
            rows = (rows / (largest / 127)).round()
        after[page, :, :, offset] = rows.to(kv.dtype).double()
    return (after,) if factors is None else (after, factors)


def _append_kv(random: Random) -> Operands:
    P, K, b, D = random.choice(((3, 2, 4, 8), (2, 1, 3, 5), (4, 1, 8, 1)))
    dtype, T = random.choice(FLOATS), random.choice((0, 1, 2, 6))
    rows = {name: numbers(random, dtype, T, K, D) for name in ("k", "v")}
    kv = numbers(random, random.choice(FLOATS), P, K, 2, b, D)
    return {"kv": kv, "slots": _slots(random, P, b, T, repeated=random.random() < 0.1)} | rows


def _gather_kv(random: Random) -> Operands:
    P, K, b, D = random.choice(((3, 2, 4, 8), (2, 1, 3, 5)))
    slots = _slots(random, P, b, random.choice((0, 1, 6)), repeated=True)
    return {"kv": numbers(random, random.choice(FLOATS), P, K, 2, b, D), "slots": slots}


def _gathered(kv: torch.Tensor, slots: torch.Tensor) -> Answer:
    cells = [kv[slot // kv.shape[3], :, :, slot % kv.shape[3]] for slot in slots.tolist()]
    rows = torch.stack(cells) if cells else kv.new_empty(0, kv.shape[1], 2, kv.shape[4])
    return wide(rows[:, :, 0]), wide(rows[:, :, 1])


def _copy_blocks(random: Random) -> Operands:
    P, K, b, D = random.choice(((3, 2, 4, 8), (2, 1, 3, 5), (4, 1, 8, 1)))
    dtype, N = random.choice((*FLOATS, torch.int8)), random.choice((0, 1, 3, 7))
    blocks = torch.tensor([random.randrange(P) for _ in range(N)], dtype=torch.int32)
    tokens = torch.tensor([random.randint(0, b) for _ in range(N)], dtype=torch.int64)
    row = random.choice(((K, 2, b, D), (b, D)))
    cells = {name: _cells(random, dtype, held, *row) for name, held in (("target", N), ("source", P))}
    return cells | {"blocks": blocks, "tokens": tokens}


def _copied(target: torch.Tensor, source: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor) -> Answer:
    after = wide(target)
    for n, (block, count) in enumerate(zip(blocks.tolist(), tokens.tolist(), strict=True)):
        after[n, ..., :count, :] = wide(source)[block, ..., :count, :]
    return (after,)


# Experts


def _routing(random: Random, T: int, E: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights (T, k); a token may choose an expert twice."""
    k = random.randint(1, 3)
    ids = torch.tensor([[random.randrange(E) for _ in range(k)] for _ in range(T)], dtype=_index(random))
    return ids.view(T, k), numbers(random, FP32, T, k).abs()


def _paged(random: Random, E: int, held: int) -> torch.Tensor:
    """A page per expert; some have the same, others none."""
    return torch.tensor([random.randrange(-1, held) for _ in range(E)], dtype=_index(random))


def _fused_moe(random: Random) -> Operands:
    T, dtype = random.choice((0, 1, 4, 40)), random.choice((*FLOATS, BF16))
    M, F = random.choice(((64, 32), (128, 96), (24, 40), (8, 8), (33, 17)))
    P, activation = random.choice((1, 3, 6)), random.choice(("swiglu", "swiglu", "geglu", "swiglu-clamped"))
    E = random.choice((P, 2 * P))
    ids, weights = _routing(random, T, E if E > P else P)
    operands = {
        "x": numbers(random, dtype, T, M),
        "gate_up": numbers(random, dtype, P, 2 * F, M, scale=M**-0.5),
        "down": numbers(random, dtype, P, M, F, scale=F**-0.5),
        "ids": ids,
        "weights": weights,
        "activation": activation,
    }
    if E > P or random.random() < 0.5:
        operands["pages"] = _paged(random, E, P)
    if random.random() < 0.25:
        kind = random.choice((torch.int8, torch.uint8, torch.float8_e4m3fn))
        for name in ("gate_up", "down"):
            if operands[name].shape[2] % 2 == 0:
                operands[name] = quantise(operands[name], kind)
    operands |= maybe(random, "gate_up_bias", lambda: numbers(random, dtype, P, 2 * F))
    return operands | maybe(random, "down_bias", lambda: numbers(random, dtype, P, M))


def _grouped_gemm(random: Random) -> Operands:
    layer = _fused_moe(random)
    x, ids, matrices = layer["x"], layer["ids"], layer["gate_up"]
    if random.random() < 0.4:
        x = numbers(random, x.dtype, *ids.shape, x.shape[1])
    operands = {"x": x, "matrices": matrices, "ids": ids}
    for name, own in (("weights", "weights"), ("gate_up_bias", "bias"), ("pages", "pages")):
        if name in layer and (name == "pages" or random.random() < 0.5):
            operands[own] = layer[name]
    return operands


WAYS_TO_PACK = {"pack_experts", "experts_in_place", "experts_of_blocks", "experts_by_node"}


def _packed_experts(random: Random) -> Operands:
    """`packed` tells how the weights get to the op, in which format."""
    packed = random.choice(
        ("pack_experts", "experts_in_place", "experts_in_place", "experts_of_blocks", "experts_by_node")
    )
    T, E = random.choice((0, 1, 3, 20)), random.choice((1, 3))
    M, F = random.choice(((64, 32), (128, 96)))
    dtype, form = BF16, None
    if packed != "experts_in_place":
        M, F = random.choice(((64, 32), (24, 40), (5, 3)) if packed != "experts_of_blocks" else ((64, 64), (128, 192)))
        dtype, form = random.choice(FLOATS), random.choice((None, *Format))
    ids, weights = _routing(random, T, E)
    of_rows = random.choice((FP32, BF16))
    operands = {
        "x": numbers(random, of_rows, T, M),
        "gate_up": numbers(random, dtype, E, 2 * F, M, scale=M**-0.5),
        "down": numbers(random, dtype, E, M, F, scale=F**-0.5),
        "ids": ids,
        "weights": weights,
        "packed": packed,
        "format": form,
    }
    if packed == "pack_experts" and random.random() < 0.3:
        operands |= {name: list(operands[name].unbind()) for name in ("gate_up", "down")}
    if packed != "experts_by_node" and random.random() < 0.5:
        kind = random.choice((FP32, BF16))
        biases = {"gate_up_bias": numbers(random, kind, E, 2 * F), "down_bias": numbers(random, kind, E, M)}
        operands |= {"activation": "swiglu-clamped", **biases}
    operands |= maybe(random, "out", lambda: torch.full((T, M), torch.nan, dtype=of_rows))
    return operands | maybe(random, "exact", lambda: True) | _threads(random)


def _call_layer(gate_up: Any, down: Any, **operands: Any) -> Any:
    return kernels.fused_moe(experts=(gate_up, down), **operands)


def _layer_reference(gate_up: Any, down: Any, **operands: Any) -> Any:
    return kernels.fused_moe_reference(experts=(gate_up, down), **operands)


def _experts(packed: str, gate_up: Any, down: Any, form: Format | None) -> Any:
    if packed == "experts_in_place":
        return kernels.experts_in_place(gate_up, down)
    if packed == "experts_by_node":
        return kernels.experts_by_node(kernels.pack_experts(gate_up, down, format=form, group=64), nodes=[{0}])
    experts = kernels.pack_experts(gate_up, down, format=form, group=64)
    if packed == "pack_experts":
        return experts
    matrices = experts.gate_up, experts.down
    scales = [matrix.scales for matrix in matrices if experts.format.scaled]
    return kernels.experts_of_blocks(*[matrix.blocks for matrix in matrices], *scales)


def _call_experts(packed: str, format: Format | None, gate_up: Any, down: Any, **operands: Any) -> Any:
    return kernels.fused_moe(experts=_experts(packed, gate_up, down, format), **operands)


def _expert_sums(
    x: torch.Tensor,
    gate_up: Any,
    down: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    format: Format | None,
    **others: Any,
) -> Answer:
    options = {name: others[name] for name in ("activation", "gate_up_bias", "down_bias") if name in others}
    first, second = (m if isinstance(m, torch.Tensor) else torch.stack(m) for m in (gate_up, down))
    form = format or (Format.BF16 if first.dtype is BF16 else Format.FP32)
    if form.scaled:  # what rounding to so few bits loses is another test's
        experts = kernels.pack_experts(first, second, format=form, group=64)
        return (torch.from_numpy(kernels.fused_moe_reference(x, experts, ids, weights, **options)),)
    first, second = ((m.bfloat16() if form is Format.BF16 else m).float() for m in (first, second))
    return (kernels.fused_moe_reference(x, (first, second), ids, weights, **options),)


# The router and the two ends of a model


def _route(random: Random) -> Operands:
    E, k = random.choice(((1, 1), (8, 2), (60, 4)))
    groups, kept = random.choice(((1, 1), (4, 2))) if E > 1 else (1, 1)
    operands = {
        "logits": numbers(random, random.choice(FLOATS), random.choice((0, 1, 7)), E, scale=2),
        "k": k,
        "scoring": random.choice(("softmax", "sigmoid")),
        "renormalise": random.random() < 0.5,
        "groups": groups,
        "kept_groups": kept,
    }
    return operands | maybe(random, "bias", lambda: numbers(random, FP32, E)) | maybe(random, "scale", lambda: 2.5)


def _plain_route(random: Random) -> Operands:
    E, k = random.choice(((1, 1), (8, 2), (60, 4)))
    logits = numbers(random, random.choice(ROWS), random.choice((0, 1, 7)), E, scale=2)
    return {"logits": logits, "k": k, "renormalise": random.random() < 0.5} | maybe(random, "scale", lambda: 2.5)


def _routed(**operands: Any) -> Answer:
    found = kernels.route_reference(**operands)
    return found.ids.double(), found.weights


def _with_shared(random: Random) -> Operands:
    ids, weights = _routing(random, random.choice((0, 1, 5)), 8)
    experts = random.choice(([], [8], [8, 9]))
    operands = {"routing": Routing(ids.int(), weights), "experts": experts}
    return operands | maybe(random, "weights", lambda: numbers(random, FP32, len(ids)))


def _shared(routing: Routing, experts: list[int], weights: torch.Tensor | None = None) -> Answer:
    T, n = len(routing.ids), len(experts)
    own = torch.ones(T) if weights is None else weights
    ids = torch.tensor(experts).double().expand(T, n)
    return torch.cat((wide(routing.ids), ids), 1), torch.cat(
        (wide(routing.weights), wide(own)[:, None].expand(T, n)), 1
    )


def _embed(random: Random) -> Operands:
    V, M = random.choice(((1, 1), (10, 7), (40, 64)))
    ids = torch.tensor(random.choices(range(V), k=random.choice((0, 1, 5))), dtype=_index(random))
    return {"ids": ids, "table": numbers(random, random.choice(FLOATS), V, M)}


def _sampled_logits(random: Random) -> Operands:
    T, V, M = random.choice(((1, 1, 1), (4, 10, 7), (6, 40, 64)))
    dtype = random.choice(FLOATS)
    rows = torch.tensor(random.choices(range(T), k=random.choice((0, 1, 5))), dtype=_index(random))
    return {"x": numbers(random, dtype, T, M), "rows": rows, "head": numbers(random, dtype, V, M)}


def _sample(random: Random) -> Operands:
    R, V = random.choice((0, 1, 4)), random.choice((1, 5, 33))
    choices = {
        "temperatures": (0.0, 0.7, 1.0),
        "top_k": (0, 1, 3, 99),
        "top_p": (0.3, 0.9, 1.0),
        "min_p": (0.0, 0.2, 1.0),
        "seeds": range(99),
        "positions": range(99),
    }
    columns = {name: [random.choice(each) for _ in range(R)] for name, each in choices.items()}
    whole = ("top_k", "seeds", "positions")
    draws = Draws(
        **{name: torch.tensor(c, dtype=torch.int64 if name in whole else torch.float64) for name, c in columns.items()}
    )
    return {"logits": numbers(random, FP32, R, V, scale=2)} | maybe(random, "draws", lambda: draws)


def _sampled(logits: torch.Tensor, draws: Draws | None = None) -> Answer:
    """By a loop over the ranking, in whole numbers as the op says."""
    chosen = []
    for r, row in enumerate(wide(logits).tolist()):
        ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
        heat = 0.0 if draws is None else float(draws.temperatures[r])
        if heat == 0:
            chosen.append(ranked[0])
            continue
        gaps = torch.tensor([row[i] - row[ranked[0]] for i in ranked], dtype=torch.float64)
        weights = torch.floor(torch.exp(gaps / heat) * 2.0**32).long()
        sums = weights.cumsum(0).tolist()[: int(draws.top_k[r]) or None]
        nucleus = next(total for total in sums if total >= float(draws.top_p[r]) * sums[-1])
        nucleus = min(nucleus, int(weights[weights >= int(float(draws.min_p[r]) * 2**32)].sum()))
        target = int(uniform(int(draws.seeds[r]), int(draws.positions[r])) * nucleus)
        chosen.append(next(i for i, total in zip(ranked, sums, strict=True) if total > target))
    return (torch.tensor(chosen, dtype=torch.float64),)


def _penalise(random: Random) -> Operands:
    R, V = random.choice((0, 1, 4)), random.choice((1, 5, 33))
    N = random.choice((0, 1, 7, 40)) if R else 0
    return {
        "logits": numbers(random, FP32, R, V, scale=2),
        "rows": torch.tensor([random.randrange(R) for _ in range(N)], dtype=torch.int64),
        "tokens": torch.tensor([random.randrange(V) for _ in range(N)], dtype=torch.int64),
        "generated": torch.tensor([random.random() < 0.5 for _ in range(N)], dtype=torch.bool),
        "repetition": torch.tensor([random.choice((0.5, 1.0, 1.3)) for _ in range(R)], dtype=torch.float64),
        "presence": torch.tensor([random.choice((-1.0, 0.0, 0.7)) for _ in range(R)], dtype=torch.float64),
    }


def _penalised(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    generated: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
) -> Answer:
    """Token by token."""
    pairs = list(zip(rows.tolist(), tokens.tolist(), generated.tolist(), strict=True))
    out = list(wide(logits).unbind())
    for r, v in {(r, v) for r, v, _ in pairs}:
        own = wide(logits)[r, v]
        own = own / repetition[r] if own > 0 else own * repetition[r]
        lower = own - presence[r] if (r, v, True) in pairs else own
        out[r] = out[r].index_put((torch.tensor(v),), lower)
    return (torch.stack(out) if out else wide(logits),)


def _logprobs(random: Random) -> Operands:
    R, V = random.choice((0, 1, 4)), random.choice((1, 5, 33))
    tokens = torch.tensor([random.randrange(V) for _ in range(R)], dtype=torch.int64)
    operands = {"logits": numbers(random, FP32, R, V, scale=9), "tokens": tokens}
    return operands | maybe(random, "best", lambda: random.choice((0, 1, 4, 99)))


def _log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, best: int = 0) -> Answer:
    every = wide(logits) - wide(logits).exp().sum(1, keepdim=True).log()
    ids = logits.sort(dim=1, descending=True).indices[:, :best]
    return every.gather(1, tokens[:, None])[:, 0], ids.double(), every.gather(1, ids)


def _quantise(random: Random) -> Operands:
    P, R, C = random.choice(((1, 1, 2), (2, 3, 64), (3, 5, 32)))
    kind = random.choice((torch.int8, torch.uint8, torch.float8_e4m3fn))
    weight = numbers(random, random.choice(FLOATS), P, R, C)
    return {"weight": weight, "kind": kind, "group": random.choice((None, C // 2 if C > 2 else C))}


def _weights(weight: torch.Tensor, kind: torch.dtype, group: int | None = None) -> Answer:
    return (wide(weight),)


def _quantised_and_back(**operands: Any) -> torch.Tensor:
    return kernels.dequantise(quantise(**operands), FP32)


def _steps(random: Random) -> Operands:
    return {"weight": quantise(**_quantise(random)), "dtype": random.choice(FLOATS)}


def _dequantised(weight: Quantised, dtype: torch.dtype) -> Answer:
    """Number by number."""
    pages, rows, columns = weight.shape
    group = columns // weight.scales.shape[2]
    out = torch.empty(pages, rows, columns, dtype=torch.float64)
    for c in range(columns):
        first, within = c // group, c % group
        if weight.values.dtype is torch.uint8:
            byte = weight.values[:, :, first * group // 2 + within % (group // 2)]
            number = ((byte >> 4) if within >= group // 2 else (byte & 15)).double() - 8
        else:
            number = wide(weight.values[:, :, c])
        out[:, :, c] = number * wide(weight.scales[:, :, first])
    return (out,)


# What the kernels are measured against


def _memory(random: Random) -> Operands:
    words = torch.tensor([random.randrange(99) for _ in range(random.choice((0, 100, 256, 600)))], dtype=torch.int32)
    return {"memory": words} | maybe(random, "threads", lambda: 2)


def _modulo(read: Callable[..., int]) -> Callable[..., int]:
    """Sums are of words of 32 bits, some of which wrap."""
    return lambda **operands: read(**operands) % 2**32


def _words(memory: torch.Tensor, threads: int = 1) -> Answer:
    return (torch.tensor(_sum_of_words(memory) % 2**32).double(),)


def _sum_of_words(memory: torch.Tensor) -> int:
    """Of 32 bits, without a remainder below 1 KiB."""
    read = raw(memory).tobytes()
    return int(np.frombuffer(read[: len(read) // 1024 * 1024], np.int32).sum(dtype=np.int64))


def _blocks(random: Random) -> Operands:
    b, D = 16, 16
    lengths = [random.choice((16, 32)) for _ in range(random.choice((1, 2)))]
    pages = random.sample(range(5), 5)
    table = torch.tensor([[pages.pop(), pages.pop()] for _ in lengths], dtype=torch.int32)
    kv = torch.full((5, 1, 2, b, D), random.randrange(1, 9), dtype=torch.int32)
    return {"kv": kv, "table": table, "lengths": torch.tensor(lengths, dtype=torch.int64)}


def _block_words(kv: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> Answer:
    used = [int(table[s, column]) for s, length in enumerate(lengths.tolist()) for column in range(length // 16)]
    words = sum(_sum_of_words(half) for page in used for half in kv[page].flatten(0, 1))
    return (torch.tensor(words % 2**32).double(),)


TORCH = (None, "torch")
BOTH = ("tensor", "array")
ROWS = (FP32, BF16)
"""Types of Numba's kernels on rows."""


def at_most(limit: float) -> Callable[[Operands], float]:
    """The same limit for all operands."""
    return lambda _: limit


def _by(name: str, limits: dict[torch.dtype, float]) -> Callable[[Operands], float]:
    """By the type of an operand; another has none, and is to be refused."""
    return lambda operands: limits.get(operands[name].dtype, 0.0)


def _of_experts(operands: Operands) -> float:
    """As the docstring of `fused_moe` says of packed experts."""
    form = operands["format"]
    if form is not None and form.scaled:
        return 3e-2
    rounded = form is Format.BF16 or operands["gate_up"][0].dtype is BF16
    of_out = 3e-3 if operands["x"].dtype is BF16 else 0.0
    return of_out + (5e-3 if rounded and not operands.get("exact") else 2e-6)


def _of_layers(operands: Operands) -> float:
    """As the docstring of `fused_moe` says; a few small rows may be off by half as much again."""
    return TWICE_X(operands) * (1.5 if operands["ids"].numel() < 8 else 1)


def _of_appended(operands: Operands) -> float:
    return 1e-2 if operands["kv"].dtype is torch.int8 else 0.0


NORMS = _without(kernels.rms_norm_reference)
GATES = _without(kernels.gated_reference)
TURNS = _without(kernels.rope_reference)
DECODES = _into_out(_without(kernels_cpu.decode_attention_reference, "threads", "path", "out"))
NUMBAS_LATENT_DECODES = _into_out(_without(kernels_cpu.mla_decode_reference, "threads", "path", "out"))
LATENT_DECODES = _without(kernels.mla_decode_reference)
PAGED_DECODES = _without(kernels.decode_attention_reference)
PROMPTS = _without(kernels.prefill_attention_reference)
LAYERS = _without(_layer_reference)
PRODUCTS = _without(grouped_gemm_reference)
OUT = frozenset({"out"})
TWICE_X, ONCE_X, TWICE_Q = _by("x", TWICE), _by("x", ONCE), _by("q", TWICE)
NEAR, SAME = at_most(1e-5), at_most(0.0)

DOORS = {
    "rms_norm": Door(_norm(FLOATS), kernels.rms_norm, NORMS, TWICE_X, kinds=BOTH, backends=TORCH),
    "add_rms_norm": Door(_norm(FLOATS, "residual"), kernels.add_rms_norm, _added, TWICE_X, kinds=BOTH, backends=TORCH),
    "layer_norm": Door(
        _layer_norm, kernels.layer_norm, _without(kernels.layer_norm_reference), TWICE_X, kinds=BOTH, backends=TORCH
    ),
    "linear": Door(_linear, kernels.linear, _without(kernels.linear_reference), TWICE_X, kinds=BOTH),
    "gated": Door(_gated(FLOATS), kernels.gated, GATES, ONCE_X, kinds=BOTH, backends=TORCH),
    "rope": Door(_rope(FLOATS), kernels.rope, TURNS, ONCE_X, kinds=BOTH, backends=TORCH),
    "rope_table": Door(_draw_table, kernels.rope_table, _table, NEAR),
    "kernels_cpu.rms_norm": Door(_norm(ROWS), kernels_cpu.rms_norm, NORMS, TWICE_X, kinds=BOTH),
    "kernels_cpu.add_rms_norm": Door(_norm(ROWS, "residual"), kernels_cpu.add_rms_norm, _added, TWICE_X, kinds=BOTH),
    "kernels_cpu.gated": Door(_gated(ROWS), kernels_cpu.gated, GATES, ONCE_X, kinds=BOTH),
    "kernels_cpu.rope": Door(_rope(ROWS), kernels_cpu.rope, TURNS, ONCE_X, kinds=BOTH),
    "kernels_cpu.decode_attention": Door(
        _numba_decode, kernels_cpu.decode_attention, DECODES, at_most(3e-6), OUT, BOTH
    ),
    "kernels_cpu.mla_decode": Door(
        _numba_mla_decode, kernels_cpu.mla_decode, NUMBAS_LATENT_DECODES, at_most(3e-6), OUT, BOTH
    ),
    "mla_decode": Door(_mla_decode, kernels.mla_decode, LATENT_DECODES, TWICE_Q, kinds=BOTH, backends=TORCH),
    "decode_attention": Door(
        _decode_attention, kernels.decode_attention, PAGED_DECODES, TWICE_Q, kinds=BOTH, backends=TORCH
    ),
    "prefill_attention": Door(
        _prefill_attention, kernels.prefill_attention, PROMPTS, TWICE_Q, kinds=BOTH, backends=TORCH
    ),
    "kernels_cpu.append_kv": Door(
        _numba_append, kernels_cpu.append_kv, _appended, _of_appended, frozenset({"kv", "scales"}), BOTH
    ),
    "append_kv": Door(_append_kv, kernels.append_kv, _appended, SAME, frozenset({"kv"}), BOTH, TORCH),
    "gather_kv": Door(_gather_kv, kernels.gather_kv, _gathered, SAME, kinds=BOTH, backends=TORCH),
    "copy_blocks": Door(_copy_blocks, kernels.copy_blocks, _copied, SAME, frozenset({"target"}), BOTH),
    "fused_moe": Door(_fused_moe, _call_layer, LAYERS, _of_layers, kinds=BOTH, backends=TORCH),
    "grouped_gemm": Door(_grouped_gemm, kernels.grouped_gemm, PRODUCTS, _of_layers, kinds=BOTH, backends=TORCH),
    "kernels_cpu.fused_moe": Door(_packed_experts, _call_experts, _into_out(_expert_sums), _of_experts, OUT, BOTH),
    "route": Door(_route, kernels.route, _routed, NEAR, kinds=BOTH, backends=TORCH),
    "kernels_cpu.route": Door(
        _plain_route, lambda **operands: Routing(*kernels_cpu.route(**operands)), _routed, NEAR, kinds=BOTH
    ),
    "with_shared": Door(_with_shared, kernels.with_shared, _shared, SAME, kinds=BOTH),
    "embed": Door(
        _embed, kernels.embed, lambda ids, table: (wide(table)[ids.long()],), SAME, kinds=BOTH, backends=TORCH
    ),
    "sampled_logits": Door(
        _sampled_logits,
        kernels.sampled_logits,
        lambda x, rows, head: (wide(x)[rows.long()] @ wide(head).T,),
        NEAR,
        kinds=BOTH,
        backends=TORCH,
    ),
    "sample": Door(_sample, kernels.sample, _sampled, SAME, kinds=BOTH, backends=TORCH),
    "penalise": Door(_penalise, kernels.penalise, _penalised, at_most(ONCE[FP32]), kinds=BOTH),
    "logprobs": Door(_logprobs, kernels.logprobs, _log_probabilities, at_most(ONCE[FP32]), kinds=BOTH),
    "quantise": Door(_quantise, _quantised_and_back, _weights, at_most(0.2)),
    "dequantise": Door(_steps, kernels.dequantise, _dequantised, lambda operands: TWICE[operands["dtype"]]),
    "read_memory": Door(_memory, _modulo(kernels.read_memory), _words, SAME, kinds=BOTH),
    "read_blocks": Door(_blocks, _modulo(kernels.read_blocks), _block_words, SAME, kinds=BOTH),
}


DISPATCHED = {
    "decode_attention with Numba's arguments": replace(
        DOORS["kernels_cpu.decode_attention"],
        call=kernels.decode_attention,
        limit=_by("q", TWICE | {FP32: 3e-6}),
        backends=(None, None, None, "torch"),
    ),
    "mla_decode with Numba's arguments": replace(
        DOORS["kernels_cpu.mla_decode"],
        call=kernels.mla_decode,
        limit=_by("q", TWICE | {FP32: 3e-6}),
        backends=(None, None, None, "torch"),
    ),
    "append_kv with scales": replace(
        DOORS["kernels_cpu.append_kv"], call=kernels.append_kv, backends=(None, None, None, "torch")
    ),
}
"""The same operands as Numba's wrappers take, given to the door, which chooses."""


def without_a_door() -> list[str]:
    """Operations that a kernel package declares and the table lacks: no law would meet them.

    Numba's wrapper of an operation that both packages have wants an entry beside the door's.
    """
    wanted = {}
    for name, declared in collected.doors().items():
        if declared.on_cpu is not None:
            wanted[f"kernels_cpu.{name}"] = name if declared.on_gpu is None else f"kernels_cpu.{name}"
        if declared.on_gpu is not None:
            wanted[f"kernels_triton.{name}"] = name
    return [own for own, entry in wanted.items() if entry not in DOORS]
