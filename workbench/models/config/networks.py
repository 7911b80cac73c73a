"""Sizes of feed-forward networks: routed and shared experts, routers, dense networks."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.models.config.attention import AttentionSizes
from workbench.models.layers import Counted


class NetworkSizes(AttentionSizes):
    """Sizes of one layer's experts and dense networks."""

    @property
    def router_vectors(self) -> int:
        """Elements of the bias of one MoE layer's router."""
        return self.num_local_experts if self.family.router_bias and self.counted is None else 0

    @property
    def choice_vectors(self) -> int:
        """Elements of what one MoE layer's router adds for the choice."""
        return self.num_local_experts if self.family.choice_bias else 0

    @property
    def kept_router_params(self) -> int:
        """Elements of one MoE layer's router that stay in fp32 whatever the precision of the others."""
        return self.choice_vectors + (self.router_params if self.family.kept_router else 0)

    @property
    def expert_vectors(self) -> int:
        """Elements of the biases of one MoE layer's routed experts."""
        if self._with_experts is not None:
            return self._with_experts.expert_vectors
        stacks = (*self.family.tensors.gate_up, *self.family.tensors.down_stack)
        biased = any(stack.bias for stack in stacks)
        return self.num_local_experts * (2 * self.expert_width + self.hidden_size) if biased else 0

    @property
    def vectors(self) -> float:
        """Elements of the whole model that `params` leaves out: biases, sinks and the norms of heads."""
        if self._with_experts is not None:
            return 0
        layers = self.num_hidden_layers
        per_layer = self.attention_vectors + self.out_vectors + 2 * (self.norm_size - self.hidden_size)
        per_layer += self.num_attention_heads if self.family.sinks else 0
        per_moe = self.router_vectors + self.choice_vectors + self.expert_vectors
        head = self.norm_size - self.hidden_size + (self.vocab_size if self.lm_head_bias else 0)
        return layers * per_layer + self.moe_layers * per_moe + head

    @cached_property
    def _with_experts(self) -> Counted | None:
        """Weights of a layer with experts, if layers were counted tensor by tensor."""
        if not self.unlike:
            return self.counted
        found = (model.counted for model, _ in self.unlike if not model.dense_layers)
        return next(found, None)

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.first_k_dense_replace

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @cached_property
    def moe_share(self) -> float:
        """Share of the layers that have routed experts."""
        return self.moe_layers / self.num_hidden_layers

    @property
    def expert_width(self) -> int:
        """Inner width of one routed expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one expert: gate, up and down projection."""
        if self._with_experts is not None:
            return self._with_experts.expert
        return 3 * self.hidden_size * self.expert_width

    @cached_property
    def shared_params(self) -> int:
        """Parameters of all shared experts of one MoE layer, and of their gate."""
        if self._with_experts is not None:
            return self._with_experts.unrouted if self.moe_layers else 0
        gate = self.hidden_size if self.family.shared_gate and self.shared_expert_intermediate_size else 0
        return 3 * self.hidden_size * self.shared_expert_intermediate_size + gate

    @property
    def dense_params(self) -> int:
        """Parameters of the feed-forward network of one dense layer; 0 if there is none."""
        if self.unlike:
            dense = [(model.dense_params, count) for model, count in self.unlike if model.dense_layers]
            return round(sum(each * count for each, count in dense) / sum(count for _, count in dense)) if dense else 0
        if self.counted is not None:
            return self.counted.unrouted if self.dense_layers else 0
        return 3 * self.hidden_size * self.intermediate_size if self.dense_layers else 0

    @cached_property
    def unrouted_params(self) -> float:
        """Parameters of shared experts and dense networks, which every token passes; mean over the layers."""
        if self.unlike:
            return self._mean("unrouted_params")
        return (self.moe_layers * self.shared_params + self.dense_layers * self.dense_params) / self.num_hidden_layers

    @cached_property
    def router_params(self) -> int:
        """Parameters of the router of one MoE layer."""
        if self._with_experts is not None:
            return self._with_experts.route
        return self.num_local_experts * self.hidden_size

    def touched_experts(self, tokens: float, each: int | None = None) -> float:
        """Expected number of distinct experts of a layer that `tokens` tokens are routed to.

        `each` is the number of experts per token that count; by default all chosen ones do. The coverage is
        interpolated in log2 of the tokens, proportional to them below its first entry, and constant above its last.
        """
        every = self.num_local_experts
        each = self.num_experts_per_tok if each is None else each
        if not self.coverage:
            missed: float = (1.0 - each / (every + self.idle_experts)) ** tokens
            return every * (1.0 - missed)
        tokens *= each / self.num_experts_per_tok
        points, shares = self._coverage_columns
        low = math.log2(max(tokens, self.coverage[0][0]))
        return every * min(tokens / self.coverage[0][0], 1.0) * float(np.interp(low, points, shares))

    @cached_property
    def _coverage_columns(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        tokens, shares = np.array(self.coverage).T
        return np.log2(tokens), shares

    @property
    def computed_share(self) -> float:
        """Share of a token's choices that are experts; the others compute nothing."""
        return self.num_local_experts / (self.num_local_experts + self.idle_experts)
