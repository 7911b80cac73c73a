"""Wirings that a search tries: those of the named systems, and mixtures of them that nobody's system has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from workbench.analysis.advise.placements import Layout, placements
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, Stack, cpu, fetch, gpu, load, offload
from workbench.scenario import Scenario
from workbench.scheduler.base import Scheduler
from workbench.schedules import (
    CGOPipe,
    FastDecode,
    Fiddler,
    FlexGenS3,
    KTransformers,
    Schedule,
    Sequential,
    contenders,
)
from workbench.stages import (
    ExpertSet,
    Op,
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    most_used,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
    weights,
)
from workbench.workload import Frequencies

_SHARES = 200
"""Steps in which weights that would stream are kept on the GPU."""
_SETS = 16
"""Most steps in which the experts of a layer are shared between GPU and CPU."""
_STREAMED = (0.25, 0.5, 0.75)
"""Shares of the experts that are streamed where the CPU computes the others."""
_KV_KEPT = (0.25, 0.5, 0.75)
"""Shares of a streamed KV cache that stay on the GPU."""
_BUILT_IN = {qkv, prefill_attention, decode_attention, out_proj, route, experts, combine, shared_experts}
_BEFORE = gpu(qkv, attention, out_proj, route)
"""A layer to its router, on the GPU."""
_ATTENDING = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load
"""A layer to its attention, that of decodes on the CPU."""
_TO_ROUTER = _ATTENDING >> gpu(out_proj, route)
_BEGINNINGS = (("", _BEFORE), (", attention on the CPU", _TO_ROUTER))
"""Layers to their router, with what they add to a wiring's name."""
GIVEN = "as given"
"""Name of the wiring that the scenario has itself."""


@dataclass(frozen=True)
class Named:
    """A system by its name, with its schedule; `scheduler` is the only one that it is tried with, None for any."""

    system: str
    schedule: Schedule
    scheduler: Scheduler | None = None


@dataclass(frozen=True)
class Wiring:
    """A pipeline or a stack, in steps that put more and more weights on the GPU.

    Attributes
    ----------
    name : str
        The wiring in words; no two have the same.
    layout : callable
        The layout at a step from 0 to `last`.
    last : int
    named : tuple of Named
        The systems that place a model so.
    filled : bool
        True if these put as much on the GPU as fits; else they are at step 0.
    """

    name: str
    layout: Callable[[int], Layout] = field(compare=False, repr=False)
    last: int = 0
    named: tuple[Named, ...] = field(default=(), compare=False)
    filled: bool = False


def wirings(scenario: Scenario) -> tuple[Wiring, ...]:
    """Every wiring that gives the answer of a scenario, those of the named systems first.

    A pipeline with operations of a user's own is the only one that has them. Where decodes get experts late or never,
    the others do so too: the wiring of KTransformers can.
    """
    given = _given(scenario)
    if {stage.op.plain for stage in scenario.stages} - _BUILT_IN:
        return (given,)
    late = {(stage.defer, stage.skip) for stage in scenario.stages} - {(0, 0)}
    if late:
        alike = tuple(_late(*options) for options in late) if len(late) == 1 else ()
        return _different([*alike, given])
    found = [*_systems(scenario.model), *_mixtures(scenario), given]
    if scenario.machine.one_memory:
        found = [each for each in found if each is given or not each.layout(each.last).on_both]
    return _different(found)


def _different(found: list[Wiring]) -> tuple[Wiring, ...]:
    """The wirings without those whose pipeline another one has, from its first step to its last; names are joined."""
    kept = dict[object, Wiring]()
    for each in found:
        ends = each.layout(0), each.layout(each.last)
        key = tuple((layout.pipeline, layout.kept, layout.kv_kept) for layout in ends)
        if key in kept:
            each = replace(kept[key], named=(*kept[key].named, *each.named))
        kept[key] = each
    return tuple(kept.values())


