"""KTransformers' deferral as tasks on lanes: a layer takes T(D) = max(R, A + max(S, x + (k - D) R / k))."""

import pytest

from tests.papers.test_ktransformers import PROFILE
from workbench.hardware import machines
from workbench.perfmodels import ktransformers as kt
from workbench.perfmodels.ktransformers.hybrid_speed import decode_speed, deferred_experts
from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.pipeline.stack_graph import stack_graph
from workbench.reproductions.ktransformers import in_bytes, machine, played_machine
from workbench.reproductions.rows import published
from workbench.scenario import Memory, Scenario
from workbench.scheduler.continuous import ContinuousBatching
from workbench.schedules import Fiddler, KTransformers, Schedule, Step
from workbench.schedules.plan import Task, lay_out
from workbench.simulate import simulate
from workbench.stages import attention, combine, experts, out_proj, qkv, route, shared_experts
from workbench.workload import Workload

TOP_K = 8


def layer(deferred: int) -> Pipeline:
    beside = gpu(shared_experts) | offload >> cpu(experts, defer=deferred) >> load
    return gpu(qkv, attention, out_proj, route) >> beside >> gpu(combine)


def seconds(node: Node, deferred: int) -> float:
    """Shares of a layer without deferral; submission and waiting are the two transfers."""
    if node.kind is NodeKind.DEFERRED:
        return PROFILE.routed * deferred / TOP_K
    if node.kind is NodeKind.MOVE:
        return PROFILE.sync / 2
    ops = {stage.op: stage.defer for stage in node.stages}
    if experts in ops:
        return PROFILE.routed * (TOP_K - ops[experts]) / TOP_K
    return PROFILE.attention if qkv in ops else PROFILE.shared if shared_experts in ops else 0.0


def play(schedule: Schedule, layers: int, deferred: int) -> tuple[float, dict[str, float]]:
    """Time of one token, and busy time of each lane."""
    tasks: tuple[Task, ...] = schedule.tasks(stack_graph(layer(deferred), layers), Step.MIDDLE)
    lengths = [seconds(task.node, deferred) for task in tasks]
    busy = dict.fromkeys(("gpu", "cpu", "d2h", "h2d"), 0.0)
    for task, length in zip(tasks, lengths, strict=True):
        busy[task.node.lane] += length
    return max(lay_out(tasks, lengths)[1]), busy


@pytest.mark.parametrize("deferred", range(TOP_K))
def test_a_layer_takes_what_the_formula_says(deferred):
    deep, shallow = (play(KTransformers(), layers, deferred)[0] for layers in (30, 20))
    assert (deep - shallow) / 10 == pytest.approx(float(kt.layer_time(PROFILE, deferred, top_k=TOP_K)))


@pytest.mark.parametrize(("deferred", "gain"), [(2, 0.185), (3, 0.26), (4, 0.26)])
def test_gains_of_the_paper(deferred, gain):
    deep, shallow = (play(KTransformers(), layers, deferred)[0] for layers in (30, 20))
    assert 1 - (deep - shallow) / 10 == pytest.approx(gain, abs=0.001)


@pytest.mark.parametrize("deferred", [0, 3])
def test_the_chain_of_deepseek_v3_is_that_of_the_model(deferred):
    end, busy = play(KTransformers(), 58, deferred)
    model = kt.decode_timeline(PROFILE, 58, deferred=deferred, top_k=TOP_K)
    assert end == pytest.approx(model.end, rel=1e-3)  # the last token's experts come back over the link
    assert busy["cpu"] == pytest.approx(58 * PROFILE.routed)


def test_three_deferred_experts_saturate_the_cpu():
    (plain, _), (end, busy) = play(KTransformers(), 58, 0), play(KTransformers(), 58, 3)
    assert 1 - end / plain == pytest.approx(0.255, abs=0.001)
    assert busy["cpu"] / end == pytest.approx(0.994, abs=0.001)
    assert busy["gpu"] / end == pytest.approx(0.37, abs=0.01)


def test_a_gpu_that_waits_gains_nothing_from_deferral():
    assert play(Fiddler(), 20, 3)[0] == pytest.approx(play(Fiddler(), 20, 0)[0])
    one = PROFILE.attention + PROFILE.shared + PROFILE.routed + PROFILE.sync
    assert play(Fiddler(), 20, 0)[0] == pytest.approx(20 * one)


def test_the_simulation_gains_what_was_measured_end_to_end():
    """On the machine that the profiled layer implies: 33 % with the fewest experts that fill the CPU, no more after."""
    model, where = in_bytes("deepseek-v3", 2.0), machine("a100-40gb-pcie")
    assert deferred_experts(model, where) == 3
    token = Workload.lengths([32], [16])
    scenario = Scenario(layer(0), model, played_machine(), Memory(kv_capacity="1GB"), token, ContinuousBatching())
    rates = [1 / simulate(scenario.on(pipeline=layer(deferred)), KTransformers()).tbt for deferred in range(TOP_K)]
    assert rates[3] / rates[0] - 1 == pytest.approx(published("ktransformers")["deferral"]["end_to_end"], abs=0.03)
    assert rates[4:] == pytest.approx([rates[3]] * 4)
    assert rates == pytest.approx(decode_speed(model, where, deferred=range(TOP_K)), rel=0.05)


def test_what_the_profile_changes_is_told_in_the_sources():
    nominal, slowed = machines["ktransformers-a100"], played_machine()
    assert slowed.gpu.bandwidth < nominal.gpu.bandwidth
    assert {name for name, source in slowed.sources.items() if source != nominal.sources.get(name)} == {
        "gpu.bandwidth",
        "cpu.bandwidth",
        "link.overhead",
    }
