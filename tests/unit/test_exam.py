"""Exams: questions that were never trained on, prompts of the length asked for, marks by kind."""

from itertools import islice

import pytest

from workbench.core.errors import WorkloadError
from workbench.workload.exam import OUTPUT_LEN, Mark, make_exam
from workbench.workload.exercises import KINDS, exercises
from workbench.workload.tokenizer import BYTES


def perfect(exam, tail="\nadd:1"):
    return [BYTES.encode(exercise.answer + tail) for exercise in exam.exercises]


def lines(prompt) -> list[str]:
    return BYTES.decode(prompt).split("\n")


def test_the_kinds_take_turns_and_are_held_out():
    exam = make_exam(20, BYTES)
    assert [exercise.kind for exercise in exam.exercises] == [KINDS[n % len(KINDS)] for n in range(20)]
    assert all(exercise.held_out for exercise in exam.exercises)
    assert [BYTES.decode(request.prompt) for request in exam.workload.requests] == [e.prompt for e in exam.exercises]
    assert set(exam.workload.output_len) == {OUTPUT_LEN}


@pytest.mark.parametrize("length", [64, 200, 500])
def test_solved_exercises_of_the_training_split_make_a_prompt_longer(length):
    exam = make_exam(16, BYTES, prompt_len=length, output_len=20)
    trained = {exercise.line.strip() for exercise in islice(exercises(seed="solved 0"), 2000)}
    for exercise, request in zip(exam.exercises, exam.workload.requests, strict=True):
        assert length - 35 < len(request.prompt) <= length
        *solved, question = lines(request.prompt)
        assert question == exercise.prompt
        for line in solved:
            assert line in trained
    assert set(exam.workload.output_len) == {20}


def test_prompts_may_grow_from_one_length_to_another():
    lengths = make_exam(40, BYTES, prompt_len=(50, 400)).workload.prompt_len.tolist()
    assert max(lengths[:8]) <= 50
    assert 365 < min(lengths[-8:]) <= max(lengths) <= 400


def test_the_same_seed_makes_the_same_exam():
    first, again, other = (make_exam(16, BYTES, prompt_len=90, seed=seed) for seed in (1, 1, 2))
    assert first.workload.requests == again.workload.requests != other.workload.requests
    assert first.exercises == again.exercises != other.exercises


def test_what_stands_after_the_end_of_the_line_does_not_count():
    exam = make_exam(16, BYTES)
    for tail in ("\n", "\nadd:1", "\n\n\n"):
        assert all(mark == Mark(2, 2) for mark in exam.marks(perfect(exam, tail)).values())


def test_a_wrong_answer_costs_its_kind_one_mark():
    exam = make_exam(16, BYTES)
    made = perfect(exam)
    made[0] = BYTES.encode("?" + exam.exercises[0].answer + "\n")
    made[9] = BYTES.encode(exam.exercises[9].answer + "0\n")
    marks = exam.marks(made)
    assert marks.pop(exam.exercises[0].kind) == marks.pop(exam.exercises[9].kind) == Mark(1, 2)
    assert all(mark == Mark(2, 2) for mark in marks.values())
    assert str(Mark(1, 2)) == "1 of 2 (50.0%)"


def test_answers_to_another_exam_are_refused():
    with pytest.raises(WorkloadError, match="has 16 questions, not 8"):
        make_exam(16, BYTES).marks(perfect(make_exam(8, BYTES)))


def test_an_exam_without_questions_is_refused():
    with pytest.raises(WorkloadError, match="at least one exercise, not 0"):
        make_exam(0, BYTES)
