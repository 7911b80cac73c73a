"""How the reference cases of MoE-Lens, of its schedule and of its models are computed with the public API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from tests.builders import tiny_scenario
from tests.systems import VSL
from workbench.cost import Rows
from workbench.hardware import machines
from workbench.memory import Memory
from workbench.models import models
from workbench.perfmodels import moe_lens
from workbench.perfmodels.moe_lens import Eq12, IntensityForm, Life, PmeForm, Setting, Units
from workbench.plan import lay_out
from workbench.scenario import Scenario
from workbench.scheduler.block_manager import BlockManager
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.schedules.base import Step
from workbench.segments import layer_graph
from workbench.serving import prepare
from workbench.simulate import simulate
from workbench.workload import Workload

Inputs = dict[str, Any]
MIXTRAL = models["mixtral-8x7b"]
SETTINGS = moe_lens.evaluation_settings()


def case_name(model: str) -> str:
    """The catalogue's name of a model in the table of cases."""
    return model.lower()


def setting(model: str, gigabytes: float, workload: str, output_len: int) -> Setting:
    (found,) = (
        s
        for s in SETTINGS
        if (s.model, s.kv_bytes, s.workload, s.output_len) == (case_name(model), gigabytes * 1e9, workload, output_len)
    )
    return found


# ------------------------------------------------------------------------- the real scheduler, one pass after another


@dataclass(frozen=True)
class Played:
    """A job as the resource-aware scheduler ran it, an iteration taking one pass of weights [passes]."""

    passes: float
    prefill: tuple[int, ...]
    preemptions: int

    @property
    def stalled(self) -> float:
        """Share of iterations without prefill, those after the last prefill left out of the count (SPEC 1.6)."""
        last = max(place for place, tokens in enumerate(self.prefill) if tokens)
        return sum(not tokens for tokens in self.prefill[:last]) / len(self.prefill)


@lru_cache(maxsize=100)
def play(
    prompt: int, output: int, requests: int, blocks: int, block: int, limit: float, admission: Admission
) -> Played:
    """SPEC 1.6: an iteration takes the longer of a pass of weights and the GPU's time for its tokens."""
    workload = Workload.lengths(prompt, output, requests)
    memory = BlockManager(blocks, block, requests, prompt + output)
    queue = ResourceAware(admission=admission).open(workload, memory, limit, 1)
    passes, prefill = 0.0, []
    while (batch := queue.next()) is not None:
        passes += max(1.0, batch.rows.tokens / limit)
        prefill.append(int(batch.rows.prefill))
        queue.complete(batch)
    return Played(passes, tuple(prefill), queue.preemptions)


def play_setting(s: Setting, admission: Admission) -> Played:
    return play(s.prompt_len, s.output_len, s.requests, s.kv_blocks, s.block, s.pass_tokens, admission)


def played_tok_s(s: Setting, admission: Admission) -> float:
    return s.requests * s.output_len / (play_setting(s, admission).passes * s.pass_seconds)


def accuracy(s: Setting, admission: Admission) -> float:
    """1 - |predicted - played| / played, of the mended Stage 2."""
    played = played_tok_s(s, admission)
    return float(1 - abs(s.predict().gen_tok_s - played) / played)


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
    units = Units.PAPER if "convention" in inputs else Units.DECIMAL
    return moe_lens.tokens_to_saturate(inputs["C_TFLOPS"] * 1e12, inputs["B_GBs"] * 1e9, one, units=units)


def table2(inputs: Inputs) -> Any:
    size = inputs.get("kv_bytes_token", MIXTRAL.kv_bytes_per_token("bf16"))
    return moe_lens.kv_to_saturate(inputs["n"], inputs["seq"], size, units=Units.PAPER)


def pass_seconds(inputs: Inputs) -> Any:
    return moe_lens.weight_pass_seconds(inputs["size_GB"] * 1e9, inputs["B"] * 1e9)


def pme(inputs: Inputs) -> Any:
    form = {"closed": PmeForm.CLOSED, "exact": PmeForm.EXACT}[inputs["form"]]
    return moe_lens.parallelism_memory_efficiency(inputs["p"], inputs["g"], form=form)


def knee(inputs: Inputs) -> Any:
    rate = moe_lens.gpu_tokens_per_second(inputs["C"] * 1e12, MIXTRAL.flops_per_token())
    limit = moe_lens.tokens_per_pass(rate, moe_lens.weight_pass_seconds(94e9, inputs["B"] * 1e9))
    return moe_lens.kv_tokens_at_knee(inputs["p"], inputs["g"], limit) * MIXTRAL.kv_bytes_per_token("bf16") / 1e9


def lengths_decide(inputs: Inputs) -> bool:
    tokens = inputs["KV_GB"] * 1e9 / MIXTRAL.kv_bytes_per_token("bf16")
    a, b = (moe_lens.stage1_utilisation(*inputs[key], tokens, 18_500) for key in ("a", "b"))
    return bool(a > b)


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


