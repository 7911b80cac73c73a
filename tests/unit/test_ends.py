"""Requests that end before their output length: no scheduler knows when, and every reader counts what there is."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import tiny_model, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES
from workbench.analysis.compare import compare
from workbench.core.errors import CheckpointError, ScenarioError, WorkloadError
from workbench.core.result import Result
from workbench.models import eos_token_ids
from workbench.perfmodels import bound
from workbench.perfmodels.moe_lens import predict
from workbench.scenario import Scenario
from workbench.scheduler.registry import every_scheduler
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate, steady
from workbench.workload import Request, Sampling, Workload

PROMPTS, OUTPUTS, ENDS = [9, 4, 7, 5, 3, 8], [12, 6, 9, 12, 1, 12], [3, 6, 1, 12, 1, 5]


def ending(*, blocks: int = 20, **rest: Any) -> Scenario:
    scenario = tiny_scenario(PROMPTS, OUTPUTS, blocks=blocks, block=2, **rest)
    return scenario.on(workload=scenario.workload.ending(at=ENDS))


# ------------------------------------------------------------------------------------------------------- the workload


def test_without_ends_requests_generate_what_was_asked_for():
    workload = Workload.lengths(PROMPTS, OUTPUTS)
    assert workload.generated_len is workload.output_len
    assert workload.as_asked is workload.as_served is workload
    assert not workload.may_end


def test_ends_are_what_is_generated_and_schedulers_see_what_was_asked_for():
    workload = Workload.lengths(PROMPTS, OUTPUTS).ending(at=ENDS)
    assert workload.may_end
    assert workload.generated_len.tolist() == ENDS
    assert (workload.as_asked.output_len.tolist(), len(workload.as_asked.ends)) == (OUTPUTS, 0)
    assert (workload.as_served.output_len.tolist(), len(workload.as_served.ends)) == (ENDS, 0)
    assert "mean end 4.667" in str(workload)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ([], "6 requests and no ends"),
        ([1, 2], "2 ends of 6 requests"),
        (3, "1 ends of 6 requests"),
        ([3, 0, 1, 1, 1, 1], "request 1 .* ends with token 0; give 1 to 6"),
        ([3, 7, 1, 1, 1, 1], "request 1 .* ends with token 7; give 1 to 6"),
        ([0.5] * 6, "whole numbers"),
    ],
)
def test_ends_that_cannot_be_are_refused(at, words):
    with pytest.raises(WorkloadError, match=words):
        Workload.lengths(PROMPTS, OUTPUTS).ending(at=at)


def test_stop_tokens_are_asked_for_in_requests():
    workload = Workload.of([Request((1, 2), 5, Sampling(temperature=0.5)), Request((3,), 4)])
    assert not workload.may_end
    stopping = workload.stopping(at=[7, 9])
    assert stopping.may_end
    assert [each.sampling.stop_token_ids for each in stopping.requests] == [(7, 9)] * 2
    assert stopping.requests[0].sampling.temperature == 0.5
    assert not stopping.stopping(at=[]).may_end


def test_stop_tokens_that_are_none_are_refused():
    for wrong in ([-1], [0.5], ["a"], "7", 7, [2**63], [True]):
        with pytest.raises(WorkloadError, match=r"stop_token_ids must be token ids|takes a sequence of token ids"):
            Workload.of([Request((1,), 2)]).stopping(at=wrong)
    with pytest.raises(WorkloadError, match="no tokens to stop at; use ending"):
        Workload.lengths(3, 4).stopping(at=[7])


def test_stop_tokens_stand_in_files_of_requests(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "ab", "stop_token_ids": [10, 2]}\n{"prompt": "c"}\n')
    stops = [request.sampling.stop_token_ids for request in Workload.from_jsonl(path).requests]
    assert stops == [(10, 2), ()]
    for wrong in ("7", '["a"]', "[-1]"):
        path.write_text(f'{{"prompt": "ab", "stop_token_ids": {wrong}}}\n')
        with pytest.raises(WorkloadError, match=r"asked.jsonl:1.*stop_token_ids"):
            Workload.from_jsonl(path)


@pytest.mark.parametrize(("named", "found"), [(2, (2,)), ([2, 7], (2, 7))])
def test_a_checkpoint_names_its_end_of_sequence_tokens(named, found, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 99}))
    assert eos_token_ids(tmp_path) == (99,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert eos_token_ids(str(tmp_path)) == eos_token_ids(replace(tiny_model(), path=tmp_path)) == found
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(tmp_path) == (99,)


def test_a_checkpoint_without_or_with_a_damaged_end_of_sequence_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint with files"):
        eos_token_ids(tiny_model())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": []}))
    with pytest.raises(CheckpointError, match=r"names no eos_token_id in generation_config.json or config.json"):
        eos_token_ids(tmp_path)
    for wrong in ('{"eos_token_id": "</s>"}', '{"eos_token_id": [2, -1]}', '{"eos_token_id": true}', "{"):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=r"must be a token id|not valid JSON"):
            eos_token_ids(tmp_path)


# ------------------------------------------------------------------------------------------------------- the readers


@pytest.mark.parametrize("scheduler", every_scheduler(), ids=repr)
@pytest.mark.parametrize("detail", Detail)
def test_a_simulation_generates_up_to_the_ends(scheduler, detail):
    result = simulate(ending(scheduler=scheduler, pipeline=PIPELINES["all_gpu"]), Sequential(), detail=detail)
    assert result.generated == sum(ENDS)
    assert result.latencies.request == tuple(range(6))
    assert len(result.latencies.tbt) == sum(end - 1 for end in ENDS)
    assert result.processed == sum(PROMPTS) + sum(end - 1 for end in ENDS) + result.recomputed


def test_the_mean_gap_divides_by_what_was_generated():
    alone = tiny_scenario([4], [9])
    result = simulate(alone.on(workload=alone.workload.ending(at=[4])), Sequential())
    assert result.iterations == 4
    assert result.tbt == pytest.approx((result.latencies.last[0] - result.latencies.first[0]) / 3)


def test_blocks_of_a_request_that_ended_go_to_the_next_one_at_once():
    """Two blocks hold one request; the second begins in the iteration after the first one's end."""
    one = tiny_scenario([3, 3], [2, 2], blocks=2, block=2)
    ended = simulate(one.on(workload=one.workload.ending(at=[1, 2])), Sequential())
    assert ended.steps.prefill == (3, 3, 0)
    assert ended.steps.decode == (0, 0, 1)
    assert simulate(one, Sequential()).steps.prefill == (3, 0, 3, 0)


