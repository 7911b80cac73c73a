"""A request's sampled tokens depend on its own seed and position, never on the batch; nucleus draws are exact."""

import numpy as np
import pytest
import torch

import workbench as wb
from tests.live.world import differing, longest, requests, scenario
from workbench.core.errors import EngineError, WorkloadError
from workbench.engine.model.sampler import choose_all
from workbench.models import ModelConfig
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.workload import Request, Sampling

ASKED = requests((5, 1, 9, 3, 7, 2, 4, 6), 14, seed=5, t=0.9)


def choose(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The next token after one row of logits."""
    return choose_all(logits[None], [sampling], [position])[0]


def served(model: ModelConfig, asked: tuple[Request, ...], schedule: Schedule, **options: float) -> wb.Result:
    return wb.run(scenario(model, asked, **options), schedule)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Each request served by itself."""
    return tuple(served(tiny, (request,), Sequential()).tokens[0] for request in ASKED)


@pytest.mark.parametrize("schedule", [Sequential(1), Sequential(3), VSLPipe()], ids=str)
def test_same_tokens_in_any_batch(schedule: Schedule, tiny: ModelConfig, alone: tuple[tuple[int, ...], ...]) -> None:
    assert served(tiny, ASKED, schedule).tokens == alone


def test_same_tokens_in_any_order(tiny: ModelConfig, alone: tuple[tuple[int, ...], ...]) -> None:
    assert served(tiny, ASKED[::-1], VSLPipe()).tokens == alone[::-1]


@pytest.mark.parametrize("block", [1, 4])
def test_same_tokens_after_preemption(block: int, tiny: ModelConfig, alone: tuple[tuple[int, ...], ...]) -> None:
    result = served(tiny, ASKED, VSLPipe(), tokens=longest(ASKED), block=block, budget=1000)
    assert result.preemptions >= 4
    assert result.tokens == alone


def test_seed_temperature_and_position_matter(tiny: ModelConfig, alone: tuple[tuple[int, ...], ...]) -> None:
    reseeded = tuple(Request(r.prompt, r.output_len, Sampling(0.9, 0.95, r.sampling.seed + 77)) for r in ASKED)
    greedy = tuple(Request(r.prompt, r.output_len) for r in ASKED)
    assert differing(served(tiny, reseeded, Sequential()).tokens, alone) >= 0.75
    assert differing(served(tiny, greedy, Sequential()).tokens, alone) >= 0.75
    flat = torch.zeros(1000)
    assert len({choose(flat, Sampling(1.0), position) for position in range(50)}) > 40


def test_a_needle_nucleus_is_greedy(tiny: ModelConfig) -> None:
    needle = tuple(Request(r.prompt, r.output_len, Sampling(0.9, 1e-9, 5)) for r in ASKED)
    greedy = tuple(Request(r.prompt, r.output_len) for r in ASKED)
    assert served(tiny, needle, Sequential()).tokens == served(tiny, greedy, Sequential()).tokens


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> np.ndarray:
    """Exact probabilities: the fewest largest whose sum reaches top_p, renormalised. Written with a plain loop."""
    p = np.exp(logits.double().numpy() / temperature)
    p /= p.sum()
    kept, mass = [], 0.0
    for token in sorted(range(len(p)), key=lambda token: -p[token]):
        kept.append(token)
        mass += p[token]
        if mass >= top_p:
            break
    exact = np.zeros(len(p))
    exact[kept] = p[kept] / mass
    return exact


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (1.8, 0.5), (0.3, 0.999)])
def test_draws_follow_the_nucleus(temperature: float, top_p: float, by: str) -> None:
    """Chi-square over fixed seeds; its bound is the mean plus six standard deviations."""
    logits = torch.randn(23, generator=torch.Generator().manual_seed(4)) * 1.5
    exact, draws = nucleus(logits, temperature, top_p), 3000
    seen = np.zeros(len(exact))
    for number in range(draws):
        seed, position = (number, 3) if by == "seed" else (3, number)
        seen[choose(logits, Sampling(temperature, top_p, seed), position)] += 1
    assert not seen[exact == 0].any()
    inside = exact * draws >= 5
    expected, got = exact[inside] * draws, seen[inside]
    rest = (exact[~inside].sum() * draws, seen[~inside].sum())
    square = float(((got - expected) ** 2 / expected).sum()) + (
        (rest[1] - rest[0]) ** 2 / rest[0] if rest[0] > 1 else 0
    )
    freedom = max(1, int(inside.sum()) - 1)
    assert square < freedom + 6 * (2 * freedom) ** 0.5


def test_the_chi_square_bites() -> None:
    """Draws of another temperature break the bound that the right ones keep."""
    logits = torch.randn(23, generator=torch.Generator().manual_seed(4)) * 1.5
    exact, draws = nucleus(logits, 1.0, 1.0), 6000
    seen = np.bincount([choose(logits, Sampling(1.1, 1.0, seed), 0) for seed in range(draws)], minlength=23)
    assert float(((seen - exact * draws) ** 2 / (exact * draws)).sum()) > 22 + 6 * 44**0.5


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 1e-310])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 2.5, 2.4, 0.0])
    assert choose(logits, Sampling(temperature, 1.0, 1), 0) == 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, 1)], ids=["greedy", "nucleus"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_told(bad: float, sampling: Sampling) -> None:
    """A model that overflowed must not look like one that answers."""
    with pytest.raises(EngineError, match="logits"):
        choose(torch.tensor([0.0, bad, 1.0, bad]), sampling, 0)


def test_ties_go_to_the_first() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0])
    assert choose(logits, Sampling(), 0) == choose(logits, Sampling(1.0, 1e-9, 3), 0) == 1


@pytest.mark.parametrize("seed", [-1, 2**200])
def test_a_seed_that_cannot_be_used_is_refused_at_once(seed: int) -> None:
    with pytest.raises(WorkloadError, match="seed"):
        Sampling(1.0, 1.0, seed)
