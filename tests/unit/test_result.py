"""Results: two throughputs, a source that cannot be mistaken, and files that come back."""

import json
import math
from dataclasses import replace

import pytest

from tests.builders import tiny_scenario
from workbench.core.energy import Energy
from workbench.core.errors import ResultError
from workbench.core.latency import Latencies
from workbench.core.result import FORMAT, Iterations, Result, Source
from workbench.core.timeline import Span, Timeline
from workbench.perfmodels import bound
from workbench.schedules import VSLPipe
from workbench.simulate import Detail, simulate


@pytest.fixture
def result() -> Result:
    return Result(
        Source.SIMULATED,
        "VSLPipe()",
        "tiny",
        "small",
        seconds=4.0,
        generated=100,
        processed=300,
        iterations=2,
        preemptions=1,
        recomputed=7,
        busy={"gpu": 3.0, "h2d": 1.0},
        ttft=0.5,
        steps=Iterations((1.0, 3.0), (9, 0), (0, 3), (2, 4)),
        timeline=Timeline([Span("gpu", "A0a", 0.0, 1.0), Span("h2d", "W1", 1.0, 4.0, 1, after="gpu A0a")]),
        tokens=((1, 2), (3,)),
        facts={"kv": "10 blocks"},
        interval=(20.0, 30.0),
    )


def test_generated_and_processed_throughput_are_apart(result):
    assert (result.gen_tok_s, result.proc_tok_s) == (25.0, 75.0)


def test_utilisation_is_the_busy_share(result):
    assert result.utilisation == {"gpu": 0.75, "h2d": 0.25}
    assert result.binding == "gpu"


def test_a_bound_is_named_after_its_largest_limit(result):
    limited = replace(result, limits={"h2d link": 4.0, "gpu compute": 1.0})
    assert limited.binding == "h2d link"
    assert replace(result, busy={}).binding == ""


def without_nan(result):
    return replace(result, ttft=0.0, tbt=0.0)


def test_a_saved_result_comes_back_equal(result, tmp_path):
    back = Result.load(result.save(tmp_path / "r.json"))
    assert without_nan(back) == without_nan(replace(result, timeline=back.timeline))
    assert [(*span[:5], span.after) for span in back.timeline] == [(*s[:5], s.after) for s in result.timeline]
    assert back.ttft == 0.5
    assert math.isnan(back.tbt)


def test_what_the_readers_return_can_be_saved_and_read_back(tmp_path):
    scenario = tiny_scenario([5, 9], [4, 6])
    for number, made in enumerate((bound(scenario, VSLPipe()), simulate(scenario, VSLPipe(), detail=Detail.TASK))):
        back = Result.load(made.save(tmp_path / f"{number}.json"))
        assert back.source is made.source
        assert back.diff(made) == {}
        assert back.steps == made.steps
        assert len(back.timeline) == len(made.timeline)


def test_a_measured_result_comes_back_as_recorded(result, tmp_path):
    measured = replace(result, source=Source.MEASURED)
    assert Result.load(measured.save(tmp_path / "m.json")).source is Source.RECORDED


@pytest.mark.parametrize("source", [source for source in Source if source is not Source.MEASURED])
def test_every_other_source_stays_what_it_is(result, tmp_path, source):
    assert Result.load(replace(result, source=source).save(tmp_path / "r.json")).source is source


def test_a_file_carries_versions_date_and_no_nan(result, tmp_path):
    text = result.save(tmp_path / "r.json").read_text(encoding="utf-8")
    values = json.loads(text)
    assert "NaN" not in text
    assert values["format"] == FORMAT
    assert {"python", "numpy", "torch", "numba", "triton"} <= set(values["versions"])
    assert values["date"]
    assert values["gen_tok_s"] == 25.0


