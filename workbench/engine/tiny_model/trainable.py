"""Mixtral's forward pass for training: the kernels of `engine/model/ops.py` on whole batches, differentiable."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from workbench.engine.loading.tensors import Tensors
from workbench.kernels import embed, fused_moe, prefill_attention, rms_norm, rope, rope_table, route
from workbench.models import ModelConfig


def shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every trained tensor: one layer's experts together, and Q, K and V."""
    hidden = model.hidden_size
    inner = model.intermediate_size
    experts = model.num_local_experts
    yield "embed", (model.vocab_size, hidden)
    for layer in range(model.num_hidden_layers):
        yield f"{layer}.attention_norm", (hidden,)
        yield f"{layer}.qkv", (model.q_size + 2 * model.kv_size, hidden)
        yield f"{layer}.out", (hidden, model.q_size)
        yield f"{layer}.moe_norm", (hidden,)
        yield f"{layer}.router", (experts, hidden)
        yield f"{layer}.gate_up", (experts, 2 * inner, hidden)
        yield f"{layer}.down", (experts, hidden, inner)
    yield "norm", (hidden,)
    yield "head", (model.vocab_size, hidden)


def draw(model: ModelConfig, seed: int) -> Tensors:
    """Initial weights: norms 1, the rest normal; matrices that add to the residual stream shrink with the depth."""
    generator = torch.Generator().manual_seed(seed)
    weights: Tensors = {}
    for name, shape in shapes(model):
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        spread = 0.5 if name == "embed" else shape[-1] ** -0.5
        if name.endswith((".out", ".down")):
            spread *= (2 * model.num_hidden_layers) ** -0.5
        weights[name] = spread * torch.randn(shape, generator=generator)
    return weights


def checkpoint_tensors(weights: Tensors, model: ModelConfig) -> Tensors:
    """The same weights under the names of a Hugging Face checkpoint."""
    made = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    made["lm_head.weight"] = weights["head"]
    for layer in range(model.num_hidden_layers):
        into = f"model.layers.{layer}"
        made[f"{into}.input_layernorm.weight"] = weights[f"{layer}.attention_norm"]
        made[f"{into}.post_attention_layernorm.weight"] = weights[f"{layer}.moe_norm"]
        made[f"{into}.self_attn.o_proj.weight"] = weights[f"{layer}.out"]
        projections = weights[f"{layer}.qkv"].split([model.q_size, model.kv_size, model.kv_size])
        for letter, projection in zip("qkv", projections, strict=True):
            made[f"{into}.self_attn.{letter}_proj.weight"] = projection
        made[f"{into}.block_sparse_moe.gate.weight"] = weights[f"{layer}.router"]
        for expert in range(model.num_local_experts):
            gate, up = weights[f"{layer}.gate_up"][expert].chunk(2)
            for key, matrix in (("w1", gate), ("w2", weights[f"{layer}.down"][expert]), ("w3", up)):
                made[f"{into}.block_sparse_moe.experts.{expert}.{key}.weight"] = matrix
    return {name: tensor.clone() for name, tensor in made.items()}


def trained_tensors(tensors: Tensors, model: ModelConfig) -> Tensors:
    """The inverse of `checkpoint_tensors`."""
    made = {"embed": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    made["head"] = tensors["lm_head.weight"]
    for layer in range(model.num_hidden_layers):
        of = {key.removeprefix(f"model.layers.{layer}."): tensor for key, tensor in tensors.items()}
        made[f"{layer}.attention_norm"] = of["input_layernorm.weight"]
        made[f"{layer}.moe_norm"] = of["post_attention_layernorm.weight"]
        made[f"{layer}.out"] = of["self_attn.o_proj.weight"]
        made[f"{layer}.qkv"] = torch.cat([of[f"self_attn.{letter}_proj.weight"] for letter in "qkv"])
        made[f"{layer}.router"] = of["block_sparse_moe.gate.weight"]
        experts = [f"block_sparse_moe.experts.{expert}" for expert in range(model.num_local_experts)]
        gate_up = [torch.cat((of[f"{expert}.w1.weight"], of[f"{expert}.w3.weight"])) for expert in experts]
        made[f"{layer}.gate_up"] = torch.stack(gate_up)
        made[f"{layer}.down"] = torch.stack([of[f"{expert}.w2.weight"] for expert in experts])
    return made


class Trainable:
    """The forward pass of one model.

    Shape letters: B sequences, S context, T = B S rows, M model dim, H query heads, K key-value heads, D head dim,
    E experts, F expert dim, V vocabulary.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._angles = rope_table(model.head_dim, model.max_position_embeddings, theta=model.rope_theta)

    def forward(self, weights: Tensors, tokens: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of some rows, and the imbalance of the experts.

        Parameters
        ----------
        weights : dict of Tensor
            Weights by the names of `shapes`.
        tokens : Tensor (B, S) int64
        rows : Tensor (R,) int64
            Rows among the B S rows whose logits are returned.

        Returns
        -------
        logits : Tensor (R, V)
        imbalance : Tensor ()
            Mean over the layers of E times the sum over experts of (share of the rows) x (mean router probability): 1
            if all experts are used equally.
        """
        x = embed(tokens.reshape(-1), weights["embed"])
        imbalance = torch.zeros(())
        for layer in range(self._model.num_hidden_layers):
            own = {key.partition(".")[2]: w for key, w in weights.items() if key.startswith(f"{layer}.")}
            x = x + self._attention(self._norm(x, own["attention_norm"]), own, tokens.shape)
            routed, uneven = self._moe(self._norm(x, own["moe_norm"]), own)
            x = x + routed
            imbalance = imbalance + uneven
        last = self._norm(x[rows], weights["norm"])
        return functional.linear(last, weights["head"]), imbalance / self._model.num_hidden_layers

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=self._model.rms_norm_eps)

    def _attention(self, h: torch.Tensor, weights: Tensors, shape: torch.Size) -> torch.Tensor:
        """h (T, M) of sequences of one length -> (T, M)."""
        model = self._model
        projected = functional.linear(h, weights["qkv"]).unflatten(1, (-1, model.head_dim))
        q, k, v = projected.split([model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads], 1)
        positions = torch.arange(shape[1]).repeat(shape[0])
        starts = torch.arange(0, len(h) + 1, shape[1])
        q = rope(q, positions, self._angles)
        k = rope(k, positions, self._angles)
        return functional.linear(prefill_attention(q, k, v, starts).flatten(1), weights["out"])

    def _moe(self, h: torch.Tensor, weights: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """h (T, M) -> routed (T, M), and the imbalance of this layer."""
        experts = self._model.num_local_experts
        logits = functional.linear(h, weights["router"])
        chosen = route(logits, self._model.num_experts_per_tok, renormalise=True)
        routed = fused_moe(h, (weights["gate_up"], weights["down"]), *chosen)
        share = torch.bincount(chosen.ids.flatten(), minlength=experts) / chosen.ids.numel()
        return routed, experts * (share * logits.softmax(dim=-1).mean(dim=0)).sum()
