"""MoE-Lightning's cases: how each is computed from its inputs with the public functions.

Cases that only divide two printed figures read them from `data/` and refuse inputs that differ from what stands there.
"""

import tomllib
from collections.abc import Callable
from typing import Any

from workbench.catalogue import data_path
from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels.hrm import (
    attention_intensity,
    balance_point,
    experts_intensity,
    first_turning_point,
    local_performance,
)
from workbench.perfmodels.moe_lightning import Job, Mode, Policy, estimate
from workbench.perfmodels.policy_memory import gpu_peaks
from workbench.perfmodels.policy_search import Found, search, with_shares
from workbench.scheduler.token_balance import balance

PUBLISHED = tomllib.loads(data_path("catalogue/published/moe_lightning.toml").read_text(encoding="utf-8"))
MODEL = models["mixtral-8x7b"]
MACHINES = {"T4": "s1", "T4 artifact": "s1", "L4opt": "s2"}
PADDED = "MoE-Lightning(p)"
FP16 = 2

Inputs = dict[str, Any]


def job(setting: str, prompt: int, output: int) -> Job:
    """A job on the machine that the authors' optimiser assumes."""
    return Job(MODEL, machines[f"moe-lightning-{setting}-optimiser"], prompt, output, "fp16")


def best(setting: str, workload: str) -> Found:
    lengths = PUBLISHED[workload]
    return search(job(setting, lengths["padded_len"], lengths["output_len"]), Mode.PAPER)


def placement(inputs: Inputs) -> list[float]:
    policy = search(job(MACHINES[inputs["HW"]], inputs["s"], inputs["n"]), Mode.PAPER).policy
    return [policy.gpu_attention, policy.gpu_experts]


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
    return PUBLISHED["table5"][PADDED] / float(estimate(where, policy, Mode.ARTIFACT).gen_tok_s)


def gibibytes(inputs: Inputs) -> float:
    where, policy = table_5(inputs)
    return float(max(gpu_peaks(where, policy, Mode.ARTIFACT))) / 2**30


def printed_turning_point() -> float:
    plot = PUBLISHED["roofline"]
    return first_turning_point(far_flops=plot["cpu_flops"], far_bandwidth=plot["cpu_bandwidth"], link=plot["link"])


def attention_belongs_on_the_cpu(inputs: Inputs) -> bool:
    """The case's P1 is the plot's, and both intensities, of the model's attention with 2 and 0.5 bytes, are below."""
    heads = MODEL.num_attention_heads, MODEL.num_key_value_heads
    ours = [attention_intensity(*heads, size) for size in (2, 0.5)]
    return bool(ours == inputs["I"] and printed_turning_point() == inputs["P1"] and max(ours) < inputs["P1"])


def link_roof_is_above_the_cpus(inputs: Inputs) -> bool:
    plot = PUBLISHED["roofline"]
    intensity = experts_intensity(inputs["N"], MODEL.num_local_experts, MODEL.num_experts_per_tok, FP16)
    cpu = local_performance(intensity, flops=plot["cpu_flops"], bandwidth=plot["cpu_bandwidth"])
    return bool(intensity * plot["link"] > cpu)


def ratio(*, over: tuple, of: tuple, names: tuple[str, str] = ("num", "den")) -> Callable[[Inputs], float]:
    """Quotient of two published figures, each given by where it stands in the data."""

    def compute(inputs: Inputs) -> float:
        figures = [published(place) for place in (of, over)]
        if figures != [inputs[name] for name in names]:
            raise ValueError(f"data/ has {figures} where the case has {inputs}; correct one of them.")
        return figures[0] / figures[1]

    return compute


def published(place: tuple) -> float:
    value: Any = PUBLISHED
    for key in place:
        value = value[PUBLISHED["mtbench"]["output_len"].index(key) if isinstance(value, list) else key]
    return value


def mtbench(setting: str, system: str, output: int) -> tuple:
    return ("mtbench", setting, system, output)


COMPUTE: dict[str, Callable[[Inputs], Any]] = {
    "hrm.P2.N": lambda i: balance_point(i["mu"], bandwidth=i["bg"], link=i["bcg"]),
    "hrm.alg2.cache": partition,
    "hrm.alg2.flush": partition,
    "hrm.attn_I.f16": lambda i: attention_intensity(i["nq"], i["nkv"], i["dt"]),
    "hrm.ffn_I": lambda i: experts_intensity(1, i["ne"], i["k"], FP16),
    "hrm.fig4": attention_belongs_on_the_cpu,
    "hrm.fig5.large": link_roof_is_above_the_cpus,
    "hrm.fig9.ffn_bw": lambda i: job("s2", 77, 32).experts_bytes / i["t"] / 1e9,
    "hrm.fig9.ratio": ratio(of=("fig9", "kv_transfer"), over=("fig9", "cpu_attention"), names=("t_kv", "t_attn")),
    "hrm.search.S1mtb.Ag": placement,
    "hrm.search.S1synth.Ag": placement,
    "hrm.search.S2synth.Ag": placement,
    "hrm.search.S1synth.mu": lambda i: best("s1", "synthetic").policy.micro_batch / i["mu_paper"],
    "hrm.search.S2synth.N": lambda i: best("s2", "synthetic").policy.batch / i["N_paper"],
    "hrm.t5.band": measured_over_model,
    "hrm.t5.gpumem": gibibytes,
    "hrm.e2e.s1.flexgenc.256": ratio(of=mtbench("s1", PADDED, 256), over=mtbench("s1", "FlexGen(c)", 256)),
    "hrm.e2e.s1.nopad.128": ratio(of=mtbench("s1", "MoE-Lightning", 128), over=mtbench("s1", "FlexGen", 128)),
    "hrm.e2e.s2.ds.256": ratio(of=mtbench("s2", PADDED, 256), over=mtbench("s2", "DeepSpeed", 256)),
    "hrm.e2e.tp.64to..32": ratio(of=mtbench("s7", PADDED, 32), over=mtbench("s6", PADDED, 32)),
    "hrm.t4.s1sum.flexc": ratio(of=("summarization", "s1", PADDED), over=("summarization", "s1", "FlexGen(c)")),
    "hrm.t4.s1syn.flex": ratio(of=("synthetic", "s1", PADDED), over=("synthetic", "s1", "FlexGen")),
    "hrm.t4.s1syn.flexc": ratio(of=("synthetic", "s1", PADDED), over=("synthetic", "s1", "FlexGen(c)")),
    "hrm.t4.s2sum.flex": ratio(of=("summarization", "s2", PADDED), over=("summarization", "s2", "FlexGen")),
    "hrm.t4.s2sum.flexc": ratio(of=("summarization", "s2", PADDED), over=("summarization", "s2", "FlexGen(c)")),
    "hrm.t4.s2syn.flex": ratio(of=("synthetic", "s2", PADDED), over=("synthetic", "s2", "FlexGen")),
    "hrm.t4.s2syn.flexc": ratio(of=("synthetic", "s2", PADDED), over=("synthetic", "s2", "FlexGen(c)")),
    "hrm.t5.largerN": ratio(of=("table5", "FlexGen, our policy, larger N"), over=("table5", "FlexGen")),
    "hrm.t5.ourpolicy": ratio(of=("table5", "FlexGen, our policy"), over=("table5", "FlexGen")),
}

OPEN: dict[str, str] = {}
