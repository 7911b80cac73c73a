"""Draws docs/lanes.svg, the picture of the README: two layers of the tour's scenario under two schedules.

    .venv/bin/python docs/picture.py

Rates and spans stand in the file's metadata as JSON, and a test compares them with this version's.
"""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.axes import Axes

from workbench.analysis.report import server_scenario
from workbench.core.result import Result
from workbench.core.timeline import Timeline
from workbench.core.units import format_seconds
from workbench.plots.schedules import middle_layers, plot_layers
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate

FILE = Path(__file__).with_name("lanes.svg")
LAYERS = 2
LANES = {"gpu": "GPU", "cpu": "CPU", "d2h": "link to host", "h2d": "link to GPU"}
TASKS = {
    "A": "before attention: queries, keys, values",
    "B": "after attention: projection, experts",
    "C": "attention over the KV cache",
    "Q": "queries and new KV to the host",
    "H": "attention's output to the GPU",
    "W": "weights of a later layer",
}
SMALL = 9
Drawn = dict[str, dict[str, Any]]


def results() -> list[Result]:
    """Both schedules, simulated with every task."""
    scenario = server_scenario()
    return [simulate(scenario, schedule, detail=Detail.TASK) for schedule in (Sequential(prefetch=True), VSLPipe())]


def drawn(shown: list[Result]) -> Drawn:
    """Data of the picture by schedule: output tokens per second, and spans in milliseconds."""
    data: Drawn = {}
    for result in shown:
        cut = middle_layers(result.timeline, LAYERS)
        data[result.schedule] = {"rate": round(result.gen_tok_s, 2), "spans": _spans(cut)}
    return data


def _spans(timeline: Timeline) -> list[list[Any]]:
    return [[s.lane, s.name, round(1e3 * s.start, 2), round(1e3 * s.end, 2)] for s in timeline]


def committed(file: Path = FILE) -> Drawn:
    """The data in a picture's metadata."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", file.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"{file} holds no data; draw it anew.")
    data: Drawn = json.loads(unescape(found[1]))
    return data


def draw(shown: list[Result], file: Path = FILE) -> None:
    """Write the picture, with its data in the metadata; an ending other than .svg gives no metadata."""
    mpl.rcParams.update({"svg.hashsalt": "lanes", "svg.fonttype": "path"})
    axes = plot_layers(shown, LAYERS)
    for ax, result in zip(axes, shown, strict=True):
        _name(ax, result)
    axes[-1].set_xlabel("time")
    axes[0].legend(
        handles=_keys(axes),
        loc="lower left",
        bbox_to_anchor=(0, 1.16),
        ncols=2,
        frameon=False,
        fontsize=SMALL,
    )
    metadata = {"Date": None, "Description": json.dumps(drawn(shown))} if file.suffix == ".svg" else {}
    axes[0].figure.savefig(file, metadata=metadata, facecolor="white", dpi=100)


def _name(ax: Axes, result: Result) -> None:
    """Title, names of lanes, no legend."""
    seconds = middle_layers(result.timeline, LAYERS).seconds
    rate = f"{result.gen_tok_s:.4g} output tokens per second"
    ax.set_title(f"{result.schedule}: two layers in {format_seconds(seconds)}, {rate}", loc="left", fontsize=11)
    ax.set_yticks(ax.get_yticks(), [LANES[label.get_text()] for label in ax.get_yticklabels()])
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()


def _keys(axes: list[Axes]) -> list[Any]:
    from matplotlib.patches import Patch

    from workbench.plots.results import TASK_COLOURS

    return [Patch(color=TASK_COLOURS[code], label=f"{code}  {told}") for code, told in TASKS.items()]


if __name__ == "__main__":
    draw(results())
    print(FILE)
