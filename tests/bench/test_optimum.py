"""Answers of the auto-scheduler and their rivals: who is run, how often, and what is told of it."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from workbench.analysis.optimize import Choice, Counts, Optimum
from workbench.analysis.optimize.objective import Throughput
from workbench.bench.live import sim
from workbench.bench.live.optimum import CLOSE, GPU_MEMORY, RIVALS, Contest, drawn, measure, tell
from workbench.core.result import Source
from workbench.perfmodels import bound
from workbench.schedules import Sequential
from workbench.simulate import simulate

MODEL = tiny_model(dtype="fp32", max_position_embeddings=4096)
MACHINE = small_machine(gpu=2e9, hbm=2e9, cpu=2e9, dram=2e9, h2d=5e9, d2h=5e9)
SCENARIO = tiny_scenario(8, 4, 6)
PLAYED = simulate(SCENARIO, Sequential())


def contest(best: float, *named: float) -> Contest:
    """An answer and named systems with these scores."""

    def choice(system: str, score: float) -> Choice:
        return Choice(system, "all on the GPU", SCENARIO, Sequential(), 2 * score, PLAYED, score)

    systems = tuple(choice(f"system {number}", score) for number, score in enumerate(named))
    limit = bound(SCENARIO, Sequential())
    found = Optimum(Throughput(), choice("", best), limit, (), systems, Counts(1, 0, 0, 1, 1), 1.0)
    return Contest(SCENARIO, found)


def rates(of: Contest) -> list[list[float]]:
    """Measured rates of all that is compared."""
    return [[run.gen_tok_s for run in setting.runs] for setting in of.settings]


def test_drawn_gpus_hold_about_the_weights():
    found = drawn([(MODEL, MACHINE)], 6, 1)
    shares = [each.machine.gpu.memory / MODEL.weight_bytes for each in found]
    assert all(GPU_MEMORY[0] <= share <= GPU_MEMORY[1] for share in shares)
    assert len(set(shares)) == len(shares)
    assert [each.question for each in drawn([(MODEL, MACHINE)], 6, 1)] == [each.question for each in found]


def test_an_answer_meets_the_best_named_systems_unless_it_is_one():
    assert [each.score for each in contest(2.0, 1.0, 0.9, 0.9 * CLOSE).choices] == [2.0, 1.0, 0.9]
    assert len(contest(2.0, *[1.0] * 9).choices) == 1 + RIVALS
    assert len(contest(1.0, 1.0, 0.9).choices) == len(contest(2.0).choices) == 1
    assert contest(1.0, 1.0).over == 1.0


def test_all_are_run_as_often_and_the_answer_is_held_against_the_fastest(monkeypatch):
    ran = Counter[str]()

    def run(scenario, schedule):
        ran[schedule.name] += 1
        return replace(simulate(scenario, schedule), source=Source.MEASURED, others=0.0)

    monkeypatch.setattr(sim, "run", run)
    close = contest(3.0, 2.0, 1.9)
    measure([close, contest(1.0, 1.0)], 2, lambda _: None)
    assert ran.total() == 6
    rate = PLAYED.gen_tok_s
    assert rates(close) == [[rate, rate]] * 3
    assert close.over == 1.0
    for setting, speeds in zip(close.settings, ([1.0, 4.0, 3.0], [2.0, 2.0, 9.0], [4.0, 4.0, 4.0]), strict=True):
        setting.runs = [replace(setting.simulated, seconds=setting.simulated.generated / speed) for speed in speeds]
    assert close.over == 0.75
    told = list[str]()
    tell([close], told.append)
    assert "least 0.75 (0.95 asked for)" in told[-1]


def test_disturbed_runs_do_not_count(monkeypatch):
    disturbed = replace(PLAYED, source=Source.MEASURED, others=0.9)
    monkeypatch.setattr(sim, "run", lambda *_: disturbed)
    close = contest(3.0, 2.0)
    measure([close], 1, lambda _: None)
    assert not any(rates(close))
    assert not close.measured
    assert [setting.dropped for setting in close.settings] == [1 + sim.EXTRA] * 2


def test_a_contest_of_one_needs_no_runs(monkeypatch):
    monkeypatch.setattr(sim, "run", pytest.fail)
    measure([contest(1.0, 1.0)], 3, lambda _: None)
