"""What a user does with one view of the workbench on a page: by the mouse, and by the keyboard alone."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from workbench.pipeline import Fork, Pipeline
from workbench.stages import Place, Stage, Streamed, experts, kv, weights

FETCHES = {weights: "all weights", experts.weights: "experts", experts.chosen: "chosen experts", kv: "KV cache"}
IN_PALETTE = r"Add \w+(, already placed)?$"
MOST = 60
"""Keys pressed at most to reach something."""
NAME = """() => {
    const here = document.activeElement;
    return here.getAttribute("aria-label") ?? here.labels?.[0]?.innerText.trim() ?? here.innerText.trim();
}"""

END = """canvas => {
    const cards = [...canvas.querySelectorAll("[aria-roledescription=operation]")];
    const inside = canvas.getBoundingClientRect();
    const edge = Math.max(inside.left + 200, ...cards.map(card => card.getBoundingClientRect().right));
    return Math.min(edge + 20, inside.right - 10);
}"""
"""Where on the page something is dropped to come last."""

AMISS = """here => axe.run(here).then(said => said.violations
    .filter(each => ["serious", "critical"].includes(each.impact))
    .map(each => `${each.id}: ${each.help}: ${each.nodes.map(node => node.html.slice(0, 200)).join(" ")}`))"""


class Board:
    """A view of the workbench in a cell's output.

    Parameters
    ----------
    page : playwright page
    cell : locator of the cell
    """

    def __init__(self, page: Any, cell: Any) -> None:
        self.page = page
        self.root = cell.locator(".wb-builder")
        self.canvas = self.root.get_by_role("application", name="Pipeline of ")
        self.palette = self.root.get_by_role("toolbar", name="Operations to add")
        self.can_start = self.root.get_by_role("button", name=re.compile("^Start( again)?$"), disabled=False)
        self.callout = self.canvas.locator(".wb-callout")

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def code(self) -> str:
        return str(self.root.get_by_label("Code of the pipeline").input_value())

    def cards(self) -> list[str]:
        """What a reader of screens is told of each card, from the left to the right."""
        boxes = self.canvas.locator("[aria-roledescription=operation]").evaluate_all(
            "all => all.map(card => [card.getBoundingClientRect().x, card.getAttribute('aria-label')])"
        )
        return [label for _, label in sorted(boxes)]

    def card(self, name: str) -> Any:
        return self.canvas.locator(f"[aria-roledescription=operation][aria-label^='{name} on the ']")

    def button(self, name: str) -> Any:
        return self.root.get_by_role("button", name=name, exact=True)

    def told(self) -> tuple[str, list[str]]:
        """The sentence at a faulty card, and the names of the buttons under it."""
        return str(self.callout.locator("p").inner_text()), self.callout.get_by_role("button").all_inner_texts()

    def status(self) -> str:
        """What is said of the live run."""
        return str(self.root.locator(".wb-live-status").inner_text()).replace("\n", " ")

    def emitted(self) -> int:
        """Output tokens of the live run so far."""
        found = re.search(r"([\d,]+) of [\d,]+ output tokens", self.status())
        return int(found[1].replace(",", "")) if found else 0

    def amiss(self) -> list[str]:
        """Serious faults that axe-core finds in the view, which the page has loaded."""
        return list(self.root.evaluate(AMISS))

    def until(self, true: Callable[[], object], seconds: float = 30.0) -> float:
        """Seconds that it took to become true."""
        began = time.perf_counter()
        while not true():
            assert time.perf_counter() - began < seconds
            self.page.wait_for_timeout(20)
        return time.perf_counter() - began

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Wait until what is done here has changed the code, and is drawn."""
        area = self.root.get_by_label("Code of the pipeline").element_handle()  # searching is work of the page
        before = area.input_value()
        yield
        area.evaluate(
            """(area, before) => new Promise(done => {
                const look = () => area.value === before ? requestAnimationFrame(look) : requestAnimationFrame(done);
                look();
            })""",
            before,
        )

    # --------------------------------------------------------------------------------------------------- by the mouse

    def in_view(self) -> None:
        self.root.get_by_role("toolbar", name="Wiring").evaluate("bar => bar.scrollIntoView({block: 'start'})")

    def click(self, name: str) -> None:
        with self.changing():
            self.button(name).click()

    def open(self, system: str) -> None:
        """Open a finished pipeline; unless it is there already."""
        self.button("Open").click()
        self.root.get_by_role("menuitem", name=system, exact=True).click()

    def drag(self, what: Any, x: float, y: float) -> None:
        box = what.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.page.mouse.down()
        self.page.mouse.move(x, y, steps=4)
        self.page.mouse.up()

    def lane(self, device: Place) -> float:
        """Height of a lane's middle on the page."""
        box = self.canvas.get_by_text(device.value.upper(), exact=True).first.bounding_box()
        return float(box["y"] + box["height"])

    def drag_to_end(self, op: str, device: Place) -> None:
        """Drag an operation from the palette to the end of a lane."""
        self.in_view()
        x = self.canvas.evaluate(END)
        entry = self.palette.get_by_role("button", name=re.compile(rf"^Add {op}\b"))
        with self.changing():
            self.drag(entry, x, self.lane(device))

    def drag_across(self, name: str, device: Place) -> None:
        """Drag a card to the other lane."""
        self.in_view()
        box = self._box(self.card(name))
        with self.changing():
            self.drag(self.card(name), box["x"] + box["width"] / 2, self.lane(device))

    def options(self, name: str) -> Any:
        """Open the options of a card by its button."""
        self.in_view()
        self.button(f"Options of {name}").click()
        return self.root.get_by_role("dialog", name=f"Options of {name}")

    def tick(self, item: Streamed) -> None:
        with self.changing():
            self.root.get_by_role("checkbox", name=re.compile(f"^{FETCHES[item]}")).click()

    def wire_by_mouse(self, pipeline: Pipeline) -> None:
        """Wire a pipeline on the empty canvas: cards, forks, what cards defer, and what is streamed."""
        for stage in pipeline.stages:
            self.drag_to_end(stage.op.name, stage.device)
        for first, second in _side_by_side(pipeline):
            with self.changing():
                self.options(first).get_by_role("button", name=f"Side by side with {second}").click()
        for stage in pipeline.stages:
            for _ in range(stage.defer):
                number = self._box(self.options(stage.op.name).get_by_label("defer experts"))
                with self.changing():  # the upper of the two arrows at the field's right end
                    self.page.mouse.click(number["x"] + number["width"] - 10, number["y"] + number["height"] / 3)
                self.page.mouse.click(*self._free())
        for item in pipeline.fetches:
            self.tick(item)

    def _box(self, what: Any) -> dict[str, float]:
        found: dict[str, float] = what.bounding_box()
        return found

    def _free(self) -> tuple[float, float]:
        """A point of the view where nothing happens on a click."""
        heading = self._box(self.root.get_by_role("heading", name="Pipeline"))
        return heading["x"] + 2, heading["y"] + 2

    # ------------------------------------------------------------------------------------------------ by the keyboard

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self) -> str:
        """Name of what has the focus, as a reader of screens is told it."""
        return str(self.page.evaluate(NAME))

    def press_until(self, key: str, name: str) -> None:
        """Press a key until the name of what has the focus begins with this pattern."""
        for _ in range(MOST):
            if re.match(name, self.focused()):
                return
            self.page.keyboard.press(key)
        raise AssertionError(f"{key} does not lead to {name!r}; the focus is on {self.focused()!r}")

    def wire_by_keyboard(self, pipeline: Pipeline) -> None:
        """Wire a pipeline on the empty canvas, from wherever the focus is in the view."""
        self.press_until("Tab", IN_PALETTE)
        for stage in pipeline.stages:
            self.press_until("ArrowRight", rf"Add {stage.op.name}\b")
            with self.changing():
                self.press("Enter")
        self.press("Escape")
        for stage in pipeline.stages:
            if stage.device is Place.CPU:
                self.to_card(stage.op.name)
                with self.changing():
                    self.press("ArrowDown")
        for first, _ in _side_by_side(pipeline):
            self.to_card(first)
            with self.changing():
                self.press("f")
        for stage in pipeline.stages:
            if stage.defer:
                self.to_card(stage.op.name)
                self.press("Enter")
                self.press_until("Tab", "defer experts")
                for _ in range(stage.defer):
                    with self.changing():
                        self.press("ArrowUp")
                self.press("Escape")
        for item in pipeline.fetches:
            self.press_until("Shift+Tab", FETCHES[item])
            with self.changing():
                self.press("Space")

    def to_card(self, name: str) -> None:
        """From one card to another."""
        self.press("Home")
        self.press_until("ArrowRight", f"{name} on the")


def _side_by_side(pipeline: Pipeline) -> list[tuple[str, str]]:
    """Operations that stand first in neighbouring arms of forks, each arm of one stage."""
    pairs = []
    for fork in pipeline.chain:
        if isinstance(fork, Fork):
            firsts = [next(each.op.name for each in arm if isinstance(each, Stage)) for arm in fork.arms]
            pairs += list(itertools.pairwise(firsts))
    return pairs
