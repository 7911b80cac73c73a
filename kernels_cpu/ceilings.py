"""Measured ceilings of CPU kernels: the rate of sequential reads from memory, and of multiply-adds."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from .arguments import Operand, checked, contiguous, host_array
from .attention.operands import check_blocks
from .codegen.compiled import compiled, emitted, literal
from .codegen.vector_ir import F64, I32, I64, Emitter
from .declarations import public
from .machine.features import CodePath, features, has
from .threads.pull import pull
from .threads.runs import split
from .threads.task_counts import fetch_add, next_task, task_done
from .threads.team import side_by_side, team_size

_SUMS = 16
"""Number of running sums: enough to hide the latency of loads."""
_PRODUCTS = 12
"""Number of running sums of multiply-adds: enough to hide their latency, and with both constants they fit the 16
registers of AVX2. With 16 sums a Zen 3 core reached half of its rate."""
_CHUNK = 1 << 20
"""Bytes per task."""
_READ = 1024
"""Bytes that are read together, on every code path; remainders are left out."""


@emitted
def _read(typing: Any, lanes: Any, address: Any, steps: Any) -> Any:
    """The sum of the 32-bit words of `steps` times 16 registers; steps >= 1."""
    width = literal(lanes)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, width)
        size = 4 * width

        def body(index: Any, sums: list[Any]) -> list[Any]:
            place = e.at(arguments[1], builder.mul(index, I64(size * _SUMS)))
            return [builder.add(s, e.load(e.at(place, size * n), e.i32s, 4)) for n, s in enumerate(sums)]

        sums = e.loop(arguments[2], [e.iconst(0)] * _SUMS, body)
        whole = e.across(functools.reduce(builder.add, sums), builder.add)
        return builder.zext(builder.extract_element(whole, I32(0)), I64)

    return types.int64(lanes, types.int64, types.int64), emit


@emitted
def _multiply_add(typing: Any, lanes: Any, pairs: Any, steps: Any) -> Any:
    """Compute `steps` times 12 registers of multiply-adds, of fp32 or bf16 pairs; return a sum that depends on all."""
    width = literal(lanes)
    in_pairs = literal(pairs)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, width)
        factor = e.const(0.999)
        addend = e.const(1e-3)

        def body(_: Any, sums: list[Any]) -> list[Any]:
            if in_pairs:
                return [e.dot_bf16(value, factor, addend) for value in sums]
            return [e.fma(value, factor, addend) for value in sums]

        sums = e.loop(arguments[2], [e.const(float(n)) for n in range(_PRODUCTS)], body)
        whole = e.across(functools.reduce(builder.fadd, sums), builder.fadd)
        return builder.fpext(builder.extract_element(whole, I32(0)), F64)

    return types.float64(lanes, pairs, types.int64), emit


def _vector_lanes() -> int:
    """Lanes of the code path's registers; 4 on the portable path, which every 64-bit CPU has."""
    return features().lanes or 4


