"""How often the order of tasks decides: drawn scenarios, what is told of them, and what docs/schedules.md says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workbench.bench import schedules
from workbench.bench.schedules import BASELINE, ELSEWHERE, Drawn, draw, drawn, play, summary
from workbench.schedules import contenders
from workbench.serving import prepare

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


@pytest.fixture(scope="module")
def few() -> list[Drawn]:
    return list(drawn(4, seed=1))


def test_a_seed_draws_the_same_scenarios_again(few):
    again = [(str(each.scenario), each.rates, each.elsewhere) for each in drawn(2, seed=1)]
    assert again == [(str(each.scenario), each.rates, each.elsewhere) for each in few[:2]]
    assert str(few[0].scenario) != str(few[1].scenario)


def test_every_drawn_model_is_larger_than_its_gpu_and_every_schedule_fits(few):
    for each in few:
        assert each.scenario.model.weight_bytes > each.scenario.machine.gpu.memory
        for schedule in contenders(each.scenario.layer):
            prepare(each.scenario, schedule)
        assert set(each.rates) == {schedule.name for schedule in contenders(each.scenario.layer)}
        assert BASELINE.name in each.rates


def test_another_placement_serves_no_more_requests_than_were_drawn(few):
    """With room for everything on the GPU the cache that lies there is no slower than the one that is streamed."""
    each = few[0]
    machine = each.scenario.machine
    roomy = replace(machine, gpu=replace(machine.gpu, memory=1e15))
    found = play(each.scenario.on(machine=roomy))
    assert set(found.elsewhere) == set(ELSEWHERE)
    assert found.elsewhere["KV cache on the GPU"] >= each.elsewhere.get("KV cache on the GPU", 0.0)
    assert found.elsewhere["KV cache on the GPU"] >= found.elsewhere["KV cache streamed"] * 0.999


def test_what_fits_nowhere_is_not_drawn():
    random = np.random.default_rng(0)
    assert any(draw(random) is None for _ in range(20))


def test_the_summary_counts_who_is_best():
    rates = ((1.0, 1.5), (1.0, 1.01), (2.0, 1.0))
    found = [Drawn(None, {BASELINE.name: one, "VSLPipe": other}, {"experts on the CPU": 1.6}) for one, other in rates]
    said = summary(found)
    assert said[0].startswith("3 scenarios")
    assert " ".join(said[2].split()) == f"{BASELINE.name} 33% 67% 0.99 (0.67 to 2.00) 1.00 (1.00 to 1.00)"
    assert " ".join(said[3].split()) == "VSLPipe 33% 67% 1.01 (0.50 to 1.50) 1.01 (0.50 to 1.50)"
    assert "in 67%: KV cache on the GPU in 0%, KV cache streamed in 0%, experts on the CPU in 67%" in said[-1]


def test_the_record_has_every_scenario(monkeypatch, tmp_path, few):
    monkeypatch.setattr(schedules, "drawn", lambda count, seed: iter(few[:count]))
    ratios = schedules.bench_schedules(scenarios=2, seed=0, json=tmp_path / "order.json", say=[].append)
    kept = json.loads((tmp_path / "order.json").read_text())
    assert kept["ratios"] == ratios
    assert [row["rates"] for row in kept["rows"]] == [each.rates for each in few[:2]]


def test_the_page_of_schedules_shows_what_the_command_prints():
    """`python -m workbench bench schedules`, as it stands by default."""
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(summary(list(drawn(60, seed=0)))) in page
