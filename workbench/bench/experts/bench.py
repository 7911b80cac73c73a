"""Routed experts against tokens per expert: our kernels in each format, torch in bf16, and what memory allows."""

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
from workbench.bench.cpu.work import eager_expert
from workbench.bench.experts.speeds import ExpertSpeeds, Run
from workbench.core.quiet import LEAST, kept, listening
from workbench.hardware import Machine, usable_cores
from workbench.kernels import PackedExperts, fused_moe, fused_moe_reference, multiply_add, pack_experts, read_memory

TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512)
"""Tokens per expert, close together where the kernels change over."""
EXACT, ROUNDED, INT8, INT4, TORCH = "BF16, exact", "BF16, rounded", "INT8", "INT4", "torch, BF16"
MODEL, INNER = 2048, 1408
"""Model and expert dim of `bench experts`: DeepSeek-V2-Lite's."""
_OURS = {EXACT: "bf16", ROUNDED: "bf16", INT8: "int8", INT4: "int4"}
_TOGETHER = 64
"""Pairs of token and expert up to which a call takes several experts, so that calling counts for little."""
_POOL = 1 << 27
"""Bytes read before each run: its ceiling, and the caches are full of something else after it."""


@dataclass(frozen=True)
class ExpertWeights:
    """Random experts in bf16 as torch takes them, (E, 2 F, M) and (E, M, F), and packed for our kernels by format."""

    gate_up: torch.Tensor
    down: torch.Tensor
    packed: Mapping[str, PackedExperts]

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
    """Normally distributed weights, of a size that keeps activations near one, and packed in each format.

    Examples
    --------
    >>> len(random_experts(64, 32, experts=2))
    2
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5).bfloat16()

    gate_up, down = normal(experts, 2 * expert_dim, model_dim), normal(experts, model_dim, expert_dim)
    packed = {name: pack_experts(gate_up, down, format=name) for name in dict.fromkeys(_OURS.values())}
    return ExpertWeights(gate_up, down, packed)


@dataclass(frozen=True)
class Call:
    """So many experts with so many tokens each, by any contender."""

    weights: ExpertWeights
    experts: int
    tokens: int
    h: npt.NDArray[np.float32]

    @classmethod
    def of(cls, weights: ExpertWeights, tokens: int) -> Call:
        """As many experts as a call takes, with normed hidden states of their tokens."""
        experts = max(1, min(len(weights), _TOGETHER // tokens))
        rng = np.random.default_rng(tokens)
        return cls(weights, experts, tokens, rng.standard_normal((experts * tokens, weights.model_dim), np.float32))

    def compute(self, contender: str, threads: int) -> npt.NDArray[np.float32]:
        """One row per token (experts * tokens, M); torch takes its number of threads from outside."""
        if contender == TORCH:
            return self._torch()
        ids = np.repeat(np.arange(self.experts), self.tokens)[:, None]
        own, ones = self.weights.packed[_OURS[contender]], np.ones(ids.shape, np.float32)
        return fused_moe(self.h, own, ids, ones, exact=contender == EXACT, threads=threads)

    def _torch(self) -> npt.NDArray[np.float32]:
        """Expert by expert."""
        out = torch.empty(self.h.shape)
        for expert, (rows, to) in enumerate(
            zip(torch.from_numpy(self.h).split(self.tokens), out.split(self.tokens), strict=True)
        ):
            to.copy_(eager_expert(rows, self.weights.gate_up[expert], self.weights.down[expert]))
        return out.numpy()

    def contenders(self) -> list[str]:
        """Who has code of its own for so many tokens: rounding starts above a few, and only on some CPUs."""
        same = np.array_equal(self.compute(EXACT, 1), self.compute(ROUNDED, 1))
        return [name for name in (*_OURS, TORCH) if not (same and name == ROUNDED)]


def measure_experts(
    weights: ExpertWeights, *, threads: int | None = None, tokens: Sequence[int] = TOKENS, seconds: float = 10.0
) -> ExpertSpeeds:
    """Time every contender at every number of tokens per expert, in rounds of random order.

    Before each run other memory is read, which gives the run's ceiling and leaves the caches without weights. Rounds
    that other programs disturbed are dropped if three others remain.

    Parameters
    ----------
    weights : ExpertWeights
        From `random_experts`.
    threads : int, optional
        That compute; the cores that this process may use unless given.
    tokens : sequence of int
        Tokens per expert.
    seconds : float
        How long to go on [s]; at least three rounds are made.

    Examples
    --------
    >>> speeds = measure_experts(random_experts(64, 32, experts=2), tokens=(1, 8), seconds=0)
    >>> speeds.tokens("INT8")
    (1, 8)
    """
    size, pool, rng = threads or usable_cores(), np.ones(_POOL, np.int8), np.random.default_rng(1)
    calls = [Call.of(weights, count) for count in tokens]
    with torch_threads(size):
        timed = [(name, call) for call in calls for name in call.contenders()]
        for name, call in timed:
            call.compute(name, size)
        quiet, disturbed, begin = list[_Round](), list[_Round](), time.perf_counter()
        while time.perf_counter() - begin < seconds or len(quiet) + len(disturbed) < LEAST:
            with listening() as noise:
                seen = _round(timed, pool, size, rng)
            (quiet if noise.quiet else disturbed).append(seen)
    counted = kept(quiet, disturbed)
    found = {(name, call.tokens): tuple(one.runs[name, call.tokens] for one in counted) for name, call in timed}
    noisy = len(disturbed) if counted is not quiet else 0
    multiply = float(np.median([one.multiply for one in counted]))
    own = {name for name, _ in timed}
    sizes = {name: _expert_bytes(weights, name) for name in (*_OURS, TORCH) if name in own}
    dims = weights.model_dim, weights.expert_dim
    return ExpertSpeeds(*dims, size, sizes, found, multiply, len(disturbed) - noisy, noisy)


@dataclass(frozen=True)
class _Round:
    runs: dict[tuple[str, int], Run]
    multiply: float


def _round(
    timed: Sequence[tuple[str, Call]], pool: npt.NDArray[np.int8], threads: int, rng: np.random.Generator
) -> _Round:
    runs = {}
    for place in rng.permutation(len(timed)).tolist():
        name, call = timed[place]
        read, _ = _timed(partial(read_memory, pool, threads=threads))
        took, _ = _timed(partial(call.compute, name, threads))
        runs[name, call.tokens] = Run(took / call.experts, pool.nbytes / read)
    took, flops = _timed(partial(multiply_add, threads=threads))
    return _Round(runs, flops / took)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    done = call()
    return time.perf_counter() - begin, done


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """So many threads for torch, and as many as before when it is over."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _expert_bytes(weights: ExpertWeights, contender: str) -> int:
    own = weights.packed[_OURS.get(contender, "bf16")]
    return own.nbytes // len(own)


