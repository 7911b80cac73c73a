"""Settings of the CPU kernels: tables by family, files, and what a process takes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import kernels_cpu
from kernels_cpu import Parameters, cpu_family, features, parameters
from tests.examples import DEEP

FAMILIES = [
    "znver2",
    "znver3",
    "znver4",
    "znver5",
    "icelake-server",
    "sapphirerapids",
    "alderlake",
    "skylake",
    "generic",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_settings_that_may_be(family: str, tmp_path: Path) -> None:
    found = Parameters.of_family(family)
    file = tmp_path / "all.toml"
    file.write_text(found.text())
    assert Parameters.read(file) == found
    assert found.text(found) == ""


def test_a_file_has_what_differs_from_the_family_of_this_cpu(tmp_path: Path) -> None:
    shipped = Parameters.of_family(cpu_family())
    changed = shipped.having("attention", "level", 1).having("rows", "thread_numbers", 65536)
    file = tmp_path / "some.toml"
    file.write_text(changed.text(shipped))
    assert Parameters.read(file) == changed
    file.write_text("")
    assert Parameters.read(file) == shipped


def test_a_family_without_a_table_takes_that_of_its_make() -> None:
    assert Parameters.of_family("znver99") == Parameters.of_family("znver5")
    assert "'zen', for znver99 has none" in Parameters.of_family("znver99").why
    assert "'any', for knl has none" in Parameters.of_family("knl").why
    assert Parameters.of_family("knl") == Parameters.of_family("sapphirerapids") != Parameters.of_family("znver4")


def test_each_setting_may_have_several_values_and_has_one_of_them() -> None:
    for family in FAMILIES:
        found = Parameters.of_family(family)
        for group in Parameters.GROUPS:
            for lanes in (8, 16):
                for setting, values in found.values(group, lanes).items():
                    assert found.at(group, setting) in values
                    assert len(values) == len(set(values)) > 1


def test_a_change_is_of_one_setting_on_this_code_path() -> None:
    found = Parameters.of_family("sapphirerapids")
    fewer = next(value for value in found.values("attention", 8)["sums"] if value.avx2 == 4)
    changed = found.having("attention", "sums", fewer)
    assert changed.attention.sums[16] == found.attention.sums[16]
    assert changed.attention.sums[8] == 4
    assert changed.text(found) == "[attention]\nsums = { avx512 = 16, avx2 = 4 }\n"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("streams = 1\n", "streams = 3\n", "attention.streams is 3; give it one of 1, 2, 4, 8"),
        ("level = 2\n", "level = true\n", "attention.level is True"),
        ("level = 2\n", "level = 2\nlevels = 2\n", "there is no setting attention.levels"),
        ("[rows]", "[columns]", "columns is no table of settings"),
        ("[rows]\n", "[[rows]]\n", "rows is no table of settings"),
        ("sums = { avx512 = 16, avx2 = 8 }", "sums = { avx512 = 16, avx2 = 8, avx = 4 }", "attention.sums is"),
        ("bf16_products = true", "bf16_products = 1", "experts.bf16_products is 1; give it one of false, true"),
        ("{ avx512 = 16, avx2 = 8 }", "{ avx512 = 16 }", "attention.sums is"),
    ],
)
def test_a_file_that_is_none_is_told(old: str, new: str, told: str, tmp_path: Path) -> None:
    text = Parameters.of_family("znver4").text()
    assert old in text
    file = tmp_path / "bad.toml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match="^" + told.replace("[", "\\[")):
        Parameters.read(file)


# ------------------------------------------------------------------------------------------------ what a process takes

EVERY_KERNEL = """
import numpy as np
from kernels_cpu import decode_attention, decode_attention_reference, features, fused_moe, fused_moe_reference
from kernels_cpu import pack_experts
random = np.random.default_rng(0)
for group in (1, 4, 8):
    kv = random.standard_normal((6, 2, 2, 64, 128), dtype=np.float32)
    q = random.standard_normal((2, 2 * group, 128), dtype=np.float32)
    rest = np.array([[0, 1, 2], [3, 4, 5]], np.int32), np.array([150, 191])
    np.testing.assert_allclose(decode_attention(q, kv, *rest), decode_attention_reference(q, kv, *rest), atol=2e-6)
for form in ("bf16", "int8", "int4"):
    up, down = (random.standard_normal(shape, dtype=np.float32) for shape in ((2, 256, 128), (2, 128, 128)))
    packed = pack_experts(up, down, format=form)
    for count in (1, 9):
        x = random.standard_normal((count, 128), dtype=np.float32)
        rest = np.zeros((count, 1), np.int64), np.ones((count, 1), np.float32)
        expected = fused_moe_reference(x, packed, *rest)
        error = np.abs(fused_moe(x, packed, *rest) - expected).max() / np.abs(expected).max()
        assert error < 0.02, (form, count, error)
print(features().settings)
"""


def told_by(env: dict[str, str], code: str = EVERY_KERNEL) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path} | env, capture_output=True, text=True)
    return done.stdout.strip() if not done.returncode else done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not DEEP, reason="compiles every kernel twice anew; a search checks results itself")
@pytest.mark.parametrize("last", [False, True], ids=["least", "most"])
def test_results_are_right_with_settings_far_from_the_shipped_ones(last: bool, tmp_path: Path) -> None:
    found = Parameters.of_family(cpu_family())
    for group in Parameters.GROUPS:
        for setting, values in found.values(group, features().lanes or 8).items():
            found = found.having(group, setting, values[-1 if last else 0])
    file = tmp_path / "far.toml"
    file.write_text(found.text())
    env = {Parameters.VARIABLE: str(file), "NUMBA_CACHE_DIR": str(tmp_path)}
    assert told_by(env) == f"{Parameters.VARIABLE}={file}"


SETTINGS = "import kernels_cpu; print(kernels_cpu.features().settings, kernels_cpu.parameters().attention.run)"


def test_what_was_tuned_on_this_computer_is_taken_and_what_is_damaged_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = Parameters.tuned_path()
    assert file.is_relative_to(tmp_path)
    file.parent.mkdir(parents=True)
    shipped = Parameters.of_family(cpu_family())
    file.write_text(shipped.having("attention", "run", 512).text())
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert told_by(env, SETTINGS) == f"tuned on this computer, {file} 512"
    file.write_text("[attention]\nrun = 7\n")
    assert "is not used: attention.run is 7; give it one of 512, " in told_by(env, SETTINGS)
    assert told_by(env, f"import warnings; warnings.simplefilter('ignore'); {SETTINGS}") == f"{shipped.why} 2048"


def test_without_a_home_the_shipped_settings_are_taken() -> None:
    code = f"import os; os.environ.pop('XDG_CACHE_HOME', None); os.environ['HOME'] = '/proc/1/fd'; {SETTINGS}"
    assert told_by({}, code) == f"{Parameters.of_family(cpu_family()).why} 2048"


def test_features_tell_which_settings_are_taken() -> None:
    assert features().settings == parameters().why
    assert str(features()).endswith(f"; settings: {parameters().why}")
    assert replace(parameters(), why="") == kernels_cpu.parameters()
