"""The algebra that wires stages: ``>>`` feeds the next stage, ``|`` forks, `offload` and `load` cross the link.

layer = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)

A pipeline describes one decoder layer; embedding and head are implicit gpu stages around the stack of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NoReturn

from workbench.core.display import escaped
from workbench.core.errors import PipelineError
from workbench.core.units import is_whole
from workbench.pipeline.elements import (
    BufferRows,
    Element,
    Fork,
    Path,
    located,
    located_stages,
    misplaced,
    repeated,
    spelled,
    stages_of,
)
from workbench.pipeline.stack import Stack, cut
from workbench.pipeline.walk import Author, Walk
from workbench.stages import (
    ExpertSet,
    Move,
    Op,
    OpTree,
    Place,
    RowClass,
    Stage,
    Streamed,
    add_shared,
    combine,
    combine_of,
    embed,
    experts,
    flatten,
    head,
    kv,
    shared_experts,
    weights,
)

_KEPT = 64
"""Pipelines that are kept resolved: scenarios that differ in something else ask for one again and again."""


@dataclass(frozen=True)
class Pipeline:
    """One layer's stages and transfers, and the tensors that are streamed to the GPU.

    Pipelines are immutable, and both operators are associative.
    """

    chain: tuple[Element, ...] = ()
    fetches: tuple[Streamed, ...] = ()

    def __getitem__(self, layers: slice) -> Stack:
        """These layers of a model, as ``pipeline[:26]``; ranges are put behind one another with ``+``."""
        return cut(self, layers)

    __iter__ = None
    """A pipeline is no sequence of layers."""

    def __add__(self, other: object) -> NoReturn:
        raise PipelineError("+ puts ranges of layers behind one another; say which: experts_on_cpu[:26] + on_gpu[26:].")

    __radd__ = __add__

    def __rshift__(self, other: Pipeline) -> Pipeline:
        if isinstance(other, Stack):
            return NotImplemented
        if not isinstance(other, Pipeline):
            raise PipelineError(
                f">> needs a pipeline on its right, not {other!r}; place it first: gpu(...) or cpu(...)."
            )
        joined = Pipeline(adding_sets(self.chain + other.chain), _union(self.fetches, other.fetches))
        Walk().follow(joined.chain, ())
        return joined

    def __or__(self, other: Pipeline) -> Pipeline:
        if isinstance(other, Stack):
            return NotImplemented
        if not isinstance(other, Pipeline):
            raise PipelineError(
                f"| needs a pipeline on its right, not {other!r}; place it first: gpu(...) or cpu(...)."
            )
        fetches = _union(self.fetches, other.fetches)
        if not (self.chain and other.chain):
            return Pipeline(self.chain or other.chain, fetches)
        return Pipeline(adding_sets((Fork(_arms(self.chain) + _arms(other.chain)),)), fetches)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in order; the arms of a fork follow one another."""
        return tuple(stages_of(self.chain))

    @cached_property
    def kv_device(self) -> Place:
        """Device that holds the KV cache: that of decode attention, or the host if `fetch(kv)` streams the cache."""
        return Place.CPU if kv in self.fetches else next(s.device for s in self.stages if s.op.keeps_kv)

    def streams(self, stage: Stage) -> bool:
        """True if the weights of this stage are streamed to the GPU and not resident."""
        return any(True for _ in self._fetched(stage))

    def streams_chosen(self, stage: Stage) -> bool:
        """True if only those experts of this stage are streamed that a batch's tokens chose."""
        return any(fetched.chosen for fetched in self._fetched(stage))

    def _fetched(self, stage: Stage) -> Iterator[Streamed]:
        """Everything that is fetched of the weights of a stage."""
        if stage.device is not Place.GPU or not stage.op.has_weights:
            return
        names = {stage.op.name, stage.op.holder.name}
        if stage.op.subset is not None:
            names.add(experts.name)
        yield from (fetched for fetched in self.fetches if fetched is weights or fetched.op in names)

    def __str__(self) -> str:
        fetched = f"fetch({', '.join(item.name for item in self.fetches)}) | " if self.fetches else ""
        return fetched + " >> ".join(spelled(self.chain))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colours = {"gpu": "#dbeafe", "cpu": "#dcfce7", "offload": "#fef3c7", "load": "#fef3c7", "(": "#f3f4f6"}
        boxes = []
        for text in spelled(self.chain):
            colour = next(value for key, value in colours.items() if text.startswith(key))
            style = f"background:{colour};color:#111;border-radius:4px;padding:2px 6px;margin:2px;display:inline-block"
            boxes.append(f'<span style="{style}">{escaped(text)}</span>')
        streamed = ", ".join(item.name for item in self.fetches)
        note = f'<div style="font-size:85%">streamed to the GPU: {escaped(streamed)}</div>' if streamed else ""
        return f"<div>{' &rarr; '.join(boxes)}{note}</div>"


def gpu(*ops: OpTree, skip: int = 0) -> Pipeline:
    """Place operations on the GPU, one after the other; decodes skip their `skip` lowest-scored experts."""
    return _place(Place.GPU, ops, 0, skip)


