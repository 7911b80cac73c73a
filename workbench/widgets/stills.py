"""Still pictures of a view, with its scenario inside: for saved notebooks, exported pages and files."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import MAX_TEXT_CHUNK, PngInfo

from workbench.analysis.costs import Costs
from workbench.core.display import escaped
from workbench.core.errors import ScenarioError
from workbench.core.result import Result
from workbench.core.units import format_bytes, format_seconds, four_digits
from workbench.pipeline import Path as Place
from workbench.plots.wiring import plot_wiring
from workbench.scenario import Scenario
from workbench.widgets.parts.still import DPI
from workbench.widgets.state.studio import Studio

KEY = "moe-workbench scenario"
"""Name under which a picture holds its scenario."""
ID = "moe-workbench-scenario"
"""Name of the element of an SVG or a page that holds the scenario."""
_KEPT = re.compile(rf'id="{ID}">([A-Za-z0-9+/=]*)<')


def still(studio: Studio) -> bytes:
    """A picture of the wiring with its figures, as PNG; with the scenario inside if it can be."""
    return _png(studio, studio.told())


def save_still(studio: Studio, path: str | Path) -> Path:
    """Write the picture, with the scenario inside, as .png, .svg or .html; `scenario_in` reads it back.

    Raises
    ------
    ScenarioError
        If the file has another ending, or the scenario cannot be written; see `Scenario.to_dict`.
    """
    path = Path(path)
    told = json.dumps(studio.settings.scenario().to_dict())
    if path.suffix == ".png":
        path.write_bytes(_png(studio, told))
    elif path.suffix == ".svg":
        path.write_text(_svg(studio, told), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(_page(studio, told), encoding="utf-8")
    else:
        raise ScenarioError(f"{path} is no picture that can hold a scenario; end it in .png, .svg or .html.")
    return path


def scenario_in(path: str | Path) -> Scenario:
    """The scenario in a picture that `save_still` wrote, or that the builder saved.

    Raises
    ------
    ScenarioError
        If there is none in it.
    """
    path = Path(path)
    if path.suffix == ".png":
        with Image.open(path) as picture:
            told = str(getattr(picture, "text", {}).get(KEY, ""))
    else:
        found = _KEPT.search(path.read_text(encoding="utf-8"))
        told = base64.b64decode(found[1]).decode() if found else ""
    if not told:
        raise ScenarioError(f"{path} holds no scenario; give a picture that was saved with one.")
    return Scenario.from_dict(json.loads(told), str(path))


def headline(studio: Studio) -> str:
    """The settings and their throughput in one line."""
    settings = studio.settings
    result = studio.predictions.simulation(settings, settings.schedule)
    bound = studio.predictions.bound(settings)
    asked = f"{settings.model.name} on {settings.machine.name}, {settings.schedule.name}"
    if isinstance(result, Result) and isinstance(bound, Result):
        rate = studio.predictions.of_all(result, settings)
        most = four_digits(bound.gen_tok_s)
        return f"{asked}: simulated {four_digits(rate)} output tokens/s, of {most} that the bound allows"
    return asked


def notes_of(costs: Costs) -> dict[tuple[int, Place], str]:
    """A line for each stage and transfer: its time, and its weights or the bytes that it moves."""
    return {
        (cost.place, cost.path): f"{format_bytes(cost.moved or cost.weights)}, {format_seconds(cost.seconds)}"
        if cost.moved or cost.weights
        else format_seconds(cost.seconds)
        for cost in costs.entries
        if cost.path
    }


def packed(told: str) -> str:
    """Text in base64, whose letters mean nothing in a page."""
    return base64.b64encode(told.encode()).decode()


def _figure(studio: Studio) -> Figure:
    """The drawn wiring under a line with its figures."""
    settings = studio.settings
    costs = studio.predictions.costs(settings)
    ax = plot_wiring(settings.pipeline, notes_of(costs) if isinstance(costs, Costs) else {})
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ScenarioError("the wiring has no picture; draw it with plot_wiring.")
    plt.close(figure)
    figure.suptitle(headline(studio), fontsize=10, x=0.01, ha="left", color="#374151")
    return figure


def _png(studio: Studio, told: str = "") -> bytes:
    drawn = io.BytesIO()
    info = PngInfo()
    if told:
        info.add_text(KEY, told, zip=len(told) < MAX_TEXT_CHUNK)  # a longer one is not unpacked when it is read
    _figure(studio).savefig(drawn, format="png", dpi=DPI, pil_kwargs={"pnginfo": info})
    return drawn.getvalue()


def _svg(studio: Studio, told: str) -> str:
    drawn = io.StringIO()
    _figure(studio).savefig(drawn, format="svg")
    head, tail = re.split(r"(?<=>)(?=\s*<metadata>)", drawn.getvalue(), maxsplit=1)
    return f'{head}\n <metadata id="{ID}">{packed(told)}</metadata>{tail}'


def _page(studio: Studio, told: str) -> str:
    """A page with the picture, the code and the scenario, which needs nothing else."""
    code = escaped(studio.wirings.code(studio.settings.pipeline)["text"])
    picture = base64.b64encode(_png(studio)).decode()
    title = escaped(headline(studio))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n<h1>{title}</h1>\n'
        f'<img alt="{title}" style="max-width:100%" src="data:image/png;base64,{picture}">\n<pre>{code}</pre>\n'
        f'<script type="text/plain" id="{ID}">{packed(told)}</script></html>\n'
    )
