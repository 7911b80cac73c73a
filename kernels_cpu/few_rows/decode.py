"""Decode attention of few rows: append their keys and values, and attend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.extending import overload
from numpy.typing import NDArray

from ..arguments import Operand, SameKind, checked, contiguous, writeable
from ..attention.tasks import Cache, server
from ..codegen.compiled import compiled, literal
from ..codegen.numerics import LOG2_E
from ..codegen.rounding import narrowed, widened
from ..codegen.vector_ir import LINE, Storage
from ..codegen.views import pointer
from ..declarations import public
from ..machine.features import CodePath, code_path
from ..machine.parameters import parameters
from ..threads.crew import crew
from ..threads.runs import RUN
from .linear import DTYPES
from .operands import memory_of, new_rows, rows_at, storage_of, uses

_ALONE = parameters().few_rows.alone_bytes


def _serve_tasks(
    lanes: Any, storage: Any, group: Any, dim: Any, counter: Any, q: Any, geometry: Any, of_scales: Any, table: Any,
    tasks: Any, first: Any, scale: Any, out: Any,
) -> None:  # fmt: skip
    """Serve tasks as one thread of `decode` without options; for compiled code only."""
    raise NotImplementedError


@overload(_serve_tasks, strict=False, prefer_literal=True)
def _served(
    lanes: Any, storage: Any, group: Any, dim: Any, counter: Any, q: Any, geometry: Any, of_scales: Any, table: Any,
    tasks: Any, first: Any, scale: Any, out: Any,
) -> Callable[..., None]:  # fmt: skip
    size = literal(dim)
    serve = server(CodePath(literal(lanes)), Storage(literal(storage)), literal(group), size, size, False)

    def served(
        lanes: Any, storage: Any, group: Any, dim: Any, counter: Any, q: Any, geometry: Any, of_scales: Any,
        table: Any, tasks: Any, first: Any, scale: Any, out: Any,
    ) -> None:  # fmt: skip
        none = first[:0].view(np.float32)
        several = none.reshape((0, 1))
        cap = np.float32(0)
        serve(
            counter, q, geometry, of_scales, table, tasks, first, first[:0], scale, cap, none, several, several,
            several, out,
        )  # fmt: skip

    return served


@functools.cache
def _appender(stored: Storage, of_rows: Storage) -> Any:
    cell = DTYPES[stored]
    number = DTYPES[of_rows]

    @compiled()
    def append(cache: int, sizes: Any, tokens: int, slots: int, k: int, v: int) -> bool:
        blocks, kv_heads, block, dim = sizes
        kv = carray(pointer(cache), (blocks, kv_heads, 2, block, dim), cell)
        where = carray(pointer(slots), (tokens,), np.int64)
        keys = carray(pointer(k), (tokens, kv_heads, dim), number)
        values = carray(pointer(v), (tokens, kv_heads, dim), number)
        for t in range(tokens):
            if not 0 <= where[t] < blocks * block:
                return False
        for t in range(tokens):
            page = where[t] // block
            offset = where[t] - page * block
            for h in range(kv_heads):
                key = kv[page, h, 0, offset]
                value = kv[page, h, 1, offset]
                for d in range(dim):
                    key[d] = narrowed(widened(keys[t, h, d]), key[d])
                    value[d] = narrowed(widened(values[t, h, d]), value[d])
        return True

    return append


@functools.cache
def _attender(lanes: int, storage: Storage, group: int, dim: int, of_rows: Storage) -> Any:
    """Compile attention of rows of a format for a shape; `storage` is the cache's."""
    number = DTYPES[of_rows]
    stored = int(storage)

    @compiled()
    def attend(
        geometry: Any, of_scales: Any, memory: Any, blocks: int, scale: Any, tokens: int, width: int, q: int,
        tables: int, spans: int, out: int,
    ) -> bool:  # fmt: skip
        block = geometry[1]
        heads = geometry[6] * group
        table = carray(pointer(tables), (tokens, width), np.int32)
        lengths = carray(pointer(spans), (tokens,), np.int64)
        given = carray(pointer(q), (tokens, heads, dim), number)
        counter = carray(pointer(memory[0]), (2 * LINE // 8,), np.int64)
        tasks = carray(pointer(memory[1]), (tokens, 4), np.int64)
        first = carray(pointer(memory[2]), (tokens + 1,), np.int64)
        queries = carray(pointer(memory[3]), (tokens, heads, dim), np.float32)
        found = carray(pointer(memory[4]), (tokens, heads, dim), np.float32)
        result = carray(pointer(out), (tokens, heads, dim), number)
        counter[:] = 0
        first[0] = 0
        for s in range(tokens):
            if not 1 <= lengths[s] <= width * block:
                return False
            for place in range((lengths[s] + block - 1) // block):
                if not 0 <= table[s, place] < blocks:
                    return False
            tasks[s, 0] = s
            tasks[s, 1] = 0
            tasks[s, 2] = lengths[s]
            tasks[s, 3] = s
            first[s + 1] = s + 1
            for h in range(heads):
                for d in range(dim):
                    queries[s, h, d] = widened(given[s, h, d])
        at = np.int64(counter.ctypes.data)
        _serve_tasks(lanes, stored, group, dim, at, queries, geometry, of_scales, table, tasks, first, scale, found)
        for s in range(tokens):
            for h in range(heads):
                for d in range(dim):
                    result[s, h, d] = narrowed(found[s, h, d], result[s, h, d])
        return True

    return attend


@public
class FewDecode:
    """Attention of at most four new tokens over one layer's paged cache, which is held and checked once.

    As `decode_attention` without options, and `append_kv`: rows are of the model's type instead of fp32, and rounded
    once. The calling thread reads the cache alone, which is slower than several for long sequences (`is_short`).

    Parameters
    ----------
    kv : (P, K, 2, b, D) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits, C-contiguous
        The cache, read and written in place.
    heads : int
        Query heads H.
    path : CodePath, optional
        Code path, by default this computer's own (`features`).

    Raises
    ------
    TypeError
        If the cache is neither an array nor a tensor, or has another dtype.
    ValueError
        If its shape or memory layout is another, or H is no multiple of K.

    Examples
    --------
    A sequence of one token gives that token's value.

    >>> kv = np.zeros((1, 1, 2, 4, 2), np.float32)
    >>> cache = FewDecode(kv, heads=1)
    >>> cache.append(np.array([0]), np.ones((1, 2), np.float32), np.array([[3, 5]], np.float32))
    >>> cache(np.ones((1, 2), np.float32), np.zeros((1, 1), np.int32), np.ones(1, np.int64))
    array([[3., 5.]], dtype=float32)
    """

    def __init__(self, kv: Operand, heads: int, *, path: CodePath | None = None) -> None:
        cache = writeable("kv", checked("kv", kv, "P K 2 b D", np.float32, np.uint16))
        if cache.shape[2] != 2 or 0 in cache.shape[1:] or heads < 1 or heads % cache.shape[1]:
            raise ValueError(
                f"kv must have shape (P, K, 2, b, D), with K a divisor of the {heads} query heads, not {cache.shape}: "
                "pass the cache and the heads of one model."
            )
        self._kv = cache
        self._heads = heads
        self._path = code_path(path)
        self._cache = Cache.of(cache)
        self._geometry = self._cache.geometry, self._cache.of_scales.geometry
        self._scale = cache.shape[4] ** -0.5
        self._serve_scale = np.float32(self._scale * LOG2_E)
        blocks, kv_heads, _, block, dim = cache.shape
        self._sizes = blocks, kv_heads, block, dim
        width = heads * dim
        self._uses = uses(
            ("counter", np.int64, 2 * LINE // 8),
            ("tasks", np.int64, 4),
            ("first", np.int64, 2),
            ("queries", np.float32, width),
            ("found", np.float32, width),
        )

    def append(self, slots: Operand, k: Operand, v: Operand) -> None:
        """Store rows k and v (T, K D), T in 1 .. 4, of one type, in slots (T,) int64: block * b + offset of each.

        Raises
        ------
        TypeError
            If slots have another dtype.
        ValueError
            If shapes disagree, or a slot is out of range; then nothing is stored.
        """
        blocks, kv_heads, block, dim = self._sizes
        of_rows = storage_of(k.dtype)
        tokens, keys = rows_at("k", k, kv_heads * dim, of_rows)
        count, values = rows_at("v", v, kv_heads * dim, of_rows)
        where = contiguous("slots", checked("slots", slots, "T", np.int64))
        store = _appender(self._cache.storage, of_rows)
        if not len(where) == tokens == count or not store(
            self._cache.address, self._sizes, tokens, where.__array_interface__["data"][0], keys, values
        ):
            raise ValueError(
                f"slots must be one per row of k and v in [0, {blocks * block}), not {where.tolist()} for {tokens} and "
                f"{count} rows: pass block * b + offset of allocated blocks."
            )

    def is_short(self, lengths: NDArray[np.int64]) -> bool:
        """Tell whether one thread reads so many tokens (T,) as fast as several, and as `decode_attention` sums them."""
        _, kv_heads, _, _ = self._sizes
        read = int(lengths.sum()) * 2 * kv_heads * self._cache.row_bytes
        return read <= _ALONE and int(lengths.max()) <= RUN

    def __call__(self, q: SameKind, table: Operand, lengths: Operand) -> SameKind:
        """Attend with q (T, H D), T in 1 .. 4: -> (T, H D) of q's kind and type.

        Blocks of each sequence are in table (T, W) int32, their numbers of tokens in lengths (T,) int64.

        Raises
        ------
        TypeError
            If table or lengths have another dtype.
        ValueError
            If shapes disagree, or a length or a used block is out of range.
        """
        blocks, kv_heads, block, dim = self._sizes
        of_rows = storage_of(q.dtype)
        tokens, at = rows_at("q", q, self._heads * dim, of_rows)
        pages = contiguous("table", checked("table", table, "B W", np.int32))
        spans = contiguous("lengths", checked("lengths", lengths, "B", np.int64))
        attend = _attender(self._path.value, self._cache.storage, self._heads // kv_heads, dim, of_rows)
        own = crew(self._path.value)
        out: SameKind
        out, to = new_rows(q, tokens, self._heads * dim)
        right = len(pages) == len(spans) == tokens and attend(
            *self._geometry, memory_of(own, self._uses), blocks, self._serve_scale, tokens, pages.shape[1], at,
            pages.__array_interface__["data"][0], spans.__array_interface__["data"][0], to,
        )  # fmt: skip
        if not right:
            raise ValueError(
                f"lengths must be {tokens} numbers in 1 .. W b = {pages.shape[1] * block}, and what they use of table "
                f"blocks in [0, {blocks}), not {spans.tolist()} with {pages.tolist()}: pass one batch."
            )
        return out
