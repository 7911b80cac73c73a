"""Computation of MoE-Lens' printed values: its equations, Stage 2, and the real scheduler on its settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels import moe_lens
from workbench.perfmodels.moe_lens import Eq12, IntensityForm, Life, PmeForm, Setting, Units
from workbench.perfmodels.moe_lightning import Job, Mode
from workbench.perfmodels.moe_lightning.policy_search import search
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.reproductions.drawn import drawn
from workbench.reproductions.rows import Inputs, Value
from workbench.scenario import Memory, Scenario
from workbench.scheduler.block_manager import BlockManager
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.schedules import VSLPipe
from workbench.serving import prepare
from workbench.stages import Rows, decode_attention, moe, out_proj, prefill_attention, qkv, weights
from workbench.workload import Workload

MIXTRAL = models["mixtral-8x7b"]
VSL = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)


@cache
def settings() -> tuple[Setting, ...]:
    """The 36 settings of the evaluation."""
    return moe_lens.evaluation_settings()


def setting(model: str, gigabytes: float, workload: str, output_len: int) -> Setting:
    """The setting with this model, KV capacity [GB], workload and output length."""
    wanted = (model.lower(), gigabytes * 1e9, workload, output_len)
    (found,) = (s for s in settings() if (s.model, s.kv_bytes, s.workload, s.output_len) == wanted)
    return found


# ------------------------------------------------------------------------- the real scheduler, one pass after another


@dataclass(frozen=True)
class Played:
    """A job as the resource-aware scheduler plays it; an iteration takes one pass of weights [passes]."""

    passes: float
    prefill: tuple[int, ...]
    preemptions: int

    @property
    def stalled(self) -> float:
        """Share of iterations without prefill, among those up to the last prefill."""
        last = max(place for place, tokens in enumerate(self.prefill) if tokens)
        return sum(not tokens for tokens in self.prefill[:last]) / len(self.prefill)


@cache
def play(
    prompt: int, output: int, requests: int, blocks: int, block: int, limit: float, admission: Admission
) -> Played:
    """Play a job; an iteration takes a pass of weights, or the GPU's time for its tokens if that is longer."""
    workload = Workload.lengths(prompt, output, requests)
    memory = BlockManager(blocks, block, requests, prompt + output)
    queue = ResourceAware(admission=admission).open(workload, memory, limit, 1)
    queue.add(np.arange(requests), workload.prompt_len, workload.output_len)
    passes = 0.0
    prefill = []
    while (batch := queue.next()) is not None:
        passes += max(1.0, batch.rows.tokens / limit)
        prefill.append(int(batch.rows.prefill))
        queue.complete(batch)
    return Played(passes, tuple(prefill), queue.preemptions)


def play_setting(s: Setting, admission: Admission) -> Played:
    """Play a setting of the evaluation."""
    return play(s.prompt_len, s.output_len, s.requests, s.kv_blocks, s.block, s.pass_tokens, admission)


def played_tok_s(s: Setting, admission: Admission) -> float:
    """Output tokens per second of a setting as the scheduler plays it."""
    return s.requests * s.output_len / (play_setting(s, admission).passes * s.pass_seconds)


def accuracy(s: Setting, admission: Admission) -> float:
    """Accuracy of the mended Stage 2: 1 - |predicted - played| / played."""
    played = played_tok_s(s, admission)
    return 1 - abs(float(s.predict().gen_tok_s) - played) / played


# ----------------------------------------------------------------- section 8.2, which determines the tokens of a pass


def mtbench(kv_gb: float, output: int, pass_tokens: float | None = None) -> Setting:
    """The setting of Mixtral-8x7B on MTBench; `pass_tokens`, if given, replaces the catalogue's tokens of a pass."""
    found = setting("mixtral-8x7b", kv_gb, "mtbench", output)
    return found if pass_tokens is None else replace(found, pass_tokens=pass_tokens)


def gpu_share(s: Setting) -> float:
    """Processed tokens over those that the GPU could process, by Stage 2 [%]."""
    return 100 * float(s.predict().proc_tok_s * s.pass_seconds / s.pass_tokens)


