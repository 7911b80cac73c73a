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
from .calls import Plan, address_of, fields, laid, real, words
from .linear import DTYPES
from .operands import new_rows, rows_at, storage_of

_ALONE = parameters().few_rows.alone_bytes
_NONE = np.empty(0, np.float32)
_GEOMETRY = 8
"""Numbers that tell where a cache lies; a plan begins with those of the cache and of its scales."""
_BLOCKS = 2 * _GEOMETRY
"""Place of the cache's sizes P, K, b and D in a plan."""


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
    def append(at: int) -> int:
        call = fields(at)
        plan = fields(call[0])
        tokens = call[1]
        blocks = plan[_BLOCKS]
        kv_heads = plan[_BLOCKS + 1]
        block = plan[_BLOCKS + 2]
        dim = plan[_BLOCKS + 3]
        kv = carray(pointer(plan[0]), (blocks, kv_heads, 2, block, dim), cell)
        where = words(call[2], tokens)
        keys = carray(pointer(call[3]), (tokens, kv_heads, dim), number)
        values = carray(pointer(call[4]), (tokens, kv_heads, dim), number)
        for t in range(tokens):
            if not 0 <= where[t] < blocks * block:
                return 1
        for t in range(tokens):
            page = where[t] // block
            offset = where[t] - page * block
            for h in range(kv_heads):
                key = kv[page, h, 0, offset]
                value = kv[page, h, 1, offset]
                for d in range(dim):
                    key[d] = narrowed(widened(keys[t, h, d]), key[d])
                    value[d] = narrowed(widened(values[t, h, d]), value[d])
        return 0

    return append


