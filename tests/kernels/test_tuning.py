"""The tuner without a GPU: what it would time, what it keeps, and which tiles a layer then gets."""

import contextlib
import dataclasses
import json

import pytest
import torch

from kernels_triton.moe import tiles, tuning
from kernels_triton.moe.tuning import Candidate, Layer, TunedShape, candidates, tune, tuned_shapes
from tests.damage import JSON_DAMAGES

LAYER = Layer(4096, 6400, 16, 2)
"""Of Phi-3.5-MoE; the table has no rows of these sizes."""


def speed(shape: TunedShape, candidate: Candidate) -> float | None:
    """Least for 32 rows and 64 columns with 8 warps by TMA in programs that last; 256 columns do not run."""
    n, k, _, warps, stages, tma, per_sm = dataclasses.astuple(candidate.tiles)
    if n == 256:
        return None
    return abs(candidate.m - 32) + abs(n - 64) + abs(warps - 8) + k / 64 + stages / 10 + 2 - tma - per_sm


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100])
def test_every_shape_has_candidates_of_both_products_with_every_height(arch):
    for shape in tuned_shapes(arch, [LAYER], tuple(tuning.STORED)):
        found = {(candidate.m, candidate.gated) for candidate in candidates(shape)}
        assert found == {(m, gated) for m in tuning.BUCKETS[shape.most_rows][1] for gated in (True, False)}


def test_the_fastest_is_written_and_found_by_layers_of_these_sizes_only(tmp_path, monkeypatch):
    out = tmp_path / "tiles.json"
    tune([LAYER], ["16-bit"], out=out, say=lambda _: None, arch=90, measure=speed)
    rows = tiles.read_table(out)["rows"]
    assert len(rows) == len(tiles.table()) + len(tuning.BUCKETS)
    before = tiles.tiles_for(90, torch.bfloat16, 64, (2048, 768))
    monkeypatch.setattr(tiles, "table", lambda: rows)
    monkeypatch.setattr(tiles, "_fitting", tiles._fitting.__wrapped__)
    chosen = tiles.tiles_for(90, torch.bfloat16, 64, (4096, 6400))
    assert (chosen.m, chosen.gated.n, chosen.gated.warps, chosen.plain.n) == (32, 64, 8, 64)
    assert (chosen.gated.tma, chosen.gated.per_sm) == (True, 0)
    many = tiles.tiles_for(90, torch.bfloat16, 1e6, (4096, 6400))
    assert (many.m, many.plain.tma, many.plain.per_sm) == (64, True, 1)
    assert tiles.tiles_for(90, torch.bfloat16, 64, (2048, 768)) == before
    assert tiles.tiles_for(90, torch.bfloat16, 64) == before


def test_a_layer_that_was_timed_for_few_and_many_rows_has_the_tiles_of_others_between():
    between = tiles.tiles_for(90, torch.bfloat16, 48, (4096, 14336))
    assert between == tiles.tiles_for(90, torch.bfloat16, 48)
    assert tiles.tiles_for(90, torch.bfloat16, 1e6, (4096, 14336)) != tiles.tiles_for(90, torch.bfloat16, 1e6)


@pytest.mark.parametrize("arch", [75, 80, 86, 90])
def test_only_sm_90_is_offered_the_copy_engine_and_only_many_rows_programs_that_last(arch):
    for shape in tuned_shapes(arch, [LAYER], tuple(tuning.STORED)):
        found = {(candidate.tiles.tma, candidate.tiles.per_sm) for candidate in candidates(shape)}
        copies, lasting = {False, arch >= 90}, {0, int(shape.most_rows is None)}
        assert found == {(tma, per_sm) for tma in copies for per_sm in lasting}


@pytest.mark.parametrize("arch", [75, 80, 86])
def test_float8_is_refused_where_the_gpu_has_none(arch):
    with pytest.raises(ValueError, match=rf"float8_e4m3fn needs sm_89 or later, not sm_{arch}: quantise to"):
        tiles.tiles_for(arch, torch.float8_e4m3fn, 16)
    assert tiles.tiles_for(89, torch.float8_e4m3fn, 16).m == 16


def test_an_interrupted_run_goes_on_and_measures_nothing_twice(tmp_path):
    out, seen = tmp_path / "tiles.json", []

    def until(limit):
        def measure(shape, candidate):
            if len(seen) == limit:
                raise KeyboardInterrupt
            seen.append((shape, candidate))
            return speed(shape, candidate)

        return measure

    with pytest.raises(KeyboardInterrupt):
        tune([LAYER], ["16-bit"], out=out, say=lambda _: None, arch=90, measure=until(100))
    first = tiles.read_table(out)["rows"]
    (tmp_path / "tiles.measured.jsonl").open("a").write('\n{"what": "cut in the mid')
    tune([LAYER], ["16-bit"], out=out, say=lambda _: None, arch=90, measure=until(-1))
    shapes = tuned_shapes(90, [LAYER], ["16-bit"])
    assert len(seen) == len(set(seen)) == sum(len(list(candidates(shape))) for shape in shapes)
    last = tiles.read_table(out)["rows"]
    assert all(row in last for row in first)
    tune([LAYER], ["16-bit"], out=out, say=lambda _: None, arch=90, measure=until(len(seen)))
    assert sorted(map(json.dumps, tiles.read_table(out)["rows"])) == sorted(map(json.dumps, last))


@pytest.mark.parametrize("damage", [damage for damage in JSON_DAMAGES if damage != "no folder"])
def test_a_damaged_journal_costs_no_more_than_measuring_again(damage, tmp_path):
    """Lines that can be read are still known; the table is the same."""
    out, journal, seen = tmp_path / "t" / "tiles.json", tmp_path / "t" / "tiles.measured.jsonl", []

    def measure(shape, candidate):
        seen.append(candidate)
        return speed(shape, candidate)

    tune([LAYER], ["16-bit"], out=out, say=lambda _: None, arch=80, measure=measure)
    whole, table = len(seen), sorted(map(json.dumps, tiles.read_table(out)["rows"]))
    JSON_DAMAGES[damage](journal)
    with pytest.warns(UserWarning, match="cannot be written") if damage == "a folder" else contextlib.nullcontext():
        tune([LAYER], ["16-bit"], out=out, say=lambda _: None, arch=80, measure=measure)
    again = len(seen) - whole
    assert again == whole if damage != "truncated" else 0 < again < whole
    assert sorted(map(json.dumps, tiles.read_table(out)["rows"])) == table
