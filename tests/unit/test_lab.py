"""The `lab` script: what it decides, what it installs, how it fails. No network, no real pip."""

import ast
import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

LAB = Path(__file__).parents[2] / "lab"
GIB = 1 << 30


def load_lab():
    loader = SourceFileLoader("lab", str(LAB))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lab", loader))
    sys.modules["lab"] = module  # NamedTuple looks its module up
    loader.exec_module(module)
    return module


lab = load_lab()


class Commands:
    """Stands in for `run`: records the commands, makes what `python -m venv` would, fails or stops where told."""

    def __init__(self, failing="", errors="", stopping=""):
        self.failing, self.errors, self.stopping = failing, errors, stopping
        self.seen = []

    def __call__(self, command, cwd):
        line = " ".join(command)
        self.seen.append(line)
        if self.stopping and self.stopping in line:
            raise KeyboardInterrupt
        if self.failing and self.failing in line:
            return lab.Outcome(1, self.errors)
        if "-m venv" in line:
            touch(cwd / ".venv/bin/python")
        return lab.Outcome(0, "")

    def kinds(self):
        return ["venv" if "-m venv" in line else line.split()[-1] for line in self.seen]


EVERYTHING = ["venv", "torch==2.13.0", ".[lab]"]


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\n")
    monkeypatch.setattr(lab.os, "name", "posix")
    return tmp_path


def outside(commands, free, driver=False, answers=False):
    """All that a set-up asks of the computer and of the network."""
    return {"run": commands, "free": lambda _: free, "driver": lambda: driver, "answers": lambda _: answers}


def set_up(root, *extras, free=5 * GIB, **failure):
    """One start against recorded commands."""
    commands = Commands(**failure)
    setup = lab.Setup(root, extras or ("lab",), **outside(commands, free))
    with contextlib.suppress(KeyboardInterrupt):
        setup.ensure()
    return commands.kinds()


def start(root, *argv, monkeypatch, free=5 * GIB, driver=False, **failure):
    """main() with everything outside of it replaced; gives its exit code."""
    commands = Commands(**failure)
    real = lab.Setup
    monkeypatch.setattr(lab, "Setup", lambda _, extras: real(root, extras, **outside(commands, free, driver)))
    monkeypatch.setattr(lab, "hand_over", lambda command: 0)
    monkeypatch.chdir(root)
    return lab.main(argv)


# --- what is to be run


def place(platform="linux", terminal=True, superuser=False, **env):
    return lab.Place(platform, env, terminal, superuser)


@pytest.mark.parametrize(
    "where, headless",
    [
        (place(DISPLAY=":0"), False),
        (place(WAYLAND_DISPLAY="wayland-0", terminal=False), False),
        (place(), False),
        (place(terminal=False), True),
        (place(DISPLAY="", terminal=False), True),
        (place(DISPLAY=":0", CI="true"), True),
        (place("darwin", terminal=False), False),
        (place("win32", terminal=False), False),
        (place("darwin", CI="1"), True),
    ],
)
def test_headless_where_ci_is_set_or_nobody_looks(where, headless):
    assert where.headless is headless
    assert (lab.arguments_for([], where) == lab.REPORT) is headless


def test_headless_can_be_asked_for():
    assert lab.arguments_for(["--headless"], place(DISPLAY=":0")) == ["-m", "workbench", "report", "--out", "out/"]


def test_jupyterlab_listens_here_only_and_keeps_its_token():
    arguments = lab.arguments_for([], place(DISPLAY=":0"))
    assert arguments[:3] == ["-m", "jupyterlab", "--ip=127.0.0.1"]
    assert arguments[-1].endswith("/lab/tree/notebooks/00_tour.ipynb")
    assert not any("token" in word or "password" in word for word in arguments)
    assert lab.arguments_for([], place()) == [*arguments, "--no-browser"]
    assert lab.arguments_for([], place(DISPLAY=":0", superuser=True)) == [*arguments, "--allow-root"]


