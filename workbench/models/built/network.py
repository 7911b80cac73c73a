"""A whole model: transformers builds it, and its layers and the rest are counted."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.units import is_number, is_whole
from workbench.models.built.layer import LayerTensors, kind_of_layer
from workbench.models.config import ModelConfig
from workbench.models.layers import LayerKind, fold
from workbench.models.rope import Rope

EXTRA = "pip install 'moe-workbench[models]'"
"""The command that installs what this package needs."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Keys for the number of experts that a token chooses."""
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", *_LATENT)
_ENDLESS = 2**20
"""Positions of a model whose config names no most."""
_OUTSIDE = ("hc_head.",)
"""Matrices outside of the layers that are understood: those of hyper-connections before the head."""


def built(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The model of a config that transformers knows, with the weights of every layer as it builds them.

    Parameters
    ----------
    config : mapping
        The ``config.json`` as a dict, with ``model_type``.
    name : str
        Name of the model.

    Raises
    ------
    CheckpointError
        If transformers is missing, does not know the model or cannot build it, or if the model has tensors or settings
        that are not understood.
    """
    transformers = _transformers(name)
    version = f"transformers {transformers.__version__}"
    kind = str(config.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{name!r} is of the type {short(kind)}, which neither the key table nor {version} knows; use another "
            "version of transformers, or leave model_type out if the sizes tell all of its layers."
        )
    with _quiet():
        given = {key: value for key, value in config.items() if key != "model_type"}
        with _refused(f"{version} does not take the config of {name!r}", "correct it, or use another version"):
            found = transformers.AutoConfig.for_model(kind, **given).get_text_config()
        if type(found) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise CheckpointError(
                f"{version} has no language model of the type {short(kind)} ({name!r}); give the config of its text "
                "model."
            )
        with _refused(f"{version} cannot build {name!r}", "complete its config"):
            network = _network(transformers, found)
    return _Reader(network, found, name).model()


def hub_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a model of the Hugging Face hub, which transformers fetches or has kept.

    Raises
    ------
    CheckpointError
        If transformers is missing, or finds no such model.
    """
    transformers = _transformers(name)
    with _quiet(), _refused(f"the Hugging Face hub gives no config of {name!r}", "check the name and the connection"):
        found: dict[str, Any] = transformers.PretrainedConfig.get_config_dict(name)[0]
    if not found:
        raise CheckpointError(f"the Hugging Face hub gives no config of {name!r}; check the name and the connection.")
    return found


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise CheckpointError(
            f"{name!r} needs transformers, which is not installed; install it with {EXTRA}."
        ) from None


def _network(transformers: Any, config: Any) -> Any:
    torch = importlib.import_module("torch")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@contextlib.contextmanager
def _refused(what: str, mend: str) -> Iterator[None]:
    """Say in one line what transformers did not do: it raises errors of many kinds."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what} ({type(error).__name__}: {short(str(error))}); {mend}.") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers about defaults and missing fast kernels."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Reader:
    """Counts a model."""

    def __init__(self, network: Any, config: Any, name: str) -> None:
        self._config = config
        self._name = name
        self._embedding = network.get_input_embeddings().weight
        head = network.get_output_embeddings()
        alone = head is not None and head.weight is not self._embedding
        self._tied = not alone or bool(getattr(config, "tie_word_embeddings", False))
        self._sizes = {path: tuple(weight.shape) for path, weight in network.named_parameters()}
        self._begin, layers = self._find_layers(network)
        self._layers = [LayerTensors.of(layer) for layer in layers]

    def model(self) -> ModelConfig:
        """The model of one layer after the other, and of the rest."""
        experts = self._experts()
        kinds = [
            kind_of_layer(layer, self._config, number, experts, self._name) for number, layer in enumerate(self._layers)
        ]
        vocabulary, hidden = self._embedding.shape
        attending = [kind.own.given() for kind in kinds if kind.own.recurrence is None]
        latent = bool(attending) and all("kv_lora_rank" in own for own in attending)
        first = {key: value for key, value in (attending or [{}])[0].items() if latent or key not in _LATENT}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden}
        heads |= {key: first[key] for key in _HEADS if key in first}
        kinds_of_attention = getattr(self._config, "layer_types", None) or ()
        return ModelConfig(
            name=self._name,
            num_hidden_layers=len(kinds),
            hidden_size=hidden,
            intermediate_size=self._width(hidden),
            num_local_experts=experts,
            num_experts_per_tok=self._chosen(),
            vocab_size=vocabulary,
            max_position_embeddings=self._number(("max_position_embeddings",)) or _ENDLESS,
            tie_word_embeddings=self._tied,
            moe_intermediate_size=self._number(_EXPERT_WIDTHS),
            first_k_dense_replace=sum(kind.dense for kind in kinds),
            windowed_layers=sum(kind.windowed for kind in kinds),
            sliding_window=max(kind.own.sliding_window or 0 for kind in kinds),
            chunked="chunked_attention" in kinds_of_attention,
            layers=fold(_compact(kinds)),
            rope=Rope(share=self._rotated_share()),
            idle_experts=max(layer.idle_choices for layer in self._layers),
            outside_params=self._outside(),
            **heads,
        )

    def _find_layers(self, network: Any) -> tuple[str, Any]:
        """Path of the decoder layers, and the layers: the longest list of modules that is in no other list."""
        lists = {
            path: module
            for path, module in network.named_modules()
            if type(module).__name__ == "ModuleList" and len(module)
        }
        inside = tuple(f"{path}." for path in lists)
        outer = [path for path in lists if not path.startswith(inside)]
        if not outer:
            raise CheckpointError(f"{self._name!r} has no list of layers; use a decoder.")
        longest = max(outer, key=lambda path: len(lists[path]))
        return longest, lists[longest]

    def _experts(self) -> int:
        """Number of routed experts of a layer."""
        counts = {count for layer in self._layers for count in layer.expert_counts}
        if len(counts) == 1:
            return counts.pop()
        found = f"has layers with {short(sorted(counts))} experts" if counts else "has no routed experts"
        raise CheckpointError(
            f"{self._name!r} {found}, which is not understood; use a mixture of experts of one number."
        )

    def _chosen(self) -> int:
        found = self._number(_CHOSEN)
        if found is None:
            raise CheckpointError(
                f"the config of {self._name!r} does not tell how many experts a token chooses; complete it."
            )
        return found

    def _number(self, keys: tuple[str, ...]) -> int | None:
        """The first of the keys that has a number in the config."""
        values = (getattr(self._config, key, None) for key in keys)
        return next((int(value) for value in values if is_whole(value) and value), None)

    def _width(self, hidden: int) -> int:
        """Inner width of the feed-forward network of a dense layer; a list has one for each layer."""
        width = getattr(self._config, "intermediate_size", None)
        if isinstance(width, list | tuple):
            width = max(width)
        return int(width) if is_whole(width) and width else hidden

    def _rotated_share(self) -> float:
        """Share of a head's dims that RoPE rotates."""
        told = getattr(self._config, "rope_parameters", None)
        share = told.get("partial_rotary_factor") if isinstance(told, Mapping) else None
        share = share or getattr(self._config, "partial_rotary_factor", None)
        return float(share) if is_number(share) and 0 < share <= 1 else 1.0

    def _outside(self) -> int:
        """Weights outside of the layers, beside embedding, head and final norm.

        Raises
        ------
        CheckpointError
            If there is a matrix that is not understood.
        """
        vocabulary, hidden = self._embedding.shape
        total = 0
        for path, shape in self._sizes.items():
            if path.startswith(f"{self._begin}."):
                continue
            known = len(shape) == 1 or shape == (vocabulary, hidden) or any(one in path for one in _OUTSIDE)
            if not known:
                raise CheckpointError(
                    f"{self._name!r} has {path} of the shape {shape} outside of its layers, which is not understood; "
                    "use another model, or describe it with ModelConfig."
                )
            total += math.prod(shape)
        ends = (1 if self._tied else 2) * vocabulary * hidden + hidden
        return int(total - ends)


def _compact(kinds: list[LayerKind]) -> list[LayerKind]:
    """The kinds with one object for all that are equal."""
    known: dict[LayerKind, LayerKind] = {}
    return [known.setdefault(kind, kind) for kind in kinds]
