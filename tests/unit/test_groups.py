"""Several GPUs or sockets as one device: what adding up their results costs, and what remote memory costs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import enough_experts, rates, scenarios, small_machine, tiny_model_of, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES
from workbench.analysis.compare import compare
from workbench.core.errors import ScenarioError
from workbench.hardware import Interconnect, Machine, machines, value_names
from workbench.perfmodels import bound
from workbench.perfmodels.ktransformers.hybrid_speed import Numa, numa_bandwidth
from workbench.pipeline import gpu
from workbench.scenario import Scenario
from workbench.schedules import Schedule, Sequential
from workbench.serving import prepare
from workbench.simulate import Detail, simulate
from workbench.stages import (
    Op,
    Rows,
    Work,
    attention,
    combine,
    experts,
    moe,
    out_proj,
    qkv,
    reduce_scatter_seconds,
    shared_experts,
)

OVER = Interconnect(1e7, 1e-5)
WIDTH = 64 * 2  # bytes of a row of the tiny model


def group(gpus: int = 1, sockets: int = 1, **given: float) -> Machine:
    machine = small_machine(**given)
    return replace(machine, gpu=machine.gpu.times(gpus), cpu=machine.cpu.times(sockets))


def scenario_of(pipeline: str, machine: Machine, kind: str = "plain") -> Scenario:
    model = enough_experts(tiny_model_of(kind), PIPELINES[pipeline])
    return tiny_scenario(pipeline=PIPELINES[pipeline], machine=machine, model=model)


def layer_seconds(scenario: Scenario, rows: Rows) -> dict[str, float]:
    """Of each lane's segments in one layer."""
    prepared, found = prepare(scenario, Sequential()), {"gpu": 0.0, "cpu": 0.0}
    layer = prepared.layers - 1
    for node in prepared.lowering.stack.at(layer):
        if node is not None and node.lane in found:
            found[node.lane] += prepared.cost.node(node, rows, layer=layer)
    return found


def test_a_ring_of_four_sends_three_quarters_in_three_messages():
    over = Interconnect(1e9, 1e-6)
    assert reduce_scatter_seconds(8e6, 4, over) == pytest.approx(3 * (2e-3 + 1e-6))
    assert reduce_scatter_seconds(0.0, 4, over) == 0


@given(st.integers(2, 8), st.integers(0, 50), st.integers(0, 50))
def test_gpus_make_two_all_reduces_per_layer(n, prefill, decode):
    """Each of tokens x hidden x bytes x 2 (n - 1) / n, and 2 (n - 1) messages."""
    rows = Rows(prefill=prefill, decode=decode, pairs=prefill, context=9 * decode, emits=decode)
    without = layer_seconds(scenario_of("all_gpu", group(gpus=n)), rows)
    joined = layer_seconds(scenario_of("all_gpu", group(gpus=n).joined(gpus=OVER)), rows)
    each = 2 * (n - 1) * (rows.tokens * WIDTH / n / OVER.rate + OVER.latency) if rows.tokens else 0.0
    assert joined["gpu"] - without["gpu"] == pytest.approx(2 * each)
    assert joined["cpu"] == without["cpu"] == 0


@pytest.mark.parametrize(("kind", "sums"), [("plain", 1), ("shared", 2)])
def test_experts_on_the_host_are_added_up_there_and_shared_ones_on_the_gpus(kind, sums):
    """Two sockets: one reduce-scatter. Two GPUs: behind the attention, and where there are shared experts."""
    rows = Rows(decode=5, context=50, emits=5)
    machine = group(gpus=2, sockets=2)
    without = layer_seconds(scenario_of("ktransformers", machine, kind), rows)
    joined = layer_seconds(scenario_of("ktransformers", machine.joined(gpus=OVER, sockets=OVER), kind), rows)
    half = 5 * WIDTH / 2 / OVER.rate + OVER.latency
    assert joined["cpu"] - without["cpu"] == pytest.approx(half)
    assert joined["gpu"] - without["gpu"] == pytest.approx(sums * 2 * half)


@pytest.mark.parametrize(("in_parts", "sums"), [(True, 3), (False, 2)])
def test_a_users_operation_in_parts_is_added_up_behind_it(in_parts, sums):
    """Beside those behind the attention and the experts, three or two all-reduces of four GPUs."""
    mine = Op(
        "mine",
        ("x",),
        ("x",),
        work=lambda rows, model, precision: Work(1e4 * rows.tokens),
        tensors=lambda model: {"mine": (model.hidden_size, model.hidden_size)},
        in_parts=in_parts,
    )
    pipeline, rows = gpu(qkv, attention, out_proj, mine, moe), Rows(decode=5, context=50, emits=5)
    alone, joined = (
        layer_seconds(tiny_scenario(pipeline=pipeline, machine=machine), rows)
        for machine in (group(gpus=4), group(gpus=4).joined(gpus=OVER))
    )
    each = 2 * 3 * (5 * WIDTH / 4 / OVER.rate + OVER.latency)
    assert joined["gpu"] - alone["gpu"] == pytest.approx(sums * each)