@pytest.mark.parametrize(
    "argv, arguments",
    [
        (["test"], ["-m", "pytest"]),
        (["test", "-k", "law"], ["-m", "pytest", "-k", "law"]),
        (["test", "--all"], ["tests/every.py"]),
        (["test", "tests/laws", "--all", "-x"], ["tests/every.py", "tests/laws", "-x"]),
        (["test", "--deep", "-x"], ["tests/every.py", "--deep", "-x"]),
        (["docs"], ["docs/make.py"]),
        (["--setup-only"], []),
    ],
)
def test_arguments(argv, arguments):
    assert lab.arguments_for(argv, place()) == arguments


# --- set-up


@pytest.mark.parametrize(
    "argv, extras",
    [
        (["--headless"], ()),
        ([], ("lab",)),
        (["--setup-only"], ("lab",)),
        (["test", "-x"], ("test",)),
        (["test", "--all"], ("test",)),
        (["docs"], ("docs",)),
    ],
)
def test_each_command_installs_what_it_needs(argv, extras):
    assert lab.extras_for(lab.arguments_for(argv, place())) == extras


def test_extras_are_added_once_and_kept(root):
    assert set_up(root, "lab") == EVERYTHING
    assert set_up(root, "test") == ["torch==2.13.0", ".[lab,test]"]
    assert set_up(root, "lab") == set_up(root, "test") == []
    (root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert set_up(root, "lab") == ["torch==2.13.0", ".[lab,test]"]


def test_set_up_makes_the_venv_then_torch_then_the_rest(root, capsys):
    assert set_up(root) == EVERYTHING
    headings = [line[:5] for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert headings == ["[1/3]", "[2/3]", "[3/3]"]


@pytest.mark.parametrize("driver", [False, True])
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_torchs_cpu_build_is_asked_for_where_there_is_no_driver(root, monkeypatch, platform, driver, answers):
    """Only Linux has the CUDA build in pip's own index. An index that does not answer is left out: pip would wait."""
    monkeypatch.setattr(lab.sys, "platform", platform)
    commands = Commands()
    lab.Setup(root, ("lab",), **outside(commands, 20 * GIB, driver, answers)).ensure()
    (line,) = [line for line in commands.seen if "torch==" in line]
    words = line.split("-c constraints.txt ")[1]
    cpu = platform == "linux" and answers and not driver
    assert words == ("--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0" if cpu else "torch==2.13.0")
    (rest,) = [line for line in commands.seen if ".[lab]" in line]
    assert "index" not in rest


def test_the_index_is_asked_only_where_it_matters():
    def never(url):
        raise AssertionError(url)

    assert lab.torch_for("darwin", False, never) == lab.torch_for("linux", True, never) == ["torch==2.13.0"]


class Silent(threading.Thread):
    """A server that takes connections and says nothing, or a page."""

    def __init__(self, page=b""):
        super().__init__(daemon=True)
        self.page, self.open = page, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.open.getsockname()[1]}/torch/"

    def run(self):
        self.kept = []
        with contextlib.suppress(OSError):
            while True:
                self.kept.append(self.open.accept()[0])
                if self.page:
                    self.kept[-1].recv(1000)
                    self.kept[-1].sendall(self.page)
                    self.kept[-1].close()


@pytest.mark.parametrize(
    "page, answer",
    [
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", True),
        (b"HTTP/1.0 403 Forbidden\r\n\r\n", False),
        (b"what?\r\n", False),
        (b"", False),
    ],
)
def test_an_index_answers_or_is_given_up(page, answer, monkeypatch):
    monkeypatch.setattr(lab, "PATIENCE", 0.5)
    monkeypatch.setattr(lab.urllib.request, "getproxies", dict)
    server = Silent(page)
    server.start()
    assert lab.answers(server.url) is answer
    server.open.close()


def test_nobody_there_is_no_answer(monkeypatch):
    monkeypatch.setattr(lab, "PATIENCE", 0.5)
    assert not lab.answers("http://127.0.0.1:9/")
    assert not lab.answers("no address")


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch):
    """No timeout of a connection counts for it."""
    hung = threading.Event()
    monkeypatch.setattr(lab, "PATIENCE", 0.1)
    monkeypatch.setattr(lab.urllib.request, "urlopen", lambda url, timeout: hung.wait())
    assert not lab.answers("https://example.org")
    hung.set()


