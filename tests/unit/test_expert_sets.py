"""Sets of experts and rows of a class: how they are written, what is refused, and what they are expected to cost."""

import json
from dataclasses import replace
from functools import reduce
from operator import rshift
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import tiny_model, tiny_model_of, tiny_scenario
from tests.examples import examples
from tests.systems import APART, VSL, split
from workbench.core.errors import PipelineError, ScenarioError
from workbench.hardware import Interconnect
from workbench.perfmodels import bound, moe_lens, moe_lightning
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload, resolve
from workbench.scenario import Scenario
from workbench.schedules import Overlap, Sequential
from workbench.serving import fits, prepare
from workbench.simulate import simulate
from workbench.stages import (
    Chosen,
    ExpertSet,
    Op,
    Place,
    Precision,
    RowClass,
    Rows,
    Stage,
    Work,
    at_once,
    attention,
    combine,
    experts,
    moe,
    most_used,
    out_proj,
    qkv,
    route,
    shared_experts,
    weights,
)
from workbench.workload import Frequencies, Uniform

HOT = ExpertSet("hot", ((0, 2), (1, 3), (0, 1), (2, 3)))
"""Two of four experts in each of four layers."""
FRONT = gpu(qkv, attention, out_proj, route)


# ------------------------------------------------------------------------------------------------------------- the sets


def test_a_set_and_its_rest_are_every_expert_once() -> None:
    assert [HOT.of(layer, 4) for layer in range(4)] == [(0, 2), (1, 3), (0, 1), (2, 3)]
    assert [(~HOT).of(layer, 4) for layer in range(4)] == [(1, 3), (0, 2), (2, 3), (0, 1)]
    assert ~~HOT == HOT
    assert hash(~~HOT) == hash(HOT)
    assert HOT != ~HOT
    assert (str(HOT), str(~HOT)) == ("hot", "~hot")


def test_one_row_serves_all_layers_and_is_kept_in_order() -> None:
    few = ExpertSet("few", [[3, 0]])
    assert [few.of(layer, 5) for layer in (0, 7)] == [(0, 3), (0, 3)]
    assert (~few).of(7, 5) == (1, 2, 4)
    assert few == ExpertSet("few", np.array([[0, 3]]).tolist())


SLICES = {
    "a beginning": (slice(None, 3), "experts[:3]", (0, 1, 2), (3, 4, 5)),
    "a middle": (slice(2, 4), "experts[2:4]", (2, 3), (0, 1, 4, 5)),
    "the last two": (slice(-2, None), "experts[-2:]", (4, 5), (0, 1, 2, 3)),
    "all but the last two": (slice(None, -2), "experts[:-2]", (0, 1, 2, 3), (4, 5)),
    "beyond the end": (slice(4, 9), "experts[4:9]", (4, 5), (0, 1, 2, 3)),
    "all": (slice(None), "experts[:]", (0, 1, 2, 3, 4, 5), ()),
    "none": (slice(3, 3), "experts[3:3]", (), (0, 1, 2, 3, 4, 5)),
    "none of so few": (slice(8, None), "experts[8:]", (), (0, 1, 2, 3, 4, 5)),
    "a step of one": (slice(1, 5, 1), "experts[1:5]", (1, 2, 3, 4), (0, 5)),
}


@pytest.mark.parametrize("case", SLICES.values(), ids=list(SLICES))
def test_a_range_is_counted_as_python_counts(case: tuple) -> None:
    which, name, there, others = case
    op = experts[which]
    assert op.name == name
    assert op.writes == (f"routed[{name[8:-1]}]",)
    assert op.subset.of(0, 6) == there
    assert (~op.subset).of(5, 6) == others
    assert experts[which] == experts[ExpertSet.of_slice(which)]


