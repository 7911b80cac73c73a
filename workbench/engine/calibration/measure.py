"""Measures this computer's rates for `Machine.local`: kernels alone, never a whole model (that is law 10)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median

import numpy as np
import psutil
import torch

from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver
from workbench.engine.lanes.executor import Executor
from workbench.engine.loading.tensors import Tensors
from workbench.engine.model.kv_cache import KVCache
from workbench.engine.model.operations import OPERATIONS
from workbench.engine.model.ops import Ops, RowLayout
from workbench.hardware import Device, Link, Machine, usable_cores
from workbench.hardware.profile import Cores
from workbench.hardware.system import System
from workbench.kernels import FewLinear, fits_few_rows, linear
from workbench.models import ModelConfig
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.schedules.plan import Task
from workbench.stages import Op, combine, experts, out_proj, qkv, route

_ROWS = 256
_WIDE = 1024
_INNER = 3584
_CONTEXT = 512
_TINY = ModelConfig("tiny", 1, 64, 64, 4, 2, 16, 4, 2, 64, 64, dtype="fp32")


def measure_machine() -> Machine:
    """Rates of this computer, whose CPU computes both lanes.

    gpu lane: torch GEMM at 256 rows and weight reading at one row, with the lane's own threads; a quarter of the
    memory. cpu lane: the decode-attention kernel's KV rate times its threads, and torch GEMM. link: copies of 32 MB
    by one thread, which take a core for as long. Fixed times per operation and per hand-over come from tiny
    operations and empty tasks.
    """
    cores = Cores.of(usable_cores())
    memory = float(psutil.virtual_memory().total)
    per_op = cpu_overhead()
    gpu = Device(f"torch on {cores.gpu} core(s)", memory / 4, _weight_rate(cores.gpu), gemm_rates(cores.gpu), per_op)
    attention = attention_rate(_CONTEXT) * cores.cpu
    cpu = Device(f"Numba and torch on {cores.cpu} core(s)", memory * 3 / 4, attention, gemm_rates(cores.cpu), per_op)
    rate = _copy_rate()
    hop = dispatch(HostDriver())
    today = datetime.now(UTC).isoformat(timespec="seconds")
    cores = replace(cores, mover=1 / rate)
    return Machine(
        f"local: {cpu_name()}", gpu, cpu, Link(rate, rate, hop), host=platform.node(), measured=today, cores=cores
    )


def seconds_of(work: Callable[[], object], repeats: int = 7) -> float:
    """Seconds of some work, the median of several repetitions behind two that warm up."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)


def gemm_rates(threads: int) -> tuple[tuple[str, float], ...]:
    """FLOP per second of torch's products of 256 rows, by type of numbers; torch keeps the threads."""
    torch.set_num_threads(threads)
    rates = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        x = torch.randn(_ROWS, _WIDE, dtype=dtype)
        weight = torch.randn(_INNER, _WIDE, dtype=dtype)
        taken = seconds_of(partial(linear, x, weight))
        rates.append((name, 2.0 * _ROWS * _WIDE * _INNER / taken))
    return tuple(rates)


def _weight_rate(threads: int) -> float:
    """Bytes per second at which one row meets 16 weight matrices that no cache holds."""
    torch.set_num_threads(threads)
    matrices = [torch.randn(_INNER, _WIDE).bfloat16() for _ in range(16)]
    row = torch.randn(1, _WIDE).bfloat16()
    if fits_few_rows(matrices[0]):
        stages = [partial(FewLinear(matrix), threads=threads) for matrix in matrices]
    else:
        stages = [partial(linear, weight=matrix) for matrix in matrices]
    taken = seconds_of(lambda: [stage(row) for stage in stages])
    return sum(matrix.nbytes for matrix in matrices) / taken


def attention_rate(context: int) -> float:
    """Bytes of KV per second of the decode-attention kernel: 32 sequences of `context` tokens, group size 4, bf16."""
    model = ModelConfig("attention", 1, 1024, 64, 16, 4, 64, 2, 1, 64, context)
    width = context // 16
    cache = KVCache(model, 32 * width, 16, "bf16")
    table = np.random.default_rng(0).permutation(32 * width).reshape(32, width).astype(np.int32)
    positions = torch.zeros(32, dtype=torch.int64)
    layout = RowLayout([], positions, np.zeros(32, np.int64), table, np.full(32, context, np.int64))
    q = torch.randn(32, model.q_size)
    return 32 * context * model.kv_bytes_per_token("bf16") / seconds_of(lambda: cache.attend(0, layout, q))


def _copy_rate() -> float:
    source = np.ones(1 << 25, np.int8)
    target = np.ones(1 << 25, np.int8)
    return source.nbytes / seconds_of(lambda: np.copyto(target, source), repeats=15)


def cpu_overhead() -> float:
    """Time of an operation on one thread beyond its work [s]."""
    torch.set_num_threads(1)
    return operation_overhead(HostDriver())


def operation_overhead(driver: Driver) -> float:
    """Mean time of the built-in operations on four rows of a model so small that arithmetic is nothing."""
    stream = driver.stream("gpu")
    with stream.issuing():
        ops = Ops(_TINY, device=driver.device)
    layout = RowLayout([], torch.arange(4), np.arange(4), np.zeros((4, 1), np.int32), np.ones(4, np.int64))
    rows = {"x": torch.randn(4, 64), "attn": torch.randn(4, 64), "h": torch.randn(4, 64), "routed": torch.randn(4, 64)}
    rows["gates"] = torch.tensor([[0.0, 1.0, 0.5, 0.5]] * 4)
    square = torch.randn(64, 64)
    pair = {"gate_up": torch.randn(4, 128, 64), "down": torch.randn(4, 64, 64)}
    weights: dict[Op, Tensors] = {
        qkv: {"norm": torch.ones(64), "proj": torch.randn(128, 64)},
        out_proj: {"proj": square},
        route: {"norm": torch.ones(64), "gate": torch.randn(4, 64)},
        experts: pair,
        combine: {},
    }
    calls = list[Callable[[], object]]()
    with stream.issuing():
        for op, held in weights.items():
            read = {buffer: rows[buffer].to(driver.device) for buffer in op.reads}
            there = {name: tensor.to(driver.device) for name, tensor in held.items()}
            calls.append(partial(getattr(ops, OPERATIONS[op]), layout, read, there))

    def compute() -> None:
        with stream.issuing():
            for call in calls:
                call()
        stream.finish()

    return seconds_of(compute, repeats=31) / len(calls)


def dispatch(driver: Driver) -> float:
    """Mean time from the end of a task to the start of the next on another lane."""
    lanes = [Node(NodeKind.SEGMENT, "A", "gpu"), Node(NodeKind.MOVE, "H", "h2d")]
    tasks = [Task(lanes[i % 2], 0, 0, (i - 1,) if i else ()) for i in range(100)]
    executor = Executor(1e9, 1e9, throttled=False, packet_seconds=1e-3, driver=driver)
    try:
        return seconds_of(lambda: executor.run(tasks, [lambda: None] * len(tasks)), repeats=9) / len(tasks)
    finally:
        executor.close()


def cpu_name() -> str:
    name = System().cpu_name or platform.processor() or platform.machine()
    return f"{name}, {usable_cores()} cores"
