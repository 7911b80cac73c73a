"""Experts in slices over NUMA nodes, on a topology made up of this computer's cores."""

import os

import numpy as np
import pytest

from kernels_cpu import fused_moe, fused_moe_reference, numa_nodes, pack_by_node, pack_experts
from kernels_cpu.threads.team import on_node, usable_cpus

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


@pytest.mark.parametrize("form", ["fp32", "int4"])
@pytest.mark.parametrize("nodes", [NODES, [{CPUS[0]}], [{CPUS[0]}] * 3])
def test_slices_give_what_the_whole_gives(form, nodes):
    gate_up, down = layer(400)
    sliced, whole = pack_by_node(gate_up, down, format=form, nodes=nodes), pack_experts(gate_up, down, format=form)
    assert sum(part.down.dim for part in sliced.slices) == 400
    h, ids, weights = batch()
    want = fused_moe_reference(h, whole, ids, weights)
    found = fused_moe(h, sliced, ids, weights, out=np.empty_like(h))
    assert np.linalg.norm(found - want) / np.linalg.norm(want) < (1e-6 if form == "fp32" else 2e-2)
    np.testing.assert_array_equal(fused_moe(h, sliced, ids, weights, threads=1), found)


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
    with pytest.raises(ValueError, match="nodes must each have a CPU and be at most 4, the groups of 128"):
        pack_by_node(*layer(400), nodes=nodes)
