"""What is drawn, what counts, and what is told of it."""

from dataclasses import replace

import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from workbench.bench.live import sim
from workbench.bench.live.sim import SECONDS, Setting, draw
from workbench.core.errors import WorkbenchError
from workbench.core.result import Source
from workbench.perfmodels import bound
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate

pytestmark = pytest.mark.alone

MODEL = tiny_model(dtype="fp32", max_position_embeddings=4096)
MACHINE = small_machine(gpu=2e9, hbm=2e9, cpu=2e9, dram=2e9, h2d=5e9, d2h=5e9)


def setting(*speeds: float, schedule=None, machine=None, layer=None) -> Setting:
    """A setting whose runs were so many times as fast as simulated."""
    scenario, schedule = tiny_scenario(8, 4, 6, machine=machine or small_machine()), schedule or Sequential()
    scenario = scenario if layer is None else scenario.on(pipeline=layer)
    simulated = simulate(scenario, schedule, detail=Detail.TASK)
    simulated = replace(simulated, interval=(0.85 * simulated.gen_tok_s, 1.1 * simulated.gen_tok_s))
    runs = [replace(simulated, source=Source.MEASURED, seconds=simulated.seconds / speed) for speed in speeds]
    return Setting(scenario, schedule, simulated, bound(scenario, schedule), runs)


def test_the_same_seed_draws_the_same_settings_and_another_seed_others():
    first, again, other = (draw([(MODEL, MACHINE)], 6, seed) for seed in (1, 1, 2))
    assert [s.name for s in first] == [s.name for s in again]
    assert [s.simulated.seconds for s in first] == [s.simulated.seconds for s in again]
    assert not {s.name for s in first} & {s.name for s in other}


def test_every_way_and_model_is_drawn_as_often_and_no_run_is_too_short_or_too_long():
    other = replace(MODEL, name="other")
    drawn = draw([(MODEL, MACHINE), (other, MACHINE)], 2 * len(sim.WAYS), 0)
    for model in (MODEL, other):
        mine = [(s.scenario.layer, s.schedule) for s in drawn if s.scenario.model == model]
        assert sorted(mine, key=repr) == sorted(sim.WAYS, key=repr)
    assert len({type(s.scenario.scheduler) for s in drawn}) > 3
    assert all(SECONDS[0] <= s.simulated.seconds <= SECONDS[1] for s in drawn)
    assert len({s.scenario.machine.link.h2d for s in drawn}) == len(drawn)
    assert all(s.scenario.machine.throttled for s in drawn)
    online = [s for s in drawn if len(s.scenario.workload.arrival)]
    assert 0 < len(online) < len(drawn)
    held = [(s.scenario.workload.prompt_len + s.scenario.workload.output_len).sum() for s in drawn]
    assert any(s.scenario.kv_blocks * sim.BLOCK < total for s, total in zip(drawn, held, strict=True))  # KV starves


def test_ways_are_told_apart_by_name():
    names = [setting(schedule=schedule, layer=layer).way for layer, schedule in sim.WAYS]
    assert len(set(names)) == len(sim.WAYS) == 15
    assert len({type(schedule) for _, schedule in sim.WAYS}) == 10


def test_the_error_is_that_of_the_median_run():
    assert setting(0.8, 0.9, 2.0).error == pytest.approx(-0.1)
    assert setting(1.05).error == pytest.approx(0.05)
    assert setting(0.8, 0.9, 2.0).measured.gen_tok_s == pytest.approx(0.9 * setting().simulated.gen_tok_s)


@pytest.mark.parametrize(
    ("gpu", "h2d", "found"),
    [(2.0, 9.6, "h2d"), (6.3, 9.6, "h2d"), (6.5, 9.6, None), (2.0, 9.4, None), (9.9, 1.0, "gpu")],
)
def test_a_lane_is_the_bottleneck_if_it_is_nearly_always_busy_and_half_as_long_again_as_any_other(gpu, h2d, found):
    simulated = replace(setting().simulated, seconds=10.0, busy={"gpu": gpu, "cpu": 0.5, "d2h": 0.0, "h2d": h2d})
    assert replace(setting(), simulated=simulated).bottleneck == found


def test_the_table_has_every_setting_its_causes_and_the_errors_of_all():
    lines: list[str] = []
    sim._print([setting(0.8), setting(0.9, schedule=VSLPipe()), setting(1.05)], lines.append)
    text = "\n".join(lines)
    assert [error in text for error in ("-20.0%", "-10.0%", "+5.0%")] == [True] * 3
    assert text.count("waiting") == 3
    assert "median 10.0%, mean 11.7%, 90 % within 18.0%, 95 % within 19.0%, largest 20.0%" in text
    assert "way Sequential: median absolute error 12.5%, median error -7.5%, of 2" in text
    assert "way VSLPipe: median absolute error 10.0%, median error -10.0%, of 1" in text
    assert "within the simulation's 90 % interval: 2 of 3; median width 25.0%" in text