def test_second_start_runs_nothing(root):
    set_up(root)
    assert set_up(root) == []


def test_pyproject_lock_and_recipe_are_in_the_stamp(root, monkeypatch):
    digests = {lab.Setup(root, ()).digest()}
    (root / "constraints.txt").write_text("numpy==2.4.5\n")
    digests.add(lab.Setup(root, ()).digest())
    (root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    digests.add(lab.Setup(root, ()).digest())
    monkeypatch.setattr(lab, "TORCH", ["torch==2.12.0"])
    digests.add(lab.Setup(root, ()).digest())
    monkeypatch.setattr(lab.platform, "python_version", lambda: "3.12.1")
    digests.add(lab.Setup(root, ()).digest())
    assert len(digests) == 5


def test_everything_is_installed_by_the_lock(root):
    commands = Commands()
    lab.Setup(root, ("lab",), **outside(commands, 5 * GIB)).ensure()
    installs = [line for line in commands.seen if "pip install" in line]
    assert len(installs) == 2
    assert all("-c constraints.txt" in line for line in installs)


def test_changed_pyproject_installs_into_the_venv_there_is(root):
    set_up(root)
    (root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert set_up(root) == EVERYTHING[1:]


def test_changed_back_after_an_interruption_installs_again(root):
    set_up(root)
    before = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    set_up(root, stopping="[lab]")
    (root / "pyproject.toml").write_text(before)
    assert set_up(root) == EVERYTHING[1:]


@pytest.mark.parametrize(
    "stopping, resumed",
    [("-m venv", EVERYTHING), ("torch==", EVERYTHING[1:]), ("[lab]", EVERYTHING[1:])],
)
def test_interrupted_set_up_resumes(root, stopping, resumed):
    set_up(root, stopping=stopping)
    assert set_up(root) == resumed
    assert set_up(root) == []


def test_half_made_venv_is_made_anew(root):
    touch(root / ".venv/bin/python")
    assert set_up(root) == EVERYTHING


def test_venv_without_its_python_is_made_anew(root):
    set_up(root)
    (root / ".venv/bin/python").unlink()
    assert set_up(root) == EVERYTHING


def test_moved_checkout_is_set_up_anew(root):
    (root / "here").mkdir()
    (root / "here/pyproject.toml").touch()
    (root / "here/constraints.txt").touch()
    set_up(root / "here")
    (root / "here").rename(root / "there")
    assert set_up(root / "there") == EVERYTHING


def test_half_installed_package_is_left_to_pip_again(root):
    set_up(root, stopping="torch==")
    packages = root / ".venv/lib/python{}.{}/site-packages".format(*sys.version_info)
    touch(packages / "whole-1.0.dist-info/INSTALLER")
    touch(packages / "half-1.0.dist-info/METADATA")
    set_up(root)
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.skipif(sys.platform == "win32", reason="no fcntl there")
def test_second_set_up_waits_for_the_first(root):
    code = (
        "import pathlib, runpy, sys\n"
        "locked = runpy.run_path(sys.argv[1])['locked']\n"
        "with locked(pathlib.Path(sys.argv[2])): print('in')\n"
    )
    command = [sys.executable, "-c", code, str(LAB), str(root / "lock")]
    with lab.locked(root / "lock"):
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        waiting = second.stdout.readline()
        assert second.poll() is None
    out, _ = second.communicate(timeout=30)
    assert "waiting" in waiting
    assert out == "in\n"


# --- failures: one line that names the mend, exit code 2


def only_line(capsys):
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("lab: ")
    return line


FAILURES = {
    "offline, refused": (
        "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(...): Errno 111'\n"
        "ERROR: No matching distribution found for typing-extensions",
        "no network",
    ),
    "offline, no DNS": ("[Errno -3] Temporary failure in name resolution", "no network"),
    "nothing for this Python": ("ERROR: No matching distribution found for torch==2.13.0", "no torch==2.13.0"),
    "disk full": ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
    "disk full while offline": (
        "connection broken by 'ReadTimeoutError'\nOSError: [Errno 28] No space left on device",
        "disk is full",
    ),
}


@pytest.mark.parametrize("errors, says", FAILURES.values(), ids=FAILURES)
def test_failure_of_pip_is_one_line(root, monkeypatch, capsys, errors, says):
    assert start(root, monkeypatch=monkeypatch, failing="-m pip", errors=errors) == 2
    line = only_line(capsys)
    assert says in line
    assert "./lab again" in line


def test_unusual_failure_of_pip_is_shown_whole(root, monkeypatch, capsys):
    errors = "ERROR: ResolutionImpossible\nbecause of this"
    assert start(root, monkeypatch=monkeypatch, failing="-m pip", errors=errors) == 2
    shown = capsys.readouterr().err
    assert errors in shown
    assert shown.splitlines()[-1].startswith("lab: -m pip install failed")


@pytest.mark.parametrize("driver, needed", [(False, 4 * GIB), (True, 10 * GIB)])
def test_too_little_disk_is_found_before_anything_is_made(root, monkeypatch, capsys, driver, needed):
    assert start(root, monkeypatch=monkeypatch, free=needed - 1, driver=driver) == 2
    assert "needs 4 GiB, or 10 GiB where there is an NVIDIA driver" in only_line(capsys)
    assert not (root / ".venv").exists()


def test_one_figure_of_disk_is_told_everywhere():
    """In the script's own words and in the README's."""
    figures = [str(size >> 30) for size in (lab.DISK_NEEDED, lab.DISK_NEEDED_FOR_CUDA)]
    assert [re.findall(r"(\d+) GiB", text) for text in (lab.HELP, lab.DISK_FULL)] == [figures, figures]
    readme = (LAB.parent / "README.md").read_text(encoding="utf-8")
    assert all(f"{figure} GiB" in readme for figure in figures)


def test_disk_that_fills_under_the_script_itself(root, monkeypatch, capsys):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lab, "locked", full)
    assert start(root, monkeypatch=monkeypatch) == 2
    assert "disk is full" in only_line(capsys)


@pytest.mark.parametrize("name", ["venv", "ensurepip"])
def test_missing_module(root, monkeypatch, capsys, name):
    found = importlib.util.find_spec
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda asked: None if asked == name else found(asked))
    assert start(root, monkeypatch=monkeypatch) == 2
    line = only_line(capsys)
    assert f"no {name} module" in line
    assert "apt install python3-venv" in line


