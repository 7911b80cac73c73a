"""Pages made from the tree: the notebooks, the reference of every package, and tables of measured records."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
MEASURED = ROOT / "data" / "measured"


def pages(folder: Path) -> None:
    """Write all pages and delete those of earlier builds. An unchanged file is left, so that Sphinx skips it."""
    wanted = {folder / name: text for name, text in texts().items()}
    for old in folder.rglob("*"):
        if old.is_file() and old not in wanted:
            old.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def texts() -> dict[str, str]:
    """Text of every page by its path."""
    found = {f"notebooks/{path.name}": path.read_text(encoding="utf-8") for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    found["records.md"] = records()
    for package in packages():
        name = package.relative_to(ROOT).as_posix().replace("/", ".")
        found[f"reference/{name}.md"] = reference(name, package)
    return found


def packages() -> list[Path]:
    """Packages of the workbench, and the two kernel packages."""
    inside = sorted(path.parent for path in (ROOT / "workbench").glob("*/__init__.py"))
    return [*inside, ROOT / "kernels_cpu", ROOT / "kernels_triton"]


def modules(package: Path) -> list[Path]:
    """Modules of a package at any depth, without ``__init__``."""
    return [path for path in sorted(package.rglob("*.py")) if path.stem not in ("__init__", "__main__")]


def reference(name: str, package: Path) -> str:
    """Page of a package's reference, made from docstrings."""
    lines = [f"# `{name}`", "", "```{eval-rst}"]
    for path in modules(package):
        title = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        lines += [title, "-" * len(title), "", f".. automodule:: {title}", "   :members:", ""]
    return "\n".join([*lines, "```", ""])


def records() -> str:
    """Page of the measured ratios, a table for each record."""
    lines = ["# Measured records", "", "Medians of interleaved repetitions, with the smallest and the largest."]
    for path in sorted(MEASURED.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not record.get("ratios"):
            continue
        lines += ["", f"## {path.stem}", "", f"{record['machine']}, {record['date'][:10]}.", ""]
        lines += ["| ratio | median | smallest | largest | runs |", "|---|---|---|---|---|"]
        for name, ratio in record["ratios"].items():
            figures = " | ".join(f"{ratio[key]:.3g}" for key in ("median", "min", "max"))
            lines.append(f"| {name} | {figures} | {ratio['runs']} |")
    return "\n".join([*lines, ""])
