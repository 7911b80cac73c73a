"""The transfers that a chain of placed stages needs, each in one canonical place: wiring without writing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain as chained
from itertools import islice, takewhile
from typing import NamedTuple

from workbench.core.errors import PipelineError
from workbench.pipeline.algebra import Pipeline
from workbench.pipeline.elements import BufferRows, Element, Fork, Path, located, located_stages, spliced, stages_of
from workbench.pipeline.walk import Author, Walk, reads_there
from workbench.stages import Move, Place, RowClass, Stage

_MOST_TRIES = 60


def connected(pipeline: Pipeline) -> Pipeline:
    """The pipeline with the transfers that its stages need, in place of those that it has.

    A transfer stands right before the first stage that reads what is only on the other device. What an arm of a fork
    leaves for stages behind the fork goes at the end of the arm, and what the next layer needs at the end of the chain.
    An arm that held only transfers is left out, and a fork of one arm becomes a part of the chain around it. A chain
    that no transfers can mend comes back with those that it could use.
    """
    stages = bare(pipeline.chain)
    first = _filled(stages, _in_its_arm)
    if _is_served(first) or not _can_be_served(first):
        return Pipeline(first, pipeline.fetches)
    others = chained((_filled(stages, _before_its_fork),), _with_one_earlier(first))
    return Pipeline(
        next((other for other in islice(others, _MOST_TRIES) if _is_served(other)), first), pipeline.fetches
    )


def bare(chain: tuple[Element, ...]) -> tuple[Element, ...]:
    """The chain without transfers and empty arms, and with every fork of one arm dissolved."""
    found: list[Element] = []
    for element in chain:
        if isinstance(element, Stage):
            found.append(element)
        elif isinstance(element, Fork):
            found += _joined_arms([bare(arm) for arm in element.arms])
    return tuple(found)


def _joined_arms(arms: list[tuple[Element, ...]]) -> tuple[Element, ...]:
    """The arms that hold something as one fork, in which an arm that is itself a fork is several arms."""
    kept: list[tuple[Element, ...]] = []
    for arm in arms:
        inner = arm[0] if len(arm) == 1 else None
        if isinstance(inner, Fork):
            kept += inner.arms
        elif arm:
            kept.append(arm)
    if len(kept) > 1:
        return (Fork(tuple(kept)),)
    return kept[0] if kept else ()


class _Absent(NamedTuple):
    """Rows that a stage reads on its device while they are only on the other one."""

    stage: Stage
    path: Path
    rows: tuple[tuple[BufferRows, Author], ...]


class Survey(Walk):
    """Walks a whole layer to its end and notes what it lacks.

    Attributes
    ----------
    unwritten_at : dict of path to list of (buffer, RowClass)
        Rows that stages read and no earlier stage writes.
    absent : list
        Rows that stages read and that are on the other device alone, stage by stage.
    idle : list of path
        Transfers that carry nothing.
    clashes : list of path
        Forks of which one arm writes what another writes or reads.
    """

    def __init__(self, where: frozenset[Place], author: Author) -> None:
        super().__init__(closed=True)
        self.unwritten_at: dict[Path, list[BufferRows]] = {}
        self.absent: list[_Absent] = []
        self.idle: list[Path] = []
        self.clashes: list[Path] = []
        for rows in RowClass.ALL.classes:
            self.at["x", rows] = where
            self.writer["x", rows] = author

    def unwritten(self, stage: Stage, rows: BufferRows, path: Path) -> None:
        """Note the rows."""
        self.unwritten_at.setdefault(path, []).append(rows)

    def clashing(self, fork: Fork, path: Path) -> None:
        """Note the fork."""
        try:
            super().clashing(fork, path)
        except PipelineError:
            self.clashes.append(path)

    def forgotten(self, stage: Stage, absent: tuple[BufferRows, ...], path: Path) -> None:
        """Note what is missing, and go on as if it were there."""
        self.absent.append(_Absent(stage, path, tuple((rows, self.writer[rows]) for rows in absent)))
        for rows in absent:
            self.at[rows] = self.at[rows] | {stage.device}

    def useless(self, move: Move, path: Path) -> None:
        """Note the move."""
        self.idle.append(path)


def surveyed(chain: tuple[Element, ...]) -> tuple[Survey, Survey]:
    """Two walks that close the layer as `resolve` does it.

    In the first, the residual stream is where the layer reads it first, in the second where the layer before left it.
    """
    reader = next((stage.device for stage in stages_of(chain) if "x" in stage.op.reads), Place.GPU)
    first = Survey(frozenset({reader}), Author(None, None))
    first.follow(chain, chain)
    again = Survey(first.at["x", RowClass.DECODE] & first.at["x", RowClass.PREFILL], Author(None, None))
    again.follow(chain, chain)
    return first, again


def _is_served(chain: tuple[Element, ...]) -> bool:
    """True if every stage finds what it reads, as far as it is written, and every transfer carries something."""
    return not any(survey.absent or survey.idle for survey in surveyed(chain))


def _can_be_served(chain: tuple[Element, ...]) -> bool:
    """False if it can be no layer, whatever transfers it has."""
    survey, _ = surveyed(chain)
    return not survey.unwritten_at and not survey.clashes


_Slot = Callable[[Path | None, Path], Path]
"""Where a transfer goes in front of a stage that reads what an author wrote before, from the paths of both."""


def _in_its_arm(author: Path | None, reader: Path) -> Path:
    return reader


def _before_its_fork(author: Path | None, reader: Path) -> Path:
    """Before the outermost fork that holds the reader and not its author."""
    same = _common(author or (), reader)
    return reader if same % 2 else reader[: same + 1]


def _filled(chain: tuple[Element, ...], before: _Slot) -> tuple[Element, ...]:
    """The chain with the transfers that it lacks, put in from left to right."""
    last: tuple[int, tuple[BufferRows, ...]] | None = None
    for _ in range(3 * len(list(stages_of(chain))) + 3):
        first, again = surveyed(chain)
        absent = first.absent or again.absent
        if absent:
            missing = absent[0]
            reader = [path for path, _ in located_stages(chain)].index(missing.path)
            lacking = reader, tuple(rows for rows, _ in missing.rows)
            if lacking == last:
                break  # the transfer that was put in for it does not reach it, and another would not either
            last = lacking
            place = _slot(chain, missing, before) if first.absent else _end(chain, first, missing)
            chain = spliced(chain, place, 0, (Move(missing.stage.device),))
            continue
        shorter = [spliced(chain, path, 1, ()) for path in (*first.idle, *again.idle)]
        better = next((each for each in shorter if not surveyed(each)[0].absent), None)
        if better is None:
            break
        chain = better
    return chain


def _with_one_earlier(chain: tuple[Element, ...]) -> Iterator[tuple[Element, ...]]:
    """The chain with one of its transfers at each earlier place of the same chain or arm."""
    for path, element in located(chain):
        if isinstance(element, Move):
            without = spliced(chain, path, 1, ())
            for index in reversed(range(path[-1])):
                yield spliced(without, (*path[:-1], index), 0, (element,))


def _slot(chain: tuple[Element, ...], missing: _Absent, before: _Slot) -> Path:
    """The slot of a transfer: at the end of the arm that wrote what is missing, or before the stage that reads it."""
    for rows, author in missing.rows:
        arm = _arm_before(author.path, missing.path)
        if arm is not None:
            slot = _arm_end(chain, arm)
            if _serves(chain, slot, rows, missing.stage.device):
                return slot
    return before(missing.rows[0][1].path, missing.path)


def _end(chain: tuple[Element, ...], layer: Survey, missing: _Absent) -> Path:
    """The slot of a transfer for the next layer: at the end of the arm that wrote it, or of the chain."""
    for rows, _ in missing.rows:
        path = layer.writer[rows].path
        if path is not None and len(path) > 1:
            slot = _arm_end(chain, path[:2])
            if _serves(chain, slot, rows, missing.stage.device):
                return slot
    return (len(chain),)


def _common(one: Path, other: Path) -> int:
    """Length of the beginning that two paths share."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def _arm_before(author: Path | None, reader: Path) -> Path | None:
    """The outermost arm that an author stands in, of a fork that ends before its reader."""
    same = _common(author or (), reader)
    arms_apart = same % 2 == 1
    return author[: same + 2] if author and not arms_apart and len(author) > same + 1 else None


def _arm_end(chain: tuple[Element, ...], arm: Path) -> Path:
    element = chain[arm[0]]
    if not isinstance(element, Fork):
        return arm
    inner = element.arms[arm[1]]
    if len(arm) == 2:
        return (*arm, len(inner))
    return (*arm[:2], *_arm_end(inner, arm[2:]))


def _serves(chain: tuple[Element, ...], slot: Path, rows: BufferRows, device: Place) -> bool:
    """True if a transfer in a slot would carry these rows to a device."""
    wanted, _ = reads_there(_behind(chain, slot, chain), device, frozenset())
    return rows in wanted


def _behind(chain: tuple[Element, ...], slot: Path, after: tuple[Element, ...]) -> tuple[Element, ...]:
    """Everything that follows a slot, up to the end of the next layer."""
    element = chain[slot[0]] if len(slot) > 1 else None
    if not isinstance(element, Fork):
        return chain[slot[0] :] + after
    return _behind(element.arms[slot[1]], slot[2:], chain[slot[0] + 1 :] + after)
