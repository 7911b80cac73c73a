"""A walk along a chain that tracks the devices of all buffers, and what each move carries."""

from __future__ import annotations

from typing import NamedTuple

from workbench.core.errors import PipelineError
from workbench.pipeline.elements import BufferRows, Element, Fork, Path, stages_of
from workbench.stages import Move, Place, Stage


class Author(NamedTuple):
    """The stage that wrote some rows last.

    Attributes
    ----------
    path : Path or None
        Its place, by which equal stages are told apart; None for a stage of the layer before.
    stage : Stage or None
        None for any stage of the layer before.
    """

    path: Path | None
    stage: Stage | None

    def __str__(self) -> str:
        return "the previous layer" if self.stage is None else str(self.stage)


class Walk:
    """Follows the rows of all buffers through a chain: the devices that hold them, their writers, and each move's load.

    If it is `closed`, the chain is a whole layer: every read needs a writer, and every move must carry something. What
    cannot be is raised as a PipelineError; a subclass may go on instead.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self.at: dict[BufferRows, frozenset[Place]] = {}
        self.writer: dict[BufferRows, Author] = {}
        self.carries: dict[Path, tuple[BufferRows, ...]] = {}
        self.closed = closed

    def follow(self, chain: tuple[Element, ...], after: tuple[Element, ...], path: Path = ()) -> None:
        """Go through a chain, which `after` follows and which stands at `path`.

        Raises
        ------
        PipelineError
            If a stage reads what is not on its device, arms clash, or a move of a closed chain moves nothing.
        """
        for index, element in enumerate(chain):
            rest = chain[index + 1 :] + after
            if isinstance(element, Stage):
                self._enter(element, (*path, index))
            elif isinstance(element, Move):
                self._carry(element, rest, (*path, index))
            else:
                self._fork(element, rest, (*path, index))

    # ------------------------------------------------------------------------------------------------ what cannot be

    def unwritten(self, stage: Stage, rows: BufferRows, path: Path) -> None:
        """Refuse a stage that reads rows which no earlier stage writes."""
        raise PipelineError(
            f"{stage} reads {_name(rows)}, which no earlier stage of the layer writes. "
            "Put the operation that writes it before.",
            path,
        )

    def forgotten(self, stage: Stage, absent: tuple[BufferRows, ...], path: Path) -> None:
        """Refuse a stage that reads rows which are on the other device alone."""
        writer = str(self.writer[absent[0]])
        buffers = ", ".join(dict.fromkeys(buffer for buffer, _ in absent))
        move = "offload" if stage.device is Place.CPU else "load"
        raise PipelineError(
            f"{stage} reads {buffers} on the {stage.device.value}, but {writer} leaves it on the "
            f"{stage.device.other.value}. Put {move} between them: {writer} >> {move} >> {stage}.",
            path,
        )

    def useless(self, move: Move, path: Path) -> None:
        """Refuse a move that carries nothing."""
        raise PipelineError(
            f"{move} at place {path[0] + 1} of the layer moves nothing: no later {move.target.value} stage reads "
            f"anything that is only on the {move.target.other.value}. Remove it.",
            path,
        )

    def clashing(self, fork: Fork, path: Path) -> None:
        """Refuse arms of which one writes what another one writes or reads: they run side by side."""
        uses = []
        for arm in fork.arms:
            stages = list(stages_of(arm))
            writes = {rows: stage for stage in stages for rows in written(stage)}
            reads = {rows: stage for stage in stages for rows in stage.op.needs}
            uses.append((writes, reads))
        for number, (writes, _) in enumerate(uses):
            for other, (also_writes, reads) in enumerate(uses):
                if other == number:
                    continue
                for rows in writes:
                    if rows in also_writes:
                        raise PipelineError(
                            f"two arms of a fork write {_name(rows)} ({writes[rows]} and {also_writes[rows]}); "
                            "give one of them another buffer.",
                            path,
                        )
                    if rows in reads:
                        raise PipelineError(
                            f"one arm of a fork writes {_name(rows)} ({writes[rows]}), which another reads "
                            f"({reads[rows]}); put them one after the other with >>.",
                            path,
                        )

    # ------------------------------------------------------------------------------------------------------ elements

    def _enter(self, stage: Stage, path: Path) -> None:
        for rows in stage.op.needs:
            if rows not in self.at:
                if self.closed:
                    self.unwritten(stage, rows, path)
            elif stage.device not in self.at[rows]:
                absent = tuple(p for p in stage.op.needs if p in self.at and stage.device not in self.at[p])
                self.forgotten(stage, absent, path)
        for rows in written(stage):
            self.at[rows] = frozenset({stage.device})
            self.writer[rows] = Author(path, stage)

    def _carry(self, move: Move, rest: tuple[Element, ...], path: Path) -> None:
        wanted, _ = reads_there(rest, move.target, frozenset())
        carried = tuple(p for p in wanted if p in self.at and move.target not in self.at[p])
        for rows in carried:
            self.at[rows] = self.at[rows] | {move.target}
        self.carries[path] = carried
        if self.closed and not carried:
            self.useless(move, path)

    def _fork(self, fork: Fork, rest: tuple[Element, ...], path: Path) -> None:
        self.clashing(fork, path)
        before = dict(self.at)
        writer = dict(self.writer)
        merged = dict(self.at)
        authors = dict(self.writer)
        for number, arm in enumerate(fork.arms):
            self.at = dict(before)
            self.writer = dict(writer)
            self.follow(arm, rest, (*path, number))
            for rows, where in self.at.items():
                rewritten = self.writer[rows] != writer.get(rows)
                if rewritten:
                    merged[rows] = where
                    authors[rows] = self.writer[rows]
                elif authors.get(rows) == writer.get(rows):
                    merged[rows] = merged.get(rows, where) | where
        self.at = merged
        self.writer = authors


def _name(rows: BufferRows) -> str:
    return f"{rows[0]} of {rows[1].value} rows"


def written(stage: Stage) -> tuple[BufferRows, ...]:
    """The rows of buffers that a stage writes."""
    return tuple((buffer, rows) for buffer in stage.op.writes for rows in stage.op.rows.classes)


def reads_there(
    rest: tuple[Element, ...], device: Place, made: frozenset[BufferRows]
) -> tuple[tuple[BufferRows, ...], bool]:
    """Rows that stages on `device` read before the next move back, and true if the chain has no such move.

    Rows that were `made` on the way are none of them.
    """
    found: dict[BufferRows, None] = {}
    for element in rest:
        if isinstance(element, Stage):
            if element.device is device:
                found.update((p, None) for p in element.op.needs if p not in made)
            made |= set(written(element))
        elif isinstance(element, Move):
            if element.target is not device:
                return tuple(found), False
        else:
            through = False
            for arm in element.arms:
                wanted, ran_through = reads_there(arm, device, made)
                found.update((p, None) for p in wanted)
                through |= ran_through
            if not through:
                return tuple(found), False
    return tuple(found), True
