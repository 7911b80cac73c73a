"""What twice of a resource gives: by hand where one lane binds, never less than one, and measured times too."""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import OPERATIONS, scenarios, small_machine, tiny_model_of, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES, VSL
from workbench.analysis.shadow_prices import RESOURCES, shadow_prices
from workbench.analysis.wording import GAIN
from workbench.core.errors import CapacityError, ScenarioError
from workbench.hardware import Link
from workbench.hardware.profile import Cores, OpTime, Profile
from workbench.perfmodels import bound, moe_lens
from workbench.schedules import Sequential, VSLPipe
from workbench.serving import fits
from workbench.serving.task_cost import profile_shape
from workbench.simulate import simulate

FAST = {"gpu": 1e15, "hbm": 1e15, "cpu": 1e15, "dram": 1e15, "h2d": 1e15, "d2h": 1e15}


def gains(scenario, schedule=None, **options):
    return {p.resource: p.gain for p in shadow_prices(scenario, schedule or VSLPipe(), **options).prices}


@pytest.mark.parametrize(
    ("slow", "resource", "heaviest"),
    [
        ({"gpu": 1e6}, "GPU", "experts"),
        ({"hbm": 1e6}, "GPU", "experts"),
        ({"dram": 1e4}, "CPU", "weights"),
        ({"d2h": 1e4}, "link", "q@decode k v"),
        ({"h2d": 1e5}, "link", "weights"),
    ],
)
def test_only_what_binds_has_a_price(slow, resource, heaviest):
    """Everything else is free: twice of what binds is twice the throughput."""
    prices = shadow_prices(tiny_scenario([8] * 4, [4] * 4, machine=small_machine(**FAST | slow)), VSLPipe())
    assert prices[resource].gain == pytest.approx(2, rel=0.01)
    assert [p.gain for p in prices.prices if p.resource != resource] == pytest.approx([1, 1, 1], rel=0.01)
    assert prices["KV capacity"].heaviest == heaviest
    assert f"mostly with {heaviest}" in str(prices)


@pytest.mark.parametrize(
    ("pipeline", "resource", "heaviest"), [("ktransformers", "CPU", "experts"), ("vslpipe", "GPU", "decode_attention")]
)
def test_a_slow_cpu_has_a_price_for_experts_and_none_for_decodes_that_a_free_gpu_can_recompute(
    pipeline, resource, heaviest
):
    machine = small_machine(**FAST | {"cpu": 1e4})
    prices = shadow_prices(tiny_scenario([8] * 4, [4] * 4, pipeline=PIPELINES[pipeline], machine=machine), Sequential())
    assert prices[resource].gain == pytest.approx(2, rel=0.01)
    assert [p.gain for p in prices.prices if p.resource != resource] == pytest.approx([1, 1, 1], rel=0.01)
    assert prices["KV capacity"].heaviest == heaviest