REFUSED = {
    "no name": (lambda: ExpertSet("", ((0,),)), r"the name of an ExpertSet is a text of 1 to 40 letters.*'' is not"),
    "a long name": (lambda: ExpertSet("h" * 41, ((0,),)), "a text of 1 to 40 letters"),
    "brackets in a name": (lambda: ExpertSet("a[1]", ((0,),)), r"no brackets; 'a\[1\]' is not"),
    "a number for a name": (lambda: ExpertSet(3, ((0,),)), "1 to 40 letters, no brackets; 3 is not"),
    "an expert twice": (
        lambda: ExpertSet("hot", ((0, 1), (2, 2))),
        r"row 1 of ExpertSet\('hot'\) must have different whole numbers from 0 on, not \(2, 2\)",
    ),
    "half an expert": (lambda: ExpertSet("hot", ((0.5,),)), r"row 0 .* not \(0.5,\)"),
    "an expert below the first": (lambda: ExpertSet("hot", ((-1,),)), r"whole numbers from 0 on, not \(-1,\)"),
    "no rows": (lambda: ExpertSet("hot"), r"ExpertSet\('hot'\) has no rows; give the experts of each layer"),
    "a step": (lambda: experts[::2], r"a range of whole numbers with step 1, not slice.*; write \[a:b\]"),
    "a half": (lambda: experts[:1.5], r"a range of whole numbers with step 1.*; write \[a:b\]"),
    "one expert": (lambda: experts[3], r"experts\[...\] takes a range or an ExpertSet, not 3; write experts\[:32\]"),
    "a list": (lambda: experts[[0, 1]], "takes a range or an ExpertSet"),
    "part of another operation": (lambda: route[:2], r"route\[...\] names some experts; only the built-in experts"),
    "a set of a set": (lambda: experts[:2][:1], r"experts\[:2\]\[...\] names some experts; only the built-in"),
    "a set of a class": (lambda: experts.prefill[:2], r"experts.prefill\[...\] names some experts"),
    "rows of another operation": (
        lambda: combine.prefill,
        "combine.prefill is not known; only experts have their rows",
    ),
    "rows of rows": (lambda: experts.prefill.decode, "experts.prefill.decode is not known"),
    "too few rows": (
        lambda: HOT.of(4, 8),
        r"ExpertSet\('hot'\) has rows for 4 layers, and layer 4 is asked for; give a row for each layer of the model",
    ),
    "an expert that is not there": (
        lambda: HOT.of(1, 3),
        r"ExpertSet\('hot'\) has expert 3 in layer 1, and the model has 3; give experts from 0 to 2",
    ),
    "the rest of what is not there": (lambda: (~HOT).of(3, 2), "has expert 3 in layer 3, and the model has 2"),
    "deferral": (lambda: cpu(experts[:2], defer=1), "defer=1 needs the routed experts"),
    "skipping": (lambda: gpu(experts[:2], skip=1), "skip=1 needs the routed experts"),
    "deferral of a class": (lambda: cpu(experts.decode, defer=1), "defer=1 needs the routed experts"),
    "a stage of a set that defers": (
        lambda: Stage(experts[:2], Place.CPU, defer=1),
        r"defer=1 of cpu\(experts\[:2\]\) must be .* 0 for all but the built-in experts, whole and for all rows",
    ),
    "a stage of a class that skips": (
        lambda: Stage(experts.decode, Place.GPU, skip=1),
        r"skip=1 of gpu\(experts.decode\) must be",
    ),
    "nothing of what is streamed": (
        lambda: resolve(fetch(experts[:2].weights) | FRONT >> gpu(experts, combine)),
        r"fetch\(experts\[:2\].weights\) streams nothing.*Remove it",
    ),
    "counts of one layer": (
        lambda: most_used([3, 1, 2], 1),
        r"a table \(layers, experts\) of numbers, not of shape \(3,\)",
    ),
    "counts in words": (lambda: most_used([["a", "b"]], 1), r"a table \(layers, experts\) of numbers"),
    "none of the most used": (
        lambda: most_used([[3, 1, 2]], 0),
        "number=0 of the most used experts must be from 1 to 3",
    ),
    "more than there are": (lambda: most_used([[3, 1, 2]], 4), "number=4 of the most used experts must be from 1 to 3"),
    "half of them": (lambda: most_used([[3, 1, 2]], 1.5), "number=1.5 of the most used"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_is_no_set_is_told_with_its_mend(case: tuple) -> None:
    make, said = case
    with pytest.raises(PipelineError, match=said):
        make()


def test_the_most_used_are_those_of_each_layer_and_the_lower_index_of_equals() -> None:
    hot = most_used([[1, 9, 5, 9], [7, 7, 7, 7], [0, 0, 0, 2]], 2)
    assert [hot.of(layer, 4) for layer in range(3)] == [(1, 3), (0, 1), (0, 3)]
    assert most_used([[1, 9, 5, 9]], 1).of(0, 4) == (1,)
    assert most_used([[0.5, 0.25, 0.75]], 3).of(0, 3) == (0, 1, 2)
    assert str(hot) == "2 most used"
    assert experts[~hot].name == "experts[~2 most used]"


@examples(100)
@given(st.data())
def test_no_expert_that_is_left_out_was_used_more(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 9))
    row = st.lists(st.integers(0, 4), min_size=width, max_size=width)
    counts = data.draw(st.lists(row, min_size=1, max_size=4))
    hot = most_used(counts, data.draw(st.integers(1, width)))
    for layer, used in enumerate(counts):
        there, others = hot.of(layer, width), (~hot).of(layer, width)
        assert sorted(there + others) == list(range(width))
        for a in there:
            for b in others:
                assert used[a] > used[b] or (used[a] == used[b] and a < b)


# -------------------------------------------------------------------------------------------------- sets in pipelines


def test_rows_of_a_class_write_the_buffer_of_all() -> None:
    for op, rows, name, writes in (
        (experts.prefill, RowClass.PREFILL, "experts.prefill", ("routed",)),
        (experts.decode, RowClass.DECODE, "experts.decode", ("routed",)),
        (experts[HOT].prefill, RowClass.PREFILL, "experts[hot].prefill", ("routed[hot]",)),
        (experts[~HOT].decode, RowClass.DECODE, "experts[~hot].decode", ("routed[~hot]",)),
    ):
        assert (op.name, op.rows, op.writes) == (name, rows, writes)
        assert op.plain is experts
        assert op.weights.name == f"{name}.weights"
    assert experts[HOT].prefill.holder == experts[HOT]
    assert experts.decode.holder is experts


def reads(pipeline: Pipeline) -> tuple[str, ...]:
    """What `combine` reads."""
    (found,) = [stage.op.reads for stage in pipeline.stages if stage.op.plain is combine]
    return found


def test_combine_reads_what_every_set_writes() -> None:
    assert reads(FRONT >> gpu(experts, combine)) == ("x", "routed")
    assert reads(split(HOT)) == ("x", "routed[hot]", "routed[~hot]")
    assert reads(split(slice(None, 3))) == ("x", "routed[:3]", "routed[~:3]")
    three = gpu(experts[:1], experts[1:3], experts[3:])
    assert reads(FRONT >> three >> gpu(combine)) == ("x", "routed[:1]", "routed[1:3]", "routed[3:]")
    assert reads(APART) == ("x", "routed")
    by_class = gpu(experts[HOT].prefill, experts[HOT].decode, experts[~HOT], combine)
    assert reads(FRONT >> by_class) == ("x", "routed[hot]", "routed[~hot]")


def test_a_pipeline_with_sets_is_told_as_it_is_written() -> None:
    assert str(split(HOT)) == (
        "gpu(qkv, prefill_attention, decode_attention, out_proj, route) >> "
        "(gpu(experts[hot]) | offload >> cpu(experts[~hot]) >> load) >> gpu(combine)"
    )
    assert str(APART).startswith("fetch(experts.prefill.weights) | gpu(qkv,")


@examples(60)
@given(st.data())
def test_chains_with_sets_are_the_same_however_they_are_bracketed(data: st.DataObject) -> None:
    """Each ``>>`` sees only some of the sets; the last one must have found them all."""
    pieces = [
        FRONT,
        gpu(experts[:1]),
        gpu(experts[1:2]) | offload >> cpu(experts[2:]) >> load,
        gpu(combine),
    ]
    whole = reduce(rshift, pieces)
    while len(pieces) > 1:
        at = data.draw(st.integers(0, len(pieces) - 2))
        pieces[at : at + 2] = [pieces[at] >> pieces[at + 1]]
    assert pieces == [whole]
    assert reads(whole) == ("x", "routed[:1]", "routed[1:2]", "routed[2:]")


@examples(60)
@given(st.data())
def test_arms_with_sets_are_the_same_however_they_are_bracketed(data: st.DataObject) -> None:
    arms = [gpu(experts[:1]), offload >> cpu(experts[1:2]) >> load, gpu(experts[2:3]), fetch(experts[3:].weights)]
    arms.append(gpu(experts[3:]))
    whole = arms[0] | arms[1] | arms[2] | arms[3] | arms[4]
    while len(arms) > 1:
        at = data.draw(st.integers(0, len(arms) - 2))
        arms[at : at + 2] = [arms[at] | arms[at + 1]]
    assert arms == [whole]
    resolve(FRONT >> whole >> gpu(combine))


def test_a_fetch_streams_the_sets_that_it_names() -> None:
    def streamed(*what: object) -> list[str]:
        layer = fetch(*what) | FRONT >> gpu(experts[:1].prefill, experts[:1].decode, experts[1:], combine)
        return [stage.op.name for stage in layer.stages if layer.streams(stage)]

    both = ["experts[:1].prefill", "experts[:1].decode"]
    assert streamed(experts[:1].weights) == both
    assert streamed(experts[:1].prefill.weights) == both[:1]
    assert streamed(experts[1:].weights) == ["experts[1:]"]
    assert streamed(experts.weights) == [*both, "experts[1:]"]
    assert streamed(weights) == ["qkv", "out_proj", "route", *both, "experts[1:]"]


def test_what_two_arms_both_write_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"two arms of a fork write routed\[:2\] of prefill rows"):
        resolve(FRONT >> (gpu(experts[:2]) | gpu(experts[:2])) >> gpu(combine))
    with pytest.raises(PipelineError, match=r"gpu\(combine\) reads routed\[:2\] on the gpu.*Put load between"):
        FRONT >> offload >> cpu(experts[:2]) >> gpu(experts[2:], combine)