def cpu(*ops: OpTree, defer: int = 0, skip: int = 0) -> Pipeline:
    """Place operations on the CPU, one after the other.

    Of the routed experts that a decode token chose, the `defer` lowest-scored are added one layer later, as
    KTransformers does it, or the `skip` lowest-scored never. Both change the model's answer.
    """
    return _place(Place.CPU, ops, defer, skip)


def fetch(*what: Streamed) -> Pipeline:
    """Declare the tensors that are streamed to the GPU: `weights`, ``experts.weights``, ``experts.chosen`` or `kv`.

    Weights are streamed before the batch needs them, all of them; ``experts.chosen`` are streamed once the router has
    chosen, and only those that it chose.
    """
    for item in what:
        if not isinstance(item, Streamed):
            raise PipelineError(f"fetch takes weights, kv, an operation's .weights or experts.chosen, not {item!r}.")
    return Pipeline((), _union((), what))


offload = Pipeline((Move(Place.CPU),))
load = Pipeline((Move(Place.GPU),))


def _place(device: Place, ops: tuple[OpTree, ...], defer: int, skip: int) -> Pipeline:
    flat = list(flatten(ops))
    for index, op in enumerate(flat):
        if not isinstance(op, Op):
            raise PipelineError(
                f"{device.value}(...) takes operations, not {op!r}; use those of workbench.stages or Op."
            )
        if op in (embed, head):
            raise PipelineError(
                f"{device.value}({op}) cannot be placed: embedding and head stand around the layers, on the GPU; leave "
                "it out.",
                (index,),
            )
    for name, count in (("defer", defer), ("skip", skip)):
        if not is_whole(count) or count < 0 or (count and experts not in flat):
            raise PipelineError(
                f"{name}={count!r} needs the routed experts, whole and for all rows, in the same {device.value}(...) "
                "and a number of at least 0."
            )
    stages = tuple(Stage(op, device, defer, skip) if op is experts else Stage(op, device) for op in flat)
    placed = Pipeline(adding_sets(stages))
    Walk().follow(placed.chain, ())
    return placed


def _union(a: tuple[Streamed, ...], b: tuple[Streamed, ...]) -> tuple[Streamed, ...]:
    return tuple(sorted({*a, *b}, key=lambda item: (item is kv, item.name)))


def _arms(chain: tuple[Element, ...]) -> tuple[tuple[Element, ...], ...]:
    return chain[0].arms if len(chain) == 1 and isinstance(chain[0], Fork) else (chain,)


def adding_sets(chain: tuple[Element, ...]) -> tuple[Element, ...]:
    """The chain with a `combine` that adds the output of every set of experts in it, in their order.

    Raises
    ------
    PipelineError
        If different sets have the same name.
    """
    sets = dict[str, ExpertSet]()
    for path, stage in located(chain):
        subset = stage.op.subset if isinstance(stage, Stage) else None
        if not isinstance(stage, Stage) or subset is None:
            continue
        (buffer,) = stage.op.writes
        if sets.setdefault(buffer, subset) != subset:
            raise PipelineError(
                f"two sets of experts in one pipeline are called {str(subset)!r}; give one of them another name, as in "
                f"ExpertSet('other', table).",
                path,
            )
    return _exchanged(chain, {combine: combine_of(*sets) if sets else combine})


def with_shared_experts(pipeline: Pipeline) -> Pipeline:
    """The same layer with the shared experts right behind the routed ones, on their device, unless it places them.

    If the routed experts are in several stages, the shared ones stand right before `combine`. Their output is added
    where it is computed: by `combine`, or else to the routed experts', behind which they must stand then.

    Raises
    ------
    PipelineError
        If it places them on a device with neither the routed experts nor `combine`, or more than once.
    """
    placed = [stage for stage in pipeline.stages if stage.op is shared_experts]
    beside = shared_beside(pipeline)
    if beside is not None:
        pipeline = Pipeline(_with_shared(pipeline.chain, beside), pipeline.fetches)
    adders = {stage.device for stage in pipeline.stages if stage.op is experts or stage.op.plain is combine}
    if len(placed) > 1 or not adders.issuperset(stage.device for stage in placed):
        whole = any(stage.op is experts for stage in pipeline.stages)
        where = "experts or combine" if whole else "combine"
        raise PipelineError(
            f"shared_experts must stand once, on the device of {where}, not as "
            f"{', '.join(map(str, placed))}; leave them out and they follow experts."
        )
    return Pipeline(_exchanged(pipeline.chain, _adders(pipeline)), pipeline.fetches)


def shared_beside(pipeline: Pipeline) -> Op | None:
    """The operation whose stage has the shared experts beside it, as `with_shared_experts` puts them there.

    None if the pipeline places them itself.
    """
    ops = [stage.op for stage in pipeline.stages]
    if shared_experts in ops:
        return None
    return experts if experts in ops else combine


