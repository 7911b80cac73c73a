"""Faults of a wiring, their places, and the edits that mend it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from workbench.core.errors import PipelineError
from workbench.models import ModelConfig
from workbench.pipeline.algebra import Pipeline, adding_sets, cpu, gpu
from workbench.pipeline.edits import (
    added,
    can_be_divided,
    divided,
    fetched,
    joined,
    optioned,
    placed,
    removed,
    shifted,
    with_rest,
    with_set,
)
from workbench.pipeline.elements import (
    BufferRows,
    Element,
    Fork,
    Pair,
    Path,
    bracketed,
    element_at,
    located,
    located_stages,
    misplaced,
    repeated,
    spliced,
)
from workbench.pipeline.layer_graph import layer_graph
from workbench.pipeline.transfers import bare, connected, surveyed
from workbench.pipeline.walk import written
from workbench.stages import (
    BUILT_IN,
    Move,
    Op,
    Place,
    RowClass,
    Stage,
    Streamed,
    attention,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    qkv,
)
from workbench.stages.unsuited import lacks_shared, leaves_none

_MOST_MENDS = 3
_MOST_STEPS = 40
"""Mends in a row after which a wiring counts as one that they do not mend; a layer has some ten stages."""
_WHOLE = gpu(qkv, attention, out_proj, moe)
_ORDER = [op.name for op in (qkv, *attention, out_proj, *moe)]


class Mend(NamedTuple):
    """An edit that mends a wiring, or is the first of several that do, and what it gives."""

    label: str
    pipeline: Pipeline


@dataclass(frozen=True)
class Fault:
    """A fault of a wiring.

    Attributes
    ----------
    text : str
        The sentence with which code that wires it, or a scenario that takes it, is refused.
    path : Path or None
        Place of the element that causes it; None if it is no single one.
    mends : tuple of Mend
        At most three, the best first. Where the first is taken again and again, no fault is left in the end.
    """

    text: str
    path: Path | None
    mends: tuple[Mend, ...]


def fault_of(pipeline: Pipeline, ops: Iterable[Op] = (), model: ModelConfig | None = None) -> Fault | None:
    """The first fault of a wiring, with edits that mend it; None if it is a layer.

    Parameters
    ----------
    pipeline : Pipeline
        It need not be one that the algebra accepts.
    ops : iterable of Op, optional
        The user's own operations, which mends may place as they place the built-in ones.
    model : ModelConfig, optional
        The model that the layer is to be one of; none by default, so that nothing is too much for it.
    """
    known = (*BUILT_IN.values(), *ops)
    refusal = _refusal(pipeline)
    if refusal is None:
        return None if model is None else _unsuited(pipeline, model)
    offered: dict[Pipeline, Mend] = {}
    for mend in _mends(pipeline, refusal, known, model):
        if mend.pipeline not in offered and _ends_well(mend.pipeline, known, model):
            offered[mend.pipeline] = mend
        if len(offered) == _MOST_MENDS:
            break
    if not offered:
        offered[_WHOLE] = Mend("Start again with a whole layer on the GPU", _WHOLE)
    return Fault(str(refusal.error), refusal.error.path, tuple(offered.values()))


def _unsuited(pipeline: Pipeline, model: ModelConfig) -> Fault | None:
    """The first stage of a layer with which this model has nothing to compute, or a set of experts without the rest."""
    for path, stage in located_stages(pipeline.chain):
        if text := lacks_shared(stage, model):
            return Fault(text, path, (Mend(f"Remove {stage.op}", removed(pipeline, path)),))
        if text := leaves_none(stage, model):
            return Fault(text, path, (_with_one_left(pipeline, path, stage, model),))
    return _lone_set(pipeline, model)


def _lone_set(pipeline: Pipeline, model: ModelConfig) -> Fault | None:
    """The set of experts beside which nothing computes the others, where it is the only stage of routed experts."""
    routed = [(path, stage) for path, stage in located_stages(pipeline.chain) if stage.op.plain is experts]
    if len(routed) != 1:
        return None
    path, stage = routed[0]
    every = model.num_local_experts
    some = stage.op.subset
    if some is None or all(len(some.of(layer, every)) == every for layer in range(model.num_hidden_layers)):
        return None
    mends = [Mend(f"Use all experts on the {_said(stage.device)}", with_set(pipeline, path, None))]
    beside = with_rest(pipeline, path)
    if _refusal(beside) is None:
        mends.insert(0, Mend(f"Compute all others on the {_said(stage.device.other)}", beside))
    return Fault(f"{stage.op} is a part of the experts, and nothing computes the others.", path, tuple(mends))


def _with_one_left(pipeline: Pipeline, path: Path, stage: Stage, model: ModelConfig) -> Mend:
    """With fewer experts deferred, or else skipped, so that one of a token's is computed at once."""
    most = max(0, model.num_experts_per_tok - 1)
    skip = min(stage.skip, most)
    defer = min(stage.defer, most - skip)
    fewer = [f"defer {defer}"] if defer < stage.defer else []
    fewer += [f"skip {skip}"] if skip < stage.skip else []
    return Mend(" and ".join(fewer).capitalize(), optioned(pipeline, path, defer=defer, skip=skip))