def print_makes_tokens(inputs: Inputs) -> bool:
    """True if Equation 12 as printed computes more than the GPU can, and the mended one does not."""
    printed, mended = (unlimited(inputs, inputs["K"], eq12).proc_tok_s > inputs["n_it"] for eq12 in Eq12)
    return bool(printed and not mended)


def overlap_holds_more(inputs: Inputs) -> bool:
    """Equation 9 for blocks of one token."""
    many = 10**9
    overlapped = moe_lens.overlapped_sequences(inputs["p"], inputs["g"], many, 1)
    return bool(overlapped > moe_lens.separated_sequences(inputs["p"], inputs["g"], many, 1))


def by_output_len(model: str, gigabytes: float, inputs: Inputs) -> list[float]:
    """Predicted throughput of MTBench, at the given output lengths."""
    return [float(setting(model, gigabytes, "mtbench", g).predict().gen_tok_s) for g in inputs["g"]]


def falls(model: str, inputs: Inputs) -> bool:
    return all(a > b for a, b in pairwise(by_output_len(model, 70, inputs)))


def rises_then_drops(model: str, inputs: Inputs) -> bool:
    rates = by_output_len(model, 210, inputs)
    return rates[0] < rates[1] and rates[-1] < max(rates)


def share_of_gpu(inputs: Inputs) -> Any:
    s = setting("mixtral-8x7b", 210, "mtbench", inputs["g"])
    assert (s.prompt_len, s.pass_tokens) == (inputs["p"], inputs["n_it"])
    return s.predict().proc_tok_s * s.pass_seconds / s.pass_tokens


# ------------------------------------------------------------------------------------------- scheduler and schedules


def paced_accuracy(inputs: Inputs) -> float:
    """Mean over the settings of Mixtral-8x7B."""
    assert inputs == {"admit": "paced"}
    found = [accuracy(s, Admission.PACED) for s in SETTINGS if s.model == "mixtral-8x7b"]
    return sum(found) / len(found)


def stall(gigabytes: float, output_len: int) -> float:
    return play_setting(setting("mixtral-8x7b", gigabytes, "mtbench", output_len), Admission.GREEDY).stalled


def stalls_grow(inputs: Inputs) -> bool:
    return stall(inputs["cap"], 256) > stall(inputs["cap"], 64) > stall(inputs["cap"], 32)


def toy(inputs: Inputs) -> list[int]:
    lengths, sizes = (inputs["P"], inputs["G"]), {"blocks": inputs["N"], "block": inputs["b"]}
    result = simulate(tiny_scenario(*lengths, **sizes, token_budget=inputs["n_real"]), Sequential())
    return [result.iterations, result.preemptions, result.processed, result.recomputed]


def offloaded_bytes(inputs: Inputs) -> float:
    """What VSLPipe's offload moves in a layer of a pure decode pass."""
    model = replace(MIXTRAL, hidden_size=inputs["d"])
    assert model.num_attention_heads / model.num_key_value_heads == inputs["s"]
    scenario = Scenario(
        VSL,
        model=model,
        machine=machines["a40"],
        memory=Memory(kv_capacity="70GB"),
        workload=Workload.lengths(98, 32, 1),
        scheduler=ResourceAware(),
    )
    prepared = prepare(scenario, VSLPipe())
    (offload,) = (node for node in prepared.lowering.graph.nodes if node.lane == "d2h")
    return prepared.cost.transfer(offload, Rows(decode=inputs["n"]))


def vslpipe_makespan(inputs: Inputs) -> float:
    assert inputs["barrier"]
    tasks = VSLPipe().tasks(layer_graph(VSL), inputs["L"], Step.LAST)
    seconds = [inputs.get(task.node.code, 0.0) for task in tasks]
    return max(lay_out(tasks, seconds, packet=inputs["W"] / inputs["packets"])[1])


def overlap_gain(inputs: Inputs) -> Any:
    """The real, greedy scheduler over batches that first prefill and then decode, with equal KV memory."""
    s = setting("mixtral-8x7b", inputs["cap"], "mtbench", inputs["g"])
    job = (s.prompt_len, s.output_len, s.requests, s.kv_blocks)
    sizes = {"block": s.block, "pass_seconds": s.pass_seconds, "pass_tokens": s.pass_tokens}
    return played_tok_s(s, Admission.GREEDY) / moe_lens.separated_tok_s(*job, **sizes)


# ------------------------------------------------------------------------------------------------------------- models


def kv_per_token(inputs: Inputs) -> float:
    sizes = {"num_hidden_layers": inputs["L"], "num_key_value_heads": inputs["nkv"], "head_dim": inputs["hd"]}
    return replace(MIXTRAL, **sizes).kv_bytes_per_token({2: "bf16", 4: "fp32"}[inputs["dtype_bytes"]])


