"""The lock: exact versions of all that pyproject.toml asks for, within its ranges, and how old it is."""

import re
import tomllib
import warnings
from datetime import UTC, date, datetime
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MONTH = 31


def load_script():
    spec = spec_from_file_location("lock", ROOT / "lock.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock = load_script()


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = [line for line in lock.LOCK.read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in pairs}


def asked() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(line) for each in lists for line in each]
    return [one for one in wanted if one.name not in ("moe-workbench", "triton")]


@pytest.mark.parametrize("wanted", asked(), ids=str)
def test_what_is_asked_for_is_locked_within_its_range(wanted, pins):
    assert pins[canonicalize_name(wanted.name)] in wanted.specifier


def test_torch_is_the_one_that_lab_installs(pins):
    assert f"torch=={pins['torch']}" == lock.TORCH
    assert f'TORCH = ["{lock.TORCH}"]' in (ROOT / "lab").read_text()


def test_what_torch_decides_and_local_versions_are_not_locked():
    frozen = ["triton==3.9.0", "nvidia-cublas==13.1", "torch==2.13.0+cpu", "-e .", "numpy==2.4.6", "moe @ file:///x"]
    assert lock.locked(frozen) == ["numpy==2.4.6", "torch==2.13.0"]
    assert lock.written(["numpy==2.4.6"], date(2026, 1, 2)).splitlines()[1:] == ["numpy==2.4.6"]


@pytest.mark.parametrize("running", [(3, 10), (3, 12), (3, 13), (4, 11)], ids=str)
def test_another_python_than_the_oldest_is_refused_before_any_work(running, monkeypatch):
    """What resolves there may not install on the oldest."""
    monkeypatch.setattr(lock.sys, "version_info", (*running, 2, "final", 0))
    monkeypatch.setattr(lock.venv, "create", lambda *args, **options: pytest.fail("it worked"))
    with pytest.raises(
        SystemExit, match=rf"^lock\.py needs Python 3\.11, the oldest .* this is {running[0]}\.{running[1]};"
    ):
        lock.main()


def test_the_oldest_python_is_the_one_that_lab_and_the_project_ask_for():
    lock.check_python(lock.oldest_python())
    assert f"OLDEST_PYTHON = {lock.oldest_python()}" in (ROOT / "lab").read_text()


def test_its_age_is_told_once_a_month_has_passed():
    found = date.fromisoformat(re.search(r"\d{4}-\d\d-\d\d", lock.LOCK.read_text())[0])
    age = (datetime.now(UTC).date() - found).days
    assert age >= 0
    if age > MONTH:
        warnings.warn(f"constraints.txt is {age} days old; python lock.py finds newer versions", stacklevel=1)
