"""What this computer's gpu lane is computed by where nothing is said: the card, if torch takes one."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from workbench.hardware import machine, system
from workbench.hardware.system import System, torch_takes_cards

WITH_CUDA = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
WITHOUT = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n"


def has_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "version.py").write_text(text, encoding="utf-8")
    spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(system, "find_spec", lambda name: spec)


def has_card(root: Path, place: str) -> System:
    (root / place).mkdir(parents=True)
    return System(root)


@pytest.mark.parametrize("place", ["proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0"])
@pytest.mark.parametrize(("shown", "expected"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_card_is_seen_unless_cuda_is_told_to_hide_it(
    place: str, shown: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert has_card(tmp_path, place).has_card is expected
    assert not System(tmp_path / "elsewhere").has_card


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
