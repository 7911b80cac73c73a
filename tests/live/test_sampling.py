"""A request's sampled tokens depend on its own seed, position and tokens, never on the batch; draws are exact."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.examples import examples
from tests.live.conftest import Oracle, one_thread
from tests.live.world import differing, longest, requests, scenario
from workbench.core.errors import EngineError, WorkloadError
from workbench.engine.model.sampler import choose_all
from workbench.models import ModelConfig
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.workload import Request, Sampling

KNOBS = (
    {},
    {"top_k": 5},
    {"min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"top_k": 20, "min_p": 0.01, "repetition_penalty": 0.8, "presence_penalty": -1.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 3},
)
ASKED = tuple(
    replace(request, sampling=replace(request.sampling, **knobs))
    for request, knobs in zip(requests((5, 1, 9, 3, 7, 2, 4, 6), 14, seed=5, t=0.9), KNOBS, strict=True)
)


def choose(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The next token after one row of logits."""
    return after(logits, sampling, (0,), (0,) * position)


def after(logits: torch.Tensor, sampling: Sampling, prompt: tuple[int, ...], made: tuple[int, ...]) -> int:
    """The next token of a request after one row of logits."""
    return choose_all(logits[None], [Request(prompt, 99, sampling)], [prompt + made])[0]


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
    asked = [request.sampling.logprobs for request in ASKED]
    assert [len(own) for own in result.logprobs] == [0 if each is None else 14 for each in asked]


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


# ------------------------------------------------------------------------------------------ transformers' definitions


def processed(
    logits: torch.Tensor, how: Sampling, prompt: tuple[int, ...], made: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores behind the penalties, and the probabilities of a draw, in float64 by transformers' processors.

    The presence penalty, which it lacks, is as OpenAI's documentation gives it: `mu[j] - (c[j] > 0) alpha_presence`.
    """
    from transformers.generation import logits_process as theirs

    ids, scores = torch.tensor([prompt + made]), logits.double()[None]
    scores = theirs.RepetitionPenaltyLogitsProcessor(float(how.repetition_penalty))(ids, scores)
    counts = torch.bincount(torch.tensor(made, dtype=torch.long), minlength=len(logits))
    scores = penalised = scores - (counts > 0) * how.presence_penalty
    if how.temperature:
        scores = theirs.TemperatureLogitsWarper(float(how.temperature))(ids, scores)
    if how.top_k:
        scores = theirs.TopKLogitsWarper(how.top_k)(ids, scores)
    if how.top_p < 1:
        scores = theirs.TopPLogitsWarper(how.top_p)(ids, scores)
    if how.min_p:
        scores = theirs.MinPLogitsWarper(how.min_p)(ids, scores)
    return penalised[0], scores[0].softmax(0)


ids = st.lists(st.integers(0, 29), max_size=12).map(tuple)
settings = st.builds(
    Sampling,
    temperature=st.sampled_from([1.0, 2.5, 0.5, 0.0]),
    top_k=st.sampled_from([0, 0, 17, 3, 1, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.99, 0.8, 0.3, 0.001]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6, 5.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.2, 2.0]),
)
"""Mostly such that many tokens are left."""


@examples(200)
@given(settings, ids.filter(len), ids, st.integers(0, 2**32 - 1))
def test_every_token_is_drawn_with_the_probability_of_transformers(
    how: Sampling, prompt: tuple[int, ...], made: tuple[int, ...], seed: int
) -> None:
    """The whole distribution: a number within a token's share of [0, 1] draws it, the likeliest token first."""
    pytest.importorskip("transformers")
    logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 3
    scores, exact = processed(logits, how, prompt, made)
    if not how.temperature:
        assert after(logits, how, prompt, made) == int(scores.argmax())
        return
    order = exact.argsort(descending=True)
    ends = exact[order].cumsum(0).tolist()
    for token, share, end in zip(order.tolist(), exact[order].tolist(), ends, strict=True):
        if share > 1e-4:
            for number in (end - 0.98 * share, end - 0.02 * share):
                with patch("kernels_triton.vocabulary.sampling.uniform", return_value=number):
                    assert after(logits, how, prompt, made) == token


def test_of_equal_logits_the_first_are_kept() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert {choose(logits, Sampling(1.0, top_k=2, seed=n), 0) for n in range(50)} == {1, 2}


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_greedy_tokens_with_a_penalty_are_those_of_transformers(
    penalty: float, tiny: ModelConfig, oracle: Callable[[ModelConfig], Oracle]
) -> None:
    asked = requests((5, 1, 9), 20, seed=3)
    mine = served(tiny, tuple(replace(r, sampling=Sampling(repetition_penalty=penalty)) for r in asked), VSLPipe())
    assert differing(mine.tokens, served(tiny, asked, VSLPipe()).tokens) > 0.5
    for request, tokens in zip(asked, mine.tokens, strict=True):
        how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "repetition_penalty": penalty}
        with one_thread():
            theirs = oracle(tiny).model.generate(torch.tensor([request.prompt]), **how)
        assert tuple(theirs[0, len(request.prompt) :].tolist()) == tokens


# ----------------------------------------------------------------------------------------------- log probabilities


def test_log_probabilities_are_of_the_models_own_logits(
    tiny: ModelConfig, oracle: Callable[[ModelConfig], Oracle]
) -> None:
    how = Sampling(0.9, repetition_penalty=1.5, presence_penalty=1.0, top_k=9, logprobs=4)
    asked = tuple(replace(request, sampling=how) for request in requests((5, 1, 9), 12, seed=3))
    result = served(tiny, asked, VSLPipe())
    for request, tokens, own in zip(asked, result.tokens, result.logprobs, strict=True):
        scores = oracle(tiny).scores(request.prompt + tokens[:-1])[len(request.prompt) - 1 :]
        exact = scores.double().log_softmax(1)
        assert [each.logprob for each in own] == pytest.approx(exact[range(12), list(tokens)].tolist(), abs=1e-4)
        best = exact.topk(4)
        assert [[token for token, _ in each.best] for each in own] == best.indices.tolist()
        found = torch.tensor([[value for _, value in each.best] for each in own], dtype=torch.float64)
        torch.testing.assert_close(found, best.values, rtol=0, atol=1e-4)


def test_log_probabilities_are_saved_and_change_no_token(
    tiny: ModelConfig, alone: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    result = served(tiny, ASKED, Sequential())
    assert wb.Result.load(result.save(tmp_path / "result.json")).logprobs == result.logprobs
    assert {len(each.best) for own in result.logprobs for each in own} == {0, 2, 3}
    plain = tuple(replace(r, sampling=replace(r.sampling, logprobs=None)) for r in ASKED)
    assert served(tiny, plain, Sequential()).logprobs == ()
    assert served(tiny, plain, Sequential()).tokens == result.tokens == alone
