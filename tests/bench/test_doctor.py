"""What `doctor` says of a computer, from files that stand in for its own."""

import json
from pathlib import Path

import pytest

from workbench.bench.doctor import doctor
from workbench.bench.doctor import speeds as measuring
from workbench.bench.doctor.doctor import computer, paths
from workbench.bench.doctor.settings import settings
from workbench.bench.doctor.speeds import judged, speeds
from workbench.bench.record import medians
from workbench.core.quiet import Noise
from workbench.hardware import usable_cores
from workbench.hardware.system import System

MADVISE = {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}


def system(root: Path, files: dict[str, str]) -> System:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return System(root)


def wrong(root: Path, files: dict[str, str], environment: dict[str, str] | None = None) -> dict[str, str]:
    found = settings(system(root, files), 4, root, environment or {})
    return {finding.name: finding.mend for finding in found if finding.mend}


def test_a_system_that_says_nothing_has_nothing_to_mend(tmp_path):
    assert wrong(tmp_path, {}) == {}


@pytest.mark.parametrize(
    "name, files",
    [
        ("huge pages", {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}),
        ("clock", {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}),
        ("container", {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "150000 100000"}),
        (
            "container",
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)
def test_what_the_system_has_set_wrongly_is_named(tmp_path, name, files):
    assert list(wrong(tmp_path, files)) == [name]


@pytest.mark.parametrize(
    "files",
    [
        MADVISE,
        {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance"},
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/cpu.max": "max 100000",
            "sys/fs/cgroup/cpu.max": "400000 100000",
        },
    ],
)
def test_what_is_set_rightly_is_not(tmp_path, files):
    assert wrong(tmp_path, files) == {}


def test_the_tightest_group_counts(tmp_path):
    files = {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}
    files["sys/fs/cgroup/a/cpu.max"] = "250000 100000"
    assert system(tmp_path, files).core_limit == 2.5


def test_variables_of_the_shell_are_named_with_their_mend(tmp_path):
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4", "NUMBA_DISABLE_JIT": "1", "TRITON_INTERPRET": "0"}
    found = wrong(tmp_path, {}, environment)
    assert found["threads"].startswith("unset OMP_NUM_THREADS:")
    assert found["switch"] == "unset NUMBA_DISABLE_JIT to measure or to work"


def test_a_cache_that_does_not_exist_yet_is_looked_for_where_it_will_be(tmp_path):
    (found,) = (each for each in settings(System(tmp_path), 4, tmp_path / "a/b", {}) if each.name == "cache")
    assert not found.mend
    assert str(tmp_path / "a/b") in found.found


def test_the_cpu_is_named_with_its_family_and_last_cache(tmp_path):
    files = {"proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU @ 2 GHz"}
    for level, size in (("1", "32K"), ("3", "32768K"), ("2", "512K")):
        files |= {
            f"sys/devices/system/cpu/cpu0/cache/index{level}/{key}": value
            for key, value in (("level", level), ("size", size))
        }
    first, *_ = computer(system(tmp_path, files), 4, "znver9")
    assert first.found == "A CPU @ 2 GHz (znver9), 4 cores for this process, last-level cache 32768K"


def test_every_kind_of_code_is_told():
    assert [finding.name for finding in paths()] == [
        "vectors",
        "attention, experts",
        "few rows",
        "bf16 products",
        "gpu lane",
    ]


def test_a_rate_is_judged_by_the_record_and_blamed_on_other_programs_first(tmp_path):
    rates = {"reading on 1 core": 5e9, "products in fp32 on 2 cores": 60e9}
    others = {"reading on 1 core": 10e9}
    slow, unknown, quiet = judged(rates, others, Noise(0.0), "znver9")
    assert slow.found == "5 GB/s on 1 core, 0.50 of that recorded on znver9"
    assert slow.mend.startswith("ask again later")
    assert (unknown.found, unknown.mend) == ("60 GFLOP/s in fp32 on 2 cores", "")
    assert not quiet.mend
    slow, _, busy = judged(rates, others, Noise(0.3), "znver9")
    assert not slow.mend
    assert busy.mend.startswith("close other programs")
    fine, *_ = judged({"reading on 1 core": 7.1e9}, others, Noise(), "znver9")
    assert not fine.mend


def test_rates_are_kept_in_the_form_in_which_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_READ", 1 << 22)
    said = list[str]()
    path = tmp_path / "speeds.json"
    count = doctor(json=path, say=said.append)
    assert json.loads(path.read_text())["family"]
    kept = medians(path)
    assert list(kept) == list(speeds(usable_cores()))
    assert all(1e7 < rate < 1e14 for rate in kept.values())
    assert said[-1] == (f"{count} thing{'s' if count > 1 else ''} to mend" if count else "Nothing to mend.")
    assert sum(line.startswith("!") for line in said) == count
    assert medians(tmp_path / "none.json") == {}