# ------------------------------------------------------------------------------------------ each expert once, for a row

PARTITIONS = {
    "an expert is missing": (
        gpu(experts[:1], experts[2:]),
        r"the prefill rows of layer 0 need each of 4 experts once, and of experts\[:1\], experts\[2:\] none of them "
        r"has expert 1; place a set and its rest",
    ),
    "an expert is there twice": (
        gpu(experts[:3], experts[2:]),
        r"of experts\[:3\], experts\[2:\] one expert is in two of them; place a set and its rest",
    ),
    "one set alone": (gpu(experts[:3]), "none of them has expert 3"),
    "a set beside all": (gpu(experts[:3], experts), "one expert is in two of them"),
    "only prefills": (gpu(experts.prefill), r"gpu\(combine\) reads routed of decode rows, which no earlier stage"),
    "only decodes": (gpu(experts.decode), r"gpu\(combine\) reads routed of prefill rows, which no earlier stage"),
    "prefills twice": (gpu(experts.prefill, experts), r"gpu\(experts\.prefill\) computes again what gpu\(experts\)"),
    "the rest of one class": (
        gpu(experts[HOT].prefill, experts[~HOT]),
        r"gpu\(combine\) reads routed\[hot\] of decode rows, which no earlier stage",
    ),
    "decodes of a set twice": (
        gpu(experts[HOT].prefill, experts[~HOT], experts[HOT].decode, experts[~HOT].decode),
        r"gpu\(experts\[~hot\]\.decode\) computes again what gpu\(experts\[~hot\]\) computes",
    ),
    "wrong in a later layer": (
        gpu(experts[ExpertSet("a", ((0,), (0,), (1,), (0,)))], experts[ExpertSet("b", ((1, 2, 3),))]),
        r"the prefill rows of layer 2 .* of experts\[a\], experts\[b\] none of them has expert 0",
    ),
}


