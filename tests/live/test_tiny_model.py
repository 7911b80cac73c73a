"""The model that ships: it answers exercises it never saw, and no schedule, cache or preemption changes an answer."""

import json
from typing import Any

import pytest
import torch

import workbench as wb
from tests.examples import DEEP
from tests.live.world import OF_SYSTEMS, RUNNABLE, WIRED, computed_by, longest, machine, scenario
from workbench.engine.loading.checkpoint import open_checkpoint
from workbench.engine.model import few_rows, ops
from workbench.engine.tiny_model.tiny import EXAM_PER_KIND, greedy_marks, make_tokenizer
from workbench.engine.tiny_model.trainable import trained_tensors
from workbench.engine.tiny_model.training import Settings
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.workload.exam import Exam, Mark, make_exam
from workbench.workload.exercises import KINDS, chance
from workbench.workload.tokenizer import load_tokenizer

FOLDER = wb.data_path("models/tiny-moe")
RECORD = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))["held_out"]


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return wb.checkpoint(FOLDER)


@pytest.fixture(scope="module")
def exam(model: ModelConfig) -> Exam:
    return make_exam(6 * len(KINDS), load_tokenizer(model), prompt_len=(0, 140), seed=1)


def sit(
    exam: Exam, model: ModelConfig, schedule: Schedule, pipeline: Pipeline = RUNNABLE["vslpipe"], **how: Any
) -> wb.Result:
    of = scenario(model, exam.workload.requests, pipeline, budget=how.pop("budget", 600), **how)
    return wb.run(of, schedule)


def total(marks: dict[str, Mark]) -> Mark:
    return Mark(sum(mark.right for mark in marks.values()), sum(mark.count for mark in marks.values()))


# ----------------------------------------------------------------------------------------------------- what ships


def test_it_is_a_small_mixtral(model: ModelConfig) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16e6
    assert model.num_hidden_layers >= 4
    assert (model.num_local_experts, model.num_experts_per_tok) == (8, 2)
    assert json.loads((FOLDER / "tokenizer.json").read_text()) == json.loads(make_tokenizer().to_str())


def test_the_record_is_of_the_script_as_it_stands() -> None:
    settings = json.loads((FOLDER / "training.json").read_text())["settings"]
    assert Settings(**{key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}) == Settings()


def test_the_record_is_well_above_chance() -> None:
    assert set(RECORD) == set(KINDS)
    for kind, found in RECORD.items():
        assert found["chance"] == pytest.approx(chance(kind), abs=1e-4)
        for name, mark in found.items():
            if name != "chance":
                assert mark["count"] == EXAM_PER_KIND
                assert mark["accuracy"] == mark["right"] / mark["count"] > 2 * found["chance"]
    assert sum(found["prompt 128"]["accuracy"] >= 0.95 for found in RECORD.values()) >= 5


# ------------------------------------------------------------------------------------------------- what it answers


@pytest.fixture(scope="module")
def reference(exam: Exam, model: ModelConfig) -> wb.Result:
    return sit(exam, model, Sequential())


def test_it_answers_as_well_as_recorded(exam: Exam, model: ModelConfig, reference: wb.Result) -> None:
    """The record's own arithmetic marks these exercises exactly alike, and the record is within statistics of them."""
    marks = exam.marks(reference)
    weights = {name: tensor.float() for name, tensor in open_checkpoint(model).items()}
    assert marks == greedy_marks(exam, trained_tensors(weights, model), model)
    expected = sum(found["prompt 128"]["accuracy"] for found in RECORD.values()) / len(RECORD)
    mark = total(dict(marks))
    assert mark.accuracy == pytest.approx(expected, abs=4 * (max(expected * (1 - expected), 0.02) / mark.count) ** 0.5)


WAYS = {
    "vslpipe": ("vslpipe", VSLPipe(), {}),
    "one token a block": ("vslpipe", VSLPipe(), {"block": 1}),
    "two micro-batches": ("vslpipe", Sequential(2), {"budget": 200}),
    "all on the gpu": ("all_gpu", Sequential(), {}),
    "kv streamed": ("flexgen_s4", Sequential(), {}),
    **{type(schedule).__name__: (name, schedule, {"budget": 300}) for name, schedule in OF_SYSTEMS},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_schedule_changes_an_answer(way: str, exam: Exam, model: ModelConfig, reference: wb.Result) -> None:
    name, schedule, how = WAYS[way]
    assert sit(exam, model, schedule, WIRED[name], **how).tokens == reference.tokens


@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()], ids=str)
def test_preemption_changes_no_answer(schedule: Schedule, exam: Exam, model: ModelConfig, reference: wb.Result) -> None:
    tight = sit(exam, model, schedule, tokens=longest(exam.workload.requests) + 40, block=8)
    assert tight.preemptions >= 3
    assert tight.tokens == reference.tokens


def test_it_answers_as_transformers(exam: Exam, model: ModelConfig, oracle: Any, reference: wb.Result) -> None:
    few = exam.workload.requests[:: len(exam.exercises) // 12]
    answer = oracle(model).generate(few)
    assert answer.tokens == reference.tokens[:: len(exam.exercises) // 12]


def test_the_exam_bites(exam: Exam, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where positions are forgotten, or the other experts are taken, little is right."""
    route = ops.Ops.route

    def wrong(self: ops.Ops, *rest: Any) -> Any:
        h, gates = route(self, *rest)
        chosen = model.num_experts_per_tok
        gates[:, :chosen] = (gates[:, :chosen] + 1) % model.num_local_experts
        return h, gates

    def rope_off() -> None:
        monkeypatch.delitem(few_rows._MAKE, ops.Ops.qkv)
        monkeypatch.setattr(ops, "rope", lambda heads, *rest, **how: heads)

    for break_it in (
        rope_off,
        lambda: computed_by(monkeypatch, "route", wrong),
    ):
        break_it()
        assert total(dict(exam.marks(sit(exam, model, VSLPipe())))).accuracy < 0.5
        monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()] if DEEP else [Sequential()], ids=str)
def test_bf16_costs_less_than_a_point(schedule: Schedule, model: ModelConfig) -> None:
    many = make_exam(100 * len(KINDS), load_tokenizer(model), prompt_len=(0, 120), seed=2)
    wide, narrow = (
        total(dict(many.marks(sit(many, model, schedule, tokens=20_000, precision=precision))))
        for precision in ("fp32", "bf16")
    )
    assert narrow.accuracy >= wide.accuracy - 0.01


@pytest.mark.slow
def test_every_exercise_of_the_record_is_marked_alike(model: ModelConfig) -> None:
    exam = make_exam(EXAM_PER_KIND * len(KINDS), load_tokenizer(model))
    marks = exam.marks(sit(exam, model, VSLPipe(), tokens=20_000))
    assert {kind: mark.right for kind, mark in marks.items()} == {k: f["prompt 0"]["right"] for k, f in RECORD.items()}


@torch.no_grad()
def test_all_experts_are_used(exam: Exam, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    route = ops.Ops.route

    def watched(self: ops.Ops, *rest: Any) -> Any:
        h, gates = route(self, *rest)
        used.extend(gates[:, : model.num_experts_per_tok].flatten().int().tolist())
        return h, gates

    computed_by(monkeypatch, "route", watched)
    wb.run(scenario(model, exam.workload.requests, budget=600, on=machine()), Sequential())
    counts = torch.bincount(torch.tensor(used), minlength=model.num_local_experts)
    assert counts.min() > 0.3 * counts.float().mean()
