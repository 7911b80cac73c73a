"""Numeric cases of MoE-CAP, KTransformers and Layered Prefill that no paper prints: closed forms and our own rules."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from workbench.core.latency import Slo, attainment
from workbench.models import model as model_of
from workbench.models import models
from workbench.perfmodels import coverage, ktransformers, layered_prefill, moe_cap
from workbench.perfmodels.ktransformers import LayerTimes
from workbench.scheduler.layered_prefill import group_bounds

Inputs = dict[str, Any]
Answer = float | bool | str | list[float]


def full_experts(given: Inputs) -> float:
    config = {
        "num_hidden_layers": given["L"],
        "num_experts": given["E"],
        "hidden_size": given["h"],
        "moe_intermediate_size": given["hi"],
        "num_experts_per_tok": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": 1,
        "vocab_size": 1,
        "dtype": "bfloat16",
    }
    return model_of(config).routed_bytes


def toy_chain(given: Inputs) -> list[float]:
    """In exact fractions, since the case allows no rounding."""
    experts = [lambda x, weight=Fraction(tenths, 10): weight * x for tenths in (4, 3, 2, 1)]
    layers = given["L"]
    shared = [lambda x: x / 2] * layers
    outputs = ktransformers.deferral_outputs(Fraction(1), shared, [experts] * layers, deferred=given["D"])
    return [float(value) for value in outputs]


def identity(given: Inputs) -> float:
    shared = given["overlap"] / given["gpu"]
    times = LayerTimes.from_utilisation(cpu=given["cpu"], gpu=given["gpu"], shared=shared, idle=given["idle"])
    return float(ktransformers.layer_time(times, 0, top_k=8))


def distinct(given: Inputs) -> float:
    return given["E"] * float(coverage.uniform_coverage(given["B"], experts=given["E"], top_k=given["k"]))


def groups(given: Inputs) -> float:
    return float(layered_prefill.layer_groups(given["L"], models["qwen3-30b-a3b"].num_hidden_layers))


def work_per_iteration(given: Inputs) -> float:
    layers = models["qwen3-30b-a3b"].num_hidden_layers
    sizes = [end - start for start, end in group_bounds(layers, given["G"])]
    return given["L"] * float(np.mean(sizes)) / (512 * layers)


def ratio(given: Inputs) -> float:
    return float(layered_prefill.iteration_ratio(given["G"], given["B"], coverage.measured_coverage))


COMPUTE: dict[str, Callable[[Inputs], Answer]] = {
    "cap.distinct.mixtral.4": distinct,
    "cap.distinct.mixtral.64": distinct,
    "cap.smbu.toy": lambda x: float(
        moe_cap.smbu(
            moe_cap.activated_size(x["n_layer"], x["S_attn"], x["S_expert"], sum(x["active"])),
            x["S_KV"],
            x["TPOT"],
            x["Bpeak"],
        )
    ),
    "kt.ari4.DS2": lambda x: float(ktransformers.switch_prompt(x["E"], x["k"])),
    "kt.ari4.QW2": lambda x: float(ktransformers.switch_prompt(x["E"], x["k"])),
    "kt.defer.toy.D1": toy_chain,
    "kt.defer.toy.D2": toy_chain,
    "kt.heur.DS2": lambda x: float(ktransformers.experts_to_defer(x["ratio"], 1.0, top_k=x["k"])),
    "kt.heur.DS3int4": lambda x: float(ktransformers.experts_to_defer(x["ratio"], 1.0, top_k=x["k"])),
    "kt.identity": identity,
    "lp.G.1": groups,
    "lp.G.2340": groups,
    "lp.G.24576": groups,
    "lp.G.513": groups,
    "lp.full": full_experts,
    "lp.little": lambda x: float(layered_prefill.mean_decode_batch(x["rate"], x["out"], x["tbt"])),
    "lp.power": lambda x: float(layered_prefill.mean_power(x["mJ"] / 1e3, x["rate"], x["tok"])),
    "lp.ratio.18.40": ratio,
    "lp.ratio.5.128": ratio,
    "lp.slo.toy": lambda x: attainment(x["ttft"], x["max_tbt"], Slo(*x["slo"])),
    "lp.uniform.2": lambda x: 100 * distinct(x) / x["E"],
    "lp.uniform.32": lambda x: 100 * distinct(x) / x["E"],
    "lp.uniform.8": lambda x: 100 * distinct(x) / x["E"],
    "lp.work": work_per_iteration,
}

_INJECTION = "rules that match modules by name belong to the injection into Hugging Face models, which is not built yet"

OPEN: dict[str, str] = {
    "kt.yaml.lm_head": _INJECTION,
    "kt.yaml.model.layers.0.mlp.gate_proj": _INJECTION,
}
