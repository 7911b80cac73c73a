"""The pages under docs/howto are true: what they write is written into a copy of the tree, and what they run is run.

Blocks are taken in the order of the page. Their captions say what they are::

    path                the whole file
    Append to path      what is added at its end
    Change path         a diff: lines with a space or a minus are replaced by those with a space or a plus
    It fails            of a console: its last command ends with an error; in any other each command succeeds

A line of a console that begins with ``$`` is a command, and each other line stands somewhere in what it prints.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "howto"
ADDING = ("schedule", "scheduler", "family", "kernel", "machine", "paper-model")
PAGES = (*ADDING, "file-of-requests", "server")
COPIED = ("workbench", "tests")
LINKED = ("kernels_cpu", "kernels_triton", "data", "docs", "pyproject.toml")
"""Entries of the tree that most pages only read; one that a page writes into is copied."""
FENCE = re.compile(
    r"^```\{code-block\} (?P<language>\w+)\n(?P<options>(?::[^\n]*\n)*)\n?(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
CAPTION = re.compile(r"^:caption: (.+)$", re.MULTILINE)
FAILS = "It fails"


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    caption: str
    body: str

    @property
    def path(self) -> str:
        """File that the block writes, from the root of the tree."""
        return self.caption.rpartition(" ")[2]


def blocks(page: str) -> list[Block]:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        caption = CAPTION.search(fence["options"])
        found.append(Block(fence["language"], caption[1] if caption else "", fence["body"]))
    return found


class Tree:
    """A copy of the tree, most of it links, that a page is tried in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            self._copy(name)
        for name in LINKED:
            (root / name).symlink_to(ROOT / name)

    def _copy(self, name: str) -> None:
        shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))

    def take(self, block: Block) -> None:
        """Do what a block says."""
        if block.language == "console":
            self._run_all(block)
            return
        file = self._writable(block.path)
        if block.caption.startswith("Change "):
            self._change(file, block.body)
        elif block.caption.startswith("Append to "):
            text = file.read_text(encoding="utf-8")
            file.write_text(f"{text}\n{block.body}", encoding="utf-8")
        else:
            file.write_text(block.body, encoding="utf-8")
        if file.suffix == ".py":
            self._check_style(file)

    def _writable(self, path: str) -> Path:
        top = path.partition("/")[0]
        if (self.root / top).is_symlink():
            (self.root / top).unlink()
            self._copy(top)
        return self.root / path

    def _change(self, file: Path, diff: str) -> None:
        text = file.read_text(encoding="utf-8")
        for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
            lines = [line or " " for line in hunk.splitlines()]
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
            assert text.count(before) == 1, f"{file.name} has not once:\n{before}"
            text = text.replace(before, after)
        file.write_text(text, encoding="utf-8")

    def _check_style(self, file: Path) -> None:
        for check in (["check", "--quiet"], ["format", "--check", "--quiet"]):
            done = self.run(["python", "-m", "ruff", *check, "--no-cache", str(file)])
            assert done.returncode == 0, done.stdout + done.stderr

    def _run_all(self, block: Block) -> None:
        commands = list(_commands(block.body))
        for number, (command, shown) in enumerate(commands, 1):
            done = self.run(shlex.split(command))
            told = done.stdout + done.stderr
            fails = block.caption == FAILS and number == len(commands)
            assert (done.returncode != 0) == fails, f"$ {command}\n{told}"
            for line in shown:
                assert line in told, f"$ {command}\nprints no line with {line!r}, but\n{told}"

    def run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command of a page, by this interpreter if it is Python's, and its tests in one process."""
        program, *arguments = command
        env = os.environ | {"PYTHONPATH": str(self.root), "PYTEST_ADDOPTS": "-n 0 -p no:cacheprovider"}
        env.pop("WB_TEST_DEEP", None)
        return subprocess.run(
            [sys.executable if program == "python" else program, *arguments],
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )


def _commands(console: str) -> Iterator[tuple[str, list[str]]]:
    """Each command, and the lines that the page shows of what it prints."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, [line.strip() for line in shown if line.strip() not in ("", "...")]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.slow
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for block in blocks(page):
        tree.take(block)


@pytest.mark.parametrize("page", ADDING)
def test_a_page_that_adds_has_a_file_a_command_and_a_break_that_turns_a_test_red(page: str) -> None:
    kinds = [block.caption if block.language == "console" else block.language for block in blocks(page)]
    assert kinds[-2:] == ["diff", FAILS]
    assert "" in kinds
    assert blocks(page)[-1].body.count("pytest") == 1


def test_every_page_is_tried_and_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *PAGES}
    listing = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert [page for page in PAGES if f"({page}.md)" not in listing] == []
    assert "howto/" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_the_family_that_a_page_adds_is_the_one_that_is_here() -> None:
    (shown,) = (block for block in blocks("family") if block.path.endswith(".py") and block.language == "python")
    assert (ROOT / shown.path).read_text(encoding="utf-8") == shown.body
