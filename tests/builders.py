"""Small models, machines and scenarios that the tests share; every number is chosen, none is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from tests.systems import ADDED, LIGHTNING, PIPELINES, STREAMED, VSL, ids
from workbench.core.errors import PipelineError, ScenarioError, ScheduleError
from workbench.hardware import Device, Link, Machine
from workbench.hardware.profile import Contention, Cores, InOneCall, Losses, OpTime, Profile
from workbench.models import LayerKind, ModelConfig
from workbench.models.layers import Counted, Own, Recurrence, Sparse, fold
from workbench.pipeline import Element, Fork, Pipeline, Stack, adding_sets, cpu, fetch, gpu, load, offload, resolve
from workbench.pipeline.stack_graph import stack_graph
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import Scheduler
from workbench.scheduler.batch import Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.registry import every_scheduler
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import (
    CGOPipe,
    FastDecode,
    Fiddler,
    FlexGenS3,
    FlexGenS4,
    KTransformers,
    LayerStreaming,
    Overlap,
    Schedule,
    Sequential,
    Step,
    VSLPipe,
    WeightPlace,
)
from workbench.serving import prepare
from workbench.serving.task_cost import profile_shape
from workbench.simulate import simulate
from workbench.stages import (
    ExpertSet,
    Move,
    Op,
    Place,
    Precision,
    Rows,
    Stage,
    Work,
    combine,
    decode_attention,
    experts,
    kv,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
    weights,
)
from workbench.workload import UNIFORM, Frequencies, Routing, Workload

OPERATIONS = (
    "embed",
    "qkv",
    "prefill_attention",
    "decode_attention",
    "out_proj",
    "route",
    "experts",
    "shared_experts",
    "combine",
    "own",
    "head",
)


def tiny_model(layers: int = 4, *, dtype: str = "bf16", **changes: int) -> ModelConfig:
    """A mixture of 4 experts, a few hundred kB in all."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
    }
    return ModelConfig(name="tiny", num_hidden_layers=layers, dtype=dtype, **(sizes | changes))


KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "latent": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "shared": {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 24},
    "dense": {"moe_intermediate_size": 40, "first_k_dense_replace": 1},
    "windows": {"sliding_window": 6, "windowed_layers": 1},
    "quantised": {"expert_dtype": "mxfp4", "other_dtype": "fp8"},
    "formats": {
        "formats": (
            *(("embed", 0.5625), ("head", 0.82), ("experts", 0.5625)),
            *((operation, 1.0625) for operation in ("qkv", "out_proj", "route", "shared_experts")),
        )
    },
}
KINDS["all"] = {key: value for kind in KINDS.values() for key, value in kind.items()}
_COUNTED = Counted(qkv=9000, out_proj=4000, route=256, unrouted=1200, expert=18000, vectors=300)
_STATES = Recurrence("delta rule", state=700, macs=2500.0, taken=200, given=100)
UNLIKE: dict[str, tuple[LayerKind, ...]] = {
    "states": (
        LayerKind(own=Own(counted=_COUNTED)),
        LayerKind(own=Own(counted=replace(_COUNTED, qkv=11000), recurrence=_STATES)),
        LayerKind(dense=True, own=Own(counted=replace(_COUNTED, expert=0), recurrence=_STATES)),
    ),
    "sparse": (
        LayerKind(own=Own(sparse=Sparse(top=2, keys=64, macs=4096))),
        LayerKind(own=Own(sparse=Sparse(top=3, ratio=4, window=5, keys=4, macs=16))),
        LayerKind(own=Own(sparse=Sparse(ratio=8, window=5))),
    ),
    "heads": (
        LayerKind(own=Own(formats=(("experts", 0.6), ("qkv", 0.8)))),
        LayerKind(windowed=True, own=Own(num_key_value_heads=4, head_dim=8, sliding_window=9)),
        LayerKind(own=Own(v_head_dim=8, formats=(("experts", 0.7), ("shared_experts", 1.1)))),
    ),
}
UNLIKE["alike"] = UNLIKE["sparse"][:1]
"""Kinds of layers with sizes of their own, which follow one another."""
KINDS |= {kind: {} for kind in UNLIKE}
KINDS["chunks"] = {"sliding_window": 6, "windowed_layers": 1, "chunked": True}
KINDS["idle"] = {"idle_experts": 3}