@pytest.mark.parametrize("case", PARTITIONS.values(), ids=list(PARTITIONS))
def test_each_row_needs_each_expert_once(case: tuple) -> None:
    made, said = case
    with pytest.raises((ScenarioError, PipelineError), match=said):
        tiny_scenario(pipeline=FRONT >> made >> gpu(combine))


def test_a_set_must_know_the_models_layers_and_experts() -> None:
    with pytest.raises(PipelineError, match="has rows for 4 layers, and layer 4 is asked for"):
        tiny_scenario(pipeline=split(HOT), model=tiny_model(5))
    with pytest.raises(PipelineError, match="has expert 3 in layer 1, and the model has 3"):
        tiny_scenario(pipeline=split(HOT), model=tiny_model(num_local_experts=3))


def test_only_the_layers_of_a_range_are_checked() -> None:
    """The set has two rows, and the third layer is of another range."""
    both = ExpertSet("both", ((0, 1), (2, 3)))
    whole = FRONT >> gpu(experts, combine)
    tiny_scenario(pipeline=split(both)[:2] + whole[2:])
    with pytest.raises(PipelineError, match="rows for 2 layers, and layer 2"):
        tiny_scenario(pipeline=split(both)[:3] + whole[3:])


def test_shared_experts_stand_with_combine_where_the_routed_ones_are_cut_up() -> None:
    model = tiny_model_of("shared")
    whole = tiny_scenario(pipeline=FRONT >> gpu(experts, combine), model=model).layer
    assert [stage.op.name for stage in whole.stages[-3:]] == ["experts", "shared_experts", "combine"]
    for pipeline, routed in ((split(HOT), ("routed[hot]", "routed[~hot]")), (APART, ("routed",))):
        layer = tiny_scenario(pipeline=pipeline, model=model).layer
        assert [str(stage) for stage in layer.stages[-2:]] == ["gpu(shared_experts)", "gpu(combine)"]
        assert reads(layer) == ("x", *routed, "shared")
    beside = FRONT >> (gpu(experts[:2], shared_experts) | offload >> cpu(experts[2:]) >> load) >> gpu(combine)
    assert reads(tiny_scenario(pipeline=beside, model=model).layer) == ("x", "routed[:2]", "routed[2:]", "shared")
    elsewhere = FRONT >> (gpu(experts[:2]) | offload >> cpu(experts[2:], shared_experts) >> load) >> gpu(combine)
    with pytest.raises(PipelineError, match="shared_experts must stand once, on the device of combine"):
        prepare(tiny_scenario(pipeline=elsewhere, model=model), Sequential())


# -------------------------------------------------------------------------------------------------------- kept in files

COUNTS = ((4.0, 1.0, 3.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.0, 3.0, 0.0, 3.0), (2.0, 3.0, 4.0, 1.0))
SAVED = {
    "sets": split(HOT),
    "ranges": split(slice(-1, None)),
    "classes": APART,
    "classes of sets": fetch(experts[HOT].prefill.weights)
    | FRONT >> (gpu(experts[HOT].prefill, experts[~HOT]) | offload >> cpu(experts[HOT].decode) >> load) >> gpu(combine),
    "a streamed set": fetch(experts[~HOT].weights) | FRONT >> gpu(experts[HOT], experts[~HOT], combine),
    "a stack of both": split(slice(None, 1))[:2] + APART[2:],
}


