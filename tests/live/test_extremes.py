"""The corners: one of everything, all of everything, and settings nobody would choose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import workbench as wb
from tests.live.world import RUNNABLE, SCHEDULES, TINY, longest, machine, requests, scenario
from workbench.core.errors import CapacityError
from workbench.models import ModelConfig
from workbench.schedules import Schedule, Sequential, VSLPipe

ASKED = requests((5, 1, 9, 3), 6, seed=5)
KNOBS = [Sequential(1), Sequential(2), Sequential(7), VSLPipe()]

MODELS = {
    "one layer": replace(TINY, name="one-layer", num_hidden_layers=1),
    "five layers": replace(TINY, name="five-layers", num_hidden_layers=5),
    "one expert": replace(TINY, name="one-expert", num_local_experts=1, num_experts_per_tok=1),
    "all experts": replace(TINY, name="all-experts", num_experts_per_tok=4),
    "one head": replace(TINY, name="one-head", num_attention_heads=1, num_key_value_heads=1),
    "head dim of two": replace(TINY, name="head-dim", head_dim=2),
    "inner of one": replace(TINY, name="inner", intermediate_size=1),
    "two words": replace(TINY, name="two-words", vocab_size=2),
}


RARE = ("one head", "head dim of two", "inner of one", "two words")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in RARE else n for n in MODELS])
def test_models(name: str, make_model: Callable[..., ModelConfig], oracle: Any) -> None:
    model = make_model(MODELS[name], 3)
    asked = requests((5, 1, 9, 3), 6, vocab=model.vocab_size, seed=5)
    answer = oracle(model).generate(asked)
    assert answer.gap > 1e-4
    for schedule in (Sequential(1), VSLPipe()):
        for tokens, block in ((4096, 16), (longest(asked), 1)):
            result = wb.run(scenario(model, asked, tokens=tokens, block=block), schedule)
            assert result.tokens == answer.tokens


@pytest.fixture(scope="module")
def right(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return tuple(wb.run(scenario(tiny, (request,)), Sequential()).tokens[0] for request in ASKED)


@pytest.mark.parametrize("schedule", KNOBS, ids=str)
def test_a_single_request(schedule: Schedule, tiny: ModelConfig, right: Any) -> None:
    """All parts but one are empty, in every iteration."""
    for request, tokens in zip(ASKED, right, strict=True):
        assert wb.run(scenario(tiny, (request,), tokens=longest([request]), block=1), schedule).tokens == (tokens,)


@pytest.mark.parametrize("name", RUNNABLE)
def test_one_token_each(name: str, tiny: ModelConfig, right: Any) -> None:
    """Nothing ever decodes; the first iteration may be the last."""
    asked = tuple(replace(request, output_len=1) for request in ASKED)
    for schedule in SCHEDULES if name == "vslpipe" else SCHEDULES[:2]:
        for budget in (1, 1000):
            result = wb.run(scenario(tiny, asked, RUNNABLE[name], budget=budget), schedule)
            assert result.tokens == tuple(tokens[:1] for tokens in right)
            assert result.iterations == (1 if budget == 1000 else len(asked))


def test_one_token_in_one_token_out(tiny: ModelConfig) -> None:
    asked = requests((1,), 1)
    for schedule in KNOBS:
        result = wb.run(scenario(tiny, asked, tokens=1, block=1), schedule)
        assert len(result.tokens[0]) == 1
        assert result.iterations == 1


@pytest.mark.parametrize(
    ("packet", "link"), [(1e-300, 5e9), (1e-12, 1e6), (1e-6, 1e15), (1.0, 1e3), (1e300, 1e15), (float("inf"), 5e9)]
)
def test_packets(packet: float, link: float, tiny: ModelConfig, right: Any) -> None:
    of = scenario(tiny, ASKED, on=machine(link=link))
    assert wb.run(of, VSLPipe(packet_seconds=packet)).tokens == right
    assert wb.simulate(of, VSLPipe(packet_seconds=packet)).seconds > 0


def test_a_block_for_everything(tiny: ModelConfig, right: Any) -> None:
    assert wb.run(scenario(tiny, ASKED, block=4096, tokens=4 * 4096), VSLPipe()).tokens == right
    result = wb.run(scenario(tiny, ASKED, block=4096, tokens=4096), VSLPipe())
    assert result.tokens == right
    assert max(result.steps.used_blocks) == 1
    of = scenario(tiny, ASKED)
    with pytest.raises(CapacityError, match="kv_block"):
        of.on(memory=replace(of.memory, kv_block=10**7))


def test_a_prompt_that_fills_the_positions(tiny: ModelConfig, oracle: Any) -> None:
    asked = requests((500,), 13, seed=2)
    answer = oracle(tiny).generate(asked)
    assert answer.gap > 1e-4
    assert wb.run(scenario(tiny, asked, tokens=512, block=64), VSLPipe()).tokens == answer.tokens


def test_equal_prompts_get_equal_tokens(tiny: ModelConfig) -> None:
    asked = requests((7,), 9) * 13
    result = wb.run(scenario(tiny, asked, tokens=40, block=3), VSLPipe())
    assert result.preemptions
    assert len(set(result.tokens)) == 1


def test_three_hundred_requests(tiny: ModelConfig) -> None:
    lengths = [1 + 7 * number % 23 for number in range(300)]
    asked = requests(lengths, [1 + number % 5 for number in range(300)], seed=8)
    few = wb.run(scenario(tiny, asked, tokens=600, block=4, budget=200), VSLPipe())
    many = wb.run(scenario(tiny, asked, tokens=20000, budget=1e9), Sequential())
    assert few.tokens == many.tokens
    assert many.iterations == 5


def test_two_runs_at_once(tiny: ModelConfig, right: Any) -> None:
    """Nothing is shared between engines: two threads serve two workloads side by side."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        schedules = (VSLPipe(), Sequential(2))
        runs = [pool.submit(wb.run, scenario(tiny, ASKED), schedule, alongside=True) for schedule in schedules]
        assert [run.result().tokens for run in runs] == [right, right]


def test_running_twice_changes_nothing(tiny: ModelConfig, right: Any) -> None:
    of = scenario(tiny, ASKED)
    assert [wb.run(of, VSLPipe()).tokens for _ in range(3)] == [right] * 3