def lacking(pipeline: Pipeline) -> tuple[tuple[Op, tuple[Mend, ...]], ...]:
    """The built-in operations of which a wiring has none, each with the edits that add it where it belongs.

    There is one edit for each device, that of the stage behind it first. It also adds missing operations before it,
    where there would be a fault without them. Shared experts are not among the operations: they follow the routed ones
    by themselves.
    """
    return tuple((op, tuple(_additions(pipeline, op))) for op in absent(pipeline))


def _additions(pipeline: Pipeline, op: Op) -> Iterator[Mend]:
    """The edits that add an operation, with as few missing ones before it as leave no fault."""
    missing = absent(pipeline)
    before = missing[: missing.index(op)]
    device = _beside(pipeline, op)
    for each in (device, device.other):
        for start in range(len(before), -1, -1):
            mend = _more(pipeline, [*before[start:], op], each)
            if _refusal(mend.pipeline) is None:
                yield mend
                break


def _ends_well(pipeline: Pipeline, known: tuple[Op, ...], model: ModelConfig | None) -> bool:
    """True if the first mends, one after the other, leave no fault."""
    seen = set[Pipeline]()
    while pipeline not in seen and len(seen) < _MOST_STEPS:
        seen.add(pipeline)
        refusal = _refusal(pipeline)
        if refusal is not None:
            first = next(_mends(pipeline, refusal, known, model), None)
        else:
            unsuited = None if model is None else _unsuited(pipeline, model)
            if unsuited is None:
                return True
            first = unsuited.mends[0]
        if first is None:
            return False
        pipeline = first.pipeline
    return False


# ---------------------------------------------------------------------------------------------------------- the fault


class _Refusal(NamedTuple):
    """An error, and true if the code that wires the pipeline raises it; else it is that of the layer."""

    error: PipelineError
    of_code: bool


def _refusal(pipeline: Pipeline) -> _Refusal | None:
    """The error of the code that wires a pipeline, or of the layer that it would be; None if there is none."""
    try:
        _wired(pipeline.chain, ())
    except PipelineError as error:
        return _Refusal(error, True)
    try:
        layer_graph(pipeline)
    except PipelineError as error:
        return _Refusal(error, False)
    return None


def _wired(chain: tuple[Element, ...], arm: Path) -> Pipeline:
    """A chain as its code wires it, from the left to the right; `arm` is the path of the arm that it is."""
    whole = Pipeline()
    for elements in bracketed(chain):
        piece = _piece(elements, (*arm, len(whole.chain)))
        try:
            whole = whole >> piece if whole.chain else piece
        except PipelineError as error:
            raise PipelineError(str(error), error.path and (*arm, *error.path)) from None
    return whole