@pytest.mark.parametrize("kind", ["plain", "shared"])
@pytest.mark.parametrize("name", SAVED)
def test_sets_and_classes_come_back_from_a_file(name: str, kind: str, tmp_path: Path) -> None:
    of = tiny_scenario(pipeline=SAVED[name], model=tiny_model_of(kind)).on(routing=Frequencies(COUNTS))
    back = Scenario.load(of.save(tmp_path / "scenario.json"))
    assert back.pipeline == of.pipeline
    assert (back.stages, back.routing) == (of.stages, of.routing)
    assert back.diff(of) == {}
    assert str(fits(back, Sequential())) == str(fits(of, Sequential()))
    assert simulate(back, Sequential()).seconds == simulate(of, Sequential()).seconds


def test_what_differs_of_sets_routing_and_shares_is_told_by_name(tmp_path: Path) -> None:
    of = tiny_scenario(pipeline=VSL)
    shares = of.on(memory=replace(of.memory, weights_on_gpu=0.25))
    assert of.diff(shares) == {"memory.weights_on_gpu": (0.0, 0.25)}
    assert Scenario.load(shares.save(tmp_path / "shares.json")).memory.weights_on_gpu == 0.25
    counted = of.on(routing=Frequencies(COUNTS))
    assert of.diff(counted)["routing.kind"] == ("Uniform", "Frequencies")
    other = Frequencies((*COUNTS[:3], (4.0, 3.0, 2.0, 1.0)))
    assert counted.diff(counted.on(routing=other)) == {"routing.counts[3][0]": (2.0, 4.0)}
    one, two = (of.on(pipeline=split(which)) for which in (HOT, slice(None, 2)))
    assert one.diff(two) == {"pipeline": (str(one.pipeline), str(two.pipeline))}