@functools.cache
def _attender(lanes: int, storage: Storage, group: int, dim: int, of_rows: Storage) -> Any:
    """Compile attention of rows of a format for a shape, by one thread; `storage` is the cache's."""
    number = DTYPES[of_rows]
    stored = int(storage)

    @compiled()
    def attend(at: int) -> int:
        call = fields(at)
        geometry = fields(call[0])
        of_scales = fields(call[0] + 8 * _GEOMETRY)
        blocks = geometry[_BLOCKS]
        tokens = call[1]
        width = call[2]
        heads = geometry[6] * group
        given = carray(pointer(call[3]), (tokens, heads, dim), number)
        table = carray(pointer(call[4]), (tokens, width), np.int32)
        lengths = words(call[5], tokens)
        result = carray(pointer(call[6]), (tokens, heads, dim), number)
        scale = real(call, 7)
        sinks = carray(pointer(call[9]), (call[10],), np.float32)
        begins = np.empty(tokens, np.int64)
        if not _first_tokens(table, lengths, call[8], blocks, geometry[1], begins):
            return 1
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
        first_task = np.int64(counter.ctypes.data)
        _serve_tasks(
            lanes, stored, group, dim, first_task, queries, geometry, of_scales, table, tasks, first, left, scale,
            sinks, tops, totals, sums, found,
        )  # fmt: skip
        _narrow(found, result)
        done = counter[LINE // 8] == len(tasks)  # Numba frees an array behind its last use
        return 0 if done else 1

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
        self.heads = heads
        self._path = code_path(path)
        self._cache = Cache.of(cache)
        blocks, kv_heads, _, block, dim = cache.shape
        self.sizes = blocks, kv_heads, block, dim
        self._plan = Plan(*self._cache.geometry, *self._cache.of_scales.geometry, *self.sizes)

    def append(self, slots: Operand, k: Operand, v: Operand) -> None:
        """Store rows k and v (T, K D) of one type, in slots (T,) int64: block * b + offset of each.

        Raises
        ------
        TypeError
            If slots have another dtype.
        ValueError
            If shapes disagree, or a slot is out of range; then nothing is stored.
        """
        blocks, kv_heads, block, dim = self.sizes
        of_rows = storage_of(k.dtype)
        tokens, keys = rows_at("k", k, kv_heads * dim, of_rows, most=math.inf)
        count, values = rows_at("v", v, kv_heads * dim, of_rows, most=math.inf)
        where = contiguous("slots", checked("slots", slots, "T", np.int64))
        if not len(where) == tokens == count:
            raise ValueError(
                f"slots must be one per row of k and v, not {len(where)} for {tokens} and {count} rows: pass one batch."
            )
        call = laid(*self.append_call(tokens, address_of(where), keys, values))
        if self.appender(of_rows)(address_of(call)):
            outside = where[(where < 0) | (where >= blocks * block)][0]
            raise ValueError(
                f"slots must be in [0, {blocks * block}), not {outside}: pass block * b + offset of allocated blocks."
            )

    def appender(self, of_rows: Storage | None) -> Any:
        """The compiled work of `append` for rows of a format; its answer is 1 if a slot is out of range."""
        return _appender(self._cache.storage, of_rows)

    def append_call(self, tokens: int, slots: int, k: int, v: int) -> tuple[int, ...]:
        """Numbers of a call of `appender` with operands at these addresses."""
        return self._plan.address, tokens, slots, k, v

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
        blocks, _, block, dim = self.sizes
        of_rows = storage_of(q.dtype)
        tokens, at = rows_at("q", q, self.heads * dim, of_rows, most=math.inf)
        pages = contiguous("table", checked("table", table, "B W", np.int32))
        spans = contiguous("lengths", checked("lengths", lengths, "B", np.int64))
        options = options_of(self.heads, dim, scale, window, sinks, None, threads, self._path)
        out: SameKind
        out, to = new_rows(q, tokens, self.heads * dim)
        if not len(pages) == len(spans) == tokens:
            raise ValueError(
                f"table and lengths must have one row per row of q, {tokens}, not {len(pages)} and {len(spans)}: "
                "pass one batch."
            )
        if options["threads"] == 1 or self.reads_alone(spans, window):
            how = self.held_options(options)
            call = laid(
                *self.attend_call(tokens, pages.shape[1], at, address_of(pages), address_of(spans), to), *how.numbers
            )
            right = not self.attender(of_rows)(address_of(call))
        else:
            right = self._together(q, pages, spans, out, options)
        if not right:
            check_blocks(pages, spans, blocks, block, options["window"])
        return out

    def warm_up(self, q: Operand) -> None:
        """Compile attention of rows of the type of q (1, H D), by one thread and by several."""
        one = np.zeros((1, 1), np.int32), np.ones(1, np.int64)
        out = self(q, *one, threads=1)
        options = options_of(self.heads, self.sizes[3], None, None, None, None, 2, self._path)
        self._together(q, *one, out, options)

    @property
    def read_alone(self) -> int:
        """Most entries that the calling thread has read before another would wake."""
        return int(_ALONE // (2 * self.sizes[1] * self._cache.row_bytes))

    def reads_alone(self, lengths: NDArray[np.int64], window: int | None) -> bool:
        """True if the calling thread reads sequences of these lengths alone."""
        read = lengths if window is None else np.minimum(lengths, window)
        return bool(read.sum() <= self.read_alone)

    def attender(self, of_rows: Storage | None) -> Any:
        """The compiled work of attention by one thread; its answer is 1 for a length or block that cannot be."""
        _, kv_heads, _, dim = self.sizes
        return _attender(self._path.value, self._cache.storage, self.heads // kv_heads, dim, of_rows)

    def attend_call(self, tokens: int, width: int, q: int, table: int, lengths: int, out: int) -> tuple[int, ...]:
        """Numbers of a call of `attender` with operands at these addresses; those of `held_options` follow."""
        return self._plan.address, tokens, width, q, table, lengths, out

    def held_options(self, options: Options) -> Plan:
        """Numbers of a call of `attender` that tell options, which keep what they tell of."""
        sinks = _NONE if options["sinks"] is None else options["sinks"] * np.float32(LOG2_E)
        return Plan(np.float32(options["scale"] * LOG2_E), options["window"] or 0, sinks, len(sinks))

    def _together(
        self, q: Operand, table: NDArray[np.int32], lengths: NDArray[np.int64], out: Operand, options: Options
    ) -> bool:
        """Attend by several threads; False for a length or block that cannot be."""
        blocks, _, block, dim = self.sizes
        if not _first_tokens(table, lengths, options["window"] or 0, blocks, block, np.empty_like(lengths)):
            return False
        rows, result = (
            checked("q", each, "T W", np.float32, np.uint16).reshape(-1, self.heads, dim) for each in (q, out)
        )
        queries = np.empty(rows.shape, np.float32)
        found = np.empty_like(queries)
        _widen(rows, queries)
        decode(queries, self._cache, table, lengths, found, **options)  # writable, as in `_attender`: compiled once
        _narrow(found, result)
        return True
