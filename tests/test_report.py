"""The main job without a browser, as the set-up script starts it."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.analysis.report import server_scenario
from workbench.schedules import contenders

pytestmark = pytest.mark.alone


@pytest.mark.slow
def test_report_shows_three_readers_of_every_contender(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench", "report", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    found = {(result["model"].split("-")[0], result["schedule"], result["source"]) for result in results}
    schedules = [schedule.name for schedule in contenders(server_scenario().layer)]
    predicted = {("mixtral", schedule, source) for schedule in schedules for source in ("bound", "simulated")}
    live = {("tiny", schedule, source) for schedule in schedules for source in ("bound", "simulated", "measured")}
    assert found == predicted | live
    for result in results:
        assert result["gen_tok_s"] > 0
        assert result["machine"]
        assert result["date"]
        assert result["versions"]["torch"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "held-out exercises were answered exactly" in page
    assert page.count("data:image/png;base64,") == 4 + len(schedules)
    assert "http://" not in page
    assert "https://" not in page
    trace = json.loads(gzip.decompress((tmp_path / "out" / "timeline.json.gz").read_bytes()))["traceEvents"]
    tracks = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert tracks == {f"{source} {schedule}" for source in ("simulated", "measured") for schedule in schedules}


def test_a_failure_is_one_line_and_a_non_zero_exit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    command = [sys.executable, "-m", "workbench", "report", "--out", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unknown_checkpoint_recipe_names_those_there_are() -> None:
    command = [sys.executable, "-m", "workbench", "make-checkpoint", "mix-xl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there are mix-s, mix-m, mix-b" in done.stderr
