"""A layer of few decodes: its stages one after the other in one call of compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, SameKind
from ..attention.operands import options_of
from ..declarations import public
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
    """The calls of a layer for some rows of one thread.

    Attributes
    ----------
    numbers : ndarray int64
        Those of all calls.
    addresses : ndarray (calls,) int64
        Of each call's first number.
    changing : ndarray int64
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
    """The stages of one layer for decodes, for calls with at most four rows.

        q, k, v = qkv(x);  cache.append(k, v);  x = x + out(cache(q));  h, gates = route(x);  x = x + experts(h, gates)

    The results are those of the stages called one by one. Behind the experts, which evict everything else from the
    caches, Python's code for a call takes as long as reading a megabyte; here no Python runs between the stages. The
    calling thread attends alone. The GIL is released.

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

    Raises
    ------
    TypeError
        If sinks have another dtype.
    ValueError
        If the sizes or types of the stages disagree, or an option is out of range.

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
    >>> x, gates = layer(one[:1], first)
    >>> x[0, :2], gates
    (array([1., 1.], dtype=float32), array([[0., 1.]], dtype=float32))
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
        self._stages = qkv, cache, out, route, experts
        self._options: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks}
        options = options_of(cache.heads, dim, **self._options, softcap=None, threads=1, path=None)
        self._told = cache.held_options(options)
        self._window = options["window"]
        self._codes = laid(
            *map(
                code_of,
                (
                    qkv.serve,
                    cache.appender(qkv.storage),
                    cache.attender(qkv.storage),
                    out.serve,
                    route.serve,
                    experts.server(qkv.storage),
                ),
            )
        )
        dtype = DTYPES[qkv.storage]
        self._uses = uses(
            ("q", dtype, heads),
            ("k", dtype, qkv.widths[1]),
            ("v", dtype, qkv.widths[1]),
            ("attn", dtype, heads),
            ("attended", dtype, width),
            ("h", dtype, width),
        )
        self._made = WeakKeyDictionary[Crew, dict[int, _Calls]]()

    @staticmethod
    def warm_up() -> None:
        """Compile what the stages' own calls do not."""
        make_calls(laid(), laid())

    @property
    def read_alone(self) -> int:
        """Most KV entries for which attention by the calling thread alone is the fastest."""
        return self._stages[1].read_alone

    def reads_alone(self, decodes: Decodes) -> bool:
        """True if these sequences are read so."""
        return self._stages[1].reads_alone(decodes.lengths, self._window)

    def __call__(self, x: SameKind, decodes: Decodes, *, threads: int = 1) -> tuple[SameKind, SameKind]:
        """Compute rows x (T, M), T in 1 .. 4: -> x (T, M) of the next layer, and gates (T, 2 k) as of `FewRoute`.

        Raises
        ------
        ValueError
            If x has another type or size, or a place is out of range.
        """
        qkv, _, _, route, _ = self._stages
        tokens, at = rows_at("x", x, qkv.columns, qkv.storage)
        if tokens != decodes.rows:
            raise ValueError(f"x must have one row per decode, {decodes.rows}, not {tokens}: pass one batch.")
        crew = gathered(qkv.lanes, threads)
        following: SameKind
        following, to = new_rows(x, tokens, qkv.columns)
        gates: SameKind
        gates, to_gates = new_rows(x, tokens, 2 * route.k, fp32=True)
        of_crew = self._made.setdefault(crew, {})
        made = of_crew.get(tokens)
        if made is None:
            made = of_crew[tokens] = self._calls(crew, tokens)
        made.numbers[made.changing] = at, *decodes.addresses, at, to_gates, to_gates, to
        if make_calls(self._codes, made.addresses) >= 0:
            return self._one_by_one(x, decodes)
        return following, gates

    def _calls(self, crew: Crew, tokens: int) -> _Calls:
        """The calls of one thread, without what changes."""
        qkv, cache, out, route, experts = self._stages
        q, k, v, attn, attended, h = memory_of(crew, self._uses).numbers.tolist()
        x = positions = slots = width = table = lengths = gates = following = _LATER
        calls = (
            qkv.call(crew, tokens, x, positions, q, k, v),
            cache.append_call(tokens, slots, k, v),
            (*cache.attend_call(tokens, width, q, table, lengths, attn), *self._told.numbers.tolist()),
            out.call(crew, tokens, attn, x, attended),
            route.call(crew, tokens, attended, h, gates),
            experts.call(crew, tokens, route.k, h, gates, attended, following),
        )
        numbers = laid(*(number for call in calls for number in call))
        begins = np.cumsum([0, *(len(call) for call in calls[:-1])])
        return _Calls(numbers, address_of(numbers) + 8 * begins, np.flatnonzero(numbers == _LATER))

    def _one_by_one(self, x: SameKind, decodes: Decodes) -> tuple[SameKind, SameKind]:
        """Call the stages, of which one raises an error that names the operand."""
        qkv, cache, out, route, experts = self._stages
        positions, slots, table, lengths = decodes.operands
        q, k, v = qkv(x, positions)
        cache.append(slots, k, v)
        attended = out(cache(q, table, lengths, **self._options), x)
        h, gates = route(attended)
        return experts(h, gates, attended), gates
