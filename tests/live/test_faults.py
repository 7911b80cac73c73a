"""A fault injected into the engine changes most requests' tokens: the equality of test_tokens can turn red."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.live.world import computed_by, differing, requests, scenario
from workbench.engine.model import few_rows, kv_cache, ops, weights
from workbench.models import ModelConfig
from workbench.schedules import VSLPipe

MODEL = ModelConfig("faults", 3, 48, 72, 6, 2, 12, 5, 2, 311, 512, dtype="fp32")
# Equal lengths, so that two rows of the block table can be swapped without one pointing past its blocks.
ASKED = requests([24] * 8, 16, vocab=MODEL.vocab_size, seed=3)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., ModelConfig]) -> ModelConfig:
    return make_model(MODEL, 2)


def tokens(model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return wb.run(scenario(model, ASKED, budget=400), VSLPipe()).tokens


@pytest.fixture(scope="module")
def right(model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return tokens(model)


def built_in(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    """Wrap a built-in operation: `change(original, operations, layout, read, weights)`."""
    original = getattr(ops.Ops, name)
    computed_by(monkeypatch, name, lambda *args: change(original, *args))


def gates(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    def route(original: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        h, both = original(*args)
        return h, torch.cat(change(*both.chunk(2, dim=-1)), dim=-1)

    return route


def layout(monkeypatch: pytest.MonkeyPatch, change: Callable[[ops.RowLayout], ops.RowLayout]) -> None:
    original = ops.RowLayout.of
    monkeypatch.setattr(ops.RowLayout, "of", lambda batch, blocks: change(original(batch, blocks)))


def wrong_experts(patch: pytest.MonkeyPatch) -> None:
    built_in(patch, "route", gates(lambda ids, scales: ((ids + 1) % MODEL.num_local_experts, scales)))


def swapped_router_weights(patch: pytest.MonkeyPatch) -> None:
    built_in(patch, "route", gates(lambda ids, scales: (ids, scales.flip(-1))))


def weights_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    built_in(patch, "route", gates(lambda ids, scales: (ids, scales * 0.7)))


def second_choice_dropped(patch: pytest.MonkeyPatch) -> None:
    built_in(patch, "route", gates(lambda ids, scales: (ids, scales * torch.tensor([1.0, 0.0]))))


def rope_off(patch: pytest.MonkeyPatch) -> None:
    patch.delitem(few_rows._MAKE, ops.Ops.qkv)
    patch.setattr(ops, "rope", lambda heads, *rest, **how: heads)


def decode_positions_one_late(patch: pytest.MonkeyPatch) -> None:
    def late(one: ops.RowLayout) -> ops.RowLayout:
        return replace(one, positions=one.positions + (torch.arange(one.rows) >= one.prefill))

    layout(patch, late)


def kv_of_another_request(patch: pytest.MonkeyPatch) -> None:
    layout(patch, lambda one: replace(one, table=np.ascontiguousarray(np.roll(one.table, 1, axis=0))))


def decode_forgets_the_oldest_token(patch: pytest.MonkeyPatch) -> None:
    """KV of position 0 is overwritten with the newest, as by a slot computed wrongly."""
    original = kv_cache.KVCache.attend

    def attend(self: Any, layer: int, one: ops.RowLayout, q: torch.Tensor, how: ops.Attention) -> torch.Tensor:
        for row, length in zip(one.table, one.lengths, strict=True):
            block, offset = divmod(int(length) - 1, self.block_size)
            self.pools[layer][row[0], :, :, 0] = self.pools[layer][row[block], :, :, offset]
        return original(self, layer, one, q, how)

    patch.setattr(kv_cache.KVCache, "attend", attend)


def decode_attention_zeroed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_cache.KVCache, "attend", lambda self, layer, one, q, how: torch.zeros_like(q))


def prefill_attention_zeroed(patch: pytest.MonkeyPatch) -> None:
    built_in(patch, "prefill_attention", lambda original, *args: torch.zeros_like(original(*args)))


def prefill_not_causal(patch: pytest.MonkeyPatch) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, is_causal, **k: attend(*a, **k))


def weights_one_layer_off(patch: pytest.MonkeyPatch) -> None:
    original = weights.WeightStore.sources
    layers = MODEL.num_hidden_layers
    patch.setattr(weights.WeightStore, "sources", lambda self, layer, op: original(self, (layer + 1) % layers, op))


def new_kv_lost(patch: pytest.MonkeyPatch) -> None:
    """The decodes' own keys and values are never stored."""
    original = kv_cache.KVCache.append

    def append(self: Any, layer: int, layout: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        if len(layout.slots) > 16:  # prefills only
            original(self, layer, layout, k, v)

    patch.setattr(kv_cache.KVCache, "append", append)


FAULTS = (
    wrong_experts,
    swapped_router_weights,
    weights_not_renormalised,
    second_choice_dropped,
    rope_off,
    decode_positions_one_late,
    kv_of_another_request,
    decode_forgets_the_oldest_token,
    decode_attention_zeroed,
    prefill_attention_zeroed,
    prefill_not_causal,
    weights_one_layer_off,
    new_kv_lost,
)


def test_without_a_fault_a_second_run_agrees(model: ModelConfig, right: Any) -> None:
    assert tokens(model) == right


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_shows(
    fault: Callable[..., None], model: ModelConfig, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert differing(tokens(model), right) >= 0.75
