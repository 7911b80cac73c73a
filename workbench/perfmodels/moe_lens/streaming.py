"""Inputs of MoE-Lens' equations from a model and a machine: pass of weights, the GPU's limit, KV bytes per token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.core.units import parse_bytes
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.perfmodels.domain import Number, caches_alike, plain
from workbench.perfmodels.moe_lens.stage1 import gpu_tokens_per_second, stage1, tokens_per_pass, weight_pass_seconds
from workbench.perfmodels.moe_lens.stage2 import Eq12, Stage2, separated_tok_s, stage2


@dataclass(frozen=True)
class Streaming:
    """A model of which every weight crosses the link once per iteration.

    Attributes
    ----------
    pass_seconds : float
        delta, one pass of the weights [s].
    gpu_tok_s : float
        T_GPU [tokens/s].
    pass_tokens : float
        n_it, tokens that the GPU computes in that time [tokens/iteration].
    intensity : float
        I(1), GEMM work per byte of weights for each token that shares the pass [FLOP/B].
    kv_bytes_per_token : float
        KV cache of one token over all layers [B].
    """

    pass_seconds: float
    gpu_tok_s: float
    pass_tokens: float
    intensity: float
    kv_bytes_per_token: float

    def kv_tokens(self, capacity: str | float) -> float:
        """M: tokens that a KV cache of so many bytes, such as ``"70GB"``, holds."""
        return parse_bytes(capacity, what="KV capacity") / self.kv_bytes_per_token

    def stage1(self, prompt_len: Number, output_len: Number, capacity: str | float) -> Number:
        """Output tokens per second that Stage 1 allows with a KV cache of this size: T_max g / (p + g) [tokens/s].

        Raises
        ------
        ValueError
            As `moe_lens.stage1`, or if the capacity is no positive quantity.
        """
        processed = stage1(prompt_len, output_len, self.kv_tokens(capacity), self.pass_seconds, self.gpu_tok_s)
        return plain(np.asarray(processed * np.asarray(output_len) / (np.asarray(prompt_len) + output_len)))

    def stage2(
        self,
        prompt_len: Number,
        output_len: Number,
        requests: Number,
        capacity: str | float,
        *,
        block: int = 16,
        eq12: Eq12 = Eq12.MENDED,
    ) -> Stage2:
        """Stage 2's prediction for a job with a KV cache of this size, in blocks of so many tokens.

        Raises
        ------
        ValueError
            As `moe_lens.stage2`, or if the capacity is no positive quantity.
        """
        job = (prompt_len, output_len, requests, self._blocks(capacity, block))
        return stage2(*job, block=block, pass_seconds=self.pass_seconds, pass_tokens=self.pass_tokens, eq12=eq12)

    def separated(
        self, prompt_len: Number, output_len: Number, requests: Number, capacity: str | float, *, block: int = 16
    ) -> Number:
        """Output tokens per second of the same job in batches that first prefill and then decode [tokens/s].

        Raises
        ------
        ValueError
            As `moe_lens.separated_tok_s`, or if the capacity is no positive quantity.
        """
        job = (prompt_len, output_len, requests, self._blocks(capacity, block))
        return separated_tok_s(*job, block=block, pass_seconds=self.pass_seconds, pass_tokens=self.pass_tokens)

    def _blocks(self, capacity: str | float, block: int) -> float:
        return float(self.kv_tokens(capacity) // block)


def streaming(model: ModelConfig, machine: Machine, *, link: str | float | None = None) -> Streaming:
    """The quantities that Stages 1 and 2 start from.

        delta = Wm / B_IO,  T_GPU = C_GPU / F_tok,  n_it = T_GPU delta,  I(1) = FLOP per token / bytes of all layers

    Parameters
    ----------
    model : ModelConfig
        The model, whose weights, KV cache and GEMM have its own precision.
    machine : Machine
    link : str or float, optional
        B_IO [B/s], such as ``"32GB/s"``; the machine's own unless given.

    Raises
    ------
    ScenarioError
        If the GPU has no known GEMM rate in the model's precision, or layers do not keep the same KV cache.
    ValueError
        If the link is no positive quantity.

    Notes
    -----
    MoE-Lens, section 5. All parameters are streamed, embedding and head included, as the paper counts them.
    I(1) is Eq. 1 with the router, for layers of any shape; `moe_lens.intensity` holds for layers like Mixtral's.
    """
    caches_alike("MoE-Lens' model", model)
    rate = machine.link.h2d if link is None else parse_bytes(link, what="link")
    delta = float(weight_pass_seconds(model.weight_bytes, rate))
    limit = float(gpu_tokens_per_second(machine.gpu.flop_rate(model.dtype), model.flops_per_token()))
    layers = model.routed_bytes + model.always_bytes - model.head_bytes
    return Streaming(
        pass_seconds=delta,
        gpu_tok_s=limit,
        pass_tokens=float(tokens_per_pass(limit, delta)),
        intensity=2.0 * (model.active_params - model.head_params) / layers,
        kv_bytes_per_token=float(model.kv_bytes_per_token(model.dtype)),
    )
