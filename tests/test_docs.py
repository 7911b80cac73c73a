"""README and docs: short, links lead somewhere, blocks run, errors are the source's, figures are true."""

import ast
import importlib
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.analysis.optimize.decision import CLEARLY
from workbench.analysis.optimize.fitting import Fitting
from workbench.analysis.optimize.space import Candidate, Group
from workbench.analysis.optimize.wirings import wirings
from workbench.analysis.sweeps import running
from workbench.bench import simulator
from workbench.bench.hybrid.bench import errors as bench_hybrid_errors
from workbench.bench.schedules import NEAR
from workbench.core import errors
from workbench.core.quiet import OTHERS
from workbench.core.units import INT4_GROUPS, WEIGHT_BYTES, format_bytes, parse_bytes
from workbench.engine.tiny_model.synthesize import RECIPES
from workbench.hardware.processors import ProcessorKind
from workbench.models.built.mixing import _DELTA_MACS, _SCAN_MACS
from workbench.models.families import FAMILIES, RUNNABLE
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.reproductions.offload_runs import Phase, public_runs
from workbench.reproductions.offload_tables import median_error, rank_correlations, ratios
from workbench.scheduler.resource_aware import Admission
from workbench.schedules import CGOPipe, Overlap, Sequential, VSLPipe
from workbench.simulate.loading import PATIENCE
from workbench.stages import (
    attention,
    combine,
    decode_attention,
    experts,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    weights,
)
from workbench.widgets.state.predictions import FULL, PATIENT, SOON

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
HOW_TO = sorted((DOCS / "howto").glob("*.md"))
SOURCES = ("workbench", "kernels_cpu", "kernels_triton")
MOST_LINES = 150
Names = dict[str, Any]