def params(inputs: Inputs) -> float:
    return models[case_name(inputs["model"])].params


COMPUTE: dict[str, Callable[[Inputs], Any]] = {
    "lens.TGPU.nreal.tokps": lambda x: x["n_real"] / moe_lens.tokens_per_pass(1.0, x["delta"]),
    "lens.conv.gpu.100.128": gpu_limit,
    "lens.conv.gpu.98.32": gpu_limit,
    "lens.conv.mem.128.512": partial(memory_limit, Life.INCLUSIVE),
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
    "lens.eq12.violates": print_makes_tokens,
    "lens.eq5.60GBs": lambda x: moe_lens.host_bandwidth_needed(x["W"], x["KV"], x["B_IO_GBs"]),
    "lens.eq6.mixtral": lambda x: moe_lens.cpu_flops_needed(x["s"], x["B_KV_GBs"], x["I_flop_per_fp32byte"]),
    "lens.eq7.128.512": lambda x: moe_lens.effective_kv_capacity(x["p"], x["g"]),
    "lens.eq7.98.32": lambda x: moe_lens.effective_kv_capacity(x["p"], x["g"]),
    "lens.eq9.counterexample": overlap_holds_more,
    "lens.fig3a.ratio": lengths_decide,
    "lens.fig3b.knee": knee,
    "lens.io_time.fig13": pass_seconds,
    "lens.kv_sat.A100.256": table2,
    "lens.kv_sat.A100.512": table2,
    "lens.kv_sat.A40.256": table2,
    "lens.kv_sat.L40.256": table2,
    "lens.n_sat.A40.decimal": saturation,
    "lens.n_sat.A40.table2": saturation,
    "lens.n_sat.L40.decimal": saturation,
    "lens.n_sat.L40.table2": saturation,
    "lens.pme.closed.100.128": pme,
    "lens.pme.exact.98.32": pme,
    "lens.ras.acc.paced": paced_accuracy,
    "lens.ras.stall.32": lambda x: stall(x["cap"], x["g"]),
    "lens.ras.stall.order": stalls_grow,
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
    "lens.trend.210.DBRX": partial(rises_then_drops, "dbrx"),
    "lens.trend.210.Mixtral-8x22B": partial(rises_then_drops, "mixtral-8x22b"),
    "lens.trend.210.Mixtral-8x7B": partial(rises_then_drops, "mixtral-8x7b"),
    "lens.trend.70.DBRX": partial(falls, "dbrx"),
    "lens.util90.210.64": share_of_gpu,
    "lens.vsl.bytes": offloaded_bytes,
    "model.kv_tok.DBRX": kv_per_token,
    "model.kv_tok.Mixtral-8x7B": kv_per_token,
    "model.params.DBRX": params,
    "model.params.Mixtral-8x7B": params,
    "sched.VSL.L2": vslpipe_makespan,
    "sched.VSL.L3": vslpipe_makespan,
    "sched.overlap.210.128": overlap_gain,
    "sched.overlap.210.32": overlap_gain,
}

_NO_CGOPIPE = "workbench.schedules has no CGOPipe yet"
_NO_BASELINES = "workbench.schedules has none of S2, S3 and S4 yet"
_NO_BARRIERS = "VSLPipe always waits at the end of a phase; the case asks for one that does not"

OPEN: dict[str, str] = {
    "sched.CGOPipe.L2n2": _NO_CGOPIPE,
    "sched.CGOPipe.L3n3": _NO_CGOPIPE,
    "sched.S2_Wlast.L3n3": _NO_BASELINES,
    "sched.S2_Wlast.L4n4": _NO_BASELINES,
    "sched.S3_Wfirst.L3n3": _NO_BASELINES,
    "sched.S3_Wfirst.L4n4": _NO_BASELINES,
    "sched.S3_slower_S4": _NO_BASELINES,
    "sched.S4_Wfirst.L3n3": _NO_BASELINES,
    "sched.S4_Wfirst.L4n4": _NO_BASELINES,
    "sched.S4_paged.L3n3": _NO_BASELINES,
    "sched.S4_paged.L4n4": _NO_BASELINES,
    "sched.VSL.nobarrier.L3": _NO_BARRIERS,
    "sched.VSL.nobarrier.L4": _NO_BARRIERS,
    "sched.cgo.fifo_vs_ready": _NO_CGOPIPE,
    "sched.cgo.lb.L4 summ": _NO_CGOPIPE,
    "sched.cgo.lb.T4 MTB": _NO_CGOPIPE,
    "sched.order.L4 summ": _NO_CGOPIPE,
    "sched.order.T4 MTB": _NO_CGOPIPE,
}
