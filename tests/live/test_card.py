"""The engine with its gpu lane on a simulated card: the host's tokens under every adversary, and nothing is left."""

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.device.memory import DeviceMemory
from tests.device.races import RaceError
from tests.device.rehearsal import RehearsedDriver, rehearsed
from tests.device.streams import Adversary, LostError
from tests.examples import DEEP
from tests.live.conftest import MakeModel
from tests.live.test_expert_sets import CASES as CASES_OF_SETS
from tests.live.test_expert_sets import of_case
from tests.live.test_stacks import ASKED, SCHEDULERS
from tests.live.world import OF_SYSTEMS, TINY, WIRED, lane_threads, longest, requests, scenario
from tests.systems import STACKS
from workbench.core.errors import CapacityError, EngineError, ScenarioError, StoppedError
from workbench.engine.devices import opening
from workbench.engine.devices.cuda import CudaStream
from workbench.engine.devices.driver import Stream
from workbench.engine.devices.host import HostStream
from workbench.engine.lanes.executor import Executor
from workbench.engine.lanes.lane import Job
from workbench.engine.lanes.transfer import Transfer, copy_over
from workbench.engine.loading.stored import packed_of
from workbench.engine.loading.tensors import Tensors
from workbench.engine.model import ops
from workbench.engine.model.few_rows import FewRows
from workbench.engine.model.forward import Forward
from workbench.kernels import Quantised, dequantise, experts_in_rows
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, Stack, cpu, fetch, gpu, load, offload
from workbench.pipeline.layer_graph import WEIGHTS, Node, NodeKind
from workbench.schedules import Overlap, Schedule, Sequential
from workbench.schedules.plan import Task
from workbench.stages import (
    Op,
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    weights,
)

ANY = ("all_gpu", "all_cpu", "flexgen_s4", "vslpipe", "experts_on_cpu", "both_on_cpu", "deferring")
WAYS: dict[str, tuple[Pipeline | Stack, Schedule]] = {
    **{f"{name}, {schedule.name}": (WIRED[name], schedule) for name, schedule in OF_SYSTEMS},
    **{f"{name}, {schedule.name}": (WIRED[name], schedule)
       for name, schedule in itertools.product(ANY, (Sequential(2), Sequential(2, prefetch=True)))},
    **STACKS,
}  # fmt: skip
"""Every schedule of a system with a pipeline that it takes, any pipeline in turn, and the golden stacks."""
CASES = [*itertools.product(WAYS, range(len(SCHEDULERS)), range(4))]
CHOSEN = CASES if DEEP else random.Random(0).sample(CASES, len(CASES) // 80)


@pytest.fixture(scope="module")
def four(make_model: MakeModel) -> ModelConfig:
    return make_model(replace(TINY, name="four-wide", num_hidden_layers=4, head_dim=16), 2)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RehearsedDriver]]:
    """Lets the next runs compute on a simulated card; the list has the driver of each."""

    def use(adversary: Adversary) -> list[RehearsedDriver]:
        drivers = list[RehearsedDriver]()

        def make(limit: float) -> RehearsedDriver:
            drivers.append(rehearsed(adversary, total=1 << 34, limit=limit))
            return drivers[-1]

        monkeypatch.setattr(opening, "CudaDriver", make)
        return drivers

    return use


def with_memory(of: wb.Scenario, size: float) -> wb.Scenario:
    """The scenario on a card of so many bytes."""
    return of.on(machine=replace(of.machine, gpu=replace(of.machine.gpu, memory=size)))


def asked_of(model: ModelConfig, stack: Pipeline | Stack, scheduler: Any = SCHEDULERS[0]) -> wb.Scenario:
    return scenario(model, ASKED, stack, tokens=longest(ASKED) + 20, block=8).on(scheduler=scheduler)


@pytest.mark.parametrize("name, scheduler, seed", CHOSEN)
def test_tokens_are_the_hosts(name: str, scheduler: int, seed: int, four: ModelConfig, on_card: Any) -> None:
    pipeline, schedule = WAYS[name]
    of = asked_of(four, pipeline, SCHEDULERS[scheduler])
    on_card(Adversary(seed=seed) if seed else Adversary())
    try:
        found = wb.run(of, schedule, device="cuda")
    except ScenarioError as error:
        if "in pieces" not in str(error):
            raise
        pytest.skip("the pipeline takes no prompts in pieces")
    here = wb.run(of, schedule)
    assert found.tokens == here.tokens
    assert found.expert_counts == here.expert_counts
    assert found.backend.startswith("gpu lane on rehearsal")


