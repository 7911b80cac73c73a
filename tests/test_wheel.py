"""The wheel carries its data, and engine and kernels work from it where there is no Jupyter."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
WITHOUT_JUPYTER = """
import sys
from importlib.abc import MetaPathFinder

class NoJupyter(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jupyterlab", "ipywidgets", "anywidget", "IPython"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoJupyter())
"""
USE = """
from pathlib import Path
import workbench
from workbench.kernels import decode_attention

home = Path(sys.argv[1])
assert Path(workbench.__file__).is_relative_to(home), workbench.__file__
assert callable(decode_attention)
print(workbench.machines["a40"])
"""


def python(*arguments: str, cwd: Path, **env: str) -> str:
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    python("-m", "pip", "install", "--no-deps", "--target", str(target), str(wheel), cwd=target)
    return target


def test_wheel_holds_the_packages_and_the_catalogue(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("workbench", "kernels_cpu", "kernels_triton"):
        assert {f"{folder}/__init__.py", f"{folder}/py.typed"} <= set(names)
    assert "workbench/data/prompts.txt" in names
    for file in ("config.json", "model.safetensors", "tokenizer.json", "training.json"):
        assert f"workbench/data/models/tiny-moe/{file}" in names
    assert any(name.startswith("workbench/data/catalogue/") for name in names)
    parts = [f"parts/{name}" for name in ("gantt.css", "gantt.js", "strip.css", "strip.js")]
    bundle = [f"web/dist/{name}" for name in ("LICENSES.txt", "builder.css", "builder.js")]
    assert {name for name in names if "/widgets/web/" in name} == {f"workbench/widgets/{file}" for file in bundle}
    for file in parts:
        assert f"workbench/widgets/{file}" in names
    assert {"workbench/bench/cpu/c_twin.c", "kernels_triton/moe/tiles.json"} <= set(names)


def test_wheel_holds_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"workbench", "kernels_cpu", "kernels_triton", "moe_workbench-0.1.0.dist-info"}


def test_works_from_the_wheel_without_jupyter(site, tmp_path):
    printed = python("-c", WITHOUT_JUPYTER + USE, str(site), cwd=tmp_path, PYTHONPATH=str(site))
    assert "a40" in printed.lower()
