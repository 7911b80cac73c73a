"""Benchmark of a layer's experts in bf16: `fused_moe`, torch's grouped_mm, a loop of mm, and vLLM or Liger."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import workbench.engine  # noqa: F401  # first of all: it sets how idle threads wait, which torch reads once

# isort: split
import numpy as np
import torch
from torch.nn import functional

from workbench.bench import record
from workbench.bench.cpu.work import PLAIN
from workbench.bench.experts import vllm
from workbench.bench.experts.bench import torch_threads
from workbench.bench.moe.roofs import Roofs, seconds_of
from workbench.bench.moe.speeds import MoeRun, MoeShape, MoeSpeeds
from workbench.core.errors import EngineError
from workbench.core.quiet import LEAST, kept, listening
from workbench.core.records import to_plain
from workbench.hardware import Machine, usable_cores
from workbench.kernels import PackedExperts, cpu_family, fused_moe, pack_experts, route

OURS = "fused_moe"
PACKED = "fused_moe, packed"
"""The same with weights of `pack_experts`, on a CPU."""
GROUPED = "grouped_mm"
LOOP = "loop of mm"
LIGER = "liger-kernel"
VLLM = "vLLM"
PAIRS = "pair by pair"
MIXTRAL = MoeShape("Mixtral-like", 4096, 14336, experts=8, chosen=2)
NARROW = MoeShape("Mixtral-like, half as wide", 2048, 7168, experts=8, chosen=2)
"""Shape for CPUs, at which a round takes seconds and not a minute."""
QWEN3 = MoeShape("Qwen3-like", 2048, 768, experts=128, chosen=8)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
MANY = (8192, 16384, 32768)
"""Further numbers of tokens on a GPU."""
_DISAGREE = 2e-2
"""Relative Frobenius distance of two answers in bf16 beyond which it is not rounding."""
_OFTEN = 5
"""Repetitions per round of up to `_FEW` tokens, which are short."""
_FEW = 64

Implementation = Callable[["Layer", "Tokens"], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Random weights: gate_up (E, 2 F, M) and down (E, M, F) in bf16."""

    shape: MoeShape
    gate_up: torch.Tensor
    down: torch.Tensor

    @cached_property
    def packed(self) -> PackedExperts:
        """The weights once more, packed for our kernel."""
        return pack_experts(self.gate_up, self.down)

    @cached_property
    def for_vllm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights once more, in the order that vLLM's kernel reads."""
        return vllm.packed_experts(self.gate_up, self.down)

    def to(self, dtype: torch.dtype) -> Layer:
        """The same numbers in another type."""
        return replace(self, gate_up=self.gate_up.to(dtype), down=self.down.to(dtype))


@dataclass(frozen=True)
class Tokens:
    """A batch of tokens: hidden states x (T, M) in bf16, and the router's experts and weights, (T, k) each."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def to(self, dtype: torch.dtype) -> Tokens:
        """The same tokens with hidden states in another type."""
        return replace(self, x=self.x.to(dtype))


def random_layer(shape: MoeShape, device: str = "cpu") -> Layer:
    """Draw weights of a scale that keeps activations near one."""
    torch.manual_seed(0)
    M = shape.model_dim
    F = shape.expert_dim
    E = shape.experts
    empty = partial(torch.empty, dtype=torch.bfloat16, device=device)
    return Layer(shape, empty(E, 2 * F, M).normal_(0, M**-0.5), empty(E, M, F).normal_(0, F**-0.5))


def random_tokens(shape: MoeShape, tokens: int, device: str = "cpu") -> Tokens:
    """Draw hidden states and route them by random logits, so evenly but for chance."""
    torch.manual_seed(tokens)
    routing = route(torch.randn(tokens, shape.experts), shape.chosen, renormalise=True)
    x = torch.randn(tokens, shape.model_dim).bfloat16()
    return Tokens(x.to(device), routing.ids.long().to(device), routing.weights.to(device))


def _ours(layer: Layer, of: Tokens) -> torch.Tensor:
    return fused_moe(of.x, (layer.gate_up, layer.down), of.ids, of.weights)


def _packed(layer: Layer, of: Tokens) -> torch.Tensor:
    return fused_moe(of.x, layer.packed, of.ids, of.weights)


def _grouped(layer: Layer, of: Tokens) -> torch.Tensor:
    """Sort the rows by expert, multiply by two grouped products, and restore the order."""
    flat = of.ids.reshape(-1)
    order = flat.argsort(stable=True)
    ends = flat.bincount(minlength=layer.shape.experts).cumsum(0).int()
    rows = of.x.index_select(0, order // of.ids.shape[1])
    gate, up = functional.grouped_mm(rows, layer.gate_up.mT, offs=ends).chunk(2, -1)
    answers = functional.grouped_mm(functional.silu(gate) * up, layer.down.mT, offs=ends)
    answers = answers * of.weights.reshape(-1, 1).index_select(0, order).to(answers.dtype)
    return torch.empty_like(answers).index_copy_(0, order, answers).view(*of.ids.shape, -1).sum(1)


def _loop(layer: Layer, of: Tokens) -> torch.Tensor:
    """Sort the rows by expert and compute two products per expert, as Hugging Face's models do."""
    flat = of.ids.reshape(-1)
    order = flat.argsort(stable=True)
    tokens = order // of.ids.shape[1]
    factors = of.weights.reshape(-1, 1).index_select(0, order).to(of.x.dtype)
    out = torch.zeros_like(of.x)
    begin = 0
    for expert, count in enumerate(flat.bincount(minlength=layer.shape.experts).tolist()):
        if count:
            own = tokens[begin : begin + count]
            gate, up = (of.x.index_select(0, own) @ layer.gate_up[expert].T).chunk(2, -1)
            answers = (functional.silu(gate) * up) @ layer.down[expert].T
            out.index_add_(0, own, answers * factors[begin : begin + count])
            begin += count
    return out


