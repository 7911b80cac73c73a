"""What the commands refuse before they begin."""

import os
from pathlib import Path

import pytest

from workbench.__main__ import _parser

RECORDED = ["sim", "simulator", "cpu", "experts", "moe", "overlap"]


def refusal(capsys, *words: str) -> str:
    """The last line that is said where the command is refused."""
    with pytest.raises(SystemExit) as stop:
        _parser().parse_args(words)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("value", ["0", "-3", "2.5", "many"])
@pytest.mark.parametrize(
    "option",
    [
        "sim --settings",
        "sim --repeats",
        "simulator --repeats",
        "overlap --rows",
        "overlap --context",
        "overlap --repeats",
    ],
)
def test_a_count_is_a_positive_whole_number(capsys, option, value):
    said = refusal(capsys, "bench", *option.split(), value)
    assert said.endswith(f"argument {option.split()[1]}: give a whole number of at least 1, not {value!r}.")


@pytest.mark.parametrize("value", ["-1", "0.5"])
def test_a_seed_is_a_whole_number_from_0_on(capsys, value):
    said = refusal(capsys, "bench", "sim", "--seed", value)
    assert said.endswith(f"argument --seed: give a whole number of at least 0, not {value!r}.")


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "long"])
@pytest.mark.parametrize("bench", ["cpu", "experts", "moe"])
def test_seconds_are_positive_and_finite(capsys, bench, value):
    said = refusal(capsys, "bench", bench, "--seconds", value)
    assert said.endswith(f"argument --seconds: give a positive number of seconds such as 60, not {value!r}.")


@pytest.mark.parametrize(
    ("value", "words"),
    [("fast", "rate 'fast' is not a quantity of bytes; write"), ("0", "rate must be a positive number")],
)
def test_a_link_that_is_no_rate_is_refused_in_the_librarys_own_words(capsys, value, words):
    assert f"argument --link: {words}" in refusal(capsys, "bench", "overlap", "--link", value)


@pytest.mark.parametrize(
    "command", [*(f"bench {bench} --json" for bench in RECORDED), "bench cpu --picture", "measure --out"]
)
def test_a_file_that_cannot_be_written_is_refused(capsys, tmp_path, monkeypatch, command):
    file, new = tmp_path / "there.png", tmp_path / "new" / "roof.png"
    file.touch()
    assert f"'{tmp_path}' is a folder; give" in refusal(capsys, *command.split(), str(tmp_path))
    assert f"since {file} is no folder" in refusal(capsys, *command.split(), str(file / "roof.png"))
    assert new in vars(_parser().parse_args([*command.split(), str(new)])).values()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert f"no permission for {tmp_path}; give" in refusal(capsys, *command.split(), str(new))


@pytest.mark.parametrize("name", ["roof.xyz", "roof"])
def test_a_picture_has_a_format_that_can_be_drawn(capsys, tmp_path, name):
    said = refusal(capsys, "bench", "cpu", "--picture", str(tmp_path / name))
    assert said.endswith("ends in no known format; give a file such as roof.png, .svg or .pdf.")


def test_what_can_be_done_is_taken(tmp_path):
    options = _parser().parse_args(["bench", "overlap", "--rows", "1", "--link", "2GB"])
    assert (options.rows, options.link) == (1, 2e9)
    options = _parser().parse_args(["bench", "cpu", "--seconds", "0.5", "--picture", str(tmp_path / "roof.PDF")])
    assert (options.seconds, options.picture) == (0.5, tmp_path / "roof.PDF")
    assert _parser().parse_args(["bench", "sim", "--seed", "0"]).seed == 0