@dataclass(frozen=True)
class Curious(ResourceAware):
    """Tells what it is shown of a workload."""

    shown: Any = None

    def open(self, workload: Workload, *rest: Any) -> Any:
        self.shown.append(workload)
        return super().open(workload, *rest)


def test_no_scheduler_sees_an_end():
    shown: list[Workload] = []
    simulate(ending(scheduler=Curious(shown=shown)), Sequential())
    assert shown[0].output_len.tolist() == shown[0].generated_len.tolist() == OUTPUTS


def test_until_the_first_end_all_is_as_if_there_were_none():
    scenario = ending(token_budget=11)
    without = simulate(scenario.on(workload=scenario.workload.as_asked), Sequential()).steps
    late = simulate(scenario.on(workload=scenario.workload.ending(at=[12, 6, 9, 12, 1, 11])), Sequential()).steps
    assert late.prefill[:8] == without.prefill[:8]
    assert late.decode[:8] == without.decode[:8]


@dataclass(frozen=True)
class Deaf(ResourceAware):
    """A scheduler whose queue lets requests go on that have ended."""

    def open(self, *arguments: Any) -> Any:
        queue = super().open(*arguments)
        complete = queue.complete
        queue.complete = lambda batch, ended: complete(batch)  # type: ignore[method-assign,misc]
        return queue


def test_a_scheduler_that_goes_on_after_an_end_is_told():
    with pytest.raises(ScenarioError, match=r"0 requests unfinished and 52 tokens emitted.*is told that it ended"):
        simulate(ending(scheduler=Deaf()), Sequential())


