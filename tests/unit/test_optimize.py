"""The auto-scheduler against exhaustive search and the named systems, and by its laws."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given

import workbench as wb
from tests.builders import OWN, scenarios, small_machine, tiny_model, tiny_scenario
from tests.examples import DEEP, examples
from tests.systems import GOLDEN, VSL
from workbench.analysis.optimize import trials as trials_module
from workbench.analysis.optimize.auto_scheduler import optimum_of, sample_of
from workbench.analysis.optimize.ceilings import Ceilings
from workbench.analysis.optimize.decision import Decision
from workbench.analysis.optimize.estimate import estimated
from workbench.analysis.optimize.objective import Goodput, Throughput, objective_of
from workbench.analysis.optimize.space import Space
from workbench.analysis.optimize.trials import Budget, Trial, Trials, most_tokens
from workbench.analysis.optimize.wirings import GIVEN
from workbench.core.errors import ScenarioError, WorkbenchError
from workbench.hardware import Machine
from workbench.pipeline import cpu, gpu, load, offload
from workbench.scenario import Scenario
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import Overlap, Schedule, contenders
from workbench.stages import attention, combine, experts, moe, out_proj, qkv, route

FEW = (GIVEN, "everything on the GPU", "experts on the CPU", "weights streamed, attention on the CPU")
"""Wirings of small spaces."""
DRAWS = range(300 if DEEP else 4)
PATIENCE = inf if DEEP else 8.0
"""Time for a search [s]."""


class NoBar:
    def update(self) -> None:
        pass


def drawn_machine(random: np.random.Generator, weight_bytes: float) -> Machine:
    """A machine of the kind that the workbench is for: the weights do not fit the GPU, and any lane may bind."""

    def rate(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    return small_machine(
        gpu=rate(1e10, 1e12),
        hbm=rate(1e9, 3e10),
        cpu=rate(1e9, 1e11),
        dram=rate(3e8, 1e10),
        h2d=rate(3e7, 3e9),
        d2h=rate(3e7, 3e9),
        gpu_memory=weight_bytes * random.uniform(0.5, 1.2),
        host_memory=weight_bytes * random.uniform(1.5, 4),
    )


def drawn(seed: int) -> Scenario:
    """A small random scenario."""
    random = np.random.default_rng(seed)
    model = replace(tiny_model(int(random.integers(2, 5)), num_local_experts=8), intermediate_size=256)
    count = int(random.integers(4, 40))
    prompt = random.integers(4, 60, count).tolist()
    output = random.integers(2, 16, count).tolist()
    return tiny_scenario(
        prompt,
        output,
        model=model,
        machine=drawn_machine(random, model.weight_bytes),
        blocks=int(random.integers(30, 400)),
        scheduler=wb.ResourceAware(token_budget=None),
    )


def few(scenario: Scenario) -> Space:
    """A space of a few hundred candidates, with everything that a search distinguishes."""
    space = Space.of(scenario)
    chosen = [each for each in space.wirings if each.name in FEW or each.last == scenario.model.num_hidden_layers - 2]
    return replace(
        space, wirings=tuple(chosen), schedulers=space.schedulers[:2], budgets=(None, 64.0), fills=(1.0, 0.0)
    )


def best_of(scenario: Scenario, simulations: float = inf, asked: str | wb.Slo = "gen_tok_s") -> wb.Optimum:
    return optimum_of(few(scenario), objective_of(asked, scenario.workload), Budget(inf, simulations))


# ------------------------------------------------------------------------------------------------ against everything


def enumerable(scenario: Scenario) -> Space:
    """Every wiring and schedule under two schedulers with two budgets: 2,000 candidates or more."""
    space = Space.of(scenario)
    few = tuple(space.schedulers[:2])
    return replace(space, schedulers=few, budgets=(None, 64.0), fills=(1.0,), caches=(1.0,), blocks=(16,))


class Every(Trials):
    """Trials that are simulated whatever their bound says."""

    _best_score = -inf  # type: ignore[assignment]


def everything(space: Space) -> list[Trial]:
    """The trial of every candidate of a space."""
    trials = Every(space.scenario, space.scenario.workload, Throughput(), Budget(inf, inf), 1.0, NoBar())
    return [trials.of(candidate) for candidate in space]


@pytest.mark.slow
@pytest.mark.skipif(not DEEP, reason="simulates every candidate of spaces of thousands")
@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_exhaustive_search_finds_with_a_tenth_of_the_simulations(seed: int) -> None:
    """And no bound or ceiling of what was simulated is below its simulation: what they exclude is no better."""
    space = enumerable(drawn(seed))
    assert len(space) >= 2000
    every = everything(space)
    ceilings = Ceilings(space, Throughput())
    for trial in every:
        if trial.result is not None:
            assert trial.score <= trial.most * (1 + 1e-9)
            assert trial.score <= ceilings.of_group(trial.candidate.group) * (1 + 1e-9), trial.candidate
    found = optimum_of(space, Throughput(), Budget(inf, inf))
    simulated = sum(trial.result is not None for trial in every)
    best = max(trial.score for trial in every)
    print(
        f"seed {seed}: {len(space)} candidates, {simulated} of them fit, {found.counts.simulations} simulations, ",
        end="",
    )
    print(f"{found.best.score / best:.4f} of the best")
    assert found.best.score >= 0.98 * best
    assert found.counts.simulations <= 0.1 * simulated
    assert found.counts.left >= 0


# ------------------------------------------------------------------------------------------------------- the estimates


@pytest.mark.parametrize("name", GOLDEN)
def test_the_estimate_of_requests_that_are_alike_and_run_together_is_near_their_simulation(name: str) -> None:
    """They are one iteration of prompts and as many of decodes as tokens follow the first."""
    pipeline, schedule = GOLDEN[name]
    scenario = tiny_scenario([24] * 32, [40] * 32, pipeline=pipeline, scheduler=wb.ContinuousBatching())
    estimate, result = estimated(scenario, schedule), wb.simulate(scenario, schedule)
    assert estimate.seconds == pytest.approx(result.seconds, rel=0.04)
    assert estimate.gen_tok_s == pytest.approx(result.gen_tok_s, rel=0.04)
    assert estimate.tbt == pytest.approx(result.tbt, rel=0.02)
    assert estimate.ttft == pytest.approx(result.ttft, rel=0.25)


@pytest.mark.parametrize("seed", range(8))
def test_estimates_of_schedules_with_the_same_memory_are_to_one_another_as_their_simulations(seed: int) -> None:
    scenario = drawn(seed)
    machine = scenario.machine
    roomy = replace(machine, gpu=replace(machine.gpu, memory=1e12), cpu=replace(machine.cpu, memory=1e12))
    scenario = scenario.on(machine=roomy)
    over = list[float]()
    for schedule in contenders(scenario.pipeline):
        if schedule.parts <= len(scenario.workload):
            result = wb.simulate(scenario, schedule)
            over.append(estimated(scenario, schedule).gen_tok_s / result.gen_tok_s)
    assert max(over) <= 1.05 * min(over)
    assert min(over) > 0.8
    assert max(over) < 1.3


def test_an_estimate_is_no_simulation() -> None:
    budget = Budget(inf, inf)
    space = enumerable(drawn(0))
    trials = Trials(space.scenario, space.scenario.workload, Throughput(), budget, 1.0, NoBar())
    assert max(trials.guess(each) for each in islice(space, 100)) > 0
    assert not trials.all
    assert budget.used == 0


# -------------------------------------------------------------------------------------------- against the named systems


def as_it_fits(scenario: Scenario, schedule: Schedule) -> Scenario | None:
    """The scenario, with less KV cache if it does not fit otherwise; None if no cache fits."""
    try:
        ledger = wb.fits(scenario, schedule)
    except WorkbenchError:
        return None
    smaller = (change.scenario for change in ledger.changes if change.scenario.kv_blocks < scenario.kv_blocks)
    return scenario if ledger else next(smaller, None)


def named_rates(scenario: Scenario) -> Iterator[float]:
    """Rates of the papers' systems as other tests have them, but for those with late experts, under every scheduler."""
    for pipeline, schedule in GOLDEN.values():
        if any(stage.defer or stage.skip for stage in pipeline.stages):
            continue
        for scheduler in [scenario.scheduler, *every_scheduler()]:
            fitting = as_it_fits(scenario.on(pipeline=pipeline, scheduler=scheduler), schedule)
            if fitting is not None:
                yield wb.simulate(fitting, schedule).gen_tok_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWS)
