"""Cases of every kernel of the gpu lane: operands of three sizes, reference, baselines and declared work."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from workbench import kernels
from workbench.bench.gpu import peers as gpu_peers
from workbench.bench.gpu.attention_cases import decode, latents, move, prefill
from workbench.bench.gpu.case import EXACT, ROUNDED, TWICE, Call, Case, Size, host, normal
from workbench.kernels import Draws, Quantised

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
    x = normal(device, T, M)
    gate_up = normal(device, E, 2 * F, M, scale=M**-0.5)
    down = normal(device, E, M, F, scale=F**-0.5)
    ids, weights = kernels.route(torch.randn(T, E, device=device), k, renormalise=True, backend="torch")
    first = gate_up if kind is None else kernels.quantise(gate_up, kind, 32)
    second = down if kind is None else kernels.quantise(down, kind, 32)
    stored = {None: 2.0, torch.int8: 1.125, torch.float8_e4m3fn: 1.125, torch.uint8: 0.625}[kind]
    touched = len(ids.unique())

    def exact() -> torch.Tensor:
        there = _there(first), _there(second)
        want: torch.Tensor = kernels.fused_moe_reference(x.cpu(), there, *host(ids, weights))
        return want

    return Call(
        lambda backend: kernels.fused_moe(x, (first, second), ids, weights, backend=backend),
        exact,
        *kernels.fused_moe_work(M, F, T, k, touched, stored, 2),
        TWICE,
        gpu_peers.experts(x, gate_up, down, ids, weights) if kind is None else {},
    )


def _there(weights: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
    return weights.cpu() if isinstance(weights, torch.Tensor) else Quantised(*host(*weights))


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
    (x, residual) = normal(device, 2, T, M)
    weight = normal(device, M)
    work = (kernels.add_rms_norm_work if added else kernels.rms_norm_work)(T, M, 2)

    def ours(backend: str | None) -> torch.Tensor:
        out: torch.Tensor
        if added:
            out, _ = kernels.add_rms_norm(x, residual, weight, backend=backend)
        else:
            out = kernels.rms_norm(x, weight, backend=backend)
        return out

    def exact() -> torch.Tensor:
        rows, other, gain = host(x, residual, weight)
        return kernels.rms_norm_reference(rows + other if added else rows, gain)

    peers = {} if added else {"torch": lambda: functional.rms_norm(x, (M,), weight, 1e-5)}
    return Call(ours, exact, *work, TWICE, peers | gpu_peers.rms_norm(x, residual, weight, added))


def _layer_norm(size: Size, device: torch.device) -> Call:
    T = size.of(3, 33, 16384)
    M = size.of(20, 4096, 4096)
    x = normal(device, T, M)
    (weight, bias) = normal(device, 2, M)
    return Call(
        lambda backend: kernels.layer_norm(x, weight, bias, backend=backend),
        lambda: kernels.layer_norm_reference(*host(x, weight, bias)),
        *kernels.layer_norm_work(T, M, 2),
        TWICE,
        {"torch": lambda: functional.layer_norm(x, (M,), weight, bias)} | gpu_peers.layer_norm(x, weight, bias),
    )


def _rope(size: Size, device: torch.device, *, normed: bool, interleaved: bool = False) -> Call:
    T = size.of(3, 33, 16384)
    H = size.of(2, 32, 32)
    D = size.of(16, 128, 128)
    x = normal(device, T, H, D)
    positions = torch.arange(T, device=device)
    table = kernels.rope_table(D, T, device=str(device))
    weight = normal(device, D) if normed else None
    return Call(
        lambda backend: kernels.rope(x, positions, table, interleaved=interleaved, weight=weight, backend=backend),
        lambda: kernels.rope_reference(
            *host(x, positions, table),
            interleaved=interleaved,
            weight=None if weight is None else weight.cpu(),
        ),
        *kernels.rope_work(T, H, D, D, 2),
        ROUNDED,
    )


def _gated(size: Size, device: torch.device, *, activation: str) -> Call:
    T = size.of(3, 33, 8192)
    F = size.of(20, 1000, 14336)
    x = normal(device, T, 2 * F)
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
    table = normal(device, V, M)
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
    x = normal(device, 2 * R, M)
    head = normal(device, V, M)
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
    places = torch.arange(R, device=device)
    how = Draws(ones, 0 * places, 0.9 * ones, 0 * ones, places, places) if drawn else None

    def exact() -> torch.Tensor:
        there = None if how is None else Draws(*host(*how))
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
        ("prefill attention, 4 x 4096", partial(prefill, prompts=4, length=4096)),
        ("decode attention, 64 x 4096", partial(decode, rows=64, context=4096)),
        ("experts, Qwen3-30B, 64 tokens", partial(_moe, tokens=64, layer=_QWEN)),
        ("experts, Qwen3-30B, 8192 tokens", partial(_moe, tokens=8192, layer=_QWEN)),
        ("RMSNorm", partial(_rms_norm, added=False)),
        ("RoPE", partial(_rope, normed=False)),
        ("router", _route),
        ("prefill attention, 64 x 256", partial(prefill, prompts=64, length=256)),
        ("prefill attention, 512 behind 8192", partial(prefill, prompts=4, length=512, cached=8192)),
        ("prefill attention, window 1024", partial(prefill, prompts=2, length=8192, window=1024)),
        ("prefill attention, soft-cap and sinks", partial(prefill, prompts=4, length=2048, full=True)),
        ("prefill attention, MLA 192/128", partial(prefill, prompts=4, length=2048, heads=16, kv_heads=16,
                                                   dims=(192, 128))),
        ("prefill attention, D 64", partial(prefill, prompts=4, length=4096, dims=(64, 64))),
        ("prefill attention, D 256", partial(prefill, prompts=4, length=2048, heads=16, dims=(256, 256))),
        ("decode attention, soft-cap and sinks", partial(decode, rows=64, context=4096, full=True)),
        ("decode attention, 1 x 32768", partial(decode, rows=1, context=32768)),
        ("decode attention, 256 x 512", partial(decode, rows=256, context=512)),
        ("decode attention, D 64, 8 heads share", partial(decode, rows=64, context=4096, heads=64, dim=64)),
        ("decode attention, MLA, 64 x 4096", partial(latents, rows=64, context=4096)),
        ("decode attention, MLA, 256 x 4096", partial(latents, rows=256, context=4096)),
        ("decode attention, MLA, 1 x 32768", partial(latents, rows=1, context=32768)),
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
        ("KV into the cache", partial(move, out=False)),
        ("KV out of the cache", partial(move, out=True)),
        ("embedding", _embed),
        ("logits, 64 rows", partial(_logits, rows=64)),
        ("greedy sampling", partial(_sample, drawn=False)),
        ("top-p sampling", partial(_sample, drawn=True)),
    )
)  # fmt: skip
