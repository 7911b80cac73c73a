"""Edits of a pipeline by path: what each gives, and what has no meaning."""

import pytest

from tests.systems import APART, PIPELINES, VSL, split
from workbench.core.errors import PipelineError
from workbench.pipeline import (
    Pipeline,
    Stored,
    added,
    cpu,
    cut_at,
    divided,
    element_at,
    fault_of,
    fetch,
    fetched,
    forked,
    gpu,
    joined,
    load,
    merged,
    offload,
    optioned,
    placed,
    removed,
    shifted,
    stored,
    with_range,
    with_rows,
    with_set,
    with_stored,
)
from workbench.stages import (
    ExpertSet,
    Place,
    RowClass,
    Stage,
    attention,
    combine,
    decode_attention,
    embed,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
    weights,
)

GPU, CPU = Place.GPU, Place.CPU
WHOLE = gpu(qkv, attention, out_proj, moe)
KT = PIPELINES["ktransformers"]
FIRST, LAST = ExpertSet.of_slice(slice(4)), ExpertSet.of_slice(slice(6, None))


def test_a_stage_on_the_other_device_takes_its_transfers_along():
    assert Pipeline(placed(WHOLE, (2,), CPU).chain, (weights,)) == VSL
    assert placed(placed(WHOLE, (2,), CPU), (3,), GPU) == WHOLE


def test_on_the_gpu_nothing_is_deferred():
    assert placed(KT, (5, 1, 1), GPU).chain[5].arms[1] == (Stage(experts, GPU),)


def test_the_systems_of_the_papers_by_edits():
    layer = added(gpu(qkv, attention, out_proj, route, experts, combine), shared_experts, GPU, (5,))
    layer = forked(layer, (5,), (6,))
    layer = optioned(placed(layer, (5, 1, 0), CPU), (5, 1, 1), defer=3)
    assert layer == KT
    apart = placed(
        forked(with_rows(added(WHOLE, experts.decode, GPU, (6,)), (5,), RowClass.PREFILL), (5,), (6,)), (5, 1, 0), CPU
    )
    assert fetched(apart, experts.prefill.weights, True) == APART
    hot = ExpertSet("hot", ((0, 1),))
    halves = with_set(added(WHOLE, experts[~hot], GPU, (6,)), (5,), hot)
    assert placed(forked(halves, (6,), (5,)), (5, 1, 0), CPU) == split(hot)


def test_a_stage_goes_before_any_slot_of_the_given_pipeline():
    assert shifted(WHOLE, (3,), (0,)) == gpu(out_proj, qkv, attention, moe)
    assert shifted(WHOLE, (0,), (7,)) == gpu(attention, out_proj, moe, qkv)
    assert shifted(KT, (4,), (5, 0, 1)).chain[4].arms[0] == gpu(shared_experts, route).chain
    assert shifted(KT, (5,), (7,)).chain[-1].arms[0] == gpu(shared_experts).chain


def test_an_arm_that_loses_its_stage_disappears_and_a_single_arm_is_none():
    assert removed(KT, (5, 0, 0)) == gpu(qkv, attention, out_proj, route) >> offload >> cpu(
        experts, defer=3
    ) >> load >> gpu(combine)
    assert shifted(KT, (5, 0, 0), (5,)) == joined(KT, (5,))
    three = forked(added(KT, route, GPU, (6,)), (5,), (6,))
    assert len(three.chain[5].arms) == 3


def test_arms_follow_one_another_when_a_fork_is_joined():
    assert joined(KT, (5,)) == (
        gpu(qkv, attention, out_proj, route, shared_experts) >> offload >> cpu(experts, defer=3) >> load >> gpu(combine)
    )


def test_combine_reads_the_sets_that_are_there():
    halves = with_set(WHOLE, (5,), slice(2, None))
    assert halves.stages[6].op.reads == ("x", "routed[2:]")
    assert with_set(halves, (5,), None) == WHOLE
    assert removed(halves, (5,)).stages[5].op is combine


def test_experts_are_divided_over_both_devices():
    halves = divided(WHOLE, (5,), slice(4))
    routed = gpu(qkv, attention, out_proj, route)
    assert halves == routed >> (gpu(experts[:4]) | offload >> cpu(experts[~FIRST]) >> load) >> gpu(combine)
    assert fault_of(halves) is None
    assert divided(placed(WHOLE, (5,), CPU), (6,), slice(4)) == halves
    assert divided(optioned(KT, (5, 1, 1), defer=0), (5, 1, 1), slice(4)).chain[5].arms[0] == gpu(shared_experts).chain
    streamed = fetched(WHOLE, experts.weights, True)
    assert divided(streamed, (5,), slice(4)) == Pipeline(halves.chain, streamed.fetches)


def test_a_set_and_all_others_stay_a_whole():
    halves = divided(WHOLE, (5,), slice(4))
    (gpu_arm, cpu_arm) = with_set(halves, (5, 0, 0), slice(2)).chain[5].arms
    assert [gpu_arm[0].op, cpu_arm[1].op] == [experts[:2], experts[~ExpertSet.of_slice(slice(2))]]
    (gpu_arm, cpu_arm) = with_set(halves, (5, 1, 1), FIRST).chain[5].arms
    assert [gpu_arm[0].op, cpu_arm[1].op] == [experts[~FIRST], experts[FIRST]]
    streamed = fetched(halves, experts[:4].weights, True)
    assert with_set(streamed, (5, 1, 1), slice(6, None)).fetches == (experts[~LAST].weights,)