@functools.cache
def _reader(lanes: int) -> Any:
    step = 4 * lanes * _SUMS

    @compiled()
    def read(counter: int, base: int, size: int, sums: Any) -> None:
        start = next_task(counter) * _CHUNK
        while start < size:
            fetch_add(sums.ctypes.data, _read(lanes, base + start, min(_CHUNK, size - start) // step))
            task_done(counter)
            start = next_task(counter) * _CHUNK

    return read


@public
def read_memory(memory: Operand, *, threads: int = 1) -> int:
    """Read an array sequentially, except for a remainder below 1 KiB; return the sum of its 32-bit words.

    Parameters
    ----------
    memory : (N,) or with more axes, ndarray or CPU tensor, C-contiguous
    threads : int
        Number of threads, which take tasks of 1 MiB.

    Raises
    ------
    TypeError
        If `memory` is neither array nor tensor.
    ValueError
        If it is not contiguous.

    Examples
    --------
    >>> read_memory(np.ones(1024, np.int32))
    1024
    """
    read = contiguous("memory", host_array("memory", memory))
    size = read.nbytes // _READ * _READ
    reader = _reader(_vector_lanes())
    return _summed(reader, (read.ctypes.data, size), -(-size // _CHUNK), team_size(threads))


def _summed(reader: Any, operands: tuple[Any, ...], tasks: int, threads: int) -> int:
    """The sum over all tasks of a reader, run by the same task queue as `decode_attention`."""
    sums = np.zeros(1, np.int64)
    pull(reader, (*operands, sums), min(threads, tasks))
    return int(sums[0])


@functools.cache
def _block_reader(lanes: int) -> Any:
    step = 4 * lanes * _SUMS

    @compiled()
    def read(counter: int, base: int, halves: int, block: int, row: int, table: Any, tasks: Any, sums: Any) -> None:
        index = next_task(counter)
        while index < len(tasks):
            whole = 0
            s = tasks[index, 0]
            token = tasks[index, 1]
            end = tasks[index, 2]
            while token < end:
                page = token // block
                count = min((page + 1) * block, end) - token
                place = base + (table[s, page] * halves * block + token - page * block) * row
                steps = count * row // _READ * (_READ // step)
                for half in range(halves if steps else 0):
                    whole += _read(lanes, place + half * block * row, steps)
                token += count
            fetch_add(sums.ctypes.data, whole)
            task_done(counter)
            index = next_task(counter)

    return read


@public
def read_blocks(kv: Operand, table: Operand, lengths: Operand, *, threads: int = 1) -> int:
    """Read a paged cache in the order of `decode_attention` without other computation; return the sum of its words.

    Parameters
    ----------
    kv : (P, K, 2, b, D), C-contiguous
    table : (B, W) int32
    lengths : (B,) int64
        As of `decode_attention`. A remainder below 1 KiB of the rows of each block and head is not read.
    threads : int
        Number of threads, which take runs of tokens as tasks, the longest first.

    Raises
    ------
    TypeError, ValueError
        As `decode_attention`.

    Examples
    --------
    >>> kv = np.ones((2, 1, 2, 16, 16), np.int32)
    >>> read_blocks(kv, np.array([[1]], np.int32), np.array([16]))
    512
    """
    cache = contiguous("kv", host_array("kv", kv))
    blocks = contiguous("table", checked("table", table, "B W", np.int32))
    spans = checked("lengths", lengths, "B", np.int64)
    if cache.ndim != 5 or 0 in cache.shape[1:]:
        raise ValueError(f"kv must have shape (P, K, 2, b, D) with K, b and D >= 1, not {cache.shape}: reshape it.")
    pages, kv_heads, halves, block, dim = cache.shape
    if len(blocks) != len(spans):
        raise ValueError(f"table must have one row per length, {len(spans)}, not {len(blocks)}: pass the same batch.")
    check_blocks(blocks, spans, pages, block, window=None)
    tasks, _ = split(np.zeros_like(spans), spans)
    operands = cache.ctypes.data, kv_heads * halves, block, dim * cache.itemsize, blocks, tasks
    return _summed(_block_reader(_vector_lanes()), operands, len(tasks), team_size(threads))


@functools.cache
def _multiplier(lanes: int, pairs: bool) -> Any:
    @compiled()
    def multiply(steps: int) -> float:
        total: float = _multiply_add(lanes, pairs, steps)
        return total

    return multiply


@public
def multiply_add(steps: int = 2_000_000, *, threads: int = 1, bf16: bool = False) -> float:
    """Execute multiply-adds on `threads` cores at their full rate; return the number of FLOP.

    With the default `steps` it takes 5 to 20 ms, so that the start of the threads does not count.

    Parameters
    ----------
    steps : int
        Times that each core computes 12 registers.
    threads : int
        Number of cores.
    bf16 : bool
        True for products of bf16 added in fp32, by AVX512_BF16; a CPU without it multiplies fp32 in any case.

    Examples
    --------
    >>> multiply_add(1000) >= 2 * 4 * 12 * 1000
    True
    """
    lanes = _vector_lanes()
    pairs = bf16 and lanes == CodePath.AVX512.value and has("avx512bf16")
    multiplier = _multiplier(lanes, pairs)
    side_by_side(lambda: multiplier(steps), threads)
    return (4.0 if pairs else 2.0) * lanes * _PRODUCTS * steps * threads
