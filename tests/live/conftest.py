"""Checkpoints on disk, made once per session, and transformers as the oracle."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.live.made import QUANTISED, write
from tests.live.world import TINY, lane_threads
from workbench.engine.tiny_model.synthesize import write_checkpoint as make_checkpoint
from workbench.models import ModelConfig
from workbench.workload import Request

MakeModel = Callable[..., ModelConfig]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Write a seeded checkpoint once and give its model."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(config: ModelConfig, seed: int = 0) -> ModelConfig:
        return wb.checkpoint(make_checkpoint(config, root / f"{config.name}-{seed}", seed=seed))

    return make


@pytest.fixture(scope="session")
def tiny(make_model: MakeModel) -> ModelConfig:
    return make_model(TINY)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelConfig]:
    """A model of a name in `CONFIGS`, whose checkpoint is written once."""
    root = tmp_path_factory.mktemp("made")
    known: dict[tuple[str, torch.dtype], ModelConfig] = {}

    def of(name: str, dtype: torch.dtype = torch.float32) -> ModelConfig:
        if (name, dtype) not in known:
            folder = root / f"{name}-{dtype}".replace(", ", "-")
            known[name, dtype] = wb.checkpoint(write(name, folder, dtype=dtype))
        return known[name, dtype]

    return of


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a name in `QUANTISED`, which is written once."""
    root = tmp_path_factory.mktemp("quantised")
    known: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in known:
            known[name] = QUANTISED[name](write(name, root / name.replace(", ", "-"), seed=1, dtype=torch.bfloat16))
        return known[name]

    return of


@dataclass(frozen=True)
class Answer:
    """What transformers generates greedily in fp32, and the smallest distance between the two largest logits."""

    tokens: tuple[tuple[int, ...], ...]
    gap: float


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """So small a model is faster on one, by far where others use the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Oracle:
    """A checkpoint in transformers, in fp32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval()

    @one_thread()
    def generate(self, requests: Sequence[Request]) -> Answer:
        """All requests at once, padded on the left; in fp32 the padding changes nothing."""
        width, steps = max(len(r.prompt) for r in requests), max(r.output_len for r in requests)
        prompts = torch.tensor([[0] * (width - len(r.prompt)) + list(r.prompt) for r in requests])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
        made = self.model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(made.logits, dim=1).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).tolist()
        rows = made.sequences[:, width:].tolist()
        tokens = tuple(tuple(row[: r.output_len]) for row, r in zip(rows, requests, strict=True))
        return Answer(tokens, min(min(gap[: r.output_len]) for gap, r in zip(gaps, requests, strict=True)))

    @one_thread()
    @torch.no_grad()
    def scores(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits (T, V) at every position of one sequence."""
        return self.model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="session")
def oracle() -> Callable[[ModelConfig], Oracle]:
    pytest.importorskip("transformers")
    opened: dict[Path, Oracle] = {}

    def of(model: ModelConfig) -> Oracle:
        assert model.path is not None
        if model.path not in opened:
            opened[model.path] = Oracle(model.path)
        return opened[model.path]

    return of


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test may leave a lane's thread."""
    yield
    assert not lane_threads()
