"""Scenarios and what is checked before any work: each error names the object and the mend."""

from dataclasses import FrozenInstanceError

import pytest

from tests.builders import enough_experts, small_machine, tiny_model, tiny_model_of, tiny_scenario
from tests.systems import PIPELINES, VSL
from workbench.core.errors import (
    CapacityError,
    PipelineError,
    ScenarioError,
    ScheduleError,
    WorkbenchError,
    WorkloadError,
)
from workbench.hardware import machines
from workbench.perfmodels import bound
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.pipeline.layer_graph import layer_graph
from workbench.scenario import Memory
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.serving import prepare
from workbench.stages import (
    Precision,
    attention,
    combine,
    decode_attention,
    experts,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
    weights,
)
from workbench.workload import Workload

MODEL = tiny_model()
EMBEDDING = (2 * 128 + 1) * 64 * 2
SLOT = MODEL.layer_params * 2

BAD = {
    "a prompt longer than the cache": (
        lambda: tiny_scenario([3, 50], [4, 4], blocks=10),
        CapacityError,
        "request 1 of 'lengths' needs a KV cache of 53 tokens (50 of its prompt and 3 of its output: the last is not "
        "stored), and kv_capacity=20480 holds 40. Give at least kv_capacity='28.7 kB', or shorten the request.",
    ),
    "zero requests": (lambda: tiny_scenario(3, 3, 0), WorkloadError, "needs at least one request, not 0"),
    "a negative capacity": (
        lambda: Memory(kv_capacity="-70GB"),
        CapacityError,
        "kv_capacity must be a positive number of bytes, not '-70GB'.",
    ),
    "a cache below one block": (
        lambda: tiny_scenario().on(memory=Memory(kv_capacity=100, kv_block=4)),
        CapacityError,
        "kv_capacity=100 is smaller than one block of 4 tokens, which takes 2.05 kB. Give at least that, or a smaller "
        "kv_block.",
    ),
    "a request beyond the model's positions": (
        lambda: tiny_scenario([4000], [200], blocks=10_000),
        ScenarioError,
        "request 0 of 'lengths' is 4199 tokens long (4000 of its prompt and 199 of its output: the last is not "
        "stored), and tiny takes 4096. Shorten it by 103 tokens.",
    ),
    "no pipeline": (
        lambda: tiny_scenario().on(pipeline="gpu(qkv)"),
        ScenarioError,
        "Scenario(pipeline=...) must be a Pipeline or a Stack, not 'gpu(qkv)'.",
    ),
    "no memory": (
        lambda: tiny_scenario().on(memory="70GB"),
        ScenarioError,
        "Scenario(memory=...) must be a Memory, not '70GB'.",
    ),
    "no scheduler": (lambda: tiny_scenario().on(scheduler=None), ScenarioError, "Scenario(scheduler=...)"),
    "the class of a scheduler": (lambda: tiny_scenario().on(scheduler=ResourceAware), ScenarioError, "ResourceAware()"),
    "a scheduler that is a schedule": (
        lambda: tiny_scenario().on(scheduler=VSLPipe()),
        ScenarioError,
        "Scenario(scheduler=...)",
    ),
    "a forgotten transfer": (
        lambda: tiny_scenario(
            pipeline=gpu(qkv, prefill_attention) >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
        ),
        PipelineError,
        "Put offload between them: gpu(qkv) >> offload >> cpu(decode_attention).",
    ),
    "a useless transfer": (
        lambda: tiny_scenario(pipeline=gpu(qkv, attention) >> offload >> gpu(out_proj, moe)),
        PipelineError,
        "offload at place 4 of the layer moves nothing: no later cpu stage reads anything that is only on the gpu. "
        "Remove it.",
    ),
    "half a layer": (lambda: tiny_scenario(pipeline=gpu(qkv)), PipelineError, "decode_attention is missing"),
    "a schedule that does not fit": (
        lambda: prepare(tiny_scenario(pipeline=PIPELINES["all_gpu"]), VSLPipe()),
        ScheduleError,
        "VSLPipe does not take this pipeline: its layers are gpu(...), where VSLPipe needs gpu(...) >> offload >> "
        "cpu(...) >> load >> gpu(...). Wire it so, or use Sequential(prefetch=True) or Overlap(), which take any "
        "pipeline.",
    ),
    "a gpu below two weight slots": (
        lambda: prepare(tiny_scenario(machine=small_machine(gpu_memory=EMBEDDING + SLOT)), Sequential()),
        CapacityError,
        "'small' has 206 kB of GPU memory and this needs 655 kB, 449 kB too much (53 % weight slots, 39 % RoPE angles, "
        "5 % weights, 2 % largest operation, 1 % activations). It fits with 656 kB of GPU memory (now 206 kB).",
    ),
    "a host below weights and cache": (
        lambda: prepare(tiny_scenario(machine=small_machine(host_memory=1e6)), VSLPipe()),
        CapacityError,
        "'small' has 1.00 MB of host memory and this needs 2.75 MB, 1.75 MB too much (75 % KV cache, 25 % weights). It "
        "fits with any one of these: 2.75 MB of host memory (now 1 MB), or kv_capacity='296.9kB' (now 2.05 MB).",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_with_its_mend(case):
    make, kind, text = BAD[case]
    with pytest.raises(kind) as error:
        make()
    assert isinstance(error.value, WorkbenchError)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_request_that_fills_the_cache_to_the_last_token_fits():
    assert tiny_scenario([37], [4], blocks=10).kv_blocks == 10
    with pytest.raises(CapacityError):
        tiny_scenario([38], [4], blocks=10)


def test_a_slot_holds_the_largest_transfer_of_any_iteration():
    prepared = prepare(tiny_scenario(), VSLPipe())
    first = MODEL.attention_in_params + MODEL.hidden_size
    assert prepared.slot_bytes == SLOT + 2 * first  # a whole layer, and the first segment of the next
    assert prepare(tiny_scenario(pipeline=PIPELINES["all_gpu"]), Sequential()).slot_bytes == 0


def test_precision_is_the_memorys_or_else_the_models_own():
    assert tiny_scenario().precision == Precision("bf16", "bf16")
    mixed = tiny_scenario().on(memory=Memory("1GB", weights="fp32"))
    assert mixed.precision == Precision("fp32", "bf16")
    halved = tiny_scenario().on(memory=Memory("1GB", kv_block=4, kv="fp32"))
    assert halved.kv_blocks == tiny_scenario().on(memory=Memory("1GB", kv_block=4)).kv_blocks // 2


@pytest.mark.parametrize(
    ("form", "hidden", "group", "bits"),
    [("int8", 64, 64, 8.5), ("int4", 64, 64, 4.5), ("int8", 128, 128, 8.25), ("int4", 256, 128, 4.25)],
)
def test_rounded_experts_leave_all_else_in_the_models_precision(form, hidden, group, bits):
    model = tiny_model(hidden_size=hidden, intermediate_size=128)
    scenario = tiny_scenario(model=model).on(memory=Memory("1GB", weights=form))
    assert scenario.precision == Precision("bf16", "bf16", form, group=group)
    assert scenario.weight_formats == f"{form} (experts) and bf16"
    assert experts.weight_bytes(model, scenario.precision) == model.num_local_experts * model.expert_params * bits / 8
    assert qkv.weight_bytes(model, scenario.precision) == qkv.weight_bytes(model, Precision("bf16", "bf16"))


def test_experts_that_groups_do_not_divide_cannot_be_rounded():
    model = tiny_model(hidden_size=64, intermediate_size=96)
    with pytest.raises(ScenarioError, match=r"are 64 x 96, which groups of 64 columns .*weights='int4'.*leave weights"):
        tiny_scenario(model=model).on(memory=Memory("1GB", weights="int4"))


def test_a_quantised_model_keeps_its_formats_unless_the_memory_asks_for_one():
    scenario = tiny_scenario(model=tiny_model_of("quantised"))
    assert scenario.precision == Precision("bf16", "bf16", "mxfp4", "fp8")
    assert scenario.weight_formats == "mxfp4 (experts) and fp8"
    assert scenario.on(memory=Memory("1GB", weights="bf16")).precision == Precision("bf16", "bf16")


def test_shared_experts_follow_the_routed_ones_unless_placed():
    plain, shared = tiny_scenario(), tiny_scenario(model=tiny_model_of("shared"))
    assert plain.layer is plain.pipeline
    assert str(shared.layer).endswith("gpu(out_proj, route, experts, shared_experts, combine)")
    assert shared.on(model=plain.model).layer == plain.pipeline
    forked = gpu(qkv, attention, out_proj, route) >> (offload >> cpu(experts) >> load) >> gpu(combine)
    assert "cpu(experts, shared_experts)" in str(shared.on(pipeline=forked).layer)
    placed = PIPELINES["ktransformers"]
    assert str(shared.on(pipeline=placed, model=enough_experts(shared.model, placed)).layer) == str(placed)


BESIDE = gpu(qkv, attention, out_proj, route) >> (gpu(shared_experts) | offload >> cpu(experts) >> load)
BEHIND = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, shared_experts) >> load


@pytest.mark.parametrize(("before", "adder"), [(BESIDE, "combine"), (BEHIND, "shared_experts")], ids=str)
def test_shared_experts_are_added_where_they_are_and_only_the_routed_ones_output_is_moved(before, adder):
    layer = tiny_scenario(pipeline=before >> gpu(combine), model=tiny_model_of("shared")).layer
    reads = {stage.op.name: set(stage.op.reads) for stage in layer.stages}
    assert reads[adder] > ({"routed", "shared"} if adder == "combine" else {"routed"})
    assert ("shared" in reads["combine"]) == (adder == "combine")
    carried = {buffer for node in layer_graph(layer).nodes for buffer, _ in node.carries}
    assert carried == {"h", "gates", "routed"}


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (offload >> cpu(shared_experts, experts) >> load >> gpu(combine), r"cpu\(shared_experts\) reads routed"),
        (offload >> cpu(experts) >> load >> cpu(shared_experts) >> gpu(combine), "load at place 8 .* moves nothing"),
        (offload >> cpu(experts) >> load >> (cpu(shared_experts) | gpu(combine)), "one arm of a fork writes routed"),
        (gpu(experts, combine, shared_experts), r"gpu\(combine\) reads shared"),
    ],
    ids=str,
)
def test_shared_experts_that_would_be_added_too_early_or_late_are_refused(rest, words):
    with pytest.raises(PipelineError, match=words):
        tiny_scenario(pipeline=gpu(qkv, attention, out_proj, route) >> rest, model=tiny_model_of("shared"))