def preempted_share(s: Setting) -> float:
    """Preemptions over requests, as the scheduler plays the setting [%]."""
    return 100 * play_setting(s, Admission.GREEDY).preemptions / s.requests


def gain_of_memory(output: int, pass_tokens: float | None = None) -> float:
    """Gain of 210 GB of KV cache over 70 GB for the same requests, as the scheduler plays them [%]."""
    few = mtbench(70, output, pass_tokens)
    many = replace(mtbench(210, output, pass_tokens), requests=few.requests)
    return 100 * (played_tok_s(many, Admission.GREEDY) / played_tok_s(few, Admission.GREEDY) - 1)


# -------------------------------------------------------------------------------------------- values, by their groups


def _plan_share(given: Inputs) -> Value:
    """Share of the CPU memory that MoE-Lightning's optimiser fills on MoE-Lens' host."""
    a40 = machines["a40"]
    cpu_memory = given["cpu_gb"] * 1e9
    gpu_memory = given["gpu_gb"] * 1e9
    host = replace(a40, cpu=replace(a40.cpu, memory=cpu_memory), gpu=replace(a40.gpu, memory=gpu_memory))
    found = search(Job(MIXTRAL, host, given["prompt"], given["output"], "bf16"), Mode.ARTIFACT)
    return 100 * float(found.cpu_peak / cpu_memory)


def _intensity(given: Inputs) -> Value:
    ratio = MIXTRAL.intermediate_size / MIXTRAL.hidden_size
    group = MIXTRAL.num_attention_heads / MIXTRAL.num_key_value_heads
    choices = {"experts": MIXTRAL.num_local_experts, "chosen": MIXTRAL.num_experts_per_tok}
    form = IntensityForm(given["form"])
    return float(moe_lens.intensity(1, **choices, expert_ratio=ratio, group_size=group, form=form))


def _tokens(given: Inputs) -> float:
    one = MIXTRAL.num_experts_per_tok / MIXTRAL.num_local_experts
    rates = (given["tflops"] * 1e12, given["link_gb_s"] * 1e9)
    return float(moe_lens.tokens_to_saturate(*rates, one, units=Units(given["units"])))


def _kv(given: Inputs) -> Value:
    """KV cache in gigabytes, or in the paper's own unit of MiB / 1000."""
    size = MIXTRAL.kv_bytes_per_token("bf16")
    units = Units(given["units"])
    found = float(moe_lens.kv_to_saturate(_tokens({**given, "units": "paper"}), given["seq"], size, units=units))
    return found if units is Units.PAPER else found / 1e9


def _pme(given: Inputs) -> Value:
    return float(moe_lens.parallelism_memory_efficiency(given["p"], given["g"], form=PmeForm(given["form"])))


def _host_bandwidth(given: Inputs) -> Value:
    return float(moe_lens.host_bandwidth_needed(given["weights"], given["kv"], given["link_gb_s"]))


def _lengths_decide(given: Inputs) -> Value:
    tokens = given["kv_gb"] * 1e9 / MIXTRAL.kv_bytes_per_token("bf16")
    a, b = (moe_lens.stage1_utilisation(p, g, tokens, given["n_it"]) for p, g in (given["a"], given["b"]))
    return bool(a > b)


def _overlap_holds_more(given: Inputs) -> Value:
    """True if Equation 9 holds for blocks of one token."""
    job = (given["p"], given["g"], 10**9, 1)
    return bool(moe_lens.overlapped_sequences(*job) > moe_lens.separated_sequences(*job))


def _computed_share(given: Inputs) -> Value:
    """Tokens per iteration that Equation 12 implies, over those that the GPU can compute, with unlimited KV memory."""
    job = (given["p"], given["g"], given["requests"], float("inf"))
    limit = given["n_it"]
    eq12 = Eq12(given["eq12"])
    found = moe_lens.stage2(*job, block=16, pass_seconds=1.0, pass_tokens=limit, eq12=eq12)
    return float(found.proc_tok_s / limit)


def _memory_limit(given: Inputs) -> Value:
    """Processed tokens of Stage 2 over those of Stage 1, for an endless job and blocks of one token."""
    p = given["p"]
    g = given["g"]
    tokens = 1e6
    limit = 1e12
    found = moe_lens.stage2(
        p, g, float("inf"), tokens, block=1, pass_seconds=1.0, pass_tokens=limit, life=Life.INCLUSIVE
    )
    return float(found.proc_tok_s / moe_lens.stage1(p, g, tokens, 1.0, limit))


