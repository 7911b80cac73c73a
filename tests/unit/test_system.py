"""What this computer's gpu lane is computed by where nothing is said: the card, if torch takes one."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from workbench.core.errors import ScenarioError
from workbench.hardware import Machine, machine, machines, system
from workbench.hardware.system import System, torch_takes_cards

WITH_CUDA = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
WITHOUT = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n"
MACHINE = next(iter(machines.values()))
refused = set[str]()
"""Devices that do not answer."""


def has_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "version.py").write_text(text, encoding="utf-8")
    spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(system, "find_spec", lambda name: spec)


def has_card(root: Path, place: str) -> System:
    (root / place).mkdir(parents=True, exist_ok=True)
    return System(root)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [(None, True), ("0", True), ("1,0", True), ("GPU-4c1", True), ("", False), ("-1", False), ("-1,0", False)],
)
def test_a_card_is_seen_unless_cuda_is_told_to_hide_it(
    shown: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert has_card(tmp_path, "dev/nvidia3").has_card is expected


def test_a_card_that_this_process_may_not_open_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not has_card(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0").has_card
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert not System(tmp_path).has_card


@pytest.mark.parametrize(("text", "expected"), [(WITH_CUDA, True), (WITHOUT, False), ("", False)])
def test_torch_says_whether_it_was_built_for_cards(
    text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_torch(monkeypatch, tmp_path, text)
    assert torch_takes_cards() is expected
    monkeypatch.setattr(system, "find_spec", lambda name: None)
    assert not torch_takes_cards()


@pytest.mark.parametrize(
    ("card", "text", "device"), [(True, WITH_CUDA, "cuda"), (True, WITHOUT, "cpu"), (False, WITH_CUDA, "cpu")]
)
def test_the_usual_device_is_the_card_where_torch_takes_one(
    card: bool, text: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = has_card(tmp_path, "dev/nvidia0") if card else System(tmp_path)
    monkeypatch.setattr(machine, "System", lambda: here)
    has_torch(monkeypatch, tmp_path, text)
    assert machine.usual_device() == device


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The devices that are measured, on a computer with a card."""
    found = list[str]()

    def measured(cls: type[Machine], device: str) -> Machine:
        found.append(device)
        if device in refused:
            raise ScenarioError("the card does not answer.")
        return MACHINE

    refused.clear()
    monkeypatch.setattr(Machine, "_measured", classmethod(measured))
    monkeypatch.setattr(machine, "usual_device", lambda: "cuda")
    monkeypatch.setattr(machine, "_record_path", lambda device: tmp_path / f"{device}.json")
    return found


def test_the_card_is_measured_unless_the_cpu_is_named(asked: list[str]) -> None:
    assert Machine.local() == MACHINE
    assert Machine.local(device="cpu") == MACHINE
    assert Machine.local(device="cuda") == MACHINE
    assert asked == ["cuda", "cpu"]  # the third is the first's record


def test_the_cpu_is_measured_where_the_card_does_not_answer(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused.add("cuda")
    assert Machine.local() == MACHINE
    assert asked == ["cuda", "cpu"]
    assert "the card does not answer. The CPU computes all meanwhile." in capsys.readouterr().err
    with pytest.raises(ScenarioError, match="does not answer"):
        Machine.local(device="cuda")