def _pairs(layer: Layer, of: Tokens) -> torch.Tensor:
    """Compute token by token and expert by expert, as the definition says, without sorting."""
    out = torch.zeros_like(of.x)
    for row, x, chosen, weights in zip(out, of.x, of.ids.tolist(), of.weights.tolist(), strict=True):
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (layer.gate_up[expert] @ x).chunk(2)
            row += weight * (layer.down[expert] @ (functional.silu(gate) * up))
    return out


def _vllm(layer: Layer, of: Tokens) -> torch.Tensor:
    return vllm.experts(of.x, layer.for_vllm, of.ids.int(), of.weights)


def _liger(layer: Layer, of: Tokens) -> torch.Tensor:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    answer: torch.Tensor = LigerFusedMoEFunction.apply(of.x, layer.gate_up, layer.down, of.ids.int(), of.weights)
    return answer


_IMPLEMENTATIONS: Mapping[str, Implementation] = {
    OURS: _ours,
    PACKED: _packed,
    GROUPED: _grouped,
    LOOP: _loop,
    LIGER: _liger,
    VLLM: _vllm,
    PAIRS: _pairs,
}


_IN_BF16 = {OURS, PACKED, VLLM}
"""Implementations that compute in bf16 on every CPU."""


def ours(device: str) -> tuple[str, ...]:
    """Ways to call `fused_moe`: with torch's weights, and on a CPU with packed ones."""
    return (OURS, PACKED) if device == "cpu" else (OURS,)


def baselines(device: str) -> tuple[str, ...]:
    """Baselines of `fused_moe`: two by torch, and if it is installed vLLM's on a CPU, Liger's on a GPU."""
    if device == "cpu":
        return (GROUPED, LOOP, VLLM) if vllm.is_installed() else (GROUPED, LOOP)
    return (GROUPED, LOOP, LIGER) if importlib.util.find_spec("liger_kernel") else (GROUPED, LOOP)


def measure_moe(
    shape: MoeShape,
    *,
    device: str = "cpu",
    threads: int | None = None,
    tokens: Sequence[int] = TOKENS,
    contenders: Sequence[str] | None = None,
    seconds: float = 10.0,
) -> MoeSpeeds:
    """Time every implementation at every number of tokens, in random order.

    The implementations are timed one after the other at each number of tokens.

    Repetitions that other programs disturbed are dropped if three others remain. On a CPU where torch is slow in bf16
    (`PLAIN`) its implementations get the same numbers in fp32.

    Parameters
    ----------
    shape : MoeShape
    device : "cpu" or "cuda"
    threads : int, optional
        Threads on the CPU; by default the cores that this process may use.
    tokens : sequence of int
    contenders : sequence of str, optional
        Implementations to set side by side; by default `ours` and the `baselines`.
    seconds : float
        Duration of the measurement [s]; at least three repetitions are made.

    Raises
    ------
    EngineError
        If two implementations do not compute the same.

    Examples
    --------
    >>> measure_moe(MoeShape("tiny", 64, 32, experts=4, chosen=2), tokens=(1, 8), seconds=0).contenders
    ('fused_moe', 'grouped_mm', 'loop of mm')
    """
    size = threads or usable_cores()
    rng = np.random.default_rng(0)
    layer = random_layer(shape, device)
    given = {count: random_tokens(shape, count, device) for count in tokens}
    names = tuple(contenders or (*ours(device), *baselines(device)))
    theirs = PLAIN if device == "cpu" else torch.bfloat16
    their_layer = layer.to(theirs)
    their_tokens = {count: of.to(theirs) for count, of in given.items()}

    def compute(name: str, count: int) -> torch.Tensor:
        if name in _IN_BF16:
            return _IMPLEMENTATIONS[name](layer, given[count])
        return _IMPLEMENTATIONS[name](their_layer, their_tokens[count])

    with torch_threads(size), torch.no_grad():
        for count in tokens:
            _agree({name: compute(name, count) for name in names})
        roofs = Roofs.measured(device, size)
        quiet: dict[int, list[_Visit]] = {count: [] for count in tokens}
        disturbed: dict[int, list[_Visit]] = {count: [] for count in tokens}
        begin = time.perf_counter()
        made = 0
        while time.perf_counter() - begin < seconds or made < LEAST:
            for count in rng.permutation(_repeated(tokens)).tolist():
                order = rng.permutation(names).tolist()
                with listening() as noise:
                    visit = {name: seconds_of(partial(compute, name, count), device) for name in order}
                (quiet if noise.quiet else disturbed)[count].append(visit)
            roofs = roofs.or_better(Roofs.measured(device, size))
            made += 1
    counted = {count: kept(quiet[count], disturbed[count]) for count in tokens}
    runs = list[MoeRun]()
    for name in names:
        for count in tokens:
            touched = len(given[count].ids.unique())
            runs.append(MoeRun(name, count, touched, tuple(visit[name] for visit in counted[count])))
    noisy = sum(len(disturbed[count]) for count in tokens if counted[count] is not quiet[count])
    where = f"{size} thread{'s' if size > 1 else ''}" if device == "cpu" else torch.cuda.get_device_name()
    dropped = sum(map(len, disturbed.values())) - noisy
    return MoeSpeeds(shape, where, *roofs, tuple(runs), dropped, noisy)


