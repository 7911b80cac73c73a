"""Saved scenarios: they come back and give the same numbers, and what differs is told by name."""

import json
import sys
from dataclasses import fields, replace
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import OWN, scenarios, small_machine, tiny_scenario
from tests.systems import PIPELINES
from workbench.core.catalogue import data_path
from workbench.core.errors import ScenarioError
from workbench.core.result import Result
from workbench.hardware import machines
from workbench.models import checkpoint
from workbench.perfmodels import bound
from workbench.pipeline import fetch, gpu
from workbench.scenario import Memory, Scenario
from workbench.scenario.record import FORMAT, import_path, plain_fields
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.stages import Op, Streamed, Work, attention, combine_of, experts, moe, out_proj, qkv
from workbench.workload import Request, Sampling, Workload, workloads

requests = st.builds(
    Request,
    st.lists(st.integers(0, 127), min_size=1, max_size=9).map(tuple),
    st.integers(1, 9),
    st.builds(Sampling, st.floats(0, 2), st.floats(0.1, 1), st.integers(0, 2**64 - 1)),
)


def again(scenario: Scenario, folder) -> Scenario:
    return Scenario.load(scenario.save(folder / "scenario.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scenarios")


@given(scenarios())
def test_a_loaded_scenario_has_the_same_bound(folder, drawn):
    scenario, schedule = drawn
    back = again(scenario, folder)
    assert back.diff(scenario) == {}
    assert bound(back, schedule).diff(bound(scenario, schedule)) == {}
    assert str(back) == str(scenario)


@given(st.lists(requests, min_size=1, max_size=4), st.sampled_from(Admission), st.none() | st.integers(1, 99))
def test_tokens_sampling_and_scheduler_come_back(folder, asked, admission, budget):
    scenario = tiny_scenario().on(workload=Workload.of(asked, name="asked"), scheduler=ResourceAware(budget, admission))
    back = again(scenario, folder)
    assert back.workload.requests == tuple(asked)
    assert back.scheduler == scenario.scheduler
    assert bound(back, VSLPipe()).diff(bound(scenario, VSLPipe())) == {}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_comes_back_equal(name, tmp_path):
    pipeline = PIPELINES[name]
    back = again(tiny_scenario(pipeline=pipeline), tmp_path)
    assert back.pipeline == pipeline
    assert str(back.pipeline) == str(pipeline)


def test_experts_left_out_come_back(tmp_path):
    pipeline = gpu(qkv, attention, out_proj, moe, skip=1)
    assert again(tiny_scenario(pipeline=pipeline), tmp_path).pipeline == pipeline != gpu(qkv, attention, out_proj, moe)


def test_streams_of_one_operation_come_back(tmp_path):
    pipeline = fetch(experts.weights) | gpu(qkv, attention, out_proj, moe)
    assert again(tiny_scenario(pipeline=pipeline), tmp_path).pipeline == pipeline


def test_a_checkpoint_stays_one(tmp_path):
    model = checkpoint(data_path("models/tiny-moe"))
    assert again(tiny_scenario(model=model), tmp_path).model == model


def test_catalogue_entries_keep_their_sources_and_marks(tmp_path):
    scenario = tiny_scenario(blocks=100_000).on(
        machine=machines["a40"].limit(gpu_memory="16GB"),
        memory=Memory("1GB", weights="bf16", kv="fp32"),
        workload=workloads["mtbench"].sample(20, 32, seed=4),
    )
    back = again(scenario, tmp_path)
    assert (back.machine, back.machine.sources) == (scenario.machine, scenario.machine.sources)
    assert back.memory == scenario.memory
    assert (back.workload.synthetic, back.workload.source) == (True, scenario.workload.source)


# -------------------------------------------------------------------------------------------------- operations of users


def test_a_users_operation_is_saved_by_its_import_path(tmp_path):
    assert import_path(OWN) == "tests.builders:OWN"
    pipeline = fetch(OWN.weights) | gpu(qkv, attention, out_proj, OWN, moe)
    back = again(tiny_scenario(pipeline=pipeline), tmp_path).pipeline
    assert back == pipeline
    assert [stage.op for stage in back.stages if back.streams(stage)] == [OWN]


def test_an_operation_that_only_equals_an_importable_one_has_no_path():
    assert import_path(replace(OWN)) is None


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("tests.builders:tiny_model", "tests.builders:tiny_model is no operation"),
        ("tests.builders:absent", "tests.builders:absent is no operation"),
        ("__main__:OWN", "neither a built-in operation nor module:name of a module of yours"),
        ("__mp_main__:OWN", "neither a built-in operation nor module:name of a module of yours"),
        ("workbench.stages:head", "neither a built-in operation nor module:name of a module of yours"),
        ("workbench.stages.ops:combine_of", "neither a built-in operation nor module:name of a module of yours"),
        (f"{'long.' * 99}path:OWN", "neither a built-in operation nor module:name of a module of yours"),
        ("tests/builders.py:OWN", "neither a built-in operation nor module:name"),
        ("..builders:OWN", "neither a built-in operation nor module:name"),
        ("tests.builders:OWN.run", "neither a built-in operation nor module:name"),
        ("qkv_", "neither a built-in operation nor module:name"),
    ],
)
def test_a_file_with_an_operation_that_is_not_there_is_refused(path, why, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "OWN", OWN, raising=False)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    with pytest.raises(ScenarioError, match=rf"s\.json is no scenario \(.*{why}"):
        Scenario.load(naming(path, tmp_path))


