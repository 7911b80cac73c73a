"""The figures on the simulator's own speed are told and kept."""

import json

import pytest

from workbench.bench import simulator
from workbench.schedules import VSLPipe


def test_both_details_the_sweep_and_the_slider_are_told_against_what_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(simulator, "REQUESTS", 5)
    monkeypatch.setattr(simulator, "_swept", {0: 79.0, 1: 81.0, 2: 40.5}.get)
    said, path = list[str](), tmp_path / "speed.json"
    ratios = simulator.bench_simulator(repeats=2, json=path, say=said.append)
    assert [line.partition(":")[0] for line in said[:2]] == ["5 requests, detail iteration", "5 requests, detail task"]
    assert all("s asked for" in line for line in said[:2])
    assert said.pop(2).startswith("their timeline, once it is read: ")
    assert said[2].startswith("48 scenarios of 5 requests, KV 20GB to 70GB, outputs of 32 to 256 tokens: ")
    assert said[3].startswith("a slider of the KV capacity, the bound and 4 schedules: ")
    swept = "a sweep over 1000 scenarios of 5 drawn requests: 79.0 s in this process, 81.0 s on one that is started"
    assert said[4] == f"{swept} and 40.5 s on two, 2.00 times as fast (2.00 to 2.00), 1.8 asked for"
    assert [ratio["runs"] for ratio in ratios.values()] == [2, 2, 1, 6, 3]
    assert json.loads(path.read_text())["ratios"] == ratios


def test_every_scenario_of_the_sweep_is_another():
    asked = [(s.memory.kv_capacity, int(s.workload.output_len[0]), schedule.name) for s, schedule in simulator.sweep()]
    assert len(set(asked)) == len(asked) == 48


def test_the_sweep_on_processes_is_over_a_thousand_scenarios():
    assert simulator._count(simulator.SWEPT) == 1000


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_the_sweep_is_read_on_so_many_processes(processes, monkeypatch):
    read = list[int]()
    monkeypatch.setattr(simulator, "REQUESTS", 3)
    monkeypatch.setattr(simulator, "SWEPT", {"memory.kv_capacity": (1e9, 2e9), "schedule": (VSLPipe(),)})
    sweep = simulator.sweeps.sweep
    monkeypatch.setattr(
        simulator.sweeps, "sweep", lambda *args, **given: read.append(len(sweep(*args, **given).points))
    )
    assert simulator._swept(processes) > 0
    assert read == [2]
