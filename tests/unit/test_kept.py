"""A record that was measured once may only help: damaged, or where none can be written, it is measured again."""

import errno
import warnings
from pathlib import Path

import pytest

from tests.builders import small_machine
from tests.damage import JSON_DAMAGES
from workbench.core import kept
from workbench.core.errors import ScenarioError
from workbench.hardware import Machine
from workbench.hardware import machine as hardware

HERE = small_machine()


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this computer's rates are kept; measuring them is counted."""
    path = tmp_path / "cache" / "machine.json"
    monkeypatch.setattr(hardware, "_record_path", lambda card: path)
    monkeypatch.setattr(kept, "_NOT_WRITTEN", {})
    monkeypatch.setattr(Machine, "_measured", classmethod(measured))
    measurements.clear()
    return path


measurements: list[int] = []


def measured(_: type[Machine], device: str) -> Machine:
    measurements.append(1)
    return HERE


def local(**options: bool) -> list[str]:
    """What is said while the machine is asked for, which must be right."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert Machine.local(**options) == HERE
    return [str(each.message) for each in said]


def test_it_is_measured_once_and_nothing_is_said(record: Path) -> None:
    assert local() == local() == []
    assert len(measurements) == 1
    assert not local(refresh=True)
    assert len(measurements) == 2


@pytest.mark.parametrize("damage", JSON_DAMAGES)
def test_a_damaged_record_is_measured_again_and_mended_where_that_is_possible(damage: str, record: Path) -> None:
    local()
    JSON_DAMAGES[damage](record)
    (said,) = local()
    mended = damage not in ("a folder", "no folder")
    assert str(record) in said
    assert ("could not be read" if mended else "cannot be written") in said
    assert local() == []
    assert len(measurements) == 2
    assert (Machine.load(record) == HERE) if mended else not record.is_file()
    assert not list(record.parent.glob("*.part"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "write_text", "replace"])
def test_where_none_can_be_written_it_is_told_once(
    call: str, number: int, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "struck")

    monkeypatch.setattr(Path, call, fail)
    (said,) = local()
    assert "cannot be written" in said
    assert "set XDG_CACHE_HOME" in said
    assert local() == []
    assert len(measurements) == 1
    assert not list(record.parent.glob("*"))


def test_what_is_measured_again_and_written_replaces_what_could_not_be(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "struck")

    with monkeypatch.context() as full:
        full.setattr(Path, "replace", fail)
        local()
    assert local(refresh=True) == []
    assert record not in kept._NOT_WRITTEN


def test_what_cannot_be_opened_is_measured_again(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local()

    def fail(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(Path, "read_text", fail)
    (said,) = local()
    assert "not yours" in said
    assert len(measurements) == 2


def test_a_file_that_the_user_names_is_refused_as_before(tmp_path: Path) -> None:
    """`Machine.load` is asked for that very record."""
    for damage in ("empty", "garbage", "{}"):
        path = HERE.save(tmp_path / "there.json")
        JSON_DAMAGES[damage](path)
        with pytest.raises(ScenarioError, match="no machine record"):
            Machine.load(path)
