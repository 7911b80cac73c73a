"""Fields by dotted names: what can be changed, what a change leaves as it is, and how values may be written."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import enough_experts, small_machine, tiny_model, tiny_scenario
from tests.examples import examples
from tests.systems import STREAMED, VSL
from workbench.core.errors import CapacityError, CatalogueError, ScenarioError, WorkbenchError, WorkloadError
from workbench.hardware import Interconnect
from workbench.scenario.fields import FieldKind, field_of, fields_of, parsed, with_field, with_fields
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import CGOPipe, Schedule, Sequential, VSLPipe
from workbench.schedules.registry import every_schedule
from workbench.workload import Request, Workload
from workbench.workload.resizing import resized, sizes

SCHEDULES = tuple(kind() for kind in every_schedule())
UNEVEN = wb.workloads["rag"].sample(requests=50, output_len=16, seed=3)


def of(schedule, scheduler):
    """A scenario whose every number may be a little more or less, with an odd workload."""
    pipeline = schedule.example
    model = replace(enough_experts(tiny_model(), pipeline), max_position_embeddings=2**20)
    return tiny_scenario(
        [5, 8, 300, 1], [3, 9, 1, 70], pipeline=pipeline, model=model, blocks=100_000, scheduler=scheduler
    )


def others(field):
    """Other values of a field."""
    if field.choices:
        return [choice for choice in field.choices if choice != field.value]
    if field.kind is FieldKind.CHOICE:
        return ["fp32" if field.value != "fp32" else "bf16"]
    if field.kind is FieldKind.COUNT:
        return [3, 7] if field.value is None else [field.value + 1, 3 * field.value]
    if field.kind is FieldKind.NUMBER:
        return [64] if field.value is None else [field.value * 0.75 + 0.125, field.value / 3 + 0.5]
    return []


def apart(name, other):
    """True if neither field is a part of the other; the rate of the link is that of its directions."""
    return name != other and not f"{name}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{name}.")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.name)
@pytest.mark.parametrize("scheduler", every_scheduler(), ids=lambda each: type(each).__name__)
def test_a_field_is_read_back_and_no_other_changes(schedule, scheduler):
    scenario = of(schedule, scheduler)
    every = fields_of(scenario, schedule)
    kept, refused = 0, []
    for field in every:
        for value in others(field):
            try:
                changed = with_field(scenario, schedule, field.name, value)
            except WorkbenchError:
                refused.append(field.name)
                continue
            kept += 1
            after = {each.name: each.value for each in fields_of(*changed)}
            assert after[field.name] == value == field_of(*changed, field.name), field.name
            for other in every:
                if apart(field.name, other.name) and not {field.name, other.name} <= LENGTHS:
                    assert after[other.name] == other.value, (field.name, other.name)
    assert kept > 5 * len(refused), refused


LENGTHS = {"workload.requests", "workload.prompt_len", "workload.output_len"}
"""More or fewer requests have another mean; see the tests of lengths below."""


def test_the_same_value_changes_nothing():
    for schedule in SCHEDULES:
        scenario = of(schedule, wb.ResourceAware()).on(workload=Workload.of([Request((1, 2, 3), 4)]))
        for field in fields_of(scenario, schedule):
            assert with_field(scenario, schedule, field.name, field.value) == (scenario, schedule), field.name


def test_a_value_that_only_reads_otherwise_leaves_the_scenario_as_it_is():
    """Saved digests are made of its text."""
    scenario = tiny_scenario()
    scenario = scenario.on(memory=replace(scenario.memory, kv_capacity="1MB"))
    assert with_field(scenario, VSLPipe(), "memory.kv_capacity", 1e6)[0].memory.kv_capacity == "1MB"
    uneven = scenario.on(machine=small_machine(h2d=1e8, d2h=2e8))
    assert with_field(uneven, VSLPipe(), "machine.link", 1e8)[0].machine.link == uneven.machine.link


def test_every_field_says_what_it_means_and_every_size_has_its_unit():
    for scheduler in every_scheduler():
        for schedule in SCHEDULES:
            joined = replace(small_machine(), gpu=replace(small_machine().gpu, count=2, between=Interconnect(1e9)))
            for field in fields_of(of(schedule, scheduler).on(machine=joined), schedule):
                assert field.meaning, field.name
                assert "[" not in field.meaning
                shares = ("on_gpu",)
                assert field.kind is not FieldKind.NUMBER or field.unit or field.name.endswith(shares), field.name


def test_names_and_units_are_those_of_the_dataclasses():
    found = {field.name: field for field in fields_of(tiny_scenario(), CGOPipe())}
    assert (found["memory.kv_capacity"].unit, found["memory.kv_capacity"].short) == ("B", "kv_capacity")
    assert (found["machine.gpu.memory"].unit, found["machine.gpu.memory"].short) == ("B", "gpu_memory")
    assert (found["machine.link"].unit, found["machine.link"].short) == ("B/s", "link")
    assert found["machine.gpu.flops.bf16"].unit == "FLOP/s"
    assert found["schedule.micro_batches"].value == 4
    assert found["scheduler.admission"].choices == tuple(wb.Admission)
    assert found["machine"].short == "machine"
    assert "machine.name" not in found
    assert "machine.gpu.count" not in found


def test_values_are_written_as_users_write_them():
    scenario = tiny_scenario().on(machine=wb.machines["a40"])
    written = {
        "memory.kv_capacity": "70GB",
        "machine.link": "8GB/s",
        "machine.gpu.memory": "16GiB",
        "scheduler.admission": "paced",
        "scheduler.token_budget": np.int64(64),
        "memory.kv": "fp32",
    }
    changed, _ = with_fields(scenario, VSLPipe(), written)
    assert changed.memory.kv_capacity == 70e9
    assert (changed.machine.link.h2d, changed.machine.link.d2h) == (8e9, 8e9)
    assert changed.machine.gpu.memory == 16 * 2**30
    assert changed.scheduler == wb.ResourceAware(token_budget=64, admission=wb.Admission.PACED)
    assert with_field(changed, VSLPipe(), "scheduler.token_budget", None)[0].scheduler.token_budget is None
    assert with_field(scenario, VSLPipe(), "machine", "moe-lightning-s1")[0].machine == wb.machines["moe-lightning-s1"]
    assert parsed(scenario, VSLPipe(), "memory.kv_capacity", "1.5GB") == 1.5e9


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("memory.kv_capcity", 1, "give one such as 'memory.kv_capacity'"),
        ("kv_capacity", 1, "give one such as 'memory.kv_capacity'"),
        ("memory.kv_capacity", "much", "memory.kv_capacity 'much' is not a quantity"),
        ("memory.kv_capacity", None, "None is no value of memory.kv_capacity; give text or a number"),
        ("memory.kv_block", 2.5, "give a whole number"),
        ("schedule.prefetch", 1, "give False or True"),
        ("scheduler.admission", "hasty", "give 'greedy' or 'paced'"),
        ("machine", 3, "give Machine"),
        ("pipeline", "vsl", "give Pipeline or Stack"),
        ("schedule", VSLPipe, "give Schedule"),
    ],
)
def test_an_error_names_the_field_and_what_it_takes(name, value, says):
    with pytest.raises(ScenarioError) as caught:
        with_field(tiny_scenario(pipeline=STREAMED), Sequential(), name, value)
    assert says in str(caught.value)


def test_an_invalid_scenario_has_its_own_error():
    scenario = tiny_scenario(8, 4, blocks=3)
    with pytest.raises(CapacityError, match="needs a KV cache of 31 tokens"):
        with_field(scenario, VSLPipe(), "workload.output_len", 24)
    with pytest.raises(CapacityError, match="kv_block is a whole number"):
        with_field(scenario, VSLPipe(), "memory.kv_block", 0)
    with pytest.raises(WorkloadError, match="requests of a workload must be a whole number from 1 on, not 0"):
        with_field(scenario, VSLPipe(), "workload.requests", 0)
    with pytest.raises(CatalogueError, match="did you mean 'a40'"):
        with_field(scenario, VSLPipe(), "machine", "A-4o")


def test_fields_that_go_together_are_set_at_once():
    """Either of these alone does not fit."""
    scenario = tiny_scenario(8, 4, blocks=3)
    block = scenario.memory.kv_capacity / 3
    changed, _ = with_fields(scenario, VSLPipe(), {"workload.output_len": 24, "memory.kv_capacity": 8 * block})
    assert sizes(changed.workload).output_len == 24
    back, _ = with_fields(changed, VSLPipe(), {"memory.kv_capacity": 3 * block, "workload.output_len": 4})
    assert (back.kv_blocks, sizes(back.workload).output_len) == (3, 4)


def test_whole_parts_come_before_their_fields_in_any_order():
    for names in (("machine", "machine.link"), ("machine.link", "machine")):
        values = {"machine": wb.machines["moe-lightning-s1"], "machine.link": 5e9}
        changed, _ = with_fields(tiny_scenario(), VSLPipe(), {name: values[name] for name in names})
        assert (changed.machine.name, changed.machine.link.d2h) == ("moe-lightning-s1", 5e9)
    _, schedule = with_fields(tiny_scenario(), VSLPipe(), {"schedule.micro_batches": 3, "schedule": CGOPipe()})
    assert schedule == CGOPipe(micro_batches=3)
    with pytest.raises(ScenarioError, match=r"'schedule.micro_batches' is no field"):
        with_fields(tiny_scenario(), CGOPipe(), {"schedule.micro_batches": 3, "schedule": VSLPipe()})


def test_a_slower_link_is_throttled_and_tells_what_it_was():
    scenario = tiny_scenario().on(machine=wb.machines["a40"])
    slower = with_field(scenario, VSLPipe(), "machine.link", "5GB/s")[0].machine
    assert (slower.link, slower.throttled) == (wb.machines["a40"].limit(link="5GB/s").link, True)
    assert slower.sources["link.h2d"].startswith("set on purpose, from 19.5 GB: ")
    assert not with_field(scenario, VSLPipe(), "machine.link", "50GB/s")[0].machine.throttled
    assert slower.sources["gpu.memory"] == wb.machines["a40"].sources["gpu.memory"]


def test_a_schedule_of_ones_own_has_its_own_fields():
    @dataclass(frozen=True)
    class Mine(Schedule):
        """Mine.

        Attributes
        ----------
        ahead : int
            Layers to look ahead [layers].
        """

        example: ClassVar = None
        ahead: int = 1

        parts = 1

        def tasks(self, stack, step):
            return ()

    field = next(each for each in fields_of(tiny_scenario(), Mine()) if each.name == "schedule.ahead")
    assert (field.meaning, field.unit, field.value) == ("Layers to look ahead.", "layers", 1)
    assert with_field(tiny_scenario(), Mine(), "schedule.ahead", 2)[1] == Mine(2)


def test_a_scheduler_of_ones_own_may_be_no_dataclass():
    class Mine:
        token_budget = 3

        def open(self, workload, blocks, token_budget, layers):
            raise NotImplementedError

        def splits(self, longest, layers):
            return False

    names = [field.name for field in fields_of(tiny_scenario().on(scheduler=Mine()), VSLPipe())]
    assert "scheduler" in names
    assert not [name for name in names if name.startswith("scheduler.")]


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40), mean=st.integers(1, 3000))
@examples(200)
def test_scaled_lengths_have_exactly_the_mean_asked_for(lengths, mean):
    given_ = Workload.lengths(lengths, 4)
    found = resized(given_, len(lengths), mean, 4).prompt_len
    assert sizes(resized(given_, len(lengths), mean, 4)).prompt_len == mean
    if mean != sizes(given_).prompt_len:
        assert found.sum() == mean * len(lengths)
    order = np.argsort(lengths, kind="stable")
    assert (np.diff(found[order]) >= -1).all()


def test_lengths_keep_their_proportions_and_their_order():
    longer = with_field(tiny_scenario().on(workload=UNEVEN, model=WIDE), VSLPipe(), "workload.prompt_len", 800)[0]
    factor = 800 / UNEVEN.prompt_len.mean()
    assert np.abs(longer.workload.prompt_len - factor * UNEVEN.prompt_len).max() < 1
    assert (longer.workload.output_len == UNEVEN.output_len).all()


WIDE = replace(tiny_model(), max_position_embeddings=2**20)


def test_more_requests_are_the_same_ones_again():
    more = with_field(tiny_scenario().on(workload=UNEVEN, model=WIDE), VSLPipe(), "workload.requests", 120)[0].workload
    assert more.prompt_len.tolist() == [*UNEVEN.prompt_len, *UNEVEN.prompt_len, *UNEVEN.prompt_len[:20]]


def test_the_pipeline_is_a_field_too():
    changed, _ = with_field(tiny_scenario(pipeline=STREAMED), VSLPipe(), "pipeline", VSL)
    assert changed.pipeline == VSL
