"""Decode attention over a cache that is held: append keys and values of a few rows or many, and attend."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.extending import overload
from numpy.typing import NDArray

from ..arguments import Operand, SameKind, checked, contiguous, writeable
from ..attention.operands import Options, check_blocks, options_of
from ..attention.tasks import Cache, decode, server
from ..codegen.compiled import compiled, literal
from ..codegen.numerics import LOG2_E
from ..codegen.rounding import narrowed, widened
from ..codegen.vector_ir import LINE, Storage
from ..codegen.views import pointer
from ..declarations import public
from ..machine.features import CodePath, code_path
from ..machine.parameters import parameters
from ..threads.runs import count_tasks, list_tasks
from .linear import DTYPES
from .operands import new_rows, rows_at, storage_of

_ALONE = parameters().few_rows.alone_bytes
_NONE = np.empty(0, np.float32)


def _serve_tasks(
    lanes: Any, storage: Any, group: Any, dim: Any, counter: Any, q: Any, geometry: Any, of_scales: Any, table: Any,
    tasks: Any, first: Any, left: Any, scale: Any, sinks: Any, tops: Any, totals: Any, sums: Any, out: Any,
) -> None:  # fmt: skip
    """Serve tasks as one thread of `decode` without a cap; for compiled code only."""
    raise NotImplementedError


@overload(_serve_tasks, strict=False, prefer_literal=True)
def _served(
    lanes: Any, storage: Any, group: Any, dim: Any, counter: Any, q: Any, geometry: Any, of_scales: Any, table: Any,
    tasks: Any, first: Any, left: Any, scale: Any, sinks: Any, tops: Any, totals: Any, sums: Any, out: Any,
) -> Callable[..., None]:  # fmt: skip
    size = literal(dim)
    serve = server(CodePath(literal(lanes)), Storage(literal(storage)), literal(group), size, size, False)

    def served(
        lanes: Any, storage: Any, group: Any, dim: Any, counter: Any, q: Any, geometry: Any, of_scales: Any,
        table: Any, tasks: Any, first: Any, left: Any, scale: Any, sinks: Any, tops: Any, totals: Any, sums: Any,
        out: Any,
    ) -> None:  # fmt: skip
        cap = np.float32(0)
        serve(
            counter, q, geometry, of_scales, table, tasks, first, left, scale, cap, sinks, tops, totals, sums, out
        )  # fmt: skip

    return served


@compiled()
def _widen(rows: Any, wide: Any) -> None:
    """Rows (T, H, D) as fp32."""
    tokens, heads, dim = rows.shape
    for s in range(tokens):
        for h in range(heads):
            for d in range(dim):
                wide[s, h, d] = widened(rows[s, h, d])


@compiled()
def _narrow(wide: Any, rows: Any) -> None:
    """fp32 numbers (T, H, D) rounded to the type of the rows."""
    tokens, heads, dim = rows.shape
    for s in range(tokens):
        for h in range(heads):
            for d in range(dim):
                rows[s, h, d] = narrowed(wide[s, h, d], rows[s, h, d])


@compiled()
def _first_tokens(table: Any, lengths: Any, window: int, blocks: int, block: int, begins: Any) -> bool:
    """Fill in the first token that each sequence reads; 0 is no window.

    False if a length, or a block that is read, is out of range.
    """
    for s in range(len(lengths)):
        if not 1 <= lengths[s] <= table.shape[1] * block:
            return False
        begins[s] = max(0, lengths[s] - window) if window else 0
        for place in range(begins[s] // block, (lengths[s] + block - 1) // block):
            if not 0 <= table[s, place] < blocks:
                return False
    return True


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
    """Compile attention of rows of a format for a shape, by one thread; `storage` is the cache's."""
    number = DTYPES[of_rows]
    stored = int(storage)

    @compiled()
    def attend(
        geometry: Any, of_scales: Any, blocks: int, scale: Any, window: int, sinks: Any, tokens: int, width: int,
        q: int, tables: int, spans: int, out: int,
    ) -> bool:  # fmt: skip
        heads = geometry[6] * group
        table = carray(pointer(tables), (tokens, width), np.int32)
        lengths = carray(pointer(spans), (tokens,), np.int64)
        given = carray(pointer(q), (tokens, heads, dim), number)
        result = carray(pointer(out), (tokens, heads, dim), number)
        begins = np.empty(tokens, np.int64)
        if not _first_tokens(table, lengths, window, blocks, geometry[1], begins):
            return False
        tasks = np.empty((count_tasks(begins, lengths), 4), np.int64)
        first = np.empty(tokens + 1, np.int64)
        list_tasks(begins, lengths, tasks, first)
        left = first[1:] - first[:-1]
        several = len(tasks) if len(tasks) > tokens else 0
        tops = np.empty((several, heads), np.float32)
        totals = np.empty((several, heads), np.float32)
        sums = np.empty((several, heads * dim), np.float32)
        queries = np.empty((tokens, heads, dim), np.float32)
        found = np.empty((tokens, heads, dim), np.float32)
        counter = np.zeros(2 * LINE // 8, np.int64)
        _widen(given, queries)
        at = np.int64(counter.ctypes.data)
        _serve_tasks(
            lanes, stored, group, dim, at, queries, geometry, of_scales, table, tasks, first, left, scale, sinks,
            tops, totals, sums, found,
        )  # fmt: skip
        _narrow(found, result)
        done: bool = counter[LINE // 8] == len(tasks)  # Numba frees an array behind its last use
        return done

    return attend


@public
class PagedDecode:
    """Decode attention over one layer's paged cache, which is held and checked once.

    As `decode_attention` and `append_kv`, for rows (T, H D) of the model's type instead of fp32, rounded once. Each is
    one compiled call where one thread computes, and the GIL is released.

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
    >>> cache = PagedDecode(kv, heads=1)
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
        blocks, kv_heads, _, block, dim = cache.shape
        self._sizes = blocks, kv_heads, block, dim

    def append(self, slots: Operand, k: Operand, v: Operand) -> None:
        """Store rows k and v (T, K D) of one type, in slots (T,) int64: block * b + offset of each.

        Raises
        ------
        TypeError
            If slots have another dtype.
        ValueError
            If shapes disagree, or a slot is out of range; then nothing is stored.
        """
        blocks, kv_heads, block, dim = self._sizes
        of_rows = storage_of(k.dtype)
        tokens, keys = rows_at("k", k, kv_heads * dim, of_rows, most=math.inf)
        count, values = rows_at("v", v, kv_heads * dim, of_rows, most=math.inf)
        where = contiguous("slots", checked("slots", slots, "T", np.int64))
        if not len(where) == tokens == count:
            raise ValueError(
                f"slots must be one per row of k and v, not {len(where)} for {tokens} and {count} rows: pass one batch."
            )
        store = _appender(self._cache.storage, of_rows)
        at = where.__array_interface__["data"][0]
        if not store(self._cache.address, self._sizes, tokens, at, keys, values):
            outside = where[(where < 0) | (where >= blocks * block)][0]
            raise ValueError(
                f"slots must be in [0, {blocks * block}), not {outside}: pass block * b + offset of allocated blocks."
            )

    def __call__(
        self,
        q: SameKind,
        table: Operand,
        lengths: Operand,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Operand | None = None,
        threads: int | None = None,
    ) -> SameKind:
        """Attend with q (T, H D): -> (T, H D) of q's kind and type, the same for any number of threads.

        Blocks of each sequence are in table (T, W) int32, their numbers of tokens in lengths (T,) int64; the options
        are those of `decode_attention`. The calling thread reads alone what it has read before another would wake.

        Raises
        ------
        TypeError
            If table, lengths or sinks have another dtype.
        ValueError
            If shapes disagree, or a length, a used block or an option is out of range.
        """
        blocks, kv_heads, block, dim = self._sizes
        of_rows = storage_of(q.dtype)
        tokens, at = rows_at("q", q, self._heads * dim, of_rows, most=math.inf)
        pages = contiguous("table", checked("table", table, "B W", np.int32))
        spans = contiguous("lengths", checked("lengths", lengths, "B", np.int64))
        options = options_of(self._heads, dim, scale, window, sinks, None, threads, self._path)
        out: SameKind
        out, to = new_rows(q, tokens, self._heads * dim)
        if not len(pages) == len(spans) == tokens:
            raise ValueError(
                f"table and lengths must have one row per row of q, {tokens}, not {len(pages)} and {len(spans)}: "
                "pass one batch."
            )
        read = spans if window is None else np.minimum(spans, window)
        if options["threads"] == 1 or int(read.sum()) * 2 * kv_heads * self._cache.row_bytes <= _ALONE:
            right = self._alone(of_rows, tokens, at, pages, spans, to, options)
        else:
            right = self._together(q, pages, spans, out, options)
        if not right:
            check_blocks(pages, spans, blocks, block, options["window"])
        return out

    def warm_up(self, q: Operand) -> None:
        """Compile attention of rows of the type of q (1, H D), by one thread and by several."""
        one = np.zeros((1, 1), np.int32), np.ones(1, np.int64)
        out = self(q, *one, threads=1)
        options = options_of(self._heads, self._sizes[3], None, None, None, None, 2, self._path)
        self._together(q, *one, out, options)

    def _alone(
        self,
        of_rows: Storage | None,
        tokens: int,
        q: int,
        table: NDArray[np.int32],
        lengths: NDArray[np.int64],
        out: int,
        options: Options,
    ) -> bool:
        """Attend by the calling thread, with rows at q and out; False for a length or block that cannot be."""
        blocks, kv_heads, _, dim = self._sizes
        attend = _attender(self._path.value, self._cache.storage, self._heads // kv_heads, dim, of_rows)
        scale = np.float32(options["scale"] * LOG2_E)
        sinks = _NONE if options["sinks"] is None else options["sinks"] * np.float32(LOG2_E)
        right: bool = attend(
            *self._geometry, blocks, scale, options["window"] or 0, sinks, tokens, table.shape[1], q,
            table.__array_interface__["data"][0], lengths.__array_interface__["data"][0], out,
        )  # fmt: skip
        return right

    def _together(
        self, q: Operand, table: NDArray[np.int32], lengths: NDArray[np.int64], out: Operand, options: Options
    ) -> bool:
        """Attend by several threads; False for a length or block that cannot be."""
        blocks, _, block, dim = self._sizes
        if not _first_tokens(table, lengths, options["window"] or 0, blocks, block, np.empty_like(lengths)):
            return False
        rows, result = (
            checked("q", each, "T W", np.float32, np.uint16).reshape(-1, self._heads, dim) for each in (q, out)
        )
        queries = np.empty(rows.shape, np.float32)
        found = np.empty_like(queries)
        _widen(rows, queries)
        decode(queries, self._cache, table, lengths, found, **options)  # writable, as in `_attender`: compiled once
        _narrow(found, result)
        return True