def tiny_model_of(kind: str, layers: int = 4, *, dtype: str = "bf16") -> ModelConfig:
    """A tiny model of one of `KINDS`, its one dense layer left out where it would be the only layer."""
    model = replace(tiny_model(layers, dtype=dtype), **KINDS[kind])
    if kind in UNLIKE:
        kinds = [UNLIKE[kind][layer % len(UNLIKE[kind])] for layer in range(layers)]
        return replace(
            model,
            first_k_dense_replace=sum(each.dense for each in kinds),
            windowed_layers=sum(each.windowed for each in kinds),
            layers=fold(kinds),
        )
    return replace(model, first_k_dense_replace=min(model.first_k_dense_replace, layers - 1))


def enough_experts(model: ModelConfig, pipeline: Pipeline | Stack) -> ModelConfig:
    """The model, with more experts per token if the pipeline, or one of a stack's, would leave none of them."""
    ranges = pipeline.ranges if isinstance(pipeline, Stack) else pipeline[:].ranges
    least = 1 + max(stage.defer + stage.skip for each in ranges for stage in each.pipeline.stages)
    chosen = max(least, model.num_experts_per_tok)
    return replace(model, num_experts_per_tok=chosen, num_local_experts=max(chosen, model.num_local_experts))


def small_machine(
    *,
    gpu: float = 1e11,
    hbm: float = 1e10,
    cpu: float = 1e10,
    dram: float = 1e9,
    h2d: float = 1e8,
    d2h: float = 1e8,
    overhead: float = 0.0,
    gpu_memory: float = 1e9,
    host_memory: float = 1e10,
) -> Machine:
    """A machine of the given rates [FLOP/s, B/s] and memories [B]."""

    def device(name: str, memory: float, bandwidth: float, rate: float) -> Device:
        return Device(name, memory, bandwidth, (("bf16", rate), ("fp32", rate)), overhead)

    return Machine(
        "small", device("g", gpu_memory, hbm, gpu), device("c", host_memory, dram, cpu), Link(h2d, d2h, overhead)
    )


def tiny_scenario(
    prompt: int | Sequence[int] = 8,
    output: int | Sequence[int] = 4,
    requests: int | None = None,
    *,
    pipeline: Pipeline | Stack = VSL,
    model: ModelConfig | None = None,
    machine: Machine | None = None,
    blocks: int = 1000,
    block: int = 4,
    token_budget: float | None = None,
    scheduler: Scheduler | None = None,
) -> Scenario:
    """A scenario whose KV cache has exactly `blocks` blocks."""
    model = model or enough_experts(tiny_model(), pipeline)
    return Scenario(
        pipeline,
        model=model,
        machine=machine or small_machine(),
        memory=Memory(kv_capacity=blocks * block * model.kv_bytes_per_token(model.dtype), kv_block=block),
        workload=Workload.lengths(prompt, output, requests),
        scheduler=scheduler or ResourceAware(token_budget=token_budget),
    )


def open_queue(
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    blocks: int,
    block: int,
    budget: float = 1000,
    admission: Admission = Admission.GREEDY,
    scheduler: Scheduler | None = None,
    layers: int = 1,
    there: int | None = None,
) -> tuple[object, BlockManager]:
    """A queue over its own blocks, of the resource-aware scheduler if no other is given; `there` requests, or all."""
    workload = Workload.lengths(prompt, output)
    memory = BlockManager(blocks, block, len(workload), int((workload.prompt_len + workload.output_len).max()))
    queue = (scheduler or ResourceAware(admission=admission)).open(workload, memory, budget, layers)
    queue.add(np.arange(len(workload))[:there], workload.prompt_len[:there], workload.output_len[:there])
    return queue, memory


