"""MoE-Lightning's own evaluation: measured throughputs with their policies, and the machines of its figures."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.catalogue import data_path
from workbench.hardware import Device, Link, Machine, machines
from workbench.models import models
from workbench.perfmodels.moe_lightning import Job, Mode, Policy, estimate
from workbench.perfmodels.moe_lightning.policy_search import with_shares

_MODEL = "mixtral-8x7b"
_DTYPE = "fp16"
_SYSTEM = "MoE-Lightning"
_PADDED = "MoE-Lightning(p)"


@dataclass(frozen=True)
class PublishedRun:
    """A measured throughput of Mixtral-8x7B, and the job and the policy that it belongs to.

    Attributes
    ----------
    setting : str
        "s1", a T4, or "s2", an L4.
    batch, micro_batch : int
        N and mu, from the paper's optimiser.
    tok_s : float
        Measured output tokens per second, prefill included [tokens/s].
    assumed, calibrated : Job
        The job with the machine's rates as the paper's optimiser assumes them, and as its authors measured them.
    """

    setting: str
    batch: int
    micro_batch: int
    tok_s: float
    assumed: Job
    calibrated: Job

    @property
    def label(self) -> str:
        """Setting and output length, such as ``"S1, 128"``."""
        return f"{self.setting.upper()}, {self.assumed.output_len:.0f}"

    @property
    def policy(self) -> Policy:
        """The published batch with attention on the CPU, and as many weights on the GPU as the optimiser finds."""
        return with_shares(self.assumed, Policy(self.batch, self.micro_batch), Mode.ARTIFACT)

    def predict(self, job: Job, mode: Mode) -> float:
        """Output tokens per second of this policy [tokens/s]; `job` is the run's `assumed` or `calibrated`."""
        return float(estimate(job, self.policy, mode).gen_tok_s)


def published_runs() -> tuple[PublishedRun, ...]:
    """MTBench without padding on both machines, 32 to 256 output tokens.

    Notes
    -----
    MoE-Lightning, Fig. 7, with the policies of its public artifact. Stored runs of one setting differ by about 30 %.
    """
    data = _published()
    bench = data["mtbench"]
    policies = data["policies"]
    return tuple(
        PublishedRun(
            setting=setting,
            batch=micro * count,
            micro_batch=micro,
            tok_s=bench[setting][_SYSTEM][place],
            assumed=_job(f"{setting}-optimiser", bench["prompt_len"], output),
            calibrated=_job(setting, bench["prompt_len"], output),
        )
        for setting in ("s1", "s2")
        for place, (output, (micro, count)) in enumerate(zip(bench["output_len"], policies[setting], strict=True))
    )


def two_a100s(gpu_efficiency: float = 0.5) -> Job:
    """The job and the machine of Fig. 10, with this share of its GPUs' nominal rates.

    Raises
    ------
    ValueError
        If the share is not in (0, 1].
    """
    if not 0 < gpu_efficiency <= 1:
        raise ValueError(
            f"gpu_efficiency={gpu_efficiency} is no share of the nominal rates; give one above 0, up to 1."
        )
    figure = _published()["fig10"]
    rates = (("bf16", figure["gpu_flops"] * gpu_efficiency),)
    gpu = Device("A100", figure["gpu_memory"], figure["gpu_bandwidth"] * gpu_efficiency, rates)
    cpu = Device("host", figure["cpu_memory"], figure["cpu_bandwidth"], (("fp32", figure["cpu_flops"]),))
    link = figure["links"][0]
    machine = Machine(f"{figure['gpus']} x A100", gpu, cpu, Link(link, link))
    return Job(models[_MODEL], machine, figure["prompt_len"], figure["output_len"], gpus=figure["gpus"])


@dataclass(frozen=True)
class ScalingRun:
    """Measured throughputs of Mixtral-8x22B on nodes of T4s that differ only in the number of GPUs.

    Attributes
    ----------
    assumed : Job
        The job on one GPU of the node, with rates as in `PublishedRun`; `policy_search.tensor_parallel` takes more.
    tok_s : dict of int to float
        Output tokens per second by number of GPUs [tokens/s].
    """

    assumed: Job
    tok_s: dict[int, float]


def scaling_runs() -> tuple[ScalingRun, ...]:
    """MTBench with prompts padded on two and on four T4s, 32 to 256 output tokens.

    Notes
    -----
    MoE-Lightning, Fig. 8, settings S6 and S7.
    """
    bench = _published()["mtbench"]
    nodes = {machines[f"moe-lightning-{setting}"].gpu.count: bench[setting][_PADDED] for setting in ("s6", "s7")}
    one = machines["moe-lightning-s1-optimiser"].gpu
    alone = replace(machines["moe-lightning-s6-optimiser"], gpu=one)
    runs = []
    for place, output in enumerate(bench["output_len"]):
        job = Job(models["mixtral-8x22b"], alone, bench["padded_len"], output, _DTYPE)
        tok_s = {gpus: rates[place] for gpus, rates in nodes.items()}
        runs.append(ScalingRun(assumed=job, tok_s=tok_s))
    return tuple(runs)


def _job(machine: str, prompt: float, output: float) -> Job:
    return Job(models[_MODEL], machines[f"moe-lightning-{machine}"], prompt, output, _DTYPE)


def _published() -> dict[str, Any]:
    return tomllib.loads(data_path("catalogue/published/moe_lightning.toml").read_text(encoding="utf-8"))