def test_how_far_repetitions_are_off_their_median_is_told_where_there_are_some():
    lines: list[str] = []
    sim._print([setting(0.8, 1.0, 1.1), setting(1.0)], lines.append)
    assert "off their median by 18.0% in 90 % of the runs, 20.0% at most" in "\n".join(lines)
    lines.clear()
    sim._print([setting(0.8), setting(1.0)], lines.append)
    assert "off their median" not in "\n".join(lines)


class Disturbed:
    """Every repetition is disturbed, or only those of one schedule."""

    def __init__(self, monkeypatch, schedule=None) -> None:
        def repeat(setting, say):
            if schedule in (None, setting.schedule):
                setting.dropped += 1
            else:
                setting.runs.append(replace(setting.simulated, source=Source.MEASURED))

        monkeypatch.setattr(sim, "_repeat", repeat)
        monkeypatch.setattr(sim, "make_checkpoint", lambda name: name)
        monkeypatch.setattr(sim, "checkpoint", lambda path: MODEL)
        monkeypatch.setattr(sim, "smallest", lambda model: ())
        monkeypatch.setattr(sim, "run", lambda: None)
        monkeypatch.setattr(sim, "calibrate", lambda model, device, refresh: MACHINE)


def test_settings_without_an_undisturbed_run_are_named_and_the_others_kept(monkeypatch, tmp_path):
    Disturbed(monkeypatch, Sequential())
    lines: list[str] = []
    record = tmp_path / "record.json"
    drawn = sim.bench_sim(["any"], settings=3, repeats=1, seed=0, json=record, say=lines.append)
    assert [bool(s.runs) for s in drawn] == [False, True, True]
    assert f"no undisturbed run: {drawn[0].name}" in lines
    assert f"runs dropped as disturbed: {1 + sim.EXTRA}" in lines
    assert record.read_text().count('"setting"') == 2


def test_stopped_by_hand_it_tells_what_it_has(monkeypatch):
    Disturbed(monkeypatch, Sequential())
    repeat, calls = sim._repeat, []

    def third_time_stopped(*of):
        calls.append(of)
        if len(calls) == 3:
            raise KeyboardInterrupt
        repeat(*of)

    monkeypatch.setattr(sim, "_repeat", third_time_stopped)
    lines: list[str] = []
    drawn = sim.bench_sim(["any"], settings=3, repeats=2, seed=0, json=None, say=lines.append)
    assert "stopped: what follows is what was measured until now" in lines
    assert any("absolute error" in line for line in lines)
    assert sum(len(s.runs) for s in drawn) in (1, 2)


def test_if_nothing_could_be_measured_that_is_an_error(monkeypatch):
    Disturbed(monkeypatch)
    with pytest.raises(WorkbenchError, match="no run succeeded undisturbed; close other programs"):
        sim.bench_sim(["any"], settings=3, repeats=1, seed=0, json=None, say=lambda line: None)


def test_a_run_that_fails_is_told_and_loses_no_other(monkeypatch, tmp_path):
    lines, record = list[str](), tmp_path / "record.json"
    monkeypatch.setattr(sim, "make_checkpoint", lambda name: name)
    monkeypatch.setattr(sim, "checkpoint", lambda path: MODEL)
    monkeypatch.setattr(sim, "smallest", lambda model: ())
    monkeypatch.setattr(sim, "calibrate", lambda model, device, refresh: MACHINE)
    drawn: list[Setting] = []
    monkeypatch.setattr(sim, "draw", lambda *of: drawn.extend(draw(*of)) or drawn)

    def run(*of):
        if of and of[1] == drawn[1].schedule:
            raise KeyError("slot 7")
        return next((s.simulated for s in drawn if of and s.scenario is of[0]), None)

    monkeypatch.setattr(sim, "run", run)
    with pytest.raises(WorkbenchError, match=r"defect of the engine: tiny, Sequential.*slot 7"):
        sim.bench_sim(["any"], settings=3, repeats=2, seed=0, json=record, say=lines.append)
    assert [len(s.runs) for s in drawn] == [2, 0, 2]
    assert record.read_text().count('"setting"') == 2


@pytest.mark.parametrize(("others", "counted"), [(0.0, True), (0.02, True), (0.03, False)])
def test_a_run_counts_if_others_took_little(monkeypatch, others, counted):
    given, lines = setting(), list[str]()
    monkeypatch.setattr(sim, "run", lambda *of: replace(given.simulated, others=others))
    sim._repeat(given, lines.append)
    assert (len(given.runs), given.dropped) == (counted, not counted)
    assert lines == ([] if counted else [f"dropped a run of {given.name}: others took 3% of the cores"])