def test_shared_experts_that_are_there_twice_are_refused():
    layer = gpu(qkv, attention, out_proj, route, experts, shared_experts, shared_experts, combine)
    with pytest.raises(
        PipelineError, match=r"gpu\(shared_experts\) computes again what gpu\(shared_experts\) computes"
    ):
        tiny_scenario(pipeline=layer)


def test_shared_experts_that_nobody_adds_are_refused():
    layer = gpu(qkv, attention, out_proj, route) >> offload >> cpu(shared_experts) >> gpu(experts, combine)
    assert tiny_scenario(pipeline=layer).layer == layer
    with pytest.raises(PipelineError, match=r"shared_experts must stand once, .*; leave them out"):
        tiny_scenario(pipeline=layer, model=tiny_model_of("shared"))


def test_a_t4_which_has_no_bf16_is_read_in_fp16():
    half = Memory("4GB", weights="fp16", kv="fp16")
    on_t4 = tiny_scenario().on(machine=machines["moe-lightning-s1"], memory=half)
    assert on_t4.precision == Precision("fp16", "fp16")
    assert bound(on_t4, VSLPipe()).gen_tok_s > 0
    with pytest.raises(ScenarioError, match="NVIDIA T4 has no known FLOP rate for bf16, only for fp16"):
        bound(on_t4.on(memory=Memory("4GB")), VSLPipe())


