"""Whole numbers and reals of numpy are numbers at every door, and what is made of them is plain."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from workbench.core.latency import Slo
from workbench.core.records import to_plain
from workbench.core.result import Result, Source
from workbench.hardware import Interconnect, Link
from workbench.models import model, models
from workbench.pipeline import cpu, gpu, load
from workbench.scenario import Memory, Scenario
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.resource_aware import ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import CGOPipe, FastDecode, FlexGenS3, FlexGenS4, Sequential, VSLPipe
from workbench.simulate import simulate
from workbench.stages import combine, experts
from workbench.workload import Request, Sampling, Workload, workloads
from workbench.workload.exam import make_exam
from workbench.workload.tokenizer import BYTES

CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100}
CONFIG |= {"max_position_embeddings": 512}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "ModelConfig": lambda n: replace(tiny_model(), num_hidden_layers=n, first_k_dense_replace=n - n),
    "config": lambda n: model({**CONFIG, "num_hidden_layers": n, "num_experts_per_tok": n}),
    "Memory": lambda n: Memory(1000, kv_block=n),
    "Device.times": lambda n: small_machine().gpu.times(n),
    "Sequential": Sequential,
    "CGOPipe": CGOPipe,
    "FastDecode": FastDecode,
    "FlexGenS3": FlexGenS3,
    "FlexGenS4": FlexGenS4,
    "VSLPipe": lambda n: VSLPipe(weight_slots=n),
    "ResourceAware": ResourceAware,
    "StaticBatching": lambda n: StaticBatching(n, n, n),
    "ContinuousBatching": ContinuousBatching,
    "ChunkedPrefill": ChunkedPrefill,
    "LayeredPrefill": LayeredPrefill,
    "cpu(experts)": lambda n: cpu(experts, defer=n, skip=n) >> load >> gpu(combine),
    "Sampling": lambda n: Sampling(seed=n),
    "Request": lambda n: Workload.of([Request((n, n), n)]).requests,
    "Workload.lengths": lambda n: Workload.lengths(n, n, n).prompt_len.tolist(),
    "arriving": lambda n: Workload.lengths(4, 2, 3).arriving(rate=n, seed=n).arrival.tolist(),
    "sample": lambda n: workloads["mtbench"].sample(n, n).output_len.tolist(),
    "from_histogram": lambda n: Workload.from_histogram({n: n}, requests=n, output_len=n).prompt_len.tolist(),
    "make_exam": lambda n: make_exam(n, BYTES, prompt_len=n + n).workload.prompt_len.tolist(),
    "Result": lambda n: replace(RESULT, generated=n, processed=n, preemptions=n),
}
REAL: dict[str, Callable[[Any], Any]] = {
    "Memory": lambda x: Memory(x, gpu_reserve=x),
    "Device": lambda x: replace(small_machine().gpu, memory=x, bandwidth=x, overhead=x),
    "Link": lambda x: Link(x, x, x),
    "Interconnect": lambda x: Interconnect(x, x),
    "limit": lambda x: small_machine().limit(gpu_memory=x, link=x).link,
    "ModelConfig": lambda x: replace(tiny_model(), rope_theta=x, rms_norm_eps=x),
    "config": lambda x: model({**CONFIG, "rope_theta": x}),
    "Sampling": lambda x: Sampling(temperature=x),
    "Slo": lambda x: Slo(x, x),
    "VSLPipe": lambda x: VSLPipe(packet_seconds=x),
    "Result": lambda x: replace(RESULT, seconds=x, interval=(x, x), busy={"gpu": x}),
}
RESULT = Result(Source.SIMULATED, "s", "m", "here", 1.0, 1, 1, date="today")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("door", WHOLE)
def test_a_whole_number_of_numpy_does_what_a_plain_one_does(door: str, kind: Any) -> None:
    assert WHOLE[door](kind(2)) == WHOLE[door](2)


@pytest.mark.parametrize("kind", [np.float64, np.float32], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("door", REAL)
def test_a_real_number_of_numpy_does_what_a_plain_one_does(door: str, kind: Any) -> None:
    assert REAL[door](kind(0.5)) == REAL[door](0.5)


@pytest.mark.parametrize("door", WHOLE)
@pytest.mark.parametrize("odd", [True, np.True_, "2"], ids=repr)
def test_what_is_no_number_is_still_refused(door: str, odd: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        WHOLE[door](odd)


def test_a_scenario_of_numpy_numbers_answers_and_is_saved_as_a_plain_one(tmp_path):
    def made(n: Callable[[int], Any]) -> Scenario:
        found = tiny_scenario([8, 5], [4, 2], model=replace(tiny_model(), num_hidden_layers=n(4)))
        memory = replace(found.memory, kv_block=n(4))
        asked = Workload.of([Request((n(1), n(2)), n(3), Sampling(seed=n(3)))])
        return found.on(memory=memory, workload=asked, scheduler=ResourceAware(n(30)))

    theirs, ours = made(np.int64), made(int)
    assert simulate(theirs, Sequential(np.int64(2))).seconds == simulate(ours, Sequential(2)).seconds
    assert json.dumps(theirs.to_dict()) == json.dumps(ours.to_dict())
    assert Scenario.load(theirs.save(tmp_path / "s.json")).to_dict() == ours.to_dict()
    assert json.dumps(to_plain(models["mixtral-8x7b"]))
