"""A GGUF file as a description of its model: the sizes, and the bytes of every operation in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.units import DTYPE_BYTES
from workbench.models.config import ModelConfig
from workbench.models.formats import Formats
from workbench.models.gguf.header import Header, read_header
from workbench.models.gguf.operations import Contents, Stored, contents_of
from workbench.models.gguf.sizes import config_of


@dataclass(frozen=True)
class GgufModel:
    """The model in a GGUF file.

    Attributes
    ----------
    name : str
        Name of the file, without its suffix and the number of its part.
    config : mapping
        Its sizes as a Hugging Face ``config.json`` has them.
    contents : Contents
        Its weights by layer and operation.
    """

    name: str
    config: Mapping[str, Any]
    contents: Contents

    def formats(self, model: ModelConfig) -> tuple[Formats, ...]:
        """Bytes per weight by operation of every layer, with embedding and head.

        A layer's operations then have as many bytes as their tensors in the file, norms and biases included.

        Parameters
        ----------
        model : ModelConfig
            The model that the sizes in `config` describe.

        Raises
        ------
        CheckpointError
            If the tensors have other numbers of weights than follow from the sizes, or some are missing.
        """
        around = (("embed", self.contents.embed), ("head", self.contents.head))
        ends = tuple((operation, stored.bytes / model.head_params) for operation, stored in around)
        found = []
        for layer, kind in enumerate(model.layer_kinds):
            stored = self.contents.layers[layer]
            alike = model.of_kind(kind)
            what = f"layer {layer} of {self.name!r}"
            _check_weights(what, stored, alike)
            found.append((*_bytes_per_weight(what, stored, alike), *ends))
        return tuple(found)


def _check_weights(what: str, stored: Mapping[str, Stored], model: ModelConfig) -> None:
    """Refuse a layer whose matrices are not those of a model of such layers."""
    expected = {
        "qkv": model.attention_in_params,
        "out_proj": model.attention_out_params,
        "route": model.moe_share * model.router_params,
        "experts": model.moe_share * model.num_local_experts * model.expert_params,
        "shared_experts": model.unrouted_params,
    }
    for operation, weights in expected.items():
        found = stored.get(operation, Stored()).weights
        if found != weights:
            raise CheckpointError(
                f"{what} has {found} weights for {operation}, and by the sizes in its metadata {weights:.0f}; convert "
                "the model anew."
            )


def _bytes_per_weight(what: str, stored: Mapping[str, Stored], model: ModelConfig) -> Formats:
    """Bytes of a layer's operations per weight that they are charged for, of a model of such layers."""
    kept = model.moe_share * model.kept_router_params
    vectors = model.router_vectors + model.choice_vectors
    charged = {
        "qkv": model.attention_in_params + model.attention_vectors + model.norm_size,
        "out_proj": model.attention_out_params + model.out_vectors,
        "route": model.norm_size + model.moe_share * (model.router_params + vectors) - kept,
        "experts": model.moe_share * (model.num_local_experts * model.expert_params + model.expert_vectors),
        "shared_experts": model.unrouted_params,
    }
    found = []
    for operation, weights in charged.items():
        size = stored.get(operation, Stored()).bytes - (kept * DTYPE_BYTES["fp32"] if operation == "route" else 0.0)
        if weights and size <= 0:
            raise CheckpointError(f"{what} has too few bytes for {operation}; convert the model anew.")
        if weights:
            found.append((operation, size / weights))
    return tuple(found)


def read_gguf(path: Path) -> GgufModel:
    """The model in a GGUF file; only its header is read, and the headers of its other parts beside it.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, the architecture, a tensor or a type of weights is not understood, or the
        package `gguf` is missing.
    """
    return described(read_header(path))


def described(header: Header) -> GgufModel:
    """The model that a header describes.

    Raises
    ------
    CheckpointError
        If the architecture or a tensor is not understood, or a size is missing that every model has.
    """
    config = config_of(header)
    keys_and_values = config.get("qk_nope_head_dim", 1), config.get("v_head_dim", 1)
    contents = contents_of(header, config["num_hidden_layers"], keys_and_values)
    return GgufModel(header.name, config, contents)