def from_docs(name: str) -> ModuleType:
    """A module of the folder docs, which Sphinx imports by its name alone."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(name)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def flat(text: str) -> str:
    """The text with single spaces, so that lines may break anywhere."""
    return " ".join(text.split())


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= MOST_LINES


# ------------------------------------------------------------------------------------------------------------ links


@cache
def generated() -> set[str]:
    """Paths of the pages that are made at build time."""
    return {f"docs/generated/{name}" for name in from_docs("generate").texts()}


def targets(page: Path) -> list[str]:
    """Files that a page links to, shows or includes, and pages in its tables of contents."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"```\{include\} (\S+)", text)
    for body in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
        entries = [line for line in body.splitlines() if line and not line.startswith(":") and "*" not in line]
        found += [f"{entry}.md" for entry in entries]
    return [target for target in found if not re.match(r"https?://|#", target)]


@pytest.mark.parametrize("page", [*PAGES, *HOW_TO], ids=shown)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for target in targets(page):
        path = (page.parent / target.partition("#")[0]).resolve()
        if not path.exists() and path.relative_to(ROOT).as_posix() not in generated():
            lost.append(target)
    assert lost == []


def test_the_readme_leads_to_every_page_of_its_own() -> None:
    linked = {target.removeprefix("docs/") for target in targets(README)}
    assert {page.name for page in DOCS.glob("*.md")} - linked == set()


def test_every_package_has_a_page_with_its_place_and_all_of_its_files() -> None:
    packages = from_docs("packages")
    assert set(packages.PLACES) == {package.name for package in packages.packages()}
    for package in packages.packages():
        page = packages.reference(package)
        assert "\n| takes | " in page
        assert all(f"automodule:: {packages.dotted(module)}\n" in page for module in packages.modules(package))
        assert page.count("](#file-") == len(packages.modules(package))


def test_the_imports_that_a_page_tells_are_those_of_the_modules() -> None:
    packages = from_docs("packages")
    assert packages.imports(ROOT / "workbench" / "core") == []
    assert packages.imports(ROOT / "workbench" / "kernels") == ["hardware", "kernels_cpu", "kernels_triton"]
    assert "serving" in packages.importers(ROOT / "workbench" / "scenario")


def test_a_word_has_one_entry_in_the_glossary() -> None:
    entries = re.findall(r"^(?!:|#|  )(\S.*)\n  ", text_of("docs/glossary.md"), re.MULTILINE)
    assert len(entries) > 50
    assert len(set(entries)) == len(entries)


# ----------------------------------------------------------------------------------------------------------- blocks


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


ADVICE = "wb.advise("
SEARCH = "wb.optimize("
LIVE = re.compile(r"\bcalibrate\(|\bwb\.(run|start)\b|\bDashboard\(")
"""Blocks with one of these measure or show; they are only compiled, and their imports are looked up."""
EVERY_BLOCK = [(page, block) for page in [*PAGES, *HOW_TO] for block in blocks(page)]
OWN_BLOCKS = [(page, block) for page in PAGES for block in blocks(page) if not LIVE.search(block)]
SLOW = {True: [pytest.mark.slow], False: []}
RUNS = [
    pytest.param(page, block, marks=SLOW["wb.sweep(" in block])
    for page, block in OWN_BLOCKS[1:]
    if ADVICE not in block and SEARCH not in block
]
"""All but the README's first block, that of the advice and that of the search, which tests of their answers run."""


def label(value: object) -> str:
    return shown(value) if isinstance(value, Path) else str(value).partition("\n")[0][:40]


@pytest.fixture(scope="module")
def tour() -> Names:
    """Names of the tour's cell, with its scenario and without its results."""
    names: Names = {}
    exec(blocks(README)[0].partition("# WHEN")[0], names)
    return names


@pytest.mark.parametrize(("page", "block"), EVERY_BLOCK, ids=label)
def test_every_block_is_python_whose_imports_are_there(page: Path, block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.mark.parametrize(("page", "block"), RUNS, ids=label)
def test_blocks_run_after_the_tours_scenario(page: Path, block: str, tour: Names) -> None:
    """A block that shows an error raises it."""
    names = dict(tour)
    told = re.search(r"^# (\w+Error): (.*)", block, re.DOTALL | re.MULTILINE)
    if told is None:
        exec(block, names)
        return
    with pytest.raises(Exception) as raised:
        exec(block, names)
    assert type(raised.value).__name__ == told[1]
    assert flat(str(raised.value)) == flat(told[2].replace("\n# ", "\n"))


def test_the_pages_of_memory_and_papers_tell_what_their_blocks_answer(
    tour: Names, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = blocks(DOCS / "memory.md")[0]
    told = " ".join(line.removeprefix("# ") for line in questions.splitlines())
    calls = [line.partition("  #")[0] for line in questions.splitlines() if re.match(r"\w", line)]
    _, verdict, prices = (eval(call, dict(tour)) for call in calls)
    assert str(verdict) in told
    assert all(line in questions for line in str(prices).splitlines())
    exec(blocks(DOCS / "papers.md")[0], dict(tour))
    assert "MoE-Lens predicts" in capsys.readouterr().out


def test_the_page_of_machines_shows_what_the_advice_says() -> None:
    (block,) = (block for block in blocks(DOCS / "machines.md") if ADVICE in block)
    names: Names = {"wb": wb}
    exec(block, names)
    (told,) = blocks(DOCS / "machines.md", "text")
    assert f"{told}\nBest: " in str(names["advice"])


# ----------------------------------------------------------------------------------------------------------- errors


HOLE = "\0"
"""Stands in a template for a value that is filled in."""
LEAST = 20
"""Characters that a message's own words must have at least, so that it is not matched by chance."""


def template(node: ast.expr) -> str:
    """A string of the source, with a hole where a value is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{[^{}]*\}", HOLE, re.sub(r"\s+", " ", node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return HOLE


def fits(message: str, form: str) -> bool:
    """True if the message is the template with its holes filled."""
    first, *rest = re.split(f"{HOLE}+", form)
    if not rest:
        return message == first
    *middle, last = rest
    if not (message.startswith(first) and message.endswith(last)):
        return False
    at = len(first)
    for words in middle:
        at = message.find(words, at)
        if at < 0:
            return False
        at += len(words)
    return at + len(last) <= len(message)


@cache
def templates() -> frozenset[str]:
    """Templates of the source's strings and of those of `lab`."""
    files = [ROOT / "lab"]
    for package in SOURCES:
        files += sorted((ROOT / package).rglob("*.py"))
    found = set[str]()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found.add(template(node))
    return frozenset(form for form in found if len(form.replace(HOLE, "")) >= LEAST)


def written(message: str) -> bool:
    """True if a string of the source can become this message; a warning's full stop may be added where it is given."""
    return any(fits(words, form) for words in (message, message.removesuffix(".")) for form in templates())


def quoted() -> list[str]:
    return [flat(block) for block in blocks(DOCS / "troubleshooting.md", "text")]


@pytest.mark.parametrize("message", quoted(), ids=lambda message: message[:50])
def test_a_quoted_message_is_one_of_the_source(message: str) -> None:
    kind, _, said = message.partition(": ")
    known = {"lab", "RuntimeError", "RuntimeWarning", "ValueError"}
    known |= {name for name in vars(errors) if name.endswith("Error")}
    assert written(said if kind in known else message)


def test_a_message_that_nobody_writes_is_found_out() -> None:
    assert not written("the disk is full, and nobody knows what to do about it.")


# ---------------------------------------------------------------------------------------------------------- figures


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def measured(name: str) -> Any:
    return from_docs("tables").read(name)


def of_repetitions(record: str) -> tuple[str, str]:
    """How far nine tenths of the repetitions, and the farthest one, are off their setting's median."""
    rows = measured(record)["rows"]
    apart = [abs(run / row["measured"] - 1) for row in rows for run in row["runs"]]
    return percent(float(np.percentile(apart, 90))), percent(max(apart))


def of_random_settings() -> Iterator[tuple[str, str]]:
    yield "docs/accuracy.md", f"took more than {OTHERS:.0%} of the cores are dropped".replace("%", " %")
    usual, most = of_repetitions("sim-odd-xeon-amx-unsteady")
    yield "docs/accuracy.md", f"setting were off their median by {usual} in 90 % of the runs, and by {most} at most"
    usual, most = of_repetitions("sim-odd-zen4-unsteady")
    yield "docs/accuracy.md", f"With `sim-odd-zen4-unsteady` it was {usual} and {most}"
    yield "docs/accuracy.md", f"other programs and guests took no more than {100 * OTHERS:.0f} % of the cores"


def of_overlap() -> Iterator[tuple[str, str]]:
    ratios = {name: ratio["median"] for name, ratio in measured("overlap-mix-b-xeon-amx")["ratios"].items()}
    first = "VSLPipe(weight_slots=3)"
    plain = ratios[f"{first} / Sequential, speed"]
    prefetch = ratios[f"{first} / Sequential(prefetch=True), speed"]
    yield (
        "docs/accuracy.md",
        f"VSLPipe with three slots for weights is {plain:.2f} times as fast as Sequential and {prefetch:.2f} times as "
        "Sequential with weight prefetch.",
    )
    size = re.search(r"mix-b \((\d+)\.0 GB\)", text_of("workbench/__main__.py"))
    assert size is not None
    yield "docs/accuracy.md", f"until the weights of a {size[1]} GB model take as long as computing"


def of_the_simulators_targets() -> Iterator[tuple[str, str]]:
    quick, whole = simulator.MOST.values()
    yield "docs/accuracy.md", f"a job of {simulator.REQUESTS:,} requests in both details"
    yield "docs/accuracy.md", f"a sweep over {len(list(simulator.sweep()))} scenarios of as many requests"
    yield "docs/accuracy.md", f"at most {quick:g} s, at most {whole:g} s with every task of every layer laid out"
    yield "docs/accuracy.md", f"at least {simulator.PER_MINUTE} scenarios a minute"
    yield "docs/accuracy.md", f"at most {simulator.PER_POSITION:g} s for a position of the slider"
    swept = math.prod(map(len, simulator.SWEPT.values()))
    drawn = "of requests with drawn lengths shall be at least"
    yield "docs/accuracy.md", f"A sweep over {swept:,} scenarios {drawn} {simulator.FASTER:g} times as fast"
    pairs = {3: "three"}[simulator.PAIRS]
    yield "docs/accuracy.md", f"the median of {pairs} pairs"
    yield "docs/accuracy.md", f"has simulated {PATIENCE:,} iterations"


def of_sweeps() -> Iterator[tuple[str, str]]:
    assert running.PROBE == 1
    yield (
        "docs/sweeps.md",
        f"for the first second. If the rest would take more than {running.WORTH:g} s, it goes to other",
    )
    yield "docs/sweeps.md", f"A point that has begun {running.TRIES} times and never ended is set aside"


def of_kernels() -> Iterator[tuple[str, str]]:
    better = from_docs("tables").BETTER
    speeds = [
        ratio["median"] for name, ratio in measured("cpu/icelake-server/moe")["ratios"].items() if name.endswith(better)
    ]
    yield (
        "docs/kernels.md",
        f"On two Ice Lake cores that is {min(speeds):.1f} to {max(speeds):.1f} times as fast as the faster of torch's "
        "two ways at 1 to 4096 tokens",
    )


def of_a_card() -> Iterator[tuple[str, str]]:
    rows = {row["case"]: row for row in measured("gpu-h200")["rows"] if "floor" in row}
    many = [rows["experts, Mixtral, 4096 tokens"], rows["experts, Qwen3-30B, 8192 tokens"]]
    mixtral, qwen = (f"{100 * row['floor'] / row['seconds']:.0f} %" for row in many)
    one, other = (f"{row['peers']['grouped_mm'] / row['seconds']:.2f}" for row in many)
    yield (
        "docs/kernels.md",
        f"reach {mixtral} of the matrix peak with Mixtral's sizes and {qwen} with Qwen3-30B's, {one} and {other} times "
        "`grouped_mm`",
    )
    assert not [row["step"] for row in measured("gpu-h200")["rows"] if "failed" in row]
    yield "docs/kernels.md", f"(triton {measured('gpu-h200')['versions']['triton'][:3]})"
    yield from of_runs_on_a_card()


def of_runs_on_a_card() -> Iterator[tuple[str, str]]:
    rows = measured("hybrid-h200")["rows"]
    assert all(row["right"] for row in rows)
    tokens = [row for row in rows if "ways" in row]
    ways = sum(row["ways"] for row in tokens)
    page = "docs/running.md"
    assert len(tokens) == 5
    yield page, "tiny models of five families"
    yield page, f"{ways} of {ways + sum(row['wrong'] for row in tokens)} pipelines with schedules"
    errors = bench_hybrid_errors(rows)
    usual, most = percent(median(errors.values())), percent(max(errors.values()))
    yield page, f"an error of {usual} (median; {most} at most)"
    ((step, decodes, entries),) = {(step, decodes, entries) for step, _, decodes, entries in errors}
    memory = re.search(r" in (\d+)GB,", step)
    assert memory is not None
    yield page, f"{decodes} decodes of {entries} entries through mix-b, in {memory[1]} GB of the card's memory"
    passes = [each for row in rows for each in row.get("schedules", ())]
    yield page, f"moved weights at {percent(max(each['link'] for each in passes), 0)} of its rate at most"
    vsl = next(each for each in passes if each["schedule"].startswith("VSLPipe"))
    yield page, f"for {percent(vsl['utilisation']['gpu'], 0)} of a pass under VSLPipe the gpu lane was at work"
    (link,) = (row["rates"]["h2d"] for row in measured("gpu-h200")["rows"] if row["step"] == "link")
    experts = RECIPES["mix-b"].num_local_experts * RECIPES["mix-b"].expert_params
    yield page, f"A layer's weights take {2e3 * experts / link:.0f} ms of that link"
    fastest = min(passes, key=lambda each: median(each["measured"]))
    yield page, f"`{fastest['schedule']}` was faster than VSLPipe"


def of_online_serving() -> Iterator[tuple[str, str]]:
    proof = json.loads(text_of("data/proofs/layered_prefill_online.json"))["shown"]
    changes = {}
    for name, found in proof.items():
        if name.startswith("test_layered_prefill_reads_fewer_experts"):
            changes[name.split()[1]] = -found["mean change"]
    first = proof["test_the_first_token_comes_in_less_than_half_the_time_on_arxiv"]["ratio"]
    yield "docs/online.md", f"| ShareGPT | {percent(changes['sharegpt'], 0)} less | |"
    yield "docs/online.md", f"| arXiv | {percent(changes['arxiv'], 0)} less | in {percent(first, 0)} of the time |"


def of_drawn_scenarios() -> Iterator[tuple[str, str]]:
    """From the table in docs/schedules.md, which another test compares with what the command prints."""
    table = text_of("docs/schedules.md")
    prefetch = re.search(r"^Sequential\(prefetch=True\)  \d+% +(\d+)% ", table, re.MULTILINE)
    best = re.search(r"^VSLPipe +\d+% +\d+% +([\d.]+) \(\S+ to \S+\) +\S+ \(\S+ to (\S+)\)$", table, re.MULTILINE)
    drawn = re.search(r"^(\d+) scenarios: ", table, re.MULTILINE)
    assert prefetch is not None
    assert best is not None
    assert drawn is not None
    yield "docs/schedules.md", f"In {prefetch[1]} % of these scenarios prefetching weights is as good as anything"
    yield "docs/schedules.md", f"VSLPipe gives up to {best[2]} times as much as the baseline"
    other = re.search(r"^Overlap +\d+% +\d+% +[\d.]+ \(\S+ to \S+\) +\S+ \(\S+ to (\S+)\)$", table, re.MULTILINE)
    assert other is not None
    yield "docs/schedules.md", f"and `Overlap` up to {other[1]} times."
    near = f"{NEAR - 1:.0%}"
    yield (
        "docs/schedules.md",
        f"*Best by {near}* is the share of scenarios in which a schedule gives at least 2 % more than",
    )
    yield "docs/schedules.md", f"*Within {near}* is the share in which no other gives 2 % more."
    yield "README.md", f"Over {drawn[1]} drawn ones VSLPipe's median is {best[1]} times the best other schedule"


def of_stacks() -> Iterator[tuple[str, str]]:
    """Experts of as few layers on the CPU as the ledger allows, against the experts of all."""
    model = wb.models["gpt-oss-120b"]
    on_cpu = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    on_gpu = gpu(qkv, attention, out_proj, moe)

    def first(layers: int) -> wb.Scenario:
        return wb.Scenario(
            on_cpu[:layers] + on_gpu[layers:] if layers < model.num_hidden_layers else on_cpu,
            model=model,
            machine=wb.machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB"),
            memory=wb.Memory(kv_capacity="2GB"),
            workload=wb.Workload.lengths(500, 128, 32),
            scheduler=wb.ContinuousBatching(),
        )

    every = model.num_hidden_layers
    least = next(layers for layers in range(1, every) if wb.fits(first(layers), Sequential()))
    gain = wb.simulate(first(least), Sequential()).gen_tok_s / wb.simulate(first(every), Sequential()).gen_tok_s
    yield (
        "docs/schedules.md",
        "gpt-oss-120b with 32 requests of 500 and 128 tokens and 2 GB of KV fits a GPU of 32 GB with the experts of "
        f"{least} layers on the CPU",
    )
    yield "docs/schedules.md", f"that gives {gain:.2f} times as many output tokens per second"
    yield "docs/schedules.md", f"llama.cpp's `--n-cpu-moe {least}`"
    yield "docs/schedules.md", f"which leaves the experts of the first {least} layers on the CPU, is a stack"
    yield "docs/schedules.md", f"stack = on_cpu[:{least}] + on_gpu[{least}:]"


@cache
def placements() -> dict[str, wb.Result]:
    """Simulated placements of gpt-oss-120b's experts, by their names in docs/schedules.md."""
    before = gpu(qkv, attention, out_proj, route)
    rows = before >> (gpu(experts.prefill) | offload >> cpu(experts.decode) >> load) >> gpu(combine)
    pipelines: dict[str, Pipeline] = {
        "on the CPU": before >> offload >> cpu(experts) >> load >> gpu(combine),
        "`fetch(experts.weights)`": fetch(experts.weights) | before >> gpu(experts, combine),
        "`fetch(experts.chosen)`": fetch(experts.chosen) | before >> gpu(experts, combine),
        "`fetch(experts.prefill.weights)`, decode on the CPU": fetch(experts.prefill.weights) | rows,
        "`fetch(experts.prefill.chosen)`, decode on the CPU": fetch(experts.prefill.chosen) | rows,
    }
    scenario = wb.Scenario(
        rows,
        model=wb.models["gpt-oss-120b"],
        machine=wb.machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB"),
        memory=wb.Memory(kv_capacity="4GB"),
        workload=wb.Workload.lengths(2000, 128, 8),
        scheduler=wb.ContinuousBatching(),
    )
    schedule = Sequential(prefetch=True)
    return {name: wb.simulate(scenario.on(pipeline=each), schedule) for name, each in pipelines.items()}


def of_experts_placed_apart() -> Iterator[tuple[str, str]]:
    yield (
        "docs/schedules.md",
        "gpt-oss-120b on a GPU of 32 GB (`rtx-5090`, `xeon-8380`), eight requests of 2000 and 128",
    )
    for name, result in placements().items():
        yield (
            "docs/schedules.md",
            f"| {name} | {result.gen_tok_s:.1f} | {result.ttft:.1f} s | {1e3 * result.tbt:.0f} ms |",
        )


@cache
def shares() -> dict[float, wb.Result]:
    """Mixtral-8x7B with shares of its streamed weights on the GPU."""
    chain = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
    scenario = wb.Scenario(
        fetch(weights) | chain,
        model=wb.models["mixtral-8x7b"],
        machine=wb.machines["a40"],
        memory=wb.Memory(kv_capacity="70GB"),
        workload=wb.Workload.lengths(98, 32, 4000),
        scheduler=wb.ResourceAware(token_budget=4000),
    )
    memories = {share: wb.Memory(kv_capacity="70GB", weights_on_gpu=share) for share in (0, 0.1, 0.2, 0.3, 0.38)}
    return {share: wb.simulate(scenario.on(memory=memory), Overlap()) for share, memory in memories.items()}


def of_shares() -> Iterator[tuple[str, str]]:
    results = shares()
    for share, result in results.items():
        if share:
            kept = result.facts["weights on the GPU"].partition("%")[0]
            gain = result.gen_tok_s / results[0].gen_tok_s
            yield "docs/schedules.md", f"| {share} | {kept} % | {gain:.2f} | {1 / (1 - share):.2f} |"
    first, second, third, used = (ratio["median"] for ratio in measured("shares-mix-b-xeon-amx")["ratios"].values())
    told = f"shares of 10 %, 20 % and 30 % gave {first:.2f}, {second:.2f} and {third:.2f} times the speed"
    yield "docs/schedules.md", told
    yield "docs/schedules.md", f"once they are chosen, gave {used:.2f} times"
    yield "docs/schedules.md", "until weights take four times as long as computing"
    yield "docs/schedules.md", "Measured with a 3 GB model on two cores"


@cache
def optima() -> dict[str, tuple[wb.Scenario, wb.Result]]:
    """The search's answer for the tour's scenario, and the best named system beside it, simulated anew."""
    names: Names = {}
    exec(blocks(README)[0].partition("# WHEN")[0], names)
    scenario: wb.Scenario = names["scenario"]
    known = {wiring.name: wiring for wiring in wirings(scenario)}
    lens = Group(known["weights streamed, attention on the CPU"], 1.0, 1.0, 16)
    lightning = Group(known["experts streamed, attention on the CPU"], 0.0, 1.0, 16)
    paced = wb.ResourceAware(admission=Admission.PACED)
    found = {}
    for name, candidate in (
        ("answer", Candidate(lens, CGOPipe(micro_batches=8), paced, 11585.0)),
        ("named", Candidate(lightning, CGOPipe(), wb.ResourceAware(), None)),
    ):
        fitted = Fitting(scenario).fit(candidate)
        found[name] = (fitted.scenario, wb.simulate(fitted.scenario, fitted.schedule))
    return found | {"tour": (scenario, wb.simulate(scenario, VSLPipe()))}


def of_the_search() -> Iterator[tuple[str, str]]:
    page = "docs/optimize.md"
    yield page, f"it is simulated to be {CLEARLY - 1:.0%} better".replace("%", " %")
    scenario, answer = optima()["answer"]
    tour, named = (answer.gen_tok_s / optima()[name][1].gen_tok_s for name in ("tour", "named"))
    cache = format_bytes(parse_bytes(scenario.memory.kv_capacity))
    yield page, f"with {percent(scenario.memory.weights_on_gpu)} of its streamed weights on the GPU"
    yield page, f"room for {cache} of KV cache"
    yield page, f"`ResourceAware(token_budget={scenario.scheduler.token_budget}, admission=Admission.PACED)`"
    yield (
        page,
        f"reaches {answer.gen_tok_s:.0f} simulated output tok/s: {tour:.2f} times as many as VSLPipe in the tour",
    )
    yield page, f"and {named:.2f} times as many as the best named system"


def of_the_catalogue() -> Iterator[tuple[str, str]]:
    kinds = [part.kind for part in wb.processors.values()]
    gpus, cpus, both = (kinds.count(kind) for kind in ProcessorKind)
    wide = wb.machine("rtx-4090", "ryzen-7950x", memory="64GB ddr5-6000 x2", efficiency="nominal").cpu.bandwidth
    macs = {part.memory > 32e9: part.gpu_share for name, part in wb.processors.items() if re.match(r"m\d", name)}
    weights = (ROOT / "data/models/tiny-moe/model.safetensors").stat().st_size
    numbers = {8: "eight", 9: "nine", 10: "ten", 11: "eleven", 12: "twelve"}
    layers = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"][0]["layers"]
    yield "docs/models.md", f"`wb.models` is the catalogue: {len(wb.models)} models"
    yield (
        "docs/models.md",
        f"of one of {len(FAMILIES)} families. Parameters are within 0.5 % of what transformers builds.",
    )
    types = json.loads(text_of("data/proofs/model_types.json"))
    counted = [each for each in types["types"] if not each["refused"]]
    version = types["transformers"].rsplit(".", 1)[0]
    known = f"These are the {len(types['types'])} types with experts that transformers {version} builds from default"
    yield "docs/models.md", f"{known} configs, of which {len(counted)} are counted."
    yield "docs/models.md", f"once in and once out per pass: {_DELTA_MACS} multiply-adds per element and token"
    yield "docs/models.md", f"the same: {_SCAN_MACS} multiply-adds"
    yield "docs/models.md", f"its state in the same way: {_SCAN_MACS} multiply-adds"
    yield "docs/models.md", f"`data/models/tiny-moe` ({weights / 1e6:.1f} MB)"
    yield "docs/models.md", f"Experts in MXFP4 (GPT-OSS) stay as they are, {8 * WEIGHT_BYTES['mxfp4']:g} bits a weight"
    yield (
        "docs/models.md",
        f"without: {8 * WEIGHT_BYTES['uint4_g128']:g} bits a weight in groups of {INT4_GROUPS[0]}, with the",
    )
    yield "docs/models.md", f"groups of {INT4_GROUPS[0]}, {INT4_GROUPS[1]} and {INT4_GROUPS[2]} columns"
    yield "docs/machines.md", f"`wb.processors` has {gpus} GPUs, {cpus} CPUs and {both} chips with both"
    yield "docs/machines.md", f"two channels of DDR5-6000 give {wide / 1e9:.0f} GB/s"
    assert macs[False] == pytest.approx(2 / 3, abs=0.001)
    yield "docs/machines.md", f"{100 * macs[True]:.0f} % on a Mac, two thirds on those sold with at most 32 GB"
    yield "docs/machines.md", f"`wb.workloads` has {numbers[len(wb.workloads)]} workloads of the papers"
    yield "docs/index.md", f"{numbers[len(layers)]} layers of packages"
    assert "BAR = 0.005\n" in text_of("tests/unit/test_families.py")
    for architecture in RUNNABLE:
        yield "docs/models.md", f"| `{architecture}` |"


def of_views() -> Iterator[tuple[str, str]]:
    """How long simulations may take in the views."""
    yield "docs/widgets.md", f"no fewer than take {SOON} s and"
    yield "docs/widgets.md", f"no more than take {FULL} s"
    yield "docs/widgets.md", f"unless that takes more than {PATIENT} s"


def of_public_runs() -> Iterator[tuple[str, str]]:
    page = "docs/accuracy.md"
    full = [run for run in public_runs() if run.known == "full"]
    played = sum(bool(run.simulated) for run in full)
    yield page, f"Of {len(full)} runs whose hardware is fully stated, {played} can be simulated"
    for phase in Phase:
        found = ratios(phase)
        error = f"{100 * median_error(phase):.0f} %"
        yield page, f"| {phase.value} | {len(found)} | {error} | {median(found.values()):.2f} |"
    yield page, f"published up to {1 / min(ratios(Phase.PREFILL).values()):.1f} times as fast"
    uploaded = [run.name for run in full if run.entry.get("prompts") == "gpu"]
    those = [ratio for name, ratio in ratios(Phase.PREFILL).items() if name in uploaded]
    yield page, f"{median(those):.2f} times as fast as published in the median and at most {max(those):.2f} times"
    orders = rank_correlations()
    placed = orders[orders["of placement"].eq(True)]
    yield page, f"is at least 0.6 in {(placed['correlation'] >= 0.6).sum()} of {len(placed)} cases"
    yield page, f"reach that in {(placed['of runs'] >= 0.6).sum()} of {len(placed)} cases"
    assert min(ratios(Phase.DECODE).values()) > 1, "decode is always published slower"


KINDS: list[Callable[[], Iterator[tuple[str, str]]]] = [
    of_random_settings,
    of_overlap,
    of_the_simulators_targets,
    of_sweeps,
    of_kernels,
    of_a_card,
    of_online_serving,
    of_drawn_scenarios,
    of_stacks,
    of_experts_placed_apart,
    of_shares,
    of_the_search,
    of_the_catalogue,
    of_public_runs,
    of_views,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_figures_are_those_of_records_and_code(kind: Callable[[], Iterator[tuple[str, str]]]) -> None:
    for page, sentence in kind():
        assert sentence in flat(text_of(page)), page


ELSEWHERE = [
    r"VSLPipe gives 1\.\d+ times the best baseline",
    r"\| [^|]*\| \d\.\d+ times as much \|",
    r"reaches \d+ output tok/s",
    r"\d+ GiB",
]
"""Figures that tests of their own hold: in test_notebooks.py and in test_lab.py."""
NO_FIGURES = [r"Python 3\.\d+( to 3\.\d+)?", r"arXiv [\d.]+", r"doi [\d./]+", r"90 % of the runs", r"127\.0\.0\.1"]
"""Numbers that nobody measured or computed."""
FIGURE = re.compile(r"\d+ ?%|\d+\.\d+|\d+ (?:times|s|ms|GB|MB|tok/s)\b")


def prose(page: Path) -> str:
    """A page without its blocks and code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return flat(text)


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_no_figure_stands_without_a_test(page: Path) -> None:
    text = prose(page)
    for kind in KINDS:
        for where, sentence in kind():
            text = text.replace(sentence, "") if where == shown(page) else text
    for known in (*ELSEWHERE, *NO_FIGURES, r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(known, "", text)
    if page.name == "troubleshooting.md":
        text = re.sub(r"\b\d+\.\d+\b", "", text)  # versions in messages that are held to the source
    assert FIGURE.findall(text) == []


# ---------------------------------------------------------------------------------------------------------- picture


@pytest.mark.slow
def test_the_picture_shows_what_this_version_simulates() -> None:
    """Drawn anew by ``python docs/picture.py`` where this fails."""
    picture = from_docs("picture")
    assert picture.FILE.stat().st_size < 150_000
    kept = picture.committed()
    fresh = picture.drawn(picture.results())
    assert list(kept) == list(fresh)
    for schedule, data in fresh.items():
        assert kept[schedule]["rate"] == pytest.approx(data["rate"], rel=1e-3)
        assert [span[:2] for span in kept[schedule]["spans"]] == [span[:2] for span in data["spans"]]
        for span, again in zip(kept[schedule]["spans"], data["spans"], strict=True):
            assert span[2:] == pytest.approx(again[2:], rel=1e-3, abs=0.05)


def test_a_picture_without_data_is_refused(tmp_path: Path) -> None:
    picture = from_docs("picture")
    (tmp_path / "empty.svg").write_text("<svg/>", encoding="utf-8")
    with pytest.raises(ValueError, match="draw it anew"):
        picture.committed(tmp_path / "empty.svg")


# ---------------------------------------------------------------------------------------------------------- notebooks


def test_the_page_of_notebooks_has_each_claim() -> None:
    tables = from_docs("tables")
    page = tables.notebooks()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        title, claim = tables.headline(notebook)
        assert f"## [{title}](notebooks/{notebook.name})" in page
        assert len(claim) > 50


# ----------------------------------------------------------------------------------------------------------- citation


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {wb.__version__}\n" in text_of("CITATION.cff")
