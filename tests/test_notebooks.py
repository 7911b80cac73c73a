"""Every notebook runs, is thin, and is committed without outputs; README and tour show the same cell."""

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


def test_readme_and_tour_show_the_same_cell() -> None:
    first = "".join(code_cells(ROOT / "notebooks" / "00_tour.ipynb")[0]["source"])
    blocks = re.findall(r"```python\n(.*?)\n```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks[0] == first


def test_readme_shows_what_the_cell_answers() -> None:
    """The readers' table and sentences in the README are those of this version."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cell, *_ = re.findall(r"```python\n(.*?)\n```", readme, re.DOTALL)
    names: dict[str, object] = {}
    exec(cell.replace("wb.compare(results)", "answer = str(wb.compare(results))"), names)
    assert str(names["answer"]) in readme


def test_the_readme_compares_with_the_best_baseline_and_the_best_other_placement() -> None:
    """The headline's factor, and what the baselines' other settings and attention on the GPU give, are so."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    scenario = server_scenario()
    rates = {schedule.name: simulate(scenario, schedule).gen_tok_s for schedule in contenders(scenario.layer)}
    best = max(rate for name, rate in rates.items() if name not in ("CGOPipe", "VSLPipe"))
    assert f"VSLPipe gives {rates['VSLPipe'] / best:.2f} times the best baseline" in readme
    assert f"and {rates['VSLPipe'] / rates['CGOPipe']:.2f} times CGOPipe" in readme
    settings = [
        *(Sequential(parts, prefetch=True) for parts in (2, 4, 8)),
        *(FastDecode(parts) for parts in (2, 8)),
        *(FlexGenS3(parts, place) for parts in (2, 4, 8) for place in (WeightPlace.PAGED, WeightPlace.LAST)),
    ]
    tuned = {schedule.name: simulate(scenario, schedule).gen_tok_s for schedule in settings}
    name = max(tuned, key=lambda name: tuned[name])
    assert f"With other settings the best baseline, `{name}`, reaches {tuned[name]:.3g}" in readme
    paged = {parts: simulate(scenario, CGOPipe(parts)).gen_tok_s for parts in (2, 4, 8, 16)}
    parts = max(paged, key=lambda parts: paged[parts])
    assert f"`CGOPipe(micro_batches={parts})` {paged[parts]:.3g}" in readme
    left = rates["VSLPipe"] / tuned[name], rates["VSLPipe"] / paged[parts]
    assert f"**{left[0]:.2f} and {left[1]:.2f} times** remain" in readme
    on_gpu = scenario.on(pipeline=fetch(weights, kv) | gpu(qkv, attention, out_proj, moe))
    elsewhere = {schedule.name: simulate(on_gpu, schedule).gen_tok_s for schedule in contenders(on_gpu.layer)}
    assert f"the KV cache streamed (`FlexGenS4`) the same machine reaches {max(elsewhere.values()):.3g}." in readme
    assert max(elsewhere.values()) == elsewhere["FlexGenS4"]


def test_the_readme_and_the_report_have_one_scenario() -> None:
    cell, *_ = re.findall(r"```python\n(.*?)\n```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(cell.partition("# WHEN")[0], names)
    assert str(names["scenario"]) == str(server_scenario())


def test_what_the_readme_says_of_memory_prices_and_papers_is_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks that need no weights here run, and say what stands behind them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tour, questions, *rest = re.findall(r"```python\n(.*?)\n```", readme, re.DOTALL)
    names: dict[str, object] = {}
    exec(tour, names)
    told = " ".join(line.removeprefix("# ") for line in questions.splitlines())
    answers = [eval(line.partition("  #")[0], names) for line in questions.splitlines() if re.match(r"\w", line)]
    assert str(answers[1]) in told
    assert all(line in questions for line in str(answers[2]).splitlines())
    exec(next(block for block in rest if "moe_lens" in block), names)
    assert "MoE-Lens predicts" in capsys.readouterr().out
