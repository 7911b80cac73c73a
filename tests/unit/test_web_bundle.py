"""The bundle of the browser side is the one that its sources give, and its parts pass their own tests."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

WIDGETS = Path(__file__).parents[2] / "workbench" / "widgets"
WEB = WIDGETS / "web"
FILES = ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")
SHARED = ("gantt.css", "gantt.js", "strip.css", "strip.js")
MEND = "run `npm ci && npm run build` in workbench/widgets/web and commit dist/"


def sources() -> list[str]:
    """Paths of all that the bundle is made from, as the build names them."""
    inside = [path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*") if path.is_file()]
    return sorted([*FILES, *(f"../parts/{name}" for name in SHARED), *inside])


def digest() -> str:
    found = hashlib.sha256()
    for name in sources():
        found.update(f"{name}\0".encode())
        found.update((WEB / name).read_bytes())
        found.update(b"\0")
    return found.hexdigest()


def node(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", *arguments], cwd=WEB, capture_output=True, text=True)


with_node = pytest.mark.skipif(
    shutil.which("node") is None or not (WEB / "node_modules").is_dir(),
    reason="needs node, and `npm ci` in workbench/widgets/web",
)


@pytest.mark.parametrize("name", ["builder.js", "builder.css"])
def test_the_bundle_is_made_from_these_sources(name):
    with (WEB / "dist" / name).open(encoding="utf-8") as bundle:
        header = bundle.readline()
    found = re.search(r"sources sha256 ([0-9a-f]{64})", header)
    assert found is not None, f"{name} has no hash in its first line; {MEND}"
    assert found[1] == digest(), f"{name} is older than its sources; {MEND}"


def test_the_licences_are_those_of_the_packages_in_the_bundle():
    texts = (WEB / "dist" / "LICENSES.txt").read_text(encoding="utf-8")
    for package in ("@xyflow/react", "@xyflow/system", "react", "react-dom", "scheduler", "zustand", "d3-zoom"):
        assert re.search(rf"^{re.escape(package)} \d+\.\d+\.\d+ \(", texts, re.MULTILINE), package


def test_the_bundle_asks_nothing_of_the_network():
    """React's names of namespaces and of its own errors are texts; nothing is loaded from them."""
    bundle = (WEB / "dist" / "builder.js").read_text(encoding="utf-8")
    style = (WEB / "dist" / "builder.css").read_text(encoding="utf-8")
    hosts = set(re.findall(r"https?://([\w.-]+)", bundle + style))
    assert hosts <= {"www.w3.org", "react.dev", "reactflow.dev"}
    assert not re.search(r"\bfetch\(\"|new WebSocket|XMLHttpRequest|sendBeacon|@import", bundle + style)


@with_node
def test_a_build_gives_the_same_bytes(tmp_path):
    built = node("build.mjs", str(tmp_path))
    assert built.returncode == 0, built.stderr
    for name in ("builder.js", "builder.css", "LICENSES.txt"):
        assert (tmp_path / name).read_bytes() == (WEB / "dist" / name).read_bytes(), f"{name} differs; {MEND}"


@with_node
def test_types_are_sound():
    checked = node("node_modules/typescript/bin/tsc", "--noEmit")
    assert checked.returncode == 0, checked.stdout


@with_node
def test_its_parts_pass_their_own_tests():
    tested = node("test/run.mjs")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    passed = re.search(r"^# pass (\d+)$", tested.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= 30
