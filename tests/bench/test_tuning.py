"""The search for settings, on times that are made up: it finds what is faster, and noise does not win."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.bench.tuning import search as search_module
from workbench.bench.tuning.search import search
from workbench.bench.tuning.timing import TimingError
from workbench.bench.tuning.tune import bench_tuning, spoilt_settings, tune_cpu
from workbench.core.errors import WorkbenchError
from workbench.kernels import Parameters, cpu_family, features

SHIPPED = Parameters.of_family("znver4")
CALLS = ["one", "other"]
pytestmark = pytest.mark.skipif(not features().lanes, reason="the portable path has no settings")


def times(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Parameters, str], float], wrong: Callable[[Parameters], bool]
) -> list[Any]:
    """Processes whose times are computed; returns those that were begun."""
    begun = []

    class Made:
        def __init__(self, group: str, settings: Parameters, folder: Path) -> None:
            self.settings, self.group, self.ended, self.compiled = settings, group, False, False
            begun.append(self)

        def compile(self) -> list[str]:
            if wrong(self.settings):
                raise TimingError("nonsense")
            self.compiled = True
            return CALLS

        def seconds(self, call: str) -> float:
            assert self.compiled
            return seconds(self.settings, call)

        def end(self) -> None:
            self.ended = True

    monkeypatch.setattr(search_module, "Timing", Made)
    return begun


def of_best(best: Parameters, noise: float, seed: int) -> Callable[[Parameters, str], float]:
    """Times that grow by 5 % with each setting of attention that is not the best one."""
    random = np.random.default_rng(seed)
    names = list(SHIPPED.values("attention", features().lanes))

    def seconds(settings: Parameters, call: str) -> float:
        wrong = sum(settings.at("attention", name) != best.at("attention", name) for name in names)
        return float(1.05**wrong * np.exp(noise * random.standard_normal()))

    return seconds


def found_from(start: Parameters, tmp_path: Path, seconds: float = 60) -> search_module.Found:
    return search(start, tmp_path, seconds=seconds, say=lambda line: None)


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_best_of_each_setting_from_a_spoilt_table(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = times(monkeypatch, of_best(SHIPPED, 0.005, seed), lambda settings: False)
    found = found_from(spoilt_settings(SHIPPED, seed), tmp_path)
    assert found.settings.attention == SHIPPED.attention
    assert set(found.gains) == {f"attention.{name}" for name in SHIPPED.values("attention", features().lanes)}
    assert all(gain == pytest.approx(1.05, abs=0.02) for gain in found.gains.values())
    assert all(each.ended for each in begun)


def test_what_gains_only_together_is_found_in_a_table_of_another_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of two changes alone costs time."""
    other = SHIPPED.having("attention", "run", 512).having("attention", "least_run", 256)

    def seconds(settings: Parameters, call: str) -> float:
        changes = sum(settings.at("attention", name) != SHIPPED.at("attention", name) for name in ("run", "least_run"))
        return {0: 1.0, 1: 1.2, 2: 0.8}[changes]

    times(monkeypatch, seconds, lambda settings: False)
    assert found_from(SHIPPED, tmp_path).settings == SHIPPED
    told: list[str] = []
    tables = {"same": SHIPPED, "other": other}
    found = search(SHIPPED, tmp_path, seconds=60, say=told.append, tables=tables)
    assert found.settings == other
    assert found.gains == {"attention": pytest.approx(1.25)}
    assert "attention: the table -> that of other, 1.250 times as fast" in told


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_win(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    times(monkeypatch, lambda settings, call: float(np.exp(0.05 * random.standard_normal())), lambda settings: False)
    assert found_from(SHIPPED, tmp_path).settings == SHIPPED


@pytest.mark.parametrize(("slower", "kept"), [(1.05, True), (1.08, False)])
def test_one_call_may_lose_what_all_gain_on_average(
    slower: float, kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def seconds(settings: Parameters, call: str) -> float:
        return (0.85 if call == "one" else slower) if settings.attention.run == 512 else 1.0

    times(monkeypatch, seconds, lambda settings: False)
    changed = SHIPPED.having("attention", "run", 512)
    assert found_from(SHIPPED, tmp_path).settings == (changed if kept else SHIPPED)


def test_wrong_results_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seconds(settings: Parameters, call: str) -> float:
        return {512: 0.5, 1024: 0.8}.get(settings.attention.run, 1.0)

    times(monkeypatch, seconds, lambda settings: settings.attention.run == 512)
    told: list[str] = []
    found = search(SHIPPED, tmp_path, seconds=60, say=told.append)
    assert found.settings == SHIPPED.having("attention", "run", 1024)
    assert "left out: nonsense" in told


def test_a_setting_is_tried_again_after_others_have_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first one gains only with the value of the last one."""

    def seconds(settings: Parameters, call: str) -> float:
        attention = settings.attention
        if attention.least_run != 512:
            return 1.0
        return 0.6 if attention.tokens_together == 1 else 0.8

    times(monkeypatch, seconds, lambda settings: False)
    found = found_from(SHIPPED.having("attention", "tokens_together", 4), tmp_path).settings.attention
    assert (found.least_run, found.tokens_together) == (512, 1)


def test_losses_of_one_call_do_not_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of three changes is a gain with a call that is 2.5 % slower; with two of them it would be 5 %."""

    def seconds(settings: Parameters, call: str) -> float:
        attention = settings.attention
        changes = (attention.run == 512) + (attention.level == 1) + (attention.tokens_together == 1)
        return float((0.94 if call == "one" else 1.025) ** changes)

    times(monkeypatch, seconds, lambda settings: False)
    assert len(found_from(SHIPPED, tmp_path).gains) == 1


def test_a_process_that_ends_does_not_lose_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seconds(settings: Parameters, call: str) -> float:
        if settings.experts != SHIPPED.experts:
            raise TimingError("it ended")
        return 0.5 if settings.rows.thread_numbers == 65536 else 1.0

    times(monkeypatch, seconds, lambda settings: False)
    found = found_from(SHIPPED, tmp_path)
    assert (found.settings, found.ended) == (SHIPPED.having("rows", "thread_numbers", 65536), "it ended")


def test_what_differs_from_the_family_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times(monkeypatch, lambda settings, call: 0.5 if settings.attention.run == 512 else 1.0, lambda settings: False)
    file = tmp_path / "found" / "here.toml"
    told: list[str] = []
    tune_cpu(out=file, say=told.append)
    assert file.read_text() == "[attention]\nrun = 512\n"
    assert list(file.parent.iterdir()) == [file]
    times(monkeypatch, lambda settings, call: 1.0, lambda settings: False)
    tune_cpu(out=file, say=told.append)
    assert not file.exists()
    with pytest.raises(WorkbenchError, match="cannot be written"):
        tune_cpu(out=Path("/proc/here.toml"), say=told.append)


def test_what_there_was_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times(monkeypatch, of_best(SHIPPED, 0, 0), lambda settings: False)
    spoilt = spoilt_settings(SHIPPED, 0)
    found = found_from(spoilt, tmp_path, seconds=0)
    assert found.settings == spoilt
    assert "attention.streams" in found.untried


def test_every_group_has_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]

    def seconds(settings: Parameters, call: str) -> float:
        now[0] += 1.0
        return 1.0

    times(monkeypatch, seconds, lambda settings: False)
    monkeypatch.setattr(search_module.time, "monotonic", lambda: now[0])
    found = found_from(SHIPPED, tmp_path, seconds=300)
    for group in ("experts", "attention"):
        every = {f"{group}.{setting}" for setting in SHIPPED.values(group, features().lanes)}
        assert set() < every & set(found.untried) < every


def test_spoilt_settings_are_found_back_and_timed_beside_the_shipped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, of_best(Parameters.of_family(cpu_family()), 0, 0), lambda settings: False)
    told: list[str] = []
    assert bench_tuning(tries=1, say=told.append) == pytest.approx([1])
    before = [float(line.split(": ")[1].split()[0]) for line in told if line.startswith("seed")]
    assert min(before) < 0.8


def test_small_groups_are_searched_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else one with many settings takes the time of those with one or two."""
    times(monkeypatch, of_best(SHIPPED, 0, 0), lambda settings: False)
    groups = [name.split(".")[0] for name in found_from(spoilt_settings(SHIPPED, 0), tmp_path, seconds=0).untried]
    counts = [groups.count(group) for group in dict.fromkeys(groups)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_an_interrupt_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seconds(settings: Parameters, call: str) -> float:
        if settings.experts != SHIPPED.experts:
            raise KeyboardInterrupt
        return 0.5 if settings.rows.thread_numbers == 65536 else 1.0

    begun = times(monkeypatch, seconds, lambda settings: False)
    found = found_from(SHIPPED, tmp_path)
    assert found.settings == SHIPPED.having("rows", "thread_numbers", 65536)
    assert found.ended == "it was interrupted"
    assert all(each.ended for each in begun)
