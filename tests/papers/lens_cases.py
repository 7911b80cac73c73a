"""How the cases of MoE-Lens, its schedule and its models that are not printed are computed with the public API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.builders import tiny_scenario
from workbench.models import models
from workbench.perfmodels import moe_lens
from workbench.perfmodels.moe_lens import Eq12, IntensityForm, Life, PmeForm
from workbench.reproductions.moe_lens import MIXTRAL, accuracy, mtbench, play, played_tok_s, settings
from workbench.scheduler.resource_aware import Admission
from workbench.schedules import Sequential
from workbench.simulate import simulate

Inputs = dict[str, Any]
SETTINGS = settings()


# ------------------------------------------------------------------------------------------------------ Equations 1-7


def intensity(inputs: Inputs) -> Any:
    form = {"first": IntensityForm.EXACT, "approx": IntensityForm.APPROXIMATE}[inputs["form"]]
    ratio = MIXTRAL.intermediate_size / MIXTRAL.hidden_size
    group = MIXTRAL.num_attention_heads / MIXTRAL.num_key_value_heads
    experts, chosen = MIXTRAL.num_local_experts, MIXTRAL.num_experts_per_tok
    choices = {"experts": experts, "chosen": chosen, "expert_ratio": ratio, "group_size": group, "form": form}
    return moe_lens.intensity(inputs["n"], **choices)


def saturation(inputs: Inputs) -> Any:
    one = moe_lens.intensity(
        1, experts=inputs["Ne"], chosen=inputs["Nk"], expert_ratio=1, group_size=1, form=IntensityForm.APPROXIMATE
    )
    return moe_lens.tokens_to_saturate(inputs["C_TFLOPS"] * 1e12, inputs["B_GBs"] * 1e9, one)


def pass_seconds(inputs: Inputs) -> Any:
    return moe_lens.weight_pass_seconds(inputs["size_GB"] * 1e9, inputs["B"] * 1e9)


def pme(inputs: Inputs) -> Any:
    form = {"closed": PmeForm.CLOSED, "exact": PmeForm.EXACT}[inputs["form"]]
    return moe_lens.parallelism_memory_efficiency(inputs["p"], inputs["g"], form=form)


def knee(inputs: Inputs) -> Any:
    rate = moe_lens.gpu_tokens_per_second(inputs["C"] * 1e12, MIXTRAL.flops_per_token())
    limit = moe_lens.tokens_per_pass(rate, moe_lens.weight_pass_seconds(94e9, inputs["B"] * 1e9))
    return moe_lens.kv_tokens_at_knee(inputs["p"], inputs["g"], limit) * MIXTRAL.kv_bytes_per_token("bf16") / 1e9


# ----------------------------------------------------------------------------------------------------- Equations 8-14


def stage2(inputs: Inputs) -> Any:
    """The table's rows are the print's: Equation 12 as printed, the sum to g."""
    assert inputs["sum"] == "0..g"
    job = (inputs["p"], inputs["g"], inputs["K"], inputs["N"])
    rates = {"pass_seconds": inputs["delta"], "pass_tokens": inputs["n_it"]}
    return moe_lens.stage2(*job, block=inputs["b"], **rates, eq12=Eq12.PAPER, life=Life.INCLUSIVE).gen_tok_s


def unlimited(inputs: Inputs, requests: float, eq12: Eq12) -> moe_lens.Stage2:
    """With all the KV memory that it could use; a pass takes one unit of time."""
    job = (inputs["p"], inputs["g"], requests, float("inf"))
    return moe_lens.stage2(*job, block=16, pass_seconds=1.0, pass_tokens=inputs["n_it"], eq12=eq12)


def gpu_limit(inputs: Inputs) -> Any:
    """Processed tokens per second over T_GPU as the job grows without end, which both forms of Equation 12 reach."""
    printed, mended = (unlimited(inputs, float("inf"), eq12).proc_tok_s / inputs["n_it"] for eq12 in Eq12)
    return max(printed, mended, key=lambda share: abs(share - 1))


def memory_limit(life: Life, inputs: Inputs) -> Any:
    """Processed tokens per second over Stage 1's as the job grows without end, with blocks of one token."""
    job = (inputs["p"], inputs["g"])
    found = moe_lens.stage2(*job, float("inf"), 1e6, block=1, pass_seconds=1.0, pass_tokens=1e12, life=life)
    return found.proc_tok_s / moe_lens.stage1(*job, 1e6, 1.0, 1e12)