def test_predictions_and_the_settled_iteration_count_what_is_generated():
    scenario = ending(blocks=100, token_budget=64)
    shorter = scenario.on(workload=scenario.workload.as_served)
    assert steady(scenario, VSLPipe()).timeline == steady(shorter, VSLPipe()).timeline
    assert predict(scenario, VSLPipe()).seconds == predict(shorter, VSLPipe()).seconds
    assert predict(scenario, VSLPipe()).generated == sum(ENDS)


def test_a_bound_with_ends_is_that_of_the_shorter_workload():
    scenario = ending()
    shorter = bound(scenario.on(workload=scenario.workload.as_served), Sequential())
    least = bound(scenario, Sequential())
    assert (least.seconds, least.generated, least.iterations) == (shorter.seconds, sum(ENDS), shorter.iterations)


@examples(40)
@given(st.data())
def test_no_simulation_beats_the_bound_of_the_same_ends(data):
    size = data.draw(st.integers(1, 6))
    lengths = st.lists(st.integers(1, 12), min_size=size, max_size=size)
    prompts, outputs = data.draw(lengths), data.draw(lengths)
    ends = [data.draw(st.integers(1, output)) for output in outputs]
    scheduler = data.draw(st.sampled_from(every_scheduler()))
    blocks, pipeline = data.draw(st.integers(12, 40)), PIPELINES[data.draw(st.sampled_from(["all_gpu", "all_cpu"]))]
    scenario = tiny_scenario(prompts, outputs, blocks=blocks, block=2, scheduler=scheduler, pipeline=pipeline)
    scenario = scenario.on(workload=scenario.workload.ending(at=ends))
    least, simulated = (read(scenario, Sequential()) for read in (bound, simulate))
    assert least.seconds <= simulated.seconds * (1 + 1e-9)
    assert least.iterations <= simulated.iterations
    assert least.generated == simulated.generated == sum(ends)


# ------------------------------------------------------------------------------------------------- questions and files


def test_results_of_other_ends_are_of_another_question():
    scenario = ending()
    without = scenario.on(workload=scenario.workload.as_asked)
    results = [bound(scenario, Sequential()), simulate(without, Sequential())]
    (alone,) = compare(results).explanations()
    assert "of the bound" not in alone
    assert len(compare([results[0], simulate(scenario, Sequential())]).explanations()) == 1
    told = "3 requests before their output length, after 28 of 52 tokens in all"
    assert (results[0].facts["ended"], results[1].facts.get("ended")) == (told, None)


def test_the_same_ends_of_other_requests_are_another_question():
    one = tiny_scenario([4] * 3, [5] * 3)
    asked = [one.on(workload=one.workload.ending(at=at)) for at in ([2, 3, 5], [2, 5, 3], [2, 3, 5])]
    first, other, again = (simulate(scenario, Sequential()) for scenario in asked)
    assert first.facts["ended"] == other.facts["ended"]
    assert first.same_question(again)
    assert not first.same_question(other)


def test_ends_that_are_the_output_lengths_change_no_answer():
    scenario = ending()
    to_the_last = scenario.on(workload=scenario.workload.ending(at=OUTPUTS))
    without = scenario.on(workload=scenario.workload.as_asked)
    mine, theirs = (simulate(one, Sequential()) for one in (to_the_last, without))
    assert mine.same_question(theirs)
    assert mine.diff(theirs) == {}


def test_a_result_with_ends_is_saved_and_comes_back(tmp_path):
    result = simulate(ending(), Sequential())
    found = Result.load(result.save(tmp_path / "result.json"))
    assert found.diff(result) == {}
    assert found.latencies == result.latencies
    assert not math.isnan(found.tbt)


def test_a_scenario_with_ends_and_stop_tokens_is_saved_and_comes_back(tmp_path):
    found = Scenario.load(ending().save(tmp_path / "scenario.json"))
    assert np.array_equal(found.workload.ends, ENDS)
    assert found.diff(ending()) == {}
    asked = Workload.of([Request((1, 2), 5)]).stopping(at=[7, 9])
    of_tokens = ending().on(workload=asked)
    assert Scenario.load(of_tokens.save(tmp_path / "scenario.json")).workload.requests == asked.requests
    assert of_tokens.diff(of_tokens.on(workload=asked.stopping(at=[7]))) != {}
