"""Numeric cases of MoE-CAP, KTransformers and Layered Prefill, each mapped to a call of the public API on its inputs.

A case whose expectation is a sentence returns whether it is true; one with a band may return several values, all of
which belong in it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from workbench.catalogue import data_path
from workbench.perfmodels import coverage, ktransformers, layered_prefill, moe_cap
from workbench.perfmodels.architecture import architectures, from_hf
from workbench.perfmodels.cap_diagram import fits, requirement
from workbench.perfmodels.ktransformers import LayerTimes
from workbench.perfmodels.prefill_queue import Arrivals, IterationTime, Served, Slo, attainment, serve
from workbench.processors import processors

Inputs = dict[str, Any]
Answer = float | bool | str | list[float]

SEEDS, REQUESTS = range(6), 400
"""Chunked prefill at 1.3 requests/s is near saturation and noisy: means over several runs (SPEC 7)."""


@cache
def published(paper: str) -> dict[str, Any]:
    """Figures that a paper prints, from the data that ships with the project."""
    return tomllib.loads(data_path(f"catalogue/published/{paper}.toml").read_text(encoding="utf-8"))


@cache
def served(dataset: str, rate: float, layered: bool, time: IterationTime) -> tuple[Served, ...]:
    """One run per seed of Qwen3-30B-A3B under the measured coverage."""
    lengths = published("layered_prefill")["lengths"][dataset]
    prompt, output = ((lengths[part]["mean"], lengths[part]["std"]) for part in ("prompt", "output"))
    draws = [Arrivals.draw(rate, REQUESTS, prompt=prompt, output=output, seed=seed) for seed in SEEDS]
    model = architectures["qwen3-30b-a3b"]
    return tuple(serve(draw, model, time, coverage.measured_coverage, layered=layered) for draw in draws)


def iteration_time(given: Inputs | None = None) -> IterationTime:
    """The calibrated time of an iteration, or that of a case."""
    table = published("layered_prefill")["iteration_time"]
    given = given or {}
    return IterationTime(
        given.get("bw", table["bandwidth"]), given.get("ct", table["per_token"]), given.get("c0", table["fixed"])
    )


def end_to_end(given: Inputs, *, layered: bool) -> float:
    runs = served("arxiv", given["rate"], layered, iteration_time(given))
    return float(np.mean([run.end_to_end.mean() for run in runs]))


def tbt_ms(given: Inputs, *, layered: bool) -> float:
    runs = served("arxiv", given["rate"], layered, iteration_time())
    return 1e3 * float(np.mean([run.gaps.mean() for run in runs]))


def sharegpt_reduction(given: Inputs) -> float:
    chunked, layered = (served("sharegpt", given["rate"], kind, iteration_time()) for kind in (False, True))
    pairs = zip(layered, chunked, strict=True)
    return -float(np.mean([layered_prefill.relative_change(a.expert_bytes, b.expert_bytes) for a, b in pairs]))


def energy_change(given: Inputs) -> float:
    rate = published("layered_prefill")["arxiv_at_1_3"]["rate"]
    energy = layered_prefill.EnergyModel(given["P_static"], given["e_byte_pJ"] * 1e-12, given["e_flop_pJ"] * 1e-12)
    model = architectures["qwen3-30b-a3b"]
    chunked, layered = (
        np.mean([run.joules_per_token(energy, model) for run in served("arxiv", rate, kind, iteration_time())])
        for kind in (False, True)
    )
    return float(layered_prefill.relative_change(layered, chunked))


def fig5_phi(given: Inputs) -> bool:
    """A sibling of Phi-3.5-MoE of 40 GB whose active share is the case's."""
    point = moe_cap.required_bandwidth(40e9 * given["ratio"], 0.0, 0.0125)
    return bool(point < processors["rtx-a6000"].bandwidth)


