"""The builder in JupyterLab with Python behind it: wired by hand, mended, run, and left by its kernel.

The tests share one page and are in the order of a session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.browser.board import Board
from tests.browser.lab import ROOT, Server, Session, answering, choose, idle, open_notebook
from tests.systems import GOLDEN, PIPELINES, VSL
from workbench.pipeline import Pipeline, code_of, fault_of, fetched, removed
from workbench.pipeline.elements import located
from workbench.stages import Place, kv, weights
from workbench.widgets.state.studio import POINTS

pytestmark = [pytest.mark.alone, pytest.mark.browser, pytest.mark.timeout(240)]

CLOSED = ("widget model not found", "Comm not found for comm id")
"""Parts of what JupyterLab itself logs where a cell that is run again closes widgets that are still being drawn."""
PLANS = ROOT / "tests" / "golden"
AXE = ROOT / "workbench" / "widgets" / "web" / "node_modules" / "axe-core" / "axe.min.js"
SYSTEMS = ("vslpipe", "lightning", "flexgen_s4", "streamed", "ktransformers", "experts_on_cpu", "both_on_cpu")
CELLS = {
    "words": """
import threading
import time

import psutil

import workbench as wb
from tests.systems import GOLDEN, MIXED, VSL
from workbench.schedules import VSLPipe
from workbench.widgets import Builder

scenario = wb.Scenario(
    VSL,
    model=wb.models["qwen2-57b-a14b"],
    machine=wb.machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB"),
    memory=wb.Memory(kv_capacity="40GB"),
    workload=wb.workloads["rag"].sample(requests=200, output_len=128, seed=0),
    scheduler=wb.ResourceAware(),
)
""",
    "wired": "wired = Builder(scenario)\nwired",
    "live": """
local = wb.Machine.local()
here = wb.Scenario(
    VSL,
    model=wb.checkpoint(wb.data_path("models/tiny-moe")),
    machine=local.limit(link=min(0.1e9, local.link.h2d)),
    memory=wb.Memory(kv_capacity="8MB", weights="fp32", kv="fp32"),
    workload=wb.Workload.lengths(prompt=40, output=300, requests=64),
    scheduler=wb.ResourceAware(),
)
live = Builder(here, [VSLPipe()])
live
""",
    "busy": "end = time.time() + 4\nwhile time.time() < end:\n    sum(range(1000))",
    "cpu": answering(
        "cpu",
        """
names = {each.native_id: each.name for each in threading.enumerate()}
def spent():
    taken = {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}
    return sum(seconds for number, seconds in taken.items() if names.get(number) in ("view-runs", "IOPub"))
before, began = spent(), time.perf_counter()
time.sleep(4)
(spent() - before) / (time.perf_counter() - began)
""",
    ),
    "threads": answering("threads", "sum(thread.name == 'live-run' for thread in threading.enumerate())"),
    "measured": answering("measured", "len(live.studio.measured)"),
    "plans": answering(
        "plans",
        """