def test_it_is_never_below_the_best_named_system(seed: int) -> None:
    scenario = drawn(1000 + seed)
    best = max(named_rates(scenario))
    found = wb.optimize(scenario, budget=PATIENCE)
    print(
        f"seed {1000 + seed}: {found.result.gen_tok_s / best:.3f} of the best named, {found.gain:.3f} by its own table"
    )
    assert found.result.gen_tok_s >= best * (1 - 1e-9)
    assert found.best.score >= found.named[0].score


MIXTRAL = wb.models["mixtral-8x7b"]
KNOWN = {
    "resident weights to spare": Scenario(
        VSL,
        model=MIXTRAL,
        machine=wb.machines["a40"],
        memory=wb.Memory(kv_capacity="70GB"),
        workload=wb.Workload.lengths(98, 32, 4000),
        scheduler=wb.ResourceAware(),
    ),
    "hot experts": Scenario(
        VSL,
        model=MIXTRAL,
        machine=wb.machine(gpu="a100-40gb-pcie", cpu="epyc-7763", memory="256GB"),
        memory=wb.Memory(kv_capacity="10GB"),
        workload=wb.Workload.lengths(200, 200, 16),
        scheduler=wb.ContinuousBatching(),
        routing=wb.Frequencies(((3, 1, 6, 45, 4, 10, 30, 1),) * MIXTRAL.num_hidden_layers),
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not DEEP, reason="simulates two large models hundreds of times")
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_be_worth_a_quarter_is_found(name: str) -> None:
    """Mixtral on a GPU of 48 GB whose streamed weights may stay, and 16 chats on 40 GB that use few experts most."""
    found = wb.optimize(KNOWN[name], budget=inf, simulations=300)
    print(f"{name}: {found.gain:.3f}, {found.best.placement}, {found.schedule.name}, {found.scenario.scheduler}")
    assert found.gain >= 1.25


# ------------------------------------------------------------------------------------------------------------- the laws


@given(scenarios())
@examples(100)
def test_no_scheduler_beats_the_bound_of_its_largest_iteration(case: tuple[Scenario, Schedule]) -> None:
    scenario, schedule = case
    tokens = most_tokens(scenario, schedule)
    limited = wb.bound(scenario, schedule, tokens=tokens)
    assert limited.seconds >= wb.bound(scenario, schedule).seconds * (1 - 1e-9)
    played = wb.simulate(scenario, schedule)
    assert played.seconds >= limited.seconds * (1 - 1e-9)
    assert played.iterations >= limited.iterations


@pytest.fixture(scope="module")
def found() -> wb.Optimum:
    return best_of(drawn(7), 15)


def test_the_answer_is_a_scenario_and_a_schedule_that_give_its_numbers(found: wb.Optimum) -> None:
    assert wb.fits(found.scenario, found.schedule)
    assert wb.simulate(found.scenario, found.schedule).gen_tok_s == found.result.gen_tok_s == found.best.score
    assert found.bound.gen_tok_s == wb.bound(found.scenario, found.schedule).gen_tok_s >= found.result.gen_tok_s
    given = drawn(7)
    assert (found.scenario.model, found.scenario.machine) == (given.model, given.machine)
    assert found.scenario.workload.prompt_len.tolist() == given.workload.prompt_len.tolist()
    scores = [found.best.score, *(each.score for each in found.others)]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(("own", "first"), [(1.005, "named"), (1.02, "own"), (0.99, "named")])
def test_something_else_than_a_named_system_is_the_answer_if_it_is_clearly_better(own: float, first: str) -> None:
    decision = object.__new__(Decision)
    decision._objective = objective_of("gen_tok_s", wb.Workload.lengths(1, 1))
    decision._named = [(None, "named")]
    ranked = sorted(
        [SimpleNamespace(candidate="own", score=100 * own), SimpleNamespace(candidate="named", score=100.0)],
        key=lambda trial: -trial.score,
    )
    assert decision._named_first(ranked)[0].candidate == first


def test_simulations_are_counted_and_limited(found: wb.Optimum) -> None:
    counts = found.counts
    assert counts.simulations == 15
    assert found.ended == "its 15 simulations are used"
    assert counts.space == counts.refused + counts.excluded + counts.simulated + counts.left
    assert min(counts.refused, counts.excluded, counts.simulated, counts.left) >= 0


def test_it_is_the_same_every_time_unless_time_cuts_it(found: wb.Optimum) -> None:
    again = best_of(drawn(7), 15)
    assert str(again) == str(found)
    assert again._repr_html_() == found._repr_html_()


def test_with_no_time_at_all_the_answer_is_the_best_named_system() -> None:
    found = optimum_of(few(drawn(7)), Throughput(), Budget(1e-9, inf))
    assert found.best.score == found.named[0].score == max(each.score for each in found.named)
    assert {each.system for each in found.named} == {each.system for each in best_of(drawn(7), 30).named}
    assert found.ended == "its 0.001 µs are over"


def test_an_interrupt_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def simulate(scenario: Scenario, schedule: Schedule) -> wb.Result:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(wb.simulate(scenario, schedule))
        return made[-1]

    monkeypatch.setattr(trials_module, "simulate", simulate)
    found = best_of(drawn(7))
    assert found.ended == "it was interrupted"
    assert found.result.gen_tok_s == max(result.gen_tok_s for result in made)


def test_experts_that_come_late_come_as_late_in_every_candidate() -> None:
    before = gpu(qkv, attention, out_proj, route)
    late = before >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
    space = Space.of(tiny_scenario(8, 4, 4, pipeline=late))
    for wiring in space.wirings:
        stages = wiring.layout(0).pipeline.stages
        assert {stage.defer for stage in stages if stage.op is experts} == {1}
    plain = Space.of(tiny_scenario(8, 4, 4))
    assert len(plain.wirings) > 20
    for wiring in plain.wirings:
        made = plain.scenario.on(pipeline=wiring.layout(wiring.last).pipeline)
        assert not any(stage.defer or stage.skip for stage in made.stages)


def test_an_operation_of_the_users_own_stays_where_it_is() -> None:
    own = gpu(qkv, attention, out_proj, moe, OWN)
    space = Space.of(tiny_scenario(8, 4, 4, pipeline=own))
    assert [wiring.name for wiring in space.wirings] == [GIVEN]
    assert wb.optimize(space.scenario, budget=inf, simulations=5).scenario.pipeline == own


def test_a_limit_on_running_sequences_stays() -> None:
    space = Space.of(tiny_scenario(8, 4, 4, scheduler=wb.ContinuousBatching(max_running=2)))
    assert {scheduler.max_running for scheduler in space.schedulers} == {2}


# ---------------------------------------------------------------------------------------------------------- objectives


def test_the_seconds_of_a_job_and_its_throughput_are_one_objective() -> None:
    scenario = drawn(7)
    rate, seconds = (best_of(scenario, 30, each) for each in ("gen_tok_s", "seconds"))
    assert seconds.best.score == -rate.result.seconds
    assert seconds.gain == pytest.approx(rate.gain)


@pytest.mark.parametrize("name", ["ttft", "tbt"])
def test_times_of_tokens_are_never_above_those_of_the_best_named_system(name: str) -> None:
    found = best_of(drawn(7), 30, name)
    assert getattr(found.result, name) == -found.best.score
    assert getattr(found.result, name) <= min(getattr(each.result, name) for each in found.named if each.result)
    assert found.gain >= 1


def test_goodput_counts_the_tokens_of_requests_in_time() -> None:
    scenario = drawn(7)
    result = wb.simulate(as_it_fits(scenario, Overlap()), Overlap())
    every = objective_of(wb.Slo(ttft=inf, tbt=inf), scenario.workload)
    assert every.score(result, scenario.workload) == pytest.approx(result.gen_tok_s)
    half = Goodput(wb.Slo(ttft=float(np.median(result.latencies.ttft)), tbt=inf))
    in_time = sorted(zip(result.latencies.ttft, result.latencies.request, strict=True))
    tokens = sum(int(scenario.workload.output_len[r]) for ttft, r in in_time if ttft <= half.slo.ttft)
    assert half.score(result, scenario.workload) == pytest.approx(tokens / result.seconds)
    assert 0 < half.score(result, scenario.workload) < result.gen_tok_s


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"objective": "speed"}, "objective='speed' is none"),
        ({"budget": "soon"}, "budget 'soon' is no positive time"),
        ({"budget": -1}, "budget -1 is no positive time"),
        ({"simulations": 0}, "simulations=0 is no number of them"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        wb.optimize(drawn(7), **changes)


def test_a_time_between_tokens_needs_two_tokens() -> None:
    with pytest.raises(ScenarioError, match="two output tokens"):
        wb.optimize(tiny_scenario(8, 1, 4), objective="tbt")


def test_nothing_but_a_scenario_is_optimized() -> None:
    with pytest.raises(ScenarioError, match="takes a Scenario"):
        wb.optimize("mixtral")


def test_what_fits_nowhere_is_told() -> None:
    with pytest.raises(ScenarioError, match="no placement of tiny fits 'small'"):
        wb.optimize(tiny_scenario(8, 4, 4, machine=small_machine(gpu_memory=1e3, host_memory=1e3)))


def test_only_this_computer_can_run_the_best(found: wb.Optimum) -> None:
    with pytest.raises(ScenarioError, match="'small' is not this computer"):
        found.run_best()


# ---------------------------------------------------------------------------------------------------------- long jobs


def test_of_a_long_job_a_sample_is_tried_and_the_answer_simulated_whole() -> None:
    machine = small_machine(gpu_memory=6e5, host_memory=3e6)
    scenario = tiny_scenario(20, 3, 30_000, blocks=400, machine=machine)
    sample = sample_of(scenario)
    assert len(sample) < len(scenario.workload) / 2
    found = best_of(scenario, 6)
    assert found.scenario.workload is scenario.workload
    assert found.result.generated == 3 * 30_000


def test_a_sample_of_a_short_job_is_the_job() -> None:
    scenario = drawn(7)
    assert sample_of(scenario) is scenario.workload


def test_its_table_has_the_answer_the_next_best_and_the_named_systems(found: wb.Optimum) -> None:
    table = found.to_pandas()
    assert table["role"].tolist() == ["best", *["other"] * len(found.others), *["named"] * len(found.named)]
    assert table["gen_tok_s"][0] == found.result.gen_tok_s
    assert table["most"].notna().all()
