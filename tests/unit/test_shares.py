"""Shares of streamed weights and KV that stay on the GPU, and weights that move only for rows that need them."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.builders import KINDS, small_machine, tiny_model, tiny_model_of, tiny_scenario
from tests.examples import examples
from tests.systems import APART, PIPELINES, STREAMED, VSL
from workbench.core.errors import CapacityError, ScenarioError
from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels import bound
from workbench.pipeline import Pipeline, fetch, gpu
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import FlexGenS4, Lowering, Overlap, Schedule, Sequential, Step, VSLPipe
from workbench.serving import fits, prepare
from workbench.simulate import Detail, simulate
from workbench.stages import ExpertSet, Place, attention, combine, experts, kv, out_proj, qkv, route, weights
from workbench.workload import Workload

EXPERT = 3 * 64 * 96 * 2
"""Bytes of one expert of the tiny model."""
FRONT = gpu(qkv, attention, out_proj, route)
HOT = ExpertSet("hot", ((0, 2), (1, 3), (0,), (0, 1, 2)))
LONG = replace(HOT, name="h" * 40)


def with_shares(of: Scenario, weights_on_gpu: float = 0.0, kv_on_gpu: float = 0.0) -> Scenario:
    return of.on(memory=replace(of.memory, weights_on_gpu=weights_on_gpu, kv_on_gpu=kv_on_gpu))


def streamed(of: Scenario, schedule: Schedule | None = None) -> float:
    """Bytes that the layers stream in one iteration."""
    return prepare(of, schedule or Sequential()).cost.weights_per_layer * of.model.num_hidden_layers


# --------------------------------------------------------------------------------------------------------------- r_w

STREAMING = {
    "all weights": VSL,
    "all on the gpu": STREAMED,
    "experts alone": fetch(experts.weights) | Pipeline(VSL.chain),
    "attention alone": fetch(qkv.weights, out_proj.weights) | Pipeline(VSL.chain),
    "one set": fetch(experts[~HOT].weights) | FRONT >> gpu(experts[HOT], experts[~HOT], combine),
    "a set of a long name": fetch(weights) | FRONT >> gpu(experts[LONG], experts[~LONG], combine),
    "both sets": fetch(weights) | FRONT >> gpu(experts[HOT], experts[~HOT], combine),
    "both classes": fetch(weights) | FRONT >> gpu(experts.prefill, experts.decode, combine),
    "one class": APART,
    "half of the layers": VSL[:2] + Pipeline(VSL.chain)[2:],
}


@examples(200)
@given(st.sampled_from(sorted(STREAMING)), st.sampled_from(sorted(KINDS)), st.floats(0, 1))
@example("one set", "plain", 0.35)
@example("both sets", "plain", 0.35)
@example("both classes", "plain", 0.35)
def test_the_share_stays_to_within_one_tensor_and_the_rest_is_streamed(name: str, kind: str, share: float) -> None:
    """What stays is on the GPU's account, what is streamed has its original on the host's."""
    of = tiny_scenario(pipeline=STREAMING[name], model=tiny_model_of(kind))
    before, after = streamed(of), streamed(with_shares(of, share))
    kept = before - after
    graph, precision = of.graph, of.precision
    sizes = [
        piece.op.weight_bytes(prepare(of, Sequential()).cost.model_at(layer), precision, layer)
        / (piece.op.members(of.model, layer) if piece.op.plain is experts else 1)
        for layer in range(4)
        for stage in graph.stages(layer)
        for piece in graph.pieces(stage, layer)
        if piece.streamed and piece.op.members(of.model, layer)
    ]
    assert share * before - max(sizes) <= kept * (1 + 1e-9) + 1e-6
    assert kept <= share * before * (1 + 1e-8) + 1e-6
    apart, whole = fits(with_shares(of, share), Sequential()), fits(of, Sequential())
    assert apart.gpu["weights"] - whole.gpu["weights"] == pytest.approx(kept)
    freed = whole.host["weights"] - apart.host["weights"]
    if name == "one class":  # the CPU computes with all of them
        assert -after <= freed <= 0
    else:
        assert freed == pytest.approx(kept)


def test_of_each_layer_what_is_no_expert_stays_first_and_then_the_first_experts() -> None:
    """Ten layers of two tensors of 1 and 2 units and four experts of 9 each."""
    model = tiny_model(4, num_key_value_heads=4)
    of = tiny_scenario(pipeline=fetch(out_proj.weights, experts.weights) | Pipeline(STREAMED.chain), model=model)
    other = 64 * 64 * 2
    layer = other + 4 * EXPERT
    share = (other + 1.5 * EXPERT) / layer
    assert [{op.name: count for op, count in kept.items()} for kept in with_shares(of, share).graph.resident] == [
        {"out_proj": 1, "experts": 1},
        {"out_proj": 1, "experts": 2},
        {"out_proj": 1, "experts": 1},
        {"out_proj": 1, "experts": 2},
    ]
    assert streamed(with_shares(of, share)) == pytest.approx((3 + 2 + 3 + 2) * EXPERT)


def test_what_is_too_little_for_a_tensor_is_kept_for_the_next_layer() -> None:
    """A tenth of 40 experts is four: the tenth, the twentieth and so on of them."""
    of = tiny_scenario(pipeline=STREAMING["experts alone"], model=tiny_model(10))
    counts = [sum(kept.values()) for kept in with_shares(of, 0.1).graph.resident]
    assert counts == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]
    assert streamed(with_shares(of, 0.1)) == pytest.approx(36 * EXPERT)


def test_all_and_nothing_are_the_pipelines_without_the_fetch_and_without_the_share() -> None:
    resident = Pipeline(VSL.chain)
    for model in map(tiny_model_of, KINDS):
        of = tiny_scenario(30, 12, 40, blocks=200, pipeline=VSL, model=model)
        assert streamed(with_shares(of, 1.0)) == 0
        assert fits(with_shares(of, 1.0), Overlap()).gpu["weight slots"] == 0
        whole = fits(of.on(pipeline=resident), Overlap())
        assert fits(with_shares(of, 1.0), Overlap()).gpu["weights"] == pytest.approx(whole.gpu["weights"])
        assert fits(with_shares(of, 1.0), Overlap()).host["weights"] == whole.host["weights"] == 0
        for schedule in (Sequential(2, prefetch=True), Overlap()):
            alike = simulate(of.on(pipeline=resident, scheduler=ResourceAware(token_budget=64)), schedule)
            all_stay = with_shares(of.on(scheduler=ResourceAware(token_budget=64)), 1.0)
            assert simulate(all_stay, schedule).seconds == pytest.approx(alike.seconds)
        assert with_shares(of, 0.0).graph.resident == ()
        assert simulate(with_shares(of, 0.0), Overlap()).seconds == simulate(of, Overlap()).seconds


@pytest.mark.parametrize(
    "schedule", [Sequential(2, prefetch=True), Overlap(), VSLPipe(), VSLPipe(weight_slots=3)], ids=str
)
@pytest.mark.parametrize("detail", Detail)
def test_more_on_the_gpu_is_never_slower(schedule: Schedule, detail: Detail) -> None:
    """On a slow link, in steps of a twelfth, and never faster than its bound."""
    of = tiny_scenario(30, 12, 40, blocks=200, pipeline=VSL, machine=small_machine(h2d=3e7), token_budget=64)
    found = [simulate(with_shares(of, number / 12), schedule, detail=detail) for number in range(13)]
    seconds = [result.seconds for result in found]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0] / 2
    for number, result in enumerate(found):
        assert bound(with_shares(of, number / 12), schedule).seconds <= result.seconds * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.38])
def test_a_share_is_worth_what_it_takes_off_the_link(share: float) -> None:
    """Mixtral-8x7B on an A40, attention on the CPU, thousands of requests: 1 / (1 - r), as long as the link decides."""
    memory, lengths = Memory(kv_capacity="70GB"), Workload.lengths(98, 32, 4000)
    mixtral, a40 = models["mixtral-8x7b"], machines["a40"]
    of = Scenario(VSL, mixtral, a40, memory, lengths, ResourceAware(token_budget=4000))
    slow, fast = (simulate(each, VSLPipe()) for each in (of, with_shares(of, share)))
    assert fast.gen_tok_s / slow.gen_tok_s == pytest.approx(1 / (1 - share), rel=0.02)
    assert bound(with_shares(of, share), VSLPipe()).gen_tok_s >= fast.gen_tok_s


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (Pipeline(VSL.chain), r"Memory\(weights_on_gpu=0.5\) keeps a share of what fetch\(weights\) streams; gpu\(qkv"),
        (fetch(kv) | Pipeline(STREAMED.chain), r"streams none. Add fetch\(weights\), or leave weights_on_gpu out"),
    ],
)
def test_a_share_of_no_streamed_weights_is_refused(pipeline: Pipeline, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        with_shares(tiny_scenario(pipeline=pipeline), 0.5)


@pytest.mark.parametrize("wrong", [-0.1, 1.01, float("nan"), float("inf"), "half", None, True])
@pytest.mark.parametrize("what", ["weights_on_gpu", "kv_on_gpu"])
def test_what_is_no_share_is_refused(what: str, wrong: object) -> None:
    with pytest.raises(CapacityError, match=rf"Memory\({what}={wrong!r}\) is no share; give a number from 0 to 1"):
        Memory("1MB", **{what: wrong})


# --------------------------------------------------------------------------------------------------------------- r_c


@pytest.mark.parametrize(
    ("layers", "share", "kept"),
    [
        (4, 0.5, (1, 3)),
        (4, 0.25, (3,)),
        (4, 0.2, ()),
        (4, 1.0, (0, 1, 2, 3)),
        (10, 0.1, (9,)),
        (10, 0.3, (3, 6, 9)),
        (7, 0.9, (1, 2, 3, 4, 5, 6)),
        (1, 0.99, ()),
    ],
)
def test_the_cache_of_whole_layers_stays_spread_evenly(layers: int, share: float, kept: tuple[int, ...]) -> None:
    of = with_shares(tiny_scenario(pipeline=PIPELINES["flexgen_s4"], model=tiny_model(layers)), kv_on_gpu=share)
    assert of.graph.kv_resident == set(kept)
    cache = of.kv_blocks * of.memory.kv_block * of.model.kv_bytes_per_token("bf16")
    found = fits(of, FlexGenS4(2))
    assert found.gpu["KV cache"] == pytest.approx(cache * len(kept) / layers)
    assert found.host["KV cache"] == pytest.approx(cache * (1 - len(kept) / layers))
    assert ("fetched KV" in str(found)) is (len(kept) < layers)


@examples(60)
@given(st.integers(1, 80), st.floats(0, 1))
def test_as_many_layers_keep_their_cache_as_fit_into_the_share(layers: int, share: float) -> None:
    of = tiny_scenario(1, 2, pipeline=PIPELINES["flexgen_s4"], model=tiny_model(layers))
    kept = sorted(with_shares(of, kv_on_gpu=share).graph.kv_resident)
    assert len(kept) == math.floor(share * layers * (1 + 1e-9))
    gaps = {b - a for a, b in pairwise(kept)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_only_layers_that_fetch_their_cache_count() -> None:
    """Two layers of six attend on the CPU."""
    stack = VSL[:1] + PIPELINES["flexgen_s4"][1:3] + VSL[3:4] + PIPELINES["flexgen_s4"][4:]
    of = with_shares(tiny_scenario(pipeline=stack, model=tiny_model(6)), kv_on_gpu=0.5)
    assert of.graph.kv_resident == {2, 5}
    assert [of.graph.kv_device(layer) for layer in range(6)] == [
        Place.GPU if layer in (2, 5) else Place.CPU for layer in range(6)
    ]


@pytest.mark.parametrize("schedule", [Sequential(2), Sequential(prefetch=True), Overlap()], ids=str)
@pytest.mark.parametrize("detail", Detail)
def test_a_cache_that_stays_is_moved_neither_way(schedule: Schedule, detail: Detail) -> None:
    """KV alone is streamed: half of its layers take half of the link's time, and all of them none."""
    of = tiny_scenario(30, 12, 40, blocks=200, pipeline=fetch(kv) | Pipeline(STREAMED.chain), token_budget=64)
    moved = {share: simulate(with_shares(of, kv_on_gpu=share), schedule, detail=detail) for share in (0, 0.5, 1)}
    for lane in ("h2d", "d2h"):
        whole, half, none = (moved[share].busy[lane] for share in (0, 0.5, 1))
        assert half == pytest.approx(whole / 2, rel=0.01)
        assert none == 0 < whole
    for share, result in moved.items():
        assert bound(with_shares(of, kv_on_gpu=share), schedule).seconds <= result.seconds * (1 + 1e-9)
    resident = simulate(of.on(pipeline=Pipeline(STREAMED.chain)), schedule, detail=detail)
    assert moved[1].seconds == pytest.approx(resident.seconds)


