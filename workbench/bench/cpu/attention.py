"""Decode attention for `bench cpu`: our kernel and its baselines in plainer Numba, torch, vLLM and C."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from workbench.bench.cpu import peers as cpu_peers
from workbench.bench.cpu.c_twin import Twin
from workbench.bench.cpu.work import PEERS, Implementation
from workbench.bench.experts import vllm
from workbench.kernels import CodePath, decode_attention, decode_attention_work, read_blocks

HEADS = 8
DIM = 128
BLOCK = 64
"""KV heads, head dim and tokens per block."""
POOL_DIM = HEADS * 2 * BLOCK
"""Elements of a block per head dim."""


@dataclass(frozen=True)
class DecodeCase:
    """A batch of decodes: a name, the lengths of its sequences, query heads per KV head, and the head dim."""

    name: str
    lengths: npt.NDArray[np.int64]
    group: int
    dim: int = DIM


IN_INT8 = ("64 sequences, G=1", "64 sequences, G=4")
"""Cases that are also timed on a cache of int8."""


def attention_cases() -> list[DecodeCase]:
    """Batches of 64 sequences of 128 to 2048 tokens, and batches of one sequence of 65,536 tokens."""
    short = uneven(64)
    long = np.array([65536])
    batches = [DecodeCase(f"64 sequences, G={group}", short, group) for group in (1, 4, 8)]
    return [*batches, *(DecodeCase(f"1 x 64k, G={group}", long, group) for group in (1, 4))]


def other_shapes() -> list[DecodeCase]:
    """Batches of other head dims with 4 query heads per KV head (larger dims, fewer sequences), and of other groups."""
    dims = [DecodeCase(f"D={dim}, G=4", uneven(64 * min(DIM, dim) // dim), 4, dim) for dim in (64, 80, 96, 192, 256)]
    return [*dims, *(DecodeCase(f"D={DIM}, G={group}", uneven(64), group) for group in (1, 2, 7, 16))]


def uneven(sequences: int) -> npt.NDArray[np.int64]:
    """Random lengths of 128 to 2048 tokens, the same in every call."""
    return np.random.default_rng(7).integers(128, 2049, sequences)


def pool_elements(cases: Sequence[DecodeCase]) -> int:
    """Elements of a pool that is large enough for any one of the cases."""
    return max(_blocks(case) * POOL_DIM * case.dim for case in cases)


def _blocks(case: DecodeCase) -> int:
    per_sequence = -(-case.lengths // BLOCK)
    return int(per_sequence.sum())


class Attention:
    """Decode attention of a case on a pool of cache blocks.

    Parameters
    ----------
    case : DecodeCase
    pool : (elements,) uint16
        Shared by all cases.
    peers : names
        Baselines to set up beside our own kernel.
    """

    peak = 0.85
    """Share of the multiply-add peak that counts as the roof: softmax and the widening of bf16 take the rest."""
    in_bf16 = 0.5
    """Queries times keys, both bf16; weights are fp32."""
    kv_itemsize = 2
    """Bytes of a number in the cache."""

    def __init__(self, case: DecodeCase, pool: npt.NDArray[np.uint16], *, peers: Collection[str] = PEERS) -> None:
        self.name = case.name
        self.case = case
        rng = np.random.default_rng(0)
        count = -(-case.lengths // BLOCK)
        self._kv = pool[: int(count.sum()) * POOL_DIM * case.dim].reshape(-1, HEADS, 2, BLOCK, case.dim)
        self._table = _tables(count, rng)
        drawn = rng.standard_normal((len(count), HEADS * case.group, case.dim), dtype=np.float32)
        self._q = (drawn.view(np.uint32) & 0xFFFF0000).view(np.float32)  # bf16 numbers, as those of a model in bf16
        self.out = np.empty_like(self._q)
        self.operands = self._q, self._kv, self._table, case.lengths
        heads = HEADS * case.group
        self.flops, self.bytes = decode_attention_work(
            heads, HEADS, case.dim, self.context, len(count), self.kv_itemsize
        )
        self.ceilings: dict[str, Implementation] = {"paged": self._read}
        self.missing: dict[str, str] = {}
        self.implementations: dict[str, Implementation] = {"ours": self._decode}
        for name in peers:
            try:
                self.implementations[name] = self._peer(name)
            except OSError as why:
                self.missing[name] = str(why)

    @property
    def context(self) -> int:
        """Tokens of all sequences."""
        return int(self.case.lengths.sum())

    def _peer(self, name: str) -> Implementation:
        makers: dict[str, Callable[[], Implementation]] = {
            "plain Numba": lambda: partial(self._decode, path=CodePath.PORTABLE),
            "naive Numba": lambda: cpu_peers.naive(*self.operands, self.out),
            "torch bf16": lambda: cpu_peers.eager(self._q, self._gathered, self.out),
            "vLLM": lambda: vllm.attention(*self.operands, self.out),
            "C": lambda: partial(Twin(self.case.group, self.case.dim, BLOCK), *self.operands, self.out),
        }
        return makers[name]()

    @cached_property
    def _gathered(self) -> cpu_peers.Gathered:
        return cpu_peers.gathered(*self.operands[1:])

    def _decode(self, threads: int, path: CodePath | None = None) -> None:
        decode_attention(*self.operands, out=self.out, threads=threads, path=path)

    def _read(self, threads: int) -> None:
        read_blocks(*self.operands[1:], threads=threads)


class Int8Attention(Attention):
    """Decode attention on a cache of int8 with scales, and on the cache of bf16 that it would replace."""

    kv_itemsize = 1
    in_bf16 = 0.0

    def __init__(self, case: DecodeCase, pool: npt.NDArray[np.uint16]) -> None:
        super().__init__(case, pool, peers=())
        self.name = f"{case.name}, INT8"
        self._numbers = pool.view(np.int8)[: self._kv.size].reshape(self._kv.shape)
        self._scales = np.random.default_rng(0).random(self._kv.shape[:4], dtype=np.float32) / 100
        self.implementations = {"ours": self._decode_numbers, "BF16 KV": self._decode}

    def _decode_numbers(self, threads: int) -> None:
        rest = self._table, self.case.lengths
        decode_attention(self._q, self._numbers, *rest, scales=self._scales, out=self.out, threads=threads)

    def _read(self, threads: int) -> None:
        read_blocks(self._numbers, self._table, self.case.lengths, threads=threads)


def _tables(count: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """Block table: the blocks of each sequence, taken at random from one pool."""
    blocks = rng.permutation(int(count.sum())).astype(np.int32)
    table = np.zeros((len(count), int(count.max())), np.int32)
    for row, (end, size) in enumerate(zip(np.cumsum(count), count, strict=True)):
        table[row, :size] = blocks[end - size : end]
    return table