def _given(scenario: Scenario) -> Wiring:
    """The scenario's own wiring, with its own shares."""
    memory = scenario.memory
    layout = Layout(GIVEN, GIVEN, scenario.pipeline, memory.weights_on_gpu, memory.kv_on_gpu)
    own = tuple(Named(GIVEN, schedule, scenario.scheduler) for schedule in contenders(scenario.stack))
    return Wiring(GIVEN, lambda step: layout, named=own)


def _late(defer: int, skip: int) -> Wiring:
    """KTransformers' wiring with experts that come late or never."""
    pipeline = _BEFORE >> offload >> cpu(experts, defer=defer, skip=skip) >> load >> gpu(combine)
    named = (Named("KTransformers", KTransformers()), Named("Fiddler", Fiddler()))
    return _fixed("experts on the CPU", pipeline, *named)


_MORE_NAMED: dict[Schedule, tuple[Named, ...]] = {
    CGOPipe(): (
        Named("FastDecode", FastDecode()),
        Named("FlexGen, attention on the CPU", FlexGenS3()),
        Named("weights prefetched", Sequential(prefetch=True)),
    ),
    KTransformers(): (Named("Fiddler", Fiddler()),),
}
"""Systems that have another system's placement, by that system's schedule."""


def _systems(model: ModelConfig) -> Iterator[Wiring]:
    """The placements that people use (`workbench.analysis.advise`), each with the systems that are known for it."""
    for placement in placements(model):
        first = placement.layout(placement.steps[0])
        named = (Named(first.known_as, placement.schedule), *_MORE_NAMED.get(placement.schedule, ()))
        if placement.streams and isinstance(first.pipeline, Pipeline):
            yield _shared(first.what, first.pipeline, *named, known_as=first.known_as)
            continue
        system = replace(named[0], system=first.known_as.rpartition(" ")[0]) if len(placement.steps) > 1 else named[0]

        @cache
        def at(step: int, steps: range = placement.steps, layout: Callable[[int], Layout] = placement.layout) -> Layout:
            return layout(steps[step])

        yield Wiring(first.what, at, len(placement.steps) - 1, (system, *named[1:]), filled=placement.partial)
    of_experts = fetch(experts.weights) | _ATTENDING >> gpu(out_proj, route, experts, combine)
    lightning = Named("MoE-Lightning, projections on the GPU", CGOPipe())
    yield _shared("experts streamed, attention on the CPU", of_experts, lightning)


def _mixtures(scenario: Scenario) -> Iterator[Wiring]:
    """Wirings of no system: experts shared in other ways, and shares of a streamed cache that stay."""
    on_cpu = offload >> cpu(experts) >> load >> gpu(combine)
    yield _fixed("attention and experts on the CPU", _TO_ROUTER >> on_cpu)
    decodes = gpu(experts.prefill) | offload >> cpu(experts.decode) >> load
    yield _shared(
        "experts on the CPU, streamed for prompts", fetch(experts.prefill.weights) | _BEFORE >> decodes >> gpu(combine)
    )
    for share in _KV_KEPT:
        streamed = fetch(weights, kv) | gpu(qkv, attention, out_proj, route, experts, combine)
        yield _shared(f"weights and KV streamed, {share:.0%} of the KV kept", streamed, kv_kept=share)
    every = scenario.model.num_local_experts
    for share in _STREAMED:
        count = max(1, min(every - 1, round(every * share)))
        for where, begin in _BEGINNINGS:
            some = gpu(experts[:count]) | offload >> cpu(experts[count:]) >> load
            streamed = fetch(experts[:count].weights) | begin >> some >> gpu(combine)
            yield _shared(f"{share:.0%} of the experts streamed, the others on the CPU{where}", streamed)
    yield from _resident(scenario.model.num_hidden_layers)
    yield from _sets(scenario)


