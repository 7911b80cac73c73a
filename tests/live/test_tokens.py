"""Law 2 against the oracle: greedy fp32 tokens of `run` are transformers', whatever schedule, KV and block size."""

from collections.abc import Callable
from typing import Any

import pytest

import workbench as wb
from tests.examples import DEEP
from tests.live.world import OF_SYSTEMS, RUNNABLE, WIRED, longest, requests, scenario, ways
from workbench.models import ModelConfig
from workbench.pipeline import fetch, gpu
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.stages import attention, experts, kv, moe, out_proj, qkv
from workbench.workload import Request

# layers, hidden, inner, query heads, KV heads, head dim, experts, chosen, vocabulary: odd wherever they may be.
ODD = {
    "five": ModelConfig("five", 3, 48, 72, 6, 2, 12, 5, 2, 311, 512, dtype="fp32"),
    "three": ModelConfig("three", 2, 60, 52, 4, 1, 20, 3, 1, 257, 512, tie_word_embeddings=True, dtype="fp32"),
    "seven": ModelConfig("seven", 5, 36, 40, 3, 3, 20, 7, 3, 409, 512, rope_theta=1e4, dtype="fp32"),
}
SEEDS = {"five": 1, "three": 1, "seven": 1}
LENGTHS = (1, 200, 7, 33, 64, 3, 17, 2, 128, 5, 11, 40)
OUTPUTS = (14, 8, 12, 1, 9, 14, 2, 12, 8, 14, 10, 10)
CROWD = (3, 1, 8, 2, 5, 4, 7, 6)
ROUNDING = 1e-4


class Case:
    """A model, its requests, and what transformers answers."""

    def __init__(self, model: ModelConfig, asked: tuple[Request, ...], oracle: Any) -> None:
        self.model, self.asked = model, asked
        answer = oracle(model).generate(asked)
        self.tokens, self.gap = answer.tokens, answer.gap

    def check(self, pipeline: Any, schedule: Schedule, *, tokens: int, block: int, preemptions: int = 0) -> wb.Result:
        assert self.gap > ROUNDING, "the oracle itself wavers: choose another seed"
        result = wb.run(scenario(self.model, self.asked, pipeline, tokens=tokens, block=block, budget=300), schedule)
        assert result.tokens == self.tokens
        assert result.preemptions >= preemptions
        return result


@pytest.fixture(scope="module")
def uneven(make_model: Callable[..., ModelConfig], oracle: Any) -> Callable[[str], Case]:
    """Prompts of 1 to 200 tokens."""
    cases: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in cases:
            asked = requests(LENGTHS, OUTPUTS, vocab=ODD[name].vocab_size, seed=7)
            cases[name] = Case(make_model(ODD[name], SEEDS[name]), asked, oracle)
        return cases[name]

    return of


@pytest.fixture(scope="module")
def crowd(make_model: Callable[..., ModelConfig], oracle: Any) -> Callable[[str], Case]:
    """Short prompts that outgrow a small cache together."""
    cases: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in cases:
            asked = requests(CROWD, 20, vocab=ODD[name].vocab_size, seed=11)
            cases[name] = Case(make_model(ODD[name], SEEDS[name]), asked, oracle)
        return cases[name]

    return of


@pytest.mark.parametrize("name", ODD)
def test_the_oracle_decides_clearly(name: str, uneven: Any, crowd: Any) -> None:
    """Were two logits closer than rounding, equality would be luck."""
    for case in (uneven(name), crowd(name)):
        assert case.gap > ROUNDING
        assert len(set(sum(case.tokens, ()))) > 20, "the model answers always the same: equality would mean nothing"


@pytest.mark.parametrize("schedule", [Sequential(1), Sequential(2), VSLPipe()], ids=str)
@pytest.mark.parametrize("name", ODD)
def test_ample_kv(name: str, schedule: Schedule, uneven: Any) -> None:
    result = uneven(name).check(RUNNABLE["vslpipe"], schedule, tokens=4096, block=16)
    assert not result.preemptions


