"""How soon everything follows: random moves of cards and sliders on the tour's scenario, told and not asserted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import psutil
import pytest

from tests.browser.board import Board
from tests.browser.lab import Server, Session, open_notebook
from tests.examples import DEEP
from workbench.stages import Place

pytestmark = [pytest.mark.alone, pytest.mark.browser, pytest.mark.timeout(900 if DEEP else 240)]

MOVES = 50 if DEEP else 16
CARDS = ("qkv", "out_proj", "experts", "decode_attention")
SLIDERS = ("KV capacity", "Link speed", "Requests", "Prompt tokens (mean)", "Output tokens (mean)")
CELLS = {
    "tour": """
import os

import workbench as wb
from tests.systems import VSL
from workbench.schedules import Overlap
from workbench.widgets import Builder

scenario = wb.Scenario(
    VSL,
    model=wb.models["mixtral-8x7b"],
    machine=wb.machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB"),
    memory=wb.Memory(kv_capacity="150GB", kv_block=16),
    workload=wb.workloads["rag"].sample(requests=20_000, output_len=128, seed=0),
    scheduler=wb.ResourceAware(),
)
tour = Builder(scenario, [Overlap()])
print("kernel", os.getpid())
tour
""",
}
WATCH = """root => {
    window.seen = {};
    let began = null;
    const begin = () => { began ??= performance.now(); };
    for (const kind of ["pointerup", "keydown"]) window.addEventListener(kind, begin, {capture: true, once: true});
    window.watching?.forEach(each => each.disconnect());
    window.watching = [];
    const watch = (name, selector, due) => {
        const part = root.querySelector(selector);
        const note = () => {
            if (began === null || name in window.seen || !due(part)) return;
            window.seen[name] = null;
            requestAnimationFrame(() => { window.seen[name] = performance.now() - began; });
        };
        const observer = new MutationObserver(note);
        observer.observe(part, {subtree: true, childList: true, characterData: true, attributes: true});
        window.watching.push(observer);
    };
    const later = () => "figures" in window.seen;
    const said = (part, words) => part.textContent.includes(words);
    watch("figures", ".wb-figures", part => said(part, "is being computed") || !said(part, "computing…"));
    watch("lanes", ".wb-lanes", later);
    watch("curves", ".wb-curves", later);
}"""
"""Notes when each part is drawn anew: figures of the chosen schedule come before those of the others, or with them."""
FOLLOWED = "() => window.seen.figures && window.seen.curves && window.seen.lanes !== null"


@pytest.fixture(scope="module")
def tour(session: Session, server: Server) -> Board:
    session.page.set_viewport_size({"width": 1680, "height": 1050})
    open_notebook(session.page, server, "moves", CELLS)
    session.run_cell("import workbench")
    board = Board(session.page, session.cell("import workbench"))
    board.canvas.wait_for()
    return board


def move_card(board: Board, name: str) -> None:
    """Drag a card to the other lane."""
    (told,) = (card for card in board.cards() if card.startswith(f"{name} on the "))
    board.drag_across(name, Place.GPU if " on the CPU" in told else Place.CPU)


def move_slider(board: Board, chance: random.Random) -> None:
    """Move a slider by one step, to the side where there is more of it."""
    slider = board.root.get_by_label(chance.choice(SLIDERS), exact=True)
    upper = slider.evaluate("it => 2 * it.value < it.max")
    slider.focus()
    board.press("ArrowRight" if upper else "ArrowLeft")


class Spent:
    """CPU time of the kernel, and of the page's own thread [ms]."""

    def __init__(self, session: Session) -> None:
        self._kernel = psutil.Process(int(session.said("kernel").split()[1]))
        self._page = session.page.context.new_cdp_session(session.page)
        self._page.send("Performance.enable")

    def now(self) -> dict[str, float]:
        times = self._kernel.cpu_times()
        metrics = {each["name"]: each["value"] for each in self._page.send("Performance.getMetrics")["metrics"]}
        return {"kernel's CPU": 1e3 * (times.user + times.system), "page's CPU": 1e3 * metrics["TaskDuration"]}


def told(waits: Sequence[float]) -> str:
    cuts = statistics.quantiles(waits, n=20)
    return f"p50 {statistics.median(waits):4.0f} ms, p95 {cuts[-1]:4.0f} ms"


def test_pictures_follow_cards_and_sliders(session, tour, capsys):
    spent = Spent(session)
    chance = random.Random(0)
    found: dict[str, list[dict[str, float]]] = {"card dropped": [], "slider moved": []}
    for number in range(MOVES):
        tour.root.evaluate(WATCH)
        before = spent.now()
        if number % 2:
            move_slider(tour, chance)
        else:
            move_card(tour, chance.choice(CARDS))
        tour.page.wait_for_function(FOLLOWED, polling=50)  # not in every frame, each of which takes time
        taken = {what: after - before[what] for what, after in spent.now().items()}
        seen = tour.page.evaluate("window.seen")
        every = {"all pictures": max(seen.values())}
        found["slider moved" if number % 2 else "card dropped"].append({**seen, **every, **taken})
    with capsys.disabled():
        for what, seen in found.items():
            for part in ("figures", "lanes", "curves", "all pictures", "kernel's CPU", "page's CPU"):
                waits = [each[part] for each in seen if each.get(part)]
                print(f"\n{what}, {part:12} {told(waits)} ({len(waits)} moves)", end="")
        print()