def _adders(pipeline: Pipeline) -> dict[Op, Op]:
    """The built-in operation that adds the shared experts' output, and the variant of it that replaces it."""
    of = {stage.op.plain: stage for stage in pipeline.stages if stage.op.plain in (shared_experts, combine)}
    if len(of) < 2:
        return {}
    if of[combine].device is not of[shared_experts].device:
        return {shared_experts: add_shared}
    return {combine: combine_of(*of[combine].op.reads[1:], "shared")}


def _exchanged(chain: tuple[Element, ...], forms: dict[Op, Op]) -> tuple[Element, ...]:
    """The chain with other forms of some built-in operations."""
    found: list[Element] = []
    for element in chain:
        if isinstance(element, Fork):
            found.append(Fork(tuple(_exchanged(arm, forms) for arm in element.arms)))
        elif isinstance(element, Stage) and element.op.plain in forms:
            found.append(replace(element, op=forms[element.op.plain]))
        else:
            found.append(element)
    return tuple(found)


def _with_shared(chain: tuple[Element, ...], beside: Op) -> tuple[Element, ...]:
    """The chain with the shared experts right behind the routed ones, or right before `combine`."""
    found: list[Element] = []
    for element in chain:
        if isinstance(element, Fork):
            found.append(Fork(tuple(_with_shared(arm, beside) for arm in element.arms)))
            continue
        there = isinstance(element, Stage) and element.op.plain is beside
        shared = [Stage(shared_experts, element.device)] if isinstance(element, Stage) and there else []
        found += [element, *shared] if beside is experts else [*shared, element]
    return tuple(found)


@dataclass(frozen=True)
class Resolved:
    """A pipeline as a layer that can be stacked.

    Attributes
    ----------
    pipeline : Pipeline
    carries : tuple of (path, rows)
        The rows of buffers that each move carries.
    enters, leaves : frozenset of Place
        Devices on which the residual stream must be before the layer, and on which it is after the layer.
    """

    pipeline: Pipeline
    carries: tuple[tuple[Path, tuple[BufferRows, ...]], ...]
    enters: frozenset[Place]
    leaves: frozenset[Place]


@lru_cache(maxsize=_KEPT)
def resolve(pipeline: Pipeline) -> Resolved:
    """Close a pipeline into a layer that can be stacked, and find what each of its moves carries.

    Raises
    ------
    PipelineError
        If a transfer is forgotten or useless, a buffer is never written, nothing keeps the KV cache, `fetch` would
        stream nothing, the layer leaves the residual stream where the next layer does not read it, or a built-in
        operation stands before one that comes before it in a layer, or is there twice.
    """
    _check_kv(pipeline)
    _check_fetches(pipeline)
    reader = next((s.device for s in pipeline.stages if "x" in s.op.reads), Place.GPU)
    walk = _start(frozenset({reader}), None)
    walk.follow(pipeline.chain, pipeline.chain)
    leaves = walk.at["x", RowClass.DECODE] & walk.at["x", RowClass.PREFILL]
    again = _start(leaves, walk.writer["x", RowClass.DECODE].stage)
    again.follow(pipeline.chain, pipeline.chain)
    enters = frozenset({reader}) if again.carries == walk.carries else leaves
    _check_order(pipeline)
    return Resolved(pipeline, tuple(again.carries.items()), enters, leaves)


def _start(where: frozenset[Place], writer: Stage | None) -> Walk:
    walk = Walk(closed=True)
    for rows in RowClass.ALL.classes:
        walk.at["x", rows] = where
        walk.writer["x", rows] = Author(None, writer)
    return walk


def _check_kv(pipeline: Pipeline) -> None:
    stages = located_stages(pipeline.chain)
    keepers = [(path, stage) for path, stage in stages if stage.op.keeps_kv]
    if not keepers:
        raise PipelineError("no stage of the layer keeps the KV cache: decode_attention is missing; place it once.")
    if len(keepers) > 1:
        raise PipelineError(
            f"a layer needs exactly one stage that keeps the KV cache, this one has {len(keepers)}; "
            "place decode_attention once.",
            keepers[1][0],
        )
    ((path, keeper),) = keepers
    if kv in pipeline.fetches and keeper.device is Place.CPU:
        raise PipelineError(
            f"fetch(kv) streams the cache to the GPU, but {keeper} reads it on the cpu. Remove kv.", path
        )


def _check_order(pipeline: Pipeline) -> None:
    double = repeated(pipeline.chain)
    if double is not None:
        path, stage, _, other = double
        raise PipelineError(f"{stage} computes again what {other} computes; remove one of them.", path)
    early = misplaced(pipeline.chain)
    if early is not None:
        path, stage, _, other = early
        raise PipelineError(
            f"{stage} stands before {other}, and a layer has {other.op} first; put {stage.op} behind {other}.", path
        )


def _check_fetches(pipeline: Pipeline) -> None:
    for item in pipeline.fetches:
        if item is kv:
            continue
        alone = Pipeline(pipeline.chain, (item,))
        if not any(alone.streams(stage) for stage in pipeline.stages):
            raise PipelineError(f"fetch({item.name}) streams nothing: no gpu stage reads such weights. Remove it.")
