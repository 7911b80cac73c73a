"""Edits of a pipeline by path, as a hand makes them on its picture: each gives a new pipeline with its transfers anew.

The paths of an edit are those of the elements as they stand in the given pipeline, transfers included. A slot is the
path of the element before which something goes, or one behind the last of its chain. Edits refuse what has no meaning,
but not a wiring that cannot be a layer: `workbench.pipeline.fault_of` tells what is wrong with it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace

from workbench.core.errors import PipelineError
from workbench.pipeline.algebra import Pipeline, adding_sets, fetch
from workbench.pipeline.elements import Element, Fork, Path, element_at, located_stages, spliced, stages_of
from workbench.pipeline.stack import LayerRange, Stack, ranges_of
from workbench.pipeline.transfers import bare, connected
from workbench.stages import (
    ExpertSet,
    Move,
    Op,
    Place,
    RowClass,
    Stage,
    Streamed,
    embed,
    experts,
    head,
    kv,
    weights,
)


class Stored(enum.Enum):
    """The place in which the weights of a stage on the GPU are kept."""

    RESIDENT = "resident"
    STREAMED = "streamed"
    CHOSEN = "chosen"


# ------------------------------------------------------------------------------------------------------------ stages


def placed(pipeline: Pipeline, path: Path, device: Place, to: Path | None = None) -> Pipeline:
    """The stage at a path on a device, and before what stands in a slot if one is given; on the GPU it defers nothing.

    Raises
    ------
    PipelineError
        If no stage stands there, or there is no such slot.
    """
    stage = _stage(pipeline, path)
    defer = stage.defer if device is Place.CPU else 0
    on_device = replace(stage, device=device, defer=defer)
    return _with(pipeline, path, on_device) if to is None else _moved(pipeline, path, to, on_device)


def shifted(pipeline: Pipeline, path: Path, to: Path) -> Pipeline:
    """The stage or fork at a path before what stands in a slot.

    Raises
    ------
    PipelineError
        If neither stands there, or there is no such slot outside it.
    """
    return _moved(pipeline, path, to, _card(pipeline, path))


def added(pipeline: Pipeline, op: Op, device: Place, to: Path) -> Pipeline:
    """An operation more, on a device, before what stands in a slot.

    Raises
    ------
    PipelineError
        If there is no such slot, or it is `embed` or `head`, which stand around the layers.
    """
    if op in (embed, head):
        raise PipelineError(f"{op} cannot be placed: it stands around the layers, on the GPU; leave it out.")
    return _settled(spliced(pipeline.chain, to, 0, (Stage(op, device),)), pipeline.fetches)


def removed(pipeline: Pipeline, path: Path) -> Pipeline:
    """The pipeline without the stage or fork at a path; what `fetch` streams of such an operation alone goes with it.

    Raises
    ------
    PipelineError
        If neither stands there.
    """
    gone = _card(pipeline, path)
    shorter = _settled(spliced(pipeline.chain, path, 1, ()), pipeline.fetches)
    names = {name for stage in stages_of((gone,)) for name in _names(stage.op)}
    names -= {name for stage in shorter.stages for name in _names(stage.op)}
    kept = tuple(item for item in shorter.fetches if item.op not in names)
    return Pipeline(shorter.chain, kept)


def optioned(pipeline: Pipeline, path: Path, *, defer: int | None = None, skip: int | None = None) -> Pipeline:
    """The stage at a path with other numbers of experts that it defers or skips; None leaves a number as it is.

    Raises
    ------
    PipelineError
        If no stage of the routed experts, whole and for all rows, stands there, or one on the GPU is to defer some.
    """
    stage = _stage(pipeline, path)
    if defer and stage.device is Place.GPU:
        raise PipelineError(f"{stage} defers nothing, only experts on the cpu do; place them there or leave defer=0.")
    found = replace(stage, defer=stage.defer if defer is None else defer, skip=stage.skip if skip is None else skip)
    return _with(pipeline, path, found)


def with_rows(pipeline: Pipeline, path: Path, rows: RowClass) -> Pipeline:
    """The routed experts at a path for these rows of a batch alone, or for all; they defer and skip nothing.

    Raises
    ------
    PipelineError
        If no routed experts stand there.
    """
    stage = _experts(pipeline, path)
    return _with_ops(pipeline, {path: _some_experts(stage.op.subset, rows)})


def with_set(pipeline: Pipeline, path: Path, subset: ExpertSet | slice | None) -> Pipeline:
    """The routed experts at a path for some of the experts, or with None for all; they defer and skip nothing.

    Stages that had all other experts have all others of the new set.

    Raises
    ------
    PipelineError
        If no routed experts stand there, or another set of the pipeline has the same name.
    """
    former = _experts(pipeline, path).op
    chosen = None if subset is None else _set(subset)
    ops = {path: _some_experts(chosen, former.rows)}
    if chosen is not None and former.subset is not None:
        for place, stage in located_stages(pipeline.chain):
            if stage.op.subset == ~former.subset:
                ops[place] = _some_experts(~chosen, stage.op.rows)
    return _with_ops(pipeline, ops)


def divided(pipeline: Pipeline, path: Path, subset: ExpertSet | slice) -> Pipeline:
    """The routed experts at a path as two sets side by side: these on the GPU, all others on the CPU.

    Raises
    ------
    PipelineError
        If no routed experts, whole, for all rows, and without deferred or skipped ones, stand there.
    """
    stage = _stage(pipeline, path)
    if not can_be_divided(stage):
        raise PipelineError(
            f"{stage} at {list(path)} cannot be divided; give the path of the routed experts, whole and for all rows, "
            "that defer and skip none."
        )
    some = _set(subset)
    fork = Fork(((Stage(experts[some], Place.GPU),), (Stage(experts[~some], Place.CPU),)))
    return _settled(spliced(pipeline.chain, path, 1, (fork,)), pipeline.fetches)


def with_rest(pipeline: Pipeline, path: Path) -> Pipeline:
    """The set of experts at a path beside all others, which the other device computes.

    Raises
    ------
    PipelineError
        If no set of routed experts stands there.
    """
    stage = _experts(pipeline, path)
    if stage.op.subset is None:
        raise PipelineError(f"{stage} at {list(path)} has all experts; give the path of a set of them.")
    rest = Stage(_some_experts(~stage.op.subset, stage.op.rows), stage.device.other)
    arms = (stage, rest) if stage.device is Place.GPU else (rest, stage)
    fork = Fork(tuple((each,) for each in arms))
    return _settled(spliced(pipeline.chain, path, 1, (fork,)), pipeline.fetches)


def can_be_divided(stage: Stage) -> bool:
    """True for the stages that `divided` takes."""
    return stage.op is experts and not stage.defer and not stage.skip


# ----------------------------------------------------------------------------------------------------------- streams


def fetched(pipeline: Pipeline, item: Streamed, on: bool) -> Pipeline:
    """The pipeline with something streamed to the GPU, or no longer: `weights`, `kv`, ``experts.weights``."""
    others = [each for each in pipeline.fetches if each != item]
    return Pipeline(pipeline.chain, fetch(*others, *([item] if on else [])).fetches)


def stored(pipeline: Pipeline, stage: Stage) -> Stored:
    """The place in which the weights of a stage are kept; those of a stage on the CPU are resident."""
    if pipeline.streams_chosen(stage):
        return Stored.CHOSEN
    return Stored.STREAMED if pipeline.streams(stage) else Stored.RESIDENT


def with_stored(pipeline: Pipeline, path: Path, how: Stored) -> Pipeline:
    """The weights of the stage at a path kept otherwise, and those of all other operations as they were.

    Raises
    ------
    PipelineError
        If no stage with weights on the GPU stands there, or chosen weights are asked for that are no experts'.
    """
    stage = _stage(pipeline, path)
    if stage.device is not Place.GPU or not stage.op.has_weights:
        raise PipelineError(f"{stage} has no weights on the gpu that could be streamed; choose a stage that has.")
    if how is Stored.CHOSEN and stage.op.plain is not experts:
        raise PipelineError(
            f"{stage} has no chosen weights, only experts have; stream them all or leave them resident."
        )
    there = {each.op: stored(pipeline, each) for each in pipeline.stages if each.device is Place.GPU}
    kept = {op: each for op, each in there.items() if op.has_weights} | {stage.op: how}
    all_streamed = Stored.RESIDENT not in kept.values()
    if all_streamed and (weights in pipeline.fetches or len(kept) > 1):
        items = [weights]
    else:
        items = [op.weights for op, each in kept.items() if each is Stored.STREAMED]
    items += [op.chosen for op, each in kept.items() if each is Stored.CHOSEN]
    items += [item for item in pipeline.fetches if item == kv]
    return Pipeline(pipeline.chain, fetch(*items).fetches)


# ------------------------------------------------------------------------------------------------------------- forks


def forked(pipeline: Pipeline, path: Path, with_: Path) -> Pipeline:
    """Two neighbours side by side: each a stage or a fork, with nothing but transfers between them.

    Raises
    ------
    PipelineError
        If one is neither, or they are no neighbours.
    """
    first, last = sorted((path, with_))
    arms = _arms(_card(pipeline, first)) + _arms(_card(pipeline, last))
    between = [(*first[:-1], index) for index in range(first[-1] + 1, last[-1])]
    apart = first[:-1] != last[:-1] or first == last
    if apart or not all(isinstance(element_at(pipeline.chain, each), Move) for each in between):
        raise PipelineError(
            f"the elements at {list(first)} and {list(last)} are no neighbours; shift one beside the other first."
        )
    count = last[-1] - first[-1] + 1
    return _settled(spliced(pipeline.chain, first, count, (Fork(arms),)), pipeline.fetches)


def joined(pipeline: Pipeline, path: Path) -> Pipeline:
    """The arms of the fork at a path one after the other.

    Raises
    ------
    PipelineError
        If no fork stands there.
    """
    fork = element_at(pipeline.chain, path)
    if not isinstance(fork, Fork):
        raise PipelineError(
            f"{fork} at {list(path)} is no fork, whose arms could follow one another; give a fork's path."
        )
    row = tuple(element for arm in fork.arms for element in arm)
    return _settled(spliced(pipeline.chain, path, 1, row), pipeline.fetches)


# ---------------------------------------------------------------------------------------------------- ranges of layers


def with_range(what: Pipeline | Stack, number: int, pipeline: Pipeline) -> Pipeline | Stack:
    """Another pipeline in the range of this number, counted from 0; a pipeline is its own only range.

    Raises
    ------
    PipelineError
        If there is no such range.
    """
    ranges = _ranges(what, number)
    if isinstance(what, Pipeline):
        return pipeline
    return Stack((*ranges[:number], ranges[number]._replace(pipeline=pipeline), *ranges[number + 1 :]))


def cut_at(what: Pipeline | Stack, number: int, layer: int, layers: int) -> Stack:
    """The range of this number as two of the same pipeline, the second from a layer on.

    Parameters
    ----------
    what : Pipeline or Stack
    number : int
        Number of the range, from 0.
    layer : int
        First layer of the second range, from 0.
    layers : int
        Layers of the model.

    Raises
    ------
    PipelineError
        If there is no such range, it has no such layer behind its first, or the ranges do not fit the model.
    """
    ranges = _ranges(what, number)
    _, first, stop = Stack(ranges).over(layers)[number]
    if stop is None or not first < layer < stop:
        raise PipelineError(
            f"layers {first} to {(stop or layers) - 1} cannot be cut at {layer}; give a layer behind their first."
        )
    cut = ranges[number]
    return Stack((*ranges[:number], cut._replace(stop=layer), cut._replace(first=layer), *ranges[number + 1 :]))


def merged(what: Pipeline | Stack, number: int) -> Pipeline | Stack:
    """The range of this number and the next as one, with the pipeline of the first.

    Where one range of all layers is left, that is its pipeline.

    Raises
    ------
    PipelineError
        If there is no such range, or none behind it.
    """
    ranges = _ranges(what, number)
    if number + 1 == len(ranges):
        raise PipelineError(f"range {number} is the last one; merge the one before it with it.")
    both = ranges[number]._replace(stop=ranges[number + 1].stop)
    found = (*ranges[:number], both, *ranges[number + 2 :])
    return both.pipeline if len(found) == 1 and both[1:] == (0, None) else Stack(found)


def _ranges(what: Pipeline | Stack, number: int) -> tuple[LayerRange, ...]:
    ranges = ranges_of(what)
    if not 0 <= number < len(ranges):
        raise PipelineError(f"there is no range {number} of layers; give one from 0 to {len(ranges) - 1}.")
    return ranges


# ------------------------------------------------------------------------------------------------------------- parts


def _settled(chain: tuple[Element, ...], fetches: tuple[Streamed, ...]) -> Pipeline:
    """A chain without empty arms, whose `combine` reads every set of experts, with the transfers that it needs."""
    return connected(Pipeline(adding_sets(bare(chain)), fetches))


def _moved(pipeline: Pipeline, path: Path, to: Path, element: Element) -> Pipeline:
    """The pipeline with an element in a slot instead of what stands at a path."""
    gap = Move(Place.CPU)  # keeps the place until the slot is found; settling takes it away with all transfers
    held = spliced(pipeline.chain, path, 1, (gap,))
    return _settled(spliced(held, to, 0, (element,)), pipeline.fetches)


def _card(pipeline: Pipeline, path: Path) -> Stage | Fork:
    element = element_at(pipeline.chain, path)
    if isinstance(element, Move):
        raise PipelineError(f"{element} at {list(path)} follows from the stages around it; edit those.")
    return element


def _stage(pipeline: Pipeline, path: Path) -> Stage:
    element = _card(pipeline, path)
    if isinstance(element, Fork):
        raise PipelineError(f"a fork stands at {list(path)}; give the path of a stage in one of its arms.")
    return element


def _experts(pipeline: Pipeline, path: Path) -> Stage:
    stage = _stage(pipeline, path)
    if stage.op.plain is not experts:
        raise PipelineError(f"{stage} at {list(path)} cannot be cut up; give the path of the routed experts.")
    return stage


def _set(subset: ExpertSet | slice) -> ExpertSet:
    return ExpertSet.of_slice(subset) if isinstance(subset, slice) else subset


def _some_experts(subset: ExpertSet | None, rows: RowClass) -> Op:
    some = experts if subset is None else experts[subset]
    forms = {RowClass.PREFILL: lambda: some.prefill, RowClass.DECODE: lambda: some.decode}
    return forms[rows]() if rows in forms else some


def _with(pipeline: Pipeline, path: Path, stage: Stage) -> Pipeline:
    return _settled(spliced(pipeline.chain, path, 1, (stage,)), pipeline.fetches)


def _with_ops(pipeline: Pipeline, ops: Mapping[Path, Op]) -> Pipeline:
    """The stages at some paths with other operations, whose weights are kept as the former ones' were."""
    chain = pipeline.chain
    new = dict[str | None, Op]()
    for path, op in ops.items():
        before = _stage(pipeline, path)
        if op != before.op:
            chain = spliced(chain, path, 1, (Stage(op, before.device),))
            new[before.op.name] = op
    if not new:
        return pipeline
    other = _settled(chain, pipeline.fetches)
    gone = {item for item in pipeline.fetches if item.op in new and not _streams(other, item)}
    items = [_of(new[item.op], item) if item in gone else item for item in pipeline.fetches]
    return Pipeline(other.chain, fetch(*items).fetches)


def _streams(pipeline: Pipeline, item: Streamed) -> bool:
    alone = Pipeline(pipeline.chain, (item,))
    return any(alone.streams(stage) for stage in pipeline.stages)


def _of(op: Op, item: Streamed) -> Streamed:
    return op.chosen if item.chosen else op.weights


def _arms(element: Stage | Fork) -> tuple[tuple[Element, ...], ...]:
    return element.arms if isinstance(element, Fork) else ((element,),)


def _names(op: Op) -> set[str]:
    """The names by which `fetch` can stream the weights of an operation."""
    return {op.name, op.holder.name, *([experts.name] if op.subset is not None else [])}
