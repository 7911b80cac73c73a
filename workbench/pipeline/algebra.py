"""The algebra that wires stages: ``>>`` feeds the next stage, ``|`` forks, `offload` and `load` cross the link.

layer = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)

A pipeline describes one decoder layer; embedding and head are implicit gpu stages around the stack of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from workbench.core.display import escaped
from workbench.core.errors import PipelineError
from workbench.core.units import is_whole
from workbench.pipeline.stack import Stack, cut
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


@dataclass(frozen=True)
class Fork:
    """Arms of stages that run side by side and then join."""

    arms: tuple[tuple[Element, ...], ...]

    def __str__(self) -> str:
        return f"({' | '.join(' >> '.join(spelled(arm)) for arm in self.arms)})"


Element = Stage | Move | Fork


def spelled(chain: tuple[Element, ...]) -> list[str]:
    """The elements of a chain as a user would write them; neighbours on one device share their brackets."""
    words: list[str] = []
    device = None
    for element in chain:
        if isinstance(element, Stage) and element.device is device and not element.options:
            words[-1] = f"{words[-1][:-1]}, {element.op.name})"
        else:
            words.append(str(element))
        device = element.device if isinstance(element, Stage) and not element.options else None
    return words


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
        _Walk().follow(joined.chain, ())
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

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in order; the arms of a fork follow one another."""
        return tuple(_stages(self.chain))

    @property
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
    for op in flat:
        if not isinstance(op, Op):
            raise PipelineError(
                f"{device.value}(...) takes operations, not {op!r}; use those of workbench.stages or Op."
            )
        if op in (embed, head):
            raise PipelineError(
                f"{device.value}({op}) cannot be placed: embedding and head stand around the layers, on the GPU; leave "
                "it out."
            )
    for name, count in (("defer", defer), ("skip", skip)):
        if not is_whole(count) or count < 0 or (count and experts not in flat):
            raise PipelineError(
                f"{name}={count!r} needs the routed experts, whole and for all rows, in the same {device.value}(...) "
                "and a number of at least 0."
            )
    stages = tuple(Stage(op, device, defer, skip) if op is experts else Stage(op, device) for op in flat)
    placed = Pipeline(adding_sets(stages))
    _Walk().follow(placed.chain, ())
    return placed


def _union(a: tuple[Streamed, ...], b: tuple[Streamed, ...]) -> tuple[Streamed, ...]:
    return tuple(sorted({*a, *b}, key=lambda item: (item is kv, item.name)))


def _arms(chain: tuple[Element, ...]) -> tuple[tuple[Element, ...], ...]:
    return chain[0].arms if len(chain) == 1 and isinstance(chain[0], Fork) else (chain,)


def _stages(chain: tuple[Element, ...]) -> Iterator[Stage]:
    for element in chain:
        if isinstance(element, Stage):
            yield element
        elif isinstance(element, Fork):
            for arm in element.arms:
                yield from _stages(arm)


def adding_sets(chain: tuple[Element, ...]) -> tuple[Element, ...]:
    """The chain with a `combine` that adds the output of every set of experts in it, in their order.

    Raises
    ------
    PipelineError
        If different sets have the same name.
    """
    sets = dict[str, ExpertSet]()
    for stage in _stages(chain):
        subset = stage.op.subset
        if subset is None:
            continue
        (buffer,) = stage.op.writes
        if sets.setdefault(buffer, subset) != subset:
            raise PipelineError(
                f"two sets of experts in one pipeline are called {str(subset)!r}; give one of them another name, as in "
                f"ExpertSet('other', table)."
            )
    return _exchanged(chain, {combine: combine_of(*sets)}) if sets else chain


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
    whole = any(stage.op is experts for stage in pipeline.stages)
    if not placed:
        chain = _with_shared(pipeline.chain, experts if whole else combine)
        pipeline = Pipeline(chain, pipeline.fetches)
    adders = {stage.device for stage in pipeline.stages if stage.op is experts or stage.op.plain is combine}
    if len(placed) > 1 or not adders.issuperset(stage.device for stage in placed):
        where = "experts or combine" if whole else "combine"
        raise PipelineError(
            f"shared_experts must stand once, on the device of {where}, not as "
            f"{', '.join(map(str, placed))}; leave them out and they follow experts."
        )
    return Pipeline(_exchanged(pipeline.chain, _adders(pipeline)), pipeline.fetches)


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
        elif isinstance(element, Stage):
            found.append(replace(element, op=forms.get(element.op.plain, element.op)))
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


