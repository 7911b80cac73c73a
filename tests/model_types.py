"""All types of models with experts that the installed transformers builds, beside what `wb.model` makes of them.

``python -m tests.model_types`` writes the table of the docs, `data/proofs/model_types.json`.
"""

import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import workbench as wb
from workbench.core.errors import WorkbenchError
from workbench.models.families import FAMILIES

PATH = Path(__file__).parents[1] / "data" / "proofs" / "model_types.json"
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_ROUTED = re.compile(r"(?<!shared_)experts\.|\bmlp\.(in|out)put_linear")
COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "lfm2_moe": {"num_hidden_layers": 24, "layer_types": ["conv", "conv", "full_attention", "conv"] * 6},
}
"""Sizes that default configs lack, chosen like those of published models."""
_IDLE = {"zaya": 1}
"""Choices of the router that compute nothing: Zaya's class to skip the experts."""


class Found(NamedTuple):
    """One type of model.

    `built` and `active` are the parameters that transformers builds, all and those of one token; `params` and
    `active_params` are those of `wb.model`. `way` is the key table or transformers, `refused` the error's text.
    """

    model_type: str
    built: int
    active: int
    params: int = 0
    active_params: int = 0
    way: str = ""
    layers: str = ""
    refused: str = ""


@cache
def survey() -> tuple[Found, ...]:
    """All types whose default config, or `COMPLETED` one, makes a model with experts."""
    return tuple(found for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) for found in _of(kind))


def _of(kind: str) -> Iterator[Found]:
    logging.disable(logging.WARNING)
    try:
        config = CONFIG_MAPPING[kind](**COMPLETED.get(kind, {}))
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    except Exception:  # the default config is not complete
        return
    finally:
        logging.disable(logging.NOTSET)
    built, active, experts = _counted(network, config.get_text_config(), kind)
    if not experts or not active:
        return
    found = Found(kind, built, active)
    try:
        model = wb.model({"model_type": kind, "dtype": "bfloat16", **_sizes(config, kind)}, name=kind)
    except WorkbenchError as error:
        yield found._replace(refused=str(error))
        return
    yield found._replace(
        params=round(model.params + model.vectors),
        active_params=model.active_params,
        way="key table" if kind in FAMILIES else "transformers",
        layers=model.layers_in_words,
    )


def _sizes(config: Any, kind: str) -> dict[str, Any]:
    """The config as its ``config.json`` has it; the key table needs every size."""
    return {key: value for key, value in config.to_dict().items() if key not in ("model_type", "dtype", "torch_dtype")}


def _counted(network: Any, config: Any, kind: str) -> tuple[int, int, int]:
    """Parameters of all, of one token, and the number of experts, by the names of tensors alone."""
    tensors = dict(network.named_parameters())
    stacked = [weight.shape[0] for name, weight in tensors.items() if _ROUTED.search(name) and weight.ndim == 3]
    experts = max(stacked, default=0)
    chosen = next((getattr(config, key, None) for key in _CHOSEN if getattr(config, key, None)), 0)
    routed = sum(weight.numel() for name, weight in tensors.items() if _ROUTED.search(name) and weight.ndim > 1)
    every = sum(weight.numel() for weight in tensors.values())
    if not (experts and chosen):
        return every, 0, experts
    embedding = network.get_input_embeddings().weight
    head = network.get_output_embeddings()
    looked_up = 0 if head is None or head.weight is embedding else embedding.numel()
    shared = sum(weight.numel() for name, weight in tensors.items() if "shared" in name and _ROUTED.search(name))
    routed -= shared
    return every, round(every - looked_up - routed * (1 - chosen / (experts + _IDLE.get(kind, 0)))), experts


def table() -> dict[str, Any]:
    """The survey as the docs keep it."""
    return {
        "transformers": transformers.__version__,
        "types": [found._asdict() for found in survey()],
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