def naming(path, folder):
    """A file with an operation at an import path."""
    saved = tiny_scenario(pipeline=gpu(qkv, attention, out_proj, OWN, moe)).save(folder / "s.json")
    saved.write_text(saved.read_text(encoding="utf-8").replace("tests.builders:OWN", path), encoding="utf-8")
    return saved


@pytest.mark.parametrize("module", ["this", "package_of_mine.deep", "nowhere_at_all"])
def test_nothing_is_imported_by_loading(module, tmp_path, monkeypatch):
    (tmp_path / "package_of_mine").mkdir()
    for name in ("__init__", "deep"):
        (tmp_path / "package_of_mine" / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    before = set(sys.modules)
    with pytest.raises(ScenarioError) as told:
        Scenario.load(naming(f"{module}:s", tmp_path))
    path = tmp_path / "s.json"
    assert str(told.value) == f"{path} names the operation '{module}:s'; import {module} first, then load."
    assert set(sys.modules) == before


def test_what_looks_up_to_another_operation_is_no_import_path(monkeypatch):
    """Nor is a name that cannot be written, `__main__`, which is another module elsewhere, or one of the workbench."""

    def work(rows, model, precision):
        return Work()

    mine = Op("mine", ("x",), ("x",), work=work)
    for module, name in (
        ("__main__", "mine"),
        ("__mp_main__", "mine"),
        ("workbench.stages.ops", "mine"),
        ("my-script", "mine"),
        ("module_of_mine", "not a name"),
    ):
        monkeypatch.setitem(sys.modules, module, there := ModuleType(module))
        setattr(there, name, mine)
        work.__module__ = module
        assert import_path(mine) is None, module
    there.mine = mine
    assert import_path(mine) == "module_of_mine:mine"
    assert import_path(combine_of("routed", "shared")) is None


# ------------------------------------------------------------------------------------------------------ differences


def test_differences_are_named_with_both_values():
    scenario = tiny_scenario([5, 9, 7], [4, 6, 2])
    other = scenario.on(
        machine=small_machine(h2d=2e8, gpu=3e11),
        workload=Workload.lengths([5, 8, 1], [4, 6, 2]),
        scheduler=ResourceAware(admission=Admission.PACED),
    )
    assert scenario.diff(other) == {
        "machine.gpu.flops[0][1]": (1e11, 3e11),
        "machine.link.h2d": (1e8, 2e8),
        "workload.prompt_len[1]": (9, 8),
        "scheduler.admission": ("greedy", "paced"),
    }
    assert scenario.diff(scenario) == {}


def test_another_pipeline_is_told_as_it_is_written():
    one, other = tiny_scenario(), tiny_scenario(pipeline=PIPELINES["all_gpu"])
    assert one.diff(other) == {"pipeline": (str(one.pipeline), str(other.pipeline))}


def test_lists_of_other_lengths_differ_in_their_lengths():
    found = tiny_scenario([5], [4]).diff(tiny_scenario([5, 5], [4, 4]))
    assert found["workload.prompt_len"] == ("1 entries", "2 entries")


def test_where_values_come_from_is_no_difference():
    scenario = tiny_scenario(machine=machines["a40"])
    assert scenario.diff(scenario.on(machine=replace(machines["a40"], sources={}))) == {}


# ---------------------------------------------------------------------------------------------------------- refusals


def test_an_operation_of_ones_own_cannot_be_saved(tmp_path):
    own = Op("scale", ("x",), ("x",), work=lambda rows, model, precision: Work())
    scenario = tiny_scenario(pipeline=gpu(qkv, attention, out_proj, own, moe))
    with pytest.raises(ScenarioError, match=r"gpu\(scale\) is an operation of your own, .* at the top of a module"):
        scenario.save(tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()


def test_an_operation_that_only_has_a_built_in_name_cannot_be_saved(tmp_path):
    mine = replace(out_proj, work=lambda rows, model, precision: Work(1.0))
    with pytest.raises(ScenarioError, match=r"gpu\(out_proj\) is an operation of your own"):
        tiny_scenario(pipeline=gpu(qkv, attention, mine, moe)).save(tmp_path / "s.json")


def test_the_weights_of_an_operation_of_ones_own_cannot_be_saved(tmp_path):
    own = Op("scale", ("x",), ("x",), work=lambda rows, model, precision: Work(), params=lambda model: 1)
    scenario = tiny_scenario(pipeline=fetch(own.weights) | gpu(qkv, attention, out_proj, own, moe))
    with pytest.raises(ScenarioError, match=r"gpu\(scale\) is an operation of your own"):
        scenario.save(tmp_path / "s.json")


def test_the_weights_of_an_operation_elsewhere_cannot_be_saved(tmp_path):
    scenario = tiny_scenario()
    strange = replace(scenario.pipeline, fetches=(Streamed("scale.weights", "scale"),))
    with pytest.raises(ScenarioError, match=r"fetch\(scale\.weights\) streams .* in no stage and cannot be saved"):
        plain_fields(
            **{field.name: getattr(scenario, field.name) for field in fields(scenario)} | {"pipeline": strange}
        )


def test_a_scheduler_of_ones_own_cannot_be_saved(tmp_path):
    class Mine(ResourceAware):
        pass

    with pytest.raises(ScenarioError, match="is not built in and cannot be saved; use ResourceAware"):
        tiny_scenario().on(scheduler=Mine()).save(tmp_path / "s.json")


@pytest.mark.parametrize("format", ["scenario 0", 1, None])
def test_a_file_of_another_format_is_refused(format, tmp_path):
    path = tiny_scenario().save(tmp_path / "s.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"format": format}), encoding="utf-8")
    with pytest.raises(ScenarioError, match=f"written in another format; this version reads '{FORMAT}'"):
        Scenario.load(path)


def test_a_result_is_no_scenario_and_a_scenario_no_result(tmp_path):
    scenario = tiny_scenario()
    with pytest.raises(ScenarioError, match="another format"):
        Scenario.load(bound(scenario, Sequential()).save(tmp_path / "r.json"))
    with pytest.raises(ValueError, match="another format"):
        Result.load(scenario.save(tmp_path / "s.json"))


@pytest.mark.parametrize(
    "change", [{"model": 3}, {"scheduler": {"kind": "Other"}}, {"pipeline": {"chain": ["fly"], "fetches": []}}, None]
)
def test_a_damaged_file_is_refused(change, tmp_path):
    path = tiny_scenario().save(tmp_path / "s.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(record | change) if change else "[", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"s\.json is no scenario .*; save it again"):
        Scenario.load(path)


@pytest.mark.parametrize("lengths", [[[8]], [1.5], 8, [10**30], ["8"]])
def test_lengths_of_another_kind_are_refused(lengths, tmp_path):
    path = tiny_scenario([8], [4]).save(tmp_path / "s.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    for what in ("prompt_len", "output_len"):
        workload = {**record["workload"], what: lengths}
        path.write_text(json.dumps({**record, "workload": workload}), encoding="utf-8")
        with pytest.raises(ScenarioError, match=r"s\.json is no scenario"):
            Scenario.load(path)


def test_a_file_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(100_000 * "[", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"s\.json is no scenario"):
        Scenario.load(path)


def test_a_loaded_scenario_is_checked_like_a_new_one(tmp_path):
    path = tiny_scenario([8], [4]).save(tmp_path / "s.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    record["workload"]["prompt_len"] = [5000]
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match="needs a KV cache of 5003 tokens"):
        Scenario.load(path)