plans = {
    name: f"{wired.pipeline}\\n{schedule.lower(wired.pipeline, MIXED)}\\n"
    for name, (pipeline, schedule) in GOLDEN.items()
    if pipeline == wired.pipeline
}
plans
""",
    ),
}


def pipeline_of(system: str) -> Pipeline:
    return next(pipeline for name, (pipeline, _) in GOLDEN.items() if name.startswith(f"{system}."))


def golden(system: str) -> dict[str, str]:
    """Every golden plan of a pipeline."""
    names = [name for name, (pipeline, _) in GOLDEN.items() if pipeline == pipeline_of(system)]
    return {name: (PLANS / f"{name}.txt").read_text(encoding="utf-8") for name in names}


@pytest.fixture(scope="module")
def opened(session: Session, server: Server) -> Session:
    """The notebook in a browser, the builder for wiring shown."""
    session.page.set_viewport_size({"width": 1680, "height": 1050})
    open_notebook(session.page, server, "builder", CELLS)
    session.run_cell("import workbench")
    session.run_cell("wired = Builder")
    return session


@pytest.fixture
def wired(opened: Session) -> Board:
    board = Board(opened.page, opened.cell("wired = Builder"))
    board.canvas.wait_for()
    return board


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_wired_by_mouse_alone_has_the_plans_of_its_code(opened, wired, system):
    wired.click("Clear")
    wired.wire_by_mouse(pipeline_of(system))
    assert opened.ask("plans") == golden(system)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_wired_by_keyboard_alone_has_the_plans_of_its_code(opened, wired, system):
    wired.click("Clear")
    wired.wire_by_keyboard(pipeline_of(system))
    assert opened.ask("plans") == golden(system)


# --------------------------------------------------------------------------------------------------- faults and history


@pytest.fixture
def vslpipe(wired: Board) -> Board:
    """The builder with the pipeline of VSLPipe."""
    if wired.code.strip() != code_of(VSL).strip():
        with wired.changing():
            wired.open("MoE-Lens (VSLPipe)")
    return wired


def test_a_removed_card_is_missed_in_the_words_of_the_code_and_put_back_by_a_button(vslpipe):
    (place,) = (path for path, stage in located(VSL.chain) if str(stage) == "gpu(route)")
    fault = fault_of(removed(VSL, place))
    with vslpipe.changing():
        vslpipe.options("route").get_by_role("button", name="Remove").click()
    assert vslpipe.told() == (fault.text, [mend.label for mend in fault.mends])
    vslpipe.click(fault.mends[0].label)
    assert vslpipe.code.strip() == code_of(fault.mends[0].pipeline).strip()
    assert vslpipe.callout.count() == 0


def test_a_stream_that_cannot_be_is_told_and_mended(vslpipe):
    fault = fault_of(fetched(VSL, kv, True))
    vslpipe.tick(kv)
    assert vslpipe.told() == (fault.text, [mend.label for mend in fault.mends])
    vslpipe.click(fault.mends[0].label)
    assert vslpipe.code.strip() == code_of(fault.mends[0].pipeline).strip()


def test_undo_leads_to_the_beginning_and_redo_back(opened, wired):
    wired.click("Clear")
    opened.run_cell("wired = Builder")
    wired.until(lambda: wired.code.strip() == code_of(VSL).strip())
    codes = [wired.code]
    for name in ("experts", "out_proj"):
        wired.drag_across(name, Place.CPU)
        codes.append(wired.code)
    wired.tick(weights)
    for code in reversed(codes):
        wired.click("Undo")
        assert wired.code == code
    assert wired.button("Undo").is_disabled()
    for code in codes[1:]:
        wired.click("Redo")
        assert wired.code == code


def test_pasted_code_moves_the_cards(opened, vslpipe):
    with vslpipe.changing():
        vslpipe.root.get_by_label("Code of the pipeline").fill(code_of(PIPELINES["all_cpu"]))
    vslpipe.until(lambda: all(" on the CPU" in card for card in vslpipe.cards()))
    assert opened.ask("plans").keys() == {"all_cpu.sequential"}


def test_an_error_in_code_is_told_with_its_line_and_moves_nothing(vslpipe):
    cards = vslpipe.cards()
    lines = code_of(VSL).splitlines()
    wrong = next(number for number, line in enumerate(lines, 1) if "gpu(qkv" in line)
    lines[wrong - 1] = lines[wrong - 1].replace("qkv", "qvk")
    vslpipe.root.get_by_label("Code of the pipeline").fill("\n".join(lines))
    alert = vslpipe.root.get_by_role("alert").filter(has_text=f"line {wrong}")
    alert.filter(has_text="qvk").wait_for()
    assert vslpipe.cards() == cards
    with vslpipe.changing():
        vslpipe.root.get_by_label("Code of the pipeline").fill(code_of(PIPELINES["all_gpu"]))
    alert.wait_for(state="detached")


# ------------------------------------------------------------------------------------------------------------ live runs


@pytest.fixture
def live(opened: Session) -> Iterator[Board]:
    """The builder for runs on this computer, with none under way."""
    board = Board(opened.page, opened.cell("live = Builder"))
    if not board.root.count():
        opened.run_cell("live = Builder")
    board.can_start.wait_for()
    yield board
    if board.button("Stop").is_enabled():
        board.button("Stop").click()
        board.until(lambda: board.status().startswith("Stopped"))


def start(board: Board) -> None:
    """Start a run and wait for its first tokens."""
    board.can_start.click()
    board.until(lambda: board.status().startswith("Running") and board.emitted() > 0, seconds=100)  # kernels compile


def test_a_run_shows_tokens_holds_in_pause_goes_on_and_stops(live, capsys):
    start(live)
    live.button("Pause").click()
    live.until(lambda: live.status().startswith("Paused"))
    live.page.wait_for_timeout(300)
    held = live.emitted()
    live.page.wait_for_timeout(600)
    assert live.emitted() == held
    live.button("Resume").click()
    live.until(lambda: live.emitted() > held)
    live.button("Stop").click()
    seconds = live.until(lambda: live.status().startswith("Stopped"))
    with capsys.disabled():
        print(f"\nclick on Stop to stopped: {1000 * seconds:.0f} ms")


def test_two_builders_stay_apart(wired, live):
    before = wired.code
    with live.changing():
        live.tick(weights)
    assert wired.code == before
    live.click("Undo")
    start(live)
    assert wired.status().startswith("Not started")
    wired.drag_across("experts", Place.CPU)
    live.until(lambda: live.status().startswith("Running"))


def test_gauges_move_while_another_cell_is_busy(opened, live, capsys):
    start(live)
    frames = "+document.querySelector('.wb-strip').dataset.frames"
    opened.run_cell("end = time.time()")
    live.page.wait_for_timeout(500)
    first, began = live.page.evaluate(frames), time.perf_counter()
    live.page.wait_for_timeout(2500)
    rate = (live.page.evaluate(frames) - first) / (time.perf_counter() - began)
    with capsys.disabled():
        print(f"\npictures of a live run while a cell is busy: {rate:.1f} per second")
    assert rate > 2
    idle(live.page)


def test_the_strip_takes_little_of_a_core_from_the_run(opened, live, capsys):
    start(live)
    share = opened.ask("cpu")
    assert live.status().startswith("Running")
    with capsys.disabled():
        print(f"\nthe strip of a run takes {share:.1%} of a core of the kernel")
    assert share > 0


def test_the_cell_run_again_closes_the_view_and_ends_its_run(opened, live):
    start(live)
    opened.run_cell("live = Builder")
    live.until(lambda: live.root.count() == 1 and live.status().startswith("Not started"))
    live.until(lambda: opened.ask("threads") == 0)


def test_a_sweep_that_is_stopped_keeps_its_points(opened, live):
    live.root.get_by_role("combobox", name="over").click()
    live.root.get_by_role("option", name="KV capacity").click()
    live.root.get_by_label("Output tokens (mean)").focus()
    live.press("Home")
    live.can_start.wait_for()
    measured = opened.ask("measured")
    live.button("Measure").click()
    live.until(lambda: live.status().startswith("Running run 3 of "), seconds=60)
    live.button("Stop").click()
    live.can_start.wait_for()
    done = opened.ask("measured") - measured
    assert 2 <= done < POINTS  # a third run may have ended before the click
    points = live.root.locator(".wb-line-measured circle")
    live.until(lambda: points.count() == done + 1)  # one of them in the legend


# ------------------------------------------------------------------------------------------------- the page around them


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_lanes_are_drawn_anew_in_another_theme(opened, vslpipe, theme):
    ink = "chart => [chart.width, getComputedStyle(chart).color]"
    chart = vslpipe.root.locator(".wb-gantt-chart")
    vslpipe.until(lambda: chart.evaluate(ink)[0] > 0)
    width, before = chart.evaluate(ink)
    choose(opened.page, "Settings", "Theme", theme)
    vslpipe.until(lambda: chart.evaluate(ink)[1] != before)
    opened.page.wait_for_timeout(200)
    assert chart.evaluate(ink)[0] == width > 0


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: `npm ci` in workbench/widgets/web")
@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_readers_of_screens_find_nothing_amiss(opened, vslpipe, live, theme):
    choose(opened.page, "Settings", "Theme", theme)
    opened.page.evaluate(f"{AXE.read_text(encoding='utf-8')}; 0")
    found = [live.amiss(), vslpipe.amiss()]
    dialog = vslpipe.options("experts")
    found.append(vslpipe.amiss())
    with vslpipe.changing():
        dialog.get_by_role("button", name="Remove").click()
    found.append(vslpipe.amiss())
    assert found == [[], [], [], []]


def test_a_restarted_kernel_is_told_and_the_cell_run_again_recovers(opened, wired):
    choose(opened.page, "Kernel", "Restart Kernel…")
    opened.page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    wired.root.get_by_text("run the cell again").wait_for()
    idle(opened.page)
    opened.run_cell("import workbench")
    opened.run_cell("wired = Builder")
    wired.root.get_by_text("run the cell again").wait_for(state="detached")
    wired.drag_across("experts", Place.CPU)


def test_nothing_was_asked_for_outside_and_no_error_logged(opened):
    assert opened.requests == []
    assert [error for error in opened.errors if not any(part in error for part in CLOSED)] == []