@pytest.mark.parametrize("change", [{"format": FORMAT + 1}, {"format": None}])
def test_a_file_of_another_format_is_refused(result, tmp_path, change):
    path = result.save(tmp_path / "r.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=f"another format; this version reads format {FORMAT}"):
        Result.load(path)


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="format"):
        Result.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "guess"},
        {"seconds": "3"},
        {"seconds": None},
        {"seconds": 0},
        {"schedule": None},
        {"generated": []},
        {"busy": 3},
        {"busy": {"gpu": "x"}},
        {"limits": [[1]]},
        {"steps": None},
        {"steps": {"seconds": 3}},
        {"timeline": [3]},
        {"tokens": None},
        {"labels": 3},
        {"mine": 3},
    ],
)
def test_a_damaged_file_is_refused(result, tmp_path, change):
    path = result.save(tmp_path / "r.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=r"r\.json is no result .*; save it again"):
        Result.load(path)


@pytest.mark.parametrize("missing", ["source", "schedule", "seconds", "steps", "timeline", "labels", "tokens", "date"])
def test_a_file_that_lacks_something_is_refused(result, tmp_path, missing):
    path = result.save(tmp_path / "r.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    del record[missing]
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match=r"r\.json is no result .*; save it again"):
        Result.load(path)


@pytest.mark.parametrize("text", ["", 100_000 * "["], ids=["empty", "deep"])
def test_a_file_that_is_no_json_is_refused(text, tmp_path):
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"r\.json is no result .*; save it again"):
        Result.load(tmp_path / "r.json")


def test_a_difference_names_the_fields_and_both_values(result):
    other = replace(result, seconds=5.0, source=Source.MEASURED, date="then", tokens=())
    assert result.diff(other) == {
        "source": ("simulated", "measured"),
        "seconds": (4.0, 5.0),
        "gen_tok_s": (25.0, 20.0),
        "proc_tok_s": (75.0, 60.0),
        "utilisation": ({"gpu": 0.75, "h2d": 0.25}, {"gpu": 0.6, "h2d": 0.2}),
    }
    assert result.diff(result) == {}


def test_a_result_tells_its_source_first(result):
    assert str(result).startswith("simulated: 25 output tok/s (90 % within 20 to 30), 75 processed tok/s")
    assert "<b>simulated</b>" in result._repr_html_()


def test_a_file_from_before_spans_told_what_they_waited_for_is_read(result, tmp_path):
    path = result.save(tmp_path / "r.json")
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"timeline": [row[:5] for row in values["timeline"]]}), encoding="utf-8")
    assert [span[:5] for span in Result.load(path).timeline] == [span[:5] for span in result.timeline]
    assert {span.after for span in Result.load(path).timeline} == {""}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generated": -1}, "generated=-1; give a whole number from 0 on"),
        ({"preemptions": 1.5}, "preemptions=1.5"),
        ({"recomputed": True}, "recomputed=True"),
        ({"interval": (30.0, 20.0)}, r"interval \(30.0, 20.0\); give \(lower, upper\)"),
        ({"interval": (math.nan, 20.0)}, "interval"),
        ({"interval": (20.0,)}, "interval"),
        ({"interval": (10.0, 20.0, 30.0)}, "interval"),
        ({"seconds": 0.0}, "seconds=0.0; give a positive number"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"busy": {"gpu": -1.0}}, r"busy\['gpu'\]=-1.0"),
        ({"limits": {"gpu compute": math.nan}}, "limits"),
        ({"ttft": -0.5}, "ttft=-0.5"),
        ({"others": "much"}, "others='much'"),
    ],
)
def test_a_result_that_cannot_be_is_refused_made_or_loaded(change, words, result, tmp_path):
    with pytest.raises(ResultError, match=words):
        replace(result, **change)
    saved = json.loads(result.save(tmp_path / "r.json").read_text())
    (tmp_path / "r.json").write_text(json.dumps({**saved, **change}))
    with pytest.raises(ResultError, match=r"r\.json is no result"):
        Result.load(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (lambda: Iterations((1.0, 2.0), (3,)), "unlike lengths"),
        (lambda: Iterations((1.0, -2.0)), "entry in seconds that is no finite number"),
        (lambda: Latencies((0,), (0.0, 1.0)), "unlike lengths"),
        (lambda: Latencies(gap=(1.0,), gap_count=(-1,)), "entry in gap_count that is no finite number"),
        (lambda: Energy(-1.0, "NVML"), "joules=-1.0"),
    ],
)
def test_columns_that_do_not_go_together_are_refused(steps, words):
    with pytest.raises(ResultError, match=words):
        steps()