def make_batch(prefills: Sequence[int] = (), contexts: Sequence[int] = (), *, layers: int = 2) -> Batch:
    """Requests 0, 1, ... prefill the given lengths; the next ones decode at the given contexts."""
    first = len(prefills)
    return Batch(ids(*range(first)), ids(*prefills), ids(*range(first, first + len(contexts))), ids(*contexts), layers)


# ---------------------------------------------------------------------------------------------- hypothesis strategies


def rates(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats between two positive bounds, even in the logarithm."""
    return st.floats(np.log(low), np.log(high)).map(lambda x: float(np.exp(x)))


@st.composite
def op_times(draw: st.DrawFn, op: str, threads: int) -> OpTime:
    """Any times that rise with the tokens, also such that a call takes long for its first token."""
    points = sorted(draw(st.sets(st.integers(1, 300), min_size=2, max_size=5)))
    between = st.lists(rates(1e-7, 1e-1) | st.just(0.0), min_size=len(points) - 2, max_size=len(points) - 2)
    step = rates(1e-7, 1e-1)  # at the ends, or the first token, or any number of them, would be free in one call
    steps = [draw(step), *draw(between), draw(step)]
    rest = {"prefill_attention": ("per_prompt", "per_pair"), "decode_attention": ("per_context",)}
    extra = {name: draw(rates(1e-8, 1e-2) | st.just(0.0)) for name in rest.get(op, ())}
    if op == "experts":
        extra["few"] = float(draw(st.integers(0, 20)))
    if op == "decode_attention" and draw(st.booleans()):
        counts = sorted(draw(st.sets(st.integers(1, 300), min_size=2, max_size=4)))
        longer = [draw(step) for _ in counts]
        extra |= {"decodes": tuple(map(float, counts)), "decode_seconds": tuple(np.cumsum(longer).tolist())}
    return OpTime(op, threads, tuple(map(float, points)), tuple(np.cumsum(steps).tolist()), **extra)


@st.composite
def shared_cores(draw: st.DrawFn) -> Cores:
    """How two lanes may share 2 to 8 cores."""
    losses = {
        name: draw(rates(1e-13, 1e-9) | st.just(0.0))
        for name in ("mover", "gpu_slowdown", "cpu_slowdown", "gpu_team_slowdown", "cpu_team_slowdown")
    }
    return replace(Cores.of(draw(st.sampled_from([2, 3, 8]))), **losses)


def calibrated(machine: Machine, model: ModelConfig) -> st.SearchStrategy[Machine]:
    """The machine with shared cores, without and with any times of the model's operations."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> Machine:
        cores = draw(shared_cores())
        threads = sorted({cores.gpu, cores.cpu, cores.alone})
        ops = [draw(op_times(op, n)) for n in threads for op in OPERATIONS]
        if draw(st.booleans()):
            ops += [replace(draw(op_times("experts", n)), resident=True) for n in threads]
        between = [draw(rates(1e-7, 1e-2) | st.just(0.0)) for _ in range(5)]
        pieces = draw(rates(1e-7, 1e-4) | st.just(0.0))
        growths = [draw(rates(1e-6, 3.0) | st.just(0.0)) for _ in range(2)]
        waits = [draw(rates(1e-7, 1e-3) | st.just(0.0)) for _ in range(2)]
        losses = Contention(*growths, *waits)
        precision = Precision(model.dtype, model.dtype, model.expert_dtype, model.other_dtype)
        shape = profile_shape(model, precision)
        cold = draw(rates(1e-6, 1e-3) | st.just(0.0))
        alone = draw(st.sampled_from([None, Losses(*between[:2], Contention(*growths[::-1], *waits[::-1]))]))
        at_once = draw(st.sampled_from([None, InOneCall(1e-5, 4, 100), InOneCall(1.0, 3, 1000)]))
        slower = {"contention": losses, "resident": alone, "in_one_call": at_once}
        profile = Profile(shape, tuple(ops), *between, task=pieces, rest=cold, **slower)
        return replace(machine, cores=cores, profiles=draw(st.sampled_from([(), (profile,)])))

    return draw_one()


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines with rates over five decades, so that every lane binds in some of them."""
    return small_machine(
        gpu=draw(rates(1e8, 1e13)),
        hbm=draw(rates(1e8, 1e12)),
        cpu=draw(rates(1e8, 1e12)),
        dram=draw(rates(1e7, 1e11)),
        h2d=draw(rates(1e6, 1e11)),
        d2h=draw(rates(1e6, 1e11)),
        overhead=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
    )


def _own_work(rows: Rows, model: ModelConfig, precision: Precision) -> Work:
    return Work(1e4 * rows.tokens, 1e4 + 1e3 * rows.tokens, precision.weights)


OWN = Op("own", ("x",), ("x",), work=_own_work, params=lambda model: 1000)
"""An operation as a user would add it."""


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Any placement of the layer's operations and of a user's own one, with the transfers that it needs."""
    ops = [qkv, prefill_attention, decode_attention, out_proj, route, experts, combine]
    if draw(st.booleans()):
        ops.insert(draw(st.sampled_from([0, 4, 7])), OWN)
    devices = draw(st.lists(st.sampled_from(Place), min_size=len(ops), max_size=len(ops)))
    wired = Pipeline()
    for op, device, before in zip(ops, devices, [devices[0], *devices], strict=False):
        if device is not before:
            wired = wired >> (load if device is Place.GPU else offload)
        wired = wired >> (gpu(op) if device is Place.GPU else cpu(op))
    if devices[-1] is not devices[0]:
        wired = wired >> (load if devices[0] is Place.GPU else offload)
    on_gpu = [op for op, device in zip(ops, devices, strict=True) if device is Place.GPU]
    choices = [weights] if any(op.params for op in on_gpu) else []
    choices += [experts.weights] if experts in on_gpu else []
    choices += [kv] if decode_attention in on_gpu else []
    fetched = [item for item in choices if draw(st.booleans())]
    whole = fetch(*fetched) | wired if fetched else wired
    try:
        resolve(whole)
    except PipelineError:  # the two attentions apart, the second where its input already is: a transfer moves nothing
        reject()
    return whole


FETCHES = ((), (weights,), (kv,), (weights, kv), (experts.weights,), (experts.weights, kv))


def every_wiring() -> Iterator[Pipeline]:
    """All placements of the seven operations that can be a layer, with each of six fetches that streams something."""
    ops = (qkv, prefill_attention, decode_attention, out_proj, route, experts, combine)
    for devices in product(Place, repeat=len(ops)):
        wired = Pipeline()
        for op, device, before in zip(ops, devices, (devices[-1], *devices), strict=False):
            if device is not before and wired.chain:
                wired = wired >> (load if device is Place.GPU else offload)
            wired = wired >> (gpu(op) if device is Place.GPU else cpu(op))
        if devices[-1] is not devices[0]:
            wired = wired >> (load if devices[0] is Place.GPU else offload)
        for fetched in FETCHES:
            whole = fetch(*fetched) | wired if fetched else wired
            with suppress(PipelineError):  # it streams nothing, or a transfer moves nothing
                resolve(whole)
                yield whole


HOT = ExpertSet("hot experts", ((0, 3), (1, 2)))
ANY_OPS = (
    *(qkv, prefill_attention, decode_attention, out_proj, route, experts, combine, shared_experts, OWN),
    *(experts.prefill, experts.decode, experts[:2], experts[HOT], experts[~HOT].decode),
)
ANY_FETCHES = (weights, kv, *(op.weights for op in (experts, qkv, OWN, experts[:2], experts.decode)), experts.chosen)


@st.composite
def any_chains(draw: st.DrawFn, depth: int = 2) -> tuple[Element, ...]:
    """Stages, moves and forks in any order, of which most are no layer and many are refused by the algebra."""
    found: list[Element] = []
    for _ in range(draw(st.integers(1, 6 if depth == 2 else 3))):
        kind = draw(st.integers(0, 9))
        if kind == 0 and depth:
            arms = draw(st.lists(any_chains(depth - 1), min_size=2, max_size=3))
            arms = [arm for arm in arms if not (len(arm) == 1 and isinstance(arm[0], Fork))]
            found += [Fork(tuple(arms))] if len(arms) > 1 else []
        elif kind == 1:
            found.append(Move(draw(st.sampled_from(Place))))
        else:
            op, device = draw(st.sampled_from(ANY_OPS)), draw(st.sampled_from(Place))
            deferred = draw(st.integers(0, 2)) if op is experts and device is Place.CPU else 0
            found.append(Stage(op, device, deferred, draw(st.integers(0, 1)) if op is experts else 0))
    return tuple(found) or (Stage(qkv, Place.GPU),)


@st.composite
def any_wirings(draw: st.DrawFn) -> Pipeline:
    """Pipelines as an unpractised hand wires them; see `any_chains`."""
    items = draw(st.lists(st.sampled_from(ANY_FETCHES), max_size=3)) if draw(st.booleans()) else []
    return Pipeline(adding_sets(draw(any_chains())), fetch(*items).fetches)


PLACES = st.sampled_from(WeightPlace)
OF_SHAPE: dict[str, st.SearchStrategy[Schedule]] = {
    "attention on the cpu": st.one_of(
        st.builds(VSLPipe, st.sampled_from([1e-6, 1e-4, 5e-3]), st.integers(2, 5)),
        st.builds(CGOPipe, st.integers(2, 4)),
        st.builds(FastDecode, st.integers(2, 4)),
        st.builds(FlexGenS3, st.integers(1, 4), PLACES),
    ),
    "streamed kv": st.builds(FlexGenS4, st.integers(1, 4), PLACES),
    "streamed weights": st.just(LayerStreaming()),
    "experts on the cpu": st.sampled_from([KTransformers(), Fiddler()]),
}
"""Schedules that need a pipeline of a certain shape."""

WIRED: list[tuple[Pipeline, st.SearchStrategy[Schedule]]] = [
    *((pipeline, OF_SHAPE["attention on the cpu"]) for pipeline in (VSL, LIGHTNING)),
    (PIPELINES["flexgen_s4"], OF_SHAPE["streamed kv"]),
    (
        fetch(experts.weights, kv) | gpu(qkv, prefill_attention, decode_attention, out_proj, route, experts, combine),
        OF_SHAPE["streamed kv"],
    ),
    (STREAMED, OF_SHAPE["streamed weights"]),
    (PIPELINES["ktransformers"], OF_SHAPE["experts on the cpu"]),
]


@st.composite
def wirings(draw: st.DrawFn) -> tuple[Pipeline, Schedule]:
    """One of the systems' pipelines, or any, with a schedule that takes it; half are `ADDED`, if any are."""
    if ADDED and draw(st.booleans()):
        return draw(st.sampled_from([*ADDED.values()]))
    pipeline, own = draw(
        st.sampled_from(WIRED) | st.tuples(st.sampled_from([*PIPELINES.values()]) | pipelines(), st.none())
    )
    every = st.builds(Sequential, st.integers(1, 4), prefetch=st.booleans())
    every |= st.builds(Overlap, st.integers(1, 4), st.integers(2, 4))
    return pipeline, draw(every if own is None else own | every)


LEAST_EXPERTS = 4
"""Routed experts that every model here has."""


@st.composite
def expert_sets(draw: st.DrawFn, layers: int) -> ExpertSet:
    """Some of the experts: a range of them, or others in each layer or in all."""
    if draw(st.booleans()):
        edge = st.none() | st.integers(-LEAST_EXPERTS, LEAST_EXPERTS)
        return ExpertSet.of_slice(slice(draw(edge), draw(edge)))
    row = st.sets(st.integers(0, LEAST_EXPERTS - 1), max_size=LEAST_EXPERTS).map(tuple)
    return ExpertSet("hot", tuple(draw(row) for _ in range(draw(st.sampled_from([1, layers])))))


@st.composite
def maybe_chosen(draw: st.DrawFn, pipeline: Pipeline, schedule: Schedule, layers: int) -> Pipeline:
    """The pipeline, or in a quarter of the draws one that streams the chosen experts of a stage on the GPU."""
    there = [stage.op for stage in pipeline.stages if stage.op.plain is experts and stage.device is Place.GPU]
    if not there or draw(st.integers(0, 3)):
        return pipeline
    op = draw(st.sampled_from(there))
    others = tuple(item for item in pipeline.fetches if item not in (op.weights, experts.weights))
    found = Pipeline(pipeline.chain, fetch(op.chosen, *others).fetches)
    with suppress(PipelineError, ScheduleError):
        resolve(found)
        schedule.tasks(stack_graph(found, layers), Step.MIDDLE)
        return found
    return pipeline


@st.composite
def in_sets(draw: st.DrawFn, pipeline: Pipeline, schedule: Schedule, layers: int) -> Pipeline:
    """The pipeline, or in a third of the draws one whose experts are cut up: into sets, into their rows, or both.

    A part of them moves to the other device if the schedule takes it. Of the sets of streamed experts, only one may be
    streamed.
    """
    whole = [stage for stage in pipeline.stages if stage.op is experts]
    if draw(st.integers(0, 2)) or len(whole) != 1 or whole[0].options:
        return pipeline
    (stage,) = whole
    one = draw(expert_sets(layers))
    hot, rest = experts[one], experts[~one]
    here, there = draw(
        st.sampled_from(
            [
                ((hot,), (rest,)),
                ((experts.prefill,), (experts.decode,)),
                ((experts.decode,), (experts.prefill,)),
                ((hot.prefill, rest), (hot.decode,)),
                ((hot.decode, rest.prefill), (rest.decode, hot.prefill)),
            ]
        )
    )
    both = tuple(Stage(op, stage.device) for op in (*here, *there))
    chains = [_exchanged(pipeline.chain, stage, both)]
    if draw(st.booleans()):
        first, last = (load, offload) if stage.device is Place.CPU else (offload, load)
        other = (*first.chain, *(Stage(op, stage.device.other) for op in there), *last.chain)
        fork = Fork((both[: len(here)], other))
        chains.insert(0, _exchanged(pipeline.chain, stage, (fork,)))
        beside = Fork((other[1:-1], (*last.chain, *both[: len(here)], *first.chain)))
        chains.insert(0, _exchanged(pipeline.chain, (*last.chain, stage, *first.chain), (beside,)))
    fetches = [pipeline.fetches]
    if experts.weights in pipeline.fetches and draw(st.booleans()):
        others = tuple(item for item in pipeline.fetches if item != experts.weights)
        fetches.insert(0, fetch(draw(st.sampled_from([*here, *there])).weights, *others).fetches)
    for chain, fetched in product(chains, fetches):
        cut = Pipeline(adding_sets(chain), fetched)
        with suppress(PipelineError, ScheduleError):
            resolve(cut)
            schedule.tasks(stack_graph(cut, layers), Step.MIDDLE)
            return cut
    return pipeline


def _exchanged(
    chain: tuple[Element, ...], old: Stage | tuple[Element, ...], new: tuple[Element, ...]
) -> tuple[Element, ...]:
    """The chain with other elements in the place of some that follow one another, also within forks."""
    old = (old,) if isinstance(old, Stage) else old
    found: list[Element] = []
    at = 0
    while at < len(chain):
        element = chain[at]
        if chain[at : at + len(old)] == old:
            found += new
            at += len(old)
            continue
        found.append(
            Fork(tuple(_exchanged(arm, old, new) for arm in element.arms)) if isinstance(element, Fork) else element
        )
        at += 1
    return tuple(found)


@st.composite
def cut_up(draw: st.DrawFn, pipeline: Pipeline, schedule: Schedule, layers: int) -> Pipeline | Stack:
    """The pipeline, or a stack of up to four ranges, one with it and others with what the schedule takes beside it.

    Of each, the experts may be cut up too, and streamed once they are chosen.
    """
    pipeline = draw(maybe_chosen(draw(in_sets(pipeline, schedule, layers)), schedule, layers))
    if layers < 2 or draw(st.integers(0, 2)):
        return pipeline
    edges = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=3)))
    fetched = [Pipeline(pipeline.chain), *(replace(pipeline, fetches=wired.fetches) for wired, _ in WIRED)]
    others = st.sampled_from([pipeline, *fetched, *PIPELINES.values()])
    if isinstance(schedule, Overlap | Sequential):
        others |= pipelines()
    cut = [draw(in_sets(draw(others), schedule, layers)) for _ in range(len(edges) + 1)]
    drawn = [draw(maybe_chosen(each, schedule, layers)) for each in cut]
    drawn[draw(st.integers(0, len(edges)))] = pipeline
    ranges = [each[first:stop] for each, (first, stop) in zip(drawn, pairwise([0, *edges, layers]), strict=True)]
    if draw(st.booleans()):
        ranges[-1] = drawn[-1][edges[-1] - layers :]
    try:
        stack = Stack(tuple(one for each in ranges for one in each.ranges))
        schedule.tasks(stack_graph(stack, layers), Step.MIDDLE)
    except (PipelineError, ScheduleError):
        return pipeline
    return stack


