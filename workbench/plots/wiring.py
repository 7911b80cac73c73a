"""A picture of a wiring: the operations on their devices, and what crosses the link between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from workbench.pipeline import Element, Fork, Path, Pipeline, Stack, ranges_of
from workbench.stages import Move, Place, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

_FACES = {Place.GPU: "#dbeafe", Place.CPU: "#dcfce7"}
_EDGES = {Place.GPU: "#1d4ed8", Place.CPU: "#059669"}
_LINK = "#b45309"
_WIDE = 1.5  # of a card [inches]
_HIGH = 0.42
_ROW = 0.62  # between two cards of one lane
_GAP = 0.75  # between the lanes, where transfers cross
_COLUMN = 1.72
_INK = "#374151"


@dataclass(frozen=True)
class Card:
    """A stage in the picture: its column from the left, and its row within the lane of its device."""

    path: Path
    stage: Stage
    column: float
    row: int


@dataclass(frozen=True)
class Crossing:
    """A transfer in the picture, at the column where it crosses from one lane to the other."""

    path: Path
    move: Move
    column: float


def arranged(chain: tuple[Element, ...]) -> tuple[list[Card], list[Crossing]]:
    """Place the stages of a chain: one column after the other, the arms of a fork beside one another.

    Arms that use the same lane at the same columns stand in different rows of it.
    """
    cards: list[Card] = []
    crossings: list[Crossing] = []
    _arrange(chain, (), 0.0, {}, cards, crossings)
    return cards, crossings


def _arrange(
    chain: tuple[Element, ...],
    path: Path,
    column: float,
    rows: Mapping[Place, int],
    cards: list[Card],
    crossings: list[Crossing],
) -> float:
    """Add a chain from a column on; return the column behind it."""
    for index, element in enumerate(chain):
        here = (*path, index)
        if isinstance(element, Stage):
            cards.append(Card(here, element, column, rows.get(element.device, 0)))
            column += 1
        elif isinstance(element, Move):
            crossings.append(Crossing(here, element, column - 0.5))
        else:
            column = _fork(element, here, column, rows, cards, crossings)
    return column


def _fork(
    fork: Fork,
    path: Path,
    column: float,
    rows: Mapping[Place, int],
    cards: list[Card],
    crossings: list[Crossing],
) -> float:
    used = dict(rows)
    ends = [column]
    for number, arm in enumerate(fork.arms):
        own = {device: used.get(device, 0) for device in Place}
        before = len(cards)
        ends.append(_arrange(arm, (*path, number), column, own, cards, crossings))
        for device in {card.stage.device for card in cards[before:]}:
            used[device] = 1 + max(card.row for card in cards[before:] if card.stage.device is device)
    return max(ends)


def plot_wiring(wiring: Pipeline | Stack, notes: Mapping[tuple[int, Path], str] | None = None) -> Axes:
    """Draw the operations of each range of layers on their lanes, GPU above and CPU below, and the transfers between.

    Parameters
    ----------
    wiring : Pipeline or Stack
    notes : mapping of (range, path) to str, optional
        A line for each stage or transfer, such as its bytes and time.
    """
    ranges = ranges_of(wiring)
    drawn = [arranged(each.pipeline.chain) for each in ranges]
    heights = [_height(cards) for cards, _ in drawn]
    wide = max(2.0, *(_columns(cards) for cards, _ in drawn))
    size = (1.0 + _COLUMN * wide, max(1.2, sum(heights) + 0.35 * len(ranges)))
    _, ax = plt.subplots(figsize=size, layout="constrained")
    top = 0.0
    for place, (each, (cards, crossings), height) in enumerate(zip(ranges, drawn, heights, strict=True)):
        title = f"layers {each.slice}" if len(ranges) > 1 else "every layer"
        streamed = ", ".join(item.name for item in each.pipeline.fetches)
        told = f"{title}{f'   streamed to the GPU: {streamed}' if streamed else ''}"
        ax.text(-0.9, top + 0.2, told, fontsize=9, color=_INK, va="center")
        of_range = {path: text for (number, path), text in (notes or {}).items() if number == place}
        _draw(ax, cards, crossings, top - 0.1, of_range)
        top -= height + 0.35
    ax.set_xlim(-1.0, _COLUMN * wide)
    ax.set_ylim(top + 0.2, 0.45)
    ax.set_axis_off()
    return ax


def _height(cards: Sequence[Card]) -> float:
    return _ROW * (_rows(cards, Place.GPU) + _rows(cards, Place.CPU)) + _GAP


def _columns(cards: Sequence[Card]) -> float:
    return 1 + max((card.column for card in cards), default=0)


def _rows(cards: Sequence[Card], device: Place) -> int:
    return 1 + max((card.row for card in cards if card.stage.device is device), default=0)


def _draw(
    ax: Axes, cards: Sequence[Card], crossings: Sequence[Crossing], top: float, notes: Mapping[Path, str]
) -> None:
    """Draw one range of layers below `top`."""
    floor = top - _ROW * _rows(cards, Place.GPU) - _GAP
    for device, name, y in ((Place.GPU, "GPU", top), (Place.CPU, "CPU", floor)):
        ax.text(-0.9, y - _HIGH / 2, name, fontsize=11, fontweight="bold", color=_EDGES[device], va="center")
    for card in cards:
        lane = top if card.stage.device is Place.GPU else floor
        y = lane - _ROW * card.row
        box = FancyBboxPatch(
            (_COLUMN * card.column, y - _HIGH),
            _WIDE,
            _HIGH,
            boxstyle="round,pad=0.02",
            facecolor=_FACES[card.stage.device],
            edgecolor=_EDGES[card.stage.device],
        )
        ax.add_patch(box)
        middle = _COLUMN * card.column + _WIDE / 2
        note = notes.get(card.path, "")
        name = ", ".join((card.stage.op.name, *card.stage.options))
        ax.text(middle, y - _HIGH * (0.32 if note else 0.5), name, fontsize=8.5, ha="center", va="center", color="#111")
        ax.text(middle, y - _HIGH * 0.74, note, fontsize=7, ha="center", va="center", color=_INK)
    for crossing in crossings:
        down = crossing.move.target is Place.CPU
        x = _COLUMN * (crossing.column + 0.5) - (_COLUMN - _WIDE) / 2
        upper, lower = top - _ROW * (_rows(cards, Place.GPU) - 1) - _HIGH - 0.06, floor + 0.06
        begin, end = (upper, lower) if down else (lower, upper)
        ax.annotate("", (x, end), (x, begin), arrowprops={"arrowstyle": "-|>", "color": _LINK, "linewidth": 1.4})
        ax.text(x + 0.06, (upper + lower) / 2, notes.get(crossing.path, str(crossing.move)), fontsize=7.5, color=_LINK)
    for before, after in _flow(cards):
        if before.stage.device is after.stage.device and before.row == after.row:
            lane = top if before.stage.device is Place.GPU else floor
            y = lane - _ROW * before.row - _HIGH / 2
            ax.plot(
                [_COLUMN * before.column + _WIDE + 0.03, _COLUMN * after.column - 0.03], [y, y], color="#9ca3af", lw=1
            )


def _flow(cards: Sequence[Card]) -> Iterator[tuple[Card, Card]]:
    """Neighbours in the order of the data."""
    for place, card in enumerate(cards):
        following = [other for other in cards[place + 1 :] if other.column > card.column]
        if following:
            nearest = min(other.column for other in following)
            yield from ((card, other) for other in following if other.column == nearest)
