"""Experts in slices over NUMA nodes, on a topology made up of this computer's cores."""

import functools
import importlib
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_cpu import Format, NodeExperts, experts_by_node, fused_moe, fused_moe_reference, numa_nodes, pack_experts
from kernels_cpu.threads.team import on_node, usable_cpus

fused = importlib.import_module("kernels_cpu.experts.fused_moe")
CPUS = sorted(usable_cpus())
NODES = [{CPUS[0]}, {CPUS[-1]}]


def layer(inner: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((3, 2 * inner, 96), dtype=np.float32)
    return gate_up, rng.standard_normal((3, 96, inner), dtype=np.float32)


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    h, weights = rng.standard_normal((9, 96), dtype=np.float32), rng.random((9, 2), dtype=np.float32)
    return h, np.array([rng.permutation(3)[:2] for _ in range(9)]), weights


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("nodes", [NODES, [{CPUS[0]}], [{CPUS[0]}] * 3])
def test_slices_give_what_the_whole_gives(form, nodes):
    whole = pack_experts(*layer(384), format=form)
    sliced = experts_by_node(whole, nodes=nodes)
    assert sum(part.down.dim for part in sliced.slices) == 384
    assert sliced.nbytes == whole.nbytes
    h, ids, weights = batch()
    want = fused_moe_reference(h, whole, ids, weights)
    found = fused_moe(h, sliced, ids, weights, out=np.empty_like(h))
    assert np.linalg.norm(found - want) / np.linalg.norm(want) < (
        2e-2 if form.scaled else 1e-2 if form is Format.BF16 else 1e-6
    )
    np.testing.assert_array_equal(fused_moe(h, sliced, ids, weights, threads=1), found)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_teams_have_a_thread_each_and_no_more_than_cpus_or_than_there_are(threads, cpus):
    threads = max(threads, len(cpus))
    shares = fused._shares(threads, cpus)
    assert all(1 <= share <= own for share, own in zip(shares, cpus, strict=True))
    assert sum(shares) <= threads
    if threads >= 2 * sum(cpus):
        assert shares == cpus


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_more_threads_work_than_were_asked_for(threads, monkeypatch):
    sliced = experts_by_node(pack_experts(*layer(384)), nodes=NODES * 2)
    lock = threading.Lock()
    at_work = most = calls = 0

    def noted(call, *rest):
        nonlocal at_work, most, calls
        share = rest[-2]
        with lock:
            calls += 1
            at_work += share
            most = max(most, at_work)
        time.sleep(0.02)  # so that those that may work at once do
        try:
            call(*rest)
        finally:
            with lock:
                at_work -= share

    h, ids, weights = batch()
    want = fused_moe(h, sliced, ids, weights)
    monkeypatch.setattr(fused, "_call", functools.partial(noted, fused._call))
    np.testing.assert_array_equal(fused_moe(h, sliced, ids, weights, threads=threads), want)
    assert calls == 4
    assert most <= threads


def test_a_node_s_threads_stay_on_its_cpus():
    for node in map(frozenset, NODES):
        assert on_node(lambda: os.sched_getaffinity(0), node).result() == node
    assert frozenset(os.sched_getaffinity(0)) == usable_cpus()


def test_nodes_are_read_from_the_system_and_limited_to_what_this_process_may_use(tmp_path):
    for name, cpus in {"node10": str(CPUS[0]), "node2": f"{CPUS[-1]},4000-4003", "node3": "4004", "node4": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus + "\n")
    assert numa_nodes(tmp_path) == (frozenset({CPUS[-1]}), frozenset({CPUS[0]}))
    assert numa_nodes(tmp_path / "none") == (usable_cpus(),)


@pytest.mark.parametrize("nodes", [[], [set()], [{0}] * 5])
def test_nodes_that_make_no_slices_are_refused(nodes):
    with pytest.raises(ValueError, match="each have a CPU and be at most 4, the pieces of the inner dim 512"):
        experts_by_node(pack_experts(*layer(512), format="int8"), nodes=nodes)


def test_experts_with_a_part_of_a_block_stay_whole():
    whole = pack_experts(*layer(400))
    assert whole.pieces == 1
    assert experts_by_node(whole, nodes=NODES[:1]).slices == (whole,)
    with pytest.raises(ValueError, match="or the experts whole"):
        experts_by_node(whole, nodes=NODES)


def test_a_slice_whose_node_is_not_for_the_calling_thread_is_computed_where_it_may_run():
    sliced = experts_by_node(pack_experts(*layer(384)), nodes=NODES)
    elsewhere = NodeExperts(sliced.slices, (frozenset({CPUS[0]}), frozenset({5000})))
    h, ids, weights = batch()
    want = fused_moe(h, sliced, ids, weights)
    np.testing.assert_array_equal(fused_moe(h, elsewhere, ids, weights), want)