@st.composite
def shares(draw: st.DrawFn, pipeline: Pipeline | Stack) -> dict[str, float]:
    """Shares of what is streamed that stay on the GPU, as `Memory` takes them; none in half of the draws."""
    ranges = pipeline.ranges if isinstance(pipeline, Stack) else pipeline[:].ranges
    fetched = {item for each in ranges for item in each.pipeline.fetches}
    there = (("weights_on_gpu", fetched - {kv}), ("kv_on_gpu", fetched & {kv}))
    names = [name for name, items in there if items and draw(st.booleans())]
    return {name: draw(st.sampled_from([0.1, 0.5, 1.0]) | st.floats(0, 1)) for name in names}


@st.composite
def routings(draw: st.DrawFn, model: ModelConfig) -> Routing:
    """Mostly all experts alike; else some up to three times as often as others, as far as a token's choices allow."""
    if draw(st.integers(0, 3)):
        return UNIFORM
    row = st.lists(st.integers(1, 3), min_size=model.num_local_experts, max_size=model.num_local_experts)
    counts = [draw(row)] * model.num_hidden_layers if draw(st.booleans()) else [draw(row) for _ in model.layer_kinds]
    fair = all(model.num_experts_per_tok * max(one) <= sum(one) for one in counts)
    return Frequencies(tuple(map(tuple, counts))) if fair else UNIFORM