def _piece(elements: tuple[Element, ...], path: Path) -> Pipeline:
    """Neighbours that share brackets, or a move or a fork, as its code makes it."""
    first = elements[0]
    if isinstance(first, Fork):
        return _side_by_side([_wired(arm, (*path, number)) for number, arm in enumerate(first.arms)], path)
    if isinstance(first, Move):
        return Pipeline(elements)
    ops = tuple(element.op for element in elements if isinstance(element, Stage))
    try:
        if first.device is Place.GPU:
            return gpu(*ops, skip=first.skip)
        return cpu(*ops, defer=first.defer, skip=first.skip)
    except PipelineError as error:
        within = error.path[0] if error.path else 0
        raise PipelineError(str(error), (*path[:-1], path[-1] + within)) from None


def _side_by_side(arms: list[Pipeline], path: Path) -> Pipeline:
    whole = Pipeline()
    for arm in arms:
        try:
            whole = whole | arm
        except PipelineError as error:
            inside = error.path and (*path, *error.path[1:])
            raise PipelineError(str(error), inside or path) from None
    return whole


# -------------------------------------------------------------------------------------------------------------- mends


def _mends(pipeline: Pipeline, refusal: _Refusal, known: tuple[Op, ...], model: ModelConfig | None) -> Iterator[Mend]:
    """Edits that may mend a fault, the best first."""
    alike = _set_named_twice(pipeline)
    if alike is not None:
        without = bare(spliced(pipeline.chain, alike, 1, ()))
        yield Mend(f"Remove the second {_op(pipeline, alike)}", Pipeline(without, pipeline.fetches))
        return
    in_order = list(_in_order(pipeline, model))
    if in_order:
        yield from in_order
        return
    keepers = [path for path, stage in located_stages(pipeline.chain) if stage.op.keeps_kv]
    idle = [item for item in pipeline.fetches if not _is_of_use(pipeline, item)]
    if not pipeline.stages:
        yield Mend("Place a whole layer on the GPU", _WHOLE)
        yield from _one_more(pipeline, qkv)
    if not refusal.of_code and len(keepers) != 1:
        yield from _with_one_keeper(pipeline, keepers)
    elif not refusal.of_code and idle:
        yield from _without_fetch(pipeline, idle[0])
    elif refusal.error.path is None:
        yield from _with_fewer_transfers(pipeline)
    else:
        yield from _at(pipeline, refusal.error, refusal.error.path, known)


def _set_named_twice(pipeline: Pipeline) -> Path | None:
    """Place of a set of experts that has the name of another one before it, with which nothing can be wired."""
    try:
        adding_sets(pipeline.chain)
    except PipelineError as error:
        return error.path
    return None


