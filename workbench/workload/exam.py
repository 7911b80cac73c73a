"""Exams: held-out exercises as a workload with prompts of any length, and marks for a model's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from workbench.core.errors import WorkloadError
from workbench.core.result import Result
from workbench.core.units import is_whole
from workbench.workload.exercises import KINDS, Exercise, exercises
from workbench.workload.request import Request
from workbench.workload.tokenizer import Tokenizer
from workbench.workload.workload import Workload

OUTPUT_LEN = 12  # tokens: the longest answer has 9, and 10 with the end of its line


@dataclass(frozen=True)
class Mark:
    """Count of exercises of one kind that were answered exactly."""

    right: int
    count: int

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / self.count

    def __str__(self) -> str:
        return f"{self.right} of {self.count} ({self.accuracy:.1%})"


@dataclass(frozen=True)
class Exam:
    """Held-out exercises and their requests, in the same order.

    Attributes
    ----------
    exercises : tuple of Exercise
    workload : Workload
        Requests whose prompts end with the question; the generated text up to the end of the line is the answer.
    tokenizer : Tokenizer
    """

    exercises: tuple[Exercise, ...]
    workload: Workload
    tokenizer: Tokenizer

    def answers(self, result: Result | Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The answer to each question: the text up to the end of the line."""
        tokens = result.tokens if isinstance(result, Result) else result
        if len(tokens) != len(self.exercises):
            raise WorkloadError(
                f"the exam has {len(self.exercises)} questions, not {len(tokens)}; give a result of its own workload."
            )
        return tuple(self.tokenizer.decode(made).partition("\n")[0] for made in tokens)

    def marks(self, result: Result | Sequence[Sequence[int]]) -> Mapping[str, Mark]:
        """Exact matches by kind.

        Parameters
        ----------
        result : Result or sequence of sequences of int
            A `run` of this exam's workload, or the generated token ids of every request.
        """
        right: dict[str, list[bool]] = {}
        for exercise, answer in zip(self.exercises, self.answers(result), strict=True):
            right.setdefault(exercise.kind, []).append(answer == exercise.answer)
        return {kind: Mark(sum(hits), len(hits)) for kind, hits in right.items()}


def make_exam(
    count: int,
    tokenizer: Tokenizer,
    *,
    prompt_len: int | tuple[int, int] = 0,
    output_len: int = OUTPUT_LEN,
    kinds: str | Sequence[str] = KINDS,
    seed: int = 0,
) -> Exam:
    """An exam of `count` held-out exercises, the kinds taking turns.

    Parameters
    ----------
    count : int
    tokenizer : Tokenizer
        Tokenizer of the model to examine.
    prompt_len : int or (int, int)
        Length of the prompts, or of the shortest and the longest of them, which then grow in turns [tokens]. Solved
        exercises from the training split precede the question as long as they fit.
    output_len : int
        Tokens to generate for each exercise.
    kinds : str or sequence of str
    seed : int

    Examples
    --------
    >>> exam = make_exam(80, load_tokenizer(model), prompt_len=128)   # doctest: +SKIP
    >>> marks = exam.marks(wb.run(scenario.on(model=model, workload=exam.workload), VSLPipe()))   # doctest: +SKIP
    """
    chosen = [kinds] if isinstance(kinds, str) else list(kinds)
    if not is_whole(count) or count < 1:
        raise WorkloadError(f"an exam needs at least one exercise, not {count!r}.")
    count = int(count)  # whole numbers of numpy without a sign would wrap around below
    streams = [exercises(kind, seed=f"exam {seed} {kind}", held_out=True) for kind in chosen]
    solved = exercises(chosen, seed=f"solved {seed}")
    asked = tuple(next(streams[number % len(streams)]) for number in range(count))
    least, most = prompt_len if isinstance(prompt_len, tuple) else (prompt_len, prompt_len)
    steps = max(1, -(-count // len(chosen)) - 1)
    requests = []
    for number, exercise in enumerate(asked):
        wanted = least + (most - least) * (number // len(chosen)) // steps
        requests.append(Request(_prompt(exercise, solved, tokenizer, wanted), output_len))
    return Exam(asked, Workload.of(requests, name="exam"), tokenizer)


def _prompt(asked: Exercise, solved: Iterator[Exercise], tokenizer: Tokenizer, wanted: int) -> tuple[int, ...]:
    """The question, with as many solved exercises in front as fit."""
    prompt = tokenizer.encode(asked.prompt)
    for exercise in islice(solved, wanted):
        longer = tokenizer.encode(exercise.line) + prompt
        if len(longer) > wanted:
            break
        prompt = longer
    return prompt
