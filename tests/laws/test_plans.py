"""Law 2: a schedule never changes what is computed, and every plan's order respects the data.

The checks below know nothing of how plans are made. A plan is executed in issue order on memory cells, one per (part,
buffer, row class, device), that remember which stage of which layer wrote them: whoever reads must find what it would
find if the layers ran one after the other on one device. And any two tasks that touch one cell, one of them writing,
must be ordered by what tasks wait for and by their lanes, so that every execution that the lanes allow reads the same.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import batches, cut_up, enough_experts, make_batch, shares, tiny_model_of, wirings
from tests.examples import examples
from tests.systems import PIPELINES
from workbench.pipeline import BufferRows, Element, Fork, Pipeline, Stack, cpu, fetch, gpu, load, offload
from workbench.pipeline.layer_graph import EMBED, HEAD, Node, NodeKind
from workbench.pipeline.shares import with_shares
from workbench.pipeline.stack_graph import StackGraph, stack_graph
from workbench.scheduler.batch import Batch
from workbench.schedules import KTransformers, Lowering, Schedule, Sequential, Step, VSLPipe
from workbench.schedules.plan import Carry, Plan, Task
from workbench.stages import Op, Place, Precision, RowClass, Stage, attention, moe, out_proj, qkv, weights

X = tuple(("x", rows) for rows in RowClass.ALL.classes)


def positions(stack: StackGraph) -> dict[int, range]:
    """Of each segment, by the identity of its node: the positions of its stages in the layer."""
    found = {}
    for layer in range(stack.layers):
        first = 0
        for node in stack.at(layer):
            if node is not None and node.kind is NodeKind.SEGMENT:
                found[id(node)] = range(first, first + len(node.stages))
                first += len(node.stages)
    return found


def deferring(stack: StackGraph, layer: int) -> list[int]:
    """Positions of stages that leave work to the next layer."""
    return [place for place, stage in enumerate(stack.pipeline(layer).stages) if stage.defer]


def first_of_range(stack: StackGraph, layer: int) -> bool:
    """True if a layer begins a range, so that nothing was deferred to it."""
    return layer in [each.first for each in stack.ranges]


Author = tuple[int, int]
"""Layer and position of the stage that wrote something; the embedding is (-1, -1)."""


def authors(stack: StackGraph) -> dict[Author, dict[BufferRows, Author]]:
    """Who wrote what each stage of each layer reads, if all ran one after the other; the head is (layers, 0)."""
    found: dict[Author, dict[BufferRows, Author]] = {}
    place = count()

    def walk(chain: tuple[Element, ...], layer: int, known: dict[BufferRows, Author]) -> dict[BufferRows, Author]:
        for element in chain:
            if isinstance(element, Stage):
                me = layer, next(place)
                found[me] = {rows: known[rows] for rows in element.op.needs}
                known = known | {(b, rows): me for b in element.op.writes for rows in element.op.rows.classes}
            elif isinstance(element, Fork):
                ends = [walk(arm, layer, known) for arm in element.arms]
                known = known | {p: who for end in ends for p, who in end.items() if known.get(p) != who}
        return known

    known: dict[BufferRows, Author] = dict.fromkeys(X, (-1, -1))
    for layer in range(stack.layers):
        place = count()
        known = walk(stack.pipeline(layer).chain, layer, known)
    found[stack.layers, 0] = {rows: known[rows] for rows in X}
    return found


Access = tuple[str, tuple, object]
"""What is done to a memory cell: ("read", cell, by whom), ("write", cell, author) or ("copy", cell, from where)."""


def accesses(task: Task, plan: Plan, places: dict[int, range]) -> Iterator[Access]:
    """Memory cells, (buffer or "cache", row class or layer, device), that a task reads and writes, in its own order."""
    if task.node.idle:
        return
    node, gpu_, cpu_ = task.node, Place.GPU, Place.CPU
    there = cpu_ if node.lane == "d2h" else gpu_
    if node.kind is NodeKind.EMBED:
        yield from (("write", (*rows, gpu_), (-1, -1)) for rows in X)
    elif node.kind is NodeKind.HEAD:
        yield from (("read", (*rows, gpu_), (plan.layers, 0)) for rows in X)
    elif node.kind in (NodeKind.MOVE, NodeKind.KV_IN, NodeKind.KV_OUT):
        carried = node.carries if node.kind is NodeKind.MOVE else (("cache", task.layer),)
        yield from (("copy", (*rows, there), (*rows, there.other)) for rows in carried)
    elif node.kind is NodeKind.EXPERTS_IN:
        for stage in node.stages:
            me = task.layer, plan.stack.pipeline(task.layer).stages.index(stage)
            yield from (("read", ("gates", rows, gpu_), me) for rows in stage.op.rows.classes)
            yield "write", ("chosen", stage.op.name, gpu_), me
    elif node.kind is NodeKind.DEFERRED:
        (place,) = deferring(plan.stack, task.layer)
        me = task.layer, place
        yield "read", ("late", RowClass.DECODE, cpu_), me
        yield "write", ("pending", RowClass.DECODE, cpu_), me
    else:
        for place, stage in zip(places[id(node)], node.stages, strict=True):
            me = task.layer, place
            yield from (("read", (*rows, stage.device), me) for rows in stage.op.needs)
            nodes = (other for other in plan.stack.at(task.layer) if other and other.kind is NodeKind.EXPERTS_IN)
            if any(stage in other.stages and not other.idle for other in nodes):
                yield "read", ("chosen", stage.op.name, gpu_), me
            if stage.op.keeps_kv:
                yield "read", ("cache", task.layer, stage.device), None
                yield "write", ("cache", task.layer, stage.device), me
            if place in deferring(plan.stack, task.layer):
                if not first_of_range(plan.stack, task.layer):
                    yield "read", ("pending", RowClass.DECODE, stage.device), me
                yield "write", ("late", RowClass.DECODE, stage.device), me
            for buffer in stage.op.writes:
                yield from (("write", (buffer, rows, stage.device), me) for rows in stage.op.rows.classes)


def earlier(tasks: tuple[Task, ...]) -> list[int]:
    """Of each task, as a bit set: the tasks that have ended when it starts, by waiting and by the order of lanes.

    A small transfer may pass a bulk one, so on their lane it follows only the small ones before it; a bulk one
    follows everything issued before.
    """
    sets: list[int] = []
    last_small: dict[str, int] = {}
    last_bulk: dict[str, int] = {}
    for index, task in enumerate(tasks):
        lane, direct = task.node.lane, list(task.after)
        direct += [last_small[lane]] if lane in last_small else []
        direct += [last_bulk[lane]] if task.bulk and lane in last_bulk else []
        known = 0
        for other in direct:
            known |= sets[other] | 1 << other
        sets.append(known)
        (last_bulk if task.bulk else last_small)[lane] = index
    return sets


def check_data(plan: Plan) -> None:
    """Every read finds what the right stage wrote, and tasks that touch one cell are ordered."""
    stack = plan.stack
    expected, places, before = authors(stack), positions(stack), earlier(plan.tasks)
    held: dict[tuple, object] = {}
    last_write: dict[tuple, int] = {}
    readers: defaultdict[tuple, list[int]] = defaultdict(list)

    def ordered(first: int, second: int, cell: tuple) -> None:
        assert first == second or before[second] >> first & 1, (
            f"{plan.tasks[second].name} does not wait for {plan.tasks[first].name}, which uses {cell} too"
        )

    def read(index: int, cell: tuple) -> object:
        readers[cell].append(index)
        if cell in last_write:
            ordered(last_write[cell], index, cell)
        return held.get(cell)

    def write(index: int, cell: tuple, author: object) -> None:
        for other in (*readers.pop(cell, ()), *([last_write[cell]] if cell in last_write else ())):
            ordered(other, index, cell)
        held[cell], last_write[cell] = author, index

    for part, layer in product(range(len(plan.parts)), range(plan.layers)):
        held[part, "cache", layer, stack.kv_device(layer)] = "old"
    for index, task in enumerate(plan.tasks):
        if task.part is None:
            continue
        for kind, where, what in accesses(task, plan, places):
            cell = (task.part, *where)
            if kind == "write":
                write(index, cell, what)
            elif kind == "copy":
                write(index, cell, read(index, (task.part, *what)))
            else:
                before_that = {
                    "cache": "old",
                    "late": what,
                    "chosen": what,
                    "pending": what and (what[0] - 1, what[1]),
                }
                wanted_author = before_that[where[0]] if where[0] in before_that else expected[what][where[:2]]
                assert read(index, cell) == wanted_author, f"{task.name} does not find {where} as it should be"
    for part, layer in product(range(len(plan.parts)), range(plan.layers)):
        keeper = next(place for place, stage in enumerate(stack.pipeline(layer).stages) if stage.op.keeps_kv)
        home = stack.kv_device(layer)
        assert held[part, "cache", layer, home] == (layer, keeper), f"new KV of layer {layer} did not come home"


def computed(plan: Plan) -> Counter:
    """How often each (stage position, layer, request, token) is computed.

    Position -1 is the embedding, -2 the head, -3 what a stage defers.
    """
    places, done = positions(plan.stack), Counter()
    for task in plan.tasks:
        if task.node in (EMBED, HEAD):
            stages = [(-1 if task.node is EMBED else -2, RowClass.ALL)]
        elif task.node.kind is NodeKind.EXPERTS_IN:
            stages = []
        elif task.node.kind is NodeKind.DEFERRED:
            stages = [(-3, RowClass.DECODE)]
        else:
            stages = [(at, s.op.rows) for at, s in zip(places.get(id(task.node), ()), task.node.stages, strict=True)]
        for place, rows in stages:
            part = plan.parts[task.part]
            done.update((place, task.layer, request, token) for request, token in tokens(part, rows))
    return done


def tokens(batch: Batch, rows: RowClass) -> Iterator[tuple[int, int]]:
    """(request, position) of every token of a row class."""
    prefilling = set(batch.prefills.tolist())
    for rectangle in batch:
        if rows is RowClass.ALL or (rows is RowClass.PREFILL) == (rectangle.request in prefilling):
            yield from ((rectangle.request, token) for token in range(rectangle.start, rectangle.stop))


def wanted(pipeline: Pipeline | Stack, batch: Batch) -> Counter:
    """What the pipeline, or the stack, computes for the batch."""
    todo = Counter((place, -1, *token) for place in (-1, -2) for token in tokens(batch, RowClass.ALL))
    ranges = (pipeline if isinstance(pipeline, Stack) else pipeline[:]).over(batch.layers)
    for each in ranges:
        for layer in range(each.first, each.stop):
            for place, stage in enumerate(each.pipeline.stages):
                todo.update((place, layer, *token) for token in tokens(batch, stage.op.rows))
                if stage.defer and layer + 1 < each.stop:
                    todo.update((-3, layer, *token) for token in tokens(batch, RowClass.DECODE))
    return todo


def arrival(run: list[tuple[Task, ...]], iteration: int, index: int) -> tuple[int, int]:
    """Iteration and task with whose end a transfer has arrived: itself, or the rest of it in the next iteration."""
    if run[iteration][index].carry is not Carry.OUT:
        return iteration, index
    (rest,) = (at for at, task in enumerate(run[iteration + 1]) if task.carry is Carry.IN)
    return iteration + 1, rest


class Load(NamedTuple):
    """One filling of a slot: (iteration, task) where it begins, those with which it is there, and its nodes."""

    begin: tuple[int, int]
    arrivals: list[tuple[int, int]]
    weights_of: set[tuple[int, int]]


def loads_of(run: list[tuple[Task, ...]]) -> list[Load]:
    """Every transfer of a run, its pages together, each into the next slot."""
    loads: list[Load] = []
    missing = 0
    for iteration, tasks in enumerate(run):
        for index, task in enumerate(tasks):
            if not task.weights_of:
                continue
            if not missing:
                loads.append(Load((iteration, index), [], set(task.weights_of)))
                missing = task.page.pages
            number = task.page.pages - missing
            assert (task.page.number, set(task.weights_of)) == (number, loads[-1].weights_of), "pages out of order"
            loads[-1].arrivals.append(arrival(run, iteration, index))
            missing -= 1
    assert not missing, "a page never comes"
    return loads


def check_weights(stack: StackGraph, run: list[tuple[Task, ...]], slots: int) -> None:
    """Weights have arrived before the segment that needs them, and stay until its last reader."""
    loads = loads_of(run)
    orders = [earlier(tasks) for tasks in run]
    node_at = {id(node): index for layer in range(stack.layers) for index, node in enumerate(stack.at(layer))}
    used: set[int] = set()

    def precedes(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a[0] < b[0] or (a[0] == b[0] and bool(orders[b[0]][b[1]] >> a[1] & 1))

    for iteration, tasks in enumerate(run):
        for index, task in enumerate(tasks):
            if not task.node.streamed or node_at[id(task.node)] not in stack.streamed(task.layer):
                continue
            here, node = (iteration, index), (task.layer, node_at[id(task.node)])
            arrived = [
                number
                for number, load in enumerate(loads)
                if node in load.weights_of and all(precedes(end, here) for end in load.arrivals)
            ]
            assert arrived, f"{task.name} of iteration {iteration} runs without its weights"
            latest = arrived[-1]
            held = (n for n in arrived if n + slots >= len(loads) or precedes(here, loads[n + slots].begin))
            used.update((number, node) for number in held)  # any copy that is still there serves
            if latest + slots < len(loads):
                assert precedes(here, loads[latest + slots].begin), f"the slot of {task.name} is overwritten too early"
    assert used == {(n, node) for n, load in enumerate(loads) for node in load.weights_of}, "a transfer serves nobody"


def prices(seed: int) -> Callable[[Sequence[Task]], list[float]]:
    """Random times over four decades, by which `Overlap` orders the tasks."""
    return lambda tasks: (10 ** np.random.default_rng(seed).uniform(-4, 0, len(tasks))).tolist()


@st.composite
def stacks(draw: st.DrawFn, wiring: tuple[Pipeline, Schedule], layers: int) -> StackGraph:
    """A pipeline or a stack; in half of the draws of a model, of whose weights and KV shares stay on the GPU."""
    wired = draw(cut_up(*wiring, layers))
    if draw(st.booleans()):
        return stack_graph(wired, layers)
    stay = draw(shares(wired))
    of_model = stack_graph(wired, enough_experts(tiny_model_of("shared", layers), wired))
    return with_shares(of_model, Precision("bf16", "bf16"), stay.get("weights_on_gpu", 0.0), stay.get("kv_on_gpu", 0.0))


PRICES = st.none() | st.integers(0, 10**6).map(prices)


@examples(1000)
@given(wirings(), st.integers(1, 5), st.sampled_from([Step.FIRST, Step.MIDDLE, Step.LAST]), st.data())
def test_every_plan_computes_each_token_of_each_layer_once_in_an_order_that_respects_the_data(
    wiring, layers, step, data
):
    stack = data.draw(stacks(wiring, layers))
    batch = data.draw(batches(layers=layers))
    plan = Lowering(wiring[1], stack, data.draw(PRICES)).plan(batch, step)
    assert computed(plan) == wanted(Stack(stack.ranges), batch)
    check_data(plan)


@examples(1000)
@given(wirings(), st.integers(2, 8), st.integers(1, 4), st.data())
def test_weights_arrive_before_they_are_needed_and_stay_until_their_last_reader(wiring, layers, iterations, data):
    stack = data.draw(stacks(wiring, layers))
    lowering = Lowering(wiring[1], stack, data.draw(PRICES))
    steps = [Step.MIDDLE] * iterations
    steps[0] |= Step.FIRST
    steps[-1] |= Step.LAST
    check_weights(stack, [lowering.tasks(step) for step in steps], wiring[1].weight_slots)


FORKED = [
    fetch(weights)
    | gpu(qkv, attention, out_proj)
    >> (gpu(Op("left", ("x",), ("y",))) | offload >> cpu(Op("right", ("x",), ("z",))) >> load)
    >> gpu(Op("join", ("x", "y", "z"), ("x",)), moe),
    gpu(qkv, attention, out_proj, moe)
    >> (offload >> cpu(Op("a", ("x",), ("y",))) | gpu(Op("b", ("x",), ("z",))) | gpu(Op("c", ("x",), ("w",))))
    >> gpu(Op("d", ("x", "z", "w"), ("x",)))
    >> load
    >> gpu(Op("e", ("y", "x"), ("x",))),
    cpu(qkv, attention) >> load >> gpu(out_proj) >> offload >> cpu(moe),
]


@pytest.mark.parametrize("pipeline", [*PIPELINES.values(), *FORKED], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_pipelines_of_any_shape_are_lowered_soundly(pipeline, micro_batches):
    batch = make_batch([3, 2], [4, 1], layers=3)
    plan = Sequential(micro_batches).lower(pipeline, batch)
    assert computed(plan) == wanted(pipeline, batch)
    check_data(plan)


class Broken(Schedule):
    """A schedule with its order or its tasks spoiled, to see that the checks notice."""

    def __init__(self, base: Schedule, spoil) -> None:
        self.base, self.spoil = base, spoil

    @property
    def parts(self) -> int:
        return self.base.parts

    @property
    def name(self) -> str:
        return "broken"

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        return self.spoil(self.base.tasks(stack, step))


def without_waiting(code: str):
    def spoil(tasks):
        return tuple(t._replace(after=() if t.node.code == code else t.after) for t in tasks)

    return spoil


def swapped(first: str, second: str):
    """Exchange the parts or layers of two tasks by name."""

    def spoil(tasks):
        names = [task.name for task in tasks]
        i, j = names.index(first), names.index(second)
        order = list(tasks)
        a, b = order[i], order[j]
        order[i], order[j] = b._replace(after=a.after), a._replace(after=b.after)
        return tuple(order)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(without_waiting("Q"), id="queries leave before they are computed"),
        pytest.param(without_waiting("C"), id="attention before the queries arrive"),
        pytest.param(without_waiting("B"), id="projection before the attention"),
        pytest.param(swapped("B0a", "B1a"), id="layers out of order"),
        pytest.param(swapped("H0a", "H0b"), id="attention of the wrong part"),
    ],
)
def test_a_plan_in_the_wrong_order_is_noticed(spoil):
    plan = Broken(VSLPipe(), spoil).lower(PIPELINES["vslpipe"], make_batch([3, 2], [4, 1]))
    with pytest.raises(AssertionError):
        check_data(plan)


@pytest.mark.parametrize("spoil", [swapped("D0a", "C1a"), swapped("C0a", "D0a")], ids=["too late", "too early"])
def test_late_experts_at_the_wrong_time_are_noticed(spoil):
    plan = Broken(KTransformers(), spoil).lower(PIPELINES["ktransformers"], make_batch([3, 2], [4, 1], layers=3))
    with pytest.raises(AssertionError):
        check_data(plan)


def test_work_that_is_left_out_or_done_twice_is_noticed():
    batch = make_batch([3, 2], [4, 1])
    pipeline = PIPELINES["vslpipe"]
    twice = Broken(Sequential(), lambda tasks: (*tasks, tasks[-1])).lower(pipeline, batch)
    never = Broken(Sequential(), lambda tasks: tasks[:-1]).lower(pipeline, batch)
    assert computed(twice) != wanted(pipeline, batch)
    assert computed(never) != wanted(pipeline, batch)


def test_weights_that_come_too_late_or_too_early_are_noticed():
    stack = stack_graph(PIPELINES["vslpipe"], 4)
    right = VSLPipe().tasks(stack, Step.FIRST | Step.LAST)
    check_weights(stack, [right], 2)
    no_waiting = tuple(t._replace(after=() if t.bulk else t.after) for t in right)
    with pytest.raises(AssertionError, match="overwritten"):
        check_weights(stack, [no_waiting], 2)
    last = max(index for index, task in enumerate(right) if task.weights_of)
    absent = tuple(t._replace(weights_of=((0, 0),)) if i == last else t for i, t in enumerate(right))
    with pytest.raises(AssertionError, match="without its weights"):
        check_weights(stack, [absent], 2)
    with pytest.raises(AssertionError, match="overwritten"):
        check_weights(stack, [right], 1)


def test_a_carried_transfer_that_nobody_waits_for_or_that_begins_too_early_is_noticed():
    stack = stack_graph(PIPELINES["vslpipe"], 4)
    first, last = (VSLPipe().tasks(stack, step) for step in (Step.FIRST, Step.LAST))
    check_weights(stack, [first, last], 2)
    rest = next(index for index, task in enumerate(last) if task.carry is Carry.IN)
    unawaited = tuple(t._replace(after=tuple(index for index in t.after if index != rest)) for t in last)
    with pytest.raises(AssertionError):
        check_weights(stack, [first, unawaited], 2)
    early = tuple(t._replace(after=()) if t.carry is Carry.OUT else t for t in first)
    with pytest.raises(AssertionError, match="overwritten"):
        check_weights(stack, [early, last], 2)


def test_a_forgotten_way_back_of_new_kv_is_noticed():
    pipeline = PIPELINES["flexgen_s4"]
    spoil = lambda tasks: tuple(  # noqa: E731
        Task(
            t.node if t.node.kind is not NodeKind.KV_OUT else Node(NodeKind.MOVE, "S", "d2h"), t.layer, t.part, t.after
        )
        for t in tasks
    )
    with pytest.raises(AssertionError, match="did not come home"):
        check_data(Broken(Sequential(), spoil).lower(pipeline, make_batch([3], [4])))