def test_more_cache_has_a_price_where_it_forces_the_iterations():
    """Weights stream once per iteration; 40 requests of three blocks each in a cache of 12."""
    scenario = tiny_scenario([8] * 40, [4] * 40, blocks=12, machine=small_machine(**FAST | {"h2d": 1e5}))
    held = 40 * sum(-(-(8 + i) // 4) for i in range(4))
    price = shadow_prices(scenario, VSLPipe())["KV capacity"]
    assert price.result.iterations == -(-held // 24)
    assert price.gain == pytest.approx(-(-held // 12) / -(-held // 24), rel=1e-3)


def test_what_binds_next_is_named():
    """The link takes 1.5 times as long as the GPU; with twice the link the GPU binds."""
    one = tiny_scenario([8] * 4, [4] * 4, machine=small_machine(**FAST | {"h2d": 1e6, "gpu": 1e9}))
    seconds = bound(one, VSLPipe()).limits
    rate = 1e9 * seconds["gpu compute"] / seconds["h2d link"] * 1.5
    prices = shadow_prices(one.on(machine=small_machine(**FAST | {"h2d": 1e6, "gpu": rate})), VSLPipe())
    assert prices["link"].gain == pytest.approx(1.5, rel=0.01)
    first, second = prices.rows()[:2]
    assert first == ("2x link", "1.50x", "then the GPU limits, mostly with experts")
    assert second == ("2x GPU", "1.00x", "the link to the GPU (h2d) still limits, mostly with weights")
    most = prices.base.gen_tok_s
    assert prices.title == (
        f"The link to the GPU (h2d) limits VSLPipe (at most {most:.4g} output tok/s); a link twice as fast gives 1.50 "
        "times this throughput."
    )


@examples(60)
@given(scenarios(), st.floats(1.1, 8))
def test_more_of_a_resource_never_lowers_the_bound(case, factor):
    try:
        prices = shadow_prices(*case, factor=factor).prices
    except ScenarioError as error:
        if "was measured once and runs on both devices" not in str(error):  # in a stack whose ranges place it so
            raise
        return
    for price in prices:
        most = factor
        if price.resource == "KV capacity":
            more = _fitting(RESOURCES["KV capacity"](case[0], factor))
            fits = _fitting(case[0])
            most += 1 / price.result.iterations if more == fits else factor / fits
        assert 1 - 1e-5 <= price.gain <= most * (1 + 1e-5), price.resource


def _fitting(scenario: wb.Scenario) -> int:
    """Prompts t that the cache holds at once; f times as many blocks hold fewer than f (t + 1) prompts."""
    blocks = np.sort(-(-scenario.workload.prompt_len // scenario.memory.kv_block)).cumsum()
    return int(blocks.searchsorted(scenario.kv_blocks, "right"))


def test_half_as_much_cache_again_can_hold_twice_as_many_prompts():
    """Four blocks hold one of these prompts, six hold two, which share what the CPU reads of the experts."""
    machine = small_machine(**FAST | {"dram": 1e4})
    pipeline = PIPELINES["ktransformers"]
    few = tiny_scenario([2, 3, 3, 3], [3, 2, 2, 2], pipeline=pipeline, machine=machine, blocks=4, block=1)
    assert _fitting(few) == 1
    price = shadow_prices(few, Sequential(), factor=1.5)["KV capacity"]
    assert price.result.iterations == 5
    assert 1.5 + 1 / 5 < price.gain < 1.5 + 1.5 / 1


@examples(40)
@given(scenarios(), st.floats(1.1, 8))
def test_more_of_everything_is_as_much_more(case, factor):
    """With the cache as it is, the resources that have seconds explain them all, save fixed times."""
    scenario, schedule = case
    machine = scenario.machine
    machine = replace(
        machine,
        gpu=replace(machine.gpu, overhead=0.0),
        cpu=replace(machine.cpu, overhead=0.0),
        link=Link(machine.link.h2d, machine.link.d2h),
        profiles=(),
    )
    scenario = scenario.on(machine=machine)
    richer = scenario
    for resource in ("link", "GPU", "CPU"):
        richer = RESOURCES[resource](richer, factor)
    ratio = bound(scenario, schedule).seconds / bound(richer, schedule).seconds
    assert ratio == pytest.approx(factor, rel=1e-4)


# -------------------------------------------------------------------------------------------------- calibrated machines


def measured(seconds: dict[str, float], pipeline=VSL, kind="plain", **between: float):
    """A machine whose operations were measured: so many seconds per token each."""
    model = tiny_model_of(kind)
    scenario = tiny_scenario([8] * 4, [4] * 4, pipeline=pipeline, model=model, machine=small_machine(**FAST))
    ops = [
        OpTime(op, n, (1.0, 100.0), (seconds.get(op, 1e-9), 100 * seconds.get(op, 1e-9)), per_context=1e-12)
        for op in OPERATIONS
        for n in (1, 2)
    ]
    profile = Profile(profile_shape(scenario.model, scenario.precision), tuple(ops), **between)
    return scenario.on(machine=replace(scenario.machine, cores=Cores.of(2), profiles=(profile,)))


def test_measured_times_of_a_devices_operations_are_what_is_scaled():
    on_gpu, on_cpu = measured({"experts": 1e-2}), measured({"decode_attention": 1e-2})
    assert gains(on_gpu) == pytest.approx({"link": 1, "GPU": 2, "CPU": 1, "KV capacity": 1}, rel=0.01)
    assert gains(on_cpu)["CPU"] == pytest.approx(2, rel=0.01)
    assert gains(on_cpu)["GPU"] == pytest.approx(1, rel=0.01)


def test_where_the_pipeline_places_an_operation_decides_whose_it_is():
    cpu_only = measured({"experts": 1e-2}, pipeline=PIPELINES["all_cpu"])
    found = gains(cpu_only, Sequential())
    assert (found["GPU"], found["CPU"]) == pytest.approx((1, 2), rel=0.01)


def test_shared_experts_that_only_the_model_asks_for_are_scaled_with_the_device_they_follow():
    slow, on_cpu = {"shared_experts": 1e-2}, PIPELINES["all_cpu"]
    assert gains(measured(slow, kind="shared"))["GPU"] == pytest.approx(2, rel=0.01)
    found = gains(measured(slow, kind="shared", pipeline=on_cpu), Sequential())
    assert (found["GPU"], found["CPU"]) == pytest.approx((1, 2), rel=0.01)


def test_the_head_is_the_gpus():
    assert gains(measured({"head": 1e-1}))["GPU"] == pytest.approx(2, rel=0.01)


def test_fixed_times_stay():
    slow = measured({}, iteration=1.0)
    found = gains(slow, reader=simulate)
    assert found["GPU"] == pytest.approx(1, rel=1e-3)
    assert found["link"] == pytest.approx(1, rel=1e-3)


def test_an_operation_measured_once_on_two_devices_is_refused():
    from workbench.pipeline import cpu, gpu, load, offload
    from workbench.stages import Op, Work, attention, moe, out_proj, qkv

    work = {"work": lambda rows, model, precision: Work()}
    again = Op("out_proj", ("x",), ("x",), **work)
    twice = gpu(qkv, attention, out_proj) >> offload >> cpu(again) >> load >> gpu(moe)
    with pytest.raises(ScenarioError, match="out_proj was measured once and runs on both devices"):
        gains(measured({}, pipeline=twice), Sequential())


# ------------------------------------------------------------------------------------------------------- as it is read


@pytest.mark.parametrize(
    ("resource", "scaled"),
    [
        ("link", {"link.h2d", "link.d2h"}),
        ("GPU", {"gpu.bandwidth", "gpu.flops.bf16", "gpu.flops.fp32"}),
        ("CPU", {"cpu.bandwidth", "cpu.flops.bf16", "cpu.flops.fp32"}),
        ("KV capacity", set()),
    ],
)
def test_a_machine_with_more_of_a_resource_says_so_beside_its_sources(resource, scaled):
    before = wb.machines["a40"].sources
    after = RESOURCES[resource](tiny_scenario(machine=wb.machines["a40"]), 2).machine.sources
    assert {name for name in before if after[name] != before[name]} == scaled
    assert all(after[name] == f"2 times: {before[name]}" for name in scaled)
    assert set(after) == set(before)


def test_a_resource_that_needs_more_memory_is_read_with_it_and_says_so():
    scenario = tiny_scenario([8] * 40, [4] * 40, blocks=12)
    just = scenario.on(machine=small_machine(host_memory=fits(scenario, VSLPipe()).host.total))
    price = shadow_prices(just, VSLPipe())["KV capacity"]
    assert price.result.gen_tok_s == shadow_prices(scenario, VSLPipe())["KV capacity"].result.gen_tok_s
    assert price.note.startswith("needs ")
    assert "of host memory, there are" in price.note


def test_the_title_names_what_helps_most_and_what_helps_with_the_memory_that_is_there():
    """Twice the cache halves the iterations, and so the weights that are streamed, as twice the link does."""
    scenario = tiny_scenario([8] * 40, [4] * 40, blocks=12, machine=small_machine(**FAST | {"h2d": 1e5}))
    total = fits(scenario, VSLPipe()).host.total
    tight = scenario.on(machine=replace(scenario.machine, cpu=replace(scenario.machine.cpu, memory=total)))
    prices = shadow_prices(tight, VSLPipe(), factor=3)
    cache, link = prices["KV capacity"], prices["link"]
    helped = f"3 times the KV capacity gives {cache.gain:.2f} times this throughput (needs "
    if cache.gain > link.gain:
        assert helped in prices.title
    assert f"a link 3 times as fast gives {link.gain:.2f} times this throughput" in prices.title
    assert prices.title.startswith("The link to the GPU (h2d) limits VSLPipe (at most ")
    played = shadow_prices(tight, VSLPipe(), simulate)
    assert f"limits VSLPipe (simulated {played.base.gen_tok_s:.4g} output tok/s); " in played.title


def test_the_title_says_if_nothing_helps():
    slow = measured({}, iteration=1.0)
    assert shadow_prices(slow, VSLPipe(), simulate).title.endswith("; twice any one resource gives hardly more.")


def test_what_does_not_fit_has_no_price():
    with pytest.raises(CapacityError):
        shadow_prices(tiny_scenario(machine=small_machine(gpu_memory=1e3)), VSLPipe())


@pytest.mark.parametrize("reader", [bound, simulate, moe_lens.predict])
def test_any_reader_can_be_asked(reader):
    scenario = tiny_scenario([8] * 40, [4] * 40, blocks=30)
    prices = shadow_prices(scenario, VSLPipe(), reader)
    assert prices.base.gen_tok_s == reader(scenario, VSLPipe()).gen_tok_s
    assert tuple(price.resource for price in prices.prices) == tuple(RESOURCES)
    richer = scenario.on(memory=replace(scenario.memory, kv_capacity=2 * scenario.memory.kv_capacity))
    assert prices["KV capacity"].gain == reader(richer, VSLPipe()).gen_tok_s / prices.base.gen_tok_s


@pytest.mark.parametrize("factor", [1, 0.5, -2, float("nan"), float("inf")])
def test_no_more_of_it_is_an_error(factor):
    with pytest.raises(ValueError, match="above 1"):
        shadow_prices(tiny_scenario(), VSLPipe(), factor=factor)


def test_it_is_text_html_a_frame_and_a_picture():
    prices = wb.shadow_prices(tiny_scenario([8] * 4, [4] * 4), VSLPipe(), factor=3)
    assert len(str(prices).splitlines()) == 5
    assert str(prices) == repr(prices)
    assert prices._repr_html_().count("<tr>") == 5
    assert prices.to_pandas()["resource"].tolist() == list(RESOURCES)
    ax = prices.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"3x {name}" for name in RESOURCES]
    assert [1 + bar.get_width() for bar in ax.patches] == pytest.approx([p.gain for p in prices.prices])
    plt.close(ax.figure)


def test_a_gain_that_comes_with_fuller_batches_says_so():
    prices = shadow_prices(tiny_scenario(pipeline=VSL, requests=60), VSLPipe(), simulate)
    assert "fuller batches" not in str(prices)
    assert "more iterations" not in str(prices)
    fewer = [replace(one, result=replace(one.result, iterations=prices.base.iterations // 2)) for one in prices.prices]
    told = replace(prices, prices=tuple(fewer))
    batches = f"fuller batches: {prices.base.iterations // 2} iterations instead of {prices.base.iterations}"
    assert str(told).count(batches) == sum(price.gain >= GAIN for price in prices.prices) > 0
    more = [replace(one, result=replace(one.result, iterations=2 * prices.base.iterations)) for one in prices.prices]
    batches = f"more iterations: {2 * prices.base.iterations} instead of {prices.base.iterations}"
    assert str(replace(prices, prices=tuple(more))).count(batches) == len(RESOURCES)
