"""Layers of few decodes: the stages of one or several, one after the other, in one call of compiled code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, SameKind
from ..attention.operands import options_of
from ..declarations import public
from ..threads.clock import TELLS_TIME
from ..threads.crew import Crew
from .calls import address_of, code_of, laid, make_calls
from .decode import PagedDecode
from .experts import FewExperts
from .linear import DTYPES, FewLinear
from .operands import memory_of, new_rows, rows_at, table_at, uses, whole_numbers_at
from .products import gathered
from .qkv import FewQkv
from .route import FewRoute

_LATER = -1
"""Stands for a number that is set when the layer is called."""


class _Calls(NamedTuple):
    """The calls of some layers for some rows of one thread.

    Attributes
    ----------
    numbers : ndarray int64
        Those of all calls.
    addresses : ndarray (calls,) int64
        Of each call's first number.
    changing : ndarray (layers, n) int64
        Places of the numbers that are set anew each time.
    """

    numbers: NDArray[np.int64]
    addresses: NDArray[np.int64]
    changing: NDArray[np.int64]


@public
class Decodes:
    """Places of a few tokens in their sequences and in the KV cache, checked once for all layers.

    Parameters
    ----------
    positions : (T,) int64
        As of `FewQkv`.
    slots : (T,) int64
        As of `PagedDecode.append`.
    table : (T, W) int32
    lengths : (T,) int64
        As of `PagedDecode`.

    Raises
    ------
    ValueError
        If one has another type or shape, or is not contiguous in CPU memory.

    Examples
    --------
    >>> zero = np.zeros(1, np.int64)
    >>> Decodes(zero, zero, np.zeros((1, 4), np.int32), zero + 1).rows
    1
    """

    def __init__(self, positions: Operand, slots: Operand, table: Operand, lengths: Operand) -> None:
        self.operands = positions, slots, table, lengths
        self.rows = len(positions)  # type: ignore[arg-type]
        places = whole_numbers_at("positions", positions, self.rows)
        where = whole_numbers_at("slots", slots, self.rows)
        width, pages = table_at("table", table, self.rows)
        spans = whole_numbers_at("lengths", lengths, self.rows)
        self.lengths = np.asarray(lengths)
        self.addresses = places, where, width, pages, spans


@public
class FewLayer:
    """The stages of one layer for decodes, which `FewLayers` calls.

    Parameters
    ----------
    qkv : FewQkv
    cache : PagedDecode
    out : FewLinear
        From the heads' outputs to the model's dim.
    route : FewRoute
    experts : FewExperts
    scale, window, sinks
        Options of attention, as of `decode_attention`.

    Attributes
    ----------
    stages : tuple
        The five kernels, in this order.
    window : int or None

    Raises
    ------
    TypeError
        If sinks have another dtype.
    ValueError
        If the sizes or types of the stages disagree, or an option is out of range.

    Examples
    --------
    See `FewLayers`.
    """

    def __init__(
        self,
        qkv: FewQkv,
        cache: PagedDecode,
        out: FewLinear,
        route: FewRoute,
        experts: FewExperts,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Operand | None = None,
    ) -> None:
        _, kv_heads, _, dim = cache.sizes
        heads = cache.heads * dim
        found = qkv.columns, qkv.widths, (out.columns, out.rows), route.columns, experts.dim
        width = qkv.columns
        if found != (width, (heads, kv_heads * dim), (heads, width), width, width):
            raise ValueError(
                f"the stages must be of one model, not with sizes {found} and {heads} numbers per query in the cache: "
                "pass those of one layer."
            )
        kinds = {(stage.storage, stage.lanes) for stage in (qkv, out, route)}
        if kinds != {(qkv.storage, experts.lanes)} or route.count > experts.count:
            raise ValueError(
                f"the stages must have weights of one type, one code path, and {experts.count} experts at most, not "
                f"{route.count}: pass those of one layer."
            )
        self.stages = qkv, cache, out, route, experts
        self._options: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks}
        options = options_of(cache.heads, dim, **self._options, softcap=None, threads=1, path=None)
        self._told = cache.held_options(options)
        self.window = options["window"]
        dtype = DTYPES[qkv.storage]
        self._uses = uses(
            ("q", dtype, heads),
            ("k", dtype, qkv.widths[1]),
            ("v", dtype, qkv.widths[1]),
            ("attn", dtype, heads),
            ("attended", dtype, width),
            ("h", dtype, width),
        )

    @property
    def kind(self) -> tuple[Any, ...]:
        """Common to layers that can be called together: format and width of rows, code path, experts of a row."""
        qkv, _, _, route, _ = self.stages
        return qkv.storage, qkv.columns, qkv.lanes, route.k

    def reads_alone(self, decodes: Decodes) -> bool:
        """True if attention to these sequences is the fastest by the calling thread alone."""
        return self.stages[1].reads_alone(decodes.lengths, self.window)

    @property
    def codes(self) -> tuple[int, ...]:
        """Addresses of the code of each call."""
        qkv, cache, out, route, experts = self.stages
        work = (
            qkv.serve,
            cache.appender(qkv.storage),
            cache.attender(qkv.storage),
            out.serve,
            route.serve,
            experts.server(qkv.storage),
        )
        return tuple(map(code_of, work))

    def calls(self, crew: Crew, tokens: int) -> tuple[tuple[int, ...], ...]:
        """The numbers of each call of one thread, without what changes."""
        qkv, cache, out, route, experts = self.stages
        q, k, v, attn, attended, h = memory_of(crew, self._uses).numbers.tolist()
        x = positions = slots = width = table = lengths = gates = following = _LATER
        return (
            qkv.call(crew, tokens, x, positions, q, k, v),
            cache.append_call(tokens, slots, k, v),
            (*cache.attend_call(tokens, width, q, table, lengths, attn), *self._told.numbers.tolist()),
            out.call(crew, tokens, attn, x, attended),
            route.call(crew, tokens, attended, h, gates),
            experts.call(crew, tokens, route.k, h, gates, attended, following),
        )

    def one_by_one(self, x: SameKind, decodes: Decodes) -> tuple[SameKind, SameKind]:
        """Call the stages one by one, so that an error names its operand: -> x and gates."""
        qkv, cache, out, route, experts = self.stages
        positions, slots, table, lengths = decodes.operands
        q, k, v = qkv(x, positions)
        cache.append(slots, k, v)
        attended = out(cache(q, table, lengths, **self._options), x)
        h, gates = route(attended)
        return experts(h, gates, attended), gates


@public
class FewLayers:
    """Some layers one after the other for decodes, for calls with at most four rows.

        q, k, v = qkv(x);  cache.append(k, v);  x = x + out(cache(q));  h, gates = route(x);  x = x + experts(h, gates)

    The results are those of the stages called one by one. No Python runs between the stages: after a layer's experts
    its code is in no cache, and loading it takes as long as reading a megabyte. The calling thread attends alone;
    `reads_alone` tells if that is the fastest. The GIL is released.

    Parameters
    ----------
    layers : sequence of FewLayer

    Attributes
    ----------
    TELLS_TIME : bool
        True if compiled code has a clock here.

    Raises
    ------
    ValueError
        If there are none, or they differ in the format or width of rows, the code path, or the experts of a row.

    Examples
    --------
    >>> from kernels_cpu import pack_experts
    >>> one = np.ones((32, 32), np.float32)
    >>> qkv = FewQkv(one[0], one, np.array([[1, 0]], np.float32), heads=2, kv_heads=1)
    >>> cache = PagedDecode(np.zeros((1, 1, 2, 4, 8), np.float32), heads=2)
    >>> route = FewRoute(one[0], one[:4], 1, renormalise=True)
    >>> experts = FewExperts(pack_experts(np.zeros((4, 8, 32), np.float32), np.zeros((4, 32, 4), np.float32)))
    >>> layer = FewLayer(qkv, cache, FewLinear(np.zeros((32, 16), np.float32)), route, experts)
    >>> first = Decodes(np.array([0]), np.array([0]), np.zeros((1, 1), np.int32), np.array([1]))
    >>> x, gates, ends = FewLayers([layer, layer])(one[:1], first)
    >>> x[0, :2], gates.tolist(), len(ends)
    (array([1., 1.], dtype=float32), [[[0.0, 1.0]], [[0.0, 1.0]]], 2)
    """

    TELLS_TIME: ClassVar[bool] = TELLS_TIME

    def __init__(self, layers: Sequence[FewLayer]) -> None:
        kinds = {layer.kind for layer in layers}
        if len(kinds) != 1:
            raise ValueError(
                f"layers must have rows of one format and width, one code path, and as many experts of a row, not "
                f"{sorted(map(str, kinds))}: pass those of one model."
            )
        self._layers = tuple(layers)
        self._unlike = {(layer.window, layer.stages[1].read_alone): layer for layer in layers}.values()
        self._codes = laid(*(code for layer in layers for code in layer.codes))
        self._made = WeakKeyDictionary[Crew, dict[int, _Calls]]()

    @property
    def read_alone(self) -> int:
        """Most KV entries of a pass for which attention by the calling thread alone is the fastest in every layer."""
        return min(layer.stages[1].read_alone for layer in self._layers)

    def reads_alone(self, decodes: Decodes) -> bool:
        """True if attention to these sequences by the calling thread alone is the fastest in every layer."""
        return all(layer.reads_alone(decodes) for layer in self._unlike)

    @staticmethod
    def warm_up() -> None:
        """Compile what the stages' own calls do not."""
        make_calls(laid(), laid(), laid())

    def __call__(
        self, x: SameKind, decodes: Decodes, *, threads: int = 1
    ) -> tuple[SameKind, SameKind, NDArray[np.float64]]:
        """Compute rows x (T, M), T in 1 .. 4.

        Returns
        -------
        x : (T, M)
            Of the layer that follows.
        gates : (layers, T, 2 k) fp32
            As of `FewRoute`.
        ends : (layers,) float64
            Time at which each layer ended, on the clock of `time.perf_counter`; 0 without `TELLS_TIME` [s].

        Raises
        ------
        ValueError
            If x has another type or size, or a place is out of range.
        """
        qkv, _, _, route, _ = self._layers[0].stages
        tokens, at = rows_at("x", x, qkv.columns, qkv.storage)
        if tokens != decodes.rows:
            raise ValueError(f"x must have one row per decode, {decodes.rows}, not {tokens}: pass one batch.")
        crew = gathered(qkv.lanes, threads)
        count = len(self._layers)
        following: SameKind
        following, to = new_rows(x, tokens, qkv.columns)
        gates: SameKind
        gates, to_gates = new_rows(x, count * tokens, 2 * route.k, fp32=True)
        of_crew = self._made.setdefault(crew, {})
        made = of_crew.get(tokens)
        if made is None:
            made = of_crew[tokens] = self._calls(crew, tokens)
        ends = np.zeros(count, np.int64)
        made.numbers[made.changing] = self._changing(at, to, to_gates, tokens, decodes)
        failed = make_calls(self._codes, made.addresses, ends)
        every: Any = gates
        every = every.reshape(count, tokens, 2 * route.k)
        if failed >= 0:
            following = self._one_by_one(failed * count // len(self._codes), x, following, every, ends, decodes)
        return following, every, 1e-9 * ends.astype(np.float64)

    def _changing(self, at: int, to: int, to_gates: int, tokens: int, decodes: Decodes) -> NDArray[np.int64]:
        """The numbers that change: the first layer reads x there, and all of them read and write the following rows."""
        count = len(self._layers)
        found = np.empty((count, 10), np.int64)
        found[:] = to, *decodes.addresses, to, to_gates, to_gates, to
        found[0, 0] = found[0, 6] = at
        size = tokens * 2 * self._layers[0].stages[3].k * np.dtype(np.float32).itemsize
        found[:, 7:9] += size * np.arange(count)[:, None]
        return found

    def _calls(self, crew: Crew, tokens: int) -> _Calls:
        """The calls of one thread, without what changes."""
        calls = [call for layer in self._layers for call in layer.calls(crew, tokens)]
        numbers = laid(*(number for call in calls for number in call))
        begins = np.cumsum([0, *(len(call) for call in calls[:-1])])
        changing = np.flatnonzero(numbers == _LATER).reshape(len(self._layers), -1)
        return _Calls(numbers, address_of(numbers) + 8 * begins, changing)

    def _one_by_one(
        self, first: int, x: SameKind, following: SameKind, gates: Any, ends: NDArray[np.int64], decodes: Decodes
    ) -> SameKind:
        """Call the stages one by one from the layer on that failed; the rows that it reads are unchanged."""
        rows = following if first else x
        for number in range(first, len(self._layers)):
            rows, gates[number] = self._layers[number].one_by_one(rows, decodes)
            ends[number] = time.perf_counter_ns()
        return rows
