"""The elements of a chain: stages, moves and forks, their paths, and those that are repeated or stand too early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from workbench.core.errors import PipelineError
from workbench.stages import Move, RowClass, Stage, comes_before, repeats


@dataclass(frozen=True)
class Fork:
    """Arms of stages that run side by side and then join."""

    arms: tuple[tuple[Element, ...], ...]

    def __str__(self) -> str:
        return f"({' | '.join(' >> '.join(spelled(arm)) for arm in self.arms)})"


Element = Stage | Move | Fork

BufferRows = tuple[str, RowClass]
"""The prefill rows or the decode rows of a buffer; they are moved and tracked separately."""

Path = tuple[int, ...]
"""Position of an element: index in the chain, then arm and index within each fork."""


def located(chain: tuple[Element, ...], path: Path = ()) -> Iterator[tuple[Path, Element]]:
    """Every element of a chain with its path, in order; a fork comes before what its arms hold.

    `path` is that of the arm that the chain is.
    """
    for index, element in enumerate(chain):
        yield (*path, index), element
        if isinstance(element, Fork):
            for number, arm in enumerate(element.arms):
                yield from located(arm, (*path, index, number))


def located_stages(chain: tuple[Element, ...]) -> list[tuple[Path, Stage]]:
    """All stages of a chain with their paths, in order; the arms of a fork follow one another."""
    return [(path, element) for path, element in located(chain) if isinstance(element, Stage)]


def stages_of(chain: tuple[Element, ...]) -> Iterator[Stage]:
    """All stages of a chain in order; the arms of a fork follow one another."""
    return (stage for _, stage in located_stages(chain))


class Pair(NamedTuple):
    """Two stages of a chain with their paths."""

    path: Path
    stage: Stage
    other_path: Path
    other: Stage


def repeated(chain: tuple[Element, ...]) -> Pair | None:
    """The first stage that computes what another one computes as well, and that one; None if there is none.

    Of two, it is the one with fewer rows, or else the second.
    """
    for (path, stage), (later, other) in combinations(located_stages(chain), 2):
        if repeats(stage.op, other.op):
            fewer = len(stage.op.rows.classes) < len(other.op.rows.classes)
            return Pair(path, stage, later, other) if fewer else Pair(later, other, path, stage)
    return None


def misplaced(chain: tuple[Element, ...]) -> Pair | None:
    """The first built-in operation that stands too early, and the last one that belongs before it; None for neither."""
    stages = located_stages(chain)
    for number, (path, stage) in enumerate(stages):
        late = [each for each in stages[number + 1 :] if comes_before(each[1].op, stage.op)]
        if late:
            return Pair(path, stage, *late[-1])
    return None


def element_at(chain: tuple[Element, ...], path: Path) -> Element:
    """The element at a path.

    Raises
    ------
    PipelineError
        If there is none.
    """
    found = next((element for place, element in located(chain) if place == path), None)
    if found is None:
        raise PipelineError(f"no element stands at {list(path)} in {_words(chain)}; give the path of one.")
    return found


def spliced(chain: tuple[Element, ...], path: Path, count: int, new: tuple[Element, ...]) -> tuple[Element, ...]:
    """The chain with other elements in the place of `count` of them from a path on; for 0 they go in before it.

    Raises
    ------
    PipelineError
        If no chain has so many elements there.
    """
    index = path[0] if path else -1
    if len(path) == 1 and 0 <= index <= len(chain) - count:
        return chain[:index] + new + chain[index + count :]
    fork = chain[index] if 0 <= index < len(chain) else None
    if not (isinstance(fork, Fork) and len(path) > 2 and 0 <= path[1] < len(fork.arms)):
        raise PipelineError(f"there is no place {list(path)} in {_words(chain)}; give an index, or one in an arm.")
    arms = list(fork.arms)
    arms[path[1]] = spliced(arms[path[1]], path[2:], count, new)
    return (*chain[:index], Fork(tuple(arms)), *chain[index + 1 :])


def _words(chain: tuple[Element, ...]) -> str:
    return " >> ".join(spelled(chain)) or "an empty chain"


def bracketed(chain: tuple[Element, ...]) -> list[tuple[Element, ...]]:
    """The chain in pieces as a user would write it: neighbours on one device share brackets, except with options."""
    pieces: list[tuple[Element, ...]] = []
    device = None
    for element in chain:
        here = element.device if isinstance(element, Stage) and not element.options else None
        if here is not None and here is device:
            pieces[-1] = (*pieces[-1], element)
        else:
            pieces.append((element,))
        device = here
    return pieces


def spelled(chain: tuple[Element, ...]) -> list[str]:
    """The pieces of a chain as a user would write them; see `bracketed`."""
    words: list[str] = []
    for first, *others in bracketed(chain):
        names = [element.op.name for element in others if isinstance(element, Stage)]
        words.append(f"{', '.join([str(first)[:-1], *names])})" if names else str(first))
    return words