@pytest.mark.parametrize(("name", "block"), [("five", 16), ("three", 64), ("seven", 1)])
def test_smallest_kv(name: str, block: int, uneven: Any) -> None:
    """The cache that just fits the longest request; whole blocks only."""
    case = uneven(name)
    result = case.check(RUNNABLE["vslpipe"], VSLPipe(), tokens=longest(case.asked), block=block, preemptions=1)
    assert max(result.steps.used_blocks) <= -(-longest(case.asked) // block)


@pytest.mark.parametrize(
    ("name", "schedule"), [*zip(ODD, (VSLPipe(), Sequential(1), Sequential(2)), strict=True)], ids=str
)
def test_preempted_again_and_again(name: str, schedule: Schedule, crowd: Any) -> None:
    case = crowd(name)
    result = case.check(RUNNABLE["vslpipe"], schedule, tokens=longest(case.asked), block=1, preemptions=12)
    assert result.recomputed > 100


@pytest.mark.parametrize(("pipeline", "schedule"), ways(("flexgen_s4", "all_gpu", "all_cpu")), ids=str)
def test_other_pipelines(pipeline: str, schedule: Schedule, uneven: Any, crowd: Any) -> None:
    if schedule == Sequential(2):
        uneven("five").check(RUNNABLE[pipeline], schedule, tokens=400, block=16)
    else:
        case = crowd("three")
        case.check(RUNNABLE[pipeline], schedule, tokens=longest(case.asked), block=1, preemptions=12)


@pytest.mark.parametrize(("number", "pipeline", "schedule"), [(n, *way) for n, way in enumerate(OF_SYSTEMS)], ids=str)
def test_every_system(number: int, pipeline: str, schedule: Schedule, uneven: Any, crowd: Any) -> None:
    """Models and cache sizes take turns: ample, or the smallest with many preemptions."""
    name, tight = list(ODD)[number % 3], number % 2
    case = (crowd if tight else uneven)(name)
    case.check(
        WIRED[pipeline],
        schedule,
        tokens=longest(case.asked) if tight else 4096,
        block=1 if tight else 16,
        preemptions=5 * tight,
    )


STREAMED = {
    "experts only": fetch(experts.weights) | gpu(qkv, attention, out_proj, moe),
    "kv only": fetch(kv) | gpu(qkv, attention, out_proj, moe),
}


@pytest.mark.parametrize("what", STREAMED)
def test_partly_streamed(what: str, crowd: Any) -> None:
    case = crowd("three")
    case.check(STREAMED[what], Sequential(2), tokens=longest(case.asked), block=16)


BLOCKS = (1, 16, 64)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ways())), ids=[f"{name}-{schedule}" for name, schedule in ways()])
@pytest.mark.parametrize("turn", range(len(ODD) if DEEP else 1))
def test_sweep(turn: int, number: int, uneven: Any, crowd: Any) -> None:
    """Every way with a model, with all if asked for; the block sizes take turns, at the smallest cache and at twice."""
    name = list(ODD)[(number + turn) % len(ODD)]
    pipeline, schedule = ways()[number]
    for case, times in ((uneven(name), 1), (crowd(name), 2)):
        block = BLOCKS[(number // 3 + times + turn) % 3]
        case.check(RUNNABLE[pipeline], schedule, tokens=times * longest(case.asked), block=block)


SPARE = {"smallest": 0, "tight": 60, "ample": 2000}


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cache", SPARE)
@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()], ids=str)
@pytest.mark.parametrize("turn", range(len(ODD) if DEEP else 1))
def test_every_combination(
    turn: int, schedule: Schedule, cache: str, block: int, uneven: Callable[[str], Case], crowd: Callable[[str], Case]
) -> None:
    """Prompts of 1 to 200 tokens, and a crowd of short ones that is preempted many times.

    Each size of block meets each size of cache with a model, with all if asked for.
    """
    spare = SPARE[cache]
    name = list(ODD)[(BLOCKS.index(block) + list(SPARE).index(cache) + turn) % len(ODD)]
    for case, least in ((uneven(name), 0), (crowd(name), 5 if not spare and block == 1 else 0)):
        case.check(RUNNABLE["vslpipe"], schedule, tokens=longest(case.asked) + spare, block=block, preemptions=least)
