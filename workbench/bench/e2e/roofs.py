"""Rates of reading and multiplying, and the shares of both that a load takes at least: MoE-CAP's S-MBU and S-MFU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from workbench.core.units import QUANTISED, WEIGHT_BYTES
from workbench.hardware import usable_cores
from workbench.kernels import multiply_add, read_memory
from workbench.models import ModelConfig
from workbench.perfmodels.coverage import uniform_coverage
from workbench.perfmodels.moe_cap import kv_read_bytes, smbu, smfu, token_flops

_POOL = 1 << 28
"""Bytes that are read at once."""
_SIDE = 1024
"""Rows and columns of the product."""
_TIMES = 5


class Roofs(NamedTuple):
    """Rates of all cores of this process: reading [B/s], and multiplying in fp32 or bf16 [FLOP/s]."""

    read: float
    multiply: float

    @classmethod
    def measured(cls) -> Roofs:
        """The best of a few measurements: reading in order, and multiply-adds or torch's product in bf16."""
        cores = usable_cores()
        pool = np.ones(_POOL, np.int8)
        read = _POOL / _least(partial(read_memory, pool, threads=cores))
        one = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
        rates = [2 * _SIDE**3 / _least(lambda: one @ one)]
        for bf16 in (False, True):
            add = partial(multiply_add, threads=cores, bf16=bf16)
            rates.append(add() / _least(add))
        return cls(read, max(rates))

    def or_better(self, other: Roofs) -> Roofs:
        """The higher rate of each."""
        return Roofs(*map(max, zip(self, other, strict=True)))


class Shares(NamedTuple):
    """Shares of the roofs that a load takes at least at an engine's speed [1].

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

        `option` is the format of the routed experts where the engine rounds them; else they have the model's own.
        """
        requests = len(prompts)
        tokens = sum(map(len, prompts))
        context = tokens / requests + new / 2
        share = uniform_coverage(requests, experts=model.num_local_experts, top_k=model.num_experts_per_tok)
        routed = model.routed_params * WEIGHT_BYTES[option] if option in QUANTISED else model.routed_bytes
        activated = model.always_bytes + float(share) * routed
        reading = smbu(activated, kv_read_bytes(model, requests, context), seconds / new, roofs.read)
        rate = (tokens + requests * (new - 1)) / seconds
        return cls(float(reading), float(smfu(rate, token_flops(model, context), roofs.multiply)))


def _least(call: Callable[[], object]) -> float:
    """The shortest time of a few calls [s]."""
    seen = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        call()
        seen.append(time.perf_counter() - begin)
    return min(seen)