def test_a_scenario_on_another_machine_is_another_scenario():
    scenario = tiny_scenario()
    other = scenario.on(machine=small_machine(gpu=1.0))
    assert other.machine.gpu.flops[0][1] == 1.0
    assert scenario.machine == small_machine()
    assert other.workload is scenario.workload


def test_a_change_is_checked_like_the_first_description():
    with pytest.raises(CapacityError):
        tiny_scenario().on(workload=Workload.lengths(4001, 1, 1))


def test_a_scenario_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        tiny_scenario().machine = small_machine()


def test_a_scenario_tells_what_was_asked_for():
    text = str(tiny_scenario([8] * 3, [4] * 3))
    assert str(VSL) in text
    assert "1000 blocks of 4 tokens in bf16" in text
    assert "3 requests" in text
    assert "<th" in tiny_scenario()._repr_html_()


def test_a_synthetic_workload_is_marked():
    from workbench.workload import workloads

    assert "(synthetic)" in str(tiny_scenario(blocks=10_000).on(workload=workloads["mtbench"].sample(10, 4)))


def test_fetching_for_one_layer_too_many_is_no_scenario():
    with pytest.raises(PipelineError):
        tiny_scenario(pipeline=fetch(weights) | cpu(qkv, attention, out_proj, moe) >> offload)
