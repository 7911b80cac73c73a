"""Benchmark of routed experts over tokens per expert: our kernels and torch's in each format, and memory's limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import workbench.engine  # noqa: F401  # first of all: it sets how idle threads wait, which torch reads once

# isort: split
import numpy as np
import numpy.typing as npt
import torch

from workbench.bench import record
from workbench.bench.experts.peers import TORCH, TORCH_INT4, TORCH_INT8, TORCH_INT8_WEIGHTS, Peer, torch_peers
from workbench.bench.experts.speeds import ExpertRun, ExpertSpeeds
from workbench.core.quiet import LEAST, kept, listening
from workbench.hardware import Machine, usable_cores
from workbench.kernels import (
    PackedExperts,
    cpu_family,
    fused_moe,
    fused_moe_reference,
    multiply_add,
    pack_experts,
    read_memory,
)

TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512)
"""Tokens per expert, close together where the kernels change their code path."""
EXACT = "BF16, exact"
ROUNDED = "BF16, rounded"
INT8 = "INT8"
INT4 = "INT4"
MODEL = 2048
INNER = 1408
"""Model and expert dim of `bench experts`: DeepSeek-V2-Lite's."""
_OURS = {EXACT: "bf16", ROUNDED: "bf16", INT8: "int8", INT4: "int4"}
_PEERS = {EXACT: (TORCH,), ROUNDED: (TORCH,), INT8: (TORCH, TORCH_INT8, TORCH_INT8_WEIGHTS), INT4: (TORCH, TORCH_INT4)}
"""What a user would take instead, the strongest of which counts."""
_TOGETHER = 64
"""Pairs of token and expert per call: a call of few tokens takes several experts to outweigh its fixed cost."""
_WIDTH = 19
"""Columns of an implementation's name."""
_POOL = 1 << 27
"""Bytes read before each run, which measures the run's ceiling and evicts the weights from the caches."""


