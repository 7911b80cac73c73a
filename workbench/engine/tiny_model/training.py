"""Training of the tiny model on exercises; it is seeded, and an interrupted one resumes to the same weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional
from tqdm.auto import tqdm

from workbench.core.errors import CheckpointError, EngineError
from workbench.engine.loading.tensors import Tensors
from workbench.engine.tiny_model.trainable import Trainable, draw
from workbench.models import ModelConfig
from workbench.workload.exercises import KINDS, Exercise, exercises
from workbench.workload.tokenizer import Tokenizer

SAVE_EVERY = 250  # updates, about a minute on two cores


@dataclass(frozen=True)
class Settings:
    """Settings of a training; with the model's sizes they determine the trained weights.

    Attributes
    ----------
    steps : int
        Number of updates; the learning rate falls along a cosine to 2 % of its peak at the last one.
    seed : int
    tokens : int
        Tokens of one update.
    contexts : tuple of int
        Lengths of the packed contexts [tokens], one per step in turns. The first quarter of the steps uses only the
        first, with which the model learns faster.
    learning_rate, warm_up, weight_decay, clip : float
        Peak of AdamW's rate, number of steps until it is reached, decay of the matrices, largest norm of the gradient.
    balance : float
        Weight of the load balancing loss (Switch Transformers, Eq. 4).
    """

    steps: int = 4_000
    seed: int = 0
    tokens: int = 4096
    contexts: tuple[int, ...] = (64, 128, 256, 512)
    learning_rate: float = 3e-3
    warm_up: float = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    balance: float = 0.01
    kinds: tuple[str, ...] = KINDS

    def __post_init__(self) -> None:
        if self.steps < 1 or min(self.contexts) < 1 or self.tokens < max(self.contexts):
            raise EngineError(f"{self} makes no update; give at least one step, and tokens for the longest context.")

    def context(self, step: int) -> int:
        """Length of the contexts of a step [tokens]."""
        return self.contexts[0 if step < self.steps // 4 else step % len(self.contexts)]

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        falling = 0.51 + 0.49 * math.cos(math.pi * step / self.steps)
        return self.learning_rate * falling * min(1.0, (step + 1) / self.warm_up)


def lesson(settings: Settings, tokenizer: Tokenizer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one training step: solved exercises of the training split in a row, cut at the end of the context.

    Returns
    -------
    tokens : Tensor (B, S + 1) int64
    rows : Tensor (R,) int64
        Rows of the flattened first S tokens whose next token belongs to an answer or is its end of line.
    """
    context = settings.context(step)
    stream = exercises(settings.kinds, seed=f"{settings.seed}/{step}")
    packed = [_packed(stream, tokenizer, context + 1) for _ in range(settings.tokens // context)]
    tokens, taught = (torch.tensor(column) for column in zip(*packed, strict=True))
    return tokens, taught[:, 1:].reshape(-1).nonzero()[:, 0]


def _packed(stream: Iterator[Exercise], tokenizer: Tokenizer, length: int) -> tuple[list[int], list[bool]]:
    """Token ids, and a flag for each that is true if it belongs to an answer."""
    tokens: list[int] = []
    taught: list[bool] = []
    while len(tokens) < length:
        exercise = next(stream)
        prompt = tokenizer.encode(exercise.prompt)
        answer = tokenizer.encode(f"{exercise.answer}\n")
        tokens += prompt + answer
        taught += [False] * len(prompt) + [True] * len(answer)
    return tokens[:length], taught[:length]


class Training:
    """The state of a training: weights, AdamW's moments and the number of updates made."""

    def __init__(self, model: ModelConfig, settings: Settings, tokenizer: Tokenizer) -> None:
        if max(settings.contexts) > model.max_position_embeddings:
            raise EngineError(
                f"contexts of {max(settings.contexts)} tokens are longer than {model.name!r} takes, "
                f"{model.max_position_embeddings}; give shorter ones."
            )
        self.model = model
        self.settings = settings
        self.step = 0
        self.weights: Tensors = {k: w.requires_grad_() for k, w in draw(model, settings.seed).items()}
        self._tokenizer = tokenizer
        self._net = Trainable(model)
        matrices = [w for w in self.weights.values() if w.ndim > 1]
        others = [w for w in self.weights.values() if w.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)

    def update(self) -> float:
        """Make one update and return the loss of the answers."""
        for group in self._adam.param_groups:
            group["lr"] = self.settings.rate(self.step)
        tokens, rows = lesson(self.settings, self._tokenizer, self.step)
        given = tokens[:, :-1]
        wanted = tokens[:, 1:]
        logits, imbalance = self._net.forward(self.weights, given, rows)
        loss = functional.cross_entropy(logits, wanted.reshape(-1)[rows])
        (loss + self.settings.balance * imbalance).backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.settings.clip)
        self._adam.step()
        self._adam.zero_grad()
        self.step += 1
        return loss.item()

    def save(self, file: Path) -> None:
        """Write the state to a file, which is complete or absent at any moment."""
        tensors = {f"weight/{name}": weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors |= {f"{key}/{name}": moment for key, moment in self._adam.state[weight].items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        save_file(tensors, partial, {"step": str(self.step), "made": self._made()})
        os.replace(partial, file)

    def restore(self, file: Path) -> None:
        """Continue from a saved state.

        Raises
        ------
        CheckpointError
            If the file is damaged or belongs to a training with other settings.
        """
        try:
            with safe_open(file, framework="pt") as opened:
                about = opened.metadata()
                tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is truncated or damaged ({error}); remove it to train anew.") from error
        if about["made"] != self._made():
            raise CheckpointError(f"{file} is of a training with other settings; give the same, or another folder.")
        self.step = int(about["step"])
        for name, weight in self.weights.items():
            weight.data.copy_(tensors.pop(f"weight/{name}"))
            self._adam.state[weight] = {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}

    def _made(self) -> str:
        sizes = {key: value for key, value in asdict(self.model).items() if key not in ("name", "path")}
        return json.dumps({"settings": asdict(self.settings), "model": sizes}, sort_keys=True)


def train(training: Training, state: Path) -> None:
    """Make all updates, from the saved state if there is one; an interruption loses at most `SAVE_EVERY` of them."""
    if state.is_file():
        training.restore(state)
    total = training.settings.steps
    with tqdm(total=total, initial=training.step, desc="train", unit="step", mininterval=1) as bar:
        while training.step < total:
            loss = training.update()
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            if training.step % SAVE_EVERY == 0 or training.step == total:
                training.save(state)
