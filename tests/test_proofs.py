"""A proof holds while nothing that it rests on changes by a byte, and what fails leaves none."""

import json
import warnings
from pathlib import Path

import pytest

from tests import proofs as module
from tests.proofs import Proofs, proved

SOURCES = {
    "tests/test_here.py": "import package.one\nfrom tests.beside import x\n",
    "tests/beside.py": "def x():\n    from package import two\n",
    "package/__init__.py": "",
    "package/one.py": "from .deep import three\n",
    "package/two.py": "two = 2\n",
    "package/deep/__init__.py": "",
    "package/deep/three.py": "from ..four import four\n",
    "package/four.py": "four = 4\n",
    "data/table.json": "{}",
}
APART = {"package/five.py": "five = 5\n", "data/notes.txt": "", "README.md": ""}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in (SOURCES | APART).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def here(root: Path, monkeypatch: pytest.MonkeyPatch) -> Proofs:
    monkeypatch.setattr(module, "DEEP", False)
    return Proofs("here", ("tests/test_here.py",), ("data/*.json",), ("numpy",), root)


def test_what_is_imported_by_a_constant_name_counts(root: Path) -> None:
    text = 'import importlib\nfrom importlib import import_module as {0}\n{1}("package.five")\n'
    for call, found in (("importlib.import_module", True), ("import_module", True), ("print", False)):
        (root / "tests/test_there.py").write_text(text.format("import_module", call))
        there = Proofs("there", ("tests/test_there.py",), root=root)
        assert (root / "package/five.py" in there.files()) == found, call
    (root / "tests/test_there.py").write_text("import importlib\nimportlib.import_module(name)\n")
    assert there.files() == [root / "tests/test_there.py"]


def later(proofs: Proofs) -> Proofs:
    """The same in a new process, which reads the files anew."""
    Proofs.rests_on.cache_clear()
    return proofs


def test_all_that_is_imported_however_far_away_and_all_data_count(here: Proofs, root: Path) -> None:
    assert [str(path.relative_to(root)) for path in here.files()] == sorted(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_a_change_of_any_byte_makes_it_invalid(name: str, here: Proofs, root: Path) -> None:
    here.keep("case", "passed")
    assert later(here).holds("case")
    content = (root / name).read_bytes()
    for place in range(len(content) + 1):
        (root / name).write_bytes(content[:place] + b"#" + content[place + 1 :])
        digest = later(here).rests_on()["files"]
        (root / name).write_bytes(content)
        assert digest != later(here).rests_on()["files"]
    (root / name).write_bytes(content + b"\n")
    assert not later(here).holds("case")
    (root / name).write_bytes(content)
    assert later(here).holds("case")


@pytest.mark.parametrize("name", APART)
def test_what_it_does_not_rest_on_may_change(name: str, here: Proofs, root: Path) -> None:
    here.keep("case", "passed")
    (root / name).write_text("changed = True\n")
    assert later(here).holds("case")


def test_a_file_that_is_moved_and_not_changed_leaves_it_valid(here: Proofs, root: Path) -> None:
    here.keep("case", "passed")
    (root / "data/table.json").rename(root / "data/renamed.json")
    assert later(here).holds("case")


def test_another_version_makes_it_invalid(here: Proofs, monkeypatch: pytest.MonkeyPatch) -> None:
    here.keep("case", "passed")
    monkeypatch.setattr(module, "version", lambda name: "0.1+here")
    assert not later(here).holds("case")
    assert here.rests_on()["numpy"] == "0.1"


def test_data_that_is_not_there_is_an_error(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data/\*\.toml names no file that gone could rest on"):
        Proofs("gone", ("tests/test_here.py",), ("data/*.toml",), root=root).holds("case")


def test_the_work_is_done_until_it_is_proved(here: Proofs) -> None:
    calls: list[int] = []

    @proved(here)
    def test_work(number: int) -> dict[str, int]:
        calls.append(number)
        return {"number": number}

    with pytest.warns(UserWarning, match="no longer held: commit data/proofs/here.json"):
        test_work(number=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test_work(number=1)
    with pytest.warns(UserWarning, match="no longer held"):
        test_work(number=2)
    assert calls == [1, 2]
    assert json.loads(here.path.read_text())["shown"] == {"test_work 1": {"number": 1}, "test_work 2": {"number": 2}}


@pytest.mark.parametrize("names", ["number, kind", ("number", "kind")], ids=["a string", "a tuple"])
def test_a_parameter_that_cannot_tell_cases_apart_is_refused(names: object, here: Proofs) -> None:
    """Below the proof or above it; a fixture may be anything."""

    def test_work(number: int, kind: object, made: object) -> None:
        raise AssertionError("no work before the case is known")

    cases = pytest.mark.parametrize(names, [(1, object())])
    for test in (cases(proved(here)(test_work)), proved(here)(cases(test_work))):
        with pytest.raises(TypeError, match="test_work has the parameter kind, no string or number"):
            test(number=1, kind=object(), made="")
        with pytest.raises(AssertionError, match="no work before"):
            test(number=1, kind="odd", made=object())


@pytest.mark.filterwarnings("ignore:the proof no longer held")
def test_a_failed_run_leaves_no_proof(here: Proofs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the one that there was, where the work is done once more."""
    right = True

    @proved(here)
    def test_work() -> None:
        assert right

    test_work()
    assert here.holds("test_work")
    right = False
    test_work()  # proved, so the work is not done
    monkeypatch.setattr(module, "DEEP", True)
    with pytest.raises(AssertionError):
        test_work()
    assert not here.holds("test_work")
    monkeypatch.setattr(module, "DEEP", False)
    with pytest.raises(AssertionError):
        test_work()
    assert not here.holds("test_work")


def test_proofs_of_other_files_are_dropped_with_the_first_of_these(here: Proofs, root: Path) -> None:
    here.keep("old", "passed")
    (root / "package/four.py").write_text("four = 5\n")
    later(here).keep("new", "passed")
    assert list(here.shown()) == ["new"]