def fig7(given: Inputs) -> bool:
    """Both models miss the target: the demand, made practical by the measured S-MBU, leaves the A6000's box."""
    box, text = processors["rtx-a6000"], published("moe_cap")["measured_tpot"]
    outside = []
    for name, milliseconds in zip(text["models"], given["ms"], strict=True):
        model = architectures[name]
        share = coverage.uniform_coverage(64, experts=model.experts, top_k=model.top_k)
        read = moe_cap.activated_bytes(model, share), moe_cap.kv_read_bytes(model, 64, text["context"])
        reached = moe_cap.smbu(*read, milliseconds / 1e3, box.bandwidth)
        needed = requirement(model, batch=64, context=text["context"], tpot=text["target"], coverage=share)
        outside.append(not fits(needed.practical(smbu=reached, smfu=1.0), box).bandwidth)
    return all(outside)


def full_experts(given: Inputs) -> float:
    config = {
        "num_hidden_layers": given["L"],
        "num_experts": given["E"],
        "hidden_size": given["h"],
        "moe_intermediate_size": given["hi"],
        "num_experts_per_tok": 1,
        "num_attention_heads": 1,
        "vocab_size": 1,
        "dtype": "bfloat16",
    }
    return from_hf(config, name="case").routed_bytes


def toy_chain(given: Inputs) -> list[float]:
    """In exact fractions, since the case allows no rounding."""
    experts = [lambda x, weight=Fraction(tenths, 10): weight * x for tenths in (4, 3, 2, 1)]
    layers = given["L"]
    shared = [lambda x: x / 2] * layers
    outputs = ktransformers.deferral_outputs(Fraction(1), shared, [experts] * layers, deferred=given["D"])
    return [float(value) for value in outputs]


def profile(deferred: Inputs) -> LayerTimes:
    """The layer that the paper profiled; a case's own shares instead where it has some."""
    table = published("ktransformers")["layer"]
    measured = LayerTimes.from_utilisation(
        cpu=table["cpu"], gpu=table["gpu"], shared=table["shared_of_gpu"], idle=table["idle"]
    )
    renamed = {"attention": "A", "sync": "x", "routed": "R"}
    return replace(measured, **{field: deferred[key] for field, key in renamed.items() if key in deferred})


def reduction(given: Inputs) -> float:
    return float(ktransformers.time_reduction(profile(given), given["D"], top_k=given.get("k", 8)))


def speedups(given: Inputs) -> list[float]:
    gain = ktransformers.time_reduction(profile({}), 3, top_k=8)
    return [float(ktransformers.end_to_end_speedup(gain, outside)) for outside in given["non_moe_fraction"]]


def identity(given: Inputs) -> float:
    shared = given["overlap"] / given["gpu"]
    times = LayerTimes.from_utilisation(cpu=given["cpu"], gpu=given["gpu"], shared=shared, idle=given["idle"])
    return float(ktransformers.layer_time(times, 0, top_k=8))


def shared_share(given: Inputs) -> float:
    return LayerTimes.from_utilisation(cpu=1.0, gpu=given["gpu"], shared=given["frac"], idle=0.0).shared


def distinct(given: Inputs) -> float:
    return given["E"] * float(coverage.uniform_coverage(given["B"], experts=given["E"], top_k=given["k"]))


def groups(given: Inputs) -> float:
    return float(layered_prefill.layer_groups(given["L"], architectures["qwen3-30b-a3b"].layers))


def work_per_iteration(given: Inputs) -> float:
    layers = architectures["qwen3-30b-a3b"].layers
    sizes = [end - start for start, end in layered_prefill.group_bounds(layers, given["G"])]
    return given["L"] * float(np.mean(sizes)) / (512 * layers)


def change(given: Inputs) -> float:
    return float(layered_prefill.relative_change(given["b"], given["a"]))


def skew(given: Inputs) -> bool:
    measured = np.asarray(coverage.measured_coverage(given["B"]))
    return bool(np.all(measured <= coverage.uniform_coverage(given["B"], experts=128, top_k=8)))


def ratio(given: Inputs) -> float:
    return float(layered_prefill.iteration_ratio(given["G"], given["B"], coverage.measured_coverage))