def test_one_sum_does_for_routed_and_shared_experts():
    scenario = scenario_of("all_gpu", group(gpus=2).joined(gpus=OVER), "shared")
    cost, rows = prepare(scenario, Sequential()).cost, Rows(decode=1)
    adding = {stage.op.name for stage in scenario.layer.stages if cost.adding_up(stage, rows)}
    assert adding == {out_proj.name, combine.name}
    assert {experts.name, shared_experts.name} <= {stage.op.name for stage in scenario.layer.stages}


@examples(60)
@given(
    scenarios(),
    st.sampled_from(Detail),
    st.integers(2, 4),
    rates(1e4, 1e10),
    st.sampled_from([0.0, 1e-6, 1e-3]),
)
def test_the_bound_stays_one_and_the_sums_only_cost(case: tuple[Scenario, Schedule], detail, n, rate, latency):
    """Law 3 for groups of GPUs and sockets."""
    scenario, schedule = case
    machine, over = scenario.machine, Interconnect(rate, latency)
    lossless = replace(machine, gpu=machine.gpu.times(n), cpu=machine.cpu.times(n))
    free, paid = (scenario.on(machine=made) for made in (lossless, lossless.joined(gpus=over, sockets=over)))
    least, simulated = bound(paid, schedule), simulate(paid, schedule, detail=detail)
    assert least.seconds <= simulated.seconds * (1 + 1e-9)
    assert bound(free, schedule).seconds <= least.seconds * (1 + 1e-6)  # to which the bound is searched


def test_what_the_sums_take_is_told():
    machine = group(gpus=4, sockets=2, h2d=1e12, d2h=1e12, dram=1e12, cpu=1e12)
    scenario = scenario_of("all_gpu", machine.joined(gpus=OVER))
    least, played = bound(scenario, Sequential()), simulate(scenario, Sequential())
    share = least.limits["gpu all-reduce"] / least.limits["gpu compute"]
    assert 0 < share < 1
    assert "cpu reduce-scatter" not in least.limits
    assert least.facts["GPUs"] == played.facts["GPUs"] == "4, joined by 10 MB/s and 10 µs a message"
    told = compare([least, played]).explanations()
    assert told[1] == f"The GPU spends {100 * share:.0f} % of its least time on the all-reduce between its parts."
    lossless = scenario.on(machine=machine)
    assert not {"GPUs", "sockets"} & set(bound(lossless, Sequential()).facts)
    assert not any("all-reduce" in sentence for sentence in compare([bound(lossless, Sequential())]).explanations())


@given(st.integers(1, 8), rates(1e9, 1e12), st.floats(0.01, 0.99))
def test_memory_anywhere_is_read_as_the_papers_model_has_it(n, own, share):
    device = replace(small_machine().cpu, bandwidth=own).times(n)
    expected = numa_bandwidth(Numa.OBLIVIOUS, sockets=n, local=own, remote=share * own, top_k=1)
    assert device.spread(share * own).bandwidth == pytest.approx(float(expected))
    assert device.spread(device.bandwidth / n).bandwidth == pytest.approx(device.bandwidth)


def test_the_sockets_of_ktransformers_host_gain_by_cutting_every_expert():
    """220 GB/s within a socket and 125 GB/s across (section 6.1); up to 1.63 in decode is printed."""
    host = machines["ktransformers-a100"]
    anywhere, cut = host.spread("125GB/s"), host.joined(sockets="125GB/s")
    assert host.cpu.bandwidth / anywhere.cpu.bandwidth == pytest.approx(1.38, abs=0.005)
    assert anywhere.sources["cpu.bandwidth"].startswith("spread over the sockets, 125 GB/s from one to another: KTr")
    assert cut.cpu.bandwidth == host.cpu.bandwidth
    assert list(cut.sources) == value_names(cut)
    assert cut.sources["cpu.between"] == "given"


def test_a_group_is_saved_and_one_alone_is_refused(tmp_path):
    machine = group(gpus=2, sockets=2).joined(gpus=OVER, sockets="125GB/s")
    assert Machine.load(machine.save(tmp_path / "m.json")) == machine
    assert machine.gpu.name == "2 x g over 10 MB/s"
    with pytest.raises(ScenarioError, match=r"^g is one, so nothing joins it.*times\(count\)"):
        group().joined(gpus=OVER)
    with pytest.raises(ScenarioError, match=r"cannot read remote=2 GB/s; give at most its own 1 GB/s"):
        group(sockets=2).spread("2GB/s")
    with pytest.raises(ScenarioError, match="latency=-1"):
        Interconnect(1e9, -1)
