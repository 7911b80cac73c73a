"""Tables made at build time: of measured records, of the catalogue, of the kernels' operations and of the notebooks."""

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import workbench as wb
from workbench.bench.e2e.bench import BASELINE
from workbench.core.units import format_bytes
from workbench.hardware.processors import Processor, ProcessorKind, Sourced
from workbench.kernels.collected import doors

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "data" / "measured"
NOTEBOOKS = ROOT / "notebooks"

Record = Mapping[str, Any]


def read(name: str) -> Record:
    """A measured record."""
    found: Record = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# ------------------------------------------------------------------------------------------------ measured records


def records() -> str:
    """Page of the measured ratios, a table for each record."""
    lines = ["# Measured records", "", "Medians of interleaved repetitions, with the smallest and the largest.", ""]
    for path in sorted(MEASURED.rglob("*.json")):
        name = path.relative_to(MEASURED).with_suffix("").as_posix()
        record = read(name)
        if not record.get("ratios"):
            continue
        lines += [f"## {name}", "", f"{record['machine']}, {record['date'][:10]}.", ""]
        lines.append(table(("ratio", "median", "smallest", "largest", "runs"), _ratios(record)))
    return "\n".join(lines)


def _ratios(record: Record) -> list[list[str]]:
    rows = []
    for name, ratio in record["ratios"].items():
        figures = [f"{ratio[key]:.3g}" for key in ("median", "min", "max")]
        rows.append([name.replace("|", "\\|"), *figures, str(ratio["runs"])])
    return rows


def errors_by(record: Record, what: str) -> dict[str, list[float]]:
    """Errors of a record's settings, measured over simulated rate less one, by a column of its rows."""
    found = dict[str, list[float]]()
    for row in record["rows"]:
        found.setdefault(row[what], []).append(row["error"])
    return found


def predictions() -> str:
    """Table of the records of `bench sim`, one row for each computer."""
    rows = []
    for path in sorted(MEASURED.glob("sim-odd*.json")):
        record = read(path.stem)
        errors = [abs(row["error"]) for row in record["rows"]]
        intervals = [(row["interval"], row) for row in record["rows"] if row["interval"]]
        inside = sum(low <= row["measured"] <= high for (low, high), row in intervals)
        width = median((high - low) / row["simulated"] for (low, high), row in intervals)
        shares = [f"{value:.1%}" for value in (median(errors), *np.percentile(errors, (90, 95)), width)]
        half, most, nearly_all, wide = shares
        computer = f"{record['machine'].removeprefix('local: ')} (`{path.stem}`)"
        rows.append([computer, str(len(errors)), half, most, nearly_all, f"{inside} of {len(intervals)}", wide])
    errors_told = ("median error", "90 % within", "95 % within")
    return table(("computer", "settings", *errors_told, "inside the interval", "its median width"), rows)


def prediction_errors(what: str) -> str:
    """Table of the errors of `bench sim`, by model or by way."""
    rows = []
    for name, errors in errors_by(read("sim-odd-znver3"), what).items():
        absolute = median(abs(error) for error in errors)
        rows.append([f"`{name}`", f"{median(errors):+.1%}", f"{absolute:.1%}", str(len(errors))])
    return table((what, "median of measured over simulated, less one", "median without sign", "settings"), rows)


def overlap(name: str) -> str:
    """Table of a record of `bench overlap`."""
    rows = []
    times = {row["schedule"]: median(row["measured"]) for row in read(name)["rows"]}
    first = next(iter(times.values()))
    for row in read(name)["rows"]:
        seconds = times[row["schedule"]]
        rows.append(
            [
                f"`{row['schedule']}`",
                f"{seconds:.2f} s",
                f"{row['bound'] / seconds:.0%}",
                f"{row['simulated'] / seconds:.2f}",
                f"{seconds / first:.2f}",
            ]
        )
    head = (
        "schedule",
        "one pass, measured",
        "of its bound",
        "simulated over measured seconds",
        "times as long as the first",
    )
    return table(head, rows)


def engines(*names: str) -> str:
    """Table of records of `bench e2e`."""
    rows = []
    every = [row for name in names for row in read(name)["rows"]]
    first = {row["load"]: row["core_seconds"] for row in every if row["engine"] == BASELINE}
    for row in every:
        rows.append(
            [
                row["load"],
                row["engine"] if row["version"] == "here" else f"{row['engine']} ({row['version']})",
                f"{row['tokens_per_second']:.1f}",
                f"{row['core_seconds']:.1f}",
                f"{row['core_seconds'] / first[row['load']]:.2f}",
            ]
        )
    head = ("requests", "engine", "generated tokens per second", "core-seconds", f"over those of {BASELINE}")
    return table(head, rows)