def _resident(layers: int) -> Iterator[Wiring]:
    """Some layers on the GPU for good, evenly among those that are streamed: the host need not keep their weights."""
    for where, begin in _BEGINNINGS:
        chain = begin >> gpu(experts, combine)

        @cache
        def at(step: int, where: str = where, chain: Pipeline = chain) -> Layout:
            name = f"weights of {step} of {layers} layers on the GPU, the others streamed{where}"
            return Layout(name, "", _among(layers, step, chain, fetch(weights) | chain))

        yield Wiring(f"weights of some layers on the GPU, the others streamed{where}", at, layers - 1)


def _among(layers: int, count: int, some: Pipeline, others: Pipeline) -> Pipeline | Stack:
    """A stack in which some layers lie evenly among the others."""
    chosen = [(layer + 1) * count // layers > layer * count // layers for layer in range(layers)]
    edges = [0, *(layer for layer in range(1, layers) if chosen[layer] != chosen[layer - 1]), layers]
    ranges = [(some if chosen[first] else others)[first:stop] for first, stop in pairwise(edges)]
    return sum(ranges[1:], start=ranges[0]) if len(ranges) > 1 else others


def _sets(scenario: Scenario) -> Iterator[Wiring]:
    """The most used experts of each layer on the GPU, if their frequencies are known, or any of them."""
    every = scenario.model.num_local_experts
    steps = min(_SETS, every)
    routing = scenario.routing
    known = isinstance(routing, Frequencies)

    def hot(step: int) -> ExpertSet:
        count = max(1, every * (step + 1) // steps)
        return (
            most_used(routing.counts, count) if isinstance(routing, Frequencies) else ExpertSet.of_slice(slice(count))
        )

    def beside(begin: Pipeline) -> Callable[[ExpertSet], Pipeline]:
        return lambda some: begin >> _apart(experts[some], experts[~some]) >> gpu(combine)

    def prompts_streamed(some: ExpertSet) -> Pipeline:
        others = experts[~some]
        on_gpu = gpu(experts[some], others.prefill)
        return fetch(others.prefill.chosen) | _BEFORE >> (on_gpu | _on_cpu(others.decode)) >> gpu(combine)

    used = "most used experts" if known else "some experts"
    ways = [
        (f"{used} on the GPU, the others streamed for prompts", prompts_streamed),
        (f"{used} on the GPU, attention on the CPU", beside(_TO_ROUTER)),
    ]
    if known:
        ways.append((f"{used} on the GPU", beside(_BEFORE)))
    for name, wired in ways:

        @cache
        def at(step: int, name: str = name, wired: Callable[[ExpertSet], Pipeline] = wired) -> Layout:
            return Layout(f"{name}: {max(1, every * (step + 1) // steps)} of {every}", "", wired(hot(step)))

        if steps > 1:
            yield Wiring(name, at, steps - 2)


def _apart(here: Op, there: Op) -> Pipeline:
    return gpu(here) | _on_cpu(there)


def _on_cpu(op: Op) -> Pipeline:
    return offload >> cpu(op) >> load


def _fixed(name: str, pipeline: Pipeline, *named: Named) -> Wiring:
    """A wiring of one step."""
    layout = Layout(name, ", ".join(each.system for each in named), pipeline)
    return Wiring(name, lambda step: layout, named=named)


def _shared(name: str, pipeline: Pipeline, *named: Named, known_as: str = "", kv_kept: float = 0.0) -> Wiring:
    """A wiring whose steps keep more and more of its streamed weights on the GPU."""

    @cache
    def at(step: int) -> Layout:
        share = step / _SHARES
        return Layout(f"{name}, {share:.1%} kept" if share else name, known_as, pipeline, share, kv_kept)

    return Wiring(name, at, _SHARES - 1, named)


def streams(wiring: Wiring) -> bool:
    """True if its steps keep shares of what it streams, so that each step only takes work off the link."""
    return wiring.layout(wiring.last).kept > wiring.layout(0).kept
