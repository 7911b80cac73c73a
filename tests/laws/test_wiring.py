"""What a pipeline's picture, its code and its transfers have to do with one another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import ANY_OPS, OWN, any_chains, any_wirings, cut_up, every_wiring, pipelines, wirings
from tests.examples import examples
from tests.systems import APART, LIGHTNING, PIPELINES, STACKS, split
from workbench.core.errors import PipelineError
from workbench.pipeline import (
    Fork,
    Pipeline,
    Stack,
    added,
    adding_sets,
    code_of,
    connected,
    fault_of,
    forked,
    located,
    optioned,
    pipeline_of,
    placed,
    resolve,
)
from workbench.pipeline.layer_graph import layer_graph
from workbench.pipeline.mends import _refusal
from workbench.pipeline.transfers import bare
from workbench.stages import Move, Place, Stage

NAMES = {"own": OWN}
SYSTEMS = {
    **PIPELINES,
    "lightning": LIGHTNING,
    "rows apart": APART,
    "experts apart": split(slice(None, 2)),
    **{f"{name} {each.slice}": each.pipeline for name, (stack, _) in STACKS.items() for each in stack.ranges},
}


def run(text: str) -> Pipeline | Stack:
    space: dict[str, object] = dict(NAMES)
    exec(text, space)
    return space["layer"]


def without_moves(pipeline: Pipeline) -> Pipeline:
    return Pipeline(bare(pipeline.chain), pipeline.fetches)


def is_layer(pipeline: Pipeline) -> bool:
    return _error_of(lambda: resolve(pipeline)) is None


def _error_of(make) -> PipelineError | None:
    try:
        make()
    except PipelineError as error:
        return error
    return None


# -------------------------------------------------------------------------------------------------------------- code


def check_code(wired: Pipeline | Stack) -> None:
    text = code_of(wired, NAMES)
    assert run(text) == wired == pipeline_of(text, NAMES)
    assert max(map(len, text.splitlines())) <= 100


def test_the_code_of_every_wiring_gives_it():
    for wired in every_wiring():
        check_code(wired)


@examples(800)
@given(st.data(), wirings())
def test_the_code_of_pipelines_and_stacks_gives_them(data, drawn):
    pipeline, schedule = drawn
    check_code(data.draw(cut_up(pipeline, schedule, 6)))


@examples(2000)
@given(any_wirings(), st.integers(1, 3))
def test_code_is_read_as_it_runs(one, cut):
    """Whatever is wired, also what the algebra refuses: with the sentence that `fault_of` tells of it."""
    text = code_of(one, NAMES)
    error = _error_of(lambda: run(text))
    if error is not None:
        read = _error_of(lambda: pipeline_of(text, NAMES))
        assert str(read).partition(": ")[2] == str(error) == str(_refusal(one).error)
        return
    assert run(text) == one == pipeline_of(text, NAMES)
    stack = Stack((*one[:cut].ranges, *one[cut:].ranges))
    assert pipeline_of(code_of(stack, NAMES), NAMES) == stack


# --------------------------------------------------------------------------------------------------------- transfers


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_systems_transfers_follow_from_its_stages(name):
    assert connected(without_moves(SYSTEMS[name])) == SYSTEMS[name]


def test_every_wiring_is_found_again_as_a_layer():
    for wired in every_wiring():
        again = connected(without_moves(wired))
        layer_graph(again)
        assert without_moves(again) == without_moves(wired)


@examples(400)
@given(st.data(), st.sampled_from([*SYSTEMS.values()]) | pipelines())
def test_after_stages_change_places_the_transfers_follow(data, wired):
    """Flips of any stages of a layer leave a layer, but for what is fetched and for arms that clash."""
    for path, element in located(wired.chain):
        if isinstance(element, Stage) and data.draw(st.booleans()):
            chain = _with_device(wired.chain, path, element.device.other)
            wired = Pipeline(chain, ())
    assert is_layer(connected(Pipeline(wired.chain)))


def _with_device(chain, path, device):
    found = list(chain)
    element = chain[path[0]]
    if isinstance(element, Fork):
        arms = list(element.arms)
        arms[path[1]] = _with_device(arms[path[1]], path[2:], device)
        found[path[0]] = Fork(tuple(arms))
    else:
        found[path[0]] = Stage(element.op, device)
    return tuple(found)


@examples(1200)
@given(any_chains())
def test_what_is_a_layer_with_some_transfers_is_one_with_those_that_follow(chain):
    wired = Pipeline(adding_sets(chain))
    again = connected(wired)
    assert connected(again) == again
    assert bare(again.chain) == bare(wired.chain)
    assert is_layer(again) >= is_layer(wired)


# ------------------------------------------------------------------------------------------------------------- hands


def by_hand(pipeline: Pipeline) -> Pipeline:
    """The pipeline put together from an empty canvas, card by card."""
    built = Pipeline((), pipeline.fetches)
    for element in bare(pipeline.chain):
        at = len(built.chain)
        arms = element.arms if isinstance(element, Fork) else ((element,),)
        for arm in arms:
            built = added(built, arm[0].op, arm[0].device, (len(built.chain),))
        cards = [(index,) for index in range(at, len(built.chain)) if isinstance(built.chain[index], Stage)]
        if len(cards) > 1:
            built = forked(built, *cards)
        for path, stage in located(built.chain):
            original = next((each for arm in arms for each in arm if each.op == getattr(stage, "op", None)), None)
            if original is not None and original.defer:
                built = optioned(built, path, defer=original.defer)
    return built


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_put_together_by_hand(name):
    """All that the papers' forks need: two arms of one stage each."""
    assert by_hand(SYSTEMS[name]) == SYSTEMS[name]


