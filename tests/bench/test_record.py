"""Records of CPUs: one for each family, which no other family's overwrites."""

import json
from pathlib import Path

import pytest

from workbench.bench import record
from workbench.core.errors import WorkbenchError

MEASURED = Path(__file__).parents[2] / "data" / "measured" / "cpu"
SHARE = "64 sequences, G=1, 1 threads: of the roof"


@pytest.mark.parametrize("path", sorted(MEASURED.rglob("*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_record_is_of_the_family_whose_folder_it_is_in(path):
    assert json.loads(path.read_text())["family"] == path.parent.name


def test_another_family_does_not_overwrite_a_record(tmp_path):
    path = tmp_path / "kernels.json"
    record.write(path, "one", {}, [], family="znver4")
    record.write(path, "another", {}, [], family="znver4")
    with pytest.raises(WorkbenchError, match="is a record of znver4 and this CPU is of icelake-server"):
        record.write(path, "one", {}, [], family="icelake-server")
    assert json.loads(path.read_text())["machine"] == "another"


def test_shares_of_the_roof_that_fell_are_found(tmp_path):
    path = tmp_path / "kernels.json"
    before = {SHARE: record.ratio([0.9]), "1 x 64k: of the roof": record.ratio([0.8]), "faster": record.ratio([2.0])}
    record.write(path, "one", before, [])
    now = {SHARE: record.ratio([0.81]), "1 x 64k: of the roof": record.ratio([0.78]), "faster": record.ratio([1.0])}
    assert record.fallen(now, path) == {SHARE: pytest.approx(0.9)}
    assert record.fallen(before, path) == {}
    assert record.fallen(now, tmp_path / "none.json") == {}
