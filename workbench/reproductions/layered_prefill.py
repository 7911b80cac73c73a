"""Computation of Layered Prefill's printed values: coverage, expert traffic, energy, and a queue of requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from workbench.core.energy import EnergyModel, published_model
from workbench.core.latency import Slo
from workbench.models import ModelConfig, models
from workbench.perfmodels import coverage, layered_prefill
from workbench.perfmodels.layered_prefill.queue import Arrivals, IterationTime, Served, serve
from workbench.reproductions.rows import Inputs, Value, published

SEEDS = range(6)
REQUESTS = 400
"""Chunked prefill at 1.3 requests/s is near saturation and noisy: means over several runs."""

QWEN = models["qwen3-30b-a3b"]


def iteration_time() -> IterationTime:
    """The calibrated time of an iteration."""
    table = published("layered_prefill")["iteration_time"]
    return IterationTime(table["bandwidth"], table["per_token"], table["fixed"])


def energy_model() -> EnergyModel:
    """The constants fitted to Table 8."""
    return published_model()[0]


@cache
def arrivals(dataset: str, rate: float) -> tuple[Arrivals, ...]:
    """One draw of requests per seed."""
    lengths = published("layered_prefill")["lengths"][dataset]
    prompt = (lengths["prompt"]["mean"], lengths["prompt"]["std"])
    output = (lengths["output"]["mean"], lengths["output"]["std"])
    return tuple(Arrivals.draw(rate, REQUESTS, prompt=prompt, output=output, seed=seed) for seed in SEEDS)


@cache
def served(
    dataset: str, rate: float, layered: bool, granularity: int = 512, model: ModelConfig = QWEN
) -> tuple[Served, ...]:
    """Serve once per seed: Qwen under the measured coverage, other models under an equally skewed one."""
    time = iteration_time()
    skewed = partial(coverage.skewed_coverage, experts=model.num_local_experts, top_k=model.num_experts_per_tok)
    share = coverage.measured_coverage if model == QWEN else skewed
    return tuple(
        serve(draw, model, time, share, layered=layered, granularity=granularity) for draw in arrivals(dataset, rate)
    )


_FIGURES: dict[str, Callable[[Served], float]] = {
    "ttft": lambda run: float(run.ttft.mean()),
    "ttft_p99": lambda run: float(np.quantile(run.ttft, 0.99)),
    "tbt": lambda run: float(run.gaps.mean()),
    "tbt_p99": lambda run: float(np.quantile(run.gaps, 0.99)),
    "end_to_end": lambda run: float(run.end_to_end.mean()),
    "gigabytes": lambda run: run.expert_bytes / REQUESTS / 1e9,
    "millijoules": lambda run: 1e3 * run.joules_per_token(energy_model(), QWEN),
}
"""Figures of a run: times [s], reads per request [GB], energy per token [mJ]."""


def _mean(figure: str, dataset: str, rate: float, layered: bool, granularity: int = 512) -> float:
    return float(np.mean([_FIGURES[figure](run) for run in served(dataset, rate, layered, granularity)]))


def _played(given: Inputs) -> Value:
    return _mean(given["figure"], given["dataset"], given["rate"], given["layered"], given.get("chunk", 512))


def _played_latency(given: Inputs) -> Value:
    """A latency of Table 8 [s]."""
    runs = served("arxiv", given["rate"], given["layered"], model=models[given["model"]])
    return float(np.mean([_FIGURES[given["figure"]](run) for run in runs]))


def _played_change(given: Inputs) -> Value:
    """Change from chunked to layered prefill, each at its own rate [%]."""
    chunked = _mean(given["figure"], given["dataset"], given["rate"], layered=False)
    layered = _mean(given["figure"], given["dataset"], given.get("layered_rate", given["rate"]), layered=True)
    return 100 * float(layered_prefill.relative_change(layered, chunked))


def _attained(given: Inputs) -> Value:
    """True if the target share of the requests meets the SLO."""
    text = published("layered_prefill")
    slo = Slo(**text["slo"][f"qwen_{given['dataset']}"])
    runs = served(given["dataset"], given["rate"], given["layered"])
    return bool(np.mean([run.attainment(slo) for run in runs]) >= text["slo"]["attainment"])


# ------------------------------------------------------------------------------------------------- without a queue


def _skewed(given: Inputs) -> Value:
    return 100 * float(
        coverage.skewed_coverage(given["tokens"], experts=QWEN.num_local_experts, top_k=QWEN.num_experts_per_tok)
    )


def _never_above_uniform(given: Inputs) -> Value:
    measured = np.asarray(coverage.measured_coverage(given["tokens"]))
    even = coverage.uniform_coverage(given["tokens"], experts=QWEN.num_local_experts, top_k=given["top_k"])
    return bool(np.all(measured <= even))


def _tokens_per_expert(given: Inputs) -> Value:
    return float(given["tokens"] * QWEN.num_experts_per_tok / QWEN.num_local_experts)


def _prompt_gigabytes(given: Inputs) -> Value:
    """Expert weights that are read for one prompt if every chunk reads every expert [GB]."""
    full = QWEN.routed_bytes
    read, _ = layered_prefill.prefill_traffic(full, given["prompt"], 0, np.ones_like, chunk=given["chunk"])
    return float(read) / 1e9


def _groups(given: Inputs) -> Value:
    return float(layered_prefill.layer_groups(given["prompt"], models[given["model"]].num_hidden_layers))


def _model(given: Inputs) -> Value:
    model = models[given["model"]]
    sizes = {
        "total": model.params / 1e9,
        "experts": model.num_local_experts,
        "top_k": model.num_experts_per_tok,
        "ratio": model.num_local_experts / model.num_experts_per_tok,
        "hidden": model.hidden_size,
        "kv": model.kv_bytes_per_token("bf16") / 1024,
        "kv_gpu": model.kv_bytes_per_token("bf16") / 1024 / 2,
    }
    return float(sizes[given["size"]])


def _drawn(given: Inputs) -> Value:
    """A statistic of lengths that are drawn here."""
    draws = [getattr(draw, given["part"]) for draw in arrivals(given["dataset"], 1.0)]
    lengths = np.concatenate(draws)
    statistics = {"mean": lengths.mean(), "p90": np.quantile(lengths, 0.9), "std": lengths.std()}
    return float(statistics[given["of"]])


def _tbt_slo(given: Inputs) -> Value:
    """SLO on the time between tokens: a multiple of the time of a batch of decodes at a context [ms]."""
    time = iteration_time()
    batch = given["batch"]
    kv = batch * given["context"] * QWEN.kv_bytes_per_token("bf16")
    read = QWEN.routed_bytes * float(coverage.measured_coverage(batch)) + kv
    one = read / time.bandwidth + time.per_token * batch + time.fixed
    return float(1e3 * given["times"] * one)


def _change(given: Inputs) -> Value:
    """Change between two printed figures [%]."""
    text = published("layered_prefill")
    new, old = (text[given["table"]][given["row"]][name] for name in (given["new"], given["old"]))
    return 100 * float(layered_prefill.relative_change(new, old))


def _rate_change(given: Inputs) -> Value:
    return 100 * float(layered_prefill.relative_change(given["new"], given["old"]))


def _floor_terabytes(given: Inputs) -> Value:
    """Least bytes that the chunks of a number of mean prompts read, without their decodes [TB]."""
    prompt = published("layered_prefill")["lengths"][given["dataset"]]["prompt"]["mean"]
    chunks = prompt / given["chunk"]
    one = QWEN.routed_bytes * float(coverage.measured_coverage(given["chunk"]))
    return float(given["requests"] * chunks * one / 1e12)


def _power(given: Inputs) -> Value:
    """Power of both GPUs that an energy per token implies [W]."""
    lengths = published("layered_prefill")["lengths"]["arxiv"]
    tokens = lengths["prompt"]["mean"] + lengths["output"]["mean"]
    return float(layered_prefill.mean_power(given["joules"], given["rate"], tokens))


COMPUTE = {
    "lp.table1": _skewed,
    "lp.skew": _never_above_uniform,
    "lp.per_expert": _tokens_per_expert,
    "lp.fig2": _prompt_gigabytes,
    **dict.fromkeys((f"lp.table2.{figure}" for figure in _FIGURES), _played),
    "lp.table3": _model,
    "lp.table3.kv": _model,
    "lp.table4": _drawn,
    "lp.table5": _tbt_slo,
    "lp.table6.chunked": _played,
    "lp.table6.layered": _played,
    "lp.fig3": _attained,
    "lp.t7": _change,
    "lp.t7.played": _played_change,
    "lp.t7.floor": _floor_terabytes,
    "lp.e2e": _change,
    "lp.sim.e2e": _played,
    "lp.t8": _change,
    "lp.t8.rate": _rate_change,
    "lp.t8.played": _played,
    "lp.t8.latency": _played_latency,
    "lp.t8.played.change": _played_change,
    "lp.t8.power": _power,
    "lp.G": _groups,
}
