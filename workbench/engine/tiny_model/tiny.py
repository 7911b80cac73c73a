"""The tiny model that ships with the project: its sizes, its tokenizer, and the record of its accuracy."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from workbench.core.errors import CheckpointError
from workbench.core.result import versions
from workbench.engine.loading.checkpoint import open_checkpoint
from workbench.engine.loading.tensors import Tensors
from workbench.engine.tiny_model.synthesize import hf_config
from workbench.engine.tiny_model.trainable import Trainable, checkpoint_tensors, trained_tensors
from workbench.engine.tiny_model.training import Settings, Training, train
from workbench.models import ModelConfig, checkpoint
from workbench.workload.exam import Exam, Mark, make_exam
from workbench.workload.exercises import KINDS, LETTERS, chance
from workbench.workload.tokenizer import CheckpointTokenizer, load_tokenizer

TINY = ModelConfig("tiny-moe", 4, 128, 128, 4, 2, 32, 8, 2, 64, 512, rope_theta=1e4, dtype="bf16")
EXAM_LENGTHS = (0, 128, 480)  # prompt tokens
EXAM_PER_KIND = 500
_RECORD = "training.json"
_STATE = "unfinished/state.safetensors"


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token for each character of an exercise, and one for each kind's name with its colon."""
    tags = [f"{kind}:" for kind in KINDS]
    words = ["[UNK]", "\n", "=", ",", "+", "-", *"0123456789", *LETTERS, *tags]
    made = tokenizers.Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    pattern = tokenizers.Regex("|".join([*tags, r"[\s\S]"]))
    made.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    made.decoder = decoders.Fuse()
    return made


def train_tiny(
    folder: str | Path, settings: Settings | None = None, *, model: ModelConfig = TINY, per_kind: int = EXAM_PER_KIND
) -> Path:
    """Train the tiny model and write it as a checkpoint, with the record of its held-out accuracy.

    Parameters
    ----------
    folder : str or Path
        Folder of the checkpoint; an interrupted training of the same settings is continued there.
    settings : Settings, optional
    model : ModelConfig
    per_kind : int
        Exercises of each kind and prompt length in the exam at the end.

    Raises
    ------
    CheckpointError
        If the folder holds another model, or an unfinished training with other settings.
    """
    folder = Path(folder)
    settings = settings or Settings()
    record = folder / _RECORD
    if record.is_file():
        if json.loads(record.read_text(encoding="utf-8"))["settings"] == _plain(settings):
            return folder
        raise CheckpointError(f"{folder} holds a model trained with other settings; give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    made = make_tokenizer()
    training = Training(model, settings, CheckpointTokenizer(model.name, made))
    train(training, folder / _STATE)
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=1) + "\n", encoding="utf-8")
    rounded = {name: weight.detach().bfloat16() for name, weight in training.weights.items()}
    save_file(checkpoint_tensors(rounded, model), folder / "model.safetensors", {"format": "pt"})
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
    about |= {"settings": _plain(settings), "held_out": examine(folder, per_kind)}
    record.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree((folder / _STATE).parent)
    return folder


def examine(folder: str | Path, per_kind: int = EXAM_PER_KIND) -> dict[str, Any]:
    """Held-out exact match of a checkpoint by kind and prompt length, with the chance of guessing."""
    model = checkpoint(folder)
    weights = trained_tensors({name: tensor.float() for name, tensor in open_checkpoint(model).items()}, model)
    found: dict[str, Any] = {kind: {"chance": round(chance(kind), 4)} for kind in KINDS}
    for length in EXAM_LENGTHS:
        exam = make_exam(per_kind * len(KINDS), load_tokenizer(folder), prompt_len=length)
        for kind, mark in greedy_marks(exam, weights, model).items():
            found[kind][f"prompt {length}"] = {**asdict(mark), "accuracy": mark.accuracy}
    return found


@torch.no_grad()
def greedy_marks(exam: Exam, weights: Tensors, model: ModelConfig) -> dict[str, Mark]:
    """Marks of greedy decoding in fp32.

    Each exercise takes one pass: greedy decoding gives the answer exactly if every token of it is the likeliest after
    the tokens before.
    """
    net = Trainable(model)
    hits = dict.fromkeys(KINDS, 0)
    counts = dict.fromkeys(KINDS, 0)
    for exercise, request in zip(exam.exercises, exam.workload.requests, strict=True):
        wanted = exam.tokenizer.encode(f"{exercise.answer}\n")
        tokens = torch.tensor([[*request.prompt, *wanted]])
        rows = torch.arange(len(request.prompt) - 1, tokens.shape[1] - 1)
        logits, _ = net.forward(weights, tokens, rows)
        hits[exercise.kind] += bool((logits.argmax(dim=-1) == torch.tensor(wanted)).all())
        counts[exercise.kind] += 1
    return {kind: Mark(hits[kind], counts[kind]) for kind in KINDS if counts[kind]}


def _plain(settings: Settings) -> dict[str, Any]:
    """The settings as JSON would read them back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return plain
