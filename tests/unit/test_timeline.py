"""Timelines: idle time and what it waited for, traces with several of them, and bars narrower than a pixel."""

import gzip
import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from tests.builders import tiny_scenario
from workbench.analysis.compare import compare
from workbench.core.timeline import ITERATION, Bubble, Span, Timeline
from workbench.perfmodels import bound
from workbench.plots import TASK_COLOURS, plot_timeline
from workbench.plots.lane_bars import bars
from workbench.schedules import VSLPipe
from workbench.simulate import Detail, simulate

ROUND = Timeline(
    [
        Span("gpu", "A0a", 1.0, 3.0),
        Span("cpu", "C0a", 3.0, 7.0, after="gpu A0a"),
        Span("gpu", "B0a", 7.0, 8.0, after="cpu C0a"),
        Span("gpu", "A1a", 8.0, 9.0, after="gpu B0a"),
        Span("gpu", "A0a", 11.0, 12.0, 1, after=ITERATION),
    ],
    {"A": "qkv", "B": "experts", "C": "decode_attention"},
)


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_bubbles_tell_what_a_lane_waited_for():
    assert ROUND.bubbles() == [
        Bubble("cpu", 1.0, 3.0, "gpu A0a"),
        Bubble("gpu", 3.0, 7.0, "cpu C0a"),
        Bubble("gpu", 9.0, 11.0, ITERATION),
    ]


def test_a_short_transfer_within_a_long_one_leaves_no_bubble():
    spans = [Span("h2d", "W1", 0.0, 9.0), Span("h2d", "H0a", 2.0, 3.0), Span("h2d", "W2", 9.5, 10.0, after="gpu B0a")]
    assert Timeline(spans).bubbles() == [Bubble("h2d", 9.0, 9.5, "gpu B0a")]


@given(st.lists(st.tuples(st.sampled_from(["gpu", "cpu"]), st.floats(0, 9), st.floats(0, 3)), min_size=1, max_size=20))
def test_bubbles_and_spans_fill_every_lane_up_to_its_last_task(drawn):
    timeline = Timeline([Span(lane, "A", start, start + length) for lane, start, length in drawn])
    for lane in timeline.lanes:
        spans = [span for span in timeline if span.lane == lane]
        idle = [bubble for bubble in timeline.bubbles() if bubble.lane == lane]
        for moment in np.linspace(timeline.begin, max(span.end for span in spans), 50)[1:-1]:
            busy = any(span.start <= moment <= span.end for span in spans)
            assert busy or any(bubble.start <= moment <= bubble.end for bubble in idle)
        for bubble in idle:
            assert not any(span.start < bubble.end and bubble.start < span.end for span in spans)


def test_simulated_and_measured_stand_in_one_trace(tmp_path):
    scenario = tiny_scenario([5, 9], [4, 6])
    played = simulate(scenario, VSLPipe(), detail=Detail.TASK)
    both = compare([bound(scenario, VSLPipe()), played, played])
    path = both.to_perfetto(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {1: "simulated VSLPipe", 2: "simulated VSLPipe"}
    for process in named:
        tasks = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert len(tasks) == len(played.timeline)
        assert [task["args"].get("after", "") for task in tasks] == [span.after for span in played.timeline]


def test_a_trace_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no result here has a timeline"):
        compare([bound(tiny_scenario([5, 9], [4, 6]), VSLPipe())]).to_perfetto(tmp_path / "trace.json")


def area(corners):
    return float(np.sum(np.ptp(corners[..., 0], axis=1) * np.ptp(corners[..., 1], axis=1)))


@given(
    st.lists(st.tuples(st.sampled_from("AB"), st.floats(1e-6, 2), st.floats(0, 2)), min_size=1, max_size=40),
    st.floats(0.05, 5),
)
def test_what_is_drawn_is_in_proportion_to_the_work(drawn, pixel):
    """Whatever a pixel is: the area of a lane's bars is its busy time, and they lie where it was busy."""
    spans, now = [], 0.0
    for code, length, idle in drawn:
        spans.append(Span("gpu", code, now, now + length))
        now += length + idle
    columns, single = bars(Timeline(spans), pixel)
    for code in "AB":
        corners = [
            bar for each in (columns, single) for bar, c in zip(each.corners, each.codes, strict=True) if c == code
        ]
        busy = sum(span.end - span.start for span in spans if span.name == code)
        assert (area(np.array(corners)) if corners else 0.0) == pytest.approx(0.76 * busy, abs=1e-9)


def test_columns_of_one_pixel_stand_on_one_another():
    timeline = Timeline([Span("gpu", "A", 0.0, 0.25), Span("gpu", "B", 0.25, 0.75), Span("cpu", "C", 0.0, 3.0)])
    columns, single = bars(timeline, 1.0)
    assert columns.codes == ["A", "B"]
    assert columns.corners[:, :, 0].tolist() == [[0, 1, 1, 0]] * 2
    assert columns.corners[0, :, 1] == pytest.approx([0.38, 0.38, 0.19, 0.19])
    assert columns.corners[1, :, 1] == pytest.approx([0.19, 0.19, -0.19, -0.19])
    assert (single.codes, single.corners[0, :, 0].tolist()) == (["C"], [0, 3, 3, 0])


def test_the_chart_is_one_collection_and_names_bubbles_that_have_room():
    ax = plot_timeline(ROUND)
    (drawn,) = ax.collections
    assert len(drawn.get_paths()) == len(ROUND)
    assert [to_hex(colour) for colour in drawn.get_facecolors()] == [TASK_COLOURS[code] for code in "CABAA"]
    assert [text.get_text() for text in ax.texts] == ["waits for A0a", "waits for C0a", "next iteration"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["A  qkv", "B  experts", "C  decode_attention"]
    unknown = Timeline([span._replace(after="") for span in ROUND], ROUND.labels)
    assert not plot_timeline(unknown).texts
    late = Timeline([Span("gpu", "A0a", 0.0, 1.0), Span("gpu", "B0a", 9.0, 10.0, after="gpu A0a")])
    assert not plot_timeline(late).texts
    narrow = plot_timeline(ROUND, seconds=200.0)
    assert not narrow.texts
    assert narrow.get_xlim() == (0, 200)