# ---------------------------------------------------------------------------------------- devices that hold buffers

BufferRows = tuple[str, RowClass]
"""The prefill rows or the decode rows of a buffer; they are moved and tracked separately."""

Path = tuple[int, ...]
"""Position of an element: index in the chain, then arm and index within each fork."""


class _Walk:
    """Follows the rows of all buffers through a chain: the devices that hold them, their writers, and each move's load.

    If it is `closed`, the chain is a whole layer: every read needs a writer, and every move must carry something.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self.at: dict[BufferRows, frozenset[Place]] = {}
        self.writer: dict[BufferRows, tuple[int, str]] = {}  # with its position, by which equal stages are told apart
        self.entered = 0
        self.carries: dict[Path, tuple[BufferRows, ...]] = {}
        self.closed = closed

    def follow(self, chain: tuple[Element, ...], after: tuple[Element, ...], path: Path = ()) -> None:
        for index, element in enumerate(chain):
            rest = chain[index + 1 :] + after
            if isinstance(element, Stage):
                self._enter(element)
            elif isinstance(element, Move):
                self._carry(element, rest, (*path, index))
            else:
                self._fork(element, rest, (*path, index))

    def _enter(self, stage: Stage) -> None:
        for rows in stage.op.needs:
            if rows in self.at:
                if stage.device not in self.at[rows]:
                    raise self._forgotten(stage)
            elif self.closed:
                raise PipelineError(
                    f"{stage} reads {_name(rows)}, which no earlier stage of the layer writes. "
                    "Put the operation that writes it before."
                )
        self.entered += 1
        for rows in _written(stage):
            self.at[rows] = frozenset({stage.device})
            self.writer[rows] = (self.entered, str(stage))

    def _forgotten(self, stage: Stage) -> PipelineError:
        absent = [p for p in stage.op.needs if p in self.at and stage.device not in self.at[p]]
        _, writer = self.writer[absent[0]]
        buffers = ", ".join(dict.fromkeys(buffer for buffer, _ in absent))
        move = "offload" if stage.device is Place.CPU else "load"
        return PipelineError(
            f"{stage} reads {buffers} on the {stage.device.value}, but {writer} leaves it on the "
            f"{stage.device.other.value}. Put {move} between them: {writer} >> {move} >> {stage}."
        )

    def _carry(self, move: Move, rest: tuple[Element, ...], path: Path) -> None:
        wanted, _ = _reads_there(rest, move.target, frozenset())
        carried = tuple(p for p in wanted if p in self.at and move.target not in self.at[p])
        for rows in carried:
            self.at[rows] = self.at[rows] | {move.target}
        self.carries[path] = carried
        if self.closed and not carried:
            raise PipelineError(
                f"{move} at place {path[0] + 1} of the layer moves nothing: no later {move.target.value} stage reads "
                f"anything that is only on the {move.target.other.value}. Remove it."
            )

    def _fork(self, fork: Fork, rest: tuple[Element, ...], path: Path) -> None:
        _check_arms(fork)
        before = dict(self.at)
        written = dict(self.writer)
        merged = dict(self.at)
        authors = dict(self.writer)
        for number, arm in enumerate(fork.arms):
            self.at = dict(before)
            self.writer = dict(written)
            self.follow(arm, rest, (*path, number))
            for rows, where in self.at.items():
                rewritten = self.writer[rows] != written.get(rows)
                if rewritten:
                    merged[rows] = where
                    authors[rows] = self.writer[rows]
                elif authors.get(rows) == written.get(rows):
                    merged[rows] = merged.get(rows, where) | where
        self.at = merged
        self.writer = authors


def _name(rows: BufferRows) -> str:
    return f"{rows[0]} of {rows[1].value} rows"


def _written(stage: Stage) -> tuple[BufferRows, ...]:
    return tuple((buffer, rows) for buffer in stage.op.writes for rows in stage.op.rows.classes)


def _check_arms(fork: Fork) -> None:
    """Refuse arms of which one writes what another one writes or reads: they run side by side."""
    uses = []
    for arm in fork.arms:
        writes = {rows: stage for stage in _stages(arm) for rows in _written(stage)}
        reads = {rows: stage for stage in _stages(arm) for rows in stage.op.needs}
        uses.append((writes, reads))
    for number, (writes, _) in enumerate(uses):
        for other, (also_writes, reads) in enumerate(uses):
            if other == number:
                continue
            for rows in writes:
                if rows in also_writes:
                    raise PipelineError(
                        f"two arms of a fork write {_name(rows)} ({writes[rows]} and {also_writes[rows]}); "
                        "give one of them another buffer."
                    )
                if rows in reads:
                    raise PipelineError(
                        f"one arm of a fork writes {_name(rows)} ({writes[rows]}), which another reads "
                        f"({reads[rows]}); put them one after the other with >>."
                    )


def _reads_there(
    rest: tuple[Element, ...], device: Place, made: frozenset[BufferRows]
) -> tuple[tuple[BufferRows, ...], bool]:
    """Rows that stages on `device` read before the next move back, and true if the chain has no such move."""
    found: dict[BufferRows, None] = {}
    for element in rest:
        if isinstance(element, Stage):
            if element.device is device:
                found.update((p, None) for p in element.op.needs if p not in made)
            made |= set(_written(element))
        elif isinstance(element, Move):
            if element.target is not device:
                return tuple(found), False
        else:
            through = False
            for arm in element.arms:
                wanted, ran_through = _reads_there(arm, device, made)
                found.update((p, None) for p in wanted)
                through |= ran_through
            if not through:
                return tuple(found), False
    return tuple(found), True


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


def resolve(pipeline: Pipeline) -> Resolved:
    """Close a pipeline into a layer that can be stacked, and find what each of its moves carries.

    Raises
    ------
    PipelineError
        If a transfer is forgotten or useless, a buffer is never written, nothing keeps the KV cache, `fetch` would
        stream nothing, or the layer leaves the residual stream where the next layer does not read it.
    """
    _check_kv(pipeline)
    _check_fetches(pipeline)
    reader = next((s.device for s in pipeline.stages if "x" in s.op.reads), Place.GPU)
    walk = _start(frozenset({reader}), (0, "the previous layer"))
    walk.follow(pipeline.chain, pipeline.chain)
    leaves = walk.at["x", RowClass.DECODE] & walk.at["x", RowClass.PREFILL]
    again = _start(leaves, walk.writer["x", RowClass.DECODE])
    again.follow(pipeline.chain, pipeline.chain)
    enters = frozenset({reader}) if again.carries == walk.carries else leaves
    return Resolved(pipeline, tuple(again.carries.items()), enters, leaves)


def _start(where: frozenset[Place], writer: tuple[int, str]) -> _Walk:
    walk = _Walk(closed=True)
    for rows in RowClass.ALL.classes:
        walk.at["x", rows] = where
        walk.writer["x", rows] = writer
    return walk


def _check_kv(pipeline: Pipeline) -> None:
    keepers = [stage for stage in pipeline.stages if stage.op.keeps_kv]
    if len(keepers) != 1:
        raise PipelineError(
            f"a layer needs exactly one stage that keeps the KV cache, this one has {len(keepers)}; "
            "place decode_attention once."
        )
    if kv in pipeline.fetches and keepers[0].device is Place.CPU:
        raise PipelineError(f"fetch(kv) streams the cache to the GPU, but {keepers[0]} reads it on the cpu. Remove kv.")


def _check_fetches(pipeline: Pipeline) -> None:
    for item in pipeline.fetches:
        if item is kv:
            continue
        alone = Pipeline(pipeline.chain, (item,))
        if not any(alone.streams(stage) for stage in pipeline.stages):
            raise PipelineError(f"fetch({item.name}) streams nothing: no gpu stage reads such weights. Remove it.")