def schedulers() -> st.SearchStrategy[Scheduler]:
    """Every scheduler with small and large budgets, with and without a limit on the sequences that run."""
    budget = st.none() | st.integers(1, 200)
    most = st.none() | st.integers(1, 8)
    known = (ResourceAware, StaticBatching, ContinuousBatching, ChunkedPrefill, LayeredPrefill)
    others = [one for one in every_scheduler() if type(one) not in known]
    return st.one_of(
        *(st.builds(replace, st.just(one), max_running=most) for one in others),
        st.builds(ResourceAware, budget, st.sampled_from(Admission), max_running=most),
        st.builds(StaticBatching, st.integers(1, 3), st.none() | st.integers(1, 5), budget, max_running=most),
        st.builds(ContinuousBatching, budget, max_running=most),
        st.builds(ChunkedPrefill, st.integers(1, 60), max_running=most),
        st.builds(LayeredPrefill, st.integers(1, 60), max_running=most),
    )


@st.composite
def scenarios(draw: st.DrawFn, *, layers: st.SearchStrategy[int] | None = None) -> tuple[Scenario, Schedule]:
    """Small scenarios with KV from ample down to the least that fits the longest request."""
    pipeline, schedule = draw(wirings())
    count = draw(st.integers(1, 12))
    prompt = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    output = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    block = draw(st.sampled_from([1, 3, 16]))
    least = max(-(-(p + g - 1) // block) for p, g in zip(prompt, output, strict=True))
    model = tiny_model_of(
        draw(st.sampled_from(sorted(KINDS))),
        draw(st.integers(1, 6) if layers is None else layers),
        dtype=draw(st.sampled_from(["bf16", "fp32"])),
    )
    wired = draw(cut_up(pipeline, schedule, model.num_hidden_layers))
    ranges = wired.ranges if isinstance(wired, Stack) else wired[:].ranges
    if model.keeps_states and any(kv in each.pipeline.fetches for each in ranges):
        model = tiny_model_of("heads", model.num_hidden_layers, dtype=model.dtype)
    model = enough_experts(model, wired)
    machine = draw(machines())
    scenario = tiny_scenario(
        prompt,
        output,
        pipeline=wired,
        model=model,
        machine=draw(st.just(machine) | calibrated(machine, model)),
        blocks=least + draw(st.sampled_from([0, 0, 1, 3, 10, 1000])),
        block=block,
        scheduler=draw(schedulers()),
    )
    scenario = scenario.on(memory=replace(scenario.memory, **draw(shares(wired))), routing=draw(routings(model)))
    try:
        prepare(scenario, schedule)
    except ScenarioError:  # prompts in pieces, and the cache is not where their attention is
        scenario = scenario.on(scheduler=ContinuousBatching())
    return scenario, schedule


@st.composite
def arrivals_and_links(draw: st.DrawFn, scenario: Scenario, schedule: Schedule) -> Scenario:
    """The scenario with a link on which a layer takes 0.1 to 10 times as long as all else, and requests that come late.

    Some come late, or all at once, within twice the time that the whole would take.
    """
    link = replace(scenario.machine.link, h2d=1e12)
    alone = simulate(scenario.on(machine=replace(scenario.machine, link=link)), schedule)
    streamed = prepare(scenario, schedule).cost.weights_per_layer * scenario.model.num_hidden_layers
    factor = draw(rates(0.1, 10) | rates(0.8, 1.25))
    if streamed and alone.seconds:
        link = replace(link, h2d=min(1e12, streamed * alone.iterations / (alone.seconds * factor)))
        scenario = scenario.on(machine=replace(scenario.machine, link=link))
    if draw(st.booleans()):
        count = len(scenario.workload)
        late = draw(st.lists(st.floats(0, 2), min_size=count, max_size=count))
        at = [alone.seconds * max(1.0, factor) * share for share in sorted(late)]
        scenario = scenario.on(workload=scenario.workload.arriving(at=at))
    return scenario


@st.composite
def streaming(draw: st.DrawFn, *, layers: st.SearchStrategy[int]) -> tuple[Scenario, Schedule]:
    """Scenarios whose link is about as fast as what it feeds, with requests that come late."""
    scenario, schedule = draw(scenarios(layers=layers))
    return draw(arrivals_and_links(scenario, schedule)), schedule


@st.composite
def batches(draw: st.DrawFn, *, layers: int = 2) -> Batch:
    """Mixed, prefill-only or decode-only batches of up to 12 requests."""
    prefills = draw(st.lists(st.integers(1, 9), max_size=6))
    contexts = draw(st.lists(st.integers(1, 9), min_size=0 if prefills else 1, max_size=6))
    return make_batch(prefills, contexts, layers=layers)
