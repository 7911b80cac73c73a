"""Training: the engine's arithmetic, the same weights whether interrupted or not, and a record of what was reached."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.__main__ import main
from workbench.core.errors import CheckpointError, EngineError
from workbench.engine.loading.checkpoint import open_checkpoint
from workbench.engine.tiny_model import tiny, training
from workbench.engine.tiny_model.trainable import Trainable, checkpoint_tensors, draw, trained_tensors
from workbench.engine.tiny_model.training import Settings, Training, lesson, train
from workbench.models import ModelConfig, checkpoint
from workbench.workload.exercises import Exercise, exercises
from workbench.workload.tokenizer import CheckpointTokenizer, load_tokenizer

TOY = ModelConfig("toy", 2, 32, 24, 4, 2, 8, 4, 2, 64, 128, rope_theta=1e4, dtype="bf16")
SHORT = Settings(steps=12, tokens=512, contexts=(32, 64), warm_up=3)
TOKENIZER = CheckpointTokenizer("toy", tiny.make_tokenizer())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """So small a model is faster on one thread, and its exam short."""
    monkeypatch.setattr(tiny, "EXAM_LENGTHS", (0, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return open_checkpoint(checkpoint(folder))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class StruckError(Exception):
    """The interruption."""


def strike_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    update = Training.update

    def struck(self: Training) -> float:
        if self.step == step:
            raise error
        return update(self)

    monkeypatch.setattr(Training, "update", struck)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Exercise]:
    """The exercises that lessons take."""
    taken: list[Exercise] = []

    def watched(*given: Any, **how: Any) -> Any:
        for exercise in exercises(*given, **how):
            taken.append(exercise)
            yield exercise

    monkeypatch.setattr(training, "exercises", watched)
    return taken


def test_only_the_training_split_is_taught(drawn: list[Exercise]) -> None:
    for step in range(8):
        lesson(SHORT, TOKENIZER, step)
    assert len(drawn) > 100
    assert not any(exercise.held_out for exercise in drawn)


def test_answers_and_their_end_are_taught_and_nothing_else(drawn: list[Exercise]) -> None:
    tokens, rows = lesson(replace(SHORT, tokens=64, contexts=(64,)), TOKENIZER, 0)
    assert "".join(exercise.line for exercise in drawn).startswith(TOKENIZER.decode(tokens[0].tolist()))
    taught = TOKENIZER.decode(tokens[0, 1:][rows].tolist())
    assert "".join(f"{exercise.answer}\n" for exercise in drawn).startswith(taught)
    assert taught.count("\n") == len(drawn) - 1


def test_the_contexts_take_turns_after_the_first_quarter() -> None:
    settings = Settings(steps=16, contexts=(64, 128))
    assert [settings.context(step) for step in range(8)] == [64, 64, 64, 64, 64, 128, 64, 128]
    assert {lesson(settings, TOKENIZER, step)[0].shape for step in (4, 5)} == {(64, 65), (32, 129)}


def test_the_rate_rises_and_falls() -> None:
    settings = Settings(steps=1000, warm_up=10, learning_rate=1.0)
    rates = [settings.rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert rates[-1] == pytest.approx(0.02, abs=1e-3)


def test_computes_what_transformers_computes(make_model: Callable[..., ModelConfig], oracle: Any) -> None:
    model = make_model(ModelConfig("five", 3, 48, 72, 6, 2, 12, 5, 2, 311, 512, dtype="fp32"), 1)
    weights = trained_tensors(open_checkpoint(model), model)
    tokens = torch.randint(0, 311, (2, 50), generator=torch.Generator().manual_seed(0))
    logits, _ = Trainable(model).forward(weights, tokens, torch.arange(100))
    wanted = torch.cat([oracle(model).scores(row) for row in tokens.tolist()])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_checkpoint_names_and_back() -> None:
    weights = draw(TOY, 3)
    assert same(trained_tensors(checkpoint_tensors(weights, TOY), TOY), weights)


def test_the_imbalance_is_one_where_experts_are_used_alike() -> None:
    weights = draw(TOY, 0)
    tokens = torch.arange(64).view(1, 64)
    _, uneven = Trainable(TOY).forward(weights, tokens, torch.arange(1))
    for layer in range(TOY.num_hidden_layers):
        weights[f"{layer}.router"][:] = 0.0
        weights[f"{layer}.router"][:2] = 1e-3 * torch.randn(32)
    _, even = Trainable(TOY).forward(weights, tokens, torch.arange(1))
    assert uneven > 1.0
    assert even == pytest.approx(1.0, abs=0.01)


def test_it_learns(tmp_path: Path) -> None:
    learner = Training(TOY, replace(SHORT, steps=120, tokens=1024, kinds=("count",)), TOKENIZER)
    losses = [learner.update() for _ in range(120)]
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


@pytest.mark.parametrize("error", [StruckError(), KeyboardInterrupt()], ids=type)
def test_interrupted_and_resumed_training_gives_the_same_weights(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 4)
    whole = tiny.train_tiny(tmp_path / "whole", SHORT, model=TOY, per_kind=1)
    with monkeypatch.context() as patch:
        strike_at(patch, 7, error)
        with pytest.raises(type(error)):
            tiny.train_tiny(tmp_path / "parts", SHORT, model=TOY, per_kind=1)
    assert (tmp_path / "parts" / "unfinished").is_dir()
    parts = tiny.train_tiny(tmp_path / "parts", SHORT, model=TOY, per_kind=1)
    assert same(tensors(whole), tensors(parts))
    assert not same(tensors(whole), tensors(tiny.train_tiny(tmp_path / "other", replace(SHORT, seed=1), model=TOY)))


def test_the_folder_is_a_checkpoint_with_its_record(tmp_path: Path) -> None:
    folder = tiny.train_tiny(tmp_path, SHORT, model=TOY, per_kind=2)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "training.json",
    ]
    record = json.loads((folder / "training.json").read_text())
    assert record["settings"]["steps"] == 12
    assert record["held_out"]["add"]["prompt 64"]["count"] == 2
    assert record["held_out"]["add"]["chance"] < 0.05
    assert load_tokenizer(folder).encode("add:") == TOKENIZER.encode("add:")
    assert checkpoint(folder).num_local_experts == 4


def test_what_is_finished_is_left_alone(tmp_path: Path) -> None:
    tiny.train_tiny(tmp_path, SHORT, model=TOY, per_kind=1)
    written = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    tiny.train_tiny(tmp_path, SHORT, model=TOY, per_kind=1)
    assert written == {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="trained with other settings"):
        tiny.train_tiny(tmp_path, replace(SHORT, seed=5), model=TOY)


def test_a_state_of_other_settings_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    train(Training(TOY, replace(SHORT, steps=1), TOKENIZER), state)
    with pytest.raises(CheckpointError, match="of a training with other settings"):
        train(Training(TOY, SHORT, TOKENIZER), state)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    state.write_bytes(b"half")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        train(Training(TOY, SHORT, TOKENIZER), state)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"tokens": 32}, {"contexts": (0,)}], ids=str)
def test_settings_that_make_no_update_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="makes no update"):
        replace(SHORT, **wrong)


def test_contexts_longer_than_the_model_takes_are_refused() -> None:
    with pytest.raises(EngineError, match="contexts of 256 tokens are longer than 'toy' takes, 128"):
        Training(TOY, replace(SHORT, contexts=(256,)), TOKENIZER)


def test_the_command_says_where_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(tiny, "train_tiny", lambda folder, settings: made.append((folder, settings)) or folder)
    assert main(["train-tiny", "--out", str(tmp_path), "--steps", "5", "--seed", "3"]) == 0
    assert made == [(tmp_path, Settings(steps=5, seed=3))]
    assert str(tmp_path) in capsys.readouterr().out
    assert main(["train-tiny", "--steps", "0"]) == 1