@dataclass(frozen=True)
class ExpertWeights:
    """Random experts in bf16, (E, 2 F, M) and (E, M, F), packed for our kernels by format, and in torch's formats."""

    gate_up: torch.Tensor
    down: torch.Tensor
    packed: Mapping[str, PackedExperts]
    peers: Mapping[str, Peer]

    @classmethod
    def of(cls, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
        """Pack weights in bf16 in each format."""
        packed = {name: pack_experts(gate_up, down, format=name) for name in dict.fromkeys(_OURS.values())}
        return cls(gate_up, down, packed, torch_peers(gate_up, down))

    def __len__(self) -> int:
        return len(self.down)

    @property
    def model_dim(self) -> int:
        """M."""
        return int(self.down.shape[1])

    @property
    def expert_dim(self) -> int:
        """F."""
        return int(self.down.shape[2])


def random_experts(model_dim: int, expert_dim: int, *, experts: int = 8) -> ExpertWeights:
    """Draw normally distributed weights of a scale that keeps activations near one, and pack them in each format.

    Examples
    --------
    >>> len(random_experts(64, 32, experts=2))
    2
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5).bfloat16()

    gate_up = normal(experts, 2 * expert_dim, model_dim)
    down = normal(experts, model_dim, expert_dim)
    return ExpertWeights.of(gate_up, down)


@dataclass(frozen=True)
class Call:
    """Operands of one call: a number of experts with the same number of tokens each, for any implementation."""

    weights: ExpertWeights
    experts: int
    tokens: int
    h: npt.NDArray[np.float32]

    @classmethod
    def of(cls, weights: ExpertWeights, tokens: int) -> Call:
        """Choose as many experts as a call takes, and draw normed hidden states for their tokens."""
        experts = max(1, min(len(weights), _TOGETHER // tokens))
        rng = np.random.default_rng(tokens)
        return cls(weights, experts, tokens, rng.standard_normal((experts * tokens, weights.model_dim), np.float32))

    def compute(self, implementation: str, threads: int) -> npt.NDArray[np.float32]:
        """Compute one row per token (experts * tokens, M); set torch's number of threads with `torch_threads`."""
        if implementation in self.weights.peers:
            return self._torch(self.weights.peers[implementation])
        ids = np.repeat(np.arange(self.experts), self.tokens)[:, None]
        own = self.weights.packed[_OURS[implementation]]
        ones = np.ones(ids.shape, np.float32)
        return fused_moe(self.h, own, ids, ones, exact=implementation == EXACT, threads=threads)

    def _torch(self, peer: Peer) -> npt.NDArray[np.float32]:
        """Compute expert by expert."""
        hidden = torch.from_numpy(self.h)
        out = torch.empty(self.h.shape)
        for expert in range(self.experts):
            own = slice(expert * self.tokens, (expert + 1) * self.tokens)
            out[own] = peer.compute(expert, hidden[own])
        return out.numpy()

    def implementations(self) -> list[str]:
        """Implementations with code of their own for this many tokens: some CPUs round above a few tokens."""
        same = np.array_equal(self.compute(EXACT, 1), self.compute(ROUNDED, 1))
        return [name for name in (*_OURS, *self.weights.peers) if not (same and name == ROUNDED)]


def measure_experts(
    weights: ExpertWeights, *, threads: int | None = None, tokens: Sequence[int] = TOKENS, seconds: float = 10.0
) -> ExpertSpeeds:
    """Time every implementation at every number of tokens per expert, in rounds of random order.

    Before each run other memory is read, which measures the run's ceiling and evicts the weights from the caches.
    Rounds that other programs disturbed are dropped if three others remain.

    Parameters
    ----------
    weights : ExpertWeights
        From `random_experts`.
    threads : int, optional
        Number of threads; by default the cores that this process may use.
    tokens : sequence of int
        Tokens per expert.
    seconds : float
        Duration of the measurement [s]; at least three rounds are made.

    Examples
    --------
    >>> speeds = measure_experts(random_experts(64, 32, experts=2), tokens=(1, 8), seconds=0)
    >>> speeds.tokens("INT8")
    (1, 8)
    """
    size = threads or usable_cores()
    pool = np.ones(_POOL, np.int8)
    rng = np.random.default_rng(1)
    calls = [Call.of(weights, count) for count in tokens]
    with torch_threads(size):
        timed = [(name, call) for call in calls for name in call.implementations()]
        for name, call in timed:
            call.compute(name, size)
        quiet = list[_Round]()
        disturbed = list[_Round]()
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds or len(quiet) + len(disturbed) < LEAST:
            with listening() as noise:
                seen = _round(timed, pool, size, rng)
            (quiet if noise.quiet else disturbed).append(seen)
    counted = kept(quiet, disturbed)
    found = {(name, call.tokens): _runs(counted, name, call.tokens) for name, call in timed}
    noisy = len(disturbed) if counted is not quiet else 0
    multiply = float(np.median([one.multiply for one in counted]))
    own = {name for name, _ in timed}
    sizes = {name: _expert_bytes(weights, name) for name in (*_OURS, *weights.peers) if name in own}
    dims = weights.model_dim, weights.expert_dim
    return ExpertSpeeds(*dims, size, sizes, found, multiply, len(disturbed) - noisy, noisy)


@dataclass(frozen=True)
class _Round:
    runs: dict[tuple[str, int], ExpertRun]
    multiply: float


def _runs(rounds: Sequence[_Round], name: str, tokens: int) -> tuple[ExpertRun, ...]:
    return tuple(one.runs[name, tokens] for one in rounds)


def _round(
    timed: Sequence[tuple[str, Call]], pool: npt.NDArray[np.int8], threads: int, rng: np.random.Generator
) -> _Round:
    runs = {}
    for place in rng.permutation(len(timed)).tolist():
        name, call = timed[place]
        read, _ = _timed(partial(read_memory, pool, threads=threads))
        took, _ = _timed(partial(call.compute, name, threads))
        runs[name, call.tokens] = ExpertRun(took / call.experts, pool.nbytes / read)
    took, flops = _timed(partial(multiply_add, threads=threads))
    return _Round(runs, flops / took)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    done = call()
    return time.perf_counter() - begin, done


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _expert_bytes(weights: ExpertWeights, implementation: str) -> int:
    if implementation in weights.peers:
        return weights.peers[implementation].nbytes
    own = weights.packed[_OURS[implementation]]
    return own.nbytes // len(own)


def expert_errors(weights: ExpertWeights, *, tokens: int = 32) -> dict[str, dict[str, float]]:
    """Relative Frobenius errors of the first expert's answers, by implementation.

    ``with the format`` is relative to float64 with the weights before they were packed; ``computing``, of our kernels
    alone, to float64 with the packed weights.

    Examples
    --------
    >>> errors = expert_errors(random_experts(64, 32, experts=1))
    >>> errors["INT8"]["computing"] < errors["INT4"]["with the format"]
    True
    """
    one = ExpertWeights.of(weights.gate_up[:1], weights.down[:1])
    call = Call.of(one, tokens)
    ids = np.zeros((tokens, 1), np.int64)
    ones = np.ones((tokens, 1), np.float32)
    true = {name: fused_moe_reference(call.h, own, ids, ones) for name, own in one.packed.items()}
    errors = {}
    for name in call.implementations():
        answer = call.compute(name, 1)
        errors[name] = {"with the format": _error(answer, true["bf16"])}
        if name in _OURS:
            errors[name]["computing"] = _error(answer, true[_OURS[name]])
    return errors


def _error(found: npt.NDArray[Any], true: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def bench_experts(
    *, seconds: float = 60, json: Path | None = None, say: Callable[[str], None] = record.say
) -> list[ExpertSpeeds]:
    """Measure on one thread and on all; print GFLOP/s by tokens per expert, crossings, and errors.

    Parameters
    ----------
    seconds : float
        Duration of all measurements together [s].
    json : Path, optional
        File for the record.
    say : callable
        Receives each line of the report.
    """
    weights = random_experts(MODEL, INNER)
    counts = sorted({1, usable_cores()})
    found = [measure_experts(weights, threads=n, seconds=seconds / len(counts)) for n in counts]
    for speeds in found:
        _report(speeds, say)
    errors = expert_errors(weights)
    for name, error in errors.items():
        computing = f", of computing {error['computing']:.1e}" if "computing" in error else ""
        say(f"{name:{_WIDTH}} error {error['with the format']:.1e}{computing}")
    if json is not None:
        ratios = {key: value for speeds in found for key, value in _ratios(speeds).items()}
        rows = [row for speeds in found for row in _rows(speeds)]
        record.write(json, Machine.local(device="cpu"), ratios, [*rows, {"errors": errors}], family=cpu_family())
    return found


def _report(speeds: ExpertSpeeds, say: Callable[[str], None]) -> None:
    say(
        f"{speeds}, {speeds.dropped} dropped: reads {speeds.read / 1e9:.1f} GB/s, multiplies "
        f"{speeds.multiply / 1e9:.0f} GFLOP/s in fp32"
    )
    say(f"{'GFLOP/s':>10}  " + "  ".join(f"{name:>{_WIDTH}}" for name in speeds.contenders))
    for tokens in speeds.tokens(EXACT):
        cells = [
            f"{speeds.flop_rate(name, tokens) / 1e9:{_WIDTH}.0f}" if (name, tokens) in speeds.runs else " " * _WIDTH
            for name in speeds.contenders
        ]
        say(f"{tokens:4} tokens  " + "  ".join(cells))
    for name in speeds.contenders:
        if name != EXACT:
            first = speeds.overtakes(name, EXACT)
            say(f"{name}: " + (f"ahead of {EXACT} from {first} tokens on" if first else f"never ahead of {EXACT}"))

    for name in speeds.contenders:
        if name in _PEERS:
            peers = _peers(speeds, name)
            ratios = [f"{_ratio(speeds, name, peers, n)['median']:.2f}" for n in speeds.tokens(name)]
            say(f"{name}: times as fast as the fastest of {', '.join(peers)}: {' '.join(ratios)}")


def _ratios(speeds: ExpertSpeeds) -> dict[str, dict[str, float]]:
    """Speed relative to each of the peers, from the runs of the same rounds."""
    ratios = {}
    for name, tokens in speeds.runs:
        for peer in _peers(speeds, name):
            found = f"{name}, {tokens} tokens, {speeds.threads} threads: times as fast as {peer}"
            ratios[found] = _ratio(speeds, name, (peer,), tokens)
    return ratios


def _peers(speeds: ExpertSpeeds, name: str) -> list[str]:
    """The peers of one of ours that were measured."""
    return [peer for peer in _PEERS.get(name, ()) if peer in speeds.contenders]


def _ratio(speeds: ExpertSpeeds, name: str, peers: Sequence[str], tokens: int) -> dict[str, float]:
    """The speed of one over that of the fastest of its peers, from the runs of the same rounds."""
    fastest = min(peers, key=lambda peer: speeds.seconds(peer, tokens))
    pairs = zip(speeds.runs[name, tokens], speeds.runs[fastest, tokens], strict=True)
    return record.ratio([theirs.seconds / own.seconds for own, theirs in pairs])


def _rows(speeds: ExpertSpeeds) -> list[dict[str, float | str]]:
    return [
        {
            "contender": name,
            "tokens": tokens,
            "threads": speeds.threads,
            "seconds": speeds.seconds(name, tokens),
            "flop_rate": speeds.flop_rate(name, tokens),
            "memory_share": speeds.memory_share(name, tokens),
        }
        for name, tokens in speeds.runs
    ]
