"""Law 1: `>>` and `|` are pure and associative; stages are told apart by position, not by value."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.systems import MIXED
from workbench.core.errors import PipelineError
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload, resolve
from workbench.pipeline.layer_graph import NodeKind, layer_graph
from workbench.schedules import Sequential
from workbench.stages import (
    Op,
    attention,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    weights,
)

PIECES = (
    *(gpu(op) for op in (qkv, prefill_attention, decode_attention, out_proj, moe)),
    *(cpu(op) for op in (decode_attention, attention, experts)),
    offload,
    load,
    fetch(weights),
    fetch(kv, experts.weights),
)
pieces = st.sampled_from(PIECES)


def wired(build) -> Pipeline | None:
    """What the expression gives, or None if it is refused."""
    try:
        return build()
    except PipelineError:
        return None


@examples(400)
@given(pieces, pieces, pieces)
def test_feeding_is_associative(a, b, c):
    assert wired(lambda: (a >> b) >> c) == wired(lambda: a >> (b >> c))


@examples(300)
@given(st.lists(pieces, min_size=2, max_size=8), st.data())
def test_feeding_in_any_grouping_accepts_and_gives_the_same(parts, data):
    def grouped(chain):
        if len(chain) == 1:
            return chain[0]
        cut = data.draw(st.integers(1, len(chain) - 1))
        return grouped(chain[:cut]) >> grouped(chain[cut:])

    left = wired(lambda: _fold(parts))
    assert wired(lambda: grouped(parts)) == left


def _fold(parts):
    joined = parts[0]
    for part in parts[1:]:
        joined = joined >> part
    return joined


@examples(300)
@given(pieces, pieces, pieces)
def test_forking_is_associative(a, b, c):
    assert (a | b) | c == a | (b | c)


@examples(300)
@given(pieces, pieces, st.booleans())
def test_wiring_leaves_its_operands_as_they_were(a, b, forking):
    before = copy.deepcopy((str(a), a.fetches, str(b), b.fetches)), hash(a), hash(b)
    results = [wired(lambda: a | b if forking else a >> b) for _ in range(2)]
    assert results[0] == results[1]
    assert ((str(a), a.fetches, str(b), b.fetches), hash(a), hash(b)) == before


def test_running_a_cell_twice_gives_an_equal_pipeline_and_plan():
    def cell():
        return fetch(weights) | gpu(qkv, attention, out_proj, moe)

    assert cell() == cell()
    assert hash(cell()) == hash(cell())
    assert Sequential().lower(cell(), MIXED) == Sequential().lower(cell(), MIXED)


@examples(50)
@given(st.integers(1, 4), st.integers(1, 3))
def test_equal_stages_at_several_positions_stay_apart(times, trips):
    """The same operation `times` on the GPU, then `trips` times there and back, each a stage and a task of its own."""
    again, look = Op("again", ("x",), ("x",)), Op("look", ("x",), ("x",))
    layer = gpu(qkv, attention, out_proj, moe)
    for _ in range(times):
        layer = layer >> gpu(again)
    for _ in range(trips):
        layer = layer >> offload >> cpu(look) >> load >> gpu(again)
    assert [stage.op for stage in layer.stages].count(again) == times + trips
    graph = layer_graph(layer)
    assert [stage.op for node in graph.nodes for stage in node.stages].count(again) == times + trips
    assert len(resolve(layer).carries) == 2 * trips == sum(node.kind is NodeKind.MOVE for node in graph.nodes)
    assert len({node.code for node in graph.nodes}) == len(graph.nodes)
