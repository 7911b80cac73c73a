"""Layered against chunked prefill by the schedulers that serve for real, over six draws of requests and arrivals."""

from functools import cache

import numpy as np
import pytest

from tests.proofs import Proofs, proved
from workbench.reproductions.layered_prefill_online import objective, paper_machine, played
from workbench.reproductions.rows import published
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.layered_prefill import LayeredPrefill

SEEDS = range(6)
RATES = {"sharegpt": 4.4, "arxiv": 1.3}
REQUESTS = {"sharegpt": 400, "arxiv": 150}  # as few as tell the same as many


PROOFS = Proofs(
    "layered_prefill_online",
    ("tests/papers/test_layered_prefill_online.py",),
    ("data/catalogue/*.toml", "data/catalogue/published/layered_prefill*"),
    ("numpy",),
)


@cache
def runs(dataset):
    """Chunked and layered."""
    return [
        played(dataset, RATES[dataset], scheduler, requests=REQUESTS[dataset], seeds=SEEDS)
        for scheduler in (ChunkedPrefill(), LayeredPrefill())
    ]


@pytest.mark.parametrize(("dataset", "low", "high"), [("sharegpt", -0.13, -0.09), ("arxiv", -0.52, -0.35)])
@proved(PROOFS)
def test_layered_prefill_reads_fewer_experts(dataset, low, high):
    """Table 7: -12.0 % and -39 %; SPEC 7 says why its absolute numbers cannot be met."""
    chunked, layered = runs(dataset)
    changes = [b.expert_bytes / a.expert_bytes - 1 for a, b in zip(chunked, layered, strict=True)]
    assert low <= np.mean(changes) <= high
    assert max(changes) < 0
    return {"mean change": round(float(np.mean(changes)), 4)}


@proved(PROOFS)
def test_the_first_token_comes_in_less_than_half_the_time_on_arxiv():
    """Table 6: 2.80 against 1.24 s at 1.3 requests/s."""
    chunked, layered = ([run.ttft for run in each] for each in runs("arxiv"))
    assert np.mean(layered) <= 0.5 * np.mean(chunked)
    return {"ratio": round(float(np.mean(layered) / np.mean(chunked)), 4)}


@proved(PROOFS)
def test_gaps_between_tokens_and_whole_answers_are_shorter_on_arxiv():
    """Table 6 and section 5.5: 32.9 against 21.5 ms, 9.4 against 5.5 s."""
    chunked, layered = ([run.latencies.summary() for run in each] for each in runs("arxiv"))
    for what, ratio in (("tbt", 0.8), ("end_to_end", 0.75)):
        assert np.mean([one[what]["mean"] for one in layered]) < ratio * np.mean([one[what]["mean"] for one in chunked])


@proved(PROOFS)
def test_energy_per_token_falls_as_in_table_8():
    """-8.7 %, by the model that was fitted to it."""
    chunked, layered = ([run.energy.joules / run.processed for run in each] for each in runs("arxiv"))
    assert np.mean(layered) / np.mean(chunked) - 1 == pytest.approx(-0.087, abs=0.02)
    assert 1e3 * np.mean(chunked) == pytest.approx(published("layered_prefill")["energy"]["qwen"]["chunked"], rel=0.1)


@proved(PROOFS)
def test_layered_prefill_sustains_at_least_14_percent_more():
    """Section 5.2: 90 % attain the objective below 1.5, and at 1.7 requests/s or more; fewer do at higher rates."""

    def attained(scheduler, rate):
        runs = played("arxiv", rate, scheduler, requests=200, seeds=(2, 3, 4))
        return np.mean([run.attainment(objective("arxiv")) for run in runs])

    rate = 1.5
    chunked, layered = attained(ChunkedPrefill(), rate), attained(LayeredPrefill(), 1.14 * rate)
    assert chunked < 0.9 <= layered
    return {"chunked": round(float(chunked), 4), "layered": round(float(layered), 4)}


def test_the_machine_says_where_its_rates_come_from():
    assert paper_machine().gpu.bandwidth == published("layered_prefill")["sustained"]["bandwidth"]
    assert "calibrated in this project" in published("layered_prefill")["sustained"]["source"]["all"]
