"""Exercises with exact answers, made from a seed, on which the tiny model is trained and examined."""

from __future__ import annotations

import hashlib
import math
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from workbench.core.errors import WorkloadError

LETTERS = string.ascii_lowercase
_NOT_X = LETTERS.replace("x", "")
HELD_OUT = 10  # one prompt in ten is left out of training


@dataclass(frozen=True)
class Exercise:
    """A question with the end of its prompt, and its only right answer without the end of the line."""

    kind: str
    prompt: str
    answer: str

    @property
    def line(self) -> str:
        """The solved exercise as a line of text."""
        return f"{self.prompt}{self.answer}\n"

    @property
    def held_out(self) -> bool:
        """True if the prompt's hash keeps it from training, whatever the seed."""
        return hashlib.blake2b(self.prompt.encode(), digest_size=4).digest()[0] * HELD_OUT < 256


Drawn = tuple[str, str, float]
"""Question, answer, and the chance of a random pick among the answers of the right form that the question offers."""


def _letters(pick: random.Random, least: int, most: int) -> list[str]:
    return pick.sample(LETTERS, pick.randint(least, most))


def _copy(pick: random.Random) -> Drawn:
    text = _letters(pick, 4, 9)
    return f"{''.join(text)}=", "".join(text), 1 / math.factorial(len(text))


def _reverse(pick: random.Random) -> Drawn:
    text = _letters(pick, 4, 9)
    return f"{''.join(text)}=", "".join(reversed(text)), 1 / math.factorial(len(text))


def _sort(pick: random.Random) -> Drawn:
    text = _letters(pick, 4, 9)
    return f"{''.join(text)}=", "".join(sorted(text)), 1 / math.factorial(len(text))


def _recall(pick: random.Random) -> Drawn:
    keys = _letters(pick, 3, 6)
    values = [str(pick.randint(10, 99)) for _ in keys]
    chosen = pick.randrange(len(keys))
    pairs = ",".join(key + value for key, value in zip(keys, values, strict=True))
    return f"{pairs}={keys[chosen]}", values[chosen], 1 / len(keys)


def _largest(pick: random.Random) -> Drawn:
    numbers = pick.sample(range(10, 100), pick.randint(3, 5))
    return f"{','.join(map(str, numbers))}=", str(max(numbers)), 1 / len(numbers)


def _count(pick: random.Random) -> Drawn:
    hits = pick.randint(1, 9)
    text = ["x"] * hits + [pick.choice(_NOT_X) for _ in range(10 - hits)]
    pick.shuffle(text)
    return f"{''.join(text)}=", str(hits), 1 / 9


def _add(pick: random.Random) -> Drawn:
    left = pick.randint(10, 99)
    right = pick.randint(10, 99)
    return f"{left}+{right}=", str(left + right), 1 / 179


def _subtract(pick: random.Random) -> Drawn:
    right, left = sorted((pick.randint(10, 99), pick.randint(10, 99)))
    return f"{left}-{right}=", str(left - right), 1 / 90


_DRAW: dict[str, Callable[[random.Random], Drawn]] = {
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "recall": _recall,
    "max": _largest,
    "count": _count,
    "add": _add,
    "subtract": _subtract,
}
KINDS = tuple(_DRAW)
"""Every kind of exercise."""


def exercises(kinds: str | Sequence[str] = KINDS, *, seed: int | str = 0, held_out: bool = False) -> Iterator[Exercise]:
    """Endless exercises, their kinds in random order; the same seed gives the same ones.

    Parameters
    ----------
    kinds : str or sequence of str
        Some of `KINDS`.
    seed : int or str
    held_out : bool
        Draw only exercises that are left out of training (one in ten, by the hash of the prompt), or only the others.

    Raises
    ------
    WorkloadError
        If there is no such kind.
    """
    chosen = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in chosen or [""]:
        if kind not in _DRAW:
            raise WorkloadError(f"there is no kind of exercise {kind!r}; there are {', '.join(KINDS)}.")
    return _stream(chosen, random.Random(f"exercises {seed}"), held_out)


def _stream(kinds: list[str], pick: random.Random, held_out: bool) -> Iterator[Exercise]:
    while True:
        exercise, _ = _draw(kinds[int(pick.random() * len(kinds))], pick)
        if exercise.held_out == held_out:
            yield exercise


def _draw(kind: str, pick: random.Random) -> tuple[Exercise, float]:
    question, answer, guess = _DRAW[kind](pick)
    return Exercise(kind, f"{kind}:{question}", answer), guess


def chance(kind: str, *, sample: int = 4000) -> float:
    """Share of right answers by guessing.

    It is that of the better of two ways to guess, over a fixed sample: always the kind's most frequent answer, or any
    of the answers of the right form that the question offers (one of the values, an order of the letters, a number
    below ten).
    """
    pick = random.Random(f"chance {kind}")
    drawn = [_draw(kind, pick) for _ in islice(range(sample), sample)]
    (_, commonest), *_ = Counter(exercise.answer for exercise, _ in drawn).most_common(1)
    return max(commonest / sample, sum(guess for _, guess in drawn) / sample)