LATENT: dict[str, Pipeline] = {
    "all on the card": gpu(qkv, attention, out_proj, moe),
    "all streamed": fetch(weights) | gpu(qkv, attention, out_proj, moe),
    "latents fetched": fetch(experts.weights, kv) | gpu(qkv, attention, out_proj, moe),
    "experts on the CPU": WIRED["experts_on_cpu"],
    "decodes on the CPU": gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe),
    "attention on the CPU": cpu(qkv, attention, out_proj) >> load >> gpu(moe) >> offload,
}
"""Pipelines in which prompt attention has the weights of the projections around it."""


OF_LATENTS = [
    (name, scheduler)
    for name, scheduler in itertools.product(LATENT, range(len(SCHEDULERS)) if DEEP else (0, 3))
    if scheduler < 3 or name != "decodes on the CPU"  # which takes no prompts in pieces
]


@pytest.mark.parametrize(("name", "scheduler"), OF_LATENTS)
def test_latent_attention_on_a_card(name: str, scheduler: int, made: Any, on_card: Any) -> None:
    """Queries and outputs, whose rows differ between prompts and decodes, cross the link too."""
    model = made("deepseek_v3, packed")
    of = asked_of(model, LATENT[name], SCHEDULERS[scheduler])
    here = wb.run(of, Sequential(2, prefetch=True))
    for adversary in (Adversary(), Adversary(seed=scheduler + 1)):
        on_card(adversary)
        assert wb.run(of, Sequential(2, prefetch=True), device="cuda").tokens == here.tokens


QUANTISED: dict[str, Pipeline] = {
    "on the card": WIRED["all_gpu"],
    "streamed": WIRED["flexgen_s4"],
    "a set streamed": fetch(experts[2:].weights)
    | gpu(qkv, attention, out_proj, route, experts[:2], experts[2:], combine),
    "chosen": fetch(experts.chosen) | gpu(qkv, attention, out_proj, moe),
    "prompts on the card": gpu(qkv, attention, out_proj, route)
    >> (gpu(experts.prefill) | offload >> cpu(experts.decode) >> load)
    >> gpu(combine),
}


@pytest.fixture(scope="module")
def wide(make_model: MakeModel) -> ModelConfig:
    """A model whose experts can be packed."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16}
    return make_model(replace(TINY, name="three-wide", **sizes), 3)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", QUANTISED)
def test_rounded_experts_on_a_card(
    name: str, form: str, wide: ModelConfig, on_card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card's experts have the numbers and scales of those that the CPU packs, which round activations besides."""
    of = asked_of(wide, QUANTISED[name])
    of = of.on(memory=replace(of.memory, weights=form))
    matrices = ops._matrices

    def exact(tensors: Tensors) -> Any:
        if "gate_up_blocks" not in tensors:
            return matrices(tensors)
        both = experts_in_rows(packed_of(tensors))
        return tuple(dequantise(Quantised(*map(torch.from_numpy, rows)), torch.float32) for rows in both)

    monkeypatch.setattr(ops, "_matrices", exact)
    monkeypatch.setattr(FewRows, "of", lambda self, method, tensors, rows: None)
    here = wb.run(of, Sequential(2, prefetch=True))
    on_card(Adversary(seed=1))
    found = wb.run(of, Sequential(2, prefetch=True), device="cuda")
    assert found.tokens == here.tokens


def test_rounded_experts_that_no_card_can_have_are_refused(wide: ModelConfig, on_card: Any) -> None:
    both = fetch(experts.weights) | QUANTISED["prompts on the card"]
    of = asked_of(wide, both)
    on_card(Adversary())
    with pytest.raises(EngineError, match=r"laid out for the device that computes them, and .* streams some"):
        wb.run(of.on(memory=replace(of.memory, weights="int4")), Sequential(), device="cuda")


def of_checkpoint(path: Path) -> wb.Scenario:
    """The scenario of a quantised checkpoint as it is stored, on the GPU."""
    model = wb.checkpoint(path)
    asked = requests((1, 19, 7), 8, vocab=model.vocab_size, seed=7)
    of = scenario(model, asked, WIRED["all_gpu"], precision="fp32")
    return of.on(memory=replace(of.memory, weights=None))


def test_symmetric_int4_of_a_checkpoint_on_a_card(quantised: Any, on_card: Any) -> None:
    """With the numbers into which fp32 converts them: a card rounds no activations."""
    of = of_checkpoint(quantised("qwen3_moe, gptq int4_g32"))
    wanted = wb.run(of.on(memory=replace(of.memory, weights="fp32")), Sequential()).tokens
    on_card(Adversary(seed=1))
    found = wb.run(of, Sequential(), device="cuda")
    assert found.tokens == wanted
    assert "int4 (experts) and fp32" in found.facts["weights"]