COMPUTE: dict[str, Callable[[Inputs], Answer]] = {
    "cap.distinct.mixtral.4": distinct,
    "cap.distinct.mixtral.64": distinct,
    "cap.fig2.bs1": lambda x: (
        float(moe_cap.required_bandwidth(x["active_B"] * x["bytes_per_param"] * 1e9, x["const_GB"] * 1e9, x["TPOT"]))
        / 1e9
    ),
    "cap.fig3a": lambda x: float(moe_cap.overestimate(x["total"], x["active"])),
    "cap.fig3c": lambda x: float(moe_cap.overestimate(x["total"], x["active"])),
    "cap.fig5.mixtral": lambda x: bool(
        moe_cap.required_bandwidth(x["active"] * x["dtype"], 0.0, x["TPOT"]) > processors["a100-80gb-pcie"].bandwidth
    ),
    "cap.fig5.phi40": fig5_phi,
    "cap.fig7": fig7,
    "cap.practical": lambda x: float(moe_cap.practical(x["theoretical"], x["smbu"])),
    "cap.smbu.toy": lambda x: float(
        moe_cap.smbu(
            moe_cap.activated_size(x["n_layer"], x["S_attn"], x["S_expert"], sum(x["active"])),
            x["S_KV"],
            x["TPOT"],
            x["Bpeak"],
        )
    ),
    "kt.Dmin": lambda x: float(ktransformers.experts_to_defer(x["A"] + x["x"], x["r"], top_k=8)),
    "kt.ari4.DS2": lambda x: float(ktransformers.switch_prompt(x["E"], x["k"])),
    "kt.ari4.QW2": lambda x: float(ktransformers.switch_prompt(x["E"], x["k"])),
    "kt.cpu.D3": lambda x: float(ktransformers.layer_utilisation(profile({}), x["D"], top_k=8)[0]),
    "kt.defer.toy.D1": toy_chain,
    "kt.defer.toy.D2": toy_chain,
    "kt.e2e": speedups,
    "kt.gpu.D3": lambda x: float(ktransformers.layer_utilisation(profile({}), x["D"], top_k=8)[1]),
    "kt.heur.DS2": lambda x: float(ktransformers.experts_to_defer(x["ratio"], 1.0, top_k=x["k"])),
    "kt.heur.DS3int4": lambda x: float(ktransformers.experts_to_defer(x["ratio"], 1.0, top_k=x["k"])),
    "kt.identity": identity,
    "kt.overlap": shared_share,
    "kt.reduction.D2": reduction,
    "kt.reduction.D4": reduction,
    "kt.switch.1": lambda x: ktransformers.choose_kernel(x["tokens_per_expert"]).kernel.value,
    "kt.switch.5": lambda x: ktransformers.choose_kernel(x["tokens_per_expert"]).kernel.value,
    "lp.G.1": groups,
    "lp.G.2340": groups,
    "lp.G.24576": groups,
    "lp.G.512": groups,
    "lp.G.513": groups,
    "lp.e2e": change,
    "lp.energy.same": energy_change,
    "lp.full": full_experts,
    "lp.little": lambda x: float(layered_prefill.mean_decode_batch(x["rate"], x["out"], x["tbt"])),
    "lp.power": lambda x: float(layered_prefill.mean_power(x["mJ"] / 1e3, x["rate"], x["tok"])),
    "lp.ratio.18.40": ratio,
    "lp.ratio.5.128": ratio,
    "lp.sim.chunked.e2e": lambda x: end_to_end(x, layered=False),
    "lp.sim.chunked.tbt": lambda x: tbt_ms(x, layered=False),
    "lp.sim.layered.e2e": lambda x: end_to_end(x, layered=True),
    "lp.sim.layered.tbt": lambda x: tbt_ms(x, layered=True),
    "lp.sim.sg.red": sharegpt_reduction,
    "lp.skew": skew,
    "lp.slo.toy": lambda x: attainment(x["ttft"], x["max_tbt"], Slo(*x["slo"])),
    "lp.t7.ax": change,
    "lp.t8.g": change,
    "lp.t8.q": change,
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
