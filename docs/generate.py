"""Pages and tables made from the tree at build time: notebooks, reference, catalogue, measured records."""

from pathlib import Path

import packages
import tables


def write(folder: Path) -> None:
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
    """Text of every page and table by its path."""
    found = {
        "catalogue.md": tables.catalogue(),
        "notebooks.md": tables.notebooks(),
        "records.md": tables.records(),
        "reference/workbench.md": tables.names(),
        "parts/cpu_experts.md": tables.cpu_experts(),
        "parts/engines.md": tables.engines("e2e-mix-b-zen4", "e2e-mix-b-decode-zen4", "e2e-mix-b-one-zen4"),
        "parts/gpu_kernels.md": tables.gpu_kernels(),
        "parts/model_types.md": tables.model_types(),
        "parts/moe_cpu.md": tables.moe_cpu(),
        "parts/operations.md": tables.operations(),
        "parts/overlap.md": tables.overlap("overlap-mix-b-xeon-amx"),
        "parts/overlap_slow_link.md": tables.overlap("overlap-mix-b-slow-link"),
        "parts/predictions.md": tables.predictions(),
        "parts/sim_odd_models.md": tables.prediction_errors("model"),
        "parts/sim_odd_ways.md": tables.prediction_errors("way"),
    }
    for notebook in sorted(tables.NOTEBOOKS.glob("*.ipynb")):
        found[f"notebooks/{notebook.name}"] = notebook.read_text(encoding="utf-8")
    for package in packages.packages():
        found[f"reference/{packages.page(package.name)}"] = packages.reference(package)
    return found