def test_old_python(root, monkeypatch, capsys):
    monkeypatch.setattr(lab.sys, "version_info", (3, 10, 13, "final", 0))
    assert start(root, monkeypatch=monkeypatch) == 2
    assert "Python 3.10 is too old" in only_line(capsys)


def test_script_parses_on_python_3_6():
    ast.parse(LAB.read_text(), feature_version=(3, 6))


def test_unknown_argument(root, monkeypatch, capsys):
    assert start(root, "--fast", monkeypatch=monkeypatch) == 2
    assert "--help" in only_line(capsys)


def test_interruption(root, monkeypatch, capsys):
    assert start(root, monkeypatch=monkeypatch, stopping="torch==") == 130
    assert only_line(capsys) == "lab: interrupted; run ./lab again to continue"


# --- the real thing, as far as it goes without a network


def test_help_is_short():
    run = subprocess.run([sys.executable, LAB, "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert len(run.stdout.splitlines()) == 17


def test_run_keeps_stderr_and_the_exit_code(tmp_path):
    code = "import sys; sys.stderr.write('why'); sys.exit(3)"
    assert lab.run([sys.executable, "-c", code], tmp_path) == (3, "why")


@pytest.mark.skipif(os.name == "nt", reason="exec differs there")
def test_exit_code_of_what_was_started_is_passed_on():
    code = (
        "import runpy, sys\nrunpy.run_path(sys.argv[1])['hand_over']([sys.executable, '-c', 'raise SystemExit(7)'])\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(LAB)]).returncode == 7
