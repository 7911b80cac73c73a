"""MoE-Lightning's model as a fourth reader of a scenario."""

from dataclasses import replace

import pytest

from tests.systems import PIPELINES
from workbench.analysis.compare import compare
from workbench.core.errors import ScenarioError
from workbench.core.result import Source
from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels import bound, moe_lens
from workbench.perfmodels.moe_lightning import Job, Policy, estimate, predict
from workbench.pipeline import cpu, gpu, load, offload
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.stages import Op, Work, attention, combine, experts, moe, out_proj, qkv, route, shared_experts
from workbench.workload import Workload

MODEL, A40 = models["mixtral-8x7b"], machines["a40"]
FOUR = Sequential(micro_batches=4)
ROOMY = replace(A40, gpu=replace(A40.gpu, memory=400e9))


def scenario(pipeline="vslpipe", requests=5000, output=64) -> Scenario:
    return Scenario(
        PIPELINES[pipeline],
        model=MODEL,
        machine=A40,
        memory=Memory(kv_capacity="70GB"),
        workload=Workload.lengths(98, output, requests),
        scheduler=ResourceAware(),
    )


HELD = int(70e9 // (16 * 131072)) * 16 // (98 + 64)


@pytest.mark.parametrize(
    ("pipeline", "schedule", "policy"),
    [
        ("vslpipe", VSLPipe(), Policy(HELD, -(-HELD // 2), 0, 1)),
        ("vslpipe", FOUR, Policy(HELD, -(-HELD // 4), 0, 1)),
        ("flexgen_s4", FOUR, Policy(HELD, -(-HELD // 4), 1, 1)),
        ("all_cpu", FOUR, Policy(HELD, -(-HELD // 4), 0, 0)),
    ],
    ids=lambda value: getattr(value, "name", value) if not isinstance(value, Policy) else "",
)
def test_the_policy_is_read_off_pipeline_memory_and_schedule(pipeline, schedule, policy):
    predicted = predict(scenario(pipeline), schedule)
    assert predicted.source is Source.PREDICTED
    assert predicted.gen_tok_s == pytest.approx(estimate(Job(MODEL, A40, 98, 64), policy).gen_tok_s)


def test_what_is_not_fetched_stays_on_the_gpu():
    """A layer whose weights are not streamed moves none over the link: an A40 cannot hold it, a larger one can."""
    predicted = predict(scenario("all_gpu").on(machine=ROOMY), FOUR)
    policy = Policy(HELD, -(-HELD // 4), 1, 1, 1.0, 1.0)
    assert predicted.gen_tok_s == pytest.approx(estimate(Job(MODEL, ROOMY, 98, 64), policy).gen_tok_s)
    assert predicted.busy["h2d"] == 0


def test_few_requests_are_one_batch():
    predicted = predict(scenario(requests=100), VSLPipe())
    assert predicted.iterations == 64
    assert predicted.gen_tok_s == pytest.approx(estimate(Job(MODEL, A40, 98, 64), Policy(100, 50)).gen_tok_s)


def test_it_stands_beside_the_bound_of_the_same_question():
    case = scenario()
    results = [bound(case, VSLPipe()), predict(case, VSLPipe())]
    assert results[0].same_question(results[1])
    assert [row[1] for row in compare(results).rows()] == ["bound", "predicted by MoE-Lightning"]
    assert results[1].binding == "h2d"
    assert max(results[1].busy.values()) < results[1].seconds


def test_shared_experts_are_weights_on_the_gpu_that_every_token_passes():
    shared = replace(MODEL, shared_expert_intermediate_size=4096)
    predicted = predict(scenario().on(model=shared), VSLPipe())
    assert predicted.gen_tok_s == pytest.approx(
        estimate(Job(shared, A40, 98, 64), Policy(HELD, -(-HELD // 2))).gen_tok_s
    )
    assert predicted.busy["gpu"] > predict(scenario(), VSLPipe()).busy["gpu"]
    beside = gpu(qkv, attention, out_proj, route) >> (gpu(shared_experts) | offload >> cpu(experts) >> load)
    assert predict(scenario().on(pipeline=beside >> gpu(combine), model=shared, machine=ROOMY), FOUR).gen_tok_s
    follow = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    assert predict(scenario().on(pipeline=follow, machine=ROOMY), FOUR).gen_tok_s
    with pytest.raises(ScenarioError, match=r"shared ones on the gpu, not cpu\(shared_experts\)"):
        predict(scenario().on(pipeline=follow, model=shared, machine=ROOMY), FOUR)


def test_what_the_model_has_no_word_for_is_refused():
    with pytest.raises(ScenarioError, match="predict has one precision, not weights in bf16 and KV in fp32"):
        predict(scenario().on(memory=Memory(kv_capacity="70GB", weights="bf16", kv="fp32")), VSLPipe())
    with pytest.raises(ScenarioError, match="outputs have one token"):
        predict(scenario(output=1), VSLPipe())
    late = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
    with pytest.raises(ScenarioError, match=r"not cpu\(experts, defer=1\); use bound or simulate"):
        predict(scenario().on(pipeline=late, machine=ROOMY), FOUR)
    scaled = Op("scale", ("x",), ("x",), work=lambda rows, model, precision: Work())
    own = gpu(qkv, attention, scaled, out_proj, moe)
    with pytest.raises(ScenarioError, match=r"not gpu\(scale\)"):
        predict(scenario().on(pipeline=own, machine=ROOMY), FOUR)


def test_arrivals_are_no_part_of_either_papers_model():
    of = scenario(requests=10)
    late = of.on(workload=of.workload.arriving(rate=1.0))
    for read in (predict, moe_lens.predict):
        with pytest.raises(ScenarioError, match=r"predict is about a pile of requests, not about arrivals"):
            read(late, VSLPipe())