def _params(given: Inputs) -> Value:
    return models[given["model"]].params / 1e9


def _weights(given: Inputs) -> Value:
    return 2 * models[given["model"]].params / 1e9


def _offloaded_mb(given: Inputs) -> Value:
    """Bytes that VSLPipe's offload moves in a layer of a pure decode pass [MB]."""
    scenario = Scenario(
        VSL,
        model=MIXTRAL,
        machine=machines["a40"],
        memory=Memory(kv_capacity="70GB"),
        workload=Workload.lengths(98, 32, 1),
        scheduler=ResourceAware(),
    )
    prepared = prepare(scenario, VSLPipe())
    (moved,) = (node for node in prepared.lowering.stack.all_nodes if node.lane == "d2h")
    return float(prepared.cost.transfer(moved, Rows(decode=given["tokens"]))) / 1e6


_OUTPUTS = 32, 64, 128, 256


def _by_output_len(given: Inputs) -> list[float]:
    places = ((given["model"], given["kv_gb"], "mtbench", g) for g in _OUTPUTS)
    return [float(setting(*place).predict().gen_tok_s) for place in places]


def _falls(given: Inputs) -> Value:
    return all(a > b for a, b in pairwise(_by_output_len(given)))


def _rises_then_drops(given: Inputs) -> Value:
    rates = _by_output_len(given)
    return rates[0] < rates[1] and rates[-1] < max(rates)


def _gpu_share(given: Inputs) -> Value:
    return gpu_share(mtbench(given["kv_gb"], given["g"]))


def _preempted(given: Inputs) -> Value:
    return preempted_share(mtbench(given["kv_gb"], given["g"], given.get("pass_tokens")))


def _gain_of_memory(given: Inputs) -> Value:
    return gain_of_memory(given["g"], given.get("pass_tokens"))


def _best_output(given: Inputs) -> Value:
    """Output length with the highest throughput [tokens]."""
    rates = dict(zip(_OUTPUTS, _by_output_len(given), strict=True))
    return float(max(rates, key=lambda length: rates[length]))


def _accuracy(given: Inputs) -> Value:
    found = [accuracy(s, Admission(given["admission"])) for s in settings() if s.model == given["model"]]
    return 100 * sum(found) / len(found)


def _transfer_seconds(given: Inputs) -> Value:
    return float(moe_lens.weight_pass_seconds(given["weights_gb"] * 1e9, given["link_gb_s"] * 1e9))


def _stalled(given: Inputs) -> float:
    played = play_setting(setting("mixtral-8x7b", given["kv_gb"], "mtbench", given["g"]), Admission.GREEDY)
    return 100 * played.stalled


def _stalls_grow(given: Inputs) -> Value:
    few = _stalled({**given, "g": 32})
    some = _stalled({**given, "g": 64})
    many = _stalled({**given, "g": 256})
    return few < some < many


COMPUTE = {
    "lens.table1": _plan_share,
    "lens.eq1": _intensity,
    "lens.n_sat": _tokens,
    "lens.kv_sat": _kv,
    "lens.kv_sat.bytes": _kv,
    "lens.eq3": _pme,
    "lens.eq5": _host_bandwidth,
    "lens.fig3a": _lengths_decide,
    "lens.eq9": _overlap_holds_more,
    "lens.eq12": _computed_share,
    "lens.conv": _memory_limit,
    "lens.params": _params,
    "lens.weights": _weights,
    "lens.table3": drawn,
    "lens.vsl.bytes": _offloaded_mb,
    "lens.trend.70": _falls,
    "lens.trend.210": _rises_then_drops,
    "lens.util": _gpu_share,
    "lens.8_2.preempted": _preempted,
    "lens.8_2.memory": _gain_of_memory,
    "lens.8_2.peak": _best_output,
    "lens.accuracy": _accuracy,
    "lens.io_time": _transfer_seconds,
    "lens.stall": _stalled,
    "lens.stall.order": _stalls_grow,
}
