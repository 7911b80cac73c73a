"""Seconds and bytes of tasks: transfers of SPEC 2, the token budget of SPEC 1.7, and law 6 for the CPU kernels."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_cpu import append_kv_work, decode_attention_work
from tests.builders import small_machine, tiny_model, tiny_model_of, tiny_scenario
from tests.systems import PIPELINES, VSL
from workbench.core.errors import ScenarioError
from workbench.core.units import DTYPE_BYTES
from workbench.hardware import Link, machines
from workbench.hardware.profile import Cores, Pace
from workbench.models import models
from workbench.perfmodels import bound
from workbench.pipeline import Pipeline, fetch, gpu
from workbench.pipeline.layer_graph import layer_graph
from workbench.pipeline.stack_graph import StackGraph, stack_graph
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Schedule, Sequential, Step, VSLPipe
from workbench.serving import prepare
from workbench.serving.task_cost import TaskCost
from workbench.simulate import simulate
from workbench.stages import (
    Op,
    Place,
    Precision,
    Rows,
    Stage,
    attention,
    buffer_bytes,
    combine,
    decode_attention,
    embed,
    experts,
    head,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    seconds,
    weights,
)
from workbench.workload import Workload

MIXTRAL = models["mixtral-8x7b"]
BF16, FP32 = Precision("bf16", "bf16"), Precision("fp32", "fp32")


def cost_of(scenario: Scenario, stack: StackGraph) -> TaskCost:
    return TaskCost(stack, scenario.model, scenario.machine, scenario.precision, scenario.routing)


def call_keys(scenario: Scenario) -> list[list[object]]:
    """The keys of every stage of the first layer, and of every transfer."""
    stack = scenario.graph
    cost = cost_of(scenario, stack)
    transfers = [node for node in stack.at(0) if node is not None and node.lane in ("h2d", "d2h")]
    return [[cost.call_key(what, 0) for what in each] for each in (stack.stages(0), transfers)]


def priced(pipeline: Pipeline = VSL, **changes: object) -> TaskCost:
    scenario = Scenario(
        pipeline,
        model=MIXTRAL,
        machine=machines["a40"],
        memory=Memory("70GB", **changes),
        workload=Workload.lengths(98, 32, 10),
        scheduler=ResourceAware(),
    )
    return cost_of(scenario, stack_graph(pipeline, scenario.model))


def node(pipeline: Pipeline, code: str):
    return next(node for node in layer_graph(pipeline).nodes if node.code == code)


def moved(cost: TaskCost, code: str, rows: Rows) -> float:
    return cost.transfer(next(n for n in cost._stack.all_nodes if n.code == code), rows)


def test_offload_moves_queries_of_decodes_and_keys_and_values_of_all():
    """SPEC 2: Q = decode tokens (h + 2 h/s) dtype + prefill tokens (2 h/s) dtype, with s = 4 and bf16."""
    h, s, dtype = 4096, 4, 2
    assert moved(priced(), "Q", Rows(prefill=100, decode=7)) == 7 * (h + 2 * h / s) * dtype + 100 * (2 * h / s) * dtype


def test_load_moves_the_attention_output_of_decodes():
    """SPEC 2: H = decode tokens h dtype."""
    assert moved(priced(), "H", Rows(prefill=100, decode=7)) == 7 * 4096 * 2


def test_transfers_double_in_fp32():
    rows = Rows(prefill=3, decode=5)
    assert moved(priced(weights="fp32"), "Q", rows) == 2 * moved(priced(), "Q", rows)


def test_paper_sized_transfers_are_about_200_mb():
    """Row lens.vsl.bytes: about 200 MB per layer at 18500 decode tokens (MoE-Lens section 6.4)."""
    assert 195e6 < moved(priced(), "Q", Rows(decode=18_500)) < 235e6


def test_streamed_kv_travels_without_the_new_entries_and_those_return():
    cost = priced(fetch(weights, kv) | gpu(qkv, attention, out_proj, moe))
    rows = Rows(prefill=10, decode=3, context=300)
    assert moved(cost, "K", rows) == (300 - 3) * 2 * 1024 * 2
    assert moved(cost, "S", rows) == 13 * 2 * 1024 * 2


def test_routing_is_moved_in_fp32_and_own_buffers_are_as_wide_as_the_model():
    assert buffer_bytes("gates", MIXTRAL, BF16) == 2 * 2 * 4
    assert buffer_bytes("mine", MIXTRAL, BF16) == 4096 * 2
    assert buffer_bytes("my_gates", MIXTRAL, BF16) == 4096 * 2
    assert buffer_bytes("k", MIXTRAL, FP32) == 1024 * 4


def test_the_streamed_layer_is_the_whole_layer():
    assert priced().weights_per_layer == MIXTRAL.layer_params * 2
    assert priced(weights="fp32").weights_per_layer == MIXTRAL.layer_params * 4
    only = priced(fetch(experts.weights) | gpu(qkv, attention, out_proj, moe))
    assert only.weights_per_layer == 8 * MIXTRAL.expert_params * 2


def test_the_token_budget_of_mixtral_on_the_a40_is_near_the_papers():
    """Six statements of MoE-Lens section 8.2 allow 14800 to 17300 tokens in a pass."""
    assert 15_700 < priced().token_budget < 16_100


def test_the_token_budget_balances_gpu_and_link():
    cost = priced()
    budget = cost.token_budget
    computing = [n for n in layer_graph(VSL).nodes if n.lane == "gpu"]
    gpu_seconds = sum(cost.node(n, Rows(prefill=budget)) for n in computing)
    assert gpu_seconds == pytest.approx(cost.fetch(cost.weights_per_layer), rel=1e-3)


def test_the_token_budget_is_without_limit_if_nothing_streams():
    assert priced(fetch(kv) | gpu(qkv, attention, out_proj, moe)).token_budget == float("inf")


@pytest.mark.parametrize("link", [20e9, 64e9, 256e9, 450e9, 900e9, 1e15])
def test_with_a_fast_link_the_token_budget_still_fills_the_gpu(link):
    """The faster the link, the fewer tokens hide it; but time per token is never far from that of many."""
    machine, lengths = replace(machines["a40"], link=Link(link, link)), Workload.lengths(98, 32, 10)
    cost = prepare(Scenario(VSL, MIXTRAL, machine, Memory("70GB"), lengths, ResourceAware()), Sequential()).cost
    budget = cost.token_budget
    assert cost.gpu_seconds(budget) / budget < 1.12 * cost.gpu_seconds(1e9) / 1e9


def test_the_token_budget_is_at_least_one_token():
    scenario = tiny_scenario(machine=small_machine(gpu=1e3))
    assert prepare(scenario, Sequential()).cost.token_budget >= 1


def attention_seconds(rates: dict[str, float], kv_dtype: str = "bf16") -> float:
    """Of decodes that compute for long, on a GPU with these rates."""
    machine = small_machine()
    machine = replace(machine, gpu=replace(machine.gpu, bandwidth=1e18, flops=tuple(rates.items())))
    layer = fetch(weights, kv) | gpu(qkv, attention, out_proj, moe)
    scenario = tiny_scenario(pipeline=layer, machine=machine).on(memory=Memory("1GB", weights="bf16", kv=kv_dtype))
    cost = prepare(scenario, Sequential()).cost
    stage = next(stage for stage in scenario.layer.stages if stage.op == decode_attention)
    return cost.call(stage)(Rows(decode=100, context=1e9))[0]


def test_a_gpu_without_an_fp32_rate_decodes_at_the_rate_of_the_cache():
    known = attention_seconds({"bf16": 1e14, "fp32": 1e13})
    assert attention_seconds({"bf16": 1e14, "fp16": 1e12}) == pytest.approx(known / 10)
    with pytest.raises(ScenarioError, match=r"no known FLOP rate for fp32.*Memory\(weights=..., kv=...\)"):
        attention_seconds({"bf16": 1e14}, kv_dtype="fp32")


def test_a_result_tells_at_which_rate_a_gpu_decodes():
    scenario = tiny_scenario(pipeline=fetch(weights, kv) | gpu(qkv, attention, out_proj, moe))
    gpu_alone = replace(scenario.machine.gpu, flops=(("bf16", 1e14),))
    other = scenario.on(
        machine=replace(scenario.machine, gpu=gpu_alone), memory=Memory("1GB", kv="bf16", weights="bf16")
    )
    assert "attention" not in bound(scenario, Sequential()).facts
    assert bound(other, Sequential()).facts["attention"] == "decodes on the GPU at its bf16 rate; it has none for fp32"


def test_an_operation_without_work_cannot_be_priced():
    layer = gpu(qkv, attention, out_proj, moe, Op("mystery", ("x",), ("x",)))
    scenario = tiny_scenario(pipeline=layer)
    cost = cost_of(scenario, stack_graph(layer, scenario.model))
    with pytest.raises(ScenarioError, match=r"op 'mystery' declares no work.*give Op\(\.\.\., work=\.\.\.\)"):
        cost.node(layer_graph(layer).nodes[0], Rows(prefill=1))


def test_tasks_are_priced_like_their_nodes():
    scenario = tiny_scenario()
    prepared = prepare(scenario, Sequential(2))
    tasks = prepared.lowering.tasks(Step.MIDDLE)
    parts = [Rows(prefill=5, pairs=15, emits=1), Rows(decode=2, context=20, emits=2)]
    for task, price in zip(tasks, prepared.plans.tasks(tasks, parts), strict=True):
        if task.part is None:
            assert price == prepared.cost.fetch(prepared.cost.weights_per_layer)
        else:
            assert price == prepared.cost.node(task.node, parts[task.part])


def test_a_part_without_rows_costs_nothing_even_with_overhead():
    scenario = tiny_scenario(machine=small_machine(overhead=1e-3))
    prepared = prepare(scenario, Sequential())
    for n in prepared.lowering.stack.all_nodes:
        if n.code != "W":
            assert prepared.cost.node(n, Rows()) == 0


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 100_000), st.sampled_from(["bf16", "fp32"]))
def test_decode_attention_declares_what_the_kernels_declare(prefill, decode, context, dtype):
    """Law 6."""
    m, size = MIXTRAL, {"bf16": 2, "fp32": 4}[dtype]
    rows = Rows(prefill=prefill, decode=decode, context=context)
    shape = (m.num_attention_heads, m.num_key_value_heads, m.head_dim)
    attend = decode_attention_work(*shape, context=context, rows=decode, kv_itemsize=size)
    append = append_kv_work(*shape[1:], rows=prefill + decode, kv_itemsize=size)
    work = decode_attention.work(rows, m, Precision("bf16", dtype))
    assert (work.flops, work.bytes) == (attend[0] + append[0], attend[1] + append[1])


@pytest.mark.parametrize("tokens", [1, 50])
def test_gemm_work_adds_up_to_the_models_flops_per_token(tokens):
    m = tiny_model(3)
    rows = Rows(prefill=tokens, emits=tokens)
    layer = sum(op.work(rows, m, BF16).flops for op in (qkv, out_proj, route, experts))
    assert 3 * layer + head.work(rows, m, BF16).flops == pytest.approx(tokens * m.flops_per_token())


def test_prefill_attention_counts_causal_pairs():
    m = tiny_model()
    assert prefill_attention.work(Rows(prefill=3, pairs=6), m, BF16).flops == 4 * m.q_size * 6
    assert prefill_attention.work(Rows(decode=9, context=90), m, BF16)[:2] == (0, 0)


def test_few_tokens_read_few_experts_and_many_read_all():
    m = tiny_model()
    one = experts.work(Rows(decode=1), m, BF16).bytes
    many = experts.work(Rows(decode=10_000), m, BF16).bytes
    activations = 2 * 2 * m.hidden_size
    assert one == pytest.approx(2 * m.expert_params * 2 + activations)
    assert many == pytest.approx(4 * m.expert_params * 2 + 10_000 * activations)


def test_embedding_and_combine_only_move_rows():
    m = tiny_model()
    assert embed.work(Rows(prefill=5), m, BF16).flops == 0
    assert embed.work(Rows(prefill=5), m, BF16).bytes == 2 * 5 * m.hidden_size * 2
    assert combine.work(Rows(decode=5), m, BF16).bytes == 3 * 5 * m.hidden_size * 2


def test_a_segment_costs_the_sum_of_its_operations():
    cost, rows = priced(), Rows(decode=100, context=5000, emits=100)
    whole = node(VSL, "B")
    expected = sum(seconds(stage.op.work(rows, MIXTRAL, BF16), machines["a40"].gpu) for stage in whole.stages)
    assert cost.node(whole, rows) == pytest.approx(expected)


def test_a_call_reads_the_experts_that_it_defers_too():
    """Each of the two chosen experts is 3 matrices of 64 x 96 and takes and gives a row of 64, in bf16."""
    cost = cost_of(tiny_scenario(), stack_graph(VSL, 4))
    one_expert = 2 * 3 * 64 * 96 + 2 * 2 * 64
    assert cost.call(Stage(experts, Place.CPU, defer=1))(Rows(decode=1, emits=1))[1] == pytest.approx(2 * one_expert)


def test_a_segment_runs_at_the_rate_of_its_device():
    rows = Rows(decode=10, context=500, emits=10)
    on_gpu, on_cpu = (priced(PIPELINES[name]) for name in ("all_gpu", "all_cpu"))
    assert on_gpu.node(layer_graph(PIPELINES["all_gpu"]).nodes[0], rows) < on_cpu.node(
        layer_graph(PIPELINES["all_cpu"]).nodes[0], rows
    )


# ----------------------------------------------------------------------- lanes that share the cores of one computer

SHARED = Cores(
    1, 1, 2, mover=1e-9, gpu_slowdown=2e-10, cpu_slowdown=1e-10, gpu_team_slowdown=5e-10, cpu_team_slowdown=4e-10
)


def pace(schedule: Schedule, *, cores: Cores = SHARED, parts: Sequence[Rows] = (), **rates: float) -> Pace:
    """How the lanes run a plan of so many parts on a machine of these rates."""
    machine = replace(small_machine(**{"h2d": 1e8, "d2h": 1e8} | rates), cores=cores)
    prepared = prepare(tiny_scenario(machine=machine), schedule)
    tasks = prepared.lowering.tasks(Step.MIDDLE)
    return prepared.plans.pace(
        tasks, parts or [Rows(prefill=5, decode=40, pairs=15, context=4000, emits=41)] * 2, cores
    )


@pytest.mark.parametrize("prefetch", [False, True])
def test_lanes_that_follow_one_another_have_all_cores_also_the_movers(prefetch):
    found = pace(Sequential(prefetch=prefetch), gpu=1e6)
    assert (found.gpu, found.cpu, found.beside) == (2, 2, "")
    assert (found.gpu_slowdown, found.cpu_slowdown) == (pytest.approx(1 - 1 / 1.05), pytest.approx(1 - 1 / 1.04))


def test_tasks_too_short_for_a_team_have_one_core():
    assert pace(Sequential(), gpu=1e15, hbm=1e15, cpu=1e15, dram=1e15).gpu == 1


@pytest.mark.parametrize(
    ("slow", "beside", "slowdowns"),
    [("gpu", "cpu", (1 - 1 / 1.02, 1 - 0.9 / 1.01)), ("dram", "gpu", (1 - 0.9 / 1.02, 1 - 1 / 1.01))],
)
def test_beside_each_other_the_movers_run_with_the_lane_that_has_less_to_do(slow, beside, slowdowns):
    found = pace(VSLPipe(), **{"gpu": 1e12, "hbm": 1e12, "cpu": 1e12, "dram": 1e12} | {slow: 1e5})
    assert (found.gpu, found.cpu, found.beside) == (1, 1, beside)
    assert (found.gpu_slowdown, found.cpu_slowdown) == tuple(map(pytest.approx, slowdowns))


def test_movers_with_cores_of_their_own_take_none_from_a_lane():
    found = pace(VSLPipe(), cores=replace(SHARED, gpu=2, cpu=2, alone=4, spare=1))
    assert (found.beside, found.gpu_slowdown, found.cpu_slowdown) == (
        "",
        pytest.approx(1 - 1 / 1.02),
        pytest.approx(1 - 1 / 1.01),
    )


def test_a_stream_never_stops_a_lane():
    found = pace(VSLPipe(), cores=replace(SHARED, mover=1.0, gpu_slowdown=1.0, cpu_slowdown=1.0, gpu_team_slowdown=1.0))
    assert max(found.gpu_slowdown, found.cpu_slowdown) < 1


def test_fetched_kv_of_windowed_layers_is_that_of_their_windows():
    """Eight decodes of one request: 40 entries in the windowed layer, 92 in each of the others."""
    model = tiny_model_of("windows", 3)
    of = tiny_scenario([8], [9], pipeline=fetch(kv) | gpu(qkv, attention, out_proj, moe), model=model)
    busy = simulate(of, Sequential()).busy["h2d"]
    entry = model.kv_elements * DTYPE_BYTES[of.precision.kv]
    assert busy * of.machine.link.h2d == pytest.approx((40 + 2 * 92) * entry)


def test_the_calls_of_stages_are_shared_by_machines_that_compute_alike():
    scenario = tiny_scenario(pipeline=PIPELINES["vslpipe"])
    machine = scenario.machine
    gpu, cpu, link = machine.gpu, machine.cpu, machine.link
    stages, transfers = call_keys(scenario)
    assert stages
    assert transfers
    for part in (
        {"gpu": replace(gpu, memory=2 * gpu.memory)},
        {"link": replace(link, h2d=2 * link.h2d)},
        {"link": replace(link, d2h=2 * link.d2h)},
        {"link": replace(link, overhead=1 + link.overhead)},
        {"throttled": True},
    ):
        found = call_keys(scenario.on(machine=replace(machine, **part)))
        assert found[0] == stages
        assert found[1] != transfers
    for part in (
        {"gpu": replace(gpu, bandwidth=2 * gpu.bandwidth)},
        {"gpu": replace(gpu, overhead=1 + gpu.overhead)},
        {"gpu": replace(gpu, flops=tuple((dtype, 2 * rate) for dtype, rate in gpu.flops))},
        {"cpu": replace(cpu, bandwidth=2 * cpu.bandwidth)},
        {"cpu": replace(cpu, overhead=1 + cpu.overhead)},
        {"cores": Cores(1, 1, 2, 0.0, 0.0)},
    ):
        found = call_keys(scenario.on(machine=replace(machine, **part)))
        assert not set(found[0]) & set(stages)
        assert not set(found[1]) & set(transfers)
