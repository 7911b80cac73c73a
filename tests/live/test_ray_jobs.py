"""A job on engines of Ray Data, of which one is killed, and its driver too: every request is answered once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.live import ray_process
from tests.live.test_generate_file import ROOT, Folder, ask
from workbench.core.errors import EngineError
from workbench.jobs import many

REQUESTS = 96
STARTS = 5
"""Starts of the job until one goes well: Ray gives itself 30 seconds to begin, which a busy computer takes."""


def start(folder: Folder, marker: Path) -> "subprocess.Popen[bytes]":
    """The job, as a process group of its own with all that Ray begins."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "DIES_ONCE": str(marker)}
    command = [sys.executable, ray_process.__file__, str(folder.path)]
    with (folder.path / "said.txt").open("ab") as said:
        return subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_engines_and_driver_may_die_and_every_request_is_answered_once(tmp_path: Path) -> None:
    pytest.importorskip("ray.data")
    asked = [ask(number) for number in range(REQUESTS)]
    folder, plain = (Folder(tmp_path / name, [*asked, "nonsense"]) for name in ("ray", "plain"))
    marker = tmp_path / "marker"
    marker.touch()
    made = folder.path / "answers.jsonl.parts" / "answers"
    for _ in range(STARTS):
        job = start(folder, marker)
        while job.poll() is None and len(list(made.glob("*.parquet"))) < 3:
            time.sleep(0.1)
        if job.poll() is None:
            break
    else:
        assert "timed out during startup" in (folder.path / "said.txt").read_text()
        pytest.skip(f"this computer is so busy that Ray did not begin in any of {STARTS} starts")
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert not marker.exists()  # an engine has died before
    assert not folder.texts
    kept = len(list(made.glob("*.parquet")))
    assert 3 <= kept < REQUESTS // 16
    assert any(start(folder, marker).wait() == 0 for _ in range(STARTS))
    plain.finish()
    assert folder.texts == plain.texts
    assert (len(folder.texts), folder.faults) == (REQUESTS, {None: "invalid_json"})
    assert not made.parent.exists()


def test_without_ray_it_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"pip install 'moe-workbench\[ray\]', or leave engines out"):
        many._connect()
