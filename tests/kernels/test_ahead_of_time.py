"""The kernels compile for GPUs that are not here: nothing spills, shared memory fits, matrix instructions are used."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proofs import Proofs, case_of, proved, wanted

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("ahead_of_time.py")
ATTENTION = Path(__file__).with_name("ahead_of_time_attention.py")
ROOT = SCRIPT.parents[2]
HERE = "tests/kernels/"
EXPERTS = Proofs(
    "ahead_of_time_experts",
    (HERE + "test_ahead_of_time.py", HERE + SCRIPT.name),
    ("kernels_triton/**/tiles.json",),
    ("triton",),
)
AROUND = Proofs(
    "ahead_of_time_attention",
    (HERE + "test_ahead_of_time.py", HERE + ATTENTION.name),
    ("kernels_triton/**/*.json",),
    ("triton",),
)
EVERY = [(arch, kind) for arch in (75, 80, 86, 89, 90) for kind in ("16-bit", "8-bit", "4-bit", "fp32")]


def rows_of(script: Path, cache: Path, *arguments: str) -> list[dict]:
    """What a script prints, with a cache of its own: an old entry would hide a failure."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, script, *arguments], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory) -> Callable[..., list[dict]]:
    """What the chosen tests have no proof of, compiled ahead of them on every core: each takes half a minute on one."""
    chosen = [item for item in request.session.items if "compiled" in getattr(item, "fixturenames", ())]
    pool, rows = ThreadPoolExecutor(os.cpu_count()), {}
    for item in chosen:
        of = item.callspec.params
        script, proofs = (SCRIPT, EXPERTS) if "kind" in of else (ATTENTION, AROUND)
        if not wanted(proofs, case_of(item.function, of)):
            continue
        cache = tmp_path_factory.mktemp("triton")
        rows[tuple(of.values())] = pool.submit(rows_of, script, cache, *map(str, of.values()))
    yield lambda *arguments: rows[arguments].result()
    pool.shutdown(cancel_futures=True)


def sizes(rows: list[dict]) -> dict[str, int]:
    """What a proof tells of the kernels."""
    most = {f"most {name}": max(row[name] for row in rows) for name in ("registers", "shared")}
    return {"kernels": len(rows)} | most


@pytest.mark.slow
@pytest.mark.parametrize("arch, kind", EVERY)
@proved(EXPERTS)
def test_every_architecture_and_kind_of_weights(arch, kind, compiled):
    """On sm_90 with HGMMA also for few tokens: the table has rows of 16 pairs per expert."""
    rows = compiled(arch, kind)
    instruction = "HGMMA" if arch >= 90 else "HMMA"
    products = [row for row in rows if row["kernel"] in ("gated", "plain")]
    assert products
    assert [row for row in rows if row["stack"] or row["STL"] or row["LDL"]] == []
    assert [row for row in rows if not row["fits"]] == []
    if arch >= 80 and kind != "fp32":  # Triton has no matrix instructions before, and none that are exact for fp32
        assert [row for row in products if not row[instruction]] == []
        assert [row for row in products if not row["LDGSTS"]] == []
        assert [row for row in products if bool(row["UTMALDG"]) != row["tma"]] == []
        assert {row["tma"] for row in products} == ({False, True} if arch >= 90 else {False})
    return sizes(rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
@proved(AROUND)
def test_attention_and_what_stands_around_it(arch, compiled):
    rows = compiled(arch)
    products = [row for row in rows if row["kernel"] in ("prefill", "decode", "logits") and row["x"] != "fp32"]
    assert [row for row in rows if row["stack"] or row["STL"] or row["LDL"]] == []
    assert [row for row in rows if not row["fits"]] == []
    assert [row for row in products if not (row["HGMMA"] or row["HMMA"]) or not row["LDGSTS"]] == []
    if arch == 90:  # decodes have fewer query heads than HGMMA takes rows
        assert [row for row in products if row["kernel"] != "decode" and not row["HGMMA"]] == []
    return sizes(rows)
