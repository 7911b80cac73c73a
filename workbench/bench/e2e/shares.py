"""Shares of the cores' read and multiply rates that an engine's speed takes: MoE-CAP's S-MBU and S-MFU."""

from __future__ import annotations

from typing import NamedTuple

from workbench.bench.moe.roofs import Roofs
from workbench.core.units import QUANTISED, WEIGHT_BYTES
from workbench.models import ModelConfig
from workbench.perfmodels.coverage import uniform_coverage
from workbench.perfmodels.moe_cap import kv_read_bytes, smbu, smfu, token_flops

_ROUNDED = {**{form: WEIGHT_BYTES[form] for form in QUANTISED}, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Bytes of a weight; in GGUF's formats with the scale of 32."""


class Shares(NamedTuple):
    """Shares of the roofs that an engine's speed takes at least [1].

    Attributes
    ----------
    reading : float
        Weights and KV cache that the decodes of all requests read together, once for each new token.
    multiplying : float
        The products of every token, prompts included.
    """

    reading: float
    multiplying: float

    @classmethod
    def of(
        cls, model: ModelConfig, prompts: list[list[int]], new: int, option: str, seconds: float, roofs: Roofs
    ) -> Shares:
        """Of an engine that serves prompts with `new` tokens each in so many seconds.

        `option` is the format of the routed experts where the engine rounds them, also in the words of GGUF; else they
        have the model's own.
        """
        requests = len(prompts)
        tokens = sum(map(len, prompts))
        context = tokens / requests + new / 2
        share = uniform_coverage(requests, experts=model.num_local_experts, top_k=model.num_experts_per_tok)
        routed = model.routed_params * _ROUNDED[option] if option in _ROUNDED else model.routed_bytes
        activated = model.always_bytes + float(share) * routed
        reading = smbu(activated, kv_read_bytes(model, requests, context), seconds / new, roofs.read)
        rate = (tokens + requests * (new - 1)) / seconds
        return cls(float(reading), float(smfu(rate, token_flops(model, context), roofs.multiply)))
