"""MoE-Lightning's model as a fourth reader of a scenario."""

from dataclasses import replace

import pytest

from tests.systems import PIPELINES
from workbench.compare import compare
from workbench.errors import ScenarioError
from workbench.hardware import machines
from workbench.memory import Memory
from workbench.models import models
from workbench.perfmodels import bound
from workbench.perfmodels.hrm_reader import hrm
from workbench.perfmodels.moe_lightning import Job, Policy, estimate
from workbench.result import Source
from workbench.scenario import Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.workload import Workload

MODEL, A40 = models["mixtral-8x7b"], machines["a40"]
FOUR = Sequential(micro_batches=4)


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
    predicted = hrm(scenario(pipeline), schedule)
    assert predicted.source is Source.PREDICTED
    assert predicted.gen_tok_s == pytest.approx(estimate(Job(MODEL, A40, 98, 64), policy).gen_tok_s)


def test_what_is_not_fetched_stays_on_the_gpu():
    """A layer whose weights are not streamed moves none over the link: an A40 cannot hold it, a larger one can."""
    large = replace(A40, gpu=replace(A40.gpu, memory=400e9))
    predicted = hrm(scenario("all_gpu").on(machine=large), FOUR)
    policy = Policy(HELD, -(-HELD // 4), 1, 1, 1.0, 1.0)
    assert predicted.gen_tok_s == pytest.approx(estimate(Job(MODEL, large, 98, 64), policy).gen_tok_s)
    assert predicted.busy["h2d"] == 0


def test_few_requests_are_one_batch():
    predicted = hrm(scenario(requests=100), VSLPipe())
    assert predicted.iterations == 64
    assert predicted.gen_tok_s == pytest.approx(estimate(Job(MODEL, A40, 98, 64), Policy(100, 50)).gen_tok_s)


def test_it_stands_beside_the_bound_of_the_same_question():
    case = scenario()
    results = [bound(case, VSLPipe()), hrm(case, VSLPipe())]
    assert results[0].same_question(results[1])
    assert [row[1] for row in compare(results).rows()] == ["bound", "predicted"]
    assert results[1].binding == "h2d"
    assert max(results[1].busy.values()) < results[1].seconds


def test_what_the_model_has_no_word_for_is_refused():
    with pytest.raises(ScenarioError, match="hrm has one precision, not weights in bf16 and KV in fp32"):
        hrm(scenario().on(memory=Memory(kv_capacity="70GB", weights="bf16", kv="fp32")), VSLPipe())
    with pytest.raises(ScenarioError, match="outputs have one token"):
        hrm(scenario(output=1), VSLPipe())
