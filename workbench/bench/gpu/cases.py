"""Cases of every kernel of the gpu lane: operands of three sizes, reference, baselines and declared work."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from workbench import kernels
from workbench.bench.gpu import peers as gpu_peers
from workbench.kernels import Draws, Prefix, Quantised

EXACT = 0.0
ROUNDED = 4e-3
TWICE = 8e-3
"""Relative Frobenius errors that bf16 allows: what is only moved, what is rounded once, what passes two products."""


class Size(enum.Enum):
    """TINY is interpreted, CHECK is compared with float64 on the CPU, FULL is timed."""

    TINY = 0
    CHECK = 1
    FULL = 2

    def of(self, tiny: int, check: int, full: int) -> int:
        """The number that belongs to it."""
        return (tiny, check, full)[self.value]


@dataclass(frozen=True)
class Call:
    """One call on operands at hand.

    Attributes
    ----------
    ours : callable
        Takes the backend.
    exact : callable
        The answer in float64, on the CPU.
    flops, bytes : int
        Declared work.
    limit : float
        Relative Frobenius error that is allowed.
    peers : mapping
        What else computes the same, by name.
    """

    ours: Callable[[str | None], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    flops: int
    bytes: int
    limit: float
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named case that makes its operands on a device."""

    name: str
    make: Callable[[Size, torch.device], Call]


def _normal(device: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).bfloat16()


def _host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


# -------------------------------------------------------------------------------------------------------- attention


