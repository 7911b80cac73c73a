"""Every decoder of transformers is either counted as transformers builds it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workbench.core.errors import CheckpointError
from workbench.models import ModelConfig, model
from workbench.models.families import FAMILIES

BAR = 0.005
ABSENT = ("kimi_k2", "deepseek_v2")
"""Kimi K2 is DeepSeek-V3 under a type of its own that transformers lacks; DeepSeek-V2 has no default for top-k."""
SMALL: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": None, "mlp_layer_types": None, "moe_layers": None}
SMALL |= {"no_rope_layers": None, "num_experts_per_tok": 2}
SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
"""So few layers and experts that what is left out of one shows."""
GIVEN: dict[str, dict[str, Any]] = {"dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 5e5}}}
"""What transformers cannot build a default without."""


def built(config: Any) -> int:
    """Parameters of the model that transformers makes of a configuration, tied ones once."""
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in {id(p): p for p in made.parameters()}.values())


def read(config: Any, name: str) -> ModelConfig | None:
    """The reader's model, or None where it refuses the configuration by its name."""
    try:
        return model(config.to_dict(), name=name)
    except CheckpointError as error:
        if repr(name) not in str(error):
            raise
        return None


@pytest.mark.parametrize("kind", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {"gemma4_assistant"}))
def test_a_decoder_of_transformers_is_counted_right_or_refused_by_name(kind: str) -> None:
    config = CONFIG_MAPPING[kind](**GIVEN.get(kind, {}))
    found = read(config, kind)
    if found is None:
        assert config.to_dict()["model_type"] not in FAMILIES or kind in ABSENT
    else:
        assert found.params == pytest.approx(built(config), rel=BAR)


def changes(config: Any) -> list[tuple[str, Any]]:
    """Every number, flag and list of a configuration set to something else."""
    given = config.to_dict()
    found: list[tuple[str, Any]] = []
    for key, value in given.items():
        if isinstance(value, bool):
            found.append((key, not value))
        elif isinstance(value, int):
            found += [(key, 2 * value or 2), (key, value // 2 or 1024)]
        elif value is None:
            found += [(key, True), (key, 2), (key, 1024)]
    layers = config.num_hidden_layers
    kinds = [["dense"] * 2 + ["sparse"] * (layers - 2), ["sparse", "dense"] * (layers // 2)]
    return [*found, *(("mlp_layer_types", kind) for kind in kinds if "mlp_layer_types" in given)]


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "kimi_k2"])
def test_a_family_is_counted_right_whatever_key_is_set(kind: str) -> None:
    """Where transformers builds what it was given, the reader counts that, or refuses it."""
    own = {key: value for key, value in SMALL.items() if key in CONFIG_MAPPING[kind]().to_dict()}
    own |= GIVEN.get(kind, {})
    least = CONFIG_MAPPING[kind](**own)
    wrong, counted = [], 0
    for key, value in changes(least):
        try:
            config = CONFIG_MAPPING[kind](**{**own, key: value})
            expected = built(config)
        except Exception:
            continue  # transformers itself refuses
        found = read(config, kind)
        counted += found is not None
        if found is not None and abs(found.params / expected - 1) > BAR:
            wrong.append((key, value, found.params / expected - 1))
    assert not wrong
    assert counted > 20
