"""What kernels are measured against reads all that it says, in whichever order."""

import numpy as np
import pytest

from kernels_cpu import features, multiply_add, read_blocks, read_memory
from kernels_cpu.machine.features import has


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_word_is_read_once(threads):
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 3 << 20, dtype=np.int64).astype(np.int32)
    assert read_memory(words, threads=threads) % 2**32 == int(words.sum(dtype=np.int64)) % 2**32


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("block", [16, 64])
def test_the_blocks_of_each_sequence_are_read_up_to_its_length(threads, block):
    rng = np.random.default_rng(0)
    lengths = np.array([5 * block - 8, 8, block, 4 * block])  # of 8 rows of 128 bytes, 1 KiB, nothing is left over
    count = -(-lengths // block)
    kv = rng.integers(-(2**31), 2**31, (int(count.sum()) + 2, 3, 2, block, 32), dtype=np.int64).astype(np.int32)
    table = np.full((4, 5), -(2**30), np.int32)  # of what is past a length nothing may be read
    places, at, want = rng.permutation(len(kv)), 0, 0
    for s, (length, blocks) in enumerate(zip(lengths, count, strict=True)):
        table[s, :blocks] = places[at : at + blocks]
        at += blocks
        rows = kv[table[s, :blocks]].transpose(0, 3, 1, 2, 4).reshape(blocks * block, -1)
        want += int(rows[:length].sum(dtype=np.int64))
    assert read_blocks(kv, table, lengths, threads=threads) % 2**32 == want % 2**32


@pytest.mark.parametrize("bf16", [False, True])
def test_multiply_adds_are_counted_for_all_threads(bf16):
    assert multiply_add(100, threads=2, bf16=bf16) == 2 * multiply_add(100, bf16=bf16)


def test_products_of_bf16_are_twice_as_many_where_the_cpu_has_them():
    lanes = features().lanes
    each = 2 if lanes == 16 and has("avx512bf16") else 1
    assert multiply_add(100, bf16=True) == each * 2 * (lanes or 4) * 12 * 100
