"""Calls that a search times, of the kernels of one group; large operands are read from memory, as in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workbench.bench.cpu.attention import DIM, HEADS, Attention, DecodeCase, pool_elements, uneven
from workbench.bench.cpu.work import Layer, random_pool
from workbench.hardware import usable_cores
from workbench.kernels import (
    FewLinear,
    Format,
    PackedExperts,
    PagedDecode,
    decode_attention,
    decode_attention_reference,
    fused_moe,
    fused_moe_reference,
    linear,
    pack_experts,
    rms_norm,
)

Call = Callable[[], object]

_SEQUENCES = 24
_MODEL = 2048
_INNER = 4096
"""Model and expert dim of the two experts, which are read by turns."""
_TOKENS = (1, 3, 6, 16, 128)
_ROWS = 32
"""Rows of a batch of decodes."""
_SMALL = 256
"""Model and expert dim of experts that one thread computes about as fast as several."""
_ERROR = 0.03
"""Most relative error of results, of which activations that are rounded to bytes take the most."""


def calls_of(group: str) -> Mapping[str, Call]:
    """The calls of a group of kernels, by name; each is compiled, and results of attention and experts are checked.

    Raises
    ------
    ArithmeticError
        If a result is wrong.
    """
    makers: Mapping[str, Callable[[], Mapping[str, Call]]] = {
        "attention": _attention,
        "experts": _experts,
        "few_rows": _few_rows,
        "rows": _rows,
    }
    calls = makers[group]()
    for call in calls.values():
        call()
    return calls


def _threads() -> list[int]:
    return sorted({1, usable_cores()})


def _named(what: str, threads: int) -> str:
    return f"{what}, {threads} thread{'s' if threads > 1 else ''}"


def _attention() -> dict[str, Call]:
    cases = [DecodeCase(f"G={group}", uneven(_SEQUENCES), group) for group in (1, 4, 8)]
    cases.append(DecodeCase("one sequence, G=4", np.array([_SEQUENCES * 1024]), 4))
    pool = random_pool(pool_elements(cases))
    calls = dict[str, Call]()
    for case in cases:
        work = Attention(case, pool, peers=())
        q, kv, table, lengths = work.operands
        first = q[:1], kv, table[:1], lengths[:1]
        _check(case.name, decode_attention(*first), decode_attention_reference(*first))
        for threads in _threads():
            calls[_named(case.name, threads)] = _with(work.implementations["ours"], threads)
    return calls


def _experts() -> dict[str, Call]:
    layer = Layer(random_pool(6 * _MODEL * _INNER), model=_MODEL, inner=_INNER)
    calls = dict[str, Call]()
    for format in (Format.BF16, Format.INT8, Format.INT4):
        packed = layer.packed if format is Format.BF16 else pack_experts(layer.gate_up, layer.down, format=format)
        for tokens in _TOKENS:
            turns = _Turns(packed, tokens)
            turns.check(f"experts in {format.name}")
            for threads in _threads() if tokens < max(_TOKENS) else _threads()[-1:]:
                calls[_named(f"experts in {format.name}, {tokens} tokens", threads)] = _with(turns, threads)
    few = Layer(random_pool(6 * _SMALL * _SMALL), model=_SMALL, inner=_SMALL)
    calls["small experts, 1 token"] = _with(_Turns(few.packed, 1, model=_SMALL), usable_cores())
    return calls


class _Turns:
    """Some tokens of one expert and then of the other, so that neither stays in a cache."""

    def __init__(self, experts: PackedExperts, tokens: int, *, model: int = _MODEL) -> None:
        self._experts = experts
        self._h = np.random.default_rng(0).standard_normal((tokens, model), dtype=np.float32)
        self._ids = np.zeros((tokens, 1), np.int64)
        self._weights = np.ones((tokens, 1), np.float32)

    def __call__(self, threads: int) -> object:
        self._ids ^= 1
        return fused_moe(self._h, self._experts, self._ids, self._weights, threads=threads)

    def check(self, name: str) -> None:
        """Raise ArithmeticError if the last token's result is wrong."""
        found = np.asarray(self(usable_cores()))[-1:]
        _check(name, found, fused_moe_reference(self._h[-1:], self._experts, self._ids[-1:], self._weights[-1:]))


def _few_rows() -> dict[str, Call]:
    some = random_pool(8 * _MODEL * _MODEL).reshape(2, 4 * _MODEL, _MODEL)
    stages = [FewLinear(matrix) for matrix in some]

    def multiply(count: int) -> Callable[[int], object]:
        rows = some[0, :count]
        return lambda threads: [stage(rows, threads=threads) for stage in stages]

    weights = torch.from_numpy(some).view(torch.bfloat16)
    rows = weights[0, :_ROWS]

    def multiply_many(threads: int) -> object:
        torch.set_num_threads(threads)
        both = zip(stages, weights, strict=True)
        return [stage(rows, threads=threads) if stage.most >= _ROWS else linear(rows, weight) for stage, weight in both]

    calls = {_named("matrices, 1 row", threads): _with(multiply(1), threads) for threads in _threads()}
    calls |= {_named("matrices, 4 rows", threads): _with(multiply(4), threads) for threads in _threads()}
    calls |= {_named(f"matrices, {_ROWS} rows", threads): _with(multiply_many, threads) for threads in _threads()}
    for tokens in (64, 256, 512):
        calls[f"one sequence of {tokens} tokens, 1 row"] = _Few(tokens)
    return calls


class _Few:
    """Attention of one row over a short sequence, by the way that the engine takes."""

    def __init__(self, tokens: int) -> None:
        kv = random_pool(tokens * HEADS * 2 * DIM).reshape(1, HEADS, 2, tokens, DIM)
        self._stage = PagedDecode(kv, heads=4 * HEADS)
        self._q = np.random.default_rng(0).standard_normal((1, 4 * HEADS * DIM), dtype=np.float32)
        self._rest = np.zeros((1, 1), np.int32), np.array([tokens])

    def __call__(self) -> object:
        return self._stage(self._q, *self._rest)


def _rows() -> dict[str, Call]:
    rows = np.random.default_rng(0).standard_normal((128, _MODEL), dtype=np.float32)
    weight = np.ones(_MODEL, np.float32)

    def norm(count: int) -> Call:
        """A norm whose operands stay in a cache: others take times that differ by a tenth from process to process."""
        return lambda: rms_norm(rows[:count], weight)

    return {f"norms of {count} rows": norm(count) for count in (32, 64, 128)}


def _with(call: Callable[[int], object], threads: int) -> Call:
    return lambda: call(threads)


def _check(name: str, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error <= _ERROR:
        raise ArithmeticError(f"{name}: relative error {error:.2g}, at most {_ERROR:g} is expected.")