_Visit = dict[str, float]
"""Seconds of each implementation at one number of tokens."""


def _repeated(tokens: Sequence[int]) -> list[int]:
    """Numbers of tokens of one round; each of the small ones comes `_OFTEN` times."""
    counts = list[int]()
    for count in dict.fromkeys(tokens):
        counts += [count] * (_OFTEN if count <= _FEW else 1)
    return counts


def _agree(answers: Mapping[str, torch.Tensor]) -> None:
    (first, own), *others = ((name, answer.float()) for name, answer in answers.items())
    for name, answer in others:
        apart = float((answer - own).norm() / own.norm())
        if not apart < _DISAGREE:
            raise EngineError(
                f"{first} and {name} are {apart:.2g} of the answer apart, at most {_DISAGREE} being rounding: "
                f"run the kernels' tests on this machine."
            )


def bench_moe(
    *, seconds: float = 120, json: Path | None = None, say: Callable[[str], None] = record.say
) -> list[MoeSpeeds]:
    """Measure on the GPU if there is one, else on all cores; print times, ratios to baselines and shares of the roof.

    Parameters
    ----------
    seconds : float
        Duration of all measurements together [s].
    json : Path, optional
        File for the record.
    say : callable
        Receives each line of the report.
    """
    if torch.cuda.is_available():
        device = "cuda"
        shapes = (MIXTRAL, QWEN3)
        tokens: Sequence[int] = (*TOKENS, *MANY)
    else:
        device = "cpu"
        shapes = (NARROW, QWEN3)
        tokens = TOKENS
        if PLAIN is torch.float32:
            say("torch's own compute in fp32, since torch is slow in bf16 on this CPU")
    found = []
    for shape in shapes:
        found.append(measure_moe(shape, device=device, tokens=tokens, seconds=seconds / len(shapes)))
        _report(found[-1], say)
    if json is not None:
        ratios = {key: value for speeds in found for key, value in _ratios(speeds).items()}
        rows = [to_plain(speeds) for speeds in found]
        record.write(json, Machine.local(device=device), ratios, rows, family=cpu_family() if device == "cpu" else None)
    return found


def _report(speeds: MoeSpeeds, say: Callable[[str], None]) -> None:
    own, others = _apart(speeds)
    say(
        f"{speeds}, {speeds.dropped} dropped: memory {speeds.read / 1e9:.1f} GB/s, arithmetic "
        f"{speeds.multiply / 1e9:,.0f} GFLOP/s"
    )
    said = [f"{name}: faster, of roof" for name in own]
    say("  ".join([f"{'tokens':>6}", *(f"{name + ' [ms]':>22}" for name in speeds.contenders), *said]))
    for tokens in speeds.tokens:
        times = [f"{speeds.seconds(name, tokens) * 1e3:22.3f}" for name in speeds.contenders]
        for name, words in zip(own, said, strict=True):
            faster = record.ratio(speeds.faster(name, tokens, others))["median"]
            share = speeds.flop_rate(name, tokens) / speeds.roof(tokens)
            times.append(f"{faster:.3f} {share:5.0%}".rjust(len(words)))
        say("  ".join([f"{tokens:6}", *times]))
    say(f"faster: against the best of {', '.join(others)}")


def _apart(speeds: MoeSpeeds) -> tuple[list[str], list[str]]:
    """Names of our own contenders, and of the baselines."""
    own = [name for name in speeds.contenders if name in (OURS, PACKED)]
    return own, [name for name in speeds.contenders if name not in own]


def _ratios(speeds: MoeSpeeds) -> dict[str, dict[str, float]]:
    """Speed relative to each baseline and to the best of torch's, repetition by repetition."""
    own, others = _apart(speeds)
    sets = {"the better of torch's": (GROUPED, LOOP)} | {name: (name,) for name in others}
    ratios = dict[str, dict[str, float]]()
    for tokens in speeds.tokens:
        for name in own:
            what = f"{speeds.shape.name}, {tokens} tokens, {speeds.where}" + (", packed" if name == PACKED else "")
            for said, names in sets.items():
                ratios[f"{what}: times as fast as {said}"] = record.ratio(speeds.faster(name, tokens, names))
    return ratios
