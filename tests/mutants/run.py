"""Runs the nearest tests on mutants of the library's heart: `python -m tests.mutants.run FOLDER [SHARE OF]`.

Each mutant is written into a copy of the tree in FOLDER. FOLDER/journal-*.jsonl has one line per mutant, and a run that
was stopped goes on after the last one. `--collect` writes the journals to data/measured/mutants.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from tests.mutants.mutations import Mutant, mutants

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "data" / "measured" / "mutants.json"
HERE = Path(__file__).parent
SECONDS = 90.0
"""A mutant whose tests take longer than this is killed by their time."""


def chosen(modules: list[dict[str, Any]], seed: int) -> list[tuple[str, list[str], Mutant]]:
    """The drawn mutants of every module, each with the tests that are nearest to it."""
    found = []
    for module in modules:
        path = module["path"]
        every = list(mutants((ROOT / path).read_text(encoding="utf-8")))
        drawn = random.Random(f"{seed} {path}").sample(every, min(module["count"], len(every)))
        found += [(path, module["tests"], mutant) for mutant in drawn]
    return found


def red(copy: Path, tests: list[str]) -> str | None:
    """The first test that fails in a copy of the tree, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "more time than the tests may take"
    if ran.returncode == 0:
        return None
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    return named[1] if named else "the collection of the tests"


def run(folder: Path, share: int, of: int, seed: int) -> None:
    """Run every `of`-th mutant from `share` on that the journal does not have."""
    copy, journal = folder / f"tree-{share}", folder / f"journal-{share}.jsonl"
    if not copy.exists():
        left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*_cache")
        shutil.copytree(ROOT, copy, ignore=left_out)
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    done = {json.loads(line)["number"] for line in lines}
    modules = tomllib.loads((HERE / "modules.toml").read_text(encoding="utf-8"))["module"]
    green = set[tuple[str, ...]]()
    for number, (path, tests, mutant) in enumerate(chosen(modules, seed)):
        if number % of != share or number in done:
            continue
        if tuple(tests) not in green:
            failing = red(copy, tests)
            if failing:
                raise SystemExit(f"{failing} is red without any mutant.")
            green.add(tuple(tests))
        file = copy / path
        before = file.read_text(encoding="utf-8")
        file.write_text(mutant.source, encoding="utf-8")
        start = time.perf_counter()
        try:
            killed = red(copy, tests)
        finally:
            file.write_text(before, encoding="utf-8")
        row = {"number": number, "module": path, "line": mutant.line, "old": mutant.old[:200], "new": mutant.new[:200]}
        row |= {"killed by": killed, "seconds": round(time.perf_counter() - start, 1)}
        with journal.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        print(row, flush=True)


def collect(folder: Path, seed: int) -> None:
    """Write the record: every mutant with its verdict, which survivors.toml gives for those that the run let live."""
    judged = tomllib.loads((HERE / "survivors.toml").read_text(encoding="utf-8"))
    rows = []
    for journal in sorted(folder.glob("journal-*.jsonl")):
        rows += [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["number"])
    for row in rows:
        del row["seconds"]
        if row["killed by"] is not None:
            row["verdict"] = "killed"
        else:
            row |= judged.get(str(row["number"]), {"verdict": "not judged yet"})
    killed = sum(row["killed by"] is not None for row in rows)
    record = {"seed": seed, "mutants": len(rows), "killed": killed, "rows": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{killed} of {len(rows)} mutants killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("share", type=int, nargs="?", default=0)
    parser.add_argument("of", type=int, nargs="?", default=1)
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--collect", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.collect:
        collect(asked.folder, asked.seed)
    else:
        run(asked.folder, asked.share, asked.of, asked.seed)


if __name__ == "__main__":
    main()