def test_zero_points_on_a_card_are_refused(quantised: Any, on_card: Any) -> None:
    on_card(Adversary())
    with pytest.raises(EngineError, match=r"experts in uint4 are held for the CPU's kernels, .*Memory\(weights='int4'"):
        wb.run(of_checkpoint(quantised("mixtral, awq uint4_g64")), Sequential(), device="cuda")


SETS = ("half of the experts", "others in each layer", "three sets", "a streamed set", "rows apart of a set")


@pytest.mark.parametrize("schedule", [Sequential(2, prefetch=True), Overlap(2, 3)], ids=repr)
@pytest.mark.parametrize("name", SETS)
def test_sets_of_experts_on_a_card(name: str, schedule: Schedule, four: ModelConfig, on_card: Any) -> None:
    of = of_case(CASES_OF_SETS[name], four).on(scheduler=SCHEDULERS[0])
    here = wb.run(of, schedule)
    on_card(Adversary(seed=3))
    found = wb.run(of, schedule, device="cuda")
    assert (found.tokens, found.expert_counts) == (here.tokens, here.expert_counts)


@pytest.mark.parametrize("name", ["vslpipe", "flexgen_s4"])
def test_the_host_waits_as_often_for_many_layers_as_for_few(name: str, make_model: MakeModel, on_card: Any) -> None:
    """Positions, tables and counts of experts cross the link once for a batch, not once for each layer."""
    waits = list[int]()
    for layers in (2, 5):
        model = make_model(replace(TINY, name=f"of-{layers}", num_hidden_layers=layers, head_dim=16), 2)
        drivers = on_card(Adversary())
        wb.run(asked_of(model, WIRED[name]), Sequential(), device="cuda")
        waits.append(sum(drivers[0].waits.values()))
    assert waits[0] == waits[1]


@pytest.fixture
def lane_waits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operation made the gpu lane wait."""
    waits = Counter[str]()

    def finish(memory: DeviceMemory, name: str) -> None:
        lane = threading.current_thread().name
        if lane == "lane-gpu":
            waits[name] += 1
        memory.queues.finish(memory.queues.current.record())

    monkeypatch.setattr(DeviceMemory, "finish", finish)
    return waits


def test_within_an_iteration_the_host_waits_for_token_ids_and_chosen_tokens_alone(
    four: ModelConfig, on_card: Any, lane_waits: Counter[str]
) -> None:
    """What a batch's layout says is there before the first task: else each table would wait for the card's work."""
    on_card(Adversary())
    found = wb.run(asked_of(four, WIRED["flexgen_s4"]), Sequential(), device="cuda")
    first_layer = 3  # slots, table and lengths of the blocks that attention brings, which every layer numbers alike
    assert lane_waits == {
        "aten::copy_": (1 + first_layer) * found.iterations - first_layer,
        "aten::_to_copy": found.iterations,
    }


def test_sets_of_experts_wait_for_nothing_more(four: ModelConfig, on_card: Any, lane_waits: Counter[str]) -> None:
    """The card finds the pairs of a set itself, by a table that comes there once."""
    on_card(Adversary())
    found = wb.run(asked_of(four, CASES_OF_SETS["half of the experts"].pipeline), Sequential(), device="cuda")
    assert lane_waits == {"aten::copy_": found.iterations + 1, "aten::_to_copy": found.iterations}


@pytest.mark.parametrize("pipeline", [WIRED["vslpipe"], CASES_OF_SETS["a streamed set"].pipeline], ids=str)
def test_the_card_is_empty_afterwards(pipeline: Pipeline, four: ModelConfig, on_card: Any) -> None:
    drivers = on_card(Adversary())
    wb.run(asked_of(four, pipeline), Sequential(prefetch=True), device="cuda")
    (driver,) = drivers
    assert driver.peak > 0
    assert not driver.cuda.memory.used
    assert not driver.cuda.memory.pinned


@pytest.mark.parametrize("piece", [1, 500] if not DEEP else [*range(1, 2001, 40)])
def test_a_lost_card_ends_the_run(piece: int, four: ModelConfig, on_card: Any) -> None:
    on_card(Adversary(breaks=piece))
    with pytest.raises(LostError):
        wb.run(asked_of(four, WIRED["flexgen_s4"]), Sequential(prefetch=True), device="cuda")
    assert not lane_threads()


@pytest.mark.parametrize("name", ["vslpipe", "flexgen_s4", "experts_on_cpu", "all_gpu"])
def test_the_ledgers_bytes_are_enough(name: str, four: ModelConfig, on_card: Any) -> None:
    of = asked_of(four, WIRED[name])
    needed = wb.fits(of, Sequential(prefetch=True)).gpu.total
    drivers = on_card(Adversary())
    wb.run(with_memory(of, needed), Sequential(prefetch=True), device="cuda")
    assert drivers[0].peak <= needed


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_full_card_has_the_ledger_beside_its_error(
    share: float, four: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model is loaded, and in an iteration."""
    of = asked_of(four, WIRED["all_gpu"])
    drivers = list[RehearsedDriver]()

    def smaller(limit: float) -> RehearsedDriver:
        drivers.append(rehearsed(Adversary(), total=1 << 34, limit=share * wb.fits(of, Sequential()).gpu.total))
        return drivers[-1]

    monkeypatch.setattr(opening, "CudaDriver", smaller)
    with pytest.raises(CapacityError, match=r"the card has 8 GB .* are counted \(weights .*limit\(gpu_memory=") as held:
        wb.run(of, Sequential(), device="cuda")
    assert held.value.__traceback__ is not None
    assert not drivers[0].cuda.memory.used
    assert not drivers[0].cuda.memory.pinned
    assert not lane_threads()


