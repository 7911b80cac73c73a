"""Every notebook runs, is thin, and is committed without outputs; README, docs and tour show the same."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from workbench.analysis.report import server_scenario
from workbench.pipeline import fetch, gpu
from workbench.schedules import CGOPipe, FastDecode, FlexGenS3, Sequential, WeightPlace, contenders
from workbench.simulate import simulate
from workbench.stages import attention, kv, moe, out_proj, qkv, weights

ROOT = Path(__file__).parent.parent
# The tour calibrates for what follows it; the claims of the others compare times.
MEASURE = ("00_tour", "05_moe_gemm", "06_cpu_attention", "07_cpu_experts")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, object]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


ALONE = {name: [pytest.mark.alone] for name in MEASURE}
RUNS = [pytest.param(path, marks=ALONE.get(path.stem, []), id=path.stem) for path in NOTEBOOKS]


@pytest.mark.parametrize("notebook", RUNS)
def test_notebook_runs_to_its_checked_claim(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WB_SCALE", "small")
    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=120, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    assert all(cell["execution_count"] for cell in content["cells"] if cell["cell_type"] == "code")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_thin_and_stripped(notebook: Path) -> None:
    cells = code_cells(notebook)
    code = "".join(line for cell in cells for line in ["\n", *cell["source"]])
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    assert len([line for line in code.splitlines() if line.strip()]) <= 80
    assert not re.search(r"^\s*(def|class) |matplotlib", code, re.MULTILINE)
    assert "assert " in "".join(cells[-1]["source"])


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)\n```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_readme_and_tour_show_the_same_cell() -> None:
    first = "".join(code_cells(ROOT / "notebooks" / "00_tour.ipynb")[0]["source"])
    assert python_blocks("README.md")[0] == first


def test_readme_and_page_of_schedules_show_what_the_cell_answers() -> None:
    """The README has the readers' table of this version, the page also the sentences under it."""
    cell = python_blocks("README.md")[0]
    names: dict[str, object] = {}
    exec(cell.replace("wb.compare(results)", "answer = str(wb.compare(results))"), names)
    table, _, sentences = str(names["answer"]).partition("\n\n")
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    assert table in page
    assert sentences in page


def test_vslpipe_is_compared_with_the_best_baseline_and_the_best_other_placement() -> None:
    """The headline's factor, and what the baselines' other settings and attention on the GPU give, are so."""
    page = " ".join((ROOT / "docs" / "schedules.md").read_text(encoding="utf-8").split())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    scenario = server_scenario()
    rates = {schedule.name: simulate(scenario, schedule).gen_tok_s for schedule in contenders(scenario.layer)}
    best = max(rate for name, rate in rates.items() if name not in ("CGOPipe", "Overlap", "VSLPipe"))
    assert f"{rates['Overlap'] / rates['VSLPipe']:.2f}" == "1.00", "README: Overlap gives as much as VSLPipe"
    assert f"VSLPipe gives {rates['VSLPipe'] / best:.2f} times the best baseline" in readme
    assert f"| the best baseline as it stands | {rates['VSLPipe'] / best:.2f} times as much |" in page
    assert f"| CGOPipe as it stands | {rates['VSLPipe'] / rates['CGOPipe']:.2f} times as much |" in page
    settings = [
        *(Sequential(parts, prefetch=True) for parts in (2, 4, 8)),
        *(FastDecode(parts) for parts in (2, 8)),
        *(FlexGenS3(parts, place) for parts in (2, 4, 8) for place in (WeightPlace.PAGED, WeightPlace.LAST)),
    ]
    tuned = {schedule.name: simulate(scenario, schedule).gen_tok_s for schedule in settings}
    name = max(tuned, key=lambda name: tuned[name])
    gain = rates["VSLPipe"] / tuned[name]
    said = f"the best baseline with other settings: `{name}`, {tuned[name]:.3g} output tok/s"
    assert f"| {said} | {gain:.2f} times as much |" in page
    paged = {parts: simulate(scenario, CGOPipe(parts)).gen_tok_s for parts in (2, 4, 8, 16)}
    parts = max(paged, key=lambda parts: paged[parts])
    gain = rates["VSLPipe"] / paged[parts]
    said = f"CGOPipe with other settings: `CGOPipe(micro_batches={parts})`, {paged[parts]:.3g} output tok/s"
    assert f"| {said} | {gain:.2f} times as much |" in page
    on_gpu = scenario.on(pipeline=fetch(weights, kv) | gpu(qkv, attention, out_proj, moe))
    elsewhere = {schedule.name: simulate(on_gpu, schedule).gen_tok_s for schedule in contenders(on_gpu.layer)}
    assert f"streamed (`Overlap`) the same machine reaches {max(elsewhere.values()):.3g} output tok/s." in page
    assert max(elsewhere.values()) == elsewhere["Overlap"]


def test_the_readme_and_the_report_have_one_scenario() -> None:
    names: dict[str, object] = {}
    exec(python_blocks("README.md")[0].partition("# WHEN")[0], names)
    assert str(names["scenario"]) == str(server_scenario())