@examples(300)
@given(st.data(), st.sampled_from([*SYSTEMS.values()]) | pipelines())
def test_a_stage_placed_there_and_back_is_where_it_was(data, wired):
    wired = connected(wired)
    stages = [(path, each) for path, each in located(wired.chain) if isinstance(each, Stage) and not each.defer]
    path, stage = data.draw(st.sampled_from(stages))
    there = placed(wired, path, stage.device.other)
    number = [each for each, _ in stages_in(wired)].index(path)
    back = placed(there, stages_in(there)[number][0], stage.device)
    assert back == wired


def stages_in(pipeline):
    return [(path, each) for path, each in located(pipeline.chain) if isinstance(each, Stage)]


# ------------------------------------------------------------------------------------------------------------- mends


def mended(pipeline: Pipeline, *, may_start_again: bool = False) -> Pipeline:
    """What is left after the first mend has been taken again and again."""
    for _ in range(40):
        fault = fault_of(pipeline)
        if fault is None:
            return pipeline
        assert 1 <= len(fault.mends) <= 3
        assert not fault.mends[0].label.startswith("Start again") or may_start_again
        pipeline = fault.mends[0].pipeline
    raise AssertionError(f"still at fault: {pipeline}")


CARDS = st.lists(st.tuples(st.sampled_from(ANY_OPS[:9]), st.sampled_from(Place)), max_size=7)


@examples(120)
@given(CARDS)
def test_first_mends_lead_from_any_cards_to_a_layer(cards):
    pipeline = Pipeline()
    for op, device in cards:
        pipeline = added(pipeline, op, device, (len(pipeline.chain),))
    layer_graph(mended(pipeline))


@examples(80)
@given(any_wirings())
def test_first_mends_lead_from_any_wiring_to_a_layer(wired):
    layer_graph(mended(wired, may_start_again=True))


def test_an_empty_canvas_becomes_a_whole_layer():
    assert len(mended(Pipeline()).stages) == 7


@examples(400)
@given(any_wirings())
def test_the_path_of_a_fault_is_that_of_an_element(wired):
    refusal = _refusal(wired)
    if refusal is not None and refusal.error.path is not None:
        assert refusal.error.path in dict(located(wired.chain))


def test_moves_never_stand_beside_a_stage_that_needs_none():
    """`connected` puts in no more transfers than devices change."""
    for wired in every_wiring():
        again = connected(wired)
        moves = [element for element in again.chain if isinstance(element, Move)]
        devices = [stage.device for stage in again.stages]
        changes = sum(a is not b for a, b in zip(devices, [*devices[1:], devices[0]], strict=True))
        assert len(moves) <= changes