def test_memory_that_is_freed_too_early_is_noticed(
    four: ModelConfig, on_card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaStream, "keep", lambda self, held: None)
    on_card(Adversary())
    with pytest.raises(RaceError):
        wb.run(asked_of(four, WIRED["flexgen_s4"]), Sequential(2), device="cuda")


def test_rows_sent_from_one_place_are_noticed(four: ModelConfig, on_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts' rows must not be overwritten by those of decodes before they have been sent."""
    sendable = Forward._sendable
    monkeypatch.setattr(Forward, "_sendable", lambda self, key, rows: sendable(self, key[:2], rows))
    of = asked_of(four, WIRED["experts_on_cpu"])
    on_card(Adversary())
    assert wb.run(of, Sequential(), device="cuda").tokens != wb.run(of, Sequential()).tokens


@pytest.mark.parametrize(
    "device, said", [("tpu", "no device 'tpu'"), ("cuda", "heads of 8 dims, and attention on a card takes 16 to 256")]
)
def test_what_a_card_cannot_is_refused(device: str, said: str, tiny: ModelConfig) -> None:
    with pytest.raises(EngineError, match=said):
        wb.run(scenario(tiny, ASKED), Sequential(), device=device)


def test_a_card_smaller_than_the_scenarios_is_refused(four: ModelConfig) -> None:
    with pytest.raises(EngineError, match=r"the scenario's GPU has 8 GB and this card .*limit\(gpu_memory="):
        rehearsed(Adversary(), total=1 << 30, limit=8e9)


def test_start_computes_there_too(four: ModelConfig, on_card: Any) -> None:
    on_card(Adversary())
    of = asked_of(four, WIRED["vslpipe"])
    assert wb.start(of, Sequential(), device="cuda").wait(60).tokens == wb.run(of, Sequential()).tokens


CPU_WRITES = [
    gpu(qkv, attention, out_proj) >> offload >> cpu(route, experts, combine) >> load,
    gpu(qkv) >> offload >> cpu(attention, out_proj) >> load >> gpu(moe),
    gpu(qkv, attention, out_proj, route)
    >> (gpu(experts.prefill) | offload >> cpu(experts.decode) >> load)
    >> gpu(combine),
]
"""The CPU writes buffers that the link brings down again, or has experts that the card has too."""


@pytest.mark.parametrize("pipeline", CPU_WRITES, ids=str)
def test_both_devices_may_have_the_same(pipeline: Pipeline, four: ModelConfig, on_card: Any) -> None:
    of = asked_of(four, pipeline)
    on_card(Adversary())
    assert wb.run(of, Sequential(), device="cuda").tokens == wb.run(of, Sequential()).tokens


def failing(*_rest: Any) -> None:
    raise ValueError("a fault in a task")


def test_nothing_stays_on_the_card_while_an_error_is_held(
    four: ModelConfig, on_card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forward, "logits", failing)
    drivers = on_card(Adversary())
    with pytest.raises(ValueError, match="a fault") as held:
        wb.run(asked_of(four, WIRED["vslpipe"]), Sequential(prefetch=True), device="cuda")
    assert held.value.__traceback__ is not None
    assert not drivers[0].cuda.memory.used
    assert not drivers[0].cuda.memory.pinned


def test_a_second_run_is_refused_before_it_touches_the_card(four: ModelConfig, on_card: Any) -> None:
    of = asked_of(four, WIRED["vslpipe"])
    drivers = on_card(Adversary())
    first = wb.start(of, Sequential(), device="cuda")
    with pytest.raises(EngineError, match="goes on"):
        wb.run(of, Sequential(), device="cuda")
    with pytest.raises(EngineError, match="on a card has it for itself; leave alongside out"):
        wb.run(of, Sequential(), device="cuda", alongside=True)
    first.stop()
    assert len(drivers) == 1


def test_an_own_operation_answers_on_the_card(four: ModelConfig, on_card: Any) -> None:
    """It is given tensors there; an answer on the host is refused by name."""
    doubled = Op("doubled", reads=("routed",), writes=("routed",), run=lambda routed: routed + routed)
    lost = replace(doubled, run=lambda routed: torch.zeros(routed.shape))
    of = asked_of(four, gpu(qkv, attention, out_proj, route, experts, doubled, combine))
    on_card(Adversary())
    assert wb.run(of, Sequential(), device="cuda").tokens == wb.run(of, Sequential()).tokens
    of = of.on(pipeline=gpu(qkv, attention, out_proj, route, experts, lost, combine))
    with pytest.raises(EngineError, match=r"wrote routed on cpu; return it on sim:0"):
        wb.run(of, Sequential(), device="cuda")


class Noted:
    """A copy of several packets to the card that tells when it begins; `target` is where it goes."""

    def __init__(self, driver: RehearsedDriver, name: str, said: list[str]) -> None:
        self.source = torch.from_numpy(np.random.default_rng(len(name)).integers(0, 256, 200_000, np.uint8))
        self.target = driver.empty(self.source.shape, torch.uint8)
        self._copy = copy_over(driver, self.target, driver.pin(self.source))
        self._said = said
        self._name = name

    @property
    def nbytes(self) -> int:
        return self._copy.nbytes

    def pieces(self, size: int, stream: Stream) -> Iterator[int]:
        self._said.append(f"begun {self._name}")
        yield from self._copy.pieces(size, stream)


class Link:
    """An executor on a simulated card, whose link moves three transfers: two of bulk, a small one between them."""

    names = ("first", "small", "second")

    def __init__(self) -> None:
        self.driver = rehearsed(Adversary())
        self.said = list[str]()
        self.copies = {name: Noted(self.driver, name, self.said) for name in self.names}
        self.executor = Executor(1e6, 1e6, throttled=False, packet_seconds=1e-3, driver=self.driver)

    def run(self, on_landing: Callable[[str], object] = lambda name: None) -> list[Job]:
        small = Task(Node(NodeKind.MOVE, "H", "h2d"), 0, 0, after=(0,))
        tasks = [Task(WEIGHTS, 0, None, bulk=True), small, Task(WEIGHTS, 1, None, bulk=True)]

        def landed(name: str) -> None:
            self.said.append(f"landed {name}")
            on_landing(name)

        def action(name: str) -> Callable[[], Transfer]:
            return lambda: Transfer([self.copies[name]], partial(landed, name))

        return self.executor.run(tasks, [action(name) for name in self.names])

    def close(self) -> None:
        self.executor.close()
        self.driver.close()


def test_the_link_goes_on_from_one_bulk_transfer_to_the_next() -> None:
    """The card has the next copies before the last ones have landed, and has each once; a small one comes between."""
    link = Link()
    try:
        jobs = link.run()
        with link.driver.stream("h2d").issuing():
            there = {name: copy.target.cpu() for name, copy in link.copies.items()}
    finally:
        link.close()
    assert [job.bytes for job in jobs] == [200_000] * 3
    assert all(torch.equal(there[name], copy.source) for name, copy in link.copies.items())
    before = link.said[: link.said.index("landed first")]
    assert before == ["begun first", "begun second"]
    assert sorted(link.said[len(before) :]) == ["begun small", "landed first", "landed second", "landed small"]


def test_the_cpu_lane_has_nothing_to_do_with_the_card() -> None:
    link = Link()
    try:
        assert isinstance(link.executor.lanes["cpu"].stream, HostStream)
        assert not isinstance(link.executor.lanes["gpu"].stream, HostStream)
    finally:
        link.close()


def test_a_transfer_that_was_begun_and_had_no_turn_leaves_nothing_on_the_card() -> None:
    link = Link()
    try:
        with pytest.raises(StoppedError):
            link.run(lambda name: link.executor.control.stop())
    finally:
        link.copies.clear()
        link.close()
    assert link.said == ["begun first", "begun second", "landed first"]
    assert not link.driver.cuda.memory.used