def test_what_is_fetched_follows_the_operation():
    some = fetched(WHOLE, experts.weights, True)
    assert with_rows(some, (5,), RowClass.DECODE).fetches == (experts.weights,)
    decode = fetch(experts.decode.weights) | gpu(qkv, attention, out_proj, route, experts.decode, combine)
    assert with_rows(decode, (5,), RowClass.ALL) == fetch(experts.weights) | WHOLE
    assert removed(some, (5,)).fetches == ()
    assert fetched(some, experts.weights, False) == WHOLE


def test_weights_are_kept_otherwise_and_all_others_as_they_were():
    streamed = fetch(weights, kv) | WHOLE
    chosen = with_stored(streamed, (5,), Stored.CHOSEN)
    assert chosen == fetch(weights, kv, experts.chosen) | WHOLE
    resident = with_stored(chosen, (5,), Stored.RESIDENT)
    assert resident == fetch(kv, qkv.weights, out_proj.weights, route.weights) | WHOLE
    assert [stored(resident, stage) for stage in resident.stages if stage.op.has_weights] == [
        Stored.STREAMED,
        Stored.STREAMED,
        Stored.STREAMED,
        Stored.RESIDENT,
    ]
    assert with_stored(resident, (5,), Stored.STREAMED) == streamed
    assert with_stored(WHOLE, (5,), Stored.STREAMED) == fetch(experts.weights) | WHOLE


def test_layers_are_cut_and_merged():
    cut = cut_at(WHOLE, 0, 3, 8)
    assert cut == WHOLE[:3] + WHOLE[3:]
    assert with_range(cut, 1, VSL) == WHOLE[:3] + VSL[3:]
    assert with_range(WHOLE, 0, VSL) == VSL
    assert cut_at(WHOLE[:3] + VSL[3:], 1, 5, 8) == WHOLE[:3] + VSL[3:5] + VSL[5:]
    assert cut_at(WHOLE[:-2] + VSL[-2:], 0, 5, 8) == WHOLE[:5] + WHOLE[5:-2] + VSL[-2:]
    assert merged(WHOLE[:3] + VSL[3:5] + VSL[5:], 0) == WHOLE[:5] + VSL[5:]
    assert merged(cut, 0) == WHOLE


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda: placed(KT, (5,), CPU), "a fork stands at"),
        (lambda: placed(KT, (9,), CPU), "no element stands at"),
        (lambda: placed(KT, (5, 1, 0), CPU), "follows from the stages around it"),
        (lambda: removed(VSL, (2,)), "follows from the stages around it"),
        (lambda: shifted(KT, (5,), (5, 0, 0)), "there is no place"),
        (lambda: shifted(KT, (0,), (5, 2, 0)), "there is no place"),
        (lambda: added(KT, route, CPU, (8,)), "there is no place"),
        (lambda: added(KT, route, CPU, ()), "there is no place"),
        (lambda: added(KT, route, CPU, (-1,)), "there is no place"),
        (lambda: added(KT, embed, GPU, (0,)), "cannot be placed"),
        (lambda: optioned(WHOLE, (5,), defer=1), "defers nothing"),
        (lambda: optioned(WHOLE, (0,), skip=1), "must be a whole number"),
        (lambda: with_rows(WHOLE, (0,), RowClass.DECODE), "cannot be cut up"),
        (lambda: with_set(WHOLE, (6,), slice(2)), "cannot be cut up"),
        (lambda: divided(WHOLE, (0,), slice(2)), "cannot be divided"),
        (lambda: divided(KT, (5, 1, 1), slice(2)), "cannot be divided"),
        (lambda: with_stored(WHOLE, (1,), Stored.STREAMED), "has no weights on the gpu"),
        (lambda: with_stored(WHOLE, (0,), Stored.CHOSEN), "has no chosen weights"),
        (lambda: forked(WHOLE, (0,), (2,)), "are no neighbours"),
        (lambda: forked(WHOLE, (0,), (0,)), "are no neighbours"),
        (lambda: joined(WHOLE, (0,)), "is no fork"),
        (lambda: cut_at(WHOLE, 0, 8, 8), "layers 0 to 7 cannot be cut at 8"),
        (lambda: cut_at(WHOLE, 1, 3, 8), "there is no range 1"),
        (lambda: merged(WHOLE, 0), "range 0 is the last one"),
    ],
)
def test_an_edit_without_meaning_is_refused(edit, words):
    with pytest.raises(PipelineError, match=words.replace("(", r"\(")):
        edit()


def test_what_cannot_be_a_layer_can_still_be_drawn():
    lonely = added(Pipeline(), decode_attention, CPU, (0,))
    assert lonely == cpu(decode_attention)
    assert element_at(lonely.chain, (0,)) == Stage(decode_attention, CPU)
    assert added(lonely, prefill_attention, GPU, (0,)).stages[0].op is prefill_attention