def expert_errors(weights: ExpertWeights, *, tokens: int = 32) -> dict[str, dict[str, float]]:
    """Relative Frobenius errors of the first expert's answers, by contender.

    ``computing`` is against float64 with the weights as the contender holds them, ``with the format`` against float64
    with the weights before they were packed.

    Examples
    --------
    >>> errors = expert_errors(random_experts(64, 32, experts=1))
    >>> errors["INT8"]["computing"] < errors["INT4"]["with the format"]
    True
    """
    one = ExpertWeights(weights.gate_up[:1], weights.down[:1], {})
    packed = {name: pack_experts(one.gate_up, one.down, format=name) for name in weights.packed}
    call = Call.of(ExpertWeights(one.gate_up, one.down, packed), tokens)
    ids, ones = np.zeros((tokens, 1), np.int64), np.ones((tokens, 1), np.float32)
    true = {name: fused_moe_reference(call.h, own, ids, ones) for name, own in packed.items()}
    return {
        name: {
            "computing": _error(answer, true[_OURS.get(name, "bf16")]),
            "with the format": _error(answer, true["bf16"]),
        }
        for name in call.contenders()
        for answer in [call.compute(name, 1)]
    }


def _error(found: npt.NDArray[Any], true: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def bench_experts(
    *, seconds: float = 60, json: Path | None = None, say: Callable[[str], None] = record.say
) -> list[ExpertSpeeds]:
    """Measure on one thread and on all; print GFLOP/s by tokens per expert, who overtakes whom, and errors.

    Parameters
    ----------
    seconds : float
        How long to measure in all [s].
    json : Path, optional
        Where to write the record.
    say : callable
        Takes each line of the report.
    """
    weights, counts = random_experts(MODEL, INNER), sorted({1, usable_cores()})
    found = [measure_experts(weights, threads=n, seconds=seconds / len(counts)) for n in counts]
    for speeds in found:
        _report(speeds, say)
    errors = expert_errors(weights)
    for name, error in errors.items():
        say(f"{name:14} error {error['computing']:.1e}, with the format {error['with the format']:.1e}")
    if json is not None:
        ratios = {key: value for speeds in found for key, value in _ratios(speeds).items()}
        rows = [row for speeds in found for row in _rows(speeds)]
        record.write(json, Machine.local(), ratios, [*rows, {"errors": errors}])
    return found


def _report(speeds: ExpertSpeeds, say: Callable[[str], None]) -> None:
    say(
        f"{speeds}, {speeds.dropped} dropped: reads {speeds.read / 1e9:.1f} GB/s, multiplies "
        f"{speeds.multiply / 1e9:.0f} GFLOP/s in fp32"
    )
    say(f"{'GFLOP/s':>10}  " + "  ".join(f"{name:>13}" for name in speeds.contenders))
    for tokens in speeds.tokens(EXACT):
        cells = [
            f"{speeds.flop_rate(name, tokens) / 1e9:13.0f}" if (name, tokens) in speeds.runs else " " * 13
            for name in speeds.contenders
        ]
        say(f"{tokens:4} tokens  " + "  ".join(cells))
    for name in speeds.contenders:
        if name != EXACT:
            first = speeds.overtakes(name, EXACT)
            say(f"{name}: " + (f"ahead of {EXACT} from {first} tokens on" if first else f"never ahead of {EXACT}"))


def _ratios(speeds: ExpertSpeeds) -> dict[str, dict[str, float]]:
    """Times as fast as torch, run by run of the same round."""
    return {
        f"{name}, {tokens} tokens, {speeds.threads} threads: times as fast as torch": record.ratio(
            [other.seconds / own.seconds for own, other in zip(runs, speeds.runs[TORCH, tokens], strict=True)]
        )
        for (name, tokens), runs in speeds.runs.items()
        if name != TORCH
    }


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
