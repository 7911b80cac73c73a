"""Sweeps: their grid, their readings, what they keep on disk, and their data set with its best points and files."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import OWN, small_machine, tiny_scenario
from tests.examples import examples
from tests.systems import STREAMED, VSL
from workbench.analysis.sweeps import found, reading, running
from workbench.analysis.sweeps.grid import make_grid
from workbench.analysis.sweeps.keys import Keys
from workbench.analysis.sweeps.reading import VARIABLES, Base, Row, Sent, gap_percentile, gpu_price, read_chunk
from workbench.analysis.sweeps.store import Store
from workbench.core.errors import ResultError, ScenarioError
from workbench.core.latency import Latencies
from workbench.core.result import Result, Source
from workbench.pipeline import gpu
from workbench.plots import plot_sweep
from workbench.scenario.fields import with_fields
from workbench.schedules import CGOPipe, Sequential, VSLPipe
from workbench.simulate import Detail
from workbench.stages import Op, attention, moe, out_proj, qkv

SCENARIO = tiny_scenario([8] * 6, [4] * 6)
BLOCK = SCENARIO.memory.kv_block * SCENARIO.model.kv_bytes_per_token("bf16")
SCHEDULES = [Sequential(), VSLPipe()]
KV = "memory.kv_capacity"


@pytest.fixture
def store(tmp_path):
    return tmp_path / "readings.sqlite"


@pytest.fixture
def swept(store):
    return wb.sweep(SCENARIO, over={KV: [2 * BLOCK, 3 * BLOCK, 9 * BLOCK], "schedule": SCHEDULES}, store=store)


def plain(sweep):
    """The data set without its date."""
    return sweep.dataset.drop_attrs()


# --------------------------------------------------------------------------------------------------------- readings


def test_every_point_is_what_the_readers_say(swept):
    assert dict(swept.dataset.sizes) == {"kv_capacity": 3, "schedule": 2}
    for point in swept.points:
        if point.problem:
            continue
        named = {schedule.name: schedule for schedule in SCHEDULES}
        values = {KV: point.labels["kv_capacity"], "schedule": named[point.labels["schedule"]]}
        scenario, schedule = with_fields(SCENARIO, VSLPipe(), values)
        result = wb.simulate(scenario, schedule)
        numbers = {
            "gen_tok_s": result.gen_tok_s,
            "proc_tok_s": result.proc_tok_s,
            "seconds": result.seconds,
            "ttft": result.ttft,
            "tbt": result.tbt,
            "preemptions": result.preemptions,
            "bound_gen_tok_s": wb.bound(scenario, schedule).gen_tok_s,
            "gpu_memory_needed": wb.fits(scenario, schedule).gpu.total,
            "host_memory_needed": wb.fits(scenario, schedule).host.total,
        }
        at = swept.dataset.sel(point.labels)
        assert {name: float(at[name]) for name in numbers} == numbers
        assert {name: point.numbers[name] for name in numbers} == numbers
        assert (point.scenario, point.schedule) == (scenario, schedule)


def test_what_cannot_be_is_set_aside_with_its_reason_and_the_others_stand(swept):
    aside = swept.dataset.sel(kv_capacity=2 * BLOCK)
    assert np.isnan(aside.gen_tok_s).all()
    assert all("needs a KV cache of 11 tokens" in text for text in aside.problem.values)
    assert (swept.dataset.sel(kv_capacity=[3 * BLOCK, 9 * BLOCK]).problem == "").all()
    assert len(swept.problems) == 2
    assert "2 of 6 points set aside: request 0 of 'lengths' needs" in str(swept)


def test_a_schedule_that_does_not_take_the_pipeline_spoils_nothing(store):
    sweep = wb.sweep(tiny_scenario(pipeline=STREAMED), over={"schedule": [VSLPipe(), Sequential()]}, store=store)
    assert "VSLPipe does not take this pipeline" in sweep.problems[0].problem
    assert sweep.best().labels == {"schedule": "Sequential"}


def test_memory_is_told_also_where_it_does_not_fit(store):
    sweep = wb.sweep(SCENARIO, VSLPipe(), over={"machine.gpu.memory": ["1kB", "1GB"]}, store=store)
    small, large = sweep.dataset.gpu_memory_needed.values
    assert small == large > 1000
    assert [point.labels["gpu_memory"] for point in sweep.problems] == [1e3]
    assert "GPU memory" in sweep.problems[0].problem


def test_the_bound_is_never_below_the_simulation(store):
    sweep = wb.sweep(
        SCENARIO,
        over={KV: [3 * BLOCK, 5 * BLOCK, 30 * BLOCK], "machine.link": ["1MB/s", "1GB/s"], "schedule": SCHEDULES},
        store=store,
    )
    assert (sweep.dataset.bound_gen_tok_s >= sweep.dataset.gen_tok_s * (1 - 1e-9)).all()


def test_other_readers_and_their_settings_are_told(store):
    bounds = wb.sweep(SCENARIO, VSLPipe(), over={KV: [9 * BLOCK]}, read=wb.bound, store=store)
    assert bounds.dataset.attrs["source"] == "bound"
    assert (bounds.dataset.gen_tok_s == bounds.dataset.bound_gen_tok_s).all()
    read = partial(wb.simulate, detail=Detail.TASK)
    tasks = wb.sweep(SCENARIO, VSLPipe(), over={KV: [9 * BLOCK]}, read=read, store=store)
    assert "Detail.TASK" in tasks.dataset.attrs["reader"]
    assert len(tasks.best().result.timeline.lanes) > 1


def test_one_point_that_fails_unexpectedly_does_not_end_the_sweep(store):
    def read(scenario, schedule):
        if len(scenario.workload) == 2:
            raise ZeroDivisionError("by nothing")
        return wb.bound(scenario, schedule)

    sweep = wb.sweep(SCENARIO, VSLPipe(), over={"workload.requests": [1, 2, 3]}, read=read, store=store)
    assert [point.problem for point in sweep.points] == ["", "ZeroDivisionError: by nothing", ""]


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 50)), min_size=1, max_size=20), st.floats(0.01, 1))
@examples(100)
def test_the_percentile_of_gaps_is_that_of_all_of_them(gaps, share):
    latencies = Latencies(gap=tuple(gap for gap, _ in gaps), gap_count=tuple(count for _, count in gaps))
    found_ = gap_percentile(latencies, share)
    assert np.mean(latencies.tbt <= found_) >= share - 1e-9
    assert np.mean(latencies.tbt < found_) < share


def test_the_price_is_that_of_all_gpus_or_unknown(monkeypatch):
    def of(name):
        return gpu_price(replace(small_machine(), gpu=replace(small_machine().gpu, name=name)))

    known = wb.Processor("mine", wb.ProcessorKind.GPU, bandwidth=1e9, price=1000.0)
    monkeypatch.setattr(reading, "processors", {"mine": known})
    assert [of("mine"), of("2 x mine"), of("4 x mine over 64 GB/s"), of("mine, its GPU")] == [1000, 2000, 4000, 1000]
    assert math.isnan(of("yours"))


def test_the_catalogue_has_prices_of_machines_that_are_put_together():
    machine = wb.machine("h100-sxm", "xeon-8380", memory="256GB", gpus=2)
    assert gpu_price(machine) == 2 * wb.processors["h100-sxm"].price > 10_000


# ------------------------------------------------------------------------------------------------------------- grid


def test_axes_have_names_units_and_labels():
    over = {
        KV: ["1MB", 2e6],
        "machine.gpu.memory": ["1GB"],
        "schedule": {"plain": Sequential(), "lens": VSLPipe()},
        "scheduler": [wb.ResourceAware(), wb.StaticBatching(micro_batches=2)],
        "scheduler.token_budget": [None, 64],
        "pipeline": {"vsl": VSL, "streamed": STREAMED},
    }
    grid = make_grid(SCENARIO, VSLPipe(), over, zipped=False)
    assert grid.dims == ("kv_capacity", "gpu_memory", "schedule", "scheduler", "token_budget", "pipeline")
    labels = [axis.labels for axis in grid.axes]
    assert labels[0] == (1e6, 2e6)
    assert labels[2:] == [
        ("plain", "lens"),
        ("ResourceAware", "StaticBatching(micro_batches=2)"),
        ("None", "64"),
        ("vsl", "streamed"),
    ]
    assert [axis.unit for axis in grid.axes[:2]] == ["B", "B"]
    assert grid.shape == (2, 1, 2, 2, 2, 2)
    assert len(set(grid.places())) == 32


def test_names_that_would_be_alike_are_told_apart():
    over = {"schedule.micro_batches": [1, 2], "scheduler.micro_batches": [1, 2]}
    scenario = SCENARIO.on(scheduler=wb.StaticBatching())
    assert make_grid(scenario, Sequential(), over, zipped=False).dims == (
        "schedule_micro_batches",
        "scheduler_micro_batches",
    )


def test_parts_of_one_name_are_numbered():
    machines = [SCENARIO.machine, SCENARIO.machine.limit(link="1kB/s")]
    grid = make_grid(SCENARIO, VSLPipe(), {"machine": machines}, zipped=False)
    assert grid.axes[0].labels == ("small", "small (2)")


def test_fields_of_swept_parts_are_swept_with_them(store):
    over = {"schedule": [CGOPipe(), VSLPipe()], "schedule.micro_batches": [2, 3]}
    sweep = wb.sweep(SCENARIO, over=over, store=store)
    assert not sweep.dataset.sel(schedule="CGOPipe").problem.values.any()
    assert all("is no field" in text for text in sweep.dataset.sel(schedule="VSLPipe").problem.values)


def test_zipped_fields_go_along_together(store):
    over = {KV: [3 * BLOCK, 9 * BLOCK], "machine.link": ["1MB/s", "1GB/s"]}
    sweep = wb.sweep(SCENARIO, VSLPipe(), over=over, zipped=True, store=store)
    assert dict(sweep.dataset.sizes) == {"point": 2}
    every = wb.sweep(SCENARIO, VSLPipe(), over=over, store=store)
    assert sweep.dataset.gen_tok_s.values.tolist() == np.diag(every.dataset.gen_tok_s).tolist()
    with pytest.raises(ScenarioError, match="go along together, but there are 2 of memory"):
        wb.sweep(SCENARIO, VSLPipe(), over={**over, "machine.link": ["1MB/s"]}, zipped=True, store=store)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({}, "a sweep goes over fields"),
        ([KV], "a sweep goes over fields"),
        ({"memory.kv_capcity": [1]}, "give one such as 'memory.kv_capacity'"),
        ({KV: []}, "needs at least one value"),
        ({KV: ["1MB", "much"]}, "'much' is not a quantity"),
        ({"memory.kv_block": [16, 2.5]}, "give a whole number"),
        ({KV: ["1MB", 1e6]}, "twice in 'memory.kv_capacity'"),
        ({"schedule": ["VSLPipe"]}, "a sweep needs a schedule"),
        ({"schedule": VSLPipe}, "a sweep needs a schedule"),
    ],
)
def test_a_mistake_is_told_before_the_first_reading(over, says, store, monkeypatch):
    monkeypatch.setattr(running, "read_chunk", None)
    schedule = None if isinstance(over, dict) and "schedule" in over else VSLPipe()
    with pytest.raises(ScenarioError, match=says):
        wb.sweep(SCENARIO, schedule, over=over, store=store)


def test_a_sweep_needs_a_schedule_and_a_reader():
    with pytest.raises(ScenarioError, match="a sweep needs a schedule"):
        wb.sweep(SCENARIO, over={KV: ["1MB"]})
    with pytest.raises(ScenarioError, match="a sweep reads with a function"):
        wb.sweep(SCENARIO, VSLPipe(), over={KV: ["1MB"]}, read="simulate")


# ---------------------------------------------------------------------------------------------------------- on disk


def count_readings(monkeypatch):
    """The points that are read from here on."""
    seen = []
    read = running.read_chunk

    def counted(base, chunk):
        seen.extend(chunk)
        return read(base, chunk)

    monkeypatch.setattr(running, "read_chunk", counted)
    return seen


def test_a_second_sweep_reads_only_what_is_new(swept, store, monkeypatch):
    seen = count_readings(monkeypatch)
    over = {KV: [3 * BLOCK, 9 * BLOCK, 12 * BLOCK], "schedule": SCHEDULES}
    more = wb.sweep(SCENARIO, over=over, store=store)
    assert [values[KV] for values in seen] == [12 * BLOCK] * 2
    both = [3 * BLOCK, 9 * BLOCK]
    assert plain(swept).sel(kv_capacity=both).identical(plain(more).sel(kv_capacity=both))
    wb.sweep(SCENARIO, over=over, store=store, refresh=True)
    assert len(seen) == 8


def test_the_same_scenario_has_the_same_key_from_wherever_it_is_reached():
    base = Base(SCENARIO, VSLPipe(), wb.simulate)
    moved = Base(with_fields(SCENARIO, VSLPipe(), {KV: 9 * BLOCK, "machine.link": 5e6})[0], CGOPipe(), wb.simulate)
    values = {KV: 7 * BLOCK, "machine.link": 9e6, "schedule": Sequential()}
    assert Keys(base).of(values) == Keys(moved).of(values) is not None


def test_every_field_of_a_point_changes_its_key():
    base = Base(SCENARIO, Sequential(), wb.simulate)
    changes = [
        {},
        {KV: 9 * BLOCK},
        {"machine.link": 1e6},
        {"machine.gpu.flops.bf16": 1e9},
        {"workload.output_len": 3},
        {"workload.requests": 3},
        {"scheduler.token_budget": 9},
        {"schedule.prefetch": True},
        {"schedule": VSLPipe()},
        {"pipeline": gpu(qkv, attention, out_proj, moe)},
        {"routing": wb.Frequencies(((1, 2, 3, 4),) * 4)},
    ]
    keys = [Keys(base).of(values) for values in changes]
    keys.append(Keys(Base(SCENARIO, Sequential(), wb.bound)).of({}))
    keys.append(Keys(Base(SCENARIO, Sequential(), partial(wb.simulate, detail=Detail.TASK))).of({}))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_is_of_ones_own_has_no_key_and_is_read_each_time(store, monkeypatch):
    own = gpu(OWN, qkv, attention, out_proj, moe)
    assert Keys(Base(SCENARIO.on(pipeline=own), Sequential(), wb.simulate)).of({}) is None
    assert Keys(Base(SCENARIO, Sequential(), lambda scenario, schedule: None)).of({}) is None
    seen = count_readings(monkeypatch)
    for _ in range(2):
        sweep = wb.sweep(SCENARIO.on(pipeline=own), Sequential(), over={KV: [9 * BLOCK]}, store=store)
        assert not sweep.problems
    assert len(seen) == 2


def test_a_file_that_cannot_be_used_is_told_and_nothing_is_lost(tmp_path):
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    with pytest.warns(RuntimeWarning, match="broken.sqlite cannot be used .* mend or remove it, or give another file"):
        sweep = wb.sweep(SCENARIO, VSLPipe(), over={KV: [9 * BLOCK]}, store=broken)
    assert not sweep.problems


def test_two_sweeps_may_write_to_one_file_at_once(store):
    one, other = Store(store), Store(store)
    for number in range(20):
        one.add([(f"a{number}", Row({"x": 1.0}))])
        other.add([(f"b{number}", Row({"x": math.inf}, "why"))])
    rows = one.found([f"{letter}{number}" for letter in "ab" for number in range(20)])
    assert len(rows) == 40
    assert rows["b3"] == Row({"x": math.inf}, "why")


# ------------------------------------------------------------------------------------------------ best, fronts, files


def test_the_best_point_is_ready_to_be_read_again(swept):
    best = swept.best()
    assert best.numbers["gen_tok_s"] == float(swept.dataset.gen_tok_s.max())
    assert best.result.gen_tok_s == best.numbers["gen_tok_s"]
    assert wb.simulate(best.scenario, best.schedule).gen_tok_s == best.numbers["gen_tok_s"]
    assert swept.best("seconds").numbers["seconds"] == float(swept.dataset.seconds.min())
    with pytest.raises(ScenarioError, match="a sweep has no 'speed'; it has gen_tok_s"):
        swept.best("speed")
    with pytest.raises(ScenarioError, match="none has gpu_price; they have gen_tok_s"):
        swept.best("gpu_price")


def test_without_a_reading_there_is_no_best(store):
    sweep = wb.sweep(SCENARIO, VSLPipe(), over={KV: [BLOCK]}, store=store)
    with pytest.raises(ScenarioError, match="no point of the sweep can be chosen: request 0"):
        sweep.best()
    assert "1 of 1 points set aside" in str(sweep)


def fake(numbers):
    """A sweep of such numbers."""
    base = Base(SCENARIO, VSLPipe(), wb.simulate)
    grid = make_grid(SCENARIO, VSLPipe(), {"workload.requests": range(1, len(numbers) + 1)}, zipped=False)
    rows = {(place,): Row(dict(zip(("gen_tok_s", "ttft"), pair, strict=True))) for place, pair in enumerate(numbers)}
    return found.Sweep.of(base, grid, rows)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30))
@examples(200)
def test_a_front_has_all_points_that_no_other_beats_and_only_these(pairs):
    front = fake(pairs).pareto("gen_tok_s", "ttft").points
    kept = [(p.numbers["gen_tok_s"], p.numbers["ttft"]) for p in front]
    beaten = [p for p in pairs if any(o != p and o[0] >= p[0] and o[1] <= p[1] for o in pairs)]
    assert sorted(kept) == sorted(p for p in pairs if p not in beaten)
    assert kept == sorted(kept, key=lambda pair: -pair[0])


def test_a_front_needs_two_variables():
    with pytest.raises(ScenarioError, match="a front needs two variables"):
        fake([(1, 2)]).pareto("gen_tok_s")


def test_every_variable_says_whether_more_is_better():
    assert {name for name, each in VARIABLES.items() if each.more} == {"gen_tok_s", "proc_tok_s", "bound_gen_tok_s"}


def test_the_data_set_has_units_and_its_origin(swept):
    data = swept.dataset
    assert data.kv_capacity.attrs["units"] == "B"
    assert data.kv_capacity.attrs["field"] == KV
    assert data.ttft.attrs == {"units": "s", "long_name": "mean time to the first token", "better": "less"}
    assert data.attrs["source"] == "simulated"
    assert data.attrs["machine"] == "small"
    assert "numpy" in json.loads(data.attrs["versions"])


def test_a_table_has_one_row_per_point(swept):
    table = swept.to_pandas()
    assert len(table) == 6
    assert list(table.columns[:2]) == ["kv_capacity", "schedule"]
    assert (table.problem != "").sum() == table.gen_tok_s.isna().sum() == 2


def test_a_saved_sweep_comes_back(store, tmp_path):
    over = {
        KV: [2 * BLOCK, 9 * BLOCK],
        "schedule": SCHEDULES,
        "machine": [SCENARIO.machine, wb.machines["a40"]],
        "scheduler.admission": ["greedy", "paced"],
        "pipeline": {"vsl": VSL, "gpu": gpu(qkv, attention, out_proj, moe)},
    }
    sweep = wb.sweep(SCENARIO, over=over, store=store)
    again = wb.Sweep.load(sweep.save(tmp_path / "sweep.nc"))
    assert plain(again).equals(plain(sweep))
    assert again.dataset.attrs["date"] == sweep.dataset.attrs["date"]
    assert again.dataset.kv_capacity.attrs == sweep.dataset.kv_capacity.attrs
    for mine, theirs in zip(sweep.points, again.points, strict=True):
        assert (mine.labels, mine.numbers, mine.problem) == (theirs.labels, theirs.numbers, theirs.problem)
        if not mine.problem:
            assert (mine.schedule, mine.scenario.memory, mine.scenario.machine) == (
                theirs.schedule,
                theirs.scenario.memory,
                theirs.scenario.machine,
            )
    assert again.best().result.gen_tok_s == sweep.best().result.gen_tok_s


@pytest.mark.parametrize("contents", [None, b"", b"CDF\x01", b"nothing"])
def test_a_file_that_is_no_sweep_is_refused(contents, tmp_path):
    path = tmp_path / "file.nc"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ScenarioError, match=r"is no sweep|is not there"):
        wb.Sweep.load(path)


def test_a_sweep_of_ones_own_operations_is_not_saved(store, tmp_path):
    mine = Op("mine", ("x",), ("x",), work=OWN.work)
    own = SCENARIO.on(pipeline=gpu(mine, qkv, attention, out_proj, moe))
    sweep = wb.sweep(own, Sequential(), over={KV: [9 * BLOCK]}, store=store)
    with pytest.raises(ScenarioError, match="is an operation of your own"):
        sweep.save(tmp_path / "sweep.nc")
    assert not (tmp_path / "sweep.nc").exists()


def test_a_measured_result_is_kept_and_comes_back_as_recorded(store, monkeypatch):
    """It cannot be read again as it was."""
    calls = []

    def run(scenario, schedule):
        calls.append(schedule)
        return Result(Source.MEASURED, schedule.name, "tiny", "here", float(len(calls)), 12, 30, tokens=((1, 2),))

    run.__module__, run.__qualname__ = "workbench.engine.engine", "run"
    for _ in range(2):
        sweep = wb.sweep(SCENARIO, VSLPipe(), over={KV: [9 * BLOCK, 12 * BLOCK]}, read=run, store=store)
        assert [point.result.seconds for point in sweep.points] == [1.0, 2.0]
        assert {point.result.source for point in sweep.points} == {Source.RECORDED}
        assert sweep.points[0].result.tokens == ((1, 2),)
    assert len(calls) == 2
    assert sweep.dataset.attrs["source"] == "measured"


def test_a_run_takes_its_computer_as_it_is(store):
    def run(scenario, schedule):
        return Result(Source.MEASURED, schedule.name, "tiny", "here", 1.0, 12, 30)

    run.__module__, run.__qualname__ = "workbench.engine.engine", "run"
    over = {"machine.link": ["1MB/s", "10GB/s"], "machine.cpu.bandwidth": [SCENARIO.machine.cpu.bandwidth, 1e12]}
    sweep = wb.sweep(SCENARIO, VSLPipe(), over=over, read=run, store=store)
    problems = [point.problem for point in sweep.points]
    assert problems[0] == ""
    assert "of its fields only machine.gpu.memory and machine.link can be lowered" in problems[1]
    assert "would raise it" in problems[2]


def test_a_result_that_is_none_is_refused():
    with pytest.raises(ResultError, match="this point is no result"):
        Result.from_dict({"format": 1}, "this point")


# --------------------------------------------------------------------------------------------------------- pictures


def lines(ax):
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def test_one_numeric_field_makes_lines_with_the_bound(swept):
    (ax,) = swept.plot()
    found_ = lines(ax)
    assert set(found_) == {"Sequential", "VSLPipe", "bound", "set aside", "best"}
    assert np.array_equal(
        found_["VSLPipe"].get_ydata(), swept.dataset.gen_tok_s.sel(schedule="VSLPipe"), equal_nan=True
    )
    assert ax.get_xlabel() == "KV capacity"
    assert ax.get_ylabel() == "output tokens per second, simulated"
    crosses = [line for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert {tuple(line.get_xdata()) for line in crosses} == {(2 * BLOCK,)}


def test_two_numeric_fields_make_a_heat_map_with_hatched_refusals(store):
    over = {KV: [2 * BLOCK, 3 * BLOCK, 9 * BLOCK], "machine.link": ["1MB/s", "8MB/s"]}
    sweep = wb.sweep(SCENARIO, VSLPipe(), over=over, store=store)
    (ax,) = sweep.plot()
    (mesh,) = ax.collections
    assert np.array_equal(mesh.get_array().filled(np.nan), sweep.dataset.gen_tok_s.values.T, equal_nan=True)
    (star,) = (line for line in ax.lines if line.get_marker() == "*")
    row, column = int(star.get_ydata()[0]), int(star.get_xdata()[0])
    assert mesh.get_array()[row, column] == sweep.best().numbers["gen_tok_s"]
    hatched = [patch.get_xy() for patch in ax.patches if patch.get_hatch()]
    assert hatched == [(0, 0), (0, 1)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1 MB/s", "8 MB/s"]
    (turned,) = sweep.plot(x="link", y="kv_capacity")
    assert turned.get_xlabel() == "link"


def test_three_and_four_fields_make_small_multiples(store):
    over = {
        KV: [3 * BLOCK, 9 * BLOCK],
        "schedule": SCHEDULES,
        "scheduler": [wb.ResourceAware(), wb.StaticBatching(), wb.ContinuousBatching()],
    }
    sweep = wb.sweep(SCENARIO, over=over, store=store)
    axes = sweep.plot(value="ttft")
    assert [ax.get_title() for ax in axes] == [f"scheduler {name}" for name in sweep.dataset.scheduler.values]
    for ax, name in zip(axes, sweep.dataset.scheduler.values, strict=True):
        drawn = lines(ax)["VSLPipe"].get_ydata()
        assert drawn.tolist() == sweep.dataset.ttft.sel(scheduler=name, schedule="VSLPipe").values.tolist()
        assert ax.get_ylim()[1] >= float(sweep.dataset.ttft.max())
    heat = wb.sweep(SCENARIO, over={**over, "machine.link": ["1MB/s", "8MB/s"]}, store=store).plot()
    assert len(heat) == 6
    assert [ax.get_title() for ax in heat[:3]] == [
        "schedule Sequential\nscheduler ResourceAware",
        "schedule VSLPipe\nscheduler ResourceAware",
        "schedule Sequential\nscheduler StaticBatching",
    ]
    with pytest.raises(ScenarioError, match="ax takes one picture"):
        sweep.plot(ax=axes[0])
    five = wb.sweep(
        SCENARIO, over={**over, "machine.link": ["1MB/s", "8MB/s"], "workload.requests": [1, 2]}, store=store
    )
    with pytest.raises(ScenarioError, match="takes two axes of small multiples"):
        five.plot()
    assert len(plot_sweep(five.dataset.isel(requests=[0]))) == 6


def test_a_front_is_drawn_over_all_points(swept):
    ax = swept.pareto("gen_tok_s", "ttft").plot()
    assert len(ax.collections[0].get_offsets()) == 4
    assert ax.get_ylabel() == "mean time to the first token [s]"


def test_an_axis_that_is_not_there_is_told(swept):
    with pytest.raises(ScenarioError, match="the sweep has no axis 'link'; it has kv_capacity, schedule"):
        swept.plot(x="link")


def test_a_process_reads_all_chunks_of_a_sweep_with_the_base_that_came_first():
    seen = list[wb.Scenario]()
    base = Base(tiny_scenario(), VSLPipe(), lambda scenario, _: seen.append(scenario) or wb.bound(scenario, VSLPipe()))
    again = replace(base, scenario=tiny_scenario())
    for each in (Sent("one", base), Sent("one", again), Sent("two", again)):
        read_chunk(each, [{}])
    assert [scenario is base.scenario for scenario in seen] == [True, True, False]