FASTER = "times as fast as torch"
FORMATS = ("BF16, exact", "INT8", "INT4")


def cpu_experts() -> str:
    """Table of the expert kernels' speed over torch's, on two threads."""
    ratios = read("cpu/sapphirerapids/experts")["ratios"]
    rows = []
    for tokens in (1, 2, 4, 8, 16, 32, 128, 512):
        keys = [f"{form}, {tokens} tokens, 2 threads: {FASTER}" for form in FORMATS]
        if all(key in ratios for key in keys):
            rows.append([str(tokens), *(f"{ratios[key]['median']:.1f}" for key in keys)])
    return table(("tokens", *(f"{form}: {FASTER}" for form in FORMATS)), rows)


BETTER = "2 threads: times as fast as the better of torch's"


def moe_cpu() -> str:
    """Table of a layer's experts in bf16 on the CPU, over the better of torch's two ways."""
    ratios = read("cpu/icelake-server/moe")["ratios"]
    rows = []
    for name, ratio in ratios.items():
        if name.endswith(BETTER):
            layer, tokens = name.removesuffix(f", {BETTER}").rsplit(", ", 1)
            rows.append([layer, tokens.removesuffix(" tokens"), f"{ratio['median']:.1f}"])
    return table(("layer", "tokens", "times as fast as the better of torch's"), rows)


def gpu_kernels() -> str:
    """Table of the kernels on a GPU: speed relative to the floor of measured ceilings, and to each baseline."""
    rows = []
    for row in read("gpu-h200")["rows"]:
        if "floor" in row:
            peers = {name: took / row["seconds"] for name, took in row["peers"].items() if isinstance(took, float)}
            told = ", ".join(f"{name} {times:.2f}" for name, times in peers.items())
            share = f"{100 * row['floor'] / row['seconds']:.0f} % ({row['bound by']})"
            rows.append([row["case"], f"{1e3 * row['seconds']:.3f}", share, told])
    return table(("kernel", "ms", "of the floor", "times as fast as"), rows)


# --------------------------------------------------------------------------------------------------- the catalogue


def catalogue() -> str:
    """Page of models, machines, processors, links, drives and workloads."""
    lines = ["# The catalogue", "", "Sizes are computed from each entry's sources in `data/catalogue`.", ""]
    lines += ["## Models", "", _models(), "## Machines", "", _machines()]
    for title, kind in _KINDS.items():
        lines += [f"## {title}", "", _processors(kind)]
    lines += ["## Links", "", _rates(wb.links), "## Drives", "", _rates(wb.drives)]
    lines += ["## Workloads", "", _workloads()]
    return "\n".join(lines)


def _models() -> str:
    rows = []
    for name, model in wb.models.items():
        rows.append(
            [
                f"`{name}`",
                str(model.num_hidden_layers),
                f"{model.num_experts_per_tok} of {model.num_local_experts}",
                _billions(model.params),
                _billions(model.active_params),
                format_bytes(model.weight_bytes),
                format_bytes(model.kv_bytes_per_token(model.dtype)),
            ]
        )
    sizes = ("parameters [billions]", "of them active", "weights", "KV cache per token")
    return table(("model", "layers", "experts per token", *sizes), rows)


def model_types() -> str:
    """Types of models that transformers builds, and how `wb.model` counts each; of a test's survey."""
    found = json.loads((ROOT / "data" / "proofs" / "model_types.json").read_text(encoding="utf-8"))
    rows = []
    for each in found["types"]:
        if each["refused"]:
            rows.append([f"`{each['model_type']}`", _billions(each["built"]), "", "refused", each["refused"]])
            continue
        sizes = [_billions(each["params"]), _billions(each["active_params"])]
        rows.append([f"`{each['model_type']}`", *sizes, each["way"], each["layers"]])
    sizes = ("parameters [billions]", "of them active")
    return table(("type", *sizes, "counted by", "layers"), rows)


def _billions(count: float) -> str:
    """Three digits, or all before the point."""
    billions = count / 1e9
    return f"{billions:.3g}" if billions < 1000 else f"{billions:.0f}"