def test_a_share_of_no_streamed_cache_is_refused() -> None:
    for pipeline in (VSL, STREAMED):
        with pytest.raises(ScenarioError, match=r"Memory\(kv_on_gpu=0.5\) keeps a share of what fetch\(kv\) streams"):
            with_shares(tiny_scenario(pipeline=pipeline), kv_on_gpu=0.5)


# ------------------------------------------------------------------------------------------- rows of one class alone

TAKING = [Sequential(), Sequential(3), Sequential(2, prefetch=True), Overlap(), Overlap(3, 3)]


@pytest.mark.parametrize("schedule", TAKING, ids=str)
@pytest.mark.parametrize("detail", Detail)
def test_iterations_without_prefills_move_no_weights_of_theirs(schedule: Schedule, detail: Detail) -> None:
    """Three prompts and then eleven iterations of decodes; what comes for the next iteration comes whole."""
    of = tiny_scenario([30] * 3, [12] * 3, pipeline=APART, token_budget=200)
    prepared = prepare(of, schedule)
    assert [prepared.cost.layer_weights(layer) for layer in range(4)] == [4 * EXPERT] * 4
    result = simulate(of, schedule, detail=detail)
    assert result.steps.prefill == (90, *[0] * 11)
    last = prepared.lowering.tasks(Step.LAST)
    assert not any(task.for_next for task in last)
    ahead = [pair for task in prepared.lowering.tasks(Step.MIDDLE) if task.for_next for pair in task.weights_of]
    waits = isinstance(schedule, Sequential) and not schedule.prefetch
    assert [layer for layer, _ in ahead] == list(range(0 if waits else prepared.lowering.followed.weight_slots - 1))
    moved = 4 * 4 * EXPERT + 11 * len(ahead) * 4 * EXPERT
    outputs = 11 * 3 * 4 * 64 * 2  # of decodes, which the CPU computed, in each layer
    assert result.busy["h2d"] == pytest.approx((moved + outputs) / 1e8, rel=0.01)
    assert bound(of, schedule).seconds <= result.seconds * (1 + 1e-9)


AHEAD = [Sequential(prefetch=True), Overlap(2), Overlap(1, 3), Overlap(1, 4)]


@pytest.mark.parametrize(
    ("layers", "schedule"),
    [(layers, schedule) for layers in (1, 2, 3, 4) for schedule in AHEAD],
    ids=str,
)
def test_what_comes_for_the_next_iteration_comes_whole_however_few_layers_there_are(
    layers: int, schedule: Schedule
) -> None:
    """What the first iteration brings a second time is for the next; each later one brings that for its next too."""
    lowering = Lowering(schedule, tiny_scenario(pipeline=APART, model=tiny_model(layers)).graph)
    assert lowering.followed is schedule
    known = set[int]()
    ahead = set[int]()
    for task in lowering.tasks(Step.FIRST):
        for layer, _ in task.weights_of:
            assert task.for_next is (layer in known)
            ahead |= {layer} & known
            known.add(layer)
    assert ahead == set(range(min(layers, schedule.weight_slots - 1)))
    for task in lowering.tasks(Step.MIDDLE):
        for layer, _ in task.weights_of:
            assert task.for_next is (layer in ahead)