def mended_over_played(inputs: Inputs) -> Any:
    """Mended Equation 12 over the real scheduler, with KV memory for every request at once."""
    blocks = inputs["K"] * -(-(inputs["p"] + inputs["g"]) // 16)
    played = play(inputs["p"], inputs["g"], inputs["K"], blocks, 16, inputs["n_it"], Admission.GREEDY)
    return unlimited(inputs, inputs["K"], Eq12.MENDED).gen_tok_s / (inputs["K"] * inputs["g"] / played.passes)


# ------------------------------------------------------------------------------------------- scheduler and schedules


def paced_accuracy(inputs: Inputs) -> float:
    """Mean over the settings of Mixtral-8x7B."""
    assert inputs == {"admit": "paced"}
    found = [accuracy(s, Admission.PACED) for s in SETTINGS if s.model == "mixtral-8x7b"]
    return sum(found) / len(found)


def toy(inputs: Inputs) -> list[int]:
    lengths, sizes = (inputs["P"], inputs["G"]), {"blocks": inputs["N"], "block": inputs["b"]}
    result = simulate(tiny_scenario(*lengths, **sizes, token_budget=inputs["n_real"]), Sequential())
    anew = result.recomputed + result.preemptions  # the reference counts the token that follows too
    return [result.iterations, result.preemptions, result.processed, anew]


def overlap_gain(inputs: Inputs) -> Any:
    """The real, greedy scheduler over batches that first prefill and then decode, with equal KV memory."""
    s = mtbench(inputs["cap"], inputs["g"], pass_tokens=inputs["n_it"])
    job = (s.prompt_len, s.output_len, s.requests, s.kv_blocks)
    sizes = {"block": s.block, "pass_seconds": s.pass_seconds, "pass_tokens": s.pass_tokens}
    return played_tok_s(s, Admission.GREEDY) / moe_lens.separated_tok_s(*job, **sizes)


# ------------------------------------------------------------------------------------------------------------- models


def kv_per_token(inputs: Inputs) -> float:
    sizes = {"num_hidden_layers": inputs["L"], "num_key_value_heads": inputs["nkv"], "head_dim": inputs["hd"]}
    return replace(MIXTRAL, **sizes).kv_bytes_per_token({2: "bf16", 4: "fp32"}[inputs["dtype_bytes"]])


def params(inputs: Inputs) -> float:
    return models[inputs["model"].lower()].params


COMPUTE: dict[str, Callable[[Inputs], Any]] = {
    "lens.TGPU.nreal.tokps": lambda x: x["n_real"] / moe_lens.tokens_per_pass(1.0, x["delta"]),
    "lens.conv.gpu.100.128": gpu_limit,
    "lens.conv.gpu.98.32": gpu_limit,
    "lens.conv.mem.excl.128.512": partial(memory_limit, Life.EXCLUSIVE),
    "lens.conv.mem.excl.98.32": partial(memory_limit, Life.EXCLUSIVE),
    "lens.delta.DBRX": pass_seconds,
    "lens.delta.Mixtral-8x22B": pass_seconds,
    "lens.eq1.ratio.approx": intensity,
    "lens.eq1.ratio.first": intensity,
    "lens.eq12.fixed.926.128.11233": mended_over_played,
    "lens.eq12.fixed.98.256.26757": mended_over_played,
    "lens.eq12.fixed.98.256.66892": mended_over_played,
    "lens.eq12.fixed.98.32.22769": mended_over_played,
    "lens.eq6.mixtral": lambda x: moe_lens.cpu_flops_needed(x["s"], x["B_KV_GBs"], x["I_flop_per_fp32byte"]),
    "lens.eq7.128.512": lambda x: moe_lens.effective_kv_capacity(x["p"], x["g"]),
    "lens.eq7.98.32": lambda x: moe_lens.effective_kv_capacity(x["p"], x["g"]),
    "lens.fig3b.knee": knee,
    "lens.n_sat.A40.decimal": saturation,
    "lens.n_sat.L40.decimal": saturation,
    "lens.pme.closed.100.128": pme,
    "lens.pme.exact.98.32": pme,
    "lens.ras.acc.paced": paced_accuracy,
    "lens.ras.toy1": toy,
    "lens.ras.toy2": toy,
    "lens.ras.toy4": toy,
    "lens.stage2.DBRX.210.MTB.64": stage2,
    "lens.stage2.DBRX.70.RAG.128": stage2,
    "lens.stage2.Mixtral-8x22B.210.MTB.64": stage2,
    "lens.stage2.Mixtral-8x7B.210.AIME.512": stage2,
    "lens.stage2.Mixtral-8x7B.210.MTB.32": stage2,
    "lens.stage2.Mixtral-8x7B.210.RAG.128": stage2,
    "lens.stage2.Mixtral-8x7B.70.MTB.128": stage2,
    "lens.stage2.Mixtral-8x7B.70.MTB.256": stage2,
    "lens.stage2.Mixtral-8x7B.70.RAG.128": stage2,
    "model.kv_tok.DBRX": kv_per_token,
    "model.kv_tok.Mixtral-8x7B": kv_per_token,
    "model.params.DBRX": params,
    "model.params.Mixtral-8x7B": params,
    "sched.overlap.210.128": overlap_gain,
    "sched.overlap.210.32": overlap_gain,
}

OPEN: dict[str, str] = {}