def _machines() -> str:
    rows = []
    for name, machine in wb.machines.items():
        rows.append(
            [
                f"`{name}`",
                machine.gpu.name,
                format_bytes(machine.gpu.memory),
                machine.cpu.name,
                format_bytes(machine.cpu.memory),
                f"{format_bytes(machine.link.h2d)}/s",
            ]
        )
    return table(("machine", "GPU", "its memory", "host", "its memory", "link to the GPU"), rows)


_KINDS = {
    "GPUs": ProcessorKind.GPU,
    "CPUs": ProcessorKind.CPU,
    "GPU and CPU on one memory": ProcessorKind.UNIFIED,
}


def _rates(found: Mapping[str, Sourced]) -> str:
    rows = [[f"`{name}`", f"{format_bytes(rate.number)}/s", rate.source] for name, rate in found.items()]
    return table(("name", "rate", "source"), rows)


def _processors(kind: ProcessorKind) -> str:
    rows = [_processor(name, part) for name, part in wb.processors.items() if part.kind is kind]
    return table(("name", "memory", "its bandwidth", "16-bit rate", "fp32 rate of the CPU", "link"), rows)


def _processor(name: str, part: Processor) -> list[str]:
    rates = [f"{_known(rate / 1e12, '.3g')} TFLOP/s" for rate in (part.flops, part.vector_flops)]
    shown = ["" if rate.startswith(" ") else rate for rate in rates]
    modules = f"{part.channels} channels of {' or '.join(part.dram)}" if part.channels else ""
    memory = modules if math.isnan(part.memory) else format_bytes(part.memory)
    link = "" if math.isnan(part.link) else f"{format_bytes(part.link)}/s"
    limit = f", cores read {format_bytes(part.fabric)}/s" if part.fabric < part.bandwidth else ""
    return [f"`{name}`", memory, f"{format_bytes(part.bandwidth)}/s{limit}", *shown, link]


def _known(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _workloads() -> str:
    rows = []
    for name, workload in wb.workloads.items():
        told = str(workload).removeprefix(f"{name}: ")
        rows.append([f"`{name}`", told, workload.source])
    return table(("workload", "lengths", "source"), rows)


# ----------------------------------------------------------------------------------------- operations and names


def operations() -> str:
    """Table of the operations of `workbench.kernels`, and where each is computed by a kernel of its own."""
    rows = []
    for name, door in doors().items():
        numba = "yes" if door.on_cpu else ""
        triton = "yes" if door.on_gpu else ""
        rows.append([f"`{name}`", _first(door.call), numba, triton])
    return table(("operation", "computes", "Numba", "Triton and torch"), rows)


def names() -> str:
    """Page of the names of `workbench`, which notebooks import as ``wb``."""
    rows = [[f"`wb.{name}`", _named(getattr(wb, name))] for name in wb.__all__]
    told = (
        "`import workbench as wb` gives these names, and imports torch with the first of the engine's: `RunState`, "
        "`calibrate`, `make_checkpoint`, `run`, `start`."
    )
    return "\n".join(["# `workbench`", "", told, "", table(("name", "is"), rows)])


def _named(found: Any) -> str:
    """First sentence of a class or function; a catalogue by its entries."""
    if inspect.isclass(found) or inspect.isfunction(found):
        return _first(found)
    return f"catalogue of {len(found)} entries"


def _first(found: Any) -> str:
    """First paragraph of a docstring, for a cell of a table."""
    paragraph = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return paragraph.replace("\n", " ").replace("|", "\\|").removesuffix("::")


# --------------------------------------------------------------------------------------------------- notebooks


def notebooks() -> str:
    """Page of the notebooks with their claims, each from its first cell."""
    lines = [
        "# Notebooks",
        "",
        "Each notebook makes one claim and checks it in its last cell. `./lab` opens the first.",
    ]
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        title, claim = headline(path)
        lines += ["", f"## [{title}](notebooks/{path.name})", "", claim]
    lines += ["", "```{toctree}", ":hidden:", ":glob:", "notebooks/*", "```", ""]
    return "\n".join(lines)


def headline(notebook: Path) -> tuple[str, str]:
    """Title and claim of a notebook."""
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]
    paragraphs = "".join(first["source"]).split("\n\n")
    title = paragraphs[0].removeprefix("# ")
    claims = [paragraph for paragraph in paragraphs if paragraph.startswith("**Claim.** ")]
    return title, claims[0].removeprefix("**Claim.** ")