def test_files_from_before_there_were_routings_and_shares_are_read(tmp_path: Path) -> None:
    of = tiny_scenario()
    path = of.save(tmp_path / "scenario.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["routing"], record["memory"]["weights_on_gpu"], record["memory"]["kv_on_gpu"]
    path.write_text(json.dumps(record), encoding="utf-8")
    back = Scenario.load(path)
    assert back.diff(of) == {}
    assert (back.routing, back.memory) == (Uniform(), of.memory)


@pytest.mark.parametrize(
    ("before", "after"),
    [('"rows": "all"', '"rows": "some"'), ('"hot"', '"h[t"'), ('"Frequencies"', '"Fair"'), ('"rest"', '"others"')],
)
def test_a_file_with_a_damaged_set_or_routing_is_refused(before: str, after: str, tmp_path: Path) -> None:
    path = tiny_scenario(pipeline=split(HOT)).on(routing=Frequencies(COUNTS)).save(tmp_path / "scenario.json")
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
    with pytest.raises((ScenarioError, PipelineError)):
        Scenario.load(path)


# -------------------------------------------------------------------------------------------------------------- routing


def test_uniform_routing_gives_each_set_its_share_of_the_experts() -> None:
    """Of four experts a token chooses two; three tokens miss one of them with probability (1 - 2/4)^3 = 1/8."""
    model = tiny_model()
    assert Uniform().share(model, 0, (0, 2)) == 0.5
    assert Uniform().share(model, 3, (1,)) == 0.25
    assert Uniform().touching(model, 0, (0, 2))(3, 2) == pytest.approx(2 * 7 / 8)
    assert Uniform().touching(model, 0, (0,))(3, 1) == pytest.approx(1 - 0.75**3)
    assert Uniform().touching(model, 0, ())(3, 2) == 0


def test_uniform_routing_follows_the_models_coverage() -> None:
    """Measured: two tokens touch a quarter of the experts, four touch half."""
    model = replace(tiny_model(), coverage=((2, 0.25), (4, 0.5)))
    assert Uniform().touching(model, 0, (0, 1, 2))(4, 2) == pytest.approx(3 * 0.5)
    assert Uniform().touching(model, 0, (0,))(2, 2) == pytest.approx(0.25)


def test_frequencies_are_those_of_the_counts() -> None:
    """Two of four are chosen; layer 3 counted 2, 3, 4, 1 of 10, so that a token takes them with .4, .6, .8, .2."""
    routing, model = Frequencies(COUNTS), tiny_model()
    assert routing.share(model, 3, (0, 2)) == pytest.approx(0.6)
    assert routing.touching(model, 3, (0, 2))(1, 2) == pytest.approx(0.4 + 0.8)
    assert routing.touching(model, 3, (0, 2))(3, 2) == pytest.approx((1 - 0.6**3) + (1 - 0.2**3))
    assert routing.touching(model, 3, (1,))(2, 1) == pytest.approx(1 - 0.7**2)
    assert routing.touching(model, 2, (1, 3))(1, 2) == 2, "both are always chosen"
    assert routing.touching(model, 2, (0, 2))(9, 2) == 0, "these never"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1.0, 2.0), r"a table \(layers, experts\) of numbers from 0 on.*this one has the shape \(2,\)"),
        (((1.0, 2.0), (1.0,)), r"has the shape \(0,\)"),
        ((), "this one has the shape"),
        ((("a", "b"),), "a table"),
        (((1.0, -1.0),), r"numbers from 0 on.*shape \(1, 2\)"),
        (((1.0, float("nan")),), "a table"),
        (((1.0, float("inf")),), "a table"),
    ],
)
def test_what_is_no_count_of_experts_is_refused(counts: object, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        Frequencies(counts)


def test_counts_of_another_model_are_refused() -> None:
    for counts, said in (
        (COUNTS[:3], r"Frequencies has counts of shape \(3, 4\), tiny needs \(4, 4\)"),
        (tuple(row[:3] for row in COUNTS), r"counts of shape \(4, 3\), tiny needs \(4, 4\)"),
        ((*COUNTS[:3], (0, 0, 0, 0)), "no counts for layer 3 of tiny, which has experts; count a run"),
    ):
        with pytest.raises(ScenarioError, match=said):
            tiny_scenario().on(routing=Frequencies(counts))
    with pytest.raises(ScenarioError, match=r"Scenario\(routing=...\) must be a Routing, not 'Uniform'"):
        tiny_scenario().on(routing="Uniform")


def test_layers_without_experts_need_no_counts() -> None:
    model = tiny_model_of("dense")
    assert model.layer_kinds[0].dense
    of = tiny_scenario(model=model, pipeline=split(HOT)).on(routing=Frequencies(((0.0,) * 4, *COUNTS[1:])))
    assert simulate(of, Sequential()).generated == 4


@st.composite
def routed(draw: st.DrawFn) -> tuple:
    """A model of one layer, its routing, and a partition of its experts."""
    every = draw(st.integers(2, 9))
    model = tiny_model(1, num_local_experts=every, num_experts_per_tok=draw(st.integers(1, every)))
    counts = draw(st.lists(st.integers(1, 9), min_size=every, max_size=every))
    number = draw(st.lists(st.integers(0, 2), min_size=every, max_size=every))
    sets = [[expert for expert in range(every) if number[expert] == which] for which in range(3)]
    return model, draw(st.sampled_from([Uniform(), Frequencies((tuple(map(float, counts)),))])), sets


@examples(100)
@given(routed(), st.integers(0, 50))
def test_the_sets_of_a_partition_get_all_pairs_and_touch_what_the_whole_touches(drawn: tuple, tokens: int) -> None:
    model, routing, sets = drawn
    every = range(model.num_local_experts)
    for each in range(1, model.num_experts_per_tok + 1):
        parts = [routing.touching(model, 0, some)(tokens, each) for some in sets]
        assert sum(parts) == pytest.approx(routing.touching(model, 0, every)(tokens, each))
        assert all(0 <= part <= len(some) for part, some in zip(parts, sets, strict=True))
    assert sum(routing.share(model, 0, some) for some in sets) == pytest.approx(1)


# --------------------------------------------------------------------------------------------------------------- prices


def chosen(model: object, routing: object, some: list) -> Chosen:
    return Chosen(routing.share(model, 0, some), routing.touching(model, 0, some))


@examples(100)
@given(routed(), st.integers(0, 20), st.integers(0, 20))
def test_the_sets_of_a_partition_do_the_flop_of_the_whole_and_read_its_experts(
    drawn: tuple, prefill: int, decode: int
) -> None:
    model, routing, sets = drawn
    rows, precision = Rows(prefill=prefill, decode=decode), Precision("bf16", "bf16")
    every = list(range(model.num_local_experts))
    for op in (experts, experts.prefill, experts.decode):
        whole = at_once(Stage(op, Place.CPU), chosen(model, routing, every))(rows, model, precision)
        parts = [at_once(Stage(op, Place.CPU), chosen(model, routing, some))(rows, model, precision) for some in sets]
        assert sum(part.flops for part in parts) == pytest.approx(whole.flops)
        taken = sum(n for n, of in ((prefill, "prefill"), (decode, "decode")) if op.rows.value in ("all", of))
        pairs = taken * model.num_experts_per_tok
        assert whole.flops == pytest.approx(2 * 3 * 64 * 96 * pairs)
        read = 2 * 3 * 64 * 96 * routing.touching(model, 0, every)(taken, model.num_experts_per_tok)
        moved = 2 * 2 * 64 * taken
        assert whole.bytes == pytest.approx(read + moved if taken else 0)
        of_sets = sum(part.bytes for part in parts)
        assert whole.bytes <= of_sets * (1 + 1e-9), "activations are read once for each set"
        assert of_sets <= read + moved * 3 * (1 + 1e-9)


def test_rows_apart_are_priced_as_batches_of_their_own() -> None:
    """Five prefill and two decode rows, two of four experts each: 10 and 4 pairs."""
    model, precision, rows = tiny_model(), Precision("bf16", "bf16"), Rows(prefill=5, decode=2)
    of_prefill, of_decode = (at_once(Stage(op, Place.GPU)) for op in (experts.prefill, experts.decode))
    assert of_prefill(rows, model, precision).flops == 2 * 3 * 64 * 96 * 10
    assert of_decode(rows, model, precision).flops == 2 * 3 * 64 * 96 * 4
    assert of_prefill(rows, model, precision).bytes == pytest.approx(2 * (3 * 64 * 96 * 4 * (1 - 0.5**5) + 128 * 5))
    assert of_decode(rows, model, precision).bytes == pytest.approx(2 * (3 * 64 * 96 * 4 * (1 - 0.5**2) + 128 * 2))
    assert of_prefill(Rows(decode=2), model, precision).flops == 0


def test_the_weights_of_a_set_are_its_share_of_all_in_each_layer() -> None:
    """Bytes of one expert: 3 x 64 x 96 elements of 2 bytes."""
    one = 3 * 64 * 96 * 2
    model, precision = tiny_model(), Precision("bf16", "bf16")
    uneven = ExpertSet("uneven", ((0,), (0, 1), (1, 2, 3), ()))
    for some, counts in ((uneven, (1, 2, 3, 0)), (~uneven, (3, 2, 1, 4))):
        sizes = [experts[some].weight_bytes(model, precision, layer) for layer in range(4)]
        assert sizes == [count * one for count in counts]


def test_the_ledger_holds_each_set_where_it_is_computed_or_streamed_from() -> None:
    one = 3 * 64 * 96 * 2
    uneven = ExpertSet("uneven", ((0,), (0, 1), (1, 2, 3), ()))
    on_gpu = fits(tiny_scenario(pipeline=FRONT >> gpu(experts, combine)), Sequential())
    both = fits(tiny_scenario(pipeline=split(uneven)), Sequential())
    assert both.host["weights"] == (3 + 2 + 1 + 4) * one
    assert on_gpu.gpu["weights"] - both.gpu["weights"] == both.host["weights"]
    streamed = tiny_scenario(
        pipeline=fetch(experts[~uneven].weights) | FRONT >> gpu(experts[uneven], experts[~uneven], combine)
    )
    found = fits(streamed, Sequential())
    assert (found.host["weights"], found.gpu["weights"]) == (both.host["weights"], both.gpu["weights"])
    assert prepare(streamed, Sequential()).slot_bytes == 4 * one, "the last layer's transfer is the largest"
    cost = prepare(streamed, Sequential()).cost
    assert [cost.layer_weights(layer) for layer in range(4)] == [3 * one, 2 * one, one, 4 * one]


def test_one_copy_of_the_experts_serves_both_classes_on_one_device() -> None:
    """The CPU's copy is also that from which they are streamed: four layers of four experts."""
    both, whole = (
        fits(tiny_scenario(pipeline=FRONT >> gpu(*ops, combine)), Sequential())
        for ops in ((experts.prefill, experts.decode), (experts,))
    )
    assert both.gpu["weights"] == whole.gpu["weights"]
    assert fits(tiny_scenario(pipeline=APART), Sequential()).host["weights"] == 4 * 4 * 3 * 64 * 96 * 2


def test_a_split_is_faster_than_either_device_alone_where_both_take_as_long() -> None:
    """The middle of three: all experts on the CPU, half of them, none."""
    on_cpu = FRONT >> offload >> cpu(experts) >> load >> gpu(combine)
    halves = tiny_scenario(30, 12, 40, blocks=200, pipeline=split(HOT))
    slow = halves.on(pipeline=on_cpu)
    assert simulate(halves, Overlap()).seconds < simulate(slow, Overlap()).seconds
    assert bound(halves, Overlap()).seconds <= simulate(halves, Overlap()).seconds
    assert bound(halves, Overlap()).seconds < bound(slow, Overlap()).seconds


def test_the_more_is_counted_for_the_experts_of_a_device_the_longer_it_takes() -> None:
    """All choices fall on the experts on the CPU, or none does."""
    first = split(slice(None, 2))
    of = tiny_scenario(30, 12, 40, blocks=200, pipeline=first)
    slow, fast = (of.on(routing=Frequencies((row,) * 4)) for row in ((0, 0, 1, 1), (1, 1, 0, 0)))
    even = of.on(routing=Frequencies(((1, 1, 1, 1),) * 4))
    times = [simulate(each, Sequential()).busy["cpu"] for each in (fast, even, slow)]
    assert times[0] == 0
    assert times[0] < times[1] < times[2]
    assert simulate(even, Sequential()).seconds == pytest.approx(simulate(of, Sequential()).seconds)


def test_a_moe_of_sets_on_one_device_costs_no_less_than_the_whole() -> None:
    whole = tiny_scenario(30, 12, 40, blocks=200, pipeline=gpu(qkv, attention, out_proj, moe))
    cut = whole.on(pipeline=FRONT >> gpu(experts[HOT], experts[~HOT], combine))
    apart = simulate(cut, Sequential()).busy["gpu"]
    assert apart >= simulate(whole, Sequential()).busy["gpu"]
    assert apart == pytest.approx(simulate(whole, Sequential()).busy["gpu"], rel=0.05)


def test_an_operation_of_ones_own_may_compute_the_rows_that_the_experts_leave() -> None:
    mine = Op("mine", ("h",), ("routed",), rows=RowClass.DECODE, work=lambda rows, model, precision: Work())
    layer = gpu(qkv, attention, out_proj, route, experts.prefill, mine, combine)
    assert tiny_scenario(pipeline=layer).stages[-2].op is mine
    with pytest.raises(PipelineError, match="routed of decode rows"):
        tiny_scenario(pipeline=gpu(qkv, attention, out_proj, route, experts.prefill, combine))


def test_an_expert_that_has_more_than_its_share_of_the_counts_is_always_chosen() -> None:
    """A run that skips experts may count one more often than a choice of k different experts allows."""
    touched = Frequencies(((6, 1, 1, 1),)).touching(tiny_model(1), 0, (0, 1))
    assert touched(1, 2) == pytest.approx(1 + 2 / 9)


def test_two_sets_of_one_name_in_a_pipeline_are_refused() -> None:
    one, other = ExpertSet("half", ((0, 1),)), ExpertSet("half", ((2, 3),))
    with pytest.raises(PipelineError, match="two sets of experts in one pipeline are called 'half'; give one of them"):
        gpu(qkv, attention, out_proj, route, experts[one], experts[other], combine)
    with pytest.raises(PipelineError, match="are called ':2'"):
        gpu(experts[:2]) | gpu(experts[ExpertSet(":2", ((2, 3),))])


@pytest.mark.parametrize("counted", [False, True])
def test_chosen_experts_of_unlike_layers_are_bounded_each_as_it_is(counted: bool) -> None:
    """Layer 0 streams three experts and the others one each; the link decides."""
    rest = ExpertSet("rest", ((0, 1, 2), (0,), (1,), (2,)))
    layer = fetch(experts[rest].chosen) | gpu(qkv, attention, out_proj, route, experts[rest], experts[~rest], combine)
    of = tiny_scenario(pipeline=layer, model=tiny_model(4))
    slow = of.on(machine=replace(of.machine, link=replace(of.machine.link, h2d=1e5)))
    routed = slow.on(routing=Frequencies(COUNTS)) if counted else slow
    simulated, least = simulate(routed, Sequential()), bound(routed, Sequential())
    assert least.binding == "h2d link"
    assert 0.3 * simulated.seconds < least.seconds <= simulated.seconds


def test_weights_for_rows_of_either_class_come_in_one_transfer_for_the_bound_too() -> None:
    """Outputs of one token: prompts alone, whose transfers each take the link's fixed time once."""
    layer = fetch(weights) | gpu(qkv, attention, out_proj, route) >> (
        gpu(experts.prefill) | offload >> cpu(experts.decode) >> load
    ) >> gpu(combine)
    of = tiny_scenario((4, 4), (1, 1), pipeline=layer)
    late = of.on(machine=replace(of.machine, link=replace(of.machine.link, overhead=1e-3)))
    assert bound(late, Sequential()).seconds <= simulate(late, Sequential()).seconds


def test_sockets_add_up_the_rows_that_a_stage_takes() -> None:
    of = tiny_scenario(pipeline=APART)
    pair = replace(of.machine.cpu, count=2, between=Interconnect(1e9, 1e-4))
    cost = prepare(of.on(machine=replace(of.machine, cpu=pair)), Sequential()).cost
    stage = next(s for s in APART.stages if s.op.rows is RowClass.DECODE and s.op.plain is experts)
    assert cost.adding_up(stage, Rows(prefill=100)) == 0
    assert cost.adding_up(stage, Rows(prefill=100, decode=3)) == cost.adding_up(stage, Rows(decode=3)) > 1e-4


def test_the_papers_models_refuse_what_they_have_no_term_for() -> None:
    chosen = fetch(weights, experts.chosen) | Pipeline(VSL.chain)
    with pytest.raises(ScenarioError, match=r"moe_lens.predict has no term for fetch\(experts.chosen\)"):
        moe_lens.predict(tiny_scenario(pipeline=chosen), Sequential())
    with pytest.raises(ScenarioError, match=r"moe_lightning.predict .* no term for fetch\(experts.chosen\)"):
        moe_lightning.predict(tiny_scenario(pipeline=chosen), Sequential())
    counted = tiny_scenario(pipeline=VSL).on(routing=Frequencies(((2, 1, 1, 1),) * 4))
    with pytest.raises(ScenarioError, match="no term for routing as counted in 20 choices"):
        moe_lightning.predict(counted, Sequential())