def _prefill(
    size: Size,
    device: torch.device,
    *,
    prompts: int,
    length: int,
    heads: int = 32,
    kv_heads: int = 8,
    dims: tuple[int, int] = (128, 128),
    cached: int = 0,
    window: int | None = None,
    full: bool = False,
) -> Call:
    count = size.of(2, 2, prompts)
    rows = size.of(5, 37, length)
    past = size.of(9, 33, cached) if cached else 0
    H = size.of(2, heads, heads)
    K = size.of(1, kv_heads, kv_heads)
    D, Dv = (size.of(16, dim, dim) for dim in dims)
    q, k, v = (_normal(device, count * rows, h, d) for h, d in ((H, D), (K, D), (K, Dv)))
    starts = torch.arange(0, count * rows + 1, rows, device=device)
    prefix = None
    if cached:
        blocks = -(-past // 16)
        table = torch.randperm(count * blocks, device=device).int().view(count, blocks)
        lengths = torch.full((count,), past, device=device)
        prefix = Prefix(_normal(device, count * blocks, K, 2, 16, D), table, lengths)
    seen = [min(past + at + 1, window or past + at + 1) for at in range(rows)]
    keys = count * (rows + (min(past, window) if window else past))
    flops, moved = kernels.prefill_attention_work(H, K, D, Dv, count * sum(seen), count * rows, keys, 2)

    more = _more(H, device) if full else _More()

    def exact() -> torch.Tensor:
        there = None if prefix is None else Prefix(*_host(*prefix))
        options = more.on_host()
        return kernels.prefill_attention_reference(*_host(q, k, v, starts), prefix=there, window=window, **options)

    plain = not cached and window is None and not full
    peers = gpu_peers.prefill(q, k, v, count) if plain else {}
    attend = partial(kernels.prefill_attention, q, k, v, starts, prefix=prefix, window=window, **more._asdict())
    return Call(lambda backend: attend(backend=backend), exact, flops, moved, TWICE, peers)


class _More(NamedTuple):
    """Options that change the scores: a cap, and attention sinks, one (H,) fp32 per head without a value."""

    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def on_host(self) -> dict[str, Any]:
        """The same for the reference."""
        return self._asdict() | {"sinks": None if self.sinks is None else self.sinks.cpu()}


def _more(heads: int, device: torch.device) -> _More:
    return _More(30.0, torch.randn(heads, device=device))


def _decode(
    size: Size,
    device: torch.device,
    *,
    rows: int,
    context: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    full: bool = False,
) -> Call:
    B = size.of(2, 3, rows)
    S = size.of(19, 700, context)
    H = size.of(2, heads, heads)
    K = size.of(1, kv_heads, kv_heads)
    D = size.of(16, dim, dim)
    width = -(-S // 16)
    kv = _normal(device, B * width, K, 2, 16, D)
    table = torch.randperm(B * width, device=device).int().view(B, width)
    q = _normal(device, B, H, D)
    lengths = torch.full((B,), S, device=device)
    flops, moved = kernels.decode_attention_work(H, K, D, B * S, B, 2, 2)
    more = _more(H, device) if full else _More()
    return Call(
        lambda backend: kernels.decode_attention(q, kv, table, lengths, **more._asdict(), backend=backend),
        lambda: kernels.decode_attention_reference(*_host(q, kv, table, lengths), **more.on_host()),
        flops,
        moved,
        TWICE,
        {} if full else gpu_peers.decode(q, kv, table, S),
    )


def _move(size: Size, device: torch.device, *, out: bool) -> Call:
    T = size.of(5, 100, 1 << 16)
    K = size.of(1, 8, 8)
    D = size.of(16, 128, 128)
    P = size.of(4, 64, 1 << 13)
    kv = _normal(device, P, K, 2, 16, D)
    slots = torch.randperm(P * 16, device=device)[:T]
    k, v = _normal(device, 2, T, K, D)

    def ours(backend: str | None) -> torch.Tensor:
        if out:
            return torch.stack(kernels.gather_kv(kv, slots, backend=backend))
        kernels.append_kv(kv, slots, k, v, backend=backend)
        return kv

    def exact() -> torch.Tensor:
        cache, places, keys, values = _host(kv, slots, k, v)
        if out:
            return torch.stack(kernels.gather_kv(cache, places, backend="torch")).double()
        kernels.append_kv(cache, places, keys, values, backend="torch")
        return cache.double()

    return Call(ours, exact, *kernels.gather_kv_work(K, D, T, 2, 2), EXACT)


# ---------------------------------------------------------------------------------------------------------- experts


def _moe(
    size: Size,
    device: torch.device,
    *,
    tokens: int,
    layer: tuple[int, int, int, int],
    kind: torch.dtype | None = None,
) -> Call:
    model, inner, experts, chosen = layer
    T = size.of(3, 5, tokens)
    M = size.of(32, 512, model)
    F = size.of(32, 256, inner)
    E = size.of(4, min(experts, 16), experts)
    k = size.of(2, chosen, chosen)
    x = _normal(device, T, M)
    gate_up = _normal(device, E, 2 * F, M, scale=M**-0.5)
    down = _normal(device, E, M, F, scale=F**-0.5)
    ids, weights = kernels.route(torch.randn(T, E, device=device), k, renormalise=True, backend="torch")
    first = gate_up if kind is None else kernels.quantise(gate_up, kind, 32)
    second = down if kind is None else kernels.quantise(down, kind, 32)
    stored = {None: 2.0, torch.int8: 1.125, torch.float8_e4m3fn: 1.125, torch.uint8: 0.625}[kind]
    touched = len(ids.unique())

    def exact() -> torch.Tensor:
        there = _there(first), _there(second)
        want: torch.Tensor = kernels.fused_moe_reference(x.cpu(), there, *_host(ids, weights))
        return want

    return Call(
        lambda backend: kernels.fused_moe(x, (first, second), ids, weights, backend=backend),
        exact,
        *kernels.fused_moe_work(M, F, T, k, touched, stored, 2),
        TWICE,
        gpu_peers.experts(x, gate_up, down, ids, weights) if kind is None else {},
    )


def _there(weights: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
    return weights.cpu() if isinstance(weights, torch.Tensor) else Quantised(*_host(*weights))


def _route(size: Size, device: torch.device) -> Call:
    T = size.of(3, 50, 8192)
    E = size.of(8, 128, 128)
    k = size.of(2, 8, 8)
    logits = torch.randn(T, E, device=device)
    return Call(
        lambda backend: kernels.route(logits, k, renormalise=True, backend=backend).weights,
        lambda: kernels.route_reference(logits.cpu(), k, renormalise=True).weights,
        *kernels.route_work(T, E, k, 4),
        1e-5,
        {"torch": lambda: logits.softmax(dim=1).topk(k, dim=1)},
    )


# ------------------------------------------------------------------------------------------------------------- rows


def _rms_norm(size: Size, device: torch.device, *, added: bool) -> Call:
    T = size.of(3, 33, 16384)
    M = size.of(20, 4096, 4096)
    (x, residual) = _normal(device, 2, T, M)
    weight = _normal(device, M)
    work = (kernels.add_rms_norm_work if added else kernels.rms_norm_work)(T, M, 2)

    def ours(backend: str | None) -> torch.Tensor:
        out: torch.Tensor
        if added:
            out, _ = kernels.add_rms_norm(x, residual, weight, backend=backend)
        else:
            out = kernels.rms_norm(x, weight, backend=backend)
        return out

    def exact() -> torch.Tensor:
        rows, other, gain = _host(x, residual, weight)
        return kernels.rms_norm_reference(rows + other if added else rows, gain)

    peers = {} if added else {"torch": lambda: functional.rms_norm(x, (M,), weight, 1e-5)}
    return Call(ours, exact, *work, TWICE, peers | gpu_peers.rms_norm(x, residual, weight, added))


def _layer_norm(size: Size, device: torch.device) -> Call:
    T = size.of(3, 33, 16384)
    M = size.of(20, 4096, 4096)
    x = _normal(device, T, M)
    (weight, bias) = _normal(device, 2, M)
    return Call(
        lambda backend: kernels.layer_norm(x, weight, bias, backend=backend),
        lambda: kernels.layer_norm_reference(*_host(x, weight, bias)),
        *kernels.layer_norm_work(T, M, 2),
        TWICE,
        {"torch": lambda: functional.layer_norm(x, (M,), weight, bias)} | gpu_peers.layer_norm(x, weight, bias),
    )


def _rope(size: Size, device: torch.device, *, normed: bool, interleaved: bool = False) -> Call:
    T = size.of(3, 33, 16384)
    H = size.of(2, 32, 32)
    D = size.of(16, 128, 128)
    x = _normal(device, T, H, D)
    positions = torch.arange(T, device=device)
    table = kernels.rope_table(D, T, device=str(device))
    weight = _normal(device, D) if normed else None
    return Call(
        lambda backend: kernels.rope(x, positions, table, interleaved=interleaved, weight=weight, backend=backend),
        lambda: kernels.rope_reference(
            *_host(x, positions, table),
            interleaved=interleaved,
            weight=None if weight is None else weight.cpu(),
        ),
        *kernels.rope_work(T, H, D, D, 2),
        ROUNDED,
    )


def _gated(size: Size, device: torch.device, *, activation: str) -> Call:
    T = size.of(3, 33, 8192)
    F = size.of(20, 1000, 14336)
    x = _normal(device, T, 2 * F)
    turn = functional.silu if activation == "swiglu" else functional.gelu
    return Call(
        lambda backend: kernels.gated(x, activation=activation, backend=backend),
        lambda: kernels.gated_reference(x.cpu(), activation=activation),
        *kernels.gated_work(T, F, 2),
        ROUNDED,
        {"torch": lambda: turn(x[:, :F]) * x[:, F:]} | gpu_peers.gated(x, activation),
    )


# ------------------------------------------------------------------------------------------------------- vocabulary


def _embed(size: Size, device: torch.device) -> Call:
    T = size.of(3, 33, 16384)
    M = size.of(20, 4096, 4096)
    V = size.of(30, 500, 128256)
    table = _normal(device, V, M)
    ids = torch.randint(V, (T,), device=device)
    return Call(
        lambda backend: kernels.embed(ids, table, backend=backend),
        lambda: table.cpu()[ids.cpu()].double(),
        *kernels.embed_work(T, M, 2),
        EXACT,
        {"torch": lambda: table[ids]},
    )


def _logits(size: Size, device: torch.device, *, rows: int) -> Call:
    R = size.of(2, 5, rows)
    M = size.of(20, 4096, 4096)
    V = size.of(30, 500, 128256)
    x = _normal(device, 2 * R, M)
    head = _normal(device, V, M)
    chosen = torch.arange(0, 2 * R, 2, device=device)
    return Call(
        lambda backend: kernels.sampled_logits(x, chosen, head, backend=backend),
        lambda: x.cpu()[chosen.cpu()].double() @ head.cpu().double().T,
        *kernels.sampled_logits_work(R, M, V, 2),
        1e-5,
        {"torch": lambda: functional.linear(x[chosen], head).float()},
    )


def _sample(size: Size, device: torch.device, *, drawn: bool) -> Call:
    R = size.of(2, 20, 64)
    V = size.of(20, 3000, 128256)
    logits = torch.randn(R, V, device=device) * 3
    ones = torch.ones(R, dtype=torch.float64, device=device)
    how = Draws(ones, 0.9 * ones, torch.arange(R, device=device), torch.arange(R, device=device)) if drawn else None

    def exact() -> torch.Tensor:
        there = None if how is None else Draws(*_host(*how))
        return kernels.sample(logits.cpu(), there, backend="torch").double()

    return Call(
        lambda backend: kernels.sample(logits, how, backend=backend),
        exact,
        *kernels.sample_work(R, V),
        EXACT,
        {} if drawn else {"torch": lambda: logits.argmax(dim=1)},
    )


_QWEN = 2048, 768, 128, 8
_MIXTRAL = 4096, 14336, 8, 2
"""M, F, E and k of a layer."""

CASES = tuple(
    Case(name, make)
    for name, make in (
        ("prefill attention, 4 x 4096", partial(_prefill, prompts=4, length=4096)),
        ("decode attention, 64 x 4096", partial(_decode, rows=64, context=4096)),
        ("experts, Qwen3-30B, 64 tokens", partial(_moe, tokens=64, layer=_QWEN)),
        ("experts, Qwen3-30B, 8192 tokens", partial(_moe, tokens=8192, layer=_QWEN)),
        ("RMSNorm", partial(_rms_norm, added=False)),
        ("RoPE", partial(_rope, normed=False)),
        ("router", _route),
        ("prefill attention, 64 x 256", partial(_prefill, prompts=64, length=256)),
        ("prefill attention, 512 behind 8192", partial(_prefill, prompts=4, length=512, cached=8192)),
        ("prefill attention, window 1024", partial(_prefill, prompts=2, length=8192, window=1024)),
        ("prefill attention, soft-cap and sinks", partial(_prefill, prompts=4, length=2048, full=True)),
        ("prefill attention, MLA 192/128", partial(_prefill, prompts=4, length=2048, heads=16, kv_heads=16,
                                                   dims=(192, 128))),
        ("prefill attention, D 64", partial(_prefill, prompts=4, length=4096, dims=(64, 64))),
        ("prefill attention, D 256", partial(_prefill, prompts=4, length=2048, heads=16, dims=(256, 256))),
        ("decode attention, soft-cap and sinks", partial(_decode, rows=64, context=4096, full=True)),
        ("decode attention, 1 x 32768", partial(_decode, rows=1, context=32768)),
        ("decode attention, 256 x 512", partial(_decode, rows=256, context=512)),
        ("decode attention, D 64, 8 heads share", partial(_decode, rows=64, context=4096, heads=64, dim=64)),
        ("experts, Mixtral, 1 token", partial(_moe, tokens=1, layer=_MIXTRAL)),
        ("experts, Mixtral, 4096 tokens", partial(_moe, tokens=4096, layer=_MIXTRAL)),
        ("experts, Mixtral, 16 tokens, int8", partial(_moe, tokens=16, kind=torch.int8, layer=_MIXTRAL)),
        ("experts, Mixtral, 16 tokens, 4 bits", partial(_moe, tokens=16, kind=torch.uint8, layer=_MIXTRAL)),
        ("experts, Mixtral, 16 tokens, fp8", partial(_moe, tokens=16, kind=torch.float8_e4m3fn, layer=_MIXTRAL)),
        ("RMSNorm with residual", partial(_rms_norm, added=True)),
        ("LayerNorm", _layer_norm),
        ("RoPE with qk-norm", partial(_rope, normed=True)),
        ("RoPE, interleaved", partial(_rope, normed=False, interleaved=True)),
        ("SwiGLU", partial(_gated, activation="swiglu")),
        ("GeGLU", partial(_gated, activation="geglu")),
        ("KV into the cache", partial(_move, out=False)),
        ("KV out of the cache", partial(_move, out=True)),
        ("embedding", _embed),
        ("logits, 64 rows", partial(_logits, rows=64)),
        ("greedy sampling", partial(_sample, drawn=False)),
        ("top-p sampling", partial(_sample, drawn=True)),
    )
)  # fmt: skip
