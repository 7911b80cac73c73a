"""One JupyterLab and one page for all browser tests: the tour, opened and run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.lab import Server, Session, browsing, chromium, open_notebook, run_all, serving

ROOT = Path(__file__).parents[2]
# Cells behind the tour's own. Each says how often it has run, so that a test sees when its own turn is over.
BEHIND = {
    "busy": "import time\nend = time.time() + 4\nwhile time.time() < end:\n    sum(range(1000))",
    "shown": """
from dataclasses import replace
from hashlib import sha256
settings, settled = dashboard.controls.settings, dashboard._painter.wait(60)
chosen = dashboard._predictions.scenario(settings)
lines = {line.get_label(): line.get_xydata() for line in dashboard._picture.ax.lines}
same = [
    wb.simulate(chosen.on(memory=replace(chosen.memory, kv_capacity=float(capacity))), schedule).gen_tok_s == rate
    for schedule in contenders(layer) for capacity, rate in lines[schedule.name + ", simulated"]
]
said = settings.requests, all(same), len(same), sha256(dashboard.curves.value).hexdigest()
""",
    "live": "import threading\nsaid = sum(thread.name == 'live-run' for thread in threading.enumerate())",
}
COUNTED = """
{code}
counts = globals().get("counts", {{}})
counts["{name}"] = counts.get("{name}", 0) + 1
print("{name}-" + str(counts["{name}"]), globals().get("said", ""))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why where there is no browser, rather than fail."""
    missing = "no chromium here (Debian: apt-get install chromium)" if chromium() is None else ""
    try:
        import playwright  # noqa: F401
    except ImportError:
        missing = "playwright is not installed (pip install playwright)"
    for item in items:
        if "browser" in item.keywords and missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def with_cells_behind(notebook: Path) -> str:
    """The notebook's text with the cells of BEHIND appended."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    content["cells"] += [
        {**empty, "id": name, "source": COUNTED.format(name=name, code=code).strip()} for name, code in BEHIND.items()
    ]
    return json.dumps(content)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root, private = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("jupyter")
    tour = ROOT / "notebooks" / "00_tour.ipynb"
    (root / tour.name).write_text(with_cells_behind(tour), encoding="utf-8")
    with serving(root, private) as running:
        yield running


@pytest.fixture(scope="module")
def session(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """The tour in a browser, every cell run."""
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        session = Session(browser)
        open_notebook(session.page, server, "00_tour.ipynb")
        run_all(session.page)
        session.said("live-1", seconds=200)  # the first time, the computer is calibrated
        yield session
