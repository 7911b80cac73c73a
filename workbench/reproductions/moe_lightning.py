"""Computation of MoE-Lightning's printed values: ratios of its tables, its optimiser's policies, the roofline."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels.moe_lightning import Job, Mode, Policy, estimate
from workbench.perfmodels.moe_lightning.hrm import (
    attention_intensity,
    experts_intensity,
    first_turning_point,
    local_performance,
)
from workbench.perfmodels.moe_lightning.policy_search import Found, search, with_shares
from workbench.reproductions.drawn import drawn
from workbench.reproductions.rows import Inputs, Value, published

MODEL = models["mixtral-8x7b"]
FP16 = 2


def _figure(place: list[str | int]) -> float:
    """A published figure, by its place in the paper's tables."""
    found: Any = published("moe_lightning")
    for step in place:
        found = found[step]
    return float(found)


def _ratio(given: Inputs) -> Value:
    return _figure(given["of"]) / _figure(given["over"])


def _best_ratio(given: Inputs) -> Value:
    """Largest ratio of one system to another, over the settings and output lengths."""
    tables = [published("moe_lightning")["mtbench"][setting] for setting in given["settings"]]
    pairs = chain(*(zip(table[given["of"]], table[given["over"]], strict=True) for table in tables))
    return float(max(own / other for own, other in pairs))


def _scaling(given: Inputs) -> list[float]:
    table = published("moe_lightning")["mtbench"]
    few, many = (table[setting][given["system"]] for setting in (given["few"], given["many"]))
    return [more / less for less, more in zip(few, many, strict=True)]


def _most_scaling(given: Inputs) -> Value:
    return max(_scaling(given))


def _least_scaling(given: Inputs) -> Value:
    return min(_scaling(given))


def _batch_ratio(given: Inputs) -> Value:
    """Factor by which one batch is smaller than another, both given as mu and N/mu."""
    micro, count = given["of"]
    small = int(micro) * int(count)
    micro, count = given["over"]
    large = int(micro) * int(count)
    return large / small


# ------------------------------------------------------------------------------------------------------ the optimiser


def job(setting: str, prompt: int, output: int) -> Job:
    """A job on the machine that the authors' optimiser assumes."""
    return Job(MODEL, machines[f"moe-lightning-{setting}-optimiser"], prompt, output, "fp16")


def _found(given: Inputs, mode: Mode) -> Found:
    where = job(given["setting"], given["prompt"], given["output"])
    if "host_gib" in given:
        cpu = replace(where.machine.cpu, memory=given["host_gib"] * 2**30)
        where = replace(where, machine=replace(where.machine, cpu=cpu))
    if "link" in given:
        where = replace(where, machine=where.machine.limit(link=given["link"]))
    return search(where, mode)


def _micro_batch(given: Inputs) -> Value:
    return float(_found(given, Mode.ARTIFACT).policy.micro_batch)


def _micro_batches(given: Inputs) -> Value:
    policy = _found(given, Mode.ARTIFACT).policy
    return float(policy.batch / policy.micro_batch)


def _optimiser(given: Inputs) -> Value:
    """The figures that the optimiser prints about its best policy."""
    found = _found(given, Mode.ARTIFACT)
    answers = {
        "step": found.estimate.step,
        "layer": found.estimate.layer.seconds,
        "tok_s": found.estimate.gen_tok_s,
        "weights_on_gpu": found.policy.weights_on_gpu,
        "gpu_peak": found.gpu_peak / 2**30,
        "cpu_peak": found.cpu_peak / 2**30,
    }
    return float(answers[given["figure"]])


def _cpu_attention_gpu_experts(given: Inputs) -> Value:
    policy = _found(given, Mode.PAPER).policy
    return bool(policy.gpu_attention == 0 and policy.gpu_experts == 1)


def _policy(given: Inputs) -> tuple[Job, Policy]:
    """The published policy for a job on the machine that the optimiser assumes."""
    assumed = job(given["setting"], given["prompt"], given["output"])
    micro, count = given["policy"]
    return assumed, with_shares(assumed, Policy(micro * count, micro), Mode.ARTIFACT)


def _predicted(given: Inputs) -> Value:
    """Output tokens per second of the published policy with measured rates, by the model's FULL mode."""
    assumed, policy = _policy(given)
    measured = replace(assumed, machine=machines[f"moe-lightning-{given['setting']}"])
    return float(estimate(measured, policy, Mode.FULL).gen_tok_s)


def _promised(given: Inputs) -> Value:
    """Output tokens per second that the authors' optimiser predicts for the published policy."""
    return float(estimate(*_policy(given), Mode.ARTIFACT).gen_tok_s)


# ----------------------------------------------------------------------------------------------------- the roofline


def _turning_point() -> float:
    plot = published("moe_lightning")["roofline"]
    rates = {"far_flops": plot["cpu_flops"], "far_bandwidth": plot["cpu_bandwidth"]}
    return float(first_turning_point(**rates, link=plot["link"]))


def _attention_belongs_on_the_cpu(given: Inputs) -> Value:
    intensity = attention_intensity(MODEL.num_attention_heads, MODEL.num_key_value_heads, given["kv_bytes"])
    return bool(intensity < _turning_point())


def _link_roof_is_above_the_cpus(given: Inputs) -> Value:
    plot = published("moe_lightning")["roofline"]
    intensity = experts_intensity(given["tokens"], MODEL.num_local_experts, MODEL.num_experts_per_tok, FP16)
    own = local_performance(intensity, flops=plot["cpu_flops"], bandwidth=plot["cpu_bandwidth"])
    return bool(intensity * plot["link"] > own)


def _attention_gain(given: Inputs) -> Value:
    """Measured time of moving the KV cache over that of CPU attention: the smallest or the largest of all sizes."""
    table = published("moe_lightning")["fig9"]
    pairs = zip(chain(*table["kv_transfer"]), chain(*table["cpu_attention"]), strict=True)
    ratios = sorted(moved / attended for moved, attended in pairs)
    return float(ratios[0] if given["which"] == "smallest" else ratios[-1])


def _experts_seconds(given: Inputs) -> Value:
    """Time to read the experts of a layer at the bandwidth of the data sheet [ms]."""
    where = machines[given["machine"]]
    return 1e3 * job("s2", 77, 32).experts_bytes / where.gpu.bandwidth


COMPUTE = {
    "hrm.policy.mu": _micro_batch,
    "hrm.policy.mu.t4": _micro_batch,
    "hrm.policy.mu.t5": _micro_batch,
    "hrm.policy.count": _micro_batches,
    "hrm.policy.count.t4": _micro_batches,
    "hrm.policy.count.t5": _micro_batches,
    "hrm.printed": _optimiser,
    "hrm.placement": _cpu_attention_gpu_experts,
    "hrm.table3": drawn,
    "hrm.tok_s": _predicted,
    "hrm.tok_s.t4": _predicted,
    "hrm.tok_s.t5": _predicted,
    "hrm.promised": _promised,
    "hrm.promised.t4": _promised,
    "hrm.promised.t5": _promised,
    "hrm.t4": _ratio,
    "hrm.t5": _ratio,
    "hrm.t4.batch": _batch_ratio,
    "hrm.e2e": _ratio,
    "hrm.e2e.best": _best_ratio,
    "hrm.e2e.tp.most": _most_scaling,
    "hrm.e2e.tp.least": _least_scaling,
    "hrm.fig4": _attention_belongs_on_the_cpu,
    "hrm.fig5.large": _link_roof_is_above_the_cpus,
    "hrm.fig9.gain": _attention_gain,
    "hrm.fig9.experts": _experts_seconds,
}
