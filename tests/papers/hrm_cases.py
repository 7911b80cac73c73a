"""MoE-Lightning's cases that the paper does not print: how each is computed from its inputs."""

from collections.abc import Callable
from typing import Any

from workbench.perfmodels.moe_lightning import Job, Mode, Policy, estimate
from workbench.perfmodels.moe_lightning.hrm import attention_intensity, balance_point, experts_intensity
from workbench.perfmodels.moe_lightning.policy_memory import gpu_peaks
from workbench.perfmodels.moe_lightning.policy_search import with_shares
from workbench.reproductions.moe_lightning import FP16, job
from workbench.reproductions.rows import published
from workbench.scheduler.token_balance import balance

PUBLISHED = published("moe_lightning")

Inputs = dict[str, Any]


def partition(inputs: Inputs) -> list[list]:
    """Micro-batches, and who waits."""
    names = {"micro_batches": "n_ub", "size": "ubs", "output_len": "gen", "cache": "cache"}
    found = balance(inputs["lens"], **{name: inputs[key] for name, key in names.items()})
    return [found.micro_batches, found.aborted]


def table_5(inputs: Inputs) -> tuple[Job, Policy]:
    """The policy of Table 5, with as many of the weights on the GPU as fit."""
    where = job("s1", PUBLISHED["mtbench"]["padded_len"], 128)
    return where, with_shares(where, Policy(inputs["N"], inputs["mu"]), Mode.ARTIFACT)


def measured_over_model(inputs: Inputs) -> float:
    where, policy = table_5(inputs)
    return PUBLISHED["table5"]["MoE-Lightning(p)"] / float(estimate(where, policy, Mode.ARTIFACT).gen_tok_s)


def gibibytes(inputs: Inputs) -> float:
    where, policy = table_5(inputs)
    return float(max(gpu_peaks(where, policy, Mode.ARTIFACT))) / 2**30


COMPUTE: dict[str, Callable[[Inputs], Any]] = {
    "hrm.P2.N": lambda i: balance_point(i["mu"], bandwidth=i["bg"], link=i["bcg"]),
    "hrm.alg2.cache": partition,
    "hrm.alg2.flush": partition,
    "hrm.attn_I.f16": lambda i: attention_intensity(i["nq"], i["nkv"], i["dt"]),
    "hrm.ffn_I": lambda i: experts_intensity(1, i["ne"], i["k"], FP16),
    "hrm.t5.band": measured_over_model,
    "hrm.t5.gpumem": gibibytes,
}

OPEN: dict[str, str] = {}
