"""Accuracy of rounded experts: the shipped model's exam with weights in bf16, INT8 and INT4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workbench.bench import record
from workbench.core.catalogue import data_path
from workbench.core.units import QUANTISED
from workbench.engine import run
from workbench.hardware import Machine
from workbench.jobs import LLM
from workbench.schedules import Sequential
from workbench.workload.exam import make_exam

MODEL = "models/tiny-moe"


def bench_rounding(questions: int, *, json: Path | None, say: Callable[[str], None] = record.say) -> dict[str, float]:
    """Share of right answers in the model's own precision and with rounded experts, of the same questions."""
    own = LLM(data_path(MODEL), device="cpu")
    exam = make_exam(questions, own.tokenizer, prompt_len=(0, 200))
    found = dict[str, float]()
    for form in (own.model.dtype, *QUANTISED):
        marks = exam.marks(run(LLM(own.model, weights=form, device="cpu").scenario(exam.workload), Sequential()))
        found[form] = sum(mark.right for mark in marks.values()) / questions
        say(f"{form}: {found[form]:.2%} of {questions} questions are answered correctly")
    if json is not None:
        ratios = dict[str, dict[str, float]]()
        for form in QUANTISED:
            share = found[form] / found[own.model.dtype]
            ratios[f"right answers in {form} / {own.model.dtype}"] = record.ratio([share])
        told = {"model": own.model.name, "questions": questions}
        rows = [{**told, "weights": form, "right": right} for form, right in found.items()]
        record.write(json, Machine.local(device="cpu"), ratios, rows)
    return found