def _in_order(pipeline: Pipeline, model: ModelConfig | None) -> Iterator[Mend]:
    """Without the first operation that is there twice, or with the first that stands too early behind the other one.

    Experts that are there once on each device are split over both.
    """
    double = repeated(pipeline.chain)
    early = misplaced(pipeline.chain)
    if double is not None:
        if model is not None and model.num_local_experts > 1 and _is_on_both(double):
            without = Pipeline(spliced(pipeline.chain, double.path, 1, ()), pipeline.fetches)
            halves = divided(without, double.other_path, slice(model.num_local_experts // 2))
            yield Mend(f"Split {double.stage.op} over both devices", halves)
        second = "the second " if double.stage.op == double.other.op else ""
        yield Mend(f"Remove {second}{double.stage.op}", removed(pipeline, double.path))
        yield Mend(f"Remove {'the first ' if second else ''}{double.other.op}", removed(pipeline, double.other_path))
    elif early is not None:
        moved = shifted(pipeline, early.path, (early.other_path[0] + 1,))
        yield Mend(f"Move {early.stage.op} behind {early.other.op}", moved)
        yield Mend(f"Remove {early.stage.op}", removed(pipeline, early.path))


def _is_on_both(double: Pair) -> bool:
    """True for experts that can be divided, once on each device."""
    return all(map(can_be_divided, (double.stage, double.other))) and double.stage.device is not double.other.device


def _at(pipeline: Pipeline, error: PipelineError, path: Path, known: tuple[Op, ...]) -> Iterator[Mend]:
    """Edits that may mend what an element causes."""
    element = element_at(pipeline.chain, path)
    again = connected(pipeline)
    mended = again.chain != pipeline.chain and not _is_refused_with(again, str(error))
    if mended:
        yield Mend(_transfer_label(element), again)
    if isinstance(element, Fork):
        yield Mend("Put them one after the other", joined(pipeline, path))
        return
    missing = surveyed(pipeline.chain)[0].unwritten_at.get(path, [])
    if isinstance(element, Stage) and missing:
        yield from _written_before(pipeline, path, missing, known)
    else:
        yield from _with_fewer_transfers(again)
        yield from () if mended else _completed(pipeline)
    if isinstance(element, Stage):
        yield Mend(f"Remove {element.op}", removed(pipeline, path))


def _is_refused_with(pipeline: Pipeline, text: str) -> bool:
    refusal = _refusal(pipeline)
    return refusal is not None and str(refusal.error) == text


def _transfer_label(element: Element) -> str:
    if isinstance(element, Stage):
        return f"Put {Move(element.device)} before {element.op}"
    return f"Remove {element}" if isinstance(element, Move) else "Put the transfers where they are needed"


def _written_before(pipeline: Pipeline, path: Path, lacking: list[BufferRows], known: tuple[Op, ...]) -> Iterator[Mend]:
    """Edits that let a stage's reads be written before it: by a stage that stands behind it, or by one more."""
    reader = dict(located_stages(pipeline.chain))[path]
    missing = {rows for rows in lacking if rows[0] == lacking[0][0]}
    can_be = _writable(pipeline, known)
    later = [
        (place, stage)
        for place, stage in located_stages(pipeline.chain)
        if place > path and missing.intersection(written(stage)) and can_be.issuperset(stage.op.needs)
    ]
    for place, stage in later:
        beside = place[: len(path) - 1] == path[:-1]
        yield Mend(f"Move {stage.op} before {reader.op}", shifted(pipeline, place, path if beside else path[:1]))
    if later:
        place, stage = later[-1]
        slot = (place[0] + 1,)
        yield Mend(f"Move {reader.op} behind {stage.op}", shifted(pipeline, path, slot))
        return
    makers = [op for op in known if missing.intersection(_made(op)) and can_be.issuperset(op.needs)]
    there = {rows for stage in pipeline.stages for rows in written(stage) if rows[0] != "x"}
    anew = [op for op in (*makers, *_experts_for(pipeline, missing)) if not there.intersection(_made(op))]
    for op in anew or makers:
        for device in (reader.device, reader.device.other):
            yield Mend(f"Add {op} on the {_said(device)}", added(pipeline, op, device, path[:1]))


def _writable(pipeline: Pipeline, known: tuple[Op, ...]) -> set[BufferRows]:
    """The rows that the operations of a pipeline and the known ones can write, in some order."""
    sets = [experts[stage.op.subset] for stage in pipeline.stages if stage.op.subset is not None]
    waiting = [*(stage.op for stage in pipeline.stages), *known, *sets]
    found = {("x", rows) for rows in RowClass.ALL.classes}
    while ready := [op for op in waiting if found.issuperset(op.needs)]:
        waiting = [op for op in waiting if op not in ready]
        for op in ready:
            found.update(_made(op))
    return found


def _experts_for(pipeline: Pipeline, missing: set[BufferRows]) -> list[Op]:
    """The routed experts that write some rows of theirs which others of the layer leave out."""
    buffer, _ = next(iter(missing))
    placed_ones = [stage.op for stage in pipeline.stages if stage.op.plain is experts and buffer in stage.op.writes]
    if not placed_ones:
        return []
    subset = placed_ones[0].subset
    some = experts if subset is None else experts[subset]
    rows = {rows for _, rows in missing}
    return [some.prefill] if rows == {RowClass.PREFILL} else [some.decode] if rows == {RowClass.DECODE} else [some]


def _made(op: Op) -> tuple[BufferRows, ...]:
    """The rows of buffers that an operation writes."""
    return tuple((buffer, rows) for buffer in op.writes for rows in op.rows.classes)


def _with_one_keeper(pipeline: Pipeline, keepers: list[Path]) -> Iterator[Mend]:
    """One stage that keeps the KV cache: one more, or all but one fewer."""
    if not keepers:
        yield from _one_more(pipeline, decode_attention)
        return
    for path, which in ((keepers[-1], "last"), (keepers[0], "first")):
        yield Mend(f"Remove the {which} {_op(pipeline, path)}", removed(pipeline, path))


def _without_fetch(pipeline: Pipeline, item: Streamed) -> Iterator[Mend]:
    """Without something that is fetched in vain, or with what would read it on the GPU."""
    yield Mend(f"Remove fetch({item.name})", fetched(pipeline, item, False))
    for path, stage in located_stages(pipeline.chain):
        there = placed(pipeline, path, Place.GPU)
        if stage.device is Place.CPU and _is_of_use(there, item):
            yield Mend(f"Place {stage.op} on the GPU", there)


def _with_fewer_transfers(pipeline: Pipeline) -> Iterator[Mend]:
    """With one stage on the other device, where that saves a transfer."""
    count = _transfers(pipeline)
    for path, stage in located_stages(pipeline.chain):
        there = placed(pipeline, path, stage.device.other)
        if _transfers(there) < count:
            yield Mend(f"Place {stage.op} on the {_said(stage.device.other)}", there)


def _completed(pipeline: Pipeline) -> Iterator[Mend]:
    """With a built-in operation that the layer lacks."""
    for op in absent(pipeline):
        yield from _one_more(pipeline, op)


def absent(pipeline: Pipeline) -> list[Op]:
    """The built-in operations of which a wiring has none, in the order of a layer."""
    there = {stage.op.plain.name for stage in pipeline.stages}
    return [BUILT_IN[name] for name in _ORDER if name not in there]


def _one_more(pipeline: Pipeline, op: Op) -> Iterator[Mend]:
    """With an operation more, on the device of the next one first."""
    device = _beside(pipeline, op)
    for each in (device, device.other):
        yield _more(pipeline, [op], each)


def _more(pipeline: Pipeline, ops: list[Op], device: Place) -> Mend:
    """With these operations more on a device, in the order of a layer."""
    for op in ops:
        pipeline = added(pipeline, op, device, (_slot(pipeline, op),))
    *others, last = map(str, ops)
    names = f"{', '.join(others)} and {last}" if others else last
    return Mend(f"Add {names} on the {_said(device)}", pipeline)


def _slot(pipeline: Pipeline, op: Op) -> int:
    """The place before those that stand behind an operation in a layer."""
    behind = set(_ORDER[_ORDER.index(op.name) + 1 :])
    places = [path[0] for path, stage in located_stages(pipeline.chain) if stage.op.plain.name in behind]
    return min(places, default=len(pipeline.chain))


def _beside(pipeline: Pipeline, op: Op) -> Place:
    """The device of the stage that follows an operation in its place, or else of the one before it."""
    at = _slot(pipeline, op)
    devices = [stage.device for path, stage in located_stages(pipeline.chain) if path[0] >= at]
    devices += [stage.device for stage in reversed(list(pipeline.stages))]
    return next(iter(devices), Place.GPU)


def _is_of_use(pipeline: Pipeline, item: Streamed) -> bool:
    """True if some stage reads on the GPU what is fetched."""
    if item == kv:
        return all(stage.device is Place.GPU for stage in pipeline.stages if stage.op.keeps_kv)
    alone = Pipeline(pipeline.chain, (item,))
    return any(alone.streams(stage) for stage in pipeline.stages)


def _transfers(pipeline: Pipeline) -> int:
    return sum(isinstance(element, Move) for _, element in located(pipeline.chain))


def _op(pipeline: Pipeline, path: Path) -> Op:
    return dict(located_stages(pipeline.chain))[path].op


def _said(device: Place) -> str:
    return device.value.upper()
